"""Marlin weight-only expert GEMMs for moekit: `marlin` (STANDARD) and `marlin_batched` (BATCHED).

The GEMM is the operator `moe_wna16_marlin_gemm` of the vLLM wheel, whose library is loaded alone:
vllm itself is never imported, and may lie in any folder that MOEKIT_VLLM_PATH names.
"""

import os

from moekit.plugin import SCHEMES, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl
from moekit_marlin import provider, sizes

_EIGHT_BITS = ("fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block", "int8_w8a16")
_FOUR_BITS = tuple(
    f"int4_w4a16_{group}{zeros}{order}"
    for group in ("channel", "g32", "g64", "g128")
    for zeros in ("", "_zp")
    for order in (("",) if group == "channel" else ("", "_act_order"))
) + ("mxfp4_w4a16",)


def _check(problem: MoEProblem) -> list[str]:
    return [*provider.reasons(), *sizes.reasons(problem)]


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    given = bool(os.environ.get(provider.PATH_VARIABLE))
    return ExpertsSpec(
        name=name,
        target=f"moekit_marlin.experts:{target}",
        format=format,
        dtypes=frozenset({"bfloat16", "float16"}),
        schemes=frozenset(_EIGHT_BITS + _FOUR_BITS) & frozenset(SCHEMES),
        devices=("cuda>=8.0",),
        requires=("triton", "moekit_kernels", *(() if given else ("vllm",))),
        install_hint=f"pip install 'vllm{provider.VERSIONS}'",
        priority=15,
        check=_check,
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
