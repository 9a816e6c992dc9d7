"""The Triton kernels against plain torch."""

import pytest
import torch
from moekit_kernels.align import SortedAssignments, align, align_capacity
from moekit_marlin.kernels import gather_columns, list_slabs, slab_capacity


def ints(n: int, device: torch.device) -> torch.Tensor:
    return torch.full((n,), -77, dtype=torch.int32, device=device)


def empty_lists(capacity: int, block: int, device: torch.device) -> SortedAssignments:
    return SortedAssignments(
        ints(capacity, device), ints(capacity // block, device), ints(1, device), block
    )


def listed(lists: SortedAssignments, rows: int) -> list[tuple[int, list[int]]]:
    """(expert, real entries) of each used block; padding must follow."""
    used, block = int(lists.num_rows), lists.block_m
    assert used % block == 0
    found = []
    for start in range(0, used, block):
        entries = lists.assignments_S[start : start + block].tolist()
        real = [e for e in entries if e < rows]
        assert entries == real + [rows] * (block - len(real))
        found.append((int(lists.experts_B[start // block]), real))
    return found


@pytest.mark.parametrize("block", [8, 64])
@pytest.mark.parametrize(("experts", "slab"), [(1, 1), (5, 7), (4, 130), (33, 16), (2, 600)])
def test_list_slabs(device, experts, slab, block):
    for full in (False, True):
        counts = torch.randint(slab + 1, (experts,), dtype=torch.int32, device=device)
        counts = torch.full_like(counts, slab) if full else counts
        out, locks = (
            empty_lists(slab_capacity(experts, slab, block), block, device),
            ints(64, device),
        )
        list_slabs(counts, slab, out, locks)
        rows = [[e * slab + c for c in range(n)] for e, n in enumerate(counts.tolist())]
        assert not locks.any()
        assert listed(out, experts * slab) == [
            (expert, mine[start : start + block])
            for expert, mine in enumerate(rows)
            for start in range(0, len(mine), block)
        ]


@pytest.mark.parametrize("top_k", [1, 3])
def test_gather_columns(device, top_k):
    rows, experts, cols, block = 7, 4, 1100, 8
    x = torch.randn(rows, cols, dtype=torch.float16).to(device)
    columns = torch.stack([torch.randperm(cols) for _ in range(experts)]).int().to(device)
    ids = torch.randint(-1, experts, (rows, top_k), device=device)
    lists = empty_lists(align_capacity(ids.numel(), experts, block), block, device)
    align(ids, experts, lists, torch.empty(0, dtype=torch.int32, device=device))
    out = torch.full((rows * top_k, cols), 7.0, dtype=torch.float16, device=device)
    gather_columns(x, columns, out, lists, top_k)
    for pair, id in enumerate(ids.flatten().tolist()):
        want = x[pair // top_k, columns[id].long()] if id >= 0 else torch.full_like(x[0], 7.0)
        assert torch.equal(out[pair], want)
