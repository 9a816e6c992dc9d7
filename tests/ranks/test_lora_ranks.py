"""Adapters of FusedMoE over 1, 2 and 4 ranks: the ids travel, and adapters are cut as experts."""

from __future__ import annotations

import pytest
from layer_ranks import Case, begin
from lora_ranks import no_ids, run_case, train, uneven
from rank_pools import rank_pool

from moekit.testing.cases import seed

EIGHT = {"num_experts": 8}


ranks = rank_pool(4, "cpu", begin, seed())

SPREADS = {
    "1 rank": {},
    "tp 2, ep": {"tp": 2, "ep": True},
    "tp 4": {"tp": 4},
    "tp 2, dp 2": {"tp": 2, "dp": 2},
    "dp 4, ep": {"dp": 4, "ep": True, "knobs": EIGHT},
    "experts x slices, 2 batches": {"parallel": (2, 2, 2), "knobs": EIGHT},
    "sequence parallel, in chunks": {
        "parallel": (2, 1, 1),
        "tokens": ((7,), (1,), (0,)),
        "knobs": {**EIGHT, "is_sequence_parallel": True, "max_num_tokens": 2},
    },
    "replicas": {"dp": 2, "ep": True, "knobs": {"num_redundant_experts": 1, "num_experts": 7}},
}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_combinations(ranks, spread) -> None:
    assert ranks.run(run_case, Case(**spread)) == [""] * 4


def test_training(ranks) -> None:
    assert ranks.run(train, Case(dp=4, ep=True, knobs=EIGHT)) == [""] * 4
    assert ranks.run(train, Case()) == [""] * 4


def test_what_cannot_travel_is_refused(ranks) -> None:
    said = ranks.run(uneven)
    assert all("7 experts are a multiple of ep_size=2" in text for text in said[:2])
    said = ranks.run(no_ids)
    assert all("adapter_ids must name one of 3 adapters" in text for text in said[:2])
