"""The operator's documented meaning in plain torch, for machines that cannot run it.

Written from the operator's own side, lane by lane and word by word, and so independent of
moekit_marlin.layout. Strict: what the library would refuse, or silently get wrong, fails here.
"""

import dataclasses

import moekit_marlin
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from vendor_stand_ins import on_cpu

import moekit

FP8 = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
UINT8B128 = 8 << 8 | 128 << 17 | 1 << 50
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
UINT4 = 4 << 8 | 1 << 50
FP4 = 2 | 1 << 8 | 1 << 16 | 1 << 49
BITS = {FP8: 8, UINT8B128: 8, UINT4B8: 4, UINT4: 4, FP4: 4}
GROUPS = {FP8: (-1, 128), UINT8B128: (-1, 32, 64, 128), FP4: (16, 32)}
FP8_EXPONENT = {torch.bfloat16: 120, torch.float16: 8}

calls: list[dict[str, int]] = []
"""Sizes of each call so far: block, top_k, size_m, size_n, size_k."""


def word_indices(n: int, k: int, bits: int) -> tuple[Tensor, Tensor]:
    """(n, k) of every value of a packed weight, as tensors (k / 16, words, values per word)."""
    per_word = 32 // bits
    words = n * 16 // per_word
    word, value = torch.arange(words)[:, None], torch.arange(per_word)[None, :]
    per_tile = 64 * 16 // per_word
    tile, inside = word // per_tile, word % per_tile
    per_lane = per_tile // 32
    lane = inside // per_lane
    if bits == 4:
        subtile, v = inside % 4, torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])[value]
    else:
        subtile = inside % per_lane // 2
        v = inside % 2 * 4 + torch.tensor([0, 2, 1, 3])[value]
    n_index = tile * 64 + subtile * 16 + v // 4 * 8 + lane // 4
    k_inside = lane % 4 * 2 + torch.tensor([0, 1, 8, 9])[v % 4]
    k_index = torch.arange(k // 16)[:, None, None] * 16 + k_inside
    return n_index.expand_as(k_index), k_index


def weights_of(packed: Tensor, bits: int) -> Tensor:
    """int32 (L, K / 16, words) -> stored values (L, N, K)."""
    experts, k_tiles, words = packed.shape
    n, k = words * (32 // bits) // 16, k_tiles * 16
    n_index, k_index = word_indices(n, k, bits)
    shifts = torch.arange(32 // bits) * bits
    values = packed.long()[..., None] >> shifts & (1 << bits) - 1
    out = torch.full((experts, n, k), -1)
    out[:, n_index, k_index] = values
    assert (out >= 0).all()
    return out


def scale_positions(n: int, grouped: bool) -> Tensor:
    """Column that each stored scale (or bias) belongs to."""
    if grouped:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    tile = torch.tensor(order)
    return (torch.arange(n // len(order))[:, None] * len(order) + tile).flatten()


def columns_of(x: Tensor, grouped: bool) -> Tensor:
    """Stored scales (..., N) in the order of columns."""
    out = torch.empty_like(x)
    out[..., scale_positions(x.shape[-1], grouped)] = x
    return out


def exponents_of(scales: Tensor) -> Tensor:
    """e8m0 scales (L, G, N) as fp32 in the order of columns; the smallest is read as 0.

    Of four bytes, two are the upper halves of 16-bit floats and two the lower ones: 1 and 3 come
    after 0 and 2.
    """
    words = scales.view(torch.uint8).unflatten(-1, (-1, 4))
    ordered = torch.cat((words[..., 0::2], words[..., 1::2]), dim=-1).flatten(-2)
    assert int(ordered.max()) < 255, "NaN"
    powers = torch.where(ordered == 0, 0.0, torch.exp2(ordered.float() - 127))
    return columns_of(powers, grouped=True)


def e5m3_of(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of nvfp4 scales (L, G, N) as fp32 in the order of columns, as the operator reads them.

    For bf16 the byte's upper bit becomes the 8-bit exponent's, and the other seven bits
    follow three zeros: right only if the upper bit is set, or all are zero.
    """
    words = scales.view(torch.uint8).unflatten(-1, (-1, 4))
    byte = torch.cat((words[..., 0::2], words[..., 1::2]), dim=-1).flatten(-2).int()
    if dtype == torch.bfloat16:
        bits = (byte >> 7) << 14 | (byte & 127) << 4
    else:
        bits = byte << 7
    return columns_of(bits.to(torch.int16).view(dtype).float(), grouped=True)


def fp4_of(values: Tensor) -> Tensor:
    """e2m1 bits -> fp32: sign, two bits of exponent (bias 1), one of mantissa."""
    exponent, mantissa = (values >> 1 & 3).float(), (values & 1).float()
    normal = torch.exp2(exponent - 1) * (1 + mantissa / 2)
    return torch.where(exponent == 0, mantissa / 2, normal) * (1 - 2 * (values >> 3)).float()


def zeros_of(packed: Tensor) -> Tensor:
    """int32 (L, G, N / 8) -> zero points (L, G, N)."""
    shifts = torch.arange(8) * 4
    nibbles = packed.long()[..., None] >> shifts & 15
    ordered = torch.empty_like(nibbles)
    ordered[..., torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])] = nibbles
    return columns_of(ordered.flatten(-2), grouped=True)


def dequantized(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    type_id: int,
    dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """(L, N, K) fp32. factor: the global scales of nvfp4, (L,)."""
    values = weights_of(packed, BITS[type_id])
    groups, k = scales.shape[1], values.shape[2]
    if type_id == FP4 and factor is not None:
        # e2m1 is read with the exponent bias of the 16-bit dtype.
        read = fp4_of(values) * 2.0 ** -(126 if dtype == torch.bfloat16 else 14)
        scale = e5m3_of(scales, dtype).transpose(1, 2).repeat_interleave(16, dim=2)
        return (read.double() * scale * factor.view(-1, 1, 1)).float()
    if type_id == FP4:
        assert dtype == torch.bfloat16
        return fp4_of(values) * exponents_of(scales).transpose(1, 2).repeat_interleave(32, dim=2)
    scale = columns_of(scales, grouped=groups > 1).float().transpose(1, 2)
    scale = scale.repeat_interleave(k // groups, dim=2)
    if type_id == FP8:
        real = values.to(torch.uint8).view(torch.float8_e4m3fn).float()
        return real * 2.0 ** -FP8_EXPONENT[dtype] * scale
    if zeros is not None:
        offset = zeros_of(zeros).transpose(1, 2).repeat_interleave(k // groups, dim=2)
    else:
        offset = torch.tensor({UINT8B128: 128, UINT4B8: 8}[type_id])
    return (values - offset).float() * scale


@on_cpu
def moe_wna16_marlin_gemm(*arguments: object) -> Tensor:
    """Do as `gemm`, unseen by autocast and by modes that count memory, as a library is."""
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        return gemm(*arguments)


def gemm(
    a: Tensor, c: Tensor, b_q_weight: Tensor, b_bias: Tensor | None, b_scales: Tensor,
    a_scales: None, global_scale: Tensor | None, b_zeros: Tensor | None, workspace: Tensor,
    sorted_token_ids: Tensor, expert_ids: Tensor, num_tokens_past_padded: Tensor,
    topk_weights: Tensor, moe_block_size: int, top_k: int, mul_topk_weights: bool, b_type_id: int,
    size_m: int, size_n: int, size_k: int, use_atomic_add: bool, use_fp32_reduce: bool,
    is_zp_float: bool, thread_k: int, thread_n: int, blocks_per_sm: int,
) -> Tensor:  # fmt: skip
    assert a_scales is None
    nvfp4 = b_scales.dtype == torch.float8_e4m3fn
    assert nvfp4 == (global_scale is not None) and (not nvfp4 or b_type_id == FP4)
    if global_scale is not None:
        assert global_scale.dtype == torch.float32 and global_scale.shape == b_q_weight.shape[:1]
    assert not mul_topk_weights, "the router weight has another owner"
    assert use_fp32_reduce and not use_atomic_add and not is_zp_float
    assert thread_k == thread_n == blocks_per_sm == -1 and moe_block_size in (8, 16, 32, 48, 64)
    assert a.dtype in (torch.bfloat16, torch.float16) and c.dtype == a.dtype
    fp4 = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    assert b_scales.dtype == (fp4 if b_type_id == FP4 else a.dtype)
    assert a.shape == (size_m, size_k) and c.shape == (size_m * top_k, size_n)
    given = (a, c, b_q_weight, b_scales, sorted_token_ids, expert_ids)
    assert all(t.is_contiguous() for t in given)
    for ints in (workspace, sorted_token_ids, expert_ids, num_tokens_past_padded, b_q_weight):
        assert ints.dtype == torch.int32
    assert (size_k % 64 == 0 and size_n % 128 == 0) or (size_k % 128 == 0 and size_n % 64 == 0)
    experts, bits = b_q_weight.shape[0], BITS[b_type_id]
    assert b_q_weight.shape == (experts, size_k // 16, size_n * 16 * bits // 32)
    groups = b_scales.shape[1]
    assert b_scales.shape == (experts, groups, size_n) and size_k % groups == 0
    group = -1 if groups == 1 else size_k // groups
    assert group in GROUPS.get(b_type_id, (-1, 32, 64, 128)), f"no kernel for group {group}"
    assert (group == 16) == nvfp4
    assert (b_zeros is not None) == (b_type_id == UINT4)
    if b_zeros is not None:
        assert b_zeros.shape == (experts, groups, size_n // 8)
    blocks = sorted_token_ids.numel() // moe_block_size
    assert workspace.numel() >= min(size_n // 64 * blocks, 4 * 256)
    assert not workspace.any(), "locks must be zero"
    calls.append(
        dict(block=moe_block_size, top_k=top_k, size_m=size_m, size_n=size_n, size_k=size_k)
    )

    weight = dequantized(b_q_weight, b_scales, b_zeros, b_type_id, a.dtype, global_scale)
    bias = None if b_bias is None else columns_of(b_bias, grouped=False)
    used = int(num_tokens_past_padded[0])
    assert used % moe_block_size == 0 and used <= sorted_token_ids.numel()
    for block in range(used // moe_block_size):
        entries = sorted_token_ids[block * moe_block_size : (block + 1) * moe_block_size].long()
        real = entries < size_m * top_k
        assert not (~real).any() or int(real.sum()) == int((~real).long().argmax()), (
            "padding must follow the real entries"
        )
        expert = int(expert_ids[block])
        assert 0 <= expert < experts and (entries[real] >= 0).all() and real.any()
        rows = entries[real]
        out = (a[rows // top_k].float() @ weight[expert].T).to(a.dtype)
        c[rows] = out if bias is None else out + bias[expert]
    return c


def registry() -> moekit.Registry:
    """The core's backends and Marlin's, which on a CPU run on this module."""
    found = moekit.Registry.discover({"MOEKIT_PLUGINS": ""})
    for spec in moekit_marlin.moekit_experts():
        if not torch.cuda.is_available():
            check = moekit_marlin.sizes.unsupported
            spec = dataclasses.replace(spec, devices=("cpu",), requires=("triton",), check=check)
        found.register(spec)
    return found
