"""Marlin's layout of weights, scales, zero points and biases. Plain torch, any device.

One expert's (N, K) weight is cut into tiles of 16 (K) x 64 (N). A warp multiplies a tile with
mma.m16n8k16, whose B fragment gives lane ``4 * c + t`` (c < 8, t < 4) the rows
``k = 8 * rh + 2 * t + rl`` (rh, rl < 2) of column c (PTX ISA, "Matrix Fragments for mma.m16n8k16").
A tile has 8 such columns blocks, numbered ``2 * j + b``, so that with

    n = 64 * n_tile + 16 * j + 8 * b + c        k = 16 * k_tile + 8 * rh + 2 * t + rl

lane (c, t) needs the 32 values (j, b, rh, rl). They lie one after another, tile by tile (n_tile
fastest), lane by lane, j by j, in int32 words of 8 nibbles or 4 bytes. Within a word the order lets
two masks and a shift give pairs of 16-bit floats (Kim et al., "Who Says Elephants Can't Run",
2022): the lower half-words take rl = 0, the upper ones rl = 1.

    4 bits   1 word per j          nibble 4 * rl + 2 * b + rh
    8 bits   2 words per j, by b   byte 2 * rl + rh

The same tables stand, as index lists, in vllm/model_executor/layers/quantization/utils
(marlin_utils.py, marlin_utils_test.py), and benchmarks/device/marlin_library.py compares with that
library's own repack operators. L experts, G scale groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_K, TILE_N = 16, 64


def pack_weights(q_LNK: Tensor, bits: int) -> Tensor:
    """Pack uint8 (L, N, K), values below 2**bits, into int32 (L, K / 16, N * bits / 2).

    N a multiple of 64, K of 16. One expert at a time, so that little extra memory is needed.
    """
    experts, n, k = q_LNK.shape
    assert q_LNK.dtype == torch.uint8 and n % TILE_N == 0 and k % TILE_K == 0
    out = q_LNK.new_empty((experts, k // TILE_K, n * bits // 2), dtype=torch.int32)
    for q_NK, packed in zip(q_LNK, out, strict=True):
        # n_tile j b c  k_tile rh t rl
        tiles = q_NK.view(n // TILE_N, 4, 2, 8, k // TILE_K, 2, 4, 2)
        order = (4, 0, 3, 6, 1, 7, 2, 5) if bits == 4 else (4, 0, 3, 6, 1, 2, 7, 5)
        values = tiles.permute(order).reshape(k // TILE_K, -1)
        packed.copy_(_words(values, bits))
    return out


def permute_scales(scale_LGN: Tensor) -> Tensor:
    """Return scales (L, G, N) with columns in the order in which lanes read them.

    Several groups: scales multiply the weights, and lane c takes its 8 columns 8 * (2 * j + b) + c
    of a tile at once. One group: they multiply the accumulators, of which a lane holds two columns
    of 8 (`permute_channels`).
    """
    if scale_LGN.shape[1] == 1:
        return permute_channels(scale_LGN)
    return _by_lane(scale_LGN)


def pack_exponents(scale_LGN: Tensor) -> Tensor:
    """Convert fp32 powers of two or 0 (L, G, N), G > 1, to e8m0: uint8 of the same shape.

    2**e is e + 127, which is fp32's own exponent field (0 means 2**-127, and the operator takes it
    for 0). Four bytes are two pairs of 16-bit floats, of even bytes and of odd ones.
    """
    exponents = (scale_LGN.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return _swap(_by_lane(exponents), 2, 2, 1)


def pack_e5m3(scale_LGN: Tensor) -> Tensor:
    """Convert fp32 scales (L, G, N), G > 1, 0 or from 2 to 61440, to E5M3: uint8 of that shape.

    The byte is a float16 without its sign and its last seven bits, which are zero. The
    operator decodes it for bfloat16 by moving the exponent's upper bit, so this bit must be set:
    values below 2 are refused (vllm: nvfp4_marlin_process_scales). Bytes lie as in
    `pack_exponents`.
    """
    bits = scale_LGN.to(torch.float16).view(torch.int16)
    assert bool(((scale_LGN == 0) | (scale_LGN >= 2)).all()) and not bool((bits & 127).any())
    return _swap(_by_lane((bits >> 7).to(torch.uint8)), 2, 2, 1)


def permute_channels(x: Tensor) -> Tensor:
    """Reorder (..., N), N a multiple of 32: biases, and scales over all of K.

    The accumulator of mma.m16n8k16 gives lane t of a row the columns 2 * t and 2 * t + 1 of each
    8: out[8 * t + 2 * block + l] = x[8 * block + 2 * t + l].
    """
    return _swap(x, 4, 4, 2)


def pack_zeros(zeros_LGN: Tensor) -> Tensor:
    """Pack zero points of 4-bit weights, uint8 (L, G, N), into int32 (L, G, N / 8).

    They are in the order of scales of several groups (also when there is one): the 8 of a lane in
    one word, b = 0 below b = 1.
    """
    by_lane = _by_lane(zeros_LGN).unflatten(-1, (-1, 4, 2)).transpose(-1, -2)  # j b -> b j
    return _words(by_lane.flatten(-3), 4)


def _by_lane(x: Tensor) -> Tensor:
    """Let out[8 * c + block] = x[8 * block + c] within each 64 of (..., n)."""
    return _swap(x, 8, 8, 1)


def _swap(x: Tensor, outer: int, middle: int, inner: int) -> Tensor:
    split: Tensor = x.unflatten(-1, (-1, outer, middle, inner))
    return split.transpose(-3, -2).flatten(-4).contiguous()


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack uint8 (..., n) into int32 (..., n * bits / 32), the first in the lowest bits."""
    if bits == 4:
        values = values[..., 0::2] | (values[..., 1::2] << 4)
    return values.contiguous().view(torch.int32)
