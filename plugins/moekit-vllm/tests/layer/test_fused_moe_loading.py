"""FusedMoE with vLLM's interface: its parameters, its weight loader, and updates."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fused_moe_cases import SIZES, loaded, make, push, stacks
from layer_cases import E, H, I
from moekit_vllm import FusedMoE, SharedFusedMoE
from torch import Tensor, nn

from moekit.errors import WeightsError
from moekit.layer.replicas import Placement
from moekit.testing.cases import random_weights


def test_a_dropped_layer_frees_its_memory_at_once() -> None:
    layer = make()
    param, gone = layer.w2_weight, weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError):
        param.weight_loader(param, torch.zeros(H, I), "w2_weight", "w2", 0)


def test_weights_that_a_backend_copies_are_freed() -> None:
    """fp8 per tensor: gate and up get one scale in a copy of w13. w2 is packed as it is."""
    how = dict(quant_config="fp8_tensor", params_dtype=torch.bfloat16, experts="torch")
    layer, places = make(**how), []
    for _ in range(2):
        fresh = make(**how)
        for suffix in ("weight", "weight_scale"):
            tensors = {s: t.to(torch.float8_e4m3fn) for s, t in stacks().items()}
            if suffix == "weight_scale":
                tensors = {shard: torch.rand(E) + 0.5 for shard in tensors}
            push(layer, tensors, suffix)
            push(fresh, tensors, suffix)
        assert layer._pushed.out["w13"].shape == (E, 2 * I, H) and layer.packed is None
        layer.process_weights_after_loading()
        fresh.process_weights_after_loading()
        for name, packed in fresh.packed.experts.items():
            assert torch.equal(layer.packed[name].float(), packed.float())
        assert list(layer._pushed.out) == ["w2"]
        assert layer._pushed.out["w2"].data_ptr() == layer.packed["w2"].data_ptr()
        places.append(layer.packed["w13"].data_ptr())
    assert places[0] == places[1]  # a CUDA graph that reads it remains valid
    layer.destroy()
    assert not layer._pushed.out


def test_an_update_leaves_the_callers_weights_alone() -> None:
    layer = make(experts="torch")
    weights = random_weights(layer.problem)
    layer.load_weights(weights)
    assert layer.packed["w2"].data_ptr() == weights.w2.data_ptr()  # packed without a copy
    before, tensors = weights.w2.clone(), stacks()
    push(layer, tensors)
    layer.process_weights_after_loading()
    assert torch.equal(layer.packed["w2"], tensors["w2"]) and torch.equal(weights.w2, before)


@pytest.mark.parametrize("quant", [None, "fp8_block"])
def test_torchs_default_device_has_no_effect(quant: str | None) -> None:
    """Engines construct models under a default device, and may load under another one."""
    arguments = dict(
        quant_config=quant, hidden_size=256, intermediate_size=384, num_experts=2, top_k=2
    )
    outs, made = [], random_weights(make(**arguments).problem)
    x, logits = torch.randn(3, 256), torch.randn(3, 2)
    for device in ("cpu", "meta"):
        with torch.device(device):
            layer = make(**arguments, experts="torch")
            if quant is None:
                push(layer, dict(w1=made.w13[:, :384], w3=made.w13[:, 384:], w2=made.w2))
                layer.process_weights_after_loading()
            else:
                layer.load_weights(made)
        outs.append(layer(x, logits))
    assert torch.equal(*outs)


def test_an_update_after_experts_were_moved() -> None:
    """Weights go to where `moekit.eplb` has put their experts, whatever the mapping's ids are."""
    spread = dict(enable_eplb=True, num_redundant_experts=2)
    layer, other = make(**spread), make(**spread)
    push(layer, stacks())
    layer.process_weights_after_loading()
    moved = Placement((5, 4, 3, 2, 1, 0, 4, 1), E, 1)
    layer.placement = moved
    layer.set_replicas(moved.logical_to_physical())
    tensors = stacks()
    for each in (layer, other):
        push(each, tensors)
        each.process_weights_after_loading()
    x, logits = torch.randn(40, H), torch.randn(40, E)
    assert torch.equal(layer.packed["w2"], tensors["w2"][list(moved.physical_to_logical)])
    out, want = layer(x, logits), other(x, logits)
    assert (out - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("internal", [False, True])
def test_shared_experts(internal: bool) -> None:
    gate, shared = nn.Linear(H, E), nn.Linear(H, H)
    layer = SharedFusedMoE(
        shared_experts=shared,
        gate=(lambda x: (gate(x), None)) if internal else None,
        **SIZES,
        params_dtype=torch.float32,
        device="cpu",
    )
    plain, tensors = loaded()
    push(layer, tensors)
    layer.process_weights_after_loading()
    assert layer.is_internal_router == internal
    x = torch.randn(5, H)
    with torch.no_grad():
        ours, routed = layer(hidden_states=x, router_logits=x if internal else gate(x))
        assert torch.equal(ours, shared(x)) and torch.equal(routed, plain(x, gate(x)))
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}


