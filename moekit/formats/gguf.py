"""The block formats of GGUF: their numbers in torch, and the blocks that a scheme of moekit holds.

A block is a run of columns with its own scales: 32 of them, or 256 in the "K" types, whose scales
are quantized again. ggml-common.h and ggml-quants.c define the layouts in
https://github.com/ggml-org/ggml. `dequantize` computes in fp32 in the order of the gguf library, so
that the results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.formats.format import Format, Part, fp4_pairs, scale_values
from moekit.formats.matrix import Matrix
from moekit.formats.method import Method
from moekit.problem.quant import pack_int4

# Types of tensors: number -> (name, elements of a block, bytes of a block), as in ggml.h.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
_SIZES = {name: (elements, nbytes) for name, elements, nbytes in TYPES.values()}


def dequantize(blocks: Tensor, name: str) -> Tensor:
    """Return the numbers of GGUF blocks as fp32, on the blocks' device.

    Args:
        blocks: uint8 (..., number of blocks, bytes of a block).
        name: ggml's name of the type, such as "Q4_K". Types that moekit does not compute itself
            need the gguf library, which computes on the CPU.

    Returns:
        (..., number of blocks x elements of a block).

    Raises:
        WeightsError: The type is unknown, or needs the gguf library, which is not installed.
    """
    elements, nbytes = _SIZES.get(name, (0, 0))
    if not elements or elements == 1:
        raise WeightsError(f"{name!r} is no type of blocks; {_known()}")
    if blocks.dtype != torch.uint8 or blocks.shape[-1:] != (nbytes,):
        raise WeightsError(
            f"blocks of {name} must be torch.uint8 (..., {nbytes}), got {blocks.dtype} "
            f"{tuple(blocks.shape)}"
        )
    flat = blocks.reshape(-1, nbytes)
    decode = _DECODERS.get(name)
    values = _by_library(flat, name) if decode is None else decode(flat)
    return values.reshape(*blocks.shape[:-2], -1)


def _known() -> str:
    return f"moekit reads {', '.join(_DECODERS)}, and others with the gguf library"


def _by_library(blocks: Tensor, name: str) -> Tensor:
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(
            f"{_known()}: pip install moekit[gguf] to read {name} (the import failed: {error})"
        ) from error
    try:
        kind = gguf.GGMLQuantizationType[name]
        made = gguf.dequantize(blocks.cpu().contiguous().numpy(), kind)
    except (KeyError, NotImplementedError) as error:
        raise WeightsError(
            f"this version of the gguf library cannot read {name}: pip install -U gguf, "
            "or choose a file of another type"
        ) from error
    return torch.from_numpy(made).to(blocks.device)


# -- decoders: (blocks, bytes) uint8 -> (blocks, elements) fp32 --------------------------------


def _fp16(two_bytes: Tensor) -> Tensor:
    """Return (blocks, 1) fp32 of a little-endian fp16 in each row."""
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(q: Tensor, run: int) -> Tensor:
    """Return (blocks, 2 x bytes): of each ``run`` of bytes the lower halves, then the upper."""
    runs = q.reshape(len(q), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(q: Tensor, width: int, run: int) -> Tensor:
    """Return fields of ``width`` bits: of each ``run`` of bytes first their lowest fields."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=q.device).view(1, 1, -1, 1)
    return ((q.reshape(len(q), -1, 1, run) >> shifts) & ((1 << width) - 1)).flatten(1)


