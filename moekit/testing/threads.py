"""The experts kit, third part: calls from two threads at one time, on one stream and on two."""

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
from moekit.testing.diagnose import assert_close
from moekit.testing.experts_base import ExpertsBase
from moekit.testing.interpreter import in_kernel, prepare_once

# Seconds after which a thread goes on out of turn: the other one may wait for a lock that it holds.
_PATIENCE = 0.1
# Seconds after which two threads that still run have blocked each other.
_DEADLOCK = 600.0


class _Turns:
    """Two threads that go on by turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn, self._alone = 0, False

    def pass_on(self, me: int) -> None:
        """Lets the other thread go on, and waits until it has passed on, ended, or waits too."""
        with self._changed:
            self._turn = 1 - me
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == me or self._alone, _PATIENCE)

    def end(self) -> None:
        with self._changed:
            self._alone = True
            self._changed.notify_all()


class _TakesTurns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """After every operator of this thread, the other thread has its turn."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns, self._me = turns, me

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not in_kernel():  # no other thread could run one
            self._turns.pass_on(self._me)
        return result


def by_turns(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both at one time, each in a thread, which change after every torch operator.

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
    """Threads share a kernel. See `ExpertsConformance`."""

    def test_threads(self) -> None:
        """Two threads call one kernel, with inputs of their own: scratch belongs to the call."""
        problem = self._problem()
        kernel = self._compose(problem, self._native)
        if "triton" in sys.modules:
            prepare_once()  # Triton's interpreter then runs the kernels of one thread at a time
        kernel.checked = False  # it would wait for the device, and so keep the threads apart
        packed = pack(kernel, random_weights(problem))
        on_cpu = self._device().type == "cpu"
        sizes = ((self._T, 4), (3, self._T + 5))
        made = [[make_case(problem, T, key=(me, T)) for T in each] for me, each in enumerate(sizes)]
        module: Any = None if on_cpu else torch.get_device_module(self._device().type)
        for own in (False,) if on_cpu else (False, True):
            streams = [module.stream(module.Stream()) if own else nullcontext() for _ in made]
            if module is not None:
                module.synchronize()  # inputs and weights are there for every stream
            outs: list[list[torch.Tensor]] = [[], []]

            def calls(me: int, streams: Any = streams, outs: Any = outs) -> None:
                with streams[me]:
                    for case in made[me] * (1 if on_cpu else 4):
                        outs[me].append(kernel(case.x, packed, case.routing))

            by_turns(lambda: calls(0), lambda: calls(1))
            if module is not None:
                module.synchronize()
            for me, cases in enumerate(made):
                for index, out in enumerate(outs[me]):
                    case = cases[index % len(cases)]
                    what = f"thread {me} of two, call {index} with T={len(case.x)}"
                    assert_close(out, case.reference(), problem, what)
