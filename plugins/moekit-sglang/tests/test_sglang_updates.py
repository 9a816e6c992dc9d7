"""Weights change in place, in the memory that CUDA graphs use. SGLang is a stand-in."""

from __future__ import annotations

import pytest
import sglang_standin as standin
import torch
from engine_layers import INNER, E, H, drawn, error
from moekit_sglang import experts
from sglang_layers import calls, made, started, taken, want
from sglang_layers import sglang as sglang  # a fixture

from moekit.errors import MoekitError


@pytest.fixture
def repacking(monkeypatch):
    """Let a backend keep copies, as backends do whose layout differs from the checkpoint's."""
    stock = experts.held

    def held(layer, packed):
        for name, tensor in packed.experts.items():
            packed.experts[name] = tensor.clone()
        return stock(layer, packed)

    monkeypatch.setattr(experts, "held", held)


def matrices(weights):
    """Yield new weights as a model's load_weights passes them: a matrix of an expert at a time."""
    for expert in range(E):
        gate, up = weights["w13_weight"][expert].chunk(2)
        yield "w13_weight", gate, "w1", expert
        yield "w13_weight", up, "w3", expert
        yield "w2_weight", weights["w2_weight"][expert], "w2", expert


def update(layer, new):
    """Write matrices as a model's load_weights does, by the parameters' names."""
    for name, tensor, shard, expert in new:
        param = getattr(layer, name)
        param.weight_loader(param, tensor, name, shard_id=shard, expert_id=expert)


def pointers(layer):
    packed = layer.quant_method.moekit_experts.packed
    return [tensor.data_ptr() for tensor in packed.tensors().values()]


def test_weights_that_moekit_shares_with_sglang_change_at_once() -> None:
    started()
    layer = made()
    assert not layer.quant_method.moekit_experts.emptied
    update(layer, list(matrices(drawn(1)))[:3])
    mixed = drawn()
    for name, tensor in mixed.items():
        tensor[0] = drawn(1)[name][0]
    assert error(layer(*calls()), want(mixed, *calls())) < 1e-5


def test_packed_weights_change_when_the_last_matrix_has_come(repacking) -> None:
    """Updates may come in parts; no request may run between them."""
    started()
    layer, new = made(), list(matrices(drawn(1)))
    before, names = pointers(layer), dict(layer.named_parameters())
    assert {"w13_weight", "w2_weight", "moekit_w13", "moekit_w2"} == set(names)
    assert layer.w13_weight.numel() == layer.w2_weight.numel() == 0
    for part in (new[:5], new[5:-1]):
        update(layer, part)
        with pytest.raises(MoekitError, match="have come for an MoE layer: send the others"):
            layer(*calls())
    update(layer, new[-1:])
    assert error(layer(*calls()), want(drawn(1), *calls())) < 1e-5
    assert pointers(layer) == before and layer.w13_weight.numel() == 0
    assert dict(layer.named_parameters()).keys() == names.keys()
    assert all(names[name] is param for name, param in layer.named_parameters())


def test_updates_from_files_end_with_sglangs_call(repacking) -> None:
    started()
    layer = made()
    before = pointers(layer)
    layer.quant_method.restore_weights_before_loading(layer)
    assert not hasattr(layer, "restored_by_sglang")
    update(layer, matrices(drawn(1)))
    layer.quant_method.process_weights_after_loading(layer)
    assert error(layer(*calls()), want(drawn(1), *calls())) < 1e-5
    assert pointers(layer) == before
    layer.quant_method.process_weights_after_loading(layer)  # nothing new has come
    assert error(layer(*calls()), want(drawn(1), *calls())) < 1e-5


def test_all_experts_in_one_tensor(repacking) -> None:
    started()
    layer, new = made(), drawn(1)
    for name in new:
        layer.weight_loader_fused(getattr(layer, name), new[name], name, name.partition("_")[0])
    assert error(layer(*calls()), want(new, *calls())) < 1e-5


def test_an_update_that_moekit_cannot_take(repacking) -> None:
    """moekit keeps the layer, with the old weights."""
    started()
    layer = made()
    new = list(matrices(drawn(1)))
    update(layer, new[:-1])
    with pytest.raises(MoekitError, match="only 17 matrices came; send weights that fit"):
        layer.quant_method.process_weights_after_loading(layer)  # after a file that lacks one
    layer.moe_runner_config.no_combine = True
    with pytest.raises(MoekitError, match="MoE layer 3, but not with its new weights: it returns"):
        update(layer, new[-1:])
    assert taken(layer)
    layer.moe_runner_config.no_combine = False
    layer.quant_method.process_weights_after_loading(layer)
    assert error(layer(*calls()), want(drawn(1), *calls())) < 1e-5


def test_parameters_that_a_checkpoint_lacks_are_not_awaited(repacking) -> None:
    """SGLang registers some for every checkpoint. An update awaits what the first load had."""
    started()
    layer = made(drawn(w13_g_idx=torch.zeros(E, H), w2_g_idx=torch.zeros(E, H)))
    assert set(layer.quant_method.moekit_experts.awaited) == {"w13_weight", "w2_weight"}
    cls = type(layer)
    layer = cls(drawn(w13_more=torch.zeros(E, H)), standin.method("UnquantizedFusedMoEMethod"),
                hidden=H, inner=INNER)  # fmt: skip
    update(layer, matrices(drawn()))
    layer.quant_method.process_weights_after_loading(layer)
    assert set(layer.quant_method.moekit_experts.awaited) == {"w13_weight", "w2_weight"}
    update(layer, matrices(drawn(1)))
    assert error(layer(*calls()), want(drawn(1), *calls())) < 1e-5


def test_a_layer_that_stays_with_sglang_stays_through_updates() -> None:
    started()
    layer = made(no_combine=True)
    layer.moe_runner_config.no_combine = False
    layer.quant_method.restore_weights_before_loading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert not taken(layer) and layer.restored_by_sglang
    update(layer, matrices(drawn(1)))
    assert torch.equal(layer.w13_weight, drawn(1)["w13_weight"])
