"""CUTLASS expert GEMMs for moekit: `cutlass` (STANDARD) and `cutlass_batched` (BATCHED).

Three libraries provide the grouped GEMMs. `moekit_cutlass.providers` chooses by scheme and size:

    quack   quack-kernels (CuTe DSL): bf16, fp16; gather and activation fused into GEMM 1; also
            every product of a backward
    torch   the CUTLASS kernels inside torch: bf16, fp8
    vllm    `cutlass_moe_mm` and `cutlass_w4a8_moe_mm` of vLLM's library, loaded alone: fp8, and
            int4 weights x fp8

MOEKIT_CUTLASS_PROVIDER=<name> restricts the plugin to one library. MOEKIT_VLLM_PATH names the
folder of an unpacked `vllm` package; without it an installed vllm is used.
"""

from moekit.plugin import ACTIVATIONS, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl

from .library import FUSED, QUACK, VLLM, W4A8, missing, providers_for

_SCHEMES = ("none", "fp8_tensor", "fp8_tensor_static", "fp8_channel_token")


def _check(problem: MoEProblem) -> list[str]:
    scheme, dtype = problem.quant.name, problem.dtype_name
    if scheme not in (*_SCHEMES, W4A8) or dtype not in ("bfloat16", "float16"):
        return []  # the spec says so
    usable, why_not = providers_for(problem)
    if not usable:
        return [f"no library for {scheme} in {dtype}: {'; '.join(why_not)}"]
    return _check_training(problem, usable, why_not) if problem.training else []


def _check_training(problem: MoEProblem, usable: list[str], why_not: list[str]) -> list[str]:
    activation, reasons = problem.activation, []
    if problem.quant.name != "none":
        reasons.append(f"its backward takes unquantized experts, not {problem.quant.name}")
    elif "quack" not in usable:
        reasons.append(f"only quack has a backward: {'; '.join(why_not)}")
    if activation.name not in FUSED:
        kinds = ", ".join(sorted(FUSED))
        reasons.append(f"quack has a backward of {kinds}, not of {activation.name}")
    elif activation.limit is not None:
        reasons.append(f"quack's backward has no clamp (limit={activation.limit:g})")
    if problem.has_bias:
        reasons.append("quack's backward has no biases")
    return reasons


def _describe(problem: MoEProblem) -> str:
    """Return the libraries that may serve a problem, with their versions and folders."""
    copies = {"quack": QUACK[0].describe, "vllm": VLLM.describe}
    return ", ".join(copies.get(name, lambda: "torch")() for name in providers_for(problem)[0])


def _multiples(problem: MoEProblem) -> tuple[int, int]:
    if problem.quant.name == W4A8:
        return 256, 256  # the weight layout of cutlass_w4a8_moe_mm
    multiple = 8 if problem.quant.activation is None else 16  # the libraries' tensor maps
    return multiple, multiple


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    # Only quack has fp16 without quantization, and only vLLM has int4.
    dtypes = {"bfloat16"} if missing("quack") else {"bfloat16", "float16"}
    schemes = _SCHEMES if missing("vllm") else (*_SCHEMES, W4A8)
    standard = format is ActivationFormat.STANDARD
    return ExpertsSpec(
        name=name,
        target=f"moekit_cutlass.experts:{target}",
        training="moekit_cutlass.training:TrainableCutlass" if standard else None,
        format=format,
        activations=ACTIVATIONS,
        dtypes=frozenset(dtypes),
        schemes=frozenset(schemes),
        devices=("cuda==9.0",),
        requires=("triton", "moekit_kernels"),
        install_hint="pip install 'triton>=3.6' moekit-kernels",
        priority=5,
        check=_check,
        describe=_describe,
        multiples=_multiples,
        reduces=standard,
        graph_safe=True,
        deterministic=True,
    )


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        _spec("cutlass", "CutlassExperts", ActivationFormat.STANDARD),
        _spec("cutlass_batched", "BatchedCutlassExperts", ActivationFormat.BATCHED),
    ]
