"""FlashInfer for moekit: three dispatchers, experts and a fused kernel.

    flashinfer_alltoall            one-sided: ranks write tokens into other ranks' memory
    flashinfer_alltoall_two_sided  two-sided: ranks send tokens through FIFOs
    flashinfer_allgather           collectives of fixed size, which never wait on the host
    flashinfer_cutlass             experts: CUTLASS fused MoE (bf16, fp16, fp8)
    flashinfer_mega                fused kernel: dispatch, experts and combine (bf16, fp8 blocks)

The all-to-alls map the memory of the other GPUs of a host. This needs NVLink or PCIe peer access,
and a way to pass file descriptors between processes: root or ptrace permission for FlashInfer 0.6,
a temporary directory that all ranks share for 0.7.
"""

from dataclasses import replace

from moekit.plugin import (
    WIRE_SCHEMES,
    ActivationFormat,
    DispatcherSpec,
    ExpertsSpec,
    FusedSpec,
    MoEProblem,
    hookimpl,
)

from . import library

# Compiled into the library's kernels of every supported version; 0.7 also has 12, 14 and 18.
_ONE_SIDED_TOP_K = (1, 2, 4, 6, 8, 10, 16, 22)

_PUSHED_TOP_K = (1, 2, 4, 6, 8)

# Payloads are rows of bytes, so rows with a scale for 16 or 32 columns travel like others.
_WIRE_SCHEMES = WIRE_SCHEMES | {"mxfp8", "mxfp4_w4a8", "nvfp4"}

# Row sizes are multiples of 16 bytes (TMA), or of a scale's block.
_MULTIPLE = {"none": 8, "fp8_tensor_static": 16, "fp8_block": 128}


def _check_one_sided(problem: MoEProblem) -> list[str]:
    reasons = library.unsupported()
    if problem.top_k not in _ONE_SIDED_TOP_K:
        known = ", ".join(map(str, _ONE_SIDED_TOP_K))
        reasons.append(f"top_k={problem.top_k} has no compiled kernel (available: {known})")
    return reasons


def _check_two_sided(problem: MoEProblem) -> list[str]:
    reasons = library.unsupported()
    if problem.num_physical_experts % 4:
        reasons.append(f"{problem.num_physical_experts} experts are not a multiple of 4")
    rows = {problem.hidden_size * problem.dtype.itemsize}
    if (activation := problem.quant.activation) is not None:
        rows.add(problem.hidden_size // (2 if activation.packed else 1))
    if any(nbytes % 16 for nbytes in rows):
        reasons.append(f"rows of hidden_size={problem.hidden_size} are not a multiple of 16 bytes")
    return reasons


def _check_experts(problem: MoEProblem) -> list[str]:
    reasons = library.unsupported()
    if problem.quant.name == "fp8_block" and problem.dtype_name != "bfloat16":
        reasons.append(f"fp8_block computes in bfloat16 only, not in {problem.dtype_name}")
    return reasons


def _check_mega(problem: MoEProblem) -> list[str]:
    p, fp8, reasons = problem, problem.quant.name == "fp8_block", library.unsupported_mega()
    hidden, inner, step = p.hidden_size, p.local_intermediate_size, 128 if fp8 else 256
    if p.top_k not in _PUSHED_TOP_K:
        known = ", ".join(map(str, _PUSHED_TOP_K))
        reasons.append(f"top_k={p.top_k} has no compiled kernel (available: {known})")
    if hidden % step or inner % 128 or inner > 16384:
        reasons.append(
            f"hidden_size={hidden} must be a multiple of {step}, and a rank's intermediate size "
            f"{inner} of 128, up to 16384"
        )
    rows = p.parallel.dp_size * (p.max_num_tokens or 0) * p.top_k
    if rows * max(hidden, inner) > 2**32 and not fp8 or rows >= 2**31:
        reasons.append(f"max_num_tokens={p.max_num_tokens} makes too many rows ({rows})")
    return reasons


def _multiples(problem: MoEProblem) -> tuple[int, int]:
    multiple = _MULTIPLE.get(problem.quant.name, 1)
    return multiple, multiple


@hookimpl
def moekit_dispatchers() -> list[DispatcherSpec]:
    gather = DispatcherSpec(
        name="flashinfer_allgather",
        target="moekit_flashinfer.allgather:AllGatherDispatcher",
        format=ActivationFormat.STANDARD,
        priority=-10,
        moves_tokens=True,
        shared_tokens=False,
        wire_schemes=_WIRE_SCHEMES,
        needs_capacity=True,
        ids_dtype="int32",
        graph_safe=True,
        deterministic=True,
        spans_hosts=True,
    )
    one_sided = replace(
        gather,
        name="flashinfer_alltoall",
        target="moekit_flashinfer.dispatcher:OneSidedDispatcher",
        devices=("cuda>=9.0",),
        requires=(*library.REQUIRES, "pynvml"),
        install_hint=library.FLASHINFER.install_hint,
        describe=library.FLASHINFER.describe,
        priority=20,
        sliced_experts=False,
        uneven_experts=False,
        most_ranks=64,
        deterministic=False,
        spans_hosts=False,
        check=_check_one_sided,
    )
    two_sided = replace(
        one_sided,
        name="flashinfer_alltoall_two_sided",
        target="moekit_flashinfer.dispatcher:TwoSidedDispatcher",
        priority=4,
        most_ranks=None,
        most_top_k=32,
        check=_check_two_sided,
    )
    return [one_sided, two_sided, gather]


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
            install_hint=library.FLASHINFER.install_hint,
            describe=library.FLASHINFER.describe,
            check=_check_experts,
            multiples=_multiples,
            # gelu is missing: the library computes it with erf or with tanh, depending on the
            # kernel that its tuner picks.
            activations=frozenset({"silu", "swigluoai", "silu_no_mul", "relu2"}),
            reduces=True,
            graph_safe=True,
        )
    ]


@hookimpl
def moekit_fused() -> list[FusedSpec]:
    return [
        FusedSpec(
            name="flashinfer_mega",
            target="moekit_flashinfer.mega:PushKernel",
            dtypes=frozenset({"bfloat16"}),
            schemes=frozenset({"none", "fp8_block"}),
            devices=("cuda==9.0",),
            requires=(*library.REQUIRES, "pynvml", "einops"),
            install_hint=library.FLASHINFER.install_hint,
            describe=library.FLASHINFER.describe,
            priority=-5,
            check=_check_mega,
            activations=frozenset({"silu"}),
            silu_clamp=False,
            bias=False,
            moves_tokens=True,
            needs_capacity=True,
            ids_dtype="int32",
            graph_safe=True,
            deterministic=True,
            sliced_experts=False,
            shared_tokens=False,
            uneven_experts=False,
            most_ranks=32,
        )
    ]
