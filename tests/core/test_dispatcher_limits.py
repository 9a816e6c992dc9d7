"""Limits that dispatchers declare instead of checking them, and the quantization for a transfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit import MoEProblem, ParallelConfig
from moekit.errors import InvalidInput
from moekit.plugin import (
    ActivationFormat,
    DispatcherSpec,
    ExpertsSpec,
    quantize,
    quantize_for_transfer,
)

ANY = DispatcherSpec(
    name="any",
    target="some.module:Class",
    format=ActivationFormat.STANDARD,
    devices=("any",),
    moves_tokens=True,
)


def reasons(spec: DispatcherSpec, ep: int = 4, tp: int = 1, dp: int = 0, **changes) -> list[str]:
    parallel = ParallelConfig(ep_size=ep, tp_size=tp, dp_size=dp)
    sizes = {"num_experts": 16, "top_k": 2, "hidden_size": 32, "intermediate_size": 32}
    return spec.unsupported(
        MoEProblem(**{**sizes, "device": "cpu", "parallel": parallel, **changes})
    )


@pytest.mark.parametrize(
    ("fact", "layer", "reason"),
    [
        ({"sliced_experts": False}, {"tp": 2}, "tensor parallelism is not supported (tp_size=2)"),
        (
            {"shared_tokens": False},
            {"dp": 2},
            "every rank must have a batch of tokens: dp_size must equal the number of ranks "
            "(dp_size=2, 4 ranks)",
        ),
        (
            {"uneven_experts": False},
            {"num_experts": 18},
            "18 experts must be a multiple of ep_size=4; add redundant experts",
        ),
        ({"most_top_k": 4}, {"top_k": 5}, "top_k=5 exceeds 4"),
        ({"most_ranks": 3}, {}, "4 ranks exceed 3"),
    ],
)
def test_a_limit_is_a_reason_where_tokens_move(fact, layer, reason) -> None:
    limited = replace(ANY, **fact)
    assert reasons(ANY, **layer) == [] and reasons(limited, **layer) == [reason]
    assert reasons(limited, **{**layer, "dp": 1}) == [], "a local dispatcher takes its place"
    within = replace(limited, **{name: 99 for name in fact if name.startswith("most")})
    if within != limited:
        assert reasons(within, **layer) == []


EXPERTS = ExpertsSpec(name="a", target="a:A", format=ActivationFormat.STANDARD, reduces=False)


@pytest.mark.parametrize(
    ("fact", "wrong", "says"),
    [
        ("most_top_k", (0, -1, True, 2.0, "8"), "must be an integer of at least 1 .*or None"),
        (
            "name",
            ("a b", "a|b", "", 5, None, "a\n", "x" * 99, b"a"),
            "it must be lower-case letters",
        ),
        ("requires", ((5,), ("a b",), ("",), "triton", ("x" * 10**6,)), "importable names"),
        ("priority", (float("nan"), True, 10**5000), "it must be an integer"),
        ("schemes", (frozenset({"FP3"}), frozenset(), {5}, ["none"]), "a frozenset of at least 1"),
        ("dtypes", (frozenset({"float64"}), {1: 2}), "it must be a frozenset"),
        ("wire_schemes", ({"fp 3"},), "it must be a frozenset"),
        ("activations", (frozenset({"tanh", None}),), "it must be a frozenset"),
        ("devices", ((), ("CUDA",), "cpu", ("cuda>=" + "9" * 5000 + ".0",)), "it must be a tuple"),
        ("format", ("standard",), "it must be an ActivationFormat"),
        ("target", ("acme", ".:x", "a:b:c", None), "it must be 'package.module:Class'"),
        ("check", (5,), "it must be a function, or None"),
        ("reduces", ("no", 1), "it must be True or False"),
        ("ids_dtype", ("int8",), "it must be one of any, int32, int64"),
        ("install_hint", (None,), "it must be a string"),
    ],
)
def test_a_wrong_fact_is_refused(fact, wrong, says) -> None:
    for value in wrong:
        with pytest.raises(InvalidInput, match=says):
            replace(EXPERTS if hasattr(EXPERTS, fact) else ANY, **{fact: value})


def test_experts_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidInput, match="set reduces=False"):
        replace(EXPERTS, reduces=True, format=ActivationFormat.BATCHED)
    with pytest.raises(InvalidInput, match="set takes_quantized or takes_unquantized"):
        replace(EXPERTS, takes_quantized=False, takes_unquantized=False)


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor", "nvfp4"])
def test_scales_travel_with_every_row(scheme: str) -> None:
    """A scale that tokens share comes from those that have an expert."""
    problem = MoEProblem(num_experts=4, top_k=1, hidden_size=256, intermediate_size=256,
                         quant=scheme, device="cpu")  # fmt: skip
    activation = problem.quant.activation
    x, ids = torch.randn(5, 256, dtype=torch.bfloat16), torch.tensor([[0], [-1], [2], [3], [1]])
    x[1] = float("inf")
    rows, scale = quantize_for_transfer(
        x, ids, lambda x, valid: quantize(x, activation, None, valid), problem
    )
    assert rows.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32
    assert len(scale) == 5 and bool(torch.isfinite(scale[ids[:, 0] >= 0]).all())
    if activation.per_tensor:
        assert scale.shape == (5, 1) and len(set(scale.flatten().tolist())) == 1
