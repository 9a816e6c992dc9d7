"""moekit dispatchers over DeepEP, for the NVLink-connected GPUs of one host.

deepep_ht       STANDARD, `deep_ep.Buffer`: as many rows as arrive. The host waits for their
                number, except in CUDA graphs and where few can arrive
deepep_ll       BATCHED, `deep_ep.Buffer` in low-latency mode (NVSHMEM), for few tokens
deepep_elastic  STANDARD, `deep_ep.ElasticBuffer`: room for all rows, and the host never waits
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from moekit.plugin import (
    WIRE_SCHEMES,
    ActivationFormat,
    DispatcherSpec,
    MoEProblem,
    VendorLibrary,
    hookimpl,
)

RANKS = (2, 4, 8)
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)

_INSTALL_HINT = (
    "for torch 2.14: pip install 'sgl-deep-ep>=0.1.2,<0.2'; for others build it from source: "
    "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
)
_FROM_SOURCE = VendorLibrary(distribution="deep_ep", versions=">=1", install_hint=_INSTALL_HINT)
# The wheel of sglang's fork has version numbers that upstream's never had.
_WHEEL = replace(_FROM_SOURCE, distribution="sgl-deep-ep", versions=">=0.1,<1", module="deep_ep")


def library() -> VendorLibrary:
    """Return the DeepEP that is installed: the wheel of sglang's fork, or one built from source."""
    return _WHEEL if _WHEEL.version() and not _WHEEL.unsupported() else _FROM_SOURCE


def _describe(problem: MoEProblem) -> str:
    return library().describe()


def _check(problem: MoEProblem, most_local_experts: int, multiple: int) -> list[str]:
    ranks, reasons = problem.parallel.ep_size, []
    if ranks not in RANKS:
        reasons.append(f"ep_size={ranks} is not supported: choose 2, 4 or 8 ranks of one host")
    if (local := problem.num_physical_experts // ranks) > most_local_experts:
        reasons.append(f"{local} experts per rank exceed {most_local_experts}")
    if problem.hidden_size % multiple:
        reasons.append(f"hidden_size {problem.hidden_size} is not a multiple of {multiple}")
    return reasons if problem.parallel.moves_tokens else []


def check_ht(problem: MoEProblem) -> list[str]:
    # A row is sent in two halves of 16-byte words, and each half must fit a warp's shared memory.
    reasons = _check(problem, 128, 16 if problem.quant.activation is None else 32)
    if problem.hidden_size > 8176 and problem.parallel.moves_tokens:
        reasons.append(f"hidden_size {problem.hidden_size} exceeds 8176")
    return reasons


def check_elastic(problem: MoEProblem) -> list[str]:
    return _check(problem, 256, 256)


def check_ll(
    problem: MoEProblem, hidden_sizes: tuple[int, ...] = LOW_LATENCY_HIDDEN_SIZES
) -> list[str]:
    if not problem.parallel.moves_tokens:
        return []
    reasons = _check(problem, 1024, 1)
    if problem.hidden_size not in hidden_sizes:
        known = ", ".join(map(str, hidden_sizes))
        reasons.append(
            f"hidden_size {problem.hidden_size} has no compiled kernel (available: {known})"
        )
    # DeepEP reads this variable, and needs two entries for each token and two more.
    said = os.environ.get("NVSHMEM_QP_DEPTH", "1024")
    if not (said.isascii() and said.isdigit() and int(said) > 3):
        reasons.append(f"NVSHMEM_QP_DEPTH={said} must be a whole number above 3")
    elif (problem.max_num_tokens or 0) > (most := int(said) // 2 - 1):
        reasons.append(
            f"max_num_tokens={problem.max_num_tokens} exceeds {most}, half of "
            f"NVSHMEM_QP_DEPTH={said} less one: raise that variable, or use deepep_ht"
        )
    return reasons


def _prefer(priority: int, problem: MoEProblem) -> int:
    """Follow all other dispatchers in training, as the backward was tested on a stand-in only."""
    return priority - 20 if problem.training else priority


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    normal = DispatcherSpec(
        name="deepep_ht",
        target="moekit_deepep.dispatcher:NormalDispatcher",
        training="moekit_deepep.training:TrainableNormal",
        format=ActivationFormat.STANDARD,
        dtypes=frozenset({"bfloat16"}),
        devices=("cuda==9.0",),
        requires=("deep_ep", "triton"),
        install_hint=_INSTALL_HINT,
        priority=10,
        prefer=partial(_prefer, 10),
        moves_tokens=True,
        sliced_experts=False,
        shared_tokens=False,
        uneven_experts=False,
        most_top_k=32,
        wire_schemes=WIRE_SCHEMES,
        graph_safe=True,
        deterministic=True,
        check=check_ht,
        describe=_describe,
    )
    low_latency = replace(
        normal,
        name="deepep_ll",
        target="moekit_deepep.dispatcher:LowLatencyDispatcher",
        training=None,
        format=ActivationFormat.BATCHED,
        priority=6,
        prefer=None,
        most_top_k=11,
        wire_schemes=frozenset({"fp8_block"}),
        needs_capacity=True,
        deterministic=False,
        check=check_ll,
    )
    elastic = replace(
        normal,
        name="deepep_elastic",
        target="moekit_deepep.dispatcher:ElasticDispatcher",
        training="moekit_deepep.training:TrainableElastic",
        priority=8,
        prefer=partial(_prefer, 8),
        needs_capacity=True,
        deterministic=False,
        check=check_elastic,
    )
    return [normal, low_latency, elastic]
