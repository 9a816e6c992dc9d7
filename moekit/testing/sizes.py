"""The experts kit: sizes, from one expert to those of published models.

On the CPU, problems with many experts, rows or assignments have few columns to save time. A limit
on one size does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any, NamedTuple

import torch

from moekit.contract import Routing
from moekit.problem import MoEProblem, ParallelConfig
from moekit.problem.activation import ACTIVATIONS
from moekit.testing import cases
from moekit.testing.base import over
from moekit.testing.calls import check_call, pack
from moekit.testing.cases import ROUTINGS, Case, make_case, random_routing, random_weights
from moekit.testing.experts_base import ExpertsBase, sizes_of
from moekit.testing.memory import most_memory


class Published(NamedTuple):
    """The sizes in a model's config.json, and other properties of its experts.

    Attributes:
        particular: arguments of `MoEProblem` that only this model needs.
        on_cpu: whether the model is worth a test with few columns, which needs other properties
            than those of the kit's other problems.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    particular: Mapping[str, Any] = {}
    on_cpu: bool = False


_ON_INPUT = {"apply_router_weight_on_input": True}

PUBLISHED = {
    "mixtral": Published(8, 2, 4096, 14336),
    "qwen3-30b": Published(128, 8, 2048, 768),
    "qwen3-next": Published(512, 10, 2048, 512),
    "deepseek-v3": Published(256, 8, 7168, 2048, {"quant": "fp8_block"}),
    "kimi-k2": Published(384, 8, 7168, 2048),
    "gpt-oss-120b": Published(
        128,
        4,
        2880,
        2880,
        {"activation": "swigluoai", "has_bias": True, "quant": "mxfp4_w4a16"},
        on_cpu=True,  # H = I
    ),
    "olmoe": Published(64, 8, 2048, 1024, on_cpu=True),  # H = 2 I
    "llama4-scout": Published(16, 1, 5120, 8192, _ON_INPUT, on_cpu=True),
    "llama4-maverick": Published(128, 1, 5120, 8192, _ON_INPUT),
}

# Rows around common tiles: one fewer, as many, one more; and no row, and one.
_TILES = (16, 32, 64, 128, 160, 192, 224, 256, 384, 512)
_ROWS = (0, 1, *(rows for tile in _TILES for rows in (tile - 1, tile, tile + 1)))
# Steps between numbers of tokens: at least this, and at most this part of the number.
_STEP, _PART, _MOST_IN_STEPS = 17, 16, 4096
# More than 16 bits hold, and than the second dimension of a CUDA grid.
_MOST_16_BITS = 65536
# The part of a GPU's free memory for fp32 weights, their 16-bit form and the packed weights.
_MEMORY = 0.6
_LARGE_CALL = 20e9  # bytes for T * K * H beyond 2 ** 31


