"""The operator `moe_wna16_marlin_gemm` of the vLLM wheel, for int4 with groups and int8 weights.

moe_align_block_size and moe_sum also come from that library; weights are symmetric. The library is
loaded alone from the folder that MOEKIT_VLLM_PATH names (the wheel's vllm/), else from an
installed vllm. The layout of the packed weights is explained in moekit_marlin/layout.py.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from _glue import silu_mul, vllm_version
from moekit_bench import Unavailable

name = "marlin_bare"
version = vllm_version
_LIBRARY = "_moe_C_stable_libtorch.abi3.so"
_BLOCKS = (8, 16, 32, 48, 64)


def library() -> None:
    if hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        return  # a plugin or another baseline has loaded it
    folder = os.environ.get("MOEKIT_VLLM_PATH")
    if not folder:
        spec = importlib.util.find_spec("vllm")
        folder = spec.submodule_search_locations[0] if spec else ""
    file = Path(folder) / _LIBRARY
    if not (folder and file.is_file()):
        raise Unavailable(f"no {_LIBRARY}: pip install vllm, or set MOEKIT_VLLM_PATH")
    torch.ops.load_library(str(file))


def pack(q_NK, bits):
    """Pack uint8 (N, K) as int32 (K / 16, N * bits / 2): tiles of 64 x 16 for mma.m16n8k16."""
    N, K = q_NK.shape
    tiles = q_NK.view(N // 64, 4, 2, 8, K // 16, 2, 4, 2)
    order = (4, 0, 3, 6, 1, 7, 2, 5) if bits == 4 else (4, 0, 3, 6, 1, 2, 7, 5)
    values = tiles.permute(order).reshape(K // 16, -1)
    if bits == 4:
        values = values[:, 0::2] | values[:, 1::2] << 4
    return values.contiguous().view(torch.int32)


def make(problem, weights, device):
    operand = problem.quant.weight
    if device.type != "cuda":
        raise Unavailable(f"runs on CUDA, not on {device}")
    if operand is None or problem.quant.activation or operand.dtype not in ("int4", "int8"):
        raise Unavailable(f"int4 and int8 weight-only, not {problem.quant.name}")
    if operand.zero_points or operand.act_order:
        raise Unavailable("symmetric and without act-order only")
    if problem.activation.name != "silu" or problem.activation.clamped or problem.has_bias:
        raise Unavailable("only plain silu without biases")
    library()
    bits = 4 if operand.dtype == "int4" else 8
    type_id = bits << 8 | (8 if bits == 4 else 128) << 17 | 1 << 50  # unsigned, biased, IEEE NaN
    L, H, inner, top_k = (
        problem.num_experts, problem.hidden_size, problem.intermediate_size, problem.top_k,
    )  # fmt: skip

    def packed(w):
        if bits == 4:
            q = (torch.stack((e & 15, e >> 4), dim=-1).flatten(1) for e in w)
        else:
            q = (e.view(torch.uint8) ^ 128 for e in w)
        return torch.stack([pack(e, bits) for e in q])

    def scales(s_LNG):
        s = s_LNG.transpose(1, 2).to(problem.dtype)
        outer, middle, width = (8, 8, 1) if s.shape[1] > 1 else (4, 4, 2)
        blocks = s.unflatten(-1, (-1, outer, middle, width))
        return blocks.transpose(-3, -2).flatten(-4).contiguous()

    w13, w2 = packed(weights.w13), packed(weights.w2)
    s13, s2 = scales(weights.w13_scale), scales(weights.w2_scale)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    locks = torch.zeros(4 * multiprocessors, dtype=torch.int32, device=device)
    ops = torch.ops._moe_C

    def gemm(a, w, s, blocks, block, topk_weights, choices, weighted, n, k):
        out = a.new_empty((a.shape[0] * choices, n))
        return ops.moe_wna16_marlin_gemm(
            a, out, w, None, s, None, None, None, locks, *blocks, topk_weights, block, choices,
            weighted, type_id, a.shape[0], n, k, False, True, False, -1, -1, -1,
        )  # fmt: skip

    def call(x, routing):
        assignments = routing.topk_ids.numel()
        block = next((b for b in _BLOCKS if assignments / L / b < 0.9), _BLOCKS[-1])
        size = min(assignments + L * (block - 1), assignments * block)
        new = dict(dtype=torch.int32, device=device)
        blocks = (
            torch.empty(size, **new), torch.empty(-(-size // block), **new), torch.empty(1, **new),
        )  # fmt: skip
        ops.moe_align_block_size(routing.topk_ids, L, block, *blocks, None, None)
        topk_weights = routing.topk_weights
        h = gemm(x, w13, s13, blocks, block, topk_weights, top_k, False, 2 * inner, H)
        z = gemm(silu_mul(h), w2, s2, blocks, block, topk_weights, 1, True, H, inner)
        out = torch.empty_like(x)
        ops.moe_sum(z.view(-1, top_k, H), out, None, None)
        return out

    return call
