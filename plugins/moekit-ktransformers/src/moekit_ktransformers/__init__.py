"""kt-kernel's CPU experts for moekit: `ktransformers`.

The library's extension module is loaded alone: its Python package, which imports readers of
checkpoint formats, is never imported.
"""

from moekit.plugin import SCHEMES, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl
from moekit_ktransformers import kinds, library


def _check(problem: MoEProblem) -> list[str]:
    """Look for the library only for a CPU, the one device where it would be loaded."""
    return library.unsupported() if problem.device.type == "cpu" else []


def _prefer(problem: MoEProblem) -> int:
    # `torch` is faster in bf16 (benchmarks/results, cpu-ktransformers) and copies nothing.
    return -10 if problem.quant.name == "none" else 10


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        ExpertsSpec(
            name="ktransformers",
            target="moekit_ktransformers.experts:KTransformersExperts",
            format=ActivationFormat.STANDARD,
            dtypes=frozenset({"bfloat16"}),
            schemes=kinds.schemes() & frozenset(SCHEMES),
            devices=("cpu",),
            requires=("kt_kernel",),
            install_hint=library.KT_KERNEL.install_hint,
            priority=10,
            prefer=_prefer,
            check=_check,
            multiples=kinds.multiples,
            activations=frozenset({"silu"}),
            bias=False,
            reduces=True,
            takes_quantized=False,
            emulates=True,
            deterministic=True,
        )
    ]
