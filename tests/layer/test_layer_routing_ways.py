"""Hash routing, alone and in the layer, and simulated routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moekit
from moekit import ExpertWeights, FusedMoE
from moekit.errors import InvalidInput, InvalidProblem
from moekit.layer.simulate import SIMULATED

E, K, H, I, V = 8, 3, 16, 24, 50


def hash_table() -> Tensor:
    return torch.rand(V, E).argsort(dim=1)[:, :K].contiguous()


def layer(**routing: Any) -> FusedMoE:
    made = FusedMoE(E, K, H, I, params_dtype=torch.float32, device="cpu", **routing)
    made.load_weights(ExpertWeights(torch.randn(E, 2 * I, H) / 4, torch.randn(E, H, I) / 4))
    return made


# -- hash routing --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_table_chooses_and_scores_weigh(scoring: str, renormalize: bool, dtype: Any) -> None:
    """`route` agrees with DeepSeek-V4's definition, written out one token at a time."""
    logits, table = torch.randn(9, E), hash_table().to(dtype)
    tokens = torch.randint(V, (9,), dtype=dtype)
    found = moekit.route(
        logits, K, scoring=scoring, renormalize=renormalize, routed_scaling_factor=2.5,
        hash_table=table, token_ids=tokens,
    )  # fmt: skip
    score = {
        "softmax": lambda x: torch.exp(x) / torch.exp(x).sum(),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    }[scoring]
    for t, token in enumerate(tokens.tolist()):
        experts = table[token].tolist()
        assert found.topk_ids[t].tolist() == experts
        weights = torch.stack([score(logits[t])[e] for e in experts])
        weights = weights / weights.sum() if renormalize else weights
        torch.testing.assert_close(found.topk_weights[t], 2.5 * weights)


def test_padding_needs_no_valid_token_id() -> None:
    tokens, padding = torch.tensor([3, 10**6, -7]), torch.tensor([False, True, True])
    found = moekit.route(
        torch.randn(3, E), K, hash_table=hash_table(), token_ids=tokens, is_padding=padding
    )
    assert (found.topk_ids[1:] == -1).all() and (found.topk_weights[1:] == 0).all()


