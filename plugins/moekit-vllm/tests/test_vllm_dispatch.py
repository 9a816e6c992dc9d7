"""A dispatcher of moekit moves the tokens of vLLM's ranks. vLLM is a stand-in."""

from __future__ import annotations

import pytest
import vllm_ranks
from rank_pools import rank_pool

pytest.importorskip("moekit_naive")


ranks = rank_pool(2)


@pytest.mark.parametrize("tokens", [[5, 9], [7, 0], [16, 16]])
@pytest.mark.parametrize("hashed", [False, True])
def test_ranks_get_their_own_tokens_back(ranks, tokens, hashed) -> None:
    """Whole sums, so vLLM's runner neither gathers nor reduces; it may route by token ids."""
    for said in ranks.run(vllm_ranks.run, tokens, {"hashed": hashed}):
        assert said["error"] < 1e-5 and said["moves"] and said["max_tokens"] == max(tokens)
        (line,) = said["said"]
        assert "at most 16 tokens, ep 2, dp 2 on cpu: naive + torch" in line


def test_ranks_whose_tokens_vllm_does_not_count(ranks) -> None:
    """The kernel works for its capacity."""
    for said in ranks.run(vllm_ranks.run, [5, 9], {"counts": None}):
        assert said["error"] < 1e-5 and said["max_tokens"] is None


def test_ranks_with_the_same_tokens(ranks) -> None:
    """Tensor parallel ranks hold the same tokens, so nothing moves, and sums are partial."""
    for said in ranks.run(vllm_ranks.run, [4, 4], {"dp_size": 1}):
        assert not said["moves"] and said["error"] > 0.1 and said["max_tokens"] is None


def test_sequence_parallel_ranks(ranks) -> None:
    """vLLM counts the tokens that they share."""
    for said in ranks.run(vllm_ranks.run, [4, 3], {"dp_size": 1, "sp_size": 2, "counts": [7]}):
        assert said["moves"] and said["error"] < 1e-5 and said["max_tokens"] == 4


def test_another_placement_of_experts(ranks) -> None:
    for said in ranks.run(vllm_ranks.run, [4, 4], {"order": [0, 2, 4, 1, 3, 5]}):
        assert "dispatchers need vLLM's linear placement of experts" in said["refused"]


@pytest.mark.parametrize(
    ("dispatcher", "step"),
    [("naive", "read"), ("naive", "pack"), ("", "read"), ("", "compose"), ("", "pack")],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone(ranks, dispatcher, failing, step) -> None:
    """All ranks leave that layer to vLLM, whose ranks exchange tokens in another way."""
    said = ranks.run(vllm_ranks.fail, failing, step, "on", dispatcher)
    for rank, (first, second) in enumerate(said):
        assert not first["moekit"] and second["moekit"]
        reason = f"OutOfMemoryError: no memory to {step}"
        if rank != failing:
            reason = f"other ranks leave it to vLLM (rank {failing}: {reason})"
        assert any(f"stays with vLLM: {reason}" in line for line in first["said"])


def test_no_rank_starts_if_one_fails(ranks) -> None:
    """With MOEKIT_VLLM=require."""
    for first, second in ranks.run(vllm_ranks.fail, 1, "pack", "require", ""):
        assert "no memory to pack" in first["refused"]
        assert second["moekit"]


def test_a_rank_that_joins_an_engine(ranks) -> None:
    """In elastic expert parallelism, the other ranks load nothing meanwhile, and none waits."""
    found = ranks.run(vllm_ranks.join)[0]
    (line,) = found["said"]
    assert not found["moekit"] and "may join and leave (elastic expert parallelism)" in line
