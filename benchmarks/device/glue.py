"""Times the kernels around the GEMMs of moekit's own and the vendors' experts, one by one.

    python benchmarks/device/glue.py [--shapes mixtral] [--tokens 16 1024 16384]

Each kernel runs in a CUDA graph over as many sets of buffers as exceed the L2 cache. The fraction
is that of an H200's read bandwidth (4.49 TB/s) for the bytes that the kernel must move. A small
kernel cannot be faster than a launch inside a graph, about 2 us. No vendor's library is needed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from common import DEVICE, Call, normal, problem_of, run_parts, say, us_of
from moekit_cutlass import kernels as cutlass
from moekit_deepgemm import kernels as deepgemm
from moekit_deepgemm.plan import make_plan
from moekit_kernels.align import SortedAssignments, align, align_capacity, align_scratch
from moekit_kernels.numerics import Activation
from moekit_kernels.rows import ValidRows, activate_rows, quantize_rows, weighted_sum
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized
from moekit_marlin import kernels as marlin
from moekit_marlin.sizes import LOCKS, choose_block
from torch import Tensor

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
READ, L2 = 4.49e12, 60e6  # bytes per second, bytes
SILU = Activation("silu")

Kernel = tuple[str, float, Call]  # the plugin and the kernel, the bytes it moves, one call


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=dtype)


def kernels(shape: str, tokens: int) -> Iterator[Kernel]:
    """Yield every kernel, on buffers that it shares with no other set."""
    p = problem_of(shape)
    E, K, H, inner = p.num_experts, p.top_k, p.hidden_size, p.intermediate_size
    S = tokens * K
    ids = torch.rand(tokens, E, device=DEVICE).topk(K).indices
    weights = torch.rand(tokens, K, device=DEVICE)
    group = 4 / 128  # bytes of a scale, of the 128 columns that share it

    scratch = empty(align_scratch(S, E))
    groups = cutlass.Groups(ids, empty(tokens, K), empty(E + 1))
    cutlass.sort_assignments(groups, scratch)
    yield "cutlass sort", S * 12, lambda: cutlass.sort_assignments(groups, scratch)
    indexed = replace(groups, slots_RK=empty(tokens, K), rows_S=empty(S))
    yield "cutlass sort, rows", S * 20, lambda: cutlass.sort_assignments(indexed, scratch)
    x, x_SH, out = normal(tokens, H), normal(S, H), normal(tokens, H)
    scale_S = empty(S, dtype=torch.float32)
    yield ("cutlass spread bf16", (tokens + S) * H * 2,
           lambda: cutlass.spread_rows(x, groups.slots_RK, x_SH))  # fmt: skip
    q_SH = empty(S, H, dtype=FP8)
    yield ("cutlass spread fp8 row", (2 * tokens + S) * H,
           lambda: cutlass.spread_rows(x, groups.slots_RK, q_SH, out_scale_S=scale_S))  # fmt: skip
    slots_S = groups.slots_RK.view(-1)
    yield ("cutlass sum", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out, slots_S))  # fmt: skip
    bias = normal(E, H)
    yield ("cutlass sum, bias", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out, slots_S, bias))  # fmt: skip
    h, a = normal(S, 2 * inner), empty(S, inner, dtype=BF16)
    valid = ValidRows(counts_L=groups.total, capacity=S)
    yield ("triton activate bf16", S * inner * 6,
           lambda: activate_rows(h, a, SILU, valid))  # fmt: skip
    q = empty(S, inner, dtype=FP8)
    yield ("triton activate fp8 row", S * inner * 5,
           lambda: activate_rows(h, q, SILU, valid, scale=scale_S.view(S, 1)))  # fmt: skip

    groups_S = empty(S, -(-inner // 128), dtype=torch.float32)
    named = ValidRows(ids=ids.view(-1))
    yield ("triton activate fp8 group", S * inner * (5 + group),
           lambda: activate_rows(h, q, SILU, named, scale=groups_S))  # fmt: skip
    q_TH, groups_T = empty(tokens, H, dtype=FP8), empty(tokens, H // 128, dtype=torch.float32)
    yield ("triton quantize fp8 group", tokens * H * (3 + group),
           lambda: quantize_rows(x, q_TH, groups_T))  # fmt: skip
    block_m = 128 if S > 64 * E else 16
    entries = align_capacity(S, E, block_m)
    aligned = SortedAssignments(
        empty(entries), empty(entries // block_m), empty(1), block_m, empty(S)
    )  # fmt: skip
    align(ids, E, aligned, scratch)
    yield "triton align", S * 16, lambda: align(ids, E, aligned, scratch)
    ordered = empty(entries, H, dtype=BF16)
    yield ("triton copy_rows", (tokens + S) * H * 2,
           lambda: copy_rows(x, aligned, ordered))  # fmt: skip

    plan = make_plan(S, E, E)
    rows, ends = empty(S), empty(E)
    flat, layout = ids.view(-1), SortedAssignments(None, None, None, plan.block_m, rows, ends)
    align(ids, E, layout, scratch)
    yield "deepgemm layout", S * 12, lambda: align(ids, E, layout, scratch)
    a_MH = empty(plan.rows, H, dtype=FP8)
    scale_GM = empty(H // 128, plan.rows, dtype=torch.float32)
    yield ("deepgemm quantize into order", (2 * tokens + S * (1 + group)) * H,
           lambda: copy_rows_quantized(x, None, layout, a_MH, scale_GM))  # fmt: skip
    h_MN, a_MI = normal(plan.rows, 2 * inner), empty(plan.rows, inner, dtype=FP8)
    scale_IM = empty(inner // 128, plan.rows, dtype=torch.float32)
    yield ("deepgemm activate fp8", S * inner * (5 + group),
           lambda: deepgemm.activate_pairs(
               h_MN, rows, flat, None, SILU, a_MI, scale_IM))  # fmt: skip
    y_MH = normal(plan.rows, H)
    yield ("deepgemm sum", (tokens + S) * H * 2,
           lambda: weighted_sum(y_MH, weights, ids, out, rows))  # fmt: skip

    block = choose_block(S / E)
    capacity = align_capacity(S, E, block)
    blocks = marlin.Blocks(
        empty(capacity), empty(capacity // block), empty(1), empty(LOCKS), block
    )  # fmt: skip
    list_scratch = empty(align_scratch(S, E))
    yield ("marlin list", S * 12,
           lambda: marlin.list_pairs(ids, E, blocks, list_scratch))  # fmt: skip
    yield ("marlin activate", S * inner * 6,
           lambda: marlin.activate_columns(h, a, SILU, ids=ids))  # fmt: skip
    yield ("triton weighted_sum", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out))  # fmt: skip


def glue(args: argparse.Namespace) -> None:
    for shape, tokens in itertools.product(args.shapes, args.tokens):
        largest = max(moved for _, moved, _ in kernels(shape, tokens))
        copies = 1 if largest >= 2 * L2 else min(8, int(2 * L2 / largest) + 1)
        sets = list(zip(*(kernels(shape, tokens) for _ in range(copies)), strict=True))
        for same in sets:
            name, moved, _ = same[0]
            us = us_of([call for *_, call in same], 5)
            say(f"glue {shape:9} T={tokens:5} {name:24} {moved / 1e6:8.2f} MB {us:8.1f} us "
                f"{moved / us * 1e6 / READ:.2f} of bandwidth")  # fmt: skip
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_parts(__doc__, {"glue": glue}, tokens=(1, 64, 1024, 16384))
