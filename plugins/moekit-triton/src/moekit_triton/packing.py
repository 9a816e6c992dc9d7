"""Convert expert weights to the layouts that the kernels read.

4-bit weights: K is cut into chunks of 128 columns, a chunk into quarters of 32. An int16 holds one
column of each quarter, the first in its lowest bits, and a chunk of all rows is contiguous:

    w       int16 (L, K / 128, N, 32)
    scale   (L, K / group, N) by chunks, or (L, N) where one scale serves all of K
    offset  int32 (L, K / group or 1, N), where zero points differ: twice the bits of -(bias + zero)

`kernels.packed` says how the bits become values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from moekit.plugin import ExpertWeights, MoEProblem, PackedWeights, unpack_int4

from .kernels.tiles import CHUNK

# -128 in bf16, -1024 in fp16: the lowest bits are free for a zero point.
_BIAS = {torch.bfloat16: 0xC300, torch.float16: 0xE400}


def pack_weights(name: str, weights: ExpertWeights, problem: MoEProblem) -> PackedWeights:
    """Convert the weights of a layer for the backend ``name``.

    8-bit and wider weights stay as they are, with fp32 scales (L,) per tensor, (L, N) per channel
    or (L, ceil(N / 128), ceil(K / 128)) per block; 4-bit weights as this module describes.
    """
    operand = problem.quant.weight
    if operand is not None and operand.packed:
        return PackedWeights(name, _pack_4_bits(weights, problem))
    experts, shared = weights.by_expert()
    if operand is not None:
        dims = 1 if operand.per_tensor else 2 if operand.group[1] < 0 else 3
        for scale in ("w13_scale", "w2_scale"):
            experts[scale] = experts[scale].view(experts[scale].shape[:dims])
    return PackedWeights(name, experts, shared)


def _pack_4_bits(weights: ExpertWeights, problem: MoEProblem) -> dict[str, torch.Tensor]:
    """Pack codes; scales become e8m0 if they are powers of two, else bf16 where activations are
    (one more rounding), else fp32."""
    operand = problem.quant.weight
    assert operand is not None and operand.packed
    group = operand.group[1]
    packed = {}
    for name in ("w13", "w2"):
        packed[name] = pack_codes(getattr(weights, name))
        scale = getattr(weights, f"{name}_scale")
        if operand.microscaled:
            packed[f"{name}_scale"] = _by_chunks((scale.view(torch.int32) >> 23).byte(), group)
        elif group < 0:
            packed[f"{name}_scale"] = scale[..., 0].contiguous()
        else:
            dtype = torch.bfloat16 if problem.dtype == torch.bfloat16 else torch.float32
            packed[f"{name}_scale"] = _by_chunks(scale.to(dtype), group)
        zeros = getattr(weights, f"{name}_zero_points")
        if zeros is not None:
            bits = zeros.int() + _BIAS[problem.dtype]
            packed[f"{name}_offset"] = _by_chunks(bits << 16 | bits, group)
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            packed[f"{name}_bias"] = bias.contiguous()
    return packed


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack uint8 (L, N, K / 2), two columns a byte, to int16 (L, ceil(K / 128), N, 32), padded
    with zeros."""
    experts, n, half = codes.shape
    chunks = triton.cdiv(2 * half, CHUNK)
    out = codes.new_empty((experts, chunks, n, CHUNK // 4), dtype=torch.int16)
    for one, into in zip(codes, out, strict=True):  # one expert at a time, to save memory
        columns = F.pad(unpack_int4(one), (0, chunks * CHUNK - 2 * half))
        first, second, third, fourth = columns.view(n, chunks, 4, CHUNK // 4).unbind(2)
        bytes_ = torch.stack((first | second << 4, third | fourth << 4), dim=-1)
        into.copy_(bytes_.view(torch.int16).squeeze(-1).transpose(0, 1))
    return out


def _by_chunks(x_LNG: torch.Tensor, group: int) -> torch.Tensor:
    """Transpose (L, N, G) to (L, G, N), with zeros up to whole chunks."""
    missing = 0 if group < 0 else -x_LNG.shape[2] % (CHUNK // group)
    return F.pad(x_LNG, (0, missing)).transpose(1, 2).contiguous()
