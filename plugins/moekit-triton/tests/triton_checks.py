"""Checks that test files share: alignment, and the whole block."""

from __future__ import annotations

import pytest
import torch
import triton
from moekit_kernels.align import COUNTERS, SortedAssignments, align, align_capacity, align_scratch
from moekit_triton import capabilities, heuristics
from moekit_triton.plans import LaunchPlan, Sorted

import moekit
from moekit import MoEProblem
from moekit.testing import assert_close
from moekit.testing.cases import make_case, random_weights


def compiled(monkeypatch: pytest.MonkeyPatch, *, triton_version: str = "") -> None:
    """Choose plans as in a process that compiles kernels, with Gluon."""
    for module in (heuristics, capabilities):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(capabilities, "GLUON_VERSIONS", capabilities._RAN)
    if triton_version:
        monkeypatch.setattr(triton, "__version__", triton_version)


def choose_plan(problem: MoEProblem, rows: int, top_k: int, *, batched: bool = False) -> LaunchPlan:
    """Return the plan for calls of ``rows`` rows of ``top_k`` ids; BATCHED: of a capacity."""
    return heuristics.Planner(problem, batched=batched).plan(rows, top_k)


def use_plan(monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan) -> None:
    """Let every call use ``plan``."""
    monkeypatch.setattr(heuristics.Planner, "plan", lambda *_: plan)
    monkeypatch.setattr(heuristics, "sorting_pays", lambda *_: isinstance(plan, Sorted))


def uneven_ids(num_experts: int, top_k: int, rows: int) -> torch.Tensor:
    """Return (rows, K) on the GPU; of 8 experts one has no rows, some assignments no expert."""
    ids = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=1).indices
    if num_experts == 8:
        ids[::3, 1] = -1
        ids[ids == 3] = 2
    return ids


def run_align(ids: torch.Tensor, num_experts: int, block_m: int) -> SortedAssignments:
    """Align into lists that hold garbage; test_kernels_align.py checks `align`."""
    n, capacity = ids.numel(), align_capacity(ids.numel(), num_experts, block_m)
    blocks = capacity // block_m
    sizes = (capacity, blocks, 1, n, COUNTERS + blocks, align_scratch(n, num_experts))
    assignments, experts, num_rows, rows, counters, scratch = (
        torch.full((size,), -77, dtype=torch.int32, device=ids.device) for size in sizes
    )
    out = SortedAssignments(assignments, experts, num_rows, block_m, rows, counters=counters)
    align(ids, num_experts, out, scratch)
    return out


def real_rows(aligned: SortedAssignments) -> torch.Tensor:
    """Return which sorted rows are neither padding nor unused: bool (capacity,)."""
    assert aligned.rows_A is not None
    row = torch.arange(aligned.capacity, device=aligned.assignments_S.device)
    used = row < int(aligned.num_rows)
    return used & (aligned.assignments_S < aligned.rows_A.numel())


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``want`` (fp32)."""
    return float((out.float() - want).norm() / want.norm())


def check_block(problem: MoEProblem, tokens: int) -> None:
    """Compare the composed kernel with the oracle, on three kinds of routings."""
    weights = random_weights(problem)
    kernel = moekit.compose(problem, "local", "triton")
    packed = kernel.pack(weights)
    for kind in ("random", "hot", "masked"):
        case = make_case(problem, tokens, kind)
        out = kernel(case.x, packed, case.routing)
        assert_close(out, case.reference(), problem, kind, case=case)
