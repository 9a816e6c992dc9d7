"""The experts kit: right numbers for everything that the spec declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moekit.contract import Routing
from moekit.errors import WeightsError
from moekit.problem import DTYPES, ActivationFormat, ParallelConfig
from moekit.problem.activation import ACTIVATIONS, ALPHAS, CLAMPABLE, Activation
from moekit.problem.quant import SCHEMES, WIRE_SCHEMES
from moekit.testing import cases
from moekit.testing.base import over
from moekit.testing.calls import (
    QUANTIZED_WIRE,
    ROW_SCALES,
    SPARE_CAPACITY,
    call,
    check_call,
    defaults,
    pack,
)
from moekit.testing.cases import ROUTINGS, SIGNED, make_case, random_weights
from moekit.testing.crossings import ALPHA, LIMIT
from moekit.testing.diagnose import assert_close
from moekit.testing.experts_base import TOKENS, ExpertsBase, sizes_of

# Numbers of tokens, and of an expert's rows; in Triton's interpreter the small ones.
_SMALL_TILES = (8, 9)
_TILES = (4, *_SMALL_TILES, 16, 32, 64, 65, 256, 512)

_QUANTIZED_INPUT = sorted(n for n, s in SCHEMES.items() if s.activation is not None)
_PER_TENSOR_INPUT = {n for n, s in SCHEMES.items() if s.activation and s.activation.per_tensor}
_BRIDGED = "other_format"  # than the backend's own
_INPUT_FORMS = [
    (name, wire)
    for name in _QUANTIZED_INPUT
    for wire in (QUANTIZED_WIRE, ROW_SCALES, _BRIDGED)
    if wire != QUANTIZED_WIRE or name in WIRE_SCHEMES
    if wire != ROW_SCALES or name in _PER_TENSOR_INPUT  # others always have them
]
_ACT_ORDER = [n for n, s in SCHEMES.items() if s.weight is not None and s.weight.act_order]


class ExpertsNumbers(ExpertsBase):
    """Numbers in every declared case. See `ExpertsConformance`."""

    def _declares(self, name: str, value: Any) -> bool:
        if name == "scheme,wire":
            spec, (scheme, wire) = self._spec(), value
            return scheme in spec.schemes and (wire != ROW_SCALES or spec.takes_quantized)
        return super()._declares(name, value)

    # -- arithmetic ---------------------------------------------------------------------------

    @over("scheme", SCHEMES)
    def test_scheme(self, scheme: str) -> None:
        """Some tokens, one and many; and tokens far from 1, so that scales must follow them, in a
        call in which torch has another default dtype and device.
        """
        problem = self._problem(quant=scheme)
        self._check_counts(problem, "masked", invariant=False)
        if self._interpreted:
            return
        large = cases.scaled(make_case(problem, 3), 2.0**12)
        with defaults(torch.bfloat16, large.x.device):
            kernel = self._compose(problem, self._native)
            out = call(kernel, pack(kernel, large.weights), large)
        assert_close(out, large.reference(), problem, "output with other defaults", case=large)

    @over("dtype", DTYPES)
    def test_dtype(self, dtype: str) -> None:
        self._check_counts(self._problem(dtype=DTYPES[dtype]))

    @over("name", sorted(ACTIVATIONS))
    def test_activation(self, name: str) -> None:
        """In the most precise dtype, because bfloat16 hardly distinguishes gelu and gelu_tanh.

        Activations are right for large values, too, whose exponential is infinite.
        """
        problem = self._precise({}, activation=name)
        self._check_counts(problem)
        case = cases.scaled(make_case(problem, 5), 2.0**6)
        check_call(self._compose(problem, self._native), case)

    @over("name", sorted(CLAMPABLE))
    def test_clamp(self, name: str) -> None:
        """A limit that most rows exceed, another alpha for kinds that have one, and biases."""
        bias = [{"has_bias": True}] if self._spec().bias else []
        activation = Activation(name, alpha=ALPHA if name in ALPHAS else None, limit=LIMIT)
        self._check_counts(self._precise(*bias, {}, activation=activation))

    # -- tokens and routing -------------------------------------------------------------------

    @over("num_tokens", TOKENS)
    def test_num_tokens(self, num_tokens: int) -> None:
        self._check(self._problem(), num_tokens)

    @pytest.mark.parametrize("kind", [*(k for k in ROUTINGS if k != "random"), SIGNED])
    def test_routing(self, kind: str) -> None:
        """Experts without rows, one expert with all rows, ids of -1, signed router weights.

        `test_dtype` has the random routing.
        """
        self._check(self._problem(), kind=kind)

    def test_full_tiles(self) -> None:
        """As many tokens as tiles hold, or one more; one expert gets all of them."""
        problem = self._problem()
        kernel, weights = self._compose(problem, self._native), random_weights(problem)
        packed = pack(kernel, weights)
        for num_tokens in _SMALL_TILES if self._interpreted else _TILES:
            check_call(kernel, make_case(problem, num_tokens, "hot", weights=weights), packed)

    def test_experts_without_tokens(self) -> None:
        """Weights of an expert that no token has change nothing, NaN included."""
        if "none" not in self._spec().schemes:
            self._skip("the spec declares no unquantized weights")
        problem = self._problem(quant="none")
        case = make_case(problem, self._T, "idle")
        kernel = self._compose(problem, self._native)
        used = case.routing.topk_ids.flatten().tolist()
        idle = [e for e in range(problem.num_experts) if e not in used]
        weights = case.weights._map(torch.clone)
        weights.w13[idle] = weights.w2[idle] = float("nan")
        out = call(kernel, pack(kernel, weights), case)
        assert_close(out, case.reference(), problem, case=case)

    @pytest.mark.parametrize("factor", [2.0**12, 2.0**-20], ids=["large", "small"])
    def test_magnitude(self, factor: float) -> None:
        """Tokens far from 1: the contract allows the whole range of the dtype."""
        problem = self._problem()
        if problem.dtype == torch.float16:
            factor = max(factor, 2.0**-6)
        case = cases.scaled(make_case(problem, self._T, "masked"), factor)
        kernel = self._compose(problem, self._native)
        try:
            packed = pack(kernel, case.weights)
        except WeightsError as error:  # the library's range is smaller, and it says so
            self._skip(str(error))
        check_call(kernel, case, packed)

    def test_large_activations(self) -> None:
        """In float16 act(h) may be thousands, which is within its range."""
        problem = self._problem(dtype=torch.float16)
        if problem.quant.activation is not None and problem.quant.activation.static:
            self._skip("static scales bound the activations")
        case = make_case(problem, self._T, "masked")
        case = replace(case, x=case.x * 16)
        while case.reference().abs().max() > 2.0**14:  # the outputs of experts must be, too
            case = replace(case, x=case.x / 2)
        check_call(self._compose(problem, self._native), case)

    def test_outputs_beyond_float16(self) -> None:
        """An expert's output may exceed 65504 if its router weight brings it back into range."""
        if not getattr(self._spec(), "weights_in_fp32", False):
            self._skip("the spec does not declare weights_in_fp32")
        problem = self._problem(dtype=torch.float16)
        case = cases.beyond_float16(make_case(problem, self._T, "masked"))
        check_call(self._compose(problem, self._native), case)

    def test_tokens_are_independent(self) -> None:
        """A token that holds NaN, infinity or large numbers changes its own output and no other.

        Values beyond a static scale saturate. Schemes whose tokens share a scale are left out.
        (Sizes are multiples of 32, because oneDNN's products on AMX mix rows of bfloat16
        otherwise.)
        """
        kinds: dict[object, str] = {}
        for name, s in SCHEMES.items():
            if name in self._spec().schemes and not s.shared_scale:
                kinds.setdefault((s.activation is None, s.activation and s.activation.static), name)
        for scheme in kinds.values():
            sizes = {} if SCHEMES[scheme].weight else {"hidden_size": 96, "intermediate_size": 64}
            problem = self._problem(quant=scheme, **(sizes if self._on_cpu else {}))
            case = make_case(problem, self._T)
            case.x[3], case.x[self._T // 2, 5] = float("nan"), float("inf")
            case.x[5] *= 64
            out = call(
                kernel := self._compose(problem, self._native), pack(kernel, case.weights), case
            )
            right = torch.isfinite(case.x).all(dim=1)
            right[5] = False
            routing = Routing(case.routing.topk_weights[right], case.routing.topk_ids[right])
            rest = replace(case, x=case.x[right], routing=routing)
            what = "the other tokens' output"
            assert_close(out[right], rest.reference(), problem, what, case=rest)
            assert bool(torch.isfinite(out[5]).all()), "large numbers became NaN or infinite"

    def test_equal_tokens(self) -> None:
        """Some tokens differ in their routing alone, as those of a prompt that repeats a word.

        The others differ: roundings of equal tokens do not average out.
        """
        case = make_case(self._problem(), self._T)
        case.x[4:8] = case.x[4]
        check_call(self._compose(case.problem, self._native), case)

    # -- parallelism ----------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["random", "one_expert"])
    def test_expert_parallel_slices(self, kind: str) -> None:
        """Partial sums of ranks with unequal shares. With one_expert, most ranks get no row."""
        layer = self._problem()
        ranks = 4 if layer.num_experts % 4 else 3
        problem = self._problem(parallel=ParallelConfig(ep_size=ranks, dp_size=1))
        whole = make_case(cases.whole(problem), self._T, kind)
        total = torch.zeros(whole.x.shape, dtype=torch.float32, device=whole.x.device)
        for rank in range(ranks):
            mine = self._on_rank(problem, ep_rank=rank)
            case = make_case(mine, self._T, kind)
            assert len(mine.local_experts) == case.weights.num_experts
            total += check_call(self._compose(mine, self._native), case).float()
        out = total.to(problem.dtype)
        assert_close(out, whole.reference(), problem, "sum over ranks", case=whole)

    def test_tensor_parallel_slices(self) -> None:
        """Partial sums over shares of the intermediate size; biases if the backend has them."""
        bias = {"has_bias": True} if self._spec().bias else {}
        problem = self._problem(parallel=ParallelConfig(tp_size=2), **bias)
        layer = cases.whole(problem)
        full = cases.unquantized_weights(layer)
        partial, want = [], []
        for rank in range(2):
            mine = self._on_rank(problem, tp_rank=rank)
            case = make_case(mine, self._T, weights=cases.tp_shard(full, mine))
            partial.append(check_call(self._compose(mine, self._native), case).float())
            want.append(case.reference())
        total = (partial[0] + partial[1]).to(problem.dtype)
        case = make_case(layer, self._T, weights=cases.quantized(full, layer))
        assert_close(total, want[0] + want[1], problem, "sum over ranks", case=case)
        if problem.quant.weight is None:
            assert_close(total, case.reference(), problem, "sum over ranks")

    @over("scheme", [name for name, s in SCHEMES.items() if s.weight and s.weight.group[0] > 1])
    def test_padded_tensor_parallel_slices(self, scheme: str) -> None:
        """Three blocks on two ranks: blocks are not cut, so the second rank's share is padded."""
        problem = self._at(
            *(sizes_of(4, 2, hidden, 384) for hidden in (128, 256, 512)),
            quant=scheme,
            parallel=ParallelConfig(tp_size=2),
        )
        layer = cases.whole(problem)
        full = cases.unquantized_weights(layer)
        total = torch.zeros(())
        for rank in range(2):
            mine = self._on_rank(problem, tp_rank=rank)
            case = make_case(mine, self._T, weights=cases.tp_shard(full, mine))
            total = total + check_call(self._compose(mine, self._native), case).float().cpu()
        case = make_case(layer, self._T, weights=cases.quantized(full, layer))
        assert_close(total.to(case.x), case.reference(), layer, "sum over ranks", case=case)

    # -- forms of weights and input -------------------------------------------------------------

    def test_columns_in_order(self) -> None:
        """Act-order without g_idx for w2 (as tensor parallelism cuts it), for w13, or for both."""
        declared = [name for name in _ACT_ORDER if name in self._spec().schemes]
        if not declared:
            self._skip("declares no scheme in act-order")
        problem = self._problem(quant=declared[0])
        kernel, weights = self._compose(problem, self._native), random_weights(problem)
        for without in (("w2_g_idx",), ("w13_g_idx",), ("w13_g_idx", "w2_g_idx")):
            left: dict[str, Any] = dict.fromkeys(without)
            check_call(kernel, make_case(problem, self._T, weights=replace(weights, **left)))

    def test_spare_capacity(self) -> None:
        """A batched layout with more capacity than tokens, in a part of a dispatcher's buffer."""
        if self._spec().format is not ActivationFormat.BATCHED:
            self._skip("STANDARD experts get no batched layout")
        self._check(self._problem(), kind="masked", dispatcher=SPARE_CAPACITY)

    @over("scheme,wire", _INPUT_FORMS)
    def test_input_form(self, scheme: str, wire: str) -> None:
        """Tokens quantized before the transfer, or after a bridge, and scales per row.

        NaN of tokens without an expert must not reach a shared scale. No tokens, and tokens of
        zeros, are included. `test_scheme` has tokens that the experts or the kernel quantize in the
        native format.
        """
        problem = self._problem(quant=scheme)
        kernel = self._compose(problem, self._bridged if wire == _BRIDGED else wire)
        packed = pack(kernel, random_weights(problem))
        for num_tokens in (self._many_tokens, 0):
            check_call(kernel, make_case(problem, num_tokens, "rows"), packed)
        case = make_case(problem, 1)
        check_call(kernel, replace(case, x=torch.zeros_like(case.x)), packed)
