"""Arguments that would give a wrong number, a crash or a hang: an error names each.

A row is a call and the words of its error. fuzz_surface.py draws such calls at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import moekit
from moekit import (
    Activation,
    ExpertWeights,
    FusedMoE,
    MoEProblem,
    ParallelConfig,
    QuantScheme,
    Routing,
    route,
    to_physical,
)
from moekit.eplb import LoadWindow, Placement, Rebalancer
from moekit.errors import InvalidInput, InvalidProblem, MoekitError, WeightsError

E, K, H, I, T = 6, 2, 16, 8, 3
SIZES = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I)
PROBLEM = MoEProblem(**SIZES, dtype=torch.float32, device="cpu")
X, LOGITS = torch.ones(T, H), torch.arange(T * E).view(T, E).float()
ROUTING = Routing(torch.ones(T, K), torch.tensor([[0, 1], [2, 3], [4, -1]]))
PLACEMENT = Placement(tuple(range(E)), E, 2)


def weights(**changes: Any) -> ExpertWeights:
    made = dict(w13=torch.ones(E, 2 * I, H), w2=torch.ones(E, H, I))
    return ExpertWeights(**{**made, **changes})


def problem(**changes: Any) -> MoEProblem:
    return MoEProblem(**{**SIZES, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def kernel() -> moekit.ModularKernel:
    return moekit.compose(PROBLEM, experts="torch", checked=True)


@pytest.fixture(scope="module")
def packed(kernel: moekit.ModularKernel) -> moekit.PackedWeights:
    return kernel.pack(weights())


def layer(**knobs: Any) -> FusedMoE:
    return FusedMoE(**{**SIZES, "params_dtype": torch.float32, "device": "cpu", **knobs})


def loaded() -> FusedMoE:
    made = layer()
    made.load_weights(weights())
    return made


PARTS = [
    (lambda: ParallelConfig(ep_size=2**40), "ep_size=1099511627776: .* at most 65536"),
    (lambda: ParallelConfig(tp_size=0), "tp_size=0"),
    (lambda: ParallelConfig(nodes=10**5000), "nodes=<int"),
    (lambda: problem(num_experts=10**9), "num_experts=1000000000: .* at most 1048576"),
    (lambda: problem(quant=QuantScheme(name="fp8_block")), "quant=.*moekit.SCHEMES"),
    (lambda: problem(device=torch.device("meta")), "'meta' was asked for, .*name a device"),
    (lambda: problem(device=torch.device("hpu")), "'hpu' was asked for, but torch sees none"),
    (lambda: problem(device="foo"), "device 'foo' is not understood"),
    (lambda: Activation("silu", limit=float("nan")), "limit=nan: .*above 0"),
    (lambda: moekit.compose(PROBLEM, peer_timeout=float("nan")), "peer_timeout=nan"),
]

INPUTS = [
    (lambda: route(LOGITS.to_sparse(), 2), "logits is .*sparse_coo"),
    (lambda: to_physical(ROUTING, torch.arange(E)[:, None] * 1.0), "replicas must .*int32 or"),
    (lambda: to_physical(ROUTING, torch.arange(4)[:, None]), r"topk_ids span \[-1, 4\].*0..3"),
    (lambda: to_physical(ROUTING, torch.tensor([[0], [-1], [2]])), "expert 1 has no replica"),
    (lambda: loaded().set_replicas(torch.full((E, 1), E)), "replicas must hold physical ids 0..5"),
    (lambda: loaded().set_replicas(torch.zeros(E, 1)), "of int32 or int64"),
    (lambda: loaded()(X, LOGITS.requires_grad_(False).to_sparse()), "router_logits is .*sparse"),
    (lambda: Placement((0, 1), 2, 0), "2 slots cannot hold 2 experts on 0 ranks"),
    (lambda: PLACEMENT.imbalance(torch.ones(2)), r"load_E is .*expected a tensor \(6,\)"),
    (lambda: LoadWindow(2**20, E, 2**20), "use fewer steps"),
    (lambda: LoadWindow(1, E, 1).record(torch.tensor([[E]])), r"topk_ids span \[6, 6\]"),
    (lambda: LoadWindow(1, E, 1).record(torch.tensor([[0]]), 1), "layer must be in 0..0"),
]  # fmt: skip

WEIGHTS = [
    (lambda: weights().select([E]), r"experts=\[6\]"),
    (lambda: weights(w13=torch.ones(3)).quantize(moekit.SCHEMES["int8_w8a16"]), "w13 is"),
    (
        lambda: moekit.compose(PROBLEM).pack(ExpertWeights(*(t.to("meta") for t in (X, X)))),
        "meta tensors",
    ),
]


def ids_of(table: list[list[int]]) -> Routing:
    return replace(ROUTING, topk_ids=torch.tensor(table))


CALLS = [
    (dict(x=X.to_sparse()), InvalidInput, "must be dense"),
    (dict(x=X.to_sparse_csr()), InvalidInput, "must be dense"),
    (dict(routing=replace(ROUTING, topk_weights=torch.ones(T, K).to_sparse())), InvalidInput,
     "must be dense"),
    (dict(routing=ids_of([[0, 1], [3, 3], [4, -1]])), InvalidInput, r"token 1 are \[3, 3\]"),
    (dict(out=X.to_sparse()), InvalidInput, "out is .*sparse"),
    (dict(out=torch.ones(1, H).expand(T, H)), InvalidInput, r"strides \(0, 1\), so several"),
    (dict(out=torch.ones(99).as_strided((T, H), (1, 1))), InvalidInput, "share memory"),
    (dict(out=torch.ones(T, H, requires_grad=True)), InvalidInput, "out requires a gradient"),
    (dict(weights=None), WeightsError, "the weights are NoneType"),
]  # fmt: skip


def name_of(row: Any) -> str | None:
    return row if isinstance(row, str) else None


@pytest.mark.parametrize(("make", "said"), PARTS, ids=name_of)
def test_a_part_of_another_type_is_an_invalid_problem(make, said) -> None:
    with pytest.raises(InvalidProblem, match=said):
        make()


@pytest.mark.parametrize(("make", "said"), INPUTS, ids=name_of)
def test_a_value_of_another_type_is_an_invalid_input(make, said) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


@pytest.mark.parametrize(("make", "said"), WEIGHTS, ids=name_of)
def test_weights_of_another_type_are_a_weights_error(make, said) -> None:
    with pytest.raises(WeightsError, match=said):
        make()


@pytest.mark.parametrize(("change", "error", "said"), CALLS, ids=name_of)
def test_a_call_with_another_type_names_the_argument(kernel, packed, change, error, said) -> None:
    call = {"x": X, "weights": packed, "routing": ROUTING, **change}
    with pytest.raises(error, match=said):
        kernel(**call)
    if "shared" not in change:
        with pytest.raises(error, match=said):
            kernel.start(**call)
    assert kernel(X, packed, ROUTING).isfinite().all()


def test_an_output_made_in_inference_mode_is_written_only_there(kernel, packed) -> None:
    with torch.inference_mode():
        out = torch.empty(T, H)
        kernel(X, packed, ROUTING, out=out)
    with pytest.raises(RuntimeError, match="(?i)inference"):
        kernel(X, packed, ROUTING, out=out)


def test_a_strided_output_without_overlap_is_written(kernel, packed) -> None:
    want = kernel(X, packed, ROUTING)
    for out in (torch.zeros(T, 2 * H)[:, ::2], torch.zeros(H, T).t(), torch.zeros(2 * T, H)[::2]):
        assert torch.equal(kernel(X, packed, ROUTING, out=out), want)


def test_numpy_integers_are_sizes() -> None:
    made = MoEProblem(**{name: np.int64(size) for name, size in SIZES.items()}, device="cpu")
    assert made == problem() and all(type(getattr(made, name)) is int for name in SIZES)
    assert route(LOGITS, np.int32(2)).topk_ids.shape == (T, 2)
    assert ParallelConfig(ep_size=np.int64(2), ep_rank=np.uint8(1)).ep_rank == 1


# -- custom routing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda w, ids: (w, ids.float()), "second .*integer dtype .*torch.float32"),
        (lambda w, ids: (w, ids + 0.75), "second .*torch.float32"),
        (lambda w, ids: (w, ids > 0), "second .*torch.bool"),
        (lambda w, ids: (ids, w), "first .*float dtype.*torch.int64"),
        (lambda w, ids: (w, ids.tolist()), "result of custom routing is .*dense torch.Tensor"),
        (lambda w, ids: (w, ids.to("meta")), "second .* on meta"),
        (lambda w, ids: (w, ids + E), "topk_ids span"),
        (lambda w, ids: (w, ids[:, :1].expand_as(ids)), r"token 0 are .*only once"),
    ],
)
@pytest.mark.parametrize("through", ["route", "layer"])
def test_the_answer_of_a_custom_routing_function_is_checked(answer, said, through) -> None:
    def custom(logits: torch.Tensor, k: int):
        return answer(torch.ones(len(logits), k), logits.topk(k).indices)

    with pytest.raises(InvalidInput, match=said):
        if through == "route":
            route(LOGITS, K, custom=custom)
        else:
            made = layer(custom_routing_function=lambda x, logits, k, _: custom(logits, k))
            made.load_weights(weights())
            made(X, LOGITS)


def test_a_custom_routing_function_may_pad() -> None:
    got = route(LOGITS, K, custom=lambda logits, k: (torch.ones(T, k), torch.full((T, k), -1)))
    assert (got.topk_ids == -1).all()


# -- one token, one expert, once --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("backends", [("local", "torch"), ("local", "reference")], ids=str)
def test_a_token_cannot_name_an_expert_twice(tokens, backends) -> None:
    kernel = moekit.compose(PROBLEM, *backends)
    packed, x = kernel.pack(weights()), torch.ones(tokens, H)
    ids = torch.arange(K).repeat(tokens, 1)
    ids[tokens - 1] = 4
    with pytest.raises(InvalidInput, match=rf"token {tokens - 1} are \[4, 4\]: .* only once"):
        kernel(x, packed, Routing(torch.ones(tokens, K), ids))
    ids[tokens - 1] = -1  # padding may repeat
    assert (kernel(x, packed, Routing(torch.ones(tokens, K), ids))[-1] == 0).all()


# -- another default device ---------------------------------------------------------------------


def test_a_layer_and_its_replicas_name_their_device() -> None:
    held, logits = weights(), torch.cat([LOGITS, LOGITS[:, :1]], dim=1)

    def run() -> torch.Tensor:
        made = layer(num_redundant_experts=2, zero_expert_num=1, shared_experts=lambda x: x)
        made.load_weights(held.select(made.local_experts))
        balancer = Rebalancer.of([made], window=2)
        made(X, logits)
        balancer.step()
        balancer.rebalance()
        return made(X, logits)

    want = run()
    torch.set_default_device("meta")
    try:
        got = run()
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)


def test_errors_are_short_and_derive_from_one_class() -> None:
    for huge in ("x" * 10**6, list(range(10**6)), torch.ones(1000, 1000), {1: "y" * 10**6}):
        with pytest.raises(MoekitError) as caught:
            ParallelConfig(ep_size=huge)
        assert len(str(caught.value)) < 300