class ExpertsSizes(ExpertsBase):
    """Numbers at every size. See `ExpertsConformance`."""

    def _declares(self, name: str, value: Any) -> bool:
        if name == "model":
            return PUBLISHED[value].on_cpu or not self._on_cpu
        return super()._declares(name, value)

    def test_large(self) -> None:
        """Many tiles in every direction, and an odd number of tiles of 128."""
        sizes = [(8, 4, 384, 160)] if self._on_cpu else [(32, 4, 2176, 896), (32, 4, 2048, 768)]
        if self._interpreted:
            sizes = [(3, 3, 192, 160)]
        problem = self._at(*(sizes_of(*each) for each in sizes), {})
        self._check(problem, 65 if self._on_cpu else 1030)

    def test_one_expert(self) -> None:
        """A dense layer, or a rank with one expert."""
        self._check_counts(self._problem(num_experts=1, top_k=1), "rows")

    def test_many_experts(self) -> None:
        """More experts, and more assignments of a token, than published models have; both are odd.

        Then as many as a block has threads. Nemotron 3 Super has 22 of 512 experts.
        """
        inner = 16 if self._on_cpu else 128
        for counts in (((1031, 23), (651, 9)), ((512, 10), (256, 8))):
            sizes = [sizes_of(*c, 2 * n, n) for c in counts for n in (inner, 128, 256)]
            case = make_case(problem := self._at(*sizes), 3 if self._interpreted else 12)
            ids = case.routing.topk_ids
            last = problem.num_experts - 1 - torch.arange(len(ids), device=ids.device)
            ids[:, 0] = torch.where((ids == last[:, None]).any(dim=1), ids[:, 0], last)
            case.routing.topk_weights[:, 0] = 8.0  # so that the last expert's part is not small
            check_call(self._compose(problem, self._native), case)

    def test_rows_per_expert(self) -> None:
        """Each expert has about as many rows as a common tile; two have more than a thousand."""
        rows = [r for r in _ROWS if r <= 65] if self._interpreted else [*_ROWS, 1024, 1025]
        inner = 16 if self._on_cpu else 128
        problem = self._at(
            *(sizes_of(len(rows), 1, 2 * n, n) for n in (inner, 128, 256)),
            apply_router_weight_on_input=False,
        )
        case = make_case(problem, sum(rows))
        order = torch.randperm(sum(rows), generator=cases.generator("rows"))
        ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))[order, None]
        self._check_routed(case, ids)

    def test_many_assignments(self) -> None:
        """T, all of which one expert gets, beyond 65536, and one more than chunks of tokens hold.

        Indices of assignments, tokens and rows need more than 16 bits, and so do grids of programs.
        """
        if self._interpreted:
            self._skip("takes minutes in Triton's interpreter, which runs a program a token")
        inner = 16 if self._on_cpu else 128
        problem = self._at(*(sizes_of(16, 2, 2 * n, n) for n in (inner, 128, 256)))
        self._check(problem, _MOST_16_BITS + 1, "hot")

    def test_token_ranges(self) -> None:
        """Kernels are chosen by ranges of tokens: none that is wider than a step is left out."""
        if self._interpreted:
            self._skip("takes minutes in Triton's interpreter")
        problem = self._problem()
        kernel, weights = self._compose(problem, self._native), random_weights(problem)
        packed, kinds = pack(kernel, weights), cycle(ROUTINGS)
        num_tokens = 1 + int(torch.randint(_STEP, (), generator=cases.generator("first tokens")))
        while num_tokens <= _MOST_IN_STEPS:
            case = make_case(problem, num_tokens, next(kinds), num_tokens, weights)
            check_call(kernel, case, packed)
            num_tokens += max(_STEP, num_tokens // _PART)

    @over("model", PUBLISHED)
    def test_published_sizes(self, model: str) -> None:
        """A model's experts, whole on a GPU; on the CPU with few columns."""
        published, spec = PUBLISHED[model], self._spec()
        particular = dict(published.particular)
        if particular.get("quant") not in spec.schemes:
            particular.pop("quant", None)
        if particular.get("activation", "silu") not in spec.activations & ACTIVATIONS:
            particular.pop("activation", None)
        if not spec.bias:
            particular.pop("has_bias", None)
        whole = sizes_of(*published[:4])
        if self._on_cpu:
            particular.pop("quant", None)  # whose groups need columns
            small = [
                {**whole, **{n: whole[n] // d for n in ("hidden_size", "intermediate_size")}}
                for d in (64, 32, 16)
            ]
            self._check(self._at(*small, **particular), 2 if self._interpreted else 5)
            return
        problem = self._at(whole, **particular)
        with most_memory(cases.device_of(problem)) as free:
            ranks = self._ranks_for(problem, _MEMORY * free)
            parallel = ParallelConfig(ep_size=ranks, dp_size=1)
            self._check_whole(self._at(whole, parallel=parallel, **particular))

    def _ranks_for(self, problem: MoEProblem, free: float) -> int:
        """Return the fewest ranks, a power of two, whose weights fit into so many bytes each."""
        parameters = 3 * problem.num_experts * problem.hidden_size * problem.intermediate_size
        ranks = 1
        while ranks * free < 10 * parameters:  # fp32, 16 bits as given, 16 bits packed, and some
            ranks *= 2
        if ranks > problem.num_experts:
            self._skip(f"one expert needs more than the {free / 1e9:.1f} GB that are free")
        return ranks

    def _check_whole(self, problem: MoEProblem) -> None:
        weights = cases.random_weights(problem, drawn_on=cases.device_of(problem))
        kernel = self._compose(problem, self._native)
        packed = kernel.pack(weights)
        for num_tokens in (1, 61, 1030):
            check_call(kernel, make_case(problem, num_tokens, weights=weights), packed)

    def test_offsets_beyond_int32(self) -> None:
        """T * K * H beyond 2 ** 31 elements: offsets of rows need 64 bits."""
        if self._on_cpu:
            self._skip("takes 20 GB and the time of a GPU")
        problem = self._at(sizes_of(8, 8, 7168, 256))
        with most_memory(cases.device_of(problem)) as free:
            if free < _LARGE_CALL:
                self._skip(f"takes {_LARGE_CALL / 1e9:.0f} GB, and {free / 1e9:.1f} GB are free")
            check_call(self._compose(problem, self._native), make_case(problem, 37500))

    def _check_routed(self, case: Case, ids: torch.Tensor) -> None:
        """Check a call with ``case``'s data and these ids (T, K)."""
        routing = random_routing(case.problem, len(ids), key="routed")
        ids = ids.to(routing.topk_ids)
        weights = routing.topk_weights.masked_fill(ids < 0, float("nan"))
        x = case.x.clone()
        x[(ids < 0).all(dim=1)] = float("nan")
        routed = Case(case.problem, case.weights, x, Routing(weights, ids))
        check_call(self._compose(case.problem, self._native), routed)
