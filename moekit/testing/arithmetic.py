"""The experts kit, first part: are the numbers right, for all that the spec declares?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moekit.activation import ACTIVATIONS, CLAMPABLE, GATED, NON_GATED, Activation
from moekit.plugins import ExpertsSpec
from moekit.problem import DTYPES, ActivationFormat, DeviceSpec, MoEProblem, ParallelConfig
from moekit.quant import SCHEMES, WIRE_SCHEMES
from moekit.route import to_physical
from moekit.testing import cases
from moekit.testing.base import Conformance, Sizes
from moekit.testing.calls import (
    QUANTIZED_WIRE,
    ROW_SCALES,
    check_call,
    check_negative_controls,
    pack,
    same_bits,
)
from moekit.testing.cases import ROUTINGS, Case, make_case, random_weights
from moekit.testing.compare import assert_close

_TOKENS = {"cpu": (0, 1, 2, 33), "other": (0, 1, 2, 33, 257, 1000)}
_COMBINATIONS = 6

_QUANTIZED_INPUT = sorted(n for n, s in SCHEMES.items() if s.activation is not None)
_PER_TENSOR_WEIGHTS = sorted(
    n for n, s in SCHEMES.items() if s.weight is not None and s.weight.per_tensor
)
_ACT_ORDER = [n for n, s in SCHEMES.items() if s.weight is not None and s.weight.act_order]
# Act-order is of columns, and rows are the same without.
_PER_ROW_WEIGHTS = sorted(
    n
    for n, s in SCHEMES.items()
    if s.weight is None or (s.weight.group[0] in (1, -1) and n not in _ACT_ORDER)
)


def _sizes(num_experts: int, top_k: int, hidden: int, intermediate: int) -> Sizes:
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }


class ExpertsNumbers(Conformance):
    """Right numbers in every declared case. See `ExpertsConformance`."""

    def _spec(self) -> ExpertsSpec:
        return self._registry().expert(self.backend)

    def _names(self) -> dict[str, str]:
        return {"experts": self.backend}

    def _sizes(self, scheme: str, device: DeviceSpec) -> list[Sizes]:
        """No multiples of any tile first; then rounder ones, for backends that need those.

        In act-order always several groups: one has no order.
        """
        weight = SCHEMES[scheme].weight
        ordered = weight is not None and weight.act_order
        grouped = ordered or (weight is not None and weight.group[0] > 1)
        if device.type == "cpu":
            odd = _sizes(4, 2, 160, 144) if grouped else _sizes(6, 2, 96, 80)
            rounder = [_sizes(4, 2, n, n) for n in ((256, 512) if ordered else (128, 256, 512))]
            return [odd, *rounder]
        rounder = [_sizes(8, 2, 512, 256), _sizes(8, 2, 1024, 512), _sizes(8, 2, 2048, 1024)]
        return [_sizes(8, 2, 320, 272), *rounder, _sizes(8, 2, 4096, 2048)]

    @property
    def _native(self) -> str:
        """The core's dispatcher of the backend's own format."""
        standard = self._spec().format is ActivationFormat.STANDARD
        return "local" if standard else "batched_reference"

    @property
    def _T(self) -> int:
        """A number of tokens that is no multiple of any tile."""
        return 17 if self._device().type == "cpu" else 133

    def _check(
        self,
        problem: MoEProblem,
        num_tokens: int | None = None,
        kind: str = "random",
        dispatcher: str | None = None,
        **data: Any,
    ) -> None:
        """Composes, packs, calls under poison, compares with the oracle."""
        case = make_case(problem, self._T if num_tokens is None else num_tokens, kind, **data)
        check_call(self._compose(problem, dispatcher or self._native), case)

    # -- arithmetic ---------------------------------------------------------------------------

    @pytest.mark.parametrize("scheme", list(SCHEMES))
    def test_scheme(self, scheme: str) -> None:
        self._check(self._problem(quant=scheme), kind="slots")

    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_dtype(self, dtype: str) -> None:
        self._check(self._problem(dtype=DTYPES[dtype]))

    @pytest.mark.parametrize("name", sorted(ACTIVATIONS))
    def test_activation(self, name: str) -> None:
        """In the most precise dtype: bfloat16 hardly tells gelu from gelu_tanh."""
        self._check(self._precise(activation=name))

    @pytest.mark.parametrize("name", sorted(CLAMPABLE))
    def test_clamp(self, name: str) -> None:
        """A limit that most rows exceed, and for swigluoai another alpha."""
        alpha = 1.2 if name == "swigluoai" else None
        self._check(self._precise(activation=Activation(name, alpha=alpha, limit=1.5)))

    @pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
    def test_bias(self, gated: bool) -> None:
        kinds = (GATED if gated else NON_GATED) & self._spec().activations
        if not kinds:
            self._skip(f"declares no {'gated' if gated else 'non-gated'} activation")
        main = self._main["activation"]
        name = main if main in kinds else min(kinds)
        self._check(self._problem(activation=name, has_bias=True), kind="slots")

    # -- tokens and routing -------------------------------------------------------------------

    @pytest.mark.parametrize("num_tokens", sorted({t for ts in _TOKENS.values() for t in ts}))
    def test_num_tokens(self, num_tokens: int) -> None:
        if self._device().type == "cpu" and num_tokens not in _TOKENS["cpu"]:
            self._skip("a size for accelerators")
        self._check(self._problem(), num_tokens)

    @pytest.mark.parametrize("kind", ROUTINGS)
    def test_routing(self, kind: str) -> None:
        """Experts without rows, all rows to one expert, slots and whole tokens without expert."""
        self._check(self._problem(), kind=kind)

    def test_top_1(self) -> None:
        self._check(self._problem(top_k=1), kind="rows")

    def test_router_weight_on_input(self) -> None:
        problem = self._problem(top_k=1, apply_router_weight_on_input=True)
        self._check(problem, kind="rows")

    def test_every_token_to_every_expert(self) -> None:
        self._check(self._problem(num_experts=4, top_k=4))

    # -- parallelism ----------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["random", "one_expert"])
    def test_expert_parallel_slices(self, kind: str) -> None:
        """Partial sums of ranks with unequal shares; with one_expert most ranks get no row."""
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
        assert_close(total.to(problem.dtype), whole.reference(), problem, "sum over ranks")

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
        assert_close(total, want[0] + want[1], problem, "sum over ranks")
        if problem.quant.weight is None:
            case = make_case(layer, self._T, weights=cases.quantized(full, layer))
            assert_close(total, case.reference(), problem, "sum over ranks")

    def test_replicas(self) -> None:
        """Two experts have a second replica; the result is that of the logical experts."""
        problem = self._problem(num_redundant_experts=2)
        E = problem.num_experts
        replicas = torch.full((E, 2), -1)
        replicas[:, 0] = torch.arange(E)
        replicas[:2, 1] = torch.tensor([E, E + 1])
        logical = make_case(problem.replace(num_redundant_experts=0), self._T, "slots")
        case = Case(
            problem, random_weights(problem), logical.x, to_physical(logical.routing, replicas)
        )
        out = check_call(self._compose(problem, self._native), case)
        assert_close(out, logical.reference(), problem, "result with replicas")

    # -- forms of weights and input -------------------------------------------------------------

    @pytest.mark.parametrize("scheme", _PER_ROW_WEIGHTS)
    def test_interleaved_weights(self, scheme: str) -> None:
        """Checkpoints whose w13 alternates gate and up rows, as gpt-oss's do."""
        gated = sorted(GATED & self._spec().activations)
        if not gated:
            self._skip("declares no gated activation")
        bias = {"has_bias": True} if self._spec().bias else {}
        main = self._main["activation"]
        name = main if main in gated else gated[0]
        problem = self._problem(quant=scheme, activation=name, **bias)
        kernel, weights = self._compose(problem, self._native), random_weights(problem)
        plain, mixed = pack(kernel, weights), pack(kernel, cases.interleaved(weights))
        for tensor, want in zip(mixed.experts.values(), plain.experts.values(), strict=True):
            assert same_bits(tensor, want)

    def test_columns_in_order(self) -> None:
        """Schemes in act-order without g_idx for w2, as tensor parallelism cuts it, or w13."""
        declared = [name for name in _ACT_ORDER if name in self._spec().schemes]
        if not declared:
            self._skip("declares no scheme in act-order")
        problem = self._problem(quant=declared[0])
        kernel, weights = self._compose(problem, self._native), random_weights(problem)
        for without in (("w2_g_idx",), ("w13_g_idx",), ("w13_g_idx", "w2_g_idx")):
            left: dict[str, Any] = dict.fromkeys(without)
            check_call(kernel, make_case(problem, self._T, weights=replace(weights, **left)))

    @pytest.mark.parametrize("scheme", _PER_TENSOR_WEIGHTS)
    def test_scale_each_for_gate_and_up(self, scheme: str) -> None:
        """Per-tensor w13 scales of shape (L, 2): checkpoints quantize gate and up apart."""
        problem = self._problem(quant=scheme)
        if not problem.activation.gated:
            self._skip(f"{problem.activation.name} has no gate")
        plain = random_weights(problem)
        assert plain.w13_scale is not None
        pair = plain.w13_scale.view(-1, 1) * torch.tensor([1.0, 0.5], device=plain.w13.device)
        weights = replace(plain, w13_scale=pair)
        case = make_case(problem, self._T, weights=weights)
        # Half the scale on one half: the oracle must see it too.
        assert not torch.allclose(
            case.reference(), make_case(problem, self._T, weights=plain).reference()
        )
        check_call(self._compose(problem, self._native), case)

    @pytest.mark.parametrize("scheme", _QUANTIZED_INPUT)
    @pytest.mark.parametrize("wire", ["local", QUANTIZED_WIRE, ROW_SCALES, "batched_reference"])
    def test_input_form(self, scheme: str, wire: str) -> None:
        """Tokens quantized before they travel, on arrival, or by the experts; scales per row.

        NaN of tokens without an expert must not reach a scale that tokens share. T = 0 too.
        """
        problem = self._problem(quant=scheme)
        activation = problem.quant.activation
        assert activation is not None
        if wire == ROW_SCALES and not activation.per_tensor:
            self._skip(f"{scheme} has scales per row anyway")
        if wire == QUANTIZED_WIRE and scheme not in WIRE_SCHEMES:
            self._skip(f"activations of {scheme} do not travel quantized")
        if wire == ROW_SCALES and not self._spec().takes_quantized:
            self._skip("takes no quantized input")
        kernel = self._compose(problem, wire)
        packed = pack(kernel, random_weights(problem))
        for num_tokens in (self._T // 2, 0):
            check_call(kernel, make_case(problem, num_tokens, "rows"), packed)

    @pytest.mark.parametrize("dispatcher", ["local", "batched_reference"])
    @pytest.mark.parametrize("kind", ["hot", "rows"])
    def test_format(self, dispatcher: str, kind: str) -> None:
        """Both formats, one of them through the core's bridge."""
        self._check(self._problem(), kind=kind, dispatcher=dispatcher)

    # -- beyond the list ------------------------------------------------------------------------

    @pytest.mark.parametrize("index", range(_COMBINATIONS))
    def test_combination(self, index: int) -> None:
        """Declared capabilities in random combination, different in every run."""
        spec, draw = self._spec(), cases.generator("combination", index)

        def pick(options: Any) -> Any:
            options = sorted(options)
            return options[int(torch.randint(len(options), (), generator=draw))]

        found: MoEProblem | str = ""
        for _ in range(10):
            activation = Activation(pick(spec.activations))
            if activation.name == "silu" and spec.silu_clamp and pick((False, True)):
                activation = Activation("silu", limit=2.0)
            top_k = pick((1, 2, 3, 4))
            found = self._find_problem(
                dtype=DTYPES[pick(spec.dtypes)],
                quant=pick(spec.schemes),
                activation=activation,
                has_bias=spec.bias and pick((False, True)),
                top_k=top_k,
                apply_router_weight_on_input=top_k == 1 and pick((False, True)),
            )
            if isinstance(found, MoEProblem):
                kind, T = pick(ROUTINGS), pick((1, 5, 16, self._T))
                dispatchers = ("local", "batched_reference", QUANTIZED_WIRE)
                self._check(found, T, kind, pick(dispatchers), key=index)
                return
        self._skip(f"no supported combination in ten draws; the last: {found}")

    def test_large(self) -> None:
        """Many tiles in every direction."""
        on_cpu = self._device().type == "cpu"
        sizes = _sizes(8, 4, 192, 160) if on_cpu else _sizes(32, 4, 2048, 768)
        found = self._find_problem(**sizes)
        problem = found if isinstance(found, MoEProblem) else self._problem()
        self._check(problem, 65 if on_cpu else 1030)

    def test_many_experts(self) -> None:
        """More than a block of threads might count; and more rows of one than a tile has."""
        sizes = (130, 2, 32, 16) if self._device().type == "cpu" else (130, 2, 128, 128)
        problem = self._problem(**_sizes(*sizes))
        self._check(problem, 40)
        self._check(problem, 150, "one_expert")

    @pytest.mark.parametrize("scheme", list(SCHEMES))
    def test_negative_controls(self, scheme: str) -> None:
        """The kit itself: on these very problems its tolerance rejects every known mistake."""
        bias = {"has_bias": True} if self._spec().bias else {}
        problem = self._problem(quant=scheme, **bias)
        check_negative_controls(make_case(problem, self._T, "slots"))
        clampable = sorted(CLAMPABLE & self._spec().activations)
        if clampable and (clampable[0] != "silu" or self._spec().silu_clamp):
            clamped = problem.replace(activation=Activation(clampable[0], limit=3.0))
            check_negative_controls(make_case(clamped, self._T))

    def _precise(self, **changes: Any) -> MoEProblem:
        """A problem with these changes in the most precise dtype that the backend does them in."""
        names = [n for n in ("float32", "float16", "bfloat16") if n in self._spec().dtypes]
        for name in names[:-1]:
            found = self._find_problem(dtype=DTYPES[name], **changes)
            if isinstance(found, MoEProblem):
                return found
        return self._problem(dtype=DTYPES[names[-1]], **changes)

    def _on_rank(self, problem: MoEProblem, **parallel: int) -> MoEProblem:
        """The same layer seen from another rank, or a skip with the spec's reasons."""
        mine = problem.replace(parallel=replace(problem.parallel, **parallel))
        if reasons := self._spec().unsupported(mine):
            self._check_refused(mine, reasons)
            self._skip("; ".join(reasons))
        return mine
