"""Times what runs around the GEMMs of moekit-triton, -cutlass, -deepgemm and -marlin, kernel by
kernel, on a GPU. Needs none of their libraries.

    python plugins/moekit-cutlass/tests/glue_device.py [--shapes mixtral] [--tokens 16 1024 16384]

Per kernel: CUDA graph over as many sets of buffers as exceed the L2 cache; the bytes it cannot do
without, over the time, as a fraction of the read bandwidth of an H200 (4.49 TB/s). A small kernel
cannot take less than a launch inside a graph, about 2 us.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

_PLUGINS = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(_PLUGINS.parent),
    *(str(_PLUGINS / f"moekit-{name}" / "src") for name in ("triton", "cutlass", "deepgemm")),
    str(_PLUGINS / "moekit-marlin" / "src"),
]

import torch  # noqa: E402
from moekit_bench import measure  # noqa: E402
from moekit_cutlass import kernels as cutlass  # noqa: E402
from moekit_cutlass import kernels as cutlass_groups  # noqa: E402
from moekit_deepgemm import kernels as deepgemm  # noqa: E402
from moekit_deepgemm.plan import make_plan  # noqa: E402
from moekit_kernels.align import SortedAssignments, align, align_capacity, align_scratch  # noqa: E402
from moekit_kernels.rows import (  # noqa: E402
    Activation,
    ValidRows,
    activate_rows,
    quantize_rows,
    weighted_sum,
)
from moekit_kernels.sorted_rows import copy_rows, copy_rows_quantized  # noqa: E402
from moekit_marlin import kernels as marlin  # noqa: E402
from moekit_marlin.sizes import LOCKS, choose_block  # noqa: E402
from torch import Tensor  # noqa: E402

from moekit.contract import Routing  # noqa: E402

SHAPES = {  # E, K, H, I
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
}
DEVICE, BF16, FP8 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn
READ, L2 = 4.49e12, 60e6
SILU = Activation("silu")

# (plugin and kernel, bytes, one call)
Kernel = tuple[str, float, Callable[[], object]]


def data(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16).to(dtype)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=dtype)


def kernels(shape: str, tokens: int) -> Iterator[Kernel]:
    """Every kernel on buffers of its own."""
    E, K, H, inner = SHAPES[shape]
    S = tokens * K
    ids = torch.rand(tokens, E, device=DEVICE).topk(K).indices
    weights = torch.rand(tokens, K, device=DEVICE)
    group = 4 / 128  # bytes of a scale, of the 128 columns that share it

    scratch = empty(align_scratch(S, E))
    groups = cutlass_groups.Groups(ids, empty(tokens, K), empty(E + 1))
    cutlass_groups.sort_pairs(groups, scratch)
    yield "cutlass sort", S * 12, lambda: cutlass_groups.sort_pairs(groups, scratch)
    indexed = replace(groups, slots_RK=empty(tokens, K), rows_S=empty(S))
    yield "cutlass sort, rows", S * 20, lambda: cutlass_groups.sort_pairs(indexed, scratch)
    x, x_SH, out = data(tokens, H), data(S, H), data(tokens, H)
    scale_S = empty(S, dtype=torch.float32)
    yield ("cutlass spread bf16", (tokens + S) * H * 2,
           lambda: cutlass.spread_rows(x, groups.slots_RK, x_SH))  # fmt: skip
    q_SH = empty(S, H, dtype=FP8)
    yield ("cutlass spread fp8 row", (2 * tokens + S) * H,
           lambda: cutlass.spread_rows(x, groups.slots_RK, q_SH, out_scale_S=scale_S))  # fmt: skip
    slots_S = groups.slots_RK.view(-1)
    yield ("cutlass sum", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out, slots_S))  # fmt: skip
    bias = data(E, H)
    yield ("cutlass sum, bias", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out, slots_S, bias))  # fmt: skip
    h, a = data(S, 2 * inner), empty(S, inner, dtype=BF16)
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
    h_MN, a_MI = data(plan.rows, 2 * inner), empty(plan.rows, inner, dtype=FP8)
    scale_IM = empty(inner // 128, plan.rows, dtype=torch.float32)
    yield ("deepgemm activate fp8", S * inner * (5 + group),
           lambda: deepgemm.activate_pairs(
               h_MN, rows, flat, None, SILU, a_MI, scale_IM))  # fmt: skip
    y_MH = data(plan.rows, H)
    yield ("deepgemm sum", (tokens + S) * H * 2,
           lambda: weighted_sum(y_MH, weights, ids, out, rows))  # fmt: skip

    block = choose_block(S / E)
    capacity = marlin.pairs_capacity(S, E, block)
    blocks = marlin.Blocks(
        empty(capacity), empty(capacity // block), empty(1), empty(LOCKS), block
    )  # fmt: skip
    list_scratch = empty(marlin.pairs_scratch(S, E))
    yield ("marlin list", S * 12,
           lambda: marlin.list_pairs(ids, E, blocks, list_scratch))  # fmt: skip
    yield ("marlin activate", S * inner * 6,
           lambda: marlin.activate_columns(h, a, SILU, ids=ids))  # fmt: skip
    yield ("triton weighted_sum", (tokens + S) * H * 2,
           lambda: weighted_sum(x_SH, weights, ids, out))  # fmt: skip


class InTurn:
    """Calls one after the other, as `moekit_bench` calls: its inputs are not looked at."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self._calls = itertools.cycle(calls)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        next(self._calls)()
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 64, 1024, 16384])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    unused = torch.empty(1, device=DEVICE)
    for shape, tokens in itertools.product(args.shapes, args.tokens):
        copies = 1
        sizes = {name: moved for name, moved, _ in kernels(shape, tokens)}
        if max(sizes.values()) < 2 * L2:
            copies = min(8, int(2 * L2 / max(sizes.values())) + 1)
        sets = list(zip(*(kernels(shape, tokens) for _ in range(copies)), strict=True))
        for same in sets:
            name, moved, _ = same[0]
            pairs = [(unused, Routing(unused, unused))] * copies
            us = measure(InTurn([call for *_, call in same]), pairs, DEVICE, replays=5).us
            print(f"glue {shape:9} T={tokens:5} {name:24} {moved / 1e6:8.2f} MB {us:8.1f} us "
                  f"{moved / us * 1e6 / READ:.2f} of bandwidth", flush=True)  # fmt: skip
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
