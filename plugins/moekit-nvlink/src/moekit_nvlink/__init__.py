"""A dispatcher for GPUs that reach each other over NVLink; it needs nothing but torch and Triton.

nvlink_ht   standard format: ranks write rows straight into the memory of the ranks that need
            them, and read the experts' output back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moekit.plugin import (
    WIRE_SCHEMES,
    ActivationFormat,
    DispatcherSpec,
    MoEProblem,
    hookimpl,
)

if TYPE_CHECKING:
    from moekit.plugin import Footprint

_MOST_TOP_K, _MOST_RANKS = 32, 64


def _check(problem: MoEProblem) -> list[str]:
    parallel, reasons = problem.parallel, []
    if problem.device.arch:
        reasons.append(f"needs NVIDIA GPUs, and was asked for {problem.device}")
    if problem.top_k > _MOST_TOP_K:
        reasons.append(f"top_k={problem.top_k} exceeds {_MOST_TOP_K}")
    if parallel.num_ranks > _MOST_RANKS:
        reasons.append(f"{parallel.num_ranks} ranks exceed {_MOST_RANKS}")
    if parallel.moves_tokens and parallel.dp_size != parallel.num_ranks:
        reasons.append(
            f"every rank must have tokens of its own (dp_size={parallel.dp_size}, "
            f"{parallel.num_ranks} ranks)"
        )
    if problem.hidden_size % 16:
        reasons.append(f"hidden_size must be a multiple of 16 (got {problem.hidden_size})")
    return reasons


def _footprint(problem: MoEProblem) -> Footprint:
    from .footprint import footprint

    return footprint(problem)


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="nvlink_ht",
            target="moekit_nvlink.dispatcher:NvlinkDispatcher",
            format=ActivationFormat.STANDARD,
            devices=("cuda>=8.0",),
            requires=("triton", "moekit_kernels"),
            install_hint="pip install moekit-nvlink",
            priority=-10,
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            needs_capacity=True,
            ids_dtype="int32",
            deterministic=True,
            graph_safe=True,
            check=_check,
            footprint=_footprint,
        )
    ]
