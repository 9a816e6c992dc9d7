"""The kernels of an engine's layers: one for each problem, explained in the engine's log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

import moekit
from moekit import Explanation, ModularKernel, MoEProblem
from moekit.engines.facts import refusal
from moekit.engines.mode import Engine
from moekit.problem.problem import summary
from moekit.runtime.agreement import exchange
from moekit.untrusted.code import describe as reason_of

# Seconds that a rank waits for the others: they load their weights at different speeds.
PEER_TIMEOUT = 600.0
Made = TypeVar("Made")
_SLOW = ("reference", "torch")  # experts that are right everywhere
# By problem: the group of its ranks, if they exchange tokens, and the kernel.
_kernels: dict[MoEProblem, tuple[Any, ModularKernel]] = {}


def names_dispatcher() -> bool:
    """Return whether MOEKIT_DISPATCHER names a dispatcher that moves tokens."""
    return os.environ.get("MOEKIT_DISPATCHER", "") not in ("", "local")


def kernel_for(
    problem: MoEProblem, engine: Engine, group: Callable[[], Any], cpu_kernel: bool
) -> ModularKernel:
    """Return the kernel for a problem, which equal problems share. Log once why it was chosen.

    Args:
        group: Returns the group of the expert-parallel ranks, for kernels that move tokens.
        cpu_kernel: The engine has a kernel for the layer on this CPU, and may use it.

    Raises:
        Unsupported: moekit has no kernel, or the engine's is faster.
    """
    ranks = group() if problem.parallel.moves_tokens else None
    known, kernel = _kernels.get(problem, (None, None))
    if kernel is None or known is not ranks:  # an earlier engine of this process had other ranks
        # Ids come from the engine's router, and checks by value would wait for the GPU.
        kernel = in_own_memory(
            lambda: moekit.compose(problem, group=ranks, checked=False, peer_timeout=PEER_TIMEOUT)
        )
        _kernels[problem] = ranks, kernel
    explanation = kernel.explanation
    assert explanation is not None
    if reasons := too_slow(explanation, engine, cpu_kernel):
        raise refusal(*reasons)
    expected = f"; {explanation.expected}" if explanation.expected else ""
    engine.say_once(
        f"moekit: {summary(problem)}: {explanation.chosen} ({explanation.why}){expected}"
    )
    return kernel


def in_own_memory(make: Callable[[], Made]) -> Made:
    """Return ``make()``, called in a new thread, so that its memory survives the engine's sleep.

    The thread that loads weights allocates from a pool that an engine may discard. Dispatchers need
    their counters and the addresses of other ranks' memory all the time.
    """
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> Made:
        with torch.accelerator.device_index(index):
            made = make()
            if index is not None:
                torch.accelerator.synchronize()  # the calling thread has another stream
            return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@contextmanager
def on_all_ranks(group: Any, engine: Engine) -> Iterator[None]:
    """Raise on every rank of a group if the context raises on one. Collective if group is given.

    The engine's kernels and moekit's move tokens in different ways, so a rank that
    alone left the layer to the engine would hang.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if group is not None:
        mine = "" if error is None else reason_of(error)
        said = exchange(f"load an MoE layer of {engine.name}", mine, group, PEER_TIMEOUT)
    if error is not None:
        raise error
    if group is not None and (failed := [f"rank {n}: {why}" for n, why in enumerate(said) if why]):
        raise refusal(f"other ranks leave it to {engine.name} ({'; '.join(failed)})")


def too_slow(explanation: Explanation, engine: Engine, cpu_kernel: bool = False) -> list[str]:
    """Return why the engine's kernels are the better choice; empty if moekit's are.

    cpu_kernel: The engine has a kernel for the layer on this CPU, and may use it.
    """
    problem, chosen = explanation.problem, explanation.chosen
    named = any(name.startswith("experts ") for name in explanation.named)
    if chosen is None or named or chosen.experts not in _SLOW:
        return []
    if problem.device.type != "cuda":
        if not cpu_kernel or problem.batch_invariant:
            return []
        return [
            f"{engine.name}'s own kernel is faster on this CPU than moekit's {chosen.experts!r}; "
            f"set {engine.variable}=require or MOEKIT_EXPERTS={chosen.experts} for moekit's"
        ]
    return [
        f"of moekit's installed backends only {chosen.experts!r} computes it on {problem.device}, "
        f"which is slower than {engine.name}'s kernels: install moekit's plugins/moekit-triton, or "
        f"set MOEKIT_EXPERTS={chosen.experts}"
    ]
