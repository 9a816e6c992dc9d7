"""FlashInfer for moekit: three dispatchers and one experts backend.

    flashinfer_alltoall            one-sided: ranks write tokens into each other's memory
    flashinfer_alltoall_two_sided  two-sided: the same through FIFOs between ranks
    flashinfer_allgather           collectives of fixed size, without the host's help; any device
    flashinfer_cutlass             experts: CUTLASS fused MoE (bf16, fp16, fp8)

The all-to-alls map memory of the other GPUs of a host, which takes NVLink or PCIe peer access and
the right to pass file descriptors between processes (root, or ptrace permission).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moekit.plugin import (
    WIRE_SCHEMES,
    ActivationFormat,
    DispatcherSpec,
    ExpertsSpec,
    MoEProblem,
    hookimpl,
)

from . import library

if TYPE_CHECKING:
    from moekit.plugin import Footprint

# Compiled into the library's kernels.
_ONE_SIDED_TOP_K = (1, 2, 4, 6, 8, 10, 16, 22)
_ONE_SIDED_RANKS = 64
_TWO_SIDED_TOP_K = 32

# What a row of an operand must divide by: 16 bytes for TMA, a scale's block.
_MULTIPLE = {"none": 8, "fp8_tensor_static": 16, "fp8_block": 128}


def _check_ranks(problem: MoEProblem) -> list[str]:
    parallel = problem.parallel
    if not parallel.moves_tokens:
        return []
    reasons = []
    if parallel.tp_size > 1:
        reasons.append(f"experts sliced over tp_size={parallel.tp_size} ranks are not supported")
    if parallel.dp_size != parallel.ep_size:
        reasons.append(
            f"every rank must have tokens of its own (dp_size={parallel.dp_size}, "
            f"ep_size={parallel.ep_size})"
        )
    if problem.num_physical_experts % parallel.ep_size:
        reasons.append(
            f"{problem.num_physical_experts} experts do not divide by ep_size={parallel.ep_size}; "
            "add redundant experts"
        )
    return reasons


def _check_one_sided(problem: MoEProblem) -> list[str]:
    reasons = [*library.FLASHINFER.unsupported(), *_check_ranks(problem)]
    if problem.top_k not in _ONE_SIDED_TOP_K:
        known = ", ".join(map(str, _ONE_SIDED_TOP_K))
        reasons.append(f"top_k={problem.top_k} is not compiled in (has {known})")
    if problem.parallel.ep_size > _ONE_SIDED_RANKS:
        reasons.append(f"ep_size={problem.parallel.ep_size} exceeds {_ONE_SIDED_RANKS} ranks")
    return reasons


def _check_two_sided(problem: MoEProblem) -> list[str]:
    reasons = [*library.FLASHINFER.unsupported(), *_check_ranks(problem)]
    if problem.top_k > _TWO_SIDED_TOP_K:
        reasons.append(f"top_k={problem.top_k} exceeds {_TWO_SIDED_TOP_K}")
    if problem.num_physical_experts % 4:
        reasons.append(f"{problem.num_physical_experts} experts are no multiple of 4")
    widths = {problem.dtype.itemsize}
    if problem.quant.activation is not None:
        widths.add(problem.quant.activation.torch_dtype.itemsize)
    if any(problem.hidden_size * width % 16 for width in widths):
        reasons.append(f"rows of hidden_size={problem.hidden_size} are no multiple of 16 bytes")
    return reasons


def _check_allgather(problem: MoEProblem) -> list[str]:
    parallel = problem.parallel
    ranks = parallel.ep_size * parallel.tp_size
    if parallel.moves_tokens and parallel.dp_size != ranks:
        return [
            f"every rank must have tokens of its own (dp_size={parallel.dp_size}, {ranks} ranks)"
        ]
    return []


def _check_experts(problem: MoEProblem) -> list[str]:
    reasons = library.FLASHINFER.unsupported()
    scheme, multiple = problem.quant.name, _MULTIPLE.get(problem.quant.name)
    if multiple is None:
        return reasons
    if scheme == "fp8_block" and problem.dtype_name != "bfloat16":
        reasons.append(f"{scheme} computes in bfloat16 only, not in {problem.dtype_name}")
    sizes = {"hidden_size": problem.hidden_size, "I": problem.local_intermediate_size}
    for name, size in sizes.items():
        if size % multiple:
            reasons.append(f"{name}={size} is no multiple of {multiple} ({scheme})")
    return reasons


def _footprint_one_sided(problem: MoEProblem) -> Footprint:
    from .footprint import one_sided

    return one_sided(problem)


def _footprint_two_sided(problem: MoEProblem) -> Footprint:
    from .footprint import two_sided

    return two_sided(problem)


def _footprint_allgather(problem: MoEProblem) -> Footprint:
    from .footprint import allgather

    return allgather(problem)


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    return [
        DispatcherSpec(
            name="flashinfer_alltoall",
            target="moekit_flashinfer.one_sided:OneSidedDispatcher",
            format=ActivationFormat.STANDARD,
            devices=("cuda>=9.0",),
            requires=(*library.REQUIRES, "pynvml"),
            install_hint=library.INSTALL_HINT,
            priority=20,
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            needs_capacity=True,
            ids_dtype="int32",
            graph_safe=True,
            footprint=_footprint_one_sided,
            check=_check_one_sided,
        ),
        DispatcherSpec(
            name="flashinfer_alltoall_two_sided",
            target="moekit_flashinfer.two_sided:TwoSidedDispatcher",
            format=ActivationFormat.STANDARD,
            devices=("cuda>=9.0",),
            requires=(*library.REQUIRES, "pynvml"),
            install_hint=library.INSTALL_HINT,
            priority=4,
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            needs_capacity=True,
            ids_dtype="int32",
            graph_safe=True,
            footprint=_footprint_two_sided,
            check=_check_two_sided,
        ),
        DispatcherSpec(
            name="flashinfer_allgather",
            target="moekit_flashinfer.allgather:AllGatherDispatcher",
            format=ActivationFormat.STANDARD,
            priority=-10,
            moves_tokens=True,
            wire_schemes=WIRE_SCHEMES,
            needs_capacity=True,
            ids_dtype="int32",
            graph_safe=True,
            deterministic=True,
            overlaps=True,
            spans_hosts=True,
            footprint=_footprint_allgather,
            check=_check_allgather,
        ),
    ]


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        ExpertsSpec(
            name="flashinfer_cutlass",
            target="moekit_flashinfer.experts:FlashInferCutlassExperts",
            format=ActivationFormat.STANDARD,
            dtypes=frozenset({"bfloat16", "float16"}),
            schemes=frozenset(_MULTIPLE),
            devices=("cuda==9.0",),
            requires=(*library.REQUIRES, "moekit_kernels"),
            install_hint=library.INSTALL_HINT,
            check=_check_experts,
            # gelu is missing: the library's kernels compute it by erf or by tanh, depending on
            # which its tuner picks.
            activations=frozenset({"silu", "swigluoai", "silu_no_mul", "relu2"}),
            reduces=True,
            graph_safe=True,
        )
    ]
