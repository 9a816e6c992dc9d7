"""The Triton kernels against plain torch."""

import pytest
import torch
from moekit_kernels.align import (
    FEW_ASSIGNMENTS,
    ONE_LAUNCH_ASSIGNMENTS,
    align_capacity,
    align_scratch,
)
from moekit_kernels.numerics import Activation
from moekit_marlin.kernels import (
    Blocks,
    activate_columns,
    gather_columns,
    list_pairs,
    list_slabs,
    slab_capacity,
)

from moekit.problem.activation import Activation as CoreActivation
from moekit.problem.activation import apply_activation


def empty_blocks(capacity: int, block: int, device: torch.device) -> Blocks:
    def ints(n: int) -> torch.Tensor:
        return torch.full((n,), -77, dtype=torch.int32, device=device)

    return Blocks(ints(capacity), ints(capacity // block), ints(1), ints(64), block)


def listed(blocks: Blocks, pairs: int) -> list[tuple[int, list[int]]]:
    """(expert, real entries) of each used block; padding must follow, locks must be zero."""
    assert not blocks.locks.any()
    used = int(blocks.num_rows)
    assert used % blocks.block == 0
    found = []
    for start in range(0, used, blocks.block):
        entries = blocks.entries[start : start + blocks.block].tolist()
        real = [e for e in entries if e < pairs]
        assert entries == real + [pairs] * (blocks.block - len(real))
        found.append((int(blocks.experts[start // blocks.block]), real))
    return found


def wanted(members: list[list[int]], block: int) -> list[tuple[int, list[int]]]:
    return [
        (expert, rows[start : start + block])
        for expert, rows in enumerate(members)
        for start in range(0, len(rows), block)
    ]


@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts"),
    [
        (1, 1, 1), (1, 8, 128), (3, 2, 5), (16, 8, 4), (7, 3, 300),
        (FEW_ASSIGNMENTS, 1, 2), (90, 3, 11),
        (ONE_LAUNCH_ASSIGNMENTS // 4, 4, 7), (ONE_LAUNCH_ASSIGNMENTS + 1, 1, 7),
    ],
)  # fmt: skip
def test_list_pairs(device, rows, top_k, experts, block):
    for skip in (0.0, 0.3, 1.0):
        ids = torch.randint(experts, (rows, top_k), device=device)
        ids[torch.rand(rows, top_k, device=device) < skip] = -1
        for dtype in (torch.int32, torch.int64):
            out = empty_blocks(align_capacity(ids.numel(), experts, block), block, device)
            scratch = torch.empty(
                align_scratch(ids.numel(), experts), dtype=torch.int32, device=device
            )
            list_pairs(ids.to(dtype), experts, out, scratch)
            flat = ids.flatten().tolist()
            members = [[p for p, id in enumerate(flat) if id == e] for e in range(experts)]
            assert listed(out, len(flat)) == wanted(members, block)


@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize(("experts", "slab"), [(1, 1), (5, 7), (4, 130), (33, 16), (2, 600)])
def test_list_slabs(device, experts, slab, block):
    for full in (False, True):
        counts = torch.randint(slab + 1, (experts,), dtype=torch.int32, device=device)
        counts = torch.full_like(counts, slab) if full else counts
        out = empty_blocks(slab_capacity(experts, slab, block), block, device)
        list_slabs(counts, slab, out)
        members = [[e * slab + c for c in range(n)] for e, n in enumerate(counts.tolist())]
        assert listed(out, experts * slab) == wanted(members, block)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "activation",
    [
        CoreActivation("silu"),
        CoreActivation("silu", limit=0.5),
        CoreActivation("gelu"),
        CoreActivation("gelu_tanh"),
        CoreActivation("swigluoai", alpha=1.2, limit=1.0),
        CoreActivation("swiglustep", limit=0.5),
        CoreActivation("situ", alpha=1.2, limit=0.5),
        CoreActivation("relu2_and_mul"),
        CoreActivation("silu_no_mul"),
        CoreActivation("relu2"),
    ],
    ids=str,
)
def test_activate_columns(device, activation, batched):
    rows, cols = 6, 1100
    h = torch.randn(rows, cols * (2 if activation.gated else 1)).bfloat16().to(device)
    ids = torch.tensor([0, -1, 2, 1, -1, 0], device=device)
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    valid = torch.tensor([True, True, False, True, False, False], device=device)
    valid = valid if batched else ids >= 0
    h[~valid] = float("nan")
    out = torch.full((rows, cols), 7.0, dtype=torch.bfloat16, device=device)
    ours = Activation.of(activation)
    if batched:
        activate_columns(h, out, ours, counts_L=counts, slab=3)
    else:
        activate_columns(h, out, ours, ids=ids)
    want = apply_activation(h[valid].float(), activation)
    assert (out[~valid] == 7.0).all()
    assert (out[valid].float() - want).norm() / want.norm() < 3e-3


@pytest.mark.parametrize("top_k", [1, 3])
def test_gather_columns(device, top_k):
    rows, experts, cols, block = 7, 4, 1100, 8
    x = torch.randn(rows, cols, dtype=torch.float16).to(device)
    columns = torch.stack([torch.randperm(cols) for _ in range(experts)]).int().to(device)
    ids = torch.randint(-1, experts, (rows, top_k), device=device)
    blocks = empty_blocks(align_capacity(ids.numel(), experts, block), block, device)
    list_pairs(ids, experts, blocks, torch.empty(0, dtype=torch.int32, device=device))
    out = torch.full((rows * top_k, cols), 7.0, dtype=torch.float16, device=device)
    gather_columns(x, columns, out, blocks, top_k)
    for pair, id in enumerate(ids.flatten().tolist()):
        want = x[pair // top_k, columns[id].long()] if id >= 0 else torch.full_like(x[0], 7.0)
        assert torch.equal(out[pair], want)
