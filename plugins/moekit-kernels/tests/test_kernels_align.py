"""Compare `align` with lists made on the CPU."""

import pytest
import torch
from moekit_kernels.align import (
    COMPARED,
    COUNTERS,
    FEW_ASSIGNMENTS,
    ONE_LAUNCH_ASSIGNMENTS,
    PROGRAMS,
    TILE,
    SortedAssignments,
    align,
    align_capacity,
    align_scratch,
)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def run_align(
    ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    zeros: torch.Tensor | None = None,
    live_R: torch.Tensor | None = None,
) -> SortedAssignments:
    capacity = align_capacity(ids.numel(), num_experts, block_m)
    blocks = capacity // block_m

    def ints(n: int) -> torch.Tensor:
        return torch.full((n + 32,), -77, dtype=torch.int32, device=ids.device)

    whole = [ints(n) for n in (capacity, blocks, 1, ids.numel(), COUNTERS + blocks)]
    assignments, experts, num_rows, sorted_rows, counters = (x[:-32] for x in whole)
    given = counters if zeros is None else None
    out = SortedAssignments(
        assignments, experts, num_rows, block_m, sorted_rows, counters=given, live_R=live_R
    )
    scratch = ints(align_scratch(ids.numel(), num_experts))
    align(ids, num_experts, out, scratch[:-32], zeros)
    assert all((x[-32:] == -77).all() for x in (*whole, scratch)), "written beyond the end"
    assert bool((counters == (0 if zeros is None else -77)).all())
    return out


