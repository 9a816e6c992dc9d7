"""A dispatcher of moekit moves the tokens of SGLang's ranks. SGLang is a stand-in."""

from __future__ import annotations

import pytest
import sglang_ranks
from rank_pools import rank_pool

pytest.importorskip("moekit_naive")

ranks = rank_pool(2)


@pytest.mark.parametrize("tokens", [[5, 9], [7, 0], [16, 16]])
def test_ranks_get_their_own_tokens_back(ranks, tokens) -> None:
    """moekit returns whole sums, as SGLang's dispatchers do."""
    for said in ranks.run(sglang_ranks.run, tokens):
        assert said["moekit"] and said["error"] < 1e-5
        (line,) = said["said"]
        assert "at most 16 tokens, ep 2, dp 2 on cpu: naive + torch" in line


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone(ranks, failing) -> None:
    """All ranks leave the layer to SGLang, with SGLang's dispatcher."""
    for rank, said in enumerate(ranks.run(sglang_ranks.fail, failing)):
        assert not said["moekit"] and said["dispatcher"] == "StandardDispatcher"
        (line,) = said["said"]
        reason = (
            "no memory" if rank == failing else f"other ranks leave it to SGLang (rank {failing}"
        )
        assert reason in line
