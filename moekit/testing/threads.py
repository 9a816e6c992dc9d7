"""The experts kit: concurrent calls of two threads, on one stream and on two."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moekit.testing.calls import pack
from moekit.testing.cases import make_case, random_weights
from moekit.testing.diagnose import assert_right
from moekit.testing.experts_base import ExpertsBase

# Seconds after which a thread goes on out of turn, as the other may wait for its lock; and while
# that one has not moved since.
_PATIENCE, _LESS_PATIENCE = 0.1, 0.001
# Seconds after which two threads count as blocked by each other.
_DEADLOCK = 600.0


class _Turns:
    """Lets two threads run alternately."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._alone = 0, False
        self._blocked = -1  # the thread that did not take its turn

    def pass_on(self, me: int) -> None:
        """Let the other thread go on, and wait until it passes the turn back, ends, or blocks."""
        with self._changed:
            other = self._turn = 1 - me
            if self._blocked == me:
                self._blocked = -1
            self._changed.notify_all()
            patience = _LESS_PATIENCE if self._blocked == other else _PATIENCE
            if not self._changed.wait_for(lambda: self._turn == me or self._alone, patience):
                self._blocked = other

    def end(self) -> None:
        with self._changed:
            self._alone = True
            self._changed.notify_all()


class _TakesTurns(TorchDispatchMode):
    """Gives the turn to the other thread after every operator."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._me = turns, me

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self._turns.pass_on(self._me)
        return result


def alternately(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both concurrently, each in a thread, and switch threads after every torch operator.

    Raises what one of them raises.
    """
    turns = _Turns()

    def run(me: int, function: Callable[[], None]) -> None:
        try:
            with _TakesTurns(turns, me):
                function()
        finally:
            turns.end()

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, me, f) for me, f in enumerate((first, second))]
        for future in running:
            future.result(_DEADLOCK)


class ExpertsThreads(ExpertsBase):
    """Concurrent calls of one kernel. See `ExpertsConformance`."""

    def test_threads(self) -> None:
        """Two threads call one kernel, each with its own inputs: scratch belongs to the call."""
        problem = self._problem()
        kernel = self._compose(problem, self._native)
        if self._interpreted:
            executor = sys.modules["triton.runtime.interpreter"].GridExecutor
            if not hasattr(executor.__call__, "one_thread_at_a_time"):
                self._skip("Triton's interpreter runs kernels of one thread")
        kernel.checked = False  # checks wait for the device, which would serialize the threads
        packed = pack(kernel, random_weights(problem))
        on_cpu = self._device().type == "cpu"
        sizes = ((self._T, 4), (3, self._T + 5))
        made = [[make_case(problem, T, key=(me, T)) for T in each] for me, each in enumerate(sizes)]
        module: Any = None if on_cpu else torch.get_device_module(self._device().type)
        for own in (False,) if on_cpu else (False, True):
            streams = [module.stream(module.Stream()) if own else nullcontext() for _ in made]
            if module is not None:
                module.synchronize()  # so that every stream sees inputs and weights
            outs: list[list[torch.Tensor]] = [[], []]

            def calls(me: int, streams: Any = streams, outs: Any = outs) -> None:
                with streams[me]:
                    for case in made[me] * (1 if on_cpu else 4):
                        outs[me].append(kernel(case.x, packed, case.routing))

            alternately(lambda: calls(0), lambda: calls(1))
            if module is not None:
                module.synchronize()
            for me, cases in enumerate(made):
                for index, out in enumerate(outs[me]):
                    case = cases[index % len(cases)]
                    what = f"thread {me} of two, call {index} with T={len(case.x)}"
                    assert_right(out, case, what)
