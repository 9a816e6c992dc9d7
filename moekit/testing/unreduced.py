"""Rows that experts leave to the dispatcher before their sum over K: the kit's side of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moekit.backends.local import LocalDispatcher
from moekit.backends.torch_experts import TorchExperts
from moekit.contract import Dispatched, PackedWeights, Unreduced
from moekit.contract.pending import Pending
from moekit.contract.specs import BackendSpec, DispatcherSpec
from moekit.testing import cases

# A variant of `local`, and one of `torch`.
SUMS_ITSELF, LEAVES_SUMS = "kit_sums_itself", "kit_leaves_sums"


def spec_of(spec: BackendSpec) -> Any:
    """Return the spec of the kit's variant, from that of `local` or `torch`."""
    dispatcher = isinstance(spec, DispatcherSpec)
    kind = SumsItself if dispatcher else LeavesSums
    return replace(
        spec,
        name=SUMS_ITSELF if dispatcher else LEAVES_SUMS,
        target=f"{__name__}:{kind.__name__}",
        batch_invariant=False,
        priority=-1000,
    )


class SumsItself(LocalDispatcher):
    """Checks rows that experts leave to it, and sums them. taken: how often they did."""

    taken = 0

    def takes_unreduced(self, dispatched: Dispatched) -> bool:
        return True

    def finalize(
        self, y: Tensor | Unreduced, dispatched: Dispatched, out_TH: Tensor
    ) -> Pending[Tensor]:
        if isinstance(y, Tensor):
            return super().finalize(y, dispatched, out_TH)
        self.taken += 1
        ids, weights = dispatched.topk_ids, dispatched.topk_weights
        assert ids is not None and weights is not None
        check_unreduced(y, ids, self.problem.hidden_size, self.problem.dtype)
        self.weight_and_reduce(y.rows_NH, ids, weights, out_TH, y.places_RK)
        return Pending.ready(out_TH)


def check_unreduced(given: Unreduced, ids_RK: Tensor, hidden_size: int, dtype: torch.dtype) -> None:
    """Assert that rows have the form that `Unreduced` states."""
    rows, places = given.rows_NH, given.places_RK
    assert rows.dtype == dtype, f"rows_NH is {rows.dtype}, expected {dtype}"
    assert rows.dim() == 2 and rows.shape[1] == hidden_size and rows.stride(1) == 1, (
        f"rows_NH is {tuple(rows.shape)} with strides {rows.stride()}, expected (N, {hidden_size}) "
        "with unit stride in H"
    )
    if places is None:
        assert len(rows) >= ids_RK.numel(), f"{len(rows)} rows for {ids_RK.numel()} assignments"
        return
    assert (
        places.dtype == torch.int32 and places.is_contiguous() and places.shape == ids_RK.shape
    ), (
        f"places_RK is {places.dtype} {tuple(places.shape)}, expected contiguous int32 "
        f"{tuple(ids_RK.shape)}"
    )
    used = places[ids_RK >= 0]
    assert bool(((used >= 0) & (used < len(rows))).all()), f"places_RK names no row of {len(rows)}"


def by_assignment(tokens: Dispatched) -> Dispatched:
    """Return STANDARD tokens with a row for each of the R * K' assignments, of weight 1.

    Experts that reduce return the rows of `Unreduced` for them.
    """
    ids, scale = tokens.topk_ids, tokens.x_scale
    assert ids is not None
    R, K = ids.shape
    if scale is not None and len(scale) == R:
        scale = scale.repeat_interleave(K, 0)
    ones = torch.ones(R * K, 1, dtype=torch.float32, device=ids.device)
    return Dispatched(tokens.x.repeat_interleave(K, 0), scale, ids.reshape(-1, 1), ones)


class LeavesSums(TorchExperts):
    """Leaves two of three calls' sums to the dispatcher, in other calls on other ranks.

    Rows lie anywhere among rows of NaN, and places without an expert are no rows. left: how many
    calls it left.
    """

    left, calls = 0, 0

    def apply_unreduced(
        self, tokens: Dispatched, weights: PackedWeights, workspace: Sequence[Tensor]
    ) -> Unreduced | None:
        self.calls += 1
        if (self.calls + self.problem.parallel.rank) % 3 == 0:
            return None
        self.left += 1
        ids, device = tokens.topk_ids, tokens.x.device
        assert ids is not None
        (R, K), H = ids.shape, self.problem.hidden_size
        y = torch.empty(R * K, H, dtype=self.problem.dtype, device=device)
        self.apply(y, by_assignment(tokens), weights, workspace)
        order = torch.randperm(2 * R * K, generator=cases.generator("places", self.calls))
        places = order[: R * K].to(device)
        rows = torch.full((2 * R * K, H), float("nan"), dtype=y.dtype, device=device)
        rows[places] = y.masked_fill(ids.reshape(-1, 1) < 0, float("nan"))
        return Unreduced(rows, places.view(R, K).masked_fill(ids < 0, -(2**30)).int())
