"""Batch-invariant problems: what is refused, how a backend is chosen, and fixed blocks of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from right_experts import Batched, Unreduced

import moekit
from moekit import MoEProblem, ParallelConfig
from moekit.backends import row_blocks
from moekit.errors import InvalidProblem, Unsupported
from moekit.plugin import ActivationFormat, weight_and_reduce
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case
from moekit.testing.diagnose import assert_close

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 96, "intermediate_size": 80}


def problem(**changes) -> MoEProblem:
    return MoEProblem(**{**SIZES, "device": "cpu", "batch_invariant": True, **changes})


class Counting:
    """Counts the calls of the experts' own weighted sum."""

    sums = 0

    @staticmethod
    def weight_and_reduce(*args):
        Counting.sums += 1
        return weight_and_reduce(*args)


class SummingRows(Counting, Unreduced):
    pass


class SummingBatched(Counting, Batched):
    pass


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": ParallelConfig(tp_size=2)}, r"needs tp_size=1 \(got tp_size=2\).*ep_size"),
        ({"parallel": ParallelConfig(tp_size=2, dp_size=2)}, "needs tp_size=1"),
        (
            {"parallel": ParallelConfig(ep_size=4, dp_size=1)},
            r"dp_size=1 with 4 ranks\).*dp_size=4.*is_sequence_parallel=True",
        ),
    ],
)
def test_values_that_contradict_each_other(changes, said) -> None:
    with pytest.raises(InvalidProblem, match=said):
        problem(**changes)


def test_ranks_that_exchange_tokens_are_no_contradiction() -> None:
    for parallel in (ParallelConfig(ep_size=4), ParallelConfig(ep_size=4, dp_size=2)):
        made = problem(parallel=parallel)
        assert eval(repr(made), vars(moekit) | {"torch": torch}) == made
        assert "batch-invariant" in moekit.problem.problem.summary(made)


def test_backends_that_do_not_declare_it_give_a_reason() -> None:
    for spec in (*moekit.registry().experts.values(), *moekit.registry().dispatchers.values()):
        said = any("not batch-invariant" in why for why in spec.unsupported(problem()))
        assert said == (not spec.batch_invariant), spec.name


def test_composites_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="share the calls by their size.*torch, reference"):
        moekit.compose(problem(), experts="torch:64|reference")


def test_tables_do_not_choose() -> None:
    explanation = moekit.explain(problem())
    assert explanation.why == "by priority" and explanation.chosen.experts == "torch"


def test_one_scale_for_all_tokens_is_refused_of_experts_that_need_it() -> None:
    spec = replace(moekit.registry().expert("torch"), takes_unquantized=False)
    for scheme, shared in (("fp8_tensor", True), ("fp8_tensor_static", False), ("nvfp4", True)):
        asked = problem(quant=scheme, hidden_size=128, intermediate_size=128)
        assert any("one scale for all" in why for why in spec.unsupported(asked)) == shared


def test_parts_that_both_sum_are_refused() -> None:
    spec = moekit.registry().expert("torch")
    local = moekit.registry().dispatcher("local")
    made = problem()
    with pytest.raises(InvalidProblem, match="both apply the router weights"):
        moekit.ModularKernel(local.load()(local, made), spec.load()(spec, made))


# -- fixed blocks of rows -----------------------------------------------------------------------


def test_blocks_cover_all_rows() -> None:
    for sizes in ((256, 64, 16, 4, 1), (16,), (1,), (64, 16)):
        for rows in (*range(70), 255, 256, 257, 1000):
            blocks = list(row_blocks.cover(rows, sizes))
            assert set(blocks) <= set(sizes)
            assert sum(blocks) >= rows > sum(blocks[:-1]) or rows == 0 == len(blocks)


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply with one order of sums for every row, as a right library does."""
    total = torch.zeros(len(x), len(w), dtype=torch.float32)
    for k in range(x.shape[1]):
        total += x[:, k, None].float() * w[:, k].float()
    return total.to(x.dtype)


def backwards(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return exact(x.flip(1), w.flip(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_finds_other_orders_of_sums(dtype) -> None:
    like, every = torch.empty(0, dtype=dtype), {1, 4, 16, 64, 256}
    found = lambda product: row_blocks.same_bits_sizes(product, 32, 24, like)  # noqa: E731
    assert found(exact) == every
    for wrong in (1, 64, 256):
        other = lambda x, w: (backwards if len(x) == wrong else exact)(x, w)  # noqa: B023, E731
        assert found(other) == every - {wrong}

    def last_row(x, w):
        return torch.cat([exact(x[:-1], w), backwards(x[-1:], w)]) if len(x) == 16 else exact(x, w)

    assert found(last_row) == {1}


def test_torch_is_invariant_where_only_single_rows_are(monkeypatch) -> None:
    monkeypatch.setattr(row_blocks, "_known", {})
    monkeypatch.setattr(row_blocks, "same_bits_sizes", lambda *_: {1})
    kernel = moekit.compose(problem(), "local", "torch")
    case = make_case(problem(), 40, "hot")
    packed = kernel.pack(case.weights)
    out = kernel(case.x, packed, case.routing)
    assert_close(out, case.reference(), problem(), case=case)
    routing = moekit.Routing(case.routing.topk_weights[7:9], case.routing.topk_ids[7:9])
    assert torch.equal(kernel(case.x[7:9], packed, routing), out[7:9])


# -- numbers and memory -----------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "wraps"), [
    ("SummingRows", {}),
    ("SummingRows", {"multiples": lambda problem: (64, 64)}),
    ("SummingBatched", {"format": ActivationFormat.BATCHED}),
])  # fmt: skip
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dispatcher", ["local", "batched_reference"])
def test_the_function_of_the_experts_weights_and_sums(
    dispatcher, invariant, experts, wraps
) -> None:
    """In dispatchers, in the kernel, and behind a bridge or padding."""
    origin, target = moekit.registry().expert("reference"), f"{__name__}:{experts}"
    spec = replace(origin, name="sums", target=target, reduces=False, describe=None, **wraps)
    backends = moekit.registry().copy()
    backends.register(spec)
    case = make_case(problem(batch_invariant=invariant), 9, "masked")
    kernel = moekit.compose(case.problem, dispatcher, "sums", backends=backends)
    Counting.sums = 0
    check_call(kernel, case)
    assert Counting.sums == 1


def test_sizes_are_checked_in_the_problems_dtype(monkeypatch) -> None:
    """Weights may be packed under torch.autocast, whose products have another dtype."""
    seen = []

    def same_bits_sizes(product, inner, columns, like):
        seen.append(product(like.new_ones(4, inner), like.new_ones(columns, inner)).dtype)
        return {1}

    monkeypatch.setattr(row_blocks, "_known", {})
    monkeypatch.setattr(row_blocks, "same_bits_sizes", same_bits_sizes)
    problem = MoEProblem(
        num_experts=4, top_k=2, hidden_size=32, intermediate_size=24, dtype=torch.float32,
        device="cpu", batch_invariant=True,
    )  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        row_blocks.sizes_for(problem, torch.device("cpu"))
    assert seen == [torch.float32] * 2