def test_a_layer_with_a_table() -> None:
    table = hash_table()
    made = layer(hash_table=table, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    assert "hash table" in repr(made)
    x, logits, tokens = torch.randn(2, 5, H), torch.randn(2, 5, E), torch.randint(V, (2, 5))
    out = made(x, logits, token_ids=tokens)
    routing = moekit.route(
        logits.flatten(0, 1), K, scoring="sqrtsoftplus", renormalize=True,
        routed_scaling_factor=1.5, hash_table=table, token_ids=tokens.flatten(),
    )  # fmt: skip
    want = made(x.flatten(0, 1), topk_weights=routing.topk_weights, topk_ids=routing.topk_ids)
    assert torch.equal(out.flatten(0, 1), want)
    compiled = torch.compile(lambda *a: made(a[0], a[1], token_ids=a[2]), backend="eager")
    assert torch.equal(compiled(x, logits, tokens), out)
    moved = made(x, logits, token_ids=(tokens + 1) % V)
    assert not torch.allclose(moved, out), "other tokens have other experts"


LOGITS, TOKENS = torch.randn(4, E), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (dict(hash_table=hash_table()), InvalidInput, "go together"),
        (dict(token_ids=TOKENS), InvalidInput, "go together"),
        (dict(hash_table=hash_table(), token_ids=TOKENS[:2]), InvalidInput, r"must be \(4,\)"),
        (dict(hash_table=hash_table(), token_ids=TOKENS.float()), InvalidInput, "int32 or int64"),
        (dict(hash_table=hash_table(), token_ids=TOKENS + V), InvalidInput, "rows 0 to 49"),
        (dict(hash_table=hash_table(), token_ids=TOKENS - 1), InvalidInput, "span -1 to -1"),
        (dict(hash_table=hash_table()[:, :2], token_ids=TOKENS), InvalidInput, r"\(V, 3\)"),
        (dict(hash_table=hash_table()[:0], token_ids=TOKENS), InvalidInput, r"\(V, 3\)"),
        (dict(hash_table=hash_table() + E, token_ids=TOKENS), InvalidInput, "topk_ids span"),
        (dict(hash_table=[[1]], token_ids=TOKENS), InvalidInput, "hash_table"),
        (
            dict(hash_table=hash_table(), token_ids=TOKENS, num_expert_group=2, topk_group=1),
            InvalidProblem, "leave correction_bias, groups and custom out",
        ),
    ],
)  # fmt: skip
def test_wrong_tables(options: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        moekit.route(LOGITS, K, **options)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (dict(hash_table=hash_table() * 0), InvalidInput, "or names one twice"),
        (dict(hash_table=hash_table()[:, :2]), InvalidInput, r"\(V, 3\)"),
        (
            dict(hash_table=hash_table(), custom_routing_function=torch.add),
            InvalidProblem, "would ignore hash_table",
        ),
        (
            dict(hash_table=hash_table(), e_score_correction_bias=torch.zeros(E)),
            InvalidProblem, "would ignore e_score_correction_bias",
        ),
    ],
)  # fmt: skip
def test_wrong_configs(options: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        layer(**options)


def test_token_ids_of_a_layer() -> None:
    x = torch.randn(4, H)
    with pytest.raises(InvalidInput, match="token_ids .* go together"):
        layer(hash_table=hash_table())(x, LOGITS)
    with pytest.raises(InvalidInput, match="token_ids .* go together"):
        layer()(x, LOGITS, token_ids=TOKENS)
    with pytest.raises(InvalidInput, match="only together with router_logits"):
        made = layer(hash_table=hash_table())
        made(x, topk_weights=torch.rand(4, K), topk_ids=hash_table()[:4], token_ids=TOKENS)


# -- simulated routing ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIMULATED)
def test_simulated_loads(kind: str) -> None:
    T, experts, top_k = 6000, 16, 3
    generator = torch.Generator().manual_seed(5)
    made = moekit.simulate_routing(kind, T, experts, top_k, generator=generator, index=2)
    assert made.topk_ids.shape == made.topk_weights.shape == (T, top_k)
    torch.testing.assert_close(made.topk_weights.sum(1), torch.ones(T))
    ordered = made.topk_ids.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    load = made.topk_ids.flatten().bincount(minlength=experts).sort(descending=True).values / T
    mean = top_k / experts
    if kind == "uniform":
        assert (load - mean).abs().max() < 0.03
    elif kind == "fixed":
        assert (load - mean).abs().max() * T <= 1
    elif kind == "hot":
        assert load[0] == 1 and (load[1:] - (top_k - 1) / (experts - 1)).abs().max() < 0.03
    else:
        assert 0.6 < load[0] < 0.95 and load[0] > 1.2 * load[1] > 1.4 * load[3] and load[-1] > 0.02
    # The weights are independent of the experts, and have the spread of normal logits' softmax.
    assert abs(float(made.topk_weights[:, 0].mean()) - 1 / top_k) < 0.02
    assert 0.15 < float(made.topk_weights.std()) < 0.25


@pytest.mark.parametrize("kind", ["fixed", "hot"])
def test_simulated_batches_differ(kind: str) -> None:
    """The hot expert, and the experts of a fixed routing, change with the index of the batch."""
    first, second = (
        moekit.simulate_routing(kind, 5, 16, 3, generator=torch.Generator(), index=i).topk_ids
        for i in (0, 1)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("normal", 4, E, K), InvalidProblem, "choose from uniform, zipf, hot, fixed"),
        ((None, 4, E, K), InvalidProblem, "routing None is unknown"),
        (("hot", -1, E, K), InvalidInput, "num_tokens"),
    ],
)
def test_wrong_simulations(arguments: tuple, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        moekit.simulate_routing(*arguments)
