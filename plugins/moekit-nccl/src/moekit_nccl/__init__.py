"""moekit dispatchers over `nccl.ep` of the wheel nccl-extensions, also for ranks on several hosts.

nccl_ht   STANDARD: one row per (token, rank), written into memory that the experts read
nccl_ll   BATCHED: a row per assignment, for few tokens
"""

from __future__ import annotations

from dataclasses import replace

from moekit.plugin import WIRE_SCHEMES, ActivationFormat, DispatcherSpec, MoEProblem, hookimpl

from . import library

# The library's limits.
_HOSTS, _RANKS_OF_HOST, _TOKENS, _SLOTS = 8, 8, 8192, 32
# Its low-latency kernels have a warp for each expert of a token, and few of them with many experts.
_LOW_LATENCY_SLOTS, _LOW_LATENCY_EXPERTS = 21, 1400
# On one host other dispatchers are faster, or were not compared.
_PRIORITY = -5
# The library forwards rows as bytes, so rows with a scale for 16 or 32 columns travel like others.
_WIRE_SCHEMES = WIRE_SCHEMES | {"mxfp8", "mxfp4_w4a8", "nvfp4"}


def _check(problem: MoEProblem, most_slots: int) -> list[str]:
    p, reasons = problem.parallel, library.unsupported()
    per_host, tokens = p.num_ranks // p.nodes, problem.max_num_tokens or 0
    if p.nodes > _HOSTS or per_host > _RANKS_OF_HOST:
        reasons.append(
            f"{p.nodes} hosts of {per_host} ranks exceed {_HOSTS} hosts of {_RANKS_OF_HOST}"
        )
    if tokens > _TOKENS:
        reasons.append(f"max_num_tokens={tokens} exceeds {_TOKENS}")
    if (slots := problem.top_k * p.tp_size) > most_slots:
        reasons.append(f"top_k * tp_size = {slots} exceeds {most_slots}")
    rows, activation = {problem.hidden_size * problem.dtype.itemsize}, problem.quant.activation
    if activation is not None and problem.quant.name in _WIRE_SCHEMES:
        rows.add(problem.hidden_size // (2 if activation.packed else 1))
    if any(nbytes % 16 for nbytes in rows):
        reasons.append(f"rows of hidden_size={problem.hidden_size} are not a multiple of 16 bytes")
    return reasons


def check_ht(problem: MoEProblem) -> list[str]:
    if not problem.parallel.moves_tokens:
        return []
    reasons, p = _check(problem, _SLOTS), problem.parallel
    if (experts := problem.num_physical_experts * p.tp_size // p.nodes) % 4:
        reasons.append(f"{experts} experts of a host, slices included, are not a multiple of 4")
    return reasons


def check_ll(problem: MoEProblem) -> list[str]:
    if not problem.parallel.moves_tokens:
        return []
    reasons = _check(problem, _LOW_LATENCY_SLOTS)
    if problem.hidden_size % 128:
        reasons.append(f"hidden_size {problem.hidden_size} is not a multiple of 128")
    if (experts := problem.num_physical_experts * problem.parallel.tp_size) > _LOW_LATENCY_EXPERTS:
        reasons.append(f"{experts} experts, slices included, exceed {_LOW_LATENCY_EXPERTS}")
    return reasons


def _prefer(problem: MoEProblem) -> int:
    """Return a priority above `naive` (0) between hosts, where other dispatchers do not serve."""
    return 1 if problem.parallel.nodes > 1 else _PRIORITY


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    high_throughput = DispatcherSpec(
        name="nccl_ht",
        target="moekit_nccl.dispatcher:HighThroughputDispatcher",
        training="moekit_nccl.training:TrainableHighThroughput",
        format=ActivationFormat.STANDARD,
        dtypes=frozenset({"bfloat16", "float16"}),
        devices=("cuda>=9.0",),
        requires=library.REQUIRES,
        install_hint=library.INSTALL_HINT,
        describe=library.LIBRARY.describe,
        priority=_PRIORITY,
        prefer=_prefer,
        moves_tokens=True,
        uneven_experts=False,
        most_ranks=_HOSTS * _RANKS_OF_HOST,
        wire_schemes=_WIRE_SCHEMES,
        needs_capacity=True,
        spans_hosts=True,
        graph_safe=True,
        check=check_ht,
    )
    low_latency = replace(
        high_throughput,
        name="nccl_ll",
        target="moekit_nccl.dispatcher:LowLatencyDispatcher",
        training=None,
        format=ActivationFormat.BATCHED,
        check=check_ll,
    )
    return [high_throughput, low_latency]