def test_casts_and_state_dicts_leave_the_weights_alone() -> None:
    layer = make(quant_config="fp8_tensor", params_dtype=torch.bfloat16).to(torch.bfloat16)
    assert layer._pushed.out["w13"].dtype == torch.float8_e4m3fn
    model = nn.ModuleDict({"experts": loaded()[0], "norm": nn.LayerNorm(H)})
    saved = {name: torch.full_like(t, 0.5) for name, t in model.state_dict().items()}
    assert set(saved) == {"norm.weight", "norm.bias"}
    fresh = nn.ModuleDict({"experts": make(), "norm": nn.LayerNorm(H)})
    advice = r"Missing key.*experts.w13_weight \(pass it to weight_loader\(\)\)"
    with pytest.raises(RuntimeError, match=advice):
        fresh.load_state_dict(saved)
    assert not fresh.load_state_dict(saved, strict=False).unexpected_keys
    assert bool((fresh["norm"].weight == 0.5).all())


def call_without_weights(layer: FusedMoE) -> None:
    layer(torch.zeros(2, H), torch.zeros(2, E))


def test_calls_need_processed_weights() -> None:
    layer, tensors = make(), stacks()
    lacks = f"{3 * E} of {3 * E} tensors of this rank were not loaded: experts.0"
    advice = f"no packed weights: {lacks}.*; pass them to weight_loader"
    with pytest.raises(WeightsError, match=advice):
        call_without_weights(layer)
    with pytest.raises(WeightsError, match=lacks):
        layer.process_weights_after_loading()
    push(layer, tensors)
    with pytest.raises(
        WeightsError, match="call process_weights_after_loading.., which packs what"
    ):
        call_without_weights(layer)
    layer.process_weights_after_loading()
    call_without_weights(layer)
    packed = layer.packed
    layer.process_weights_after_loading()  # nothing new
    assert layer.packed is packed
    layer.w2_weight.weight_loader(layer.w2_weight, tensors["w2"][1], "w2_weight", "w2", 1)
    began = "experts.1.w2.weight came after a complete round of loading and began a new one, and"
    advice = f"no packed weights: {began} {3 * E - 1} of {3 * E} tensors"
    with pytest.raises(WeightsError, match=advice):
        call_without_weights(layer)  # an update has begun


def wrong_call(layer: FusedMoE, tensors: dict[str, Tensor], **changes: Any) -> None:
    given = dict(
        param=layer.w13_weight,
        loaded_weight=tensors["w1"][0],
        weight_name="model.layers.0.mlp.experts.w13_weight",
        shard_id="w1",
        expert_id=0,
    )
    layer.weight_loader(**{**given, **changes})


CALLS = {
    "shard": (dict(shard_id="w4"), "shard_id='w4': expected one of w1, w3, w13, w2"),
    "expert": (dict(expert_id=E), f"expert_id={E}: expected 0..{E - 1}"),
    "shape": (dict(loaded_weight=torch.zeros(I, H + 1)), rf"is \({I}, {H + 1}\), expected \({I}, "),
    "transposed": (dict(loaded_weight=torch.zeros(H, I)), "transpose it"),
    "param": (
        dict(param=nn.Parameter(torch.zeros(2))),
        "param is no parameter of this layer: pass one of",
    ),
    "tensor": (dict(loaded_weight=[[1.0]]), "expected a dense tensor with values"),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls_of_the_weight_loader(case: str) -> None:
    changes, message = CALLS[case]
    layer, tensors = loaded()
    with pytest.raises(WeightsError, match=message):
        wrong_call(layer, tensors, **changes)
    call_without_weights(layer)  # nothing was replaced


def test_loading_twice() -> None:
    layer, tensors = make(), stacks()
    wrong_call(layer, tensors)
    with pytest.raises(WeightsError, match="experts.0.w1.weight was already loaded; finish this"):
        wrong_call(layer, tensors)
