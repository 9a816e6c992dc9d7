"""FusedMoE over 1, 2 and 4 ranks: tensor, expert and data parallelism, and ranks that fail."""

from __future__ import annotations

import pytest
from layer_ranks import Case, begin, chunks_of, compiled, construct, one_fails, run_case
from rank_pools import rank_pool

from moekit import ParallelConfig, parallel_config
from moekit.errors import InvalidProblem
from moekit.testing.cases import seed
from moekit.testing.distributed import RankPool

ranks = rank_pool(4, "cpu", begin, seed())

# Arguments of Case: tp and dp sizes and ep, or (ep, tp, dp) sizes.
SPREADS = {
    "1 rank": {},
    "tp 2, ep": {"tp": 2, "ep": True},
    "dp 2, ep": {"dp": 2, "ep": True},
    "tp 4": {"tp": 4},
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "tp 2, dp 2, ep": {"tp": 2, "dp": 2, "ep": True},
    "dp 4": {"dp": 4},
    "dp 4, ep": {"dp": 4, "ep": True},
    "experts x slices, 2 batches": {"parallel": (2, 2, 2)},
    "experts x slices, 4 batches": {"parallel": (2, 2, 4)},
}
VARIANTS = {
    "plain": {},
    "bias, shared, zero experts": {
        "shared": True,
        "knobs": {"has_bias": True, "zero_expert_num": 2},
    },
    "shared experts, chunks, an empty rank": {
        "shared": True,
        "tokens": ((9, 0, 4, 1), (0, 0, 0, 0), (0, 5, 3, 2)),
        "knobs": {"max_num_tokens": 2, "zero_expert_num": 1},
    },
    "sequence parallel": {
        "shared": True,
        "tokens": ((7, 5), (1, 1), (0, 3), (8, 8)),
        "knobs": {"is_sequence_parallel": True, "has_bias": True, "max_num_tokens": 2},
    },
    "results not reduced": {
        "shared": True,
        "knobs": {"reduce_results": False, "zero_expert_num": 2},
    },
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_combinations(ranks, spread, variant) -> None:
    assert ranks.run(run_case, Case(**spread, **variant)) == [""] * 4


EXPERTS_SPREAD = {name: s for name, s in SPREADS.items() if s.get("ep") or "parallel" in s}


@pytest.mark.parametrize("spread", EXPERTS_SPREAD.values(), ids=EXPERTS_SPREAD)
@pytest.mark.parametrize(
    "knobs",
    [
        {"expert_placement_strategy": "round_robin"},
        {"num_redundant_experts": 2},
        {"quant": "fp8_channel_token"},
    ],
    ids=str,
)
def test_experts_spread_over_ranks(ranks, spread, knobs) -> None:
    if "quant" in knobs and "parallel" in spread:
        pytest.skip("the scheme's oracle needs whole experts")
    assert ranks.run(run_case, Case(**spread, knobs=knobs)) == [""] * 4


@pytest.mark.parametrize("most", [None, 8])
def test_every_rank_makes_the_same_number_of_chunks(ranks, most) -> None:
    def chunks(tokens, most=most, **spread):
        results = ranks.run(chunks_of, Case(ep=True, **spread), tokens, most)
        assert [complaint for _, complaint in results] == [""] * 4
        return [sizes for sizes, _ in results]

    assert chunks((8, 0, 3, 1), dp=4) == [[3, 3, 2], [0, 0, 0], [1, 1, 1], [1, 0, 0]]
    assert chunks((3, 2, 0, 1), None, dp=4) == [[3], [2], [0], [1]]
    # In sequence parallel, two ranks share each batch.
    sequence = {"tp": 2, "dp": 2, "knobs": {"is_sequence_parallel": True}}
    assert chunks((8, 1), **sequence) == [[2, 2], [2, 2], [1, 0], [0, 0]]


@pytest.mark.parametrize("fault", ["no weights", "shape", "nan", "shared raises"])
@pytest.mark.parametrize(
    "spread",
    [{"tp": 2}, {"tp": 2, "ep": True}, {"dp": 2, "ep": True}, {"tp": 2, "dp": 2}],
    ids=str,
)
def test_no_rank_waits_for_one_that_failed(ranks, spread, fault) -> None:
    said = {
        "no weights": "WeightsError: layer .* has no packed weights",
        "shape": r"InvalidInput: x must have shape .*got \(5, 63\)",
        "nan": "InvalidInput: router logits of 1 token",
        "shared raises": "ZeroDivisionError: planted",
    }[fault]
    case = Case(**spread, knobs={"max_num_tokens": 3})
    for rank, outcomes in enumerate(ranks.run(one_fails, case, fault)[: case.ranks]):
        assert outcomes[0] == outcomes[2] == "ok"
        if rank == 1:
            assert_matches(said, outcomes[1])
        else:
            assert_matches(f"PeerFailed: rank 1 failed: {said}", outcomes[1])


@pytest.mark.parametrize("fault", ["no weights", "shape"])
@pytest.mark.parametrize("spread", [{"dp": 2, "ep": True}, {"tp": 2, "dp": 2}], ids=str)
def test_no_rank_waits_in_unchecked_calls(ranks, spread, fault) -> None:
    """If an unchecked rank fails before it dispatches, the dispatcher informs the others."""
    case = Case(**spread, knobs={"max_num_tokens": 3, "checked": False})
    for rank, outcomes in enumerate(ranks.run(one_fails, case, fault)[: case.ranks]):
        assert outcomes[0] == outcomes[2] == "ok"
        assert ("PeerFailed: rank 1 failed" in outcomes[1]) == (rank != 1)
        assert ("has no packed weights" if fault == "no weights" else "(5, 63)") in outcomes[1]


@pytest.mark.parametrize("moving", [True, False])
def test_only_messages_in_flight_poison_a_group(moving) -> None:
    case = Case(**({"dp": 2, "ep": True} if moving else {"tp": 2}))
    with RankPool(2) as own:  # because other tests cannot use it
        own.run(begin, seed())
        for rank, (before, failed, after) in enumerate(own.run(one_fails, case, "prepare raises")):
            assert before == "ok"
            assert_matches("ZeroDivisionError: planted" if rank == 1 else "PeerFailed", failed)
            assert ("left half-way" in after) if moving else (after == "ok"), after


def test_different_numbers_of_the_same_tokens(ranks) -> None:
    """If no tokens move, all ranks must pass the same number; other sums would crash."""
    for outcomes in ranks.run(one_fails, Case(tp=2), "fewer tokens")[:2]:
        assert outcomes[0] == outcomes[2] == "ok"
        assert "PeerFailed" in outcomes[1] and "with x (4, 64)" in outcomes[1]


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(text)


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"expert_placement_strategy": "round_robin"}, "round_robin"),
        ({"zero_expert_num": 1}, "zero_expert_num=1"),
        ({"has_bias": True}, "ranks disagree on has_bias"),
    ],
)
@pytest.mark.parametrize("spread", [{"tp": 2, "ep": True}, {"dp": 2, "ep": True}], ids=str)
def test_ranks_that_disagree(ranks, spread, different, said) -> None:
    for text in ranks.run(construct, Case(**spread), different)[:2]:
        assert text.startswith("GroupMismatch: ranks disagree") and said in text


