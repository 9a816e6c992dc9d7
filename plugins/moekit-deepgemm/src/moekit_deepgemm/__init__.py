"""DeepGEMM expert GEMMs for moekit: `deepgemm` (STANDARD) and `deepgemm_batched` (BATCHED).

Only the GEMMs are DeepGEMM's; what lies between them is moekit-kernels' (alignment, rows into
order, the sum) and this plugin's own (kernels.py). The library is an installed `deep_gemm`, or the
one that the vLLM wheel carries, without importing vLLM (provider.py).
"""

from moekit.plugin import ActivationFormat, ExpertsSpec, MoEProblem, hookimpl

from . import provider

# What a row of an operand must divide by: a scale's group for fp8, a swizzled tile for bf16.
_MULTIPLE = {"fp8_block": 128, "none": 64}


def _check(problem: MoEProblem) -> list[str]:
    reasons = list(provider.faults())
    if problem.device.type == "cuda" and (problem.device.capability or (0, 0)) >= (10, 0):
        reasons.append(
            "on Blackwell DeepGEMM wants scales that are powers of two, packed four in an int32; "
            "the weights would have to be requantized, which this plugin does not do yet"
        )
    multiple = _MULTIPLE.get(problem.quant.name)
    if multiple is None:
        return reasons
    for name, size in (
        ("hidden_size", problem.hidden_size),
        ("intermediate size on a rank", problem.local_intermediate_size),
    ):
        if size % multiple:
            reasons.append(f"{name} {size} is no multiple of {multiple} ({problem.quant.name})")
    return reasons


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    # "deep_gemm or the one inside vllm" cannot be said in `requires`, so it is said here.
    missing = () if provider.is_installed() else ("deep_gemm",)
    return ExpertsSpec(
        name=name,
        target=f"moekit_deepgemm.experts:{target}",
        format=format,
        dtypes=frozenset({"bfloat16"}),
        schemes=frozenset(_MULTIPLE),
        devices=("cuda==9.0",),
        requires=("triton", "moekit_kernels", *missing),
        install_hint=provider.INSTALL_HINT,
        # Measured on H200: behind triton but for fp8 from 256 rows an expert on, by up to 11 %
        # ahead there on some shapes, which is for tuned tables to say.
        priority=5,
        check=_check,
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
