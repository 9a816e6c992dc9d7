"""``python -m moekit explain --vllm DIR``: what moekit computes of a model inside vLLM."""

from __future__ import annotations

from typing import Any

import moekit
import moekit.checkpoint
from moekit import MoEProblem, ParallelConfig
from moekit.engines.kernels import names_dispatcher, too_slow
from moekit_vllm import versions
from moekit_vllm.settings import VLLM, Mode


def problems(
    folder: str, parallel: ParallelConfig, **fields: Any
) -> tuple[MoEProblem, tuple[str, ...]]:
    """Return the problem of a model's experts as vLLM's rank 0 passes it, and notes on vLLM.

    vLLM sums the ranks itself, so all of them pass the same tokens to moekit, unless
    MOEKIT_DISPATCHER names a dispatcher for the ranks' own tokens (``dp_size``).

    Args:
        parallel: The ranks of the engine: ``tp_size`` with tensor parallel experts, ``ep_size``
            with ``--enable-expert-parallel``.
        fields: Fields of `MoEProblem` in place of what the checkpoint says.
    """
    batches = parallel.dp_size if names_dispatcher() and parallel.tp_size == 1 else 1
    ranks = ParallelConfig(ep_size=parallel.ep_size, tp_size=parallel.tp_size, dp_size=batches)
    problem = moekit.checkpoint.problem_from_config(folder, parallel=ranks, **fields)
    version = versions.installed()
    mode, on_cpu = VLLM.mode(), problem.device.type == "cpu"
    whole = problem.parallel.ep_size == 1  # vLLM's CPU kernels compute no share of the experts
    cpu_kernel = mode is Mode.ON and on_cpu and whole
    plain = cpu_kernel and problem.quant.weight is None
    against = VLLM.unsupported(version) or too_slow(moekit.explain(problem), VLLM, plain)
    if mode is Mode.OFF:
        against.append(f"{VLLM.variable}=off")
    where = "in vLLM" if version is None else f"in vLLM {version}"
    if against:
        return problem, (f"{where} these layers stay with vLLM: {'; '.join(against)}",)
    unless = ", unless vLLM has a kernel for them on this CPU" if cpu_kernel and not plain else ""
    return problem, (f"{where} moekit computes these layers{unless}",)
