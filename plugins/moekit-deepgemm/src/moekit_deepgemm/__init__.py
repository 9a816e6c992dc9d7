"""DeepGEMM for moekit: experts `deepgemm` and `deepgemm_batched`, fused kernel `deepgemm_mega`.

Only the GEMMs of the experts are DeepGEMM's. Alignment, expert-sorted rows and the weighted sum
are moekit's, and the activation is this plugin's (kernels.py). The library is an installed
`deep_gemm`, or the copy inside vLLM's wheel, which is loaded without importing vLLM (library.py).
"""

from moekit.plugin import (
    ACTIVATIONS,
    ActivationFormat,
    ExpertsSpec,
    FusedSpec,
    MoEProblem,
    hookimpl,
)

from . import library

# Row sizes are multiples of a scale group (fp8) or of a swizzled tile (bf16).
_MULTIPLE = {"fp8_block": 128, "none": 64}


def _check(problem: MoEProblem) -> list[str]:
    return library.unsupported()


def _check_mega(problem: MoEProblem) -> list[str]:
    p, reasons = problem, library.unsupported_mega()
    hidden, inner = p.hidden_size, p.local_intermediate_size
    if not p.parallel.moves_tokens:
        reasons.append("its kernel runs on several ranks that each have their own tokens")
    # Scales of a row are copied 16 bytes at a time, and combined rows in parts of 256 columns.
    if hidden not in (512, 3584, 7168) and hidden % 1024:
        reasons.append(f"hidden_size={hidden} must be 512, 3584 or a multiple of 1024")
    if inner % 256 or inner > 4096:
        reasons.append(f"intermediate size {inner} must be a multiple of 256, at most 4096")
    return reasons


def _describe(problem: MoEProblem) -> str:
    return library.used()


def _multiples(problem: MoEProblem) -> tuple[int, int]:
    multiple = _MULTIPLE.get(problem.quant.name, 1)
    return multiple, multiple


def _missing() -> tuple[str, ...]:
    """Return what `requires` cannot express: "deep_gemm, or the copy inside vllm"."""
    return () if library.candidates() else ("deep_gemm",)


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    return ExpertsSpec(
        name=name,
        target=f"moekit_deepgemm.experts:{target}",
        format=format,
        activations=ACTIVATIONS,
        dtypes=frozenset({"bfloat16"}),
        schemes=frozenset(_MULTIPLE),
        devices=("cuda==9.0",),
        requires=("triton", "moekit_kernels", *_missing()),
        install_hint=library.INSTALL_HINT,
        # H200: triton is faster, except for fp8 blocks from 256 rows per expert on, where DeepGEMM
        # leads by up to 11 % on some shapes. Tuned tables decide there.
        priority=5,
        check=_check,
        describe=_describe,
        multiples=_multiples,
        reduces=format is ActivationFormat.STANDARD,
        graph_safe=True,
        deterministic=True,
    )


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        _spec("deepgemm", "DeepGemmExperts", ActivationFormat.STANDARD),
        _spec("deepgemm_batched", "BatchedDeepGemmExperts", ActivationFormat.BATCHED),
    ]


@hookimpl
def moekit_fused() -> list[FusedSpec]:
    return [
        FusedSpec(
            name="deepgemm_mega",
            target="moekit_deepgemm.mega:MegaKernel",
            dtypes=frozenset({"bfloat16"}),
            schemes=frozenset({"fp8_block"}),
            devices=("cuda==9.0",),
            requires=("triton", "moekit_kernels", *_missing()),
            install_hint=library.INSTALL_HINT,
            priority=-5,
            check=_check_mega,
            describe=_describe,
            activations=frozenset({"silu"}),
            bias=False,
            moves_tokens=True,
            needs_capacity=True,
            graph_safe=True,
            sliced_experts=False,
            shared_tokens=False,
            uneven_experts=False,
            most_top_k=32,
            most_ranks=8,
        )
    ]