def test_a_group_of_another_size(ranks) -> None:
    texts = ranks.run(construct, Case(parallel=(2, 1, 1), knobs={"parallel": PARALLEL_3}), {})
    assert all("GroupMismatch" in text and "2 ranks" in text for text in texts[:2])


PARALLEL_3 = ParallelConfig(ep_size=3, dp_size=1)


@pytest.mark.parametrize("spread", [{"dp": 2, "ep": True}, {"tp": 2}], ids=str)
def test_compiled_on_ranks(ranks, spread) -> None:
    assert ranks.run(compiled, Case(**spread, shared=True)) == [(True, 1)] * 4


def test_flattening() -> None:
    """The rules of vLLM: which rank holds what."""
    for rank in range(4):
        assert parallel_config(2, 2, rank) == ParallelConfig(tp_size=4, tp_rank=rank, dp_size=2)
        assert parallel_config(2, 2, rank, True) == ParallelConfig(
            ep_size=4, ep_rank=rank, dp_size=2
        )
        assert not parallel_config(4, 1, rank, True).moves_tokens
        assert parallel_config(1, 4, rank).moves_tokens
    for bad in ((0, 1, 0), (1, 0, 0), (2, 2, 4), (2, 1, -1)):
        with pytest.raises(InvalidProblem):
            parallel_config(*bad)
