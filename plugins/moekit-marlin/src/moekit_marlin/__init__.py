"""Marlin weight-only expert GEMMs for moekit: `marlin` (STANDARD) and `marlin_batched` (BATCHED).

The GEMM is the operator `moe_wna16_marlin_gemm` of vLLM's wheel. Its library is loaded alone: the
package vllm is never imported. MOEKIT_VLLM_PATH may name the folder of an unpacked wheel.
"""

from moekit.plugin import ACTIVATIONS, SCHEMES, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl
from moekit_marlin import library, sizes

_EIGHT_BITS = ("fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block", "int8_w8a16")
_FOUR_BITS = tuple(
    f"int4_w4a16_{group}{zeros}{order}"
    for group in ("channel", "g32", "g64", "g128")
    for zeros in ("", "_zp")
    for order in (("",) if group == "channel" else ("", "_act_order"))
) + ("mxfp4_w4a16", "nvfp4_w4a16")


def _check(problem: MoEProblem) -> list[str]:
    return [*library.VLLM.unsupported(), *sizes.unsupported(problem)]


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    vllm = () if library.VLLM.named_folder is not None else ("vllm",)
    return ExpertsSpec(
        name=name,
        target=f"moekit_marlin.experts:{target}",
        format=format,
        activations=ACTIVATIONS,
        dtypes=frozenset({"bfloat16", "float16"}),
        schemes=frozenset(_EIGHT_BITS + _FOUR_BITS) & frozenset(SCHEMES),
        devices=("cuda>=8.0",),
        requires=("triton", "moekit_kernels", *vllm),
        install_hint=library.VLLM.install_hint,
        describe=library.VLLM.describe,
        priority=15,
        check=_check,
        multiples=sizes.multiples,
        reduces=format is ActivationFormat.STANDARD,
        graph_safe=True,
        deterministic=True,
    )


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        _spec("marlin", "MarlinExperts", ActivationFormat.STANDARD),
        _spec("marlin_batched", "BatchedMarlinExperts", ActivationFormat.BATCHED),
    ]