def assignments_by_expert(flat: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Return every expert's assignments in ascending order, of ``flat`` ids on the CPU."""
    counts = flat[flat >= 0].bincount(minlength=num_experts)
    return flat.argsort(stable=True)[(flat < 0).sum() :].split(counts.tolist())


def check_aligned(out: SortedAssignments, ids: torch.Tensor, num_experts: int) -> None:
    flat, block_m = ids.flatten().cpu(), out.block_m
    assignments, experts = [], []
    for expert, mine in enumerate(assignments_by_expert(flat, num_experts)):
        blocks = cdiv(len(mine), block_m)
        padding = torch.full((blocks * block_m - len(mine),), len(flat))
        assignments += [mine, padding]
        experts += [expert] * blocks
    want = torch.cat(assignments).int()
    assert out.num_rows.item() == len(want)
    assert torch.equal(out.assignments_S[: len(want)].cpu(), want)
    assert out.experts_B.tolist() == experts + [-1] * (out.experts_B.numel() - len(experts))
    if out.rows_A is not None:
        sorted_rows = torch.full((len(flat) + 1,), -1, dtype=torch.int32)
        sorted_rows[want.long()] = torch.arange(len(want), dtype=torch.int32)
        sorted_rows[-1] = -1  # of padding
        assert torch.equal(out.rows_A.cpu(), sorted_rows[:-1])


ALIGN_SIZES = [
    (0, 2, 4, 16), (1, 1, 1, 16), (1, 8, 128, 16), (4, 8, 512, 128), (5, 2, 8, 64),
    (FEW_ASSIGNMENTS + 1, 1, 60, 128), (37, 8, 40, 16), (100, 3, 512, 16),
    (ONE_LAUNCH_ASSIGNMENTS, 1, 8, 8),
    (ONE_LAUNCH_ASSIGNMENTS + 1, 1, 60, 16), (300, 8, 8, 128), (700, 3, 33, 32),
    (COMPARED * PROGRAMS + 1, 1, 5, 64), (2 * COMPARED * PROGRAMS + 1, 1, 512, 8),
    (4 * COMPARED * PROGRAMS + 1, 1, 33, 64), (TILE * PROGRAMS + 1, 1, 40, 128),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "top_k", "num_experts", "block_m"), ALIGN_SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("routing", ["uniform", "one_expert", "none"])
def test_align(device, rows, top_k, num_experts, block_m, dtype, routing):
    low = {"uniform": -1, "one_expert": num_experts - 1, "none": -1}[routing]
    high = {"uniform": num_experts, "one_expert": num_experts, "none": 0}[routing]
    ids = torch.randint(low, high, (rows, top_k), dtype=dtype, device=device)
    locks = torch.full((1100,), 3, dtype=torch.int32, device=device)
    out = run_align(ids, num_experts, block_m, locks[:1050])
    check_aligned(out, ids, num_experts)
    assert not locks[:1050].any() and (locks[1050:] == 3).all()


@pytest.mark.parametrize(
    "most", [FEW_ASSIGNMENTS, ONE_LAUNCH_ASSIGNMENTS, 3 * ONE_LAUNCH_ASSIGNMENTS]
)
def test_align_any_size(device, most):
    """Random sizes, uneven routing, more blocks than can be used, no ``rows_A``."""
    for block_m in (8, 16, 32, 64, 128):
        assignments, num_experts = (int(torch.randint(1, high + 1, ())) for high in (most, 300))
        ids = (torch.rand(assignments, 1, device=device) ** 3 * (num_experts + 1)).long() - 1
        blocks = align_capacity(assignments, num_experts, block_m) // block_m + 70
        sizes = (blocks * block_m, blocks, 1, align_scratch(assignments, num_experts))
        lists = [torch.full((n,), -77, dtype=torch.int32, device=device) for n in sizes]
        out = SortedAssignments(*lists[:3], block_m)
        align(ids, num_experts, out, lists[3])
        check_aligned(out, ids, num_experts)


@pytest.mark.parametrize(("rows", "top_k", "num_experts", "block_m"), ALIGN_SIZES)
@pytest.mark.parametrize("routing", ["uniform", "skipping", "none"])
@pytest.mark.parametrize("assignments", [False, True])
def test_align_by_ends(device, rows, top_k, num_experts, block_m, routing, assignments):
    """Without blocks, into guarded lists. skipping: two of three experts have no rows."""
    block_m = 1 if assignments and block_m < 64 else block_m
    low, high = (-1, 0) if routing == "none" else (-1, num_experts)
    ids = torch.randint(low, high, (rows, top_k), dtype=torch.int32, device=device)
    if routing == "skipping":
        ids = ids // 3 * 3
    n, capacity = ids.numel(), align_capacity(ids.numel(), num_experts, block_m)
    sizes = (n, num_experts, capacity, align_scratch(n, num_experts))
    whole = [torch.full((size + 32,), -77, dtype=torch.int32, device=device) for size in sizes]
    sorted_rows, ends, listed, scratch = (x[:-32] for x in whole)
    out = SortedAssignments(listed if assignments else None, None, None, block_m, sorted_rows, ends)
    align(ids, num_experts, out, scratch)
    assert all((x[-32:] == -77).all() for x in whole), "written beyond the end"
    want, start = torch.full((capacity,), -77, dtype=torch.int32), 0
    found = sorted_rows.cpu()
    mine_by_expert = assignments_by_expert(ids.flatten().cpu(), num_experts)
    for mine, end in zip(mine_by_expert, ends.tolist(), strict=True):
        assert end == start + len(mine)
        assert found[mine].tolist() == list(range(start, end))
        want[start:end] = mine
        start += cdiv(len(mine), block_m) * block_m
    assert (sorted_rows[ids.flatten() < 0] == -1).all()
    assert torch.equal(listed.cpu(), want if assignments else torch.full_like(want, -77))


def test_align_scratch_suffices_for_fewer_pairs():
    sizes = [align_scratch(assignments, 60) for assignments in range(0, 3 * TILE * PROGRAMS, 77)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("rows", "top_k", "num_experts", "block_m"), ALIGN_SIZES)
def test_align_live_rows(device, rows, top_k, num_experts, block_m):
    """Two launches do not read the ids behind the live rows; one launch reads all."""
    ids = torch.randint(-1, num_experts, (rows, top_k), dtype=torch.int32, device=device)
    for live in {0, min(1, rows), rows // 3, rows}:
        held = ids.clone()
        held[live:] = -1
        given = held.clone()
        if ids.numel() > ONE_LAUNCH_ASSIGNMENTS:
            given[live:] = torch.randint(-(2**31), 2**31 - 1, given[live:].shape).int()
        count = torch.tensor([live], dtype=torch.int32, device=device)
        out = run_align(given, num_experts, block_m, live_R=count)
        out.rows_A[live * top_k :] = -1
        check_aligned(out, held, num_experts)