def _q4_0(b: Tensor) -> Tensor:
    return _fp16(b[:, :2]) * (_nibbles(b[:, 2:], 16).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _fp16(b[:, :2]) * _nibbles(b[:, 4:], 16).float() + _fp16(b[:, 2:4])


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Join nibbles with fifth bits; a byte holds the fifth bits of 8 adjacent elements."""
    return (_nibbles(low, 16) | (_bits(high, 1, 1) << 4)).float()


def _q5_0(b: Tensor) -> Tensor:
    return _fp16(b[:, :2]) * (_five_bits(b[:, 6:], b[:, 2:6]) - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _fp16(b[:, :2]) * _five_bits(b[:, 8:], b[:, 4:8]) + _fp16(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float() * _fp16(b[:, :2])


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima (blocks, 8, 1) of the eight runs of 32 in Q4_K and Q5_K.

    Twelve bytes hold eight 6-bit scales and minima. The first four of each lie in the lower bits of
    bytes 0..7; the other four have their lower halves in bytes 8..11 and two bits above the first.
    """
    low, mid, high = b[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), 1)
    d, d_min = _fp16(b[:, :2]) * scales.float(), _fp16(b[:, 2:4]) * minima.float()
    return d.unsqueeze(-1), d_min.unsqueeze(-1)


def _q4_k(b: Tensor) -> Tensor:
    d, minimum = _k_scales(b)
    return (d * _nibbles(b[:, 16:], 32).view(-1, 8, 32).float() - minimum).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    d, minimum = _k_scales(b)
    q = _nibbles(b[:, 48:], 32) | (_bits(b[:, 16:48], 1, 32) << 4)
    return (d * q.view(-1, 8, 32).float() - minimum).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    q = _nibbles(b[:, :128], 64) | (_bits(b[:, 128:192], 2, 32) << 4)
    scales = _fp16(b[:, 208:]) * b[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * (q.view(-1, 16, 16).float() - 32)).flatten(1)


def _mxfp4(b: Tensor) -> Tensor:
    pairs = fp4_pairs(b.device)[_pairs_in_order(b[:, 1:]).int()]
    return pairs.flatten(1) * scale_values(b[:, :1])


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _pairs_in_order(q: Tensor) -> Tensor:
    """Return bytes of adjacent elements; GGUF's hold elements j and j + 16."""
    return pack_int4(_nibbles(q, 16))


# -- the formats of a layer ---------------------------------------------------------------------


class BlockFormat(Format):
    """GGUF blocks, which hold weights and scales in one tensor.

    Those that a scheme of moekit holds, Q4_0, Q8_0 and MXFP4, have its
    ``dtype``. Others can only be dequantized.
    """

    @property
    def packs_rows(self) -> bool:
        return True  # the stored form is never the core's

    def __str__(self) -> str:
        return self.name

    def core_weight(self, stored: Tensor) -> Tensor:
        """Return bytes (n, K / 2), or int8 (n, K), of blocks (n, k', bytes)."""
        q = stored.flatten(0, -2)[:, 1 if self.dtype == "float4_e2m1" else 2 :]
        q = q.view(torch.int8) if self.dtype == "int8" else _pairs_in_order(q)
        return q.reshape(len(stored), -1)

    def core_scale(self, stored: Tensor, factor: Tensor | None) -> Tensor:
        """Return fp32 scales (n, k') of blocks."""
        if self.dtype == "float4_e2m1":
            return scale_values(stored[..., 0])
        return _fp16(stored[..., :2].flatten(0, 1)).view(stored.shape[:2])


# Blocks that a scheme of moekit holds.
_COMPUTED: Mapping[str, dict[str, Any]] = {
    "MXFP4": {"dtype": "float4_e2m1", "scale_dtype": "float8_e8m0fnu"},
    "Q8_0": {"dtype": "int8"},
    "Q4_0": {"dtype": "int4"},
}


class Gguf(Method):
    """Blocks of ggml's types."""

    def read(self, matrix: Matrix) -> Format | None:
        if not matrix.block:
            return None
        said, part = _COMPUTED.get(matrix.block, {}), part_of(matrix.block)
        roles = ("weight", *("scale",) * bool(said))
        parts = dict.fromkeys(roles, part)
        return BlockFormat(name=f"GGUF {matrix.block}", parts=parts, **{"dtype": "blocks", **said})


def part_of(name: str) -> Part:
    """Return the part that holds a matrix of ggml's type ``name``."""
    elements, nbytes = _SIZES[name]
    return Part("weight", (torch.uint8,), (1, elements), tail=(nbytes,))
