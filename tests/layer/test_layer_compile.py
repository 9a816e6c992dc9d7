"""FusedMoE under torch.compile: one operator, the same bits, one compilation for all T."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from layer_cases import E, H, K, loaded_layer, logits_for, make_layer
from torch import Tensor, nn

import moekit
from moekit.errors import (
    InvalidInput,
    MoekitError,
    Unsupported,
    WeightsError,
)
from moekit.layer import ops
from moekit.testing.cases import random_weights, random_x


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


class Counting:
    """A compiler that only counts the graphs it receives, and keeps moekit's operators in them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.operators: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        self.graphs += 1
        self.operators += [n.target for n in graph.graph.nodes if "moekit" in str(n.target)]
        return graph.forward


class Block(nn.Module):
    """The MoE half of a transformer block, with its own gate."""

    def __init__(self, **knobs) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = make_layer(**knobs)
        self.experts.load_weights(random_weights(self.experts.problem))

    def forward(self, x: Tensor) -> Tensor:
        x = x / x.norm(dim=-1, keepdim=True)
        return x + self.experts(x, self.gate(x))


@torch.inference_mode()
def test_no_recompilation_for_another_number_of_tokens() -> None:
    model = nn.Sequential(Block(), Block(shared_experts=torch.tanh, zero_expert_num=0), Block())
    counting = Counting()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counting)
    for tokens in (7, 2, 33, 64, 5, 128, 3):
        x = torch.randn(tokens, H)
        assert torch.equal(compiled(x), model(x))
    assert counting.graphs == 1
    # torch specializes on sizes 0 and 1, as it does for every model: one graph each.
    for tokens in (1, 0, 1, 0, 19):
        x = torch.randn(tokens, H)
        assert torch.equal(compiled(x), model(x))
    assert counting.graphs <= 3


@torch.inference_mode()
def test_every_way_to_call() -> None:
    layer, _ = loaded_layer(max_num_tokens=4)
    counting = Counting()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counting)
    for tokens in (7, 9, 3):
        x, logits = random_x(layer.problem, tokens), logits_for(layer, tokens)
        routing = moekit.route(logits, K, renormalize=True)
        given = {"topk_weights": routing.topk_weights, "topk_ids": routing.topk_ids}
        padding = torch.arange(tokens) % 2 == 0
        assert torch.equal(compiled(x, **given), layer(x, **given))
        assert torch.equal(
            compiled(x, logits, is_padding=padding, max_tokens=x.shape[0]),
            layer(x, logits, is_padding=padding, max_tokens=tokens),
        )
    assert counting.graphs == 2  # one for each way


@torch.no_grad()
def test_aot_autograd() -> None:
    """Everything before inductor's code generation, which test_layer_gpu.py covers."""
    model = Block(shared_experts=torch.tanh)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 17):
        x = torch.randn(tokens, H)
        assert torch.equal(compiled(x), model(x))


def test_opcheck() -> None:
    layer, _ = loaded_layer(shared_experts=torch.sin, zero_expert_num=1)
    x, logits = random_x(layer.problem, 6), logits_for(layer, 6)
    routing = moekit.route(logits, K)
    for operator in ops.operators:
        for x_of, logits_of in ((x, logits), (x.view(2, 3, H), logits.view(2, 3, -1))):
            args = (x_of, logits_of, *[None] * 6, layer.number)
            torch.library.opcheck(operator, args)
        padding = torch.arange(6) < 2
        args = (
            x,
            None,
            routing.topk_weights,
            routing.topk_ids,
            padding,
            6,
            None,
            None,
            layer.number,
        )
        torch.library.opcheck(operator, args)
    with pytest.raises(
        Exception, match="aliasing|alias"
    ):  # negative control: opcheck finds wrong operators
        torch.library.opcheck(_returns_its_input, (x,))


@torch.library.custom_op("moekit_tests::returns_its_input", mutates_args=())
def _returns_its_input(x: Tensor) -> Tensor:
    return x


@_returns_its_input.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_layers_that_cannot_be_captured_have_the_tag() -> None:
    layer = make_layer()  # the torch experts synchronize
    assert not layer.graph_safe
    tags = torch.ops.moekit.fused_moe_without_graphs.default.tags
    assert torch.Tag.cudagraph_unsafe in tags
    assert torch.Tag.cudagraph_unsafe not in torch.ops.moekit.fused_moe.default.tags


@pytest.mark.parametrize("moves", [False, True])
def test_ranks_that_move_tokens_replay_no_graphs(moves: bool) -> None:
    """One rank would replay its graph while another one runs Python, and waits for it."""
    layer, _ = loaded_layer()
    layer.graph_safe, layer.ranks.moves = True, moves
    x, counting = torch.randn(4, H), Counting()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "run", lambda inputs: inputs.x.clone())
        torch.compile(layer, fullgraph=True, backend=counting)(x, logits_for(layer, 4))
    (operator,) = counting.operators
    assert (torch.Tag.cudagraph_unsafe in operator.tags) == moves


def test_compiled_code_raises_the_layers_errors() -> None:
    layer, _ = loaded_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with (
        torch.no_grad(),
        pytest.raises(InvalidInput, match=r"router_logits must have shape .*got \(4, 3\)"),
    ):
        compiled(torch.randn(4, H), torch.randn(4, 3))
    layer.packed = None
    with torch.no_grad(), pytest.raises(WeightsError, match="has no packed weights"):
        compiled(torch.randn(4, H), torch.randn(4, E))


def test_compiled_code_that_outlives_its_layer() -> None:
    layer, _ = loaded_layer()
    x, logits = random_x(layer.problem, 4), logits_for(layer, 4)
    number = layer.number
    del layer
    gc.collect()
    with pytest.raises(MoekitError, match="compiled code outlived the FusedMoE"):
        ops.operators.plain(x, logits, *[None] * 6, number)


def test_gradients_are_refused() -> None:
    model = Block()
    x = torch.randn(4, H, requires_grad=True)
    out = model(x)
    with torch.no_grad():
        assert torch.equal(out, model(x))
    with pytest.raises(Unsupported, match="this call has no backward"):
        out.sum().backward()
