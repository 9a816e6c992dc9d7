"""The experts kit: right numbers for everything that the spec declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moekit.contract import Routing
from moekit.errors import WeightsError
from moekit.problem import DTYPES, ActivationFormat, ParallelConfig
from moekit.problem.activation import ACTIVATIONS
from moekit.problem.codes import Codes
from moekit.problem.quant import SCHEMES, WIRE_SCHEMES, QuantScheme
from moekit.problem.quantize import numbers, stored
from moekit.testing import cases
from moekit.testing.base import Sizes, over, sizes_of
from moekit.testing.calls import (
    QUANTIZED_WIRE,
    ROW_SCALES,
    SPARE_CAPACITY,
    SPARE_ROWS,
    call,
    check_call,
    defaults,
    pack,
)
from moekit.testing.compare import relative_error
from moekit.testing.crossings import unusual
from moekit.testing.diagnose import assert_right
from moekit.testing.experts_base import ExpertsBase, grouped
from moekit.testing.memory import most_memory

# Tokens, or rows of an expert, around common tiles: one fewer, as many, one more.
_TILES = (4, 8, 16, 32, 64, 128, 160, 192, 224, 256, 384, 512, 1024)
_TOKENS = (0, 1, 2, *(rows for tile in _TILES for rows in (tile - 1, tile, tile + 1)))
_TOKENS_INTERPRETED = {"random": (0, 1, 2, 33), "hot": (8, 9)}
# Steps between numbers of tokens: at least this, and at most this part of the number.
_STEP, _PART, _MOST_IN_STEPS = 17, 16, 4096
# More than 16 bits hold, and than the second dimension of a CUDA grid.
_MOST_16_BITS = 65536
_EXPERTS_OF_A_RANK = 32  # so that the weights of any model fit on a GPU in fp32, 16 bits and packed
_LARGE_CALL = 20e9  # bytes for T * K * H beyond 2 ** 31


def _schemes(chosen: Callable[[QuantScheme], Any]) -> Callable[[], list[str]]:
    """Return a function that returns the schemes for which ``chosen`` is true."""
    return lambda: [name for name, scheme in SCHEMES.items() if chosen(scheme)]


# A model's experts, top-k, H and I, and arguments of `MoEProblem` that only this model needs.
PUBLISHED: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "mixtral": (sizes_of(8, 2, 4096, 14336), {}),
    "qwen3-next": (sizes_of(512, 10, 2048, 512), {}),
    "deepseek-v3": (sizes_of(256, 8, 7168, 2048), {"quant": "fp8_block"}),
    "gpt-oss-120b": (
        sizes_of(128, 4, 2880, 2880),
        {"activation": "swigluoai", "has_bias": True, "quant": "mxfp4_w4a16"},
    ),
    "olmoe": (sizes_of(64, 8, 2048, 1024), {}),  # H = 2 I
    "llama4-scout": (sizes_of(16, 1, 5120, 8192), {"apply_router_weight_on_input": True}),
}


def _steps(num_tokens: int) -> Iterator[int]:
    """Yield numbers of tokens from ``num_tokens`` on, in steps that grow."""
    while num_tokens <= _MOST_IN_STEPS:
        yield num_tokens
        num_tokens += max(_STEP, num_tokens // _PART)


def check_codes(codes: Codes) -> None:
    """Assert that a plugin's functions return near values for what they store: the oracle uses
    them too, so no output shows that they are wrong.
    """
    x = torch.randn((2, 8, 64), generator=cases.generator("codes"), device="cpu")
    x *= codes.largest / x.abs().amax(dim=-1, keepdim=True)
    x[1, 3] = 0.0
    q = stored(x, codes)
    shape = (*x.shape[:-1], x.shape[-1] // codes.per_byte)
    assert q.shape == shape and q.dtype == codes.torch_dtype, (
        f"encode returned {tuple(q.shape)} {q.dtype}, expected {shape} {codes.torch_dtype}"
    )
    again = numbers(q, codes)
    assert again.shape == x.shape and again.dtype == torch.float32, (
        f"decode returned {tuple(again.shape)} {again.dtype}, expected {tuple(x.shape)} float32"
    )
    error, most = relative_error(again, x), {1: 2.0, 2: 0.9}.get(codes.bits, 0.3)
    assert error < most, f"decode(encode(x)) differs from x by {error:.2g} of its size"
    if codes.zero is not None:
        zeros = set(q[1, 3].view(torch.uint8).tolist())
        assert zeros == {codes.zero_byte}, (
            f"encode stores zeros as {zeros}, and zero is {codes.zero}"
        )


class ExpertsNumbers(ExpertsBase):
    """Numbers in every declared case. See `ExpertsConformance`."""

    # -- arithmetic ---------------------------------------------------------------------------

    @over("scheme", SCHEMES)
    def test_scheme(self, scheme: str) -> None:
        """Some tokens, one and many; and tokens far from 1, so that scales must follow them, in a
        call in which torch has another default dtype and device.
        """
        for operand in (SCHEMES[scheme].weight, SCHEMES[scheme].activation):
            if operand is not None and operand.codes.decode is not None:
                check_codes(operand.codes)
        problem = self._problem(quant=scheme)
        self._check_counts(problem, "masked", invariant=False)
        if self._interpreted and scheme != self._main["quant"]:
            return
        large = cases.scaled(cases.make_case(problem, 3), 2.0**12)
        with defaults(torch.bfloat16, large.x.device):
            kernel = self._compose(problem, self._native)
            out = call(kernel, pack(kernel, large.weights), large)
        assert_right(out, large, "output with other defaults")

    @over("dtype", DTYPES)
    def test_dtype(self, dtype: str) -> None:
        self._check_counts(self._problem(dtype=DTYPES[dtype]))

    @over("name", sorted(ACTIVATIONS))
    def test_activation(self, name: str) -> None:
        """In the most precise dtype, because bfloat16 hardly distinguishes gelu and gelu_tanh.

        Activations are right for large values, whose exponential is infinite. Then with biases, a
        limit that most rows exceed, and another alpha, if the kind and the backend have them.
        """
        problem = self._precise({}, activation=name)
        self._check_counts(problem)
        case = cases.scaled(cases.make_case(problem, 5), 2.0**6)
        check_call(self._compose(problem, self._native), case)
        bias = [{"has_bias": True}] if self._spec().bias else []
        changed = unusual(name, self._spec())
        if changed != problem.activation:
            self._check_counts(self._precise(*bias, {}, activation=changed))

    # -- tokens and routing -------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["random", "hot"])
    def test_num_tokens(self, kind: str) -> None:
        """Common tiles full, with one token fewer, and with one more; kernels chosen by ranges.

        The tiles are of tokens, or of the rows of an expert that gets all of them.
        """
        problem = self._problem()
        weights = cases.random_weights(problem)
        kernel, packed = self._packed(problem, weights=weights)
        first = 1 + int(torch.randint(_STEP, (), generator=cases.generator("first tokens")))
        counts = {*_TOKENS, *(_steps(first) if kind == "random" else ())}
        for num_tokens in _TOKENS_INTERPRETED[kind] if self._interpreted else sorted(counts):
            case = cases.make_case(problem, num_tokens, kind, num_tokens, weights)
            check_call(kernel, case, packed)

    @pytest.mark.parametrize("kind", [*(k for k in cases.ROUTINGS if k != "random"), cases.SIGNED])
    def test_routing(self, kind: str) -> None:
        """Experts without rows, one expert with all rows, ids of -1, signed router weights.

        Idle experts' unquantized weights are NaN. `test_dtype` has the random routing.
        """
        case = cases.make_case(self._problem(), self._T, kind)
        if kind == "idle" and case.problem.quant.weight is None:
            experts = torch.arange(case.problem.num_experts, device=case.x.device)
            unused = ~torch.isin(experts, case.routing.topk_ids)
            case.weights.w13[unused] = case.weights.w2[unused] = float("nan")
        check_call(self._compose(case.problem, self._native), case)

    @pytest.mark.parametrize("factor", [2.0**12, 2.0**-20], ids=["large", "small"])
    def test_magnitude(self, factor: float) -> None:
        """Tokens far from 1: the contract allows the whole range of the dtype."""
        problem = self._problem()
        if problem.dtype == torch.float16:
            factor = max(factor, 2.0**-6)
        case = cases.scaled(cases.make_case(problem, self._T, "masked"), factor)
        kernel = self._compose(problem, self._native)
        try:
            packed = pack(kernel, case.weights)
        except WeightsError as error:  # the library's range is smaller, and it says so
            self._skip(str(error))
        check_call(kernel, case, packed)

    def test_range_of_float16(self) -> None:
        """act(h) may be thousands, and experts' outputs beyond 65504 if weights bring them back."""
        problem = self._problem(dtype=torch.float16)
        kernel = self._compose(problem, self._native)
        case = cases.make_case(problem, self._T, "masked")
        if self._spec().weights_in_fp32:
            check_call(kernel, cases.beyond_float16(case))
        if not problem.quant.static:  # static scales bound the activations
            large = replace(case, x=case.x * 16)
            while (
                large.reference().abs().max() > 2.0**14
            ):  # the outputs of experts must fit as well
                large = replace(large, x=large.x / 2)
            check_call(kernel, large)

    def test_tokens_are_independent(self) -> None:
        """A token that holds NaN, infinity or large numbers changes its own output and no other.

        Values beyond a static scale saturate. Schemes whose tokens share a scale are left out.
        (Sizes are multiples of 32, because oneDNN's products on AMX mix rows of bfloat16
        otherwise.)
        """
        own = [name for name in self._declared_schemes() if not SCHEMES[name].shared_scale]
        for scheme, *_ in grouped(own, lambda s: (s.activation is None, s.static)):
            sizes = {} if SCHEMES[scheme].weight else {"hidden_size": 96, "intermediate_size": 64}
            problem = self._problem(quant=scheme, **(sizes if self._on_cpu else {}))
            case = cases.make_case(problem, self._T)
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
            assert_right(out[right], rest, what)
            assert bool(torch.isfinite(out[5]).all()), "large numbers became NaN or infinite"

    @over("scheme", _schemes(lambda s: s.weight and s.weight.group[0] > 1))
    def test_padded_slices(self, scheme: str) -> None:
        """Three blocks on two ranks: blocks are not cut, so the second rank's share is padded."""
        sizes = [sizes_of(4, 2, hidden, 384) for hidden in (128, 256, 512)]
        for rank in range(2):
            parallel = ParallelConfig(tp_size=2, tp_rank=rank, dp_size=1)
            self._check(self._problem(*sizes, quant=scheme, parallel=parallel))

    # -- forms of weights and input -------------------------------------------------------------

    @over("scheme", _schemes(lambda s: s.weight and s.weight.act_order))
    def test_columns_in_order(self, scheme: str) -> None:
        """Act-order without g_idx for w2 (as tensor parallelism cuts it), for w13, or for both."""
        problem = self._problem(quant=scheme)
        kernel, weights = self._compose(problem, self._native), cases.random_weights(problem)
        for without in (("w2_g_idx",), ("w13_g_idx",), ("w13_g_idx", "w2_g_idx")):
            left: dict[str, Any] = dict.fromkeys(without)
            check_call(kernel, cases.make_case(problem, self._T, weights=replace(weights, **left)))

    def test_spare_capacity(self) -> None:
        """Capacity exceeds the tokens: in a part of a buffer, or by rows after `num_rows`."""
        if self._spec().format is ActivationFormat.BATCHED:
            self._check(self._problem(), kind="masked", dispatcher=SPARE_CAPACITY)
            return
        for problem in self._one_of_each_kind():
            for num_tokens in (self._T, 1, 0):
                self._check(problem, num_tokens, "masked", SPARE_ROWS)

    @over("scheme", _schemes(lambda s: s.activation))
    def test_input_form(self, scheme: str) -> None:
        """Tokens quantized before the transfer, or after a bridge, and scales per row.

        NaN of tokens without an expert must not reach a shared scale. No tokens, and tokens of
        zeros, are included. `test_scheme` has tokens that the experts or the kernel quantize in the
        native format.
        """
        problem, wires = self._problem(quant=scheme), [self._bridged]
        wires += [QUANTIZED_WIRE] if scheme in WIRE_SCHEMES else []
        activation = problem.quant.activation
        if activation and activation.per_tensor and self._spec().takes_quantized:
            wires.append(ROW_SCALES)  # other schemes always have them
        for wire in wires:
            kernel, packed = self._packed(problem, wire)
            for num_tokens in (self._many_tokens, 0):
                check_call(kernel, cases.make_case(problem, num_tokens, "rows"), packed)
            case = cases.make_case(problem, 1)
            check_call(kernel, replace(case, x=torch.zeros_like(case.x)), packed)

    # -- sizes ----------------------------------------------------------------------------------

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
            case = cases.make_case(problem := self._problem(*sizes), 3 if self._interpreted else 12)
            ids = case.routing.topk_ids
            last = problem.num_experts - 1 - torch.arange(len(ids), device=ids.device)
            ids[:, 0] = torch.where((ids == last[:, None]).any(dim=1), ids[:, 0], last)
            case.routing.topk_weights[:, 0] = 8.0  # so that the last expert's part is not small
            check_call(self._compose(problem, self._native), case)

    def test_rows_per_expert(self) -> None:
        """Each expert has about as many rows as a common tile; two have more than a thousand."""
        rows = [r for r in _TOKENS if r <= 65] if self._interpreted else _TOKENS
        inner = 16 if self._on_cpu else 128
        problem = self._problem(
            *(sizes_of(len(rows), 1, 2 * n, n) for n in (inner, 128, 256)),
            apply_router_weight_on_input=False,
        )
        case = cases.case_of_counts(problem, rows)
        check_call(self._compose(problem, self._native), case)

    def test_many_assignments(self) -> None:
        """T, all of which one expert gets, beyond 65536, and one more than chunks of tokens hold.

        Indices of assignments, tokens and rows need more than 16 bits, and so do grids of programs.
        """
        if self._interpreted:
            self._skip("takes minutes in Triton's interpreter, which runs a program a token")
        inner = 16 if self._on_cpu else 128
        problem = self._problem(*(sizes_of(16, 2, 2 * n, n) for n in (inner, 128, 256)))
        self._check(problem, _MOST_16_BITS + 1, "hot")

    @pytest.mark.parametrize("model", PUBLISHED)
    def test_published_sizes(self, model: str) -> None:
        """A model's experts, at most 32 of them. Other tests have such sizes on the CPU."""
        if self._on_cpu:
            self._skip("takes the memory and the time of a GPU")
        (whole, needed), spec = PUBLISHED[model], self._spec()
        particular = dict(needed)
        if particular.get("quant") not in spec.schemes:
            particular.pop("quant", None)
        if particular.get("activation", "silu") not in spec.activations & ACTIVATIONS:
            particular.pop("activation", None)
        if not spec.bias:
            particular.pop("has_bias", None)
        ranks = max(1, whole["num_experts"] // _EXPERTS_OF_A_RANK)
        parallel = ParallelConfig(ep_size=ranks, dp_size=1)
        problem = self._problem(whole, parallel=parallel, **particular)
        weights = cases.random_weights(problem, drawn_on=cases.device_of(problem))
        kernel = self._compose(problem, self._native)
        packed = kernel.pack(weights)
        for num_tokens in (1, 61, 1030):
            check_call(kernel, cases.make_case(problem, num_tokens, weights=weights), packed)

    def test_offsets_beyond_int32(self) -> None:
        """T * K * H beyond 2 ** 31 elements: offsets of rows need 64 bits."""
        if self._on_cpu:
            self._skip("takes 20 GB and the time of a GPU")
        problem = self._problem(sizes_of(8, 8, 7168, 256))
        with most_memory(cases.device_of(problem)) as free:
            if free < _LARGE_CALL:
                self._skip(f"takes {_LARGE_CALL / 1e9:.0f} GB, and {free / 1e9:.1f} GB are free")
            check_call(self._compose(problem, self._native), cases.make_case(problem, 37500))
