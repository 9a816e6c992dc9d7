"""DeepGEMM expert GEMMs for moekit: `deepgemm` (STANDARD) and `deepgemm_batched` (BATCHED).

Only the GEMMs are DeepGEMM's. Alignment, expert-sorted rows and the weighted sum are moekit's, and
the activation is this plugin's (kernels.py). The library is an installed `deep_gemm`, or the copy
inside vLLM's wheel, which is loaded without importing vLLM (library.py).
"""

from moekit.plugin import ACTIVATIONS, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl

from . import library

# Row sizes are multiples of a scale group (fp8) or of a swizzled tile (bf16).
_MULTIPLE = {"fp8_block": 128, "none": 64}


def _check(problem: MoEProblem) -> list[str]:
    reasons = list(library.unsupported())
    if problem.device.type == "cuda" and (problem.device.capability or (0, 0)) >= (10, 0):
        reasons.append(
            "on Blackwell DeepGEMM reads power-of-two scales, packed four in an int32; this plugin "
            "does not requantize weights to that form yet"
        )
    return reasons


def _describe(problem: MoEProblem) -> str:
    return library.used()


def _multiples(problem: MoEProblem) -> tuple[int, int]:
    multiple = _MULTIPLE.get(problem.quant.name, 1)
    return multiple, multiple


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    # `requires` cannot express "deep_gemm, or the copy inside vllm".
    missing = () if library.candidates() else ("deep_gemm",)
    return ExpertsSpec(
        name=name,
        target=f"moekit_deepgemm.experts:{target}",
        format=format,
        activations=ACTIVATIONS,
        dtypes=frozenset({"bfloat16"}),
        schemes=frozenset(_MULTIPLE),
        devices=("cuda==9.0",),
        requires=("triton", "moekit_kernels", *missing),
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
