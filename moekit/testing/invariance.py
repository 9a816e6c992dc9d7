"""The experts kit: batch-invariant problems, where a token has the same bits in every call.

Every comparison is of bits. The numbers of tokens straddle common tiles, so that a backend that
chooses kernels, tiles or orders of sums by them is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moekit.contract import Routing
from moekit.contract.sums import weight_and_reduce
from moekit.problem import DTYPES, MoEProblem
from moekit.problem.quant import SCHEMES
from moekit.testing import cases
from moekit.testing.base import over
from moekit.testing.calls import call, pack, same_bits, spread_rows
from moekit.testing.cases import Case, make_case
from moekit.testing.diagnose import assert_right
from moekit.testing.experts_base import ExpertsBase

NAN = float("nan")

_TILES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_AROUND = tuple(t for tile in _TILES for t in (tile - 1, tile, tile + 1))
_BETWEEN = (24, 48, 96, 192, 384, 768, 1536)  # libraries also choose tiles here
_TOKENS = (1, 2, *sorted((*_AROUND, *_BETWEEN)), 4096)
_SOME_TOKENS = 257
_TOKENS_OF_SCHEMES = (1, 2, 16, 17, 33, 65, 96, 129, 300)
# Triton's interpreter runs one program after the other.
_TOKENS_INTERPRETED = (1, 17, 65, 130)
# Calls of at most so many tokens also start in the middle of the longest one.
_MOST_ELSEWHERE, _MOST_ELSEWHERE_INTERPRETED = _SOME_TOKENS, 17


def check_bits(got_NH: Tensor, wanted_NH: Tensor, what: str) -> None:
    """Assert that tokens have the same bits in two calls."""
    if not same_bits(got_NH, wanted_NH):
        apart_N = (got_NH != wanted_NH).any(dim=1)
        first, largest = apart_N.nonzero()[:1].flatten().tolist(), (got_NH - wanted_NH).abs().max()
        raise AssertionError(
            f"not batch-invariant: {what}, {int(apart_N.sum())} of {len(apart_N)} tokens differ, "
            f"the first is {first}, and the largest difference is {float(largest):.3g}"
        )


def rows_of(case: Case, rows: Sequence[int] | slice | Tensor) -> Case:
    """Return the call of these tokens alone, in this order."""
    r = case.routing
    return replace(case, x=case.x[rows], routing=Routing(r.topk_weights[rows], r.topk_ids[rows]))


def cancelling(case: Case, gemm: int) -> Case:
    """Return a call in which the terms of every sum of a GEMM over K cancel in pairs.

    The sum is then what its order rounds off: other orders have other results in every dtype, where
    results that are rounded to 16 bits hide them.

    Args:
        case: a call; it is returned as it is if its weights are quantized.
        gemm: 1 (the gate's sums, if there is one) or 2.
    """
    p, w = case.problem, case.weights
    if p.quant.weight is not None:
        return case
    w13, w2, x = w.w13.clone(), w.w2.clone(), case.x.clone()
    inner = p.local_intermediate_size
    order = torch.randperm(
        p.hidden_size if gemm == 1 else inner, generator=cases.generator("cancelling")
    ).to(x.device)
    one, other = order[: len(order) // 2], order[len(order) // 2 : len(order) // 2 * 2]
    if gemm == 1:
        x[:, other] = x[:, one]
        w13[:, :inner, other] = -w13[:, :inner, one]
        if len(order) % 2:
            x[:, order[-1]] = 0
    else:
        halves = w13.view(w13.shape[0], -1, inner, p.hidden_size)  # gate and up, or neither
        halves[:, :, other] = halves[:, :, one]
        w2[:, :, other] = -w2[:, :, one]
        if len(order) % 2:
            w2[:, :, order[-1]] = 0
    return replace(case, x=x, weights=replace(w, w13=w13, w2=w2))


class ExpertsInvariance(ExpertsBase):
    """Equality of bits in batch-invariant problems. See `ExpertsConformance`."""

    @over("dtype", DTYPES)
    def test_batch_invariant_tokens(self, dtype: str) -> None:
        """A token has the same bits in calls of 1 to 4096 tokens, wherever it is in them.

        The sums of one GEMM cancel, so that their order shows in every bit of the result.
        """
        problem = self._invariant(dtype=DTYPES[dtype], apply_router_weight_on_input=False)
        sizes = _TOKENS_INTERPRETED if self._interpreted else _TOKENS
        # On the CPU the calls of thousands of tokens take seconds: one dtype is enough.
        whole = not self._on_cpu or DTYPES[dtype] is self._main["dtype"]
        for gemm, most in ((1, _SOME_TOKENS), (2, max(sizes) if whole else _SOME_TOKENS)):
            some = [size for size in sizes if size <= most]
            case = cancelling(make_case(problem, max(some)), gemm)
            self._check_sizes(case, some, f"GEMM {gemm}, ", right=False)

    @over("scheme", SCHEMES)
    def test_batch_invariant_scheme(self, scheme: str) -> None:
        """With biases, if the backend has them."""
        most, sizes = (65, (1, 17)) if self._interpreted else (500, _TOKENS_OF_SCHEMES)
        problem = self._invariant(quant=scheme)
        biased = problem.replace(has_bias=True)
        problem = problem if self._spec().unsupported(biased) else biased
        self._check_sizes(make_case(problem, most), sizes)

    @pytest.mark.parametrize("gemm", [1, 2])
    def test_batch_invariant_neighbours(self, gemm: int) -> None:
        """A token has the same bits for any values and places of the others.

        It is in another position, behind a dispatcher of the other format, or beside tokens that
        are larger, or that have other experts.
        """
        case = cancelling(make_case(self._invariant(), self._many, "masked"), gemm)
        run, r = self._runner(case), case.routing
        wanted = run(case)
        bridged = self._runner(case, self._bridged)(case)
        check_bits(bridged, wanted, f"behind {self._bridged} instead of {self._native}")
        for turn in range(2 if self._interpreted else 6):
            order = torch.randperm(self._many, generator=cases.generator("order", turn))
            order = order.to(case.x.device)
            check_bits(run(rows_of(case, order)), wanted[order], "in another order")
        mine = torch.rand(self._many, generator=cases.generator("mine")) < 0.1
        mine[[0, -1]] = True
        mine = mine.to(case.x.device)
        steps = torch.arange(r.topk_ids.shape[1], device=case.x.device)
        hot = ((steps + 1) % case.problem.num_experts).expand_as(r.topk_ids)
        for what, x, ids in (
            ("16 times as large", case.x * 16, r.topk_ids),
            ("all routed to the same experts", case.x.nan_to_num(), hot),
            ("routed to no expert", case.x * float("nan"), torch.full_like(r.topk_ids, -1)),
        ):
            changed = replace(
                case,
                x=torch.where(mine[:, None], case.x, x),
                routing=Routing(
                    r.topk_weights.nan_to_num(1.0), torch.where(mine[:, None], r.topk_ids, ids)
                ),
            )
            check_bits(run(changed)[mine], wanted[mine], f"with the other tokens {what}")

    @pytest.mark.parametrize("gemm", [1, 2])
    def test_batch_invariant_experts(self, gemm: int) -> None:
        """An expert's rows have the same bits wherever it is held, with however many others."""
        problem = self._invariant(top_k=1, apply_router_weight_on_input=False)
        case = cancelling(make_case(problem, self._many), gemm)
        held = torch.tensor([problem.num_experts - 1, 1], device=case.x.device)
        ids = held[torch.arange(self._many, device=case.x.device) % 2][:, None]
        case = replace(case, routing=Routing(case.routing.topk_weights, ids))
        wanted = self._runner(case)(case)
        fewer = problem.replace(num_experts=2)
        if reasons := self._spec().unsupported(fewer):
            self._skip("; ".join(reasons))
        routing = Routing(case.routing.topk_weights, (ids == held[1]).to(ids.dtype))
        alone = Case(fewer, case.weights.select(held.tolist()), case.x, routing)
        check_bits(self._runner(alone)(alone), wanted, "on a rank with fewer experts")

    @over("dtype", DTYPES)
    def test_weight_and_reduce(self, dtype: str) -> None:
        """The backend's own function has the bits of `moekit.plugin.weight_and_reduce`.

        Kernels of several backends may share a dispatcher, which sums by one of their functions.
        """
        problem = self._invariant(dtype=DTYPES[dtype], apply_router_weight_on_input=False)
        reduce = self._compose(problem, self._native).experts.weight_and_reduce
        if reduce is weight_and_reduce:
            self._skip("the backend sums with moekit.plugin.weight_and_reduce")
        for rows, top_k, hidden in ((1, 1, 33), (6, 2, 1300), (40, 9, 320)):
            given = _reduction(problem, rows, top_k, hidden)
            wide = torch.full((rows, 2 * hidden), NAN, dtype=problem.dtype, device=given[0].device)
            spread, places = spread_rows(*given[:2], rows)
            for out in (wide[:, :hidden], wide[:, ::2]):
                wanted = weight_and_reduce(*given, torch.empty_like(out))
                for y_NH, at in ((given[0], None), (spread, places)):
                    out.fill_(NAN)
                    got = reduce(y_NH, *given[1:], out, at)
                    what = f"(R, K, H) = {rows, top_k, hidden}, places {at is not None}"
                    assert got is out, f"{what}: weight_and_reduce must return the output given"
                    check_bits(out, wanted, f"{what}, compared with moekit.plugin's function")

    # -- for these tests ------------------------------------------------------------------------

    @property
    def _many(self) -> int:
        return 65 if self._interpreted else 300

    def _invariant(self, **changes: Any) -> MoEProblem:
        """Return a problem without quantization, unless ``changes`` have some, or skip."""
        self._needs("batch_invariant")
        plain = {"quant": "none"} if "none" in self._spec().schemes else {}
        return self._problem(**{"batch_invariant": True, **plain, **changes})

    def _runner(self, case: Case, dispatcher: str | None = None) -> Any:
        """Return a function that calls a kernel with a case's tokens, under poison."""
        kernel = self._compose(case.problem, dispatcher or self._native)
        packed = pack(kernel, case.weights)
        return lambda some: call(kernel, packed, some)

    def _check_sizes(
        self, case: Case, sizes: Sequence[int], what: str = "", *, right: bool = True
    ) -> None:
        """Compare calls of ``sizes`` tokens with the call of all, which is ``right``."""
        run, most = self._runner(case), len(case.x)
        elsewhere = _MOST_ELSEWHERE_INTERPRETED if self._interpreted else _MOST_ELSEWHERE
        wanted = run(case)
        if right:
            assert_right(wanted, case)
        for tokens in sizes:
            starts = {0, (most - tokens) // 2 if tokens <= elsewhere else 0}
            for start in sorted(starts):
                rows = slice(start, start + tokens)
                alone = f"tokens {start} to {start + tokens - 1} alone, instead of all {most}"
                check_bits(run(rows_of(case, rows)), wanted[rows], what + alone)


def _reduction(
    problem: MoEProblem, rows: int, top_k: int, hidden: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (R * K, H), ids and weights (R, K), with NaN where the id is -1."""
    draw = cases.generator("reduction", rows, top_k)
    ids = torch.randint(-1, 5, (rows, top_k), generator=draw)
    ids[rows // 2, top_k // 2 :] = -1
    weights = torch.randn(rows, top_k, generator=draw).masked_fill(ids < 0, NAN)
    y = torch.randn(rows * top_k, hidden, generator=draw).to(problem.dtype)
    y = y.masked_fill(ids.view(-1, 1) < 0, NAN)
    device = cases.device_of(problem)
    return y.to(device), ids.to(device), weights.to(device)
