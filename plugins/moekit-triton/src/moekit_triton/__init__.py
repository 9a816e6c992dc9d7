"""Triton expert GEMMs for moekit: `triton` (STANDARD) and `triton_batched` (BATCHED).

On the CPU they run in Triton's interpreter, for tests, when TRITON_INTERPRET=1.
"""

import functools
import os
import sys

from moekit.errors import InvalidInput
from moekit.plugin import ACTIVATIONS, ActivationFormat, ExpertsSpec, MoEProblem, hookimpl, switch

_SCHEMES = frozenset(
    "none fp8_tensor fp8_tensor_static fp8_channel_token fp8_block int8_channel_token "
    "fp8_w8a16_tensor fp8_w8a16_channel fp8_w8a16_block int8_w8a16 mxfp4_w4a16".split()
    + [f"int4_w4a16_{group}{zeros}" for group in ("channel", "g32", "g64", "g128")
       for zeros in ("", "_zp")]
)  # fmt: skip
_FP8_CAPABILITY = (8, 9)
GLUON_VARIABLE = "MOEKIT_TRITON_GLUON"


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _imported_compiled() -> bool:
    """Return whether triton is imported, and its own functions were made for the compiler."""
    language = sys.modules.get("triton.language")
    return language is not None and type(language.zeros).__name__ == "JITFunction"


def _check(problem: MoEProblem) -> list[str]:
    reasons = []
    device, weight = problem.device, problem.quant.weight
    try:
        switch(GLUON_VARIABLE, True)
    except InvalidInput as error:
        reasons.append(str(error))
    if device.type == "cpu" and not _interpreted():
        reasons.append(
            "on the CPU Triton runs only in its interpreter (slow, for tests): "
            "set TRITON_INTERPRET=1 before the process starts"
        )
    elif device.type == "cpu" and _imported_compiled():
        reasons.append("TRITON_INTERPRET=1 was set after triton had been imported: set it earlier")
    fp8 = weight is not None and weight.dtype.startswith("float8")
    if fp8 and device.capability is not None and device.capability < _FP8_CAPABILITY:
        reasons.append(f"fp8 needs compute capability 8.9 or later, not {device}")
    if weight is not None and weight.packed:
        if problem.dtype_name == "float32":
            reasons.append("weights of 4 bits are multiplied with 16-bit activations, not float32")
        for name in ("hidden_size", "local_intermediate_size"):
            if (size := getattr(problem, name)) % 2:
                reasons.append(f"{name}={size} is odd, and 4 bits pack two columns in a byte")
    return reasons


def _describe(problem: MoEProblem, *, batched: bool = False) -> str:
    if problem.training and problem.quant.weight is not None:
        return f"products read w13 or w2 dequantized to {problem.dtype_name}"
    from .heuristics import describe

    return describe(problem, batched=batched)


def _spec(name: str, target: str, format: ActivationFormat) -> ExpertsSpec:
    standard = format is ActivationFormat.STANDARD
    return ExpertsSpec(
        name=name,
        target=f"moekit_triton.experts:{target}",
        training="moekit_triton.training:TrainableTriton" if standard else None,
        adapters="moekit_triton.experts:AdapterTriton" if standard else None,
        adapters_training="moekit_triton.training_adapters:TrainableAdapterTriton"
        if standard
        else None,
        format=format,
        activations=ACTIVATIONS,
        schemes=_SCHEMES,
        devices=("cpu", "cuda>=8.0"),
        requires=("triton", "moekit_kernels"),
        install_hint="pip install 'triton>=3.6' moekit-kernels",
        # Fast on a GPU; in the interpreter only a name should choose it.
        priority=-50 if _interpreted() else 10,
        check=_check,
        describe=functools.partial(_describe, batched=not standard),
        reduces=standard,
        takes_unquantized=standard,
        graph_safe=True,
        deterministic=True,
        batch_invariant=True,
        weights_in_fp32=True,
    )


@hookimpl
def moekit_experts() -> list[ExpertsSpec]:
    return [
        _spec("triton", "TritonExperts", ActivationFormat.STANDARD),
        _spec("triton_batched", "BatchedTritonExperts", ActivationFormat.BATCHED),
    ]
