"""Sorting and row kernels, against plain torch. Lists and outputs lie between guard zones."""

import pytest
import torch
from moekit_cutlass.kernels import (
    Groups,
    group_batched,
    problem_sizes,
    sort_assignments,
    spread_rows,
)
from moekit_kernels.align import align_scratch

NAN, FP8 = float("nan"), torch.float8_e4m3fn


def ints(*shape: int, device: torch.device) -> torch.Tensor:
    """Filled with -77, as is what lies before and behind it; see `check_guards`."""
    size = torch.Size(shape).numel()
    return torch.full((size + 64,), -77, dtype=torch.int32, device=device)[32:-32].view(shape)


def check_guards(*lists: torch.Tensor) -> None:
    for x in lists:
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        assert (whole[:32] == -77).all() and (whole[-32:] == -77).all(), "written outside"


def make_groups(ids: torch.Tensor, num_experts: int) -> Groups:
    n, device = ids.numel(), ids.device
    slots, offsets = ints(*ids.shape, device=device), ints(num_experts + 1, device=device)
    return Groups(ids, slots, offsets, ints(n, device=device))


def sorted_groups(ids: torch.Tensor, num_experts: int) -> Groups:
    groups = make_groups(ids, num_experts)
    scratch = ints(align_scratch(ids.numel(), num_experts), device=ids.device)
    sort_assignments(groups, scratch)
    check_guards(groups.slots_RK, groups.offsets_L1, groups.rows_S, scratch)
    return groups


def slab_groups(counts: list[int], slab: int, device: torch.device) -> Groups:
    groups = make_groups(ints(len(counts) * slab, 1, device=device), len(counts))
    group_batched(torch.tensor(counts, dtype=torch.int32, device=device), slab, groups)
    check_guards(groups.ids_RK, groups.slots_RK, groups.offsets_L1, groups.rows_S)
    return groups


def random_ids(rows: int, top_k: int, num_experts: int) -> torch.Tensor:
    return torch.randint(-1, num_experts, (rows, top_k))


@pytest.mark.parametrize(
    ("rows", "top_k", "num_experts"),
    [(1, 1, 1), (1, 8, 128), (5, 2, 8), (37, 8, 40), (100, 8, 300), (300, 3, 33)],
)
@pytest.mark.parametrize(
    ("routing", "dtype"),
    [("uniform", torch.int32), ("one_expert", torch.int64), ("none", torch.int32)],
)
def test_sort_assignments(device, rows, top_k, num_experts, dtype, routing):
    torch.manual_seed(0)
    ids = random_ids(rows, top_k, num_experts).to(dtype)
    if routing != "uniform":
        ids.fill_(num_experts - 1 if routing == "one_expert" else -1)
    groups = sorted_groups(ids.to(device), num_experts)
    flat = ids.flatten()
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    assert groups.offsets_L1.tolist() == [0, *counts.cumsum(0).tolist()]
    order = torch.where(flat < 0, num_experts, flat).argsort(stable=True)
    total = int(groups.total)
    assert groups.rows_S[:total].tolist() == (order // top_k)[:total].tolist()
    slots = torch.full((rows * top_k,), -1)
    slots[order[:total]] = torch.arange(total)
    assert groups.slots_RK.flatten().tolist() == slots.tolist()


@pytest.mark.parametrize(
    ("counts", "slab"), [([3], 4), ([0, 5, 2, 0], 5), ([0, 0], 3), ([70, 1, 60], 90)]
)
def test_group_batched(device, counts, slab):
    L = len(counts)
    groups = slab_groups(counts, slab, device)
    rows = [expert * slab + c for expert, count in enumerate(counts) for c in range(count)]
    assert groups.offsets_L1.tolist() == [sum(counts[:e]) for e in range(L + 1)]
    assert groups.rows_S.tolist() == rows + [-77] * (L * slab - len(rows))
    ids = groups.ids_RK.flatten().tolist()
    assert ids == [row // slab if row in rows else -1 for row in range(L * slab)]
    slots = groups.slots_RK.flatten().tolist()
    assert [slots[row] for row in rows] == list(range(len(rows)))
    assert sum(slot == -1 for slot in slots) == L * slab - len(rows)


@pytest.mark.parametrize("swap", [False, True])
def test_problem_sizes(device, swap):
    ids = torch.tensor([[0, 2], [2, -1], [2, 4]], device=device)
    starts, sizes = problem_sizes(sorted_groups(ids, 5), 40, 24, swap)
    assert starts.dtype == torch.int64 and sizes.dtype == torch.int32
    rows = [1, 0, 3, 0, 1]
    assert starts.tolist() == [0, 1, 1, 4, 4]
    assert sizes.tolist() == [[40, m, 24] if swap else [m, 40, 24] for m in rows]


@pytest.mark.parametrize("kind", ["copy", "copy_fp8", "row", "static"])
@pytest.mark.parametrize("scale_rows", [0, 1, 9])
def test_spread_rows(device, kind, scale_rows):
    torch.manual_seed(0)
    rows, top_k, cols, experts = 9, 3, 72, 4
    ids = random_ids(rows, top_k, experts)
    ids[2] = -1
    groups = sorted_groups(ids.to(device), experts)
    x = torch.randn(rows, cols) * torch.logspace(-2, 2, rows)[:, None]
    x[2] = NAN
    x = x.to(FP8 if kind == "copy_fp8" else torch.bfloat16).to(device)
    if kind in ("row", "static") and scale_rows != (kind == "static"):
        pytest.skip("another way of quantizing")
    scale = (torch.rand(scale_rows, 1) + 0.5).to(device) if scale_rows else None
    out = torch.zeros(rows * top_k, cols, dtype=x.dtype if "copy" in kind else FP8, device=device)
    out_scale = torch.full((rows * top_k,), NAN, device=device)
    spread_rows(
        x, groups.slots_RK, out, x_scale=scale, out_scale_S=out_scale, static=kind == "static"
    )
    total = int(groups.total)
    source = x[groups.rows_S[:total].long()].float()
    if scale is not None:
        want = scale.view(-1).expand(rows)[groups.rows_S[:total].long()]
    else:
        want = source.abs().amax(dim=1) / 448
    if "copy" in kind:
        assert torch.equal(out[:total].float(), source)
    else:
        quantized = (source / want[:, None]).clamp(-448, 448).to(FP8).float()
        assert (out[:total].float() != quantized).float().mean() < 0.01
    if scale is not None or kind == "row":
        torch.testing.assert_close(out_scale[:total], want)
        assert out_scale[total:].isnan().all()
    assert (out[total:].float() == 0).all()
