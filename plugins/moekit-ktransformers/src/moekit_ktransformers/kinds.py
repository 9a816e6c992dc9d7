"""Find the library's class that computes a scheme, and the sizes that it takes.

Only classes that multiply 16-bit activations are listed. Those that round activations to int8 for
int4 weights (AMXInt4_KGroup_MOE, AVXVNNI256*) are off by 1.2e-2 to 1.7e-2, beyond what a scheme
with 16-bit activations allows, and AMXInt4_KGroup_MOE crashes for groups of 128.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moekit.plugin import MoEProblem

from . import library


@dataclass(frozen=True)
class Kind:
    """A class of the library."""

    name: str
    step: int  # hidden and intermediate size must be multiples of it
    bf16_build: bool  # it needs a build with AVX-512 BF16
    scales: str = ""  # how it stores them
    copies: bool = True  # it copies the weights, else it reads ours

    @property
    def runs(self) -> bool:
        return not self.bf16_build or library.variant() in ("amx", "avx512_bf16")


# The fastest first. Sizes that are not multiples of `step` crash the library or are refused by it.
_BF16 = (Kind("AMXBF16_MOE", 32, True), Kind("AVX2BF16_MOE", 32, False))
_FP8_BLOCK = (
    Kind("AMXFP8_MOE", 128, True, "float32"),
    Kind("AVX2FP8_MOE", 128, False, "float32"),
)
_FP8_CHANNEL = (Kind("AMXFP8PerChannel_MOE", 32, True, "float32"),)
_MXFP4 = (
    Kind("AMXFP4_KGroup_MOE", 32, True, "bfloat16"),
    Kind("AVX2MXFP4_MOE", 32, False, "bfloat16", copies=False),
)
_MXFP8 = (Kind("AVX2MXFP8_MOE", 32, False, "e8m0"),)


def _int4(group: int) -> tuple[Kind, ...]:
    return (Kind("AVX2RawInt4_MOE", group, False, "bfloat16", copies=False),)


# Schemes that quantize activations are emulated: activations stay in 16 bits.
KINDS: Mapping[str, tuple[Kind, ...]] = MappingProxyType(
    {
        "none": _BF16,
        "fp8_block": _FP8_BLOCK,
        "fp8_w8a16_block": _FP8_BLOCK,
        "fp8_channel_token": _FP8_CHANNEL,
        "fp8_w8a16_channel": _FP8_CHANNEL,
        "mxfp4_w4a16": _MXFP4,
        "mxfp4_w4a8": _MXFP4,
        "mxfp8": _MXFP8,
        **{f"int4_w4a16_g{group}": _int4(group) for group in (32, 64, 128)},
    }
)


def schemes() -> frozenset[str]:
    """Return the schemes that some class computes on this CPU."""
    return frozenset(name for name in KINDS if chosen(name) is not None)


def chosen(scheme: str) -> Kind | None:
    """Return the fastest class for a scheme on this CPU, or None."""
    return next((kind for kind in KINDS.get(scheme, ()) if kind.runs), None)


def multiples(problem: MoEProblem) -> tuple[int, int]:
    """Return the multiples that hidden and intermediate size must be of."""
    kind = chosen(problem.quant.name)
    step = 1 if kind is None else kind.step
    return step, step


def copied_bytes(problem: MoEProblem, kind: Kind) -> int:
    """Return the bytes of the library's own copy of one layer's weights, at most."""
    p = problem
    elements = p.num_local_experts * 3 * p.hidden_size * p.local_intermediate_size
    weight = p.quant.weight
    if weight is None:
        return elements * p.dtype.itemsize
    shapes = (p.w13_rows, p.hidden_size), (p.hidden_size, p.local_intermediate_size)
    scales = 4 * p.num_local_experts * sum(math.prod(weight.scale_shape(*s)) for s in shapes)
    return scales + (elements // (2 if weight.packed else 1) if kind.copies else 0)
