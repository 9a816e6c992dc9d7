"""A quantized layer of vLLM holds moekit's tensors, and keeps them when weights are loaded anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_memory import Allocated

pytest.importorskip("vllm")

import checkpoint_files as files  # noqa: E402
import vllm_quantized_layers as layers  # noqa: E402
from moekit_vllm.hooks import Extended  # noqa: E402
from moekit_vllm.settings import Mode  # noqa: E402

from moekit.engines.method import extended  # noqa: E402
from moekit.errors import MoekitError  # noqa: E402
from moekit.problem.tolerance import rms_bound  # noqa: E402

H, I = 256, 256


pytestmark = pytest.mark.usefixtures("vllm_process")


def empty(format: layers.Format) -> Any:
    """Return a layer whose method moekit extends, with vLLM's record for loading it anew."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    layer = layers.empty_layer(format, H, I)
    record_metadata_for_reloading(layer)
    layer.quant_method = extended(layer.quant_method, Extended, Mode.REQUIRE)
    return layer


def written(format: layers.Format, folder: Path) -> files.Layer:
    """Write a checkpoint with random weights."""
    return files.write(folder, format.packer, format.config, E=layers.E, H=H, I=I)


def processed(format: layers.Format, made: files.Layer) -> Any:
    """Return a layer that moekit computes with a checkpoint's weights."""
    layer = layers.load(empty(format), made)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def with_new_parameters(layer: Any, made: files.Layer) -> None:
    """Load a checkpoint into parameters that the method makes anew."""
    config = layer.moe_config
    layer.quant_method.create_weights(
        layer=layer,
        num_experts=layer.local_num_experts,
        hidden_size=H,
        unpadded_hidden_size=H,
        intermediate_size_per_partition=config.intermediate_size_per_partition,
        params_dtype=layer.params_dtype,
        weight_loader=layer.weight_loader,
        global_num_experts=layers.E,
    )
    layers.load(layer, made)
    layer.quant_method.process_weights_after_loading(layer)


def by_vllm(layer: Any, made: files.Layer) -> None:
    """Load as vLLM does for reinforcement learning, which restores parameters by name."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(layer)
    layers.load(layer, made)
    finalize_layerwise_reload(layer, None)


def held(layer: Any) -> dict[str, int]:
    """Return where the layer's parameters and moekit's tensors are."""
    packed = layer.quant_method.moekit_experts.packed
    tensors = {**dict(layer.named_parameters()), **packed.experts, **packed.shared}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def check_output(layer: Any, made: files.Layer, rounding: float = 0.0) -> None:
    """Compare the method's output with what the checkpoint's numbers give.

    rounding: The relative error that rounding the checkpoint's weights may cost.
    """
    x, routing = layers.inputs(H)
    x = x.to(layer.moe_config.in_dtype)
    out = layer.quant_method.apply(layer, x, routing.topk_weights, routing.topk_ids).float()
    bound = max(rounding, rms_bound(layer.quant_method.moekit_experts.kernel.problem))
    assert layers.relative_rms(out, layers.expected_output(made, x, routing)) < bound


# vLLM counts the numbers that it has loaded. It counts activation scales of gate and up twice, or
# meets more tensors than parameters, and then goes on before the last ones are there.
_MISCOUNTED = ("static", "modelopt", "ct-int4", "ct-int8-packed")
WAYS = [(name, with_new_parameters) for name in layers.FORMATS] + [
    (name, by_vllm) for name in layers.FORMATS if not any(part in name for part in _MISCOUNTED)
]


@pytest.mark.parametrize(("name", "load_anew"), WAYS)
def test_weights_are_loaded_anew_in_place(name: str, load_anew: Any, tmp_path: Path) -> None:
    format = layers.FORMATS[name]
    first, second = (written(format, tmp_path / name) for name in ("first", "second"))
    layer = processed(format, first)
    check_output(layer, first)
    names = [n for n, _ in layer.named_parameters()]
    packed = layer.quant_method.moekit_experts.packed
    # Each tensor once: the layer holds what moekit packed, and nothing of vLLM's besides.
    assert {p.data_ptr() for p in layer.parameters()} == {
        t.data_ptr() for t in packed.experts.values()
    }
    assert len(names) == len(packed.experts)
    # vLLM's warm-up of DeepGEMM asks every method, and finds nothing to do.
    assert layer.quant_method.get_fused_moe_quant_config(layer).quant_dtype is None
    where = held(layer)
    load_anew(layer, second)
    assert held(layer) == where and [n for n, _ in layer.named_parameters()] == names
    check_output(layer, second)
    with pytest.raises(AssertionError):
        check_output(layer, first)


@pytest.mark.parametrize("name", layers.FORMATS)
def test_experts_move_between_ranks(name: str, tmp_path: Path) -> None:
    """EPLB moves rows of `get_expert_weights`: the experts' outputs move with them."""
    format = layers.FORMATS[name]
    made = written(format, tmp_path)
    layer = processed(format, made)
    rows = list(layer.get_expert_weights())  # asserts that every parameter is contiguous
    assert all(row.shape[0] == layers.E and row.is_contiguous() for row in rows)
    order = [2, 0, 3, 1]
    for row in rows:
        row.copy_(row[order].clone())
    moved = files.Layer(
        made.path, made.sizes, made.gate[order], made.up[order], made.down[order], made.tensors
    )
    check_output(layer, moved)


# -- memory that vLLM takes away ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8-block", "gptq", "ct-mxfp4", "modelopt-fp8"])
def test_sleep_of_level_2(name: str, tmp_path: Path) -> None:
    """vLLM takes the memory that it allocated for weights, saves buffers, and loads anew."""
    format = layers.FORMATS[name]
    made = written(format, tmp_path)
    with Allocated() as weights:
        layer = processed(format, made)
    check_output(layer, made)
    weights.discard([*layer.buffers(), *made.tensors.values()])
    with pytest.raises(AssertionError):
        check_output(layer, made)
    with_new_parameters(layer, made)
    check_output(layer, made)


# -- weights that vLLM quantizes when it loads them --------------------------------------


def _online(moe: str, method: str, scheme: str) -> layers.Format:
    return layers.Format(files.bf16, {"moe": moe}, "online", method, scheme)


ONLINE = [
    _online("fp8_per_tensor", "Fp8PerTensorOnlineMoEMethod", "fp8_tensor"),
    _online("fp8_per_block", "Fp8PerBlockOnlineMoEMethod", "fp8_block"),
    _online("fp8_per_channel", "Fp8PtpcOnlineMoEMethod", "fp8_channel_token"),
    _online("int8_per_channel_weight_only", "Int8OnlineMoEMethod", "int8_w8a16"),
]


@pytest.mark.parametrize("format", ONLINE, ids=lambda format: format.scheme)
def test_weights_are_quantized_while_loading(format: layers.Format, tmp_path: Path) -> None:
    first, second = (written(format, tmp_path / name) for name in ("first", "second"))
    layer = layers.load(empty(format), first)  # quantized with the last tensor
    experts = layer.quant_method.moekit_experts
    assert experts is not None and experts.kernel.problem.quant.name == format.scheme
    layer.quant_method.process_weights_after_loading(layer)  # vLLM calls it for every layer
    assert layer.quant_method.moekit_experts is experts
    check_output(layer, first, rounding=0.03)
    where = held(layer)
    by_vllm(layer, second)
    assert held(layer) == where
    check_output(layer, second, rounding=0.03)


def test_weights_that_vllm_has_quantized_are_left_alone() -> None:
    """vLLM's second call finds its own kernel's weights if it has kept the layer."""
    layer = empty(ONLINE[0])
    layer._already_called_process_weights_after_loading = True
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.moekit_experts is None


# -- biases ------------------------------------------------------------------------------


def test_gptq_keeps_the_biases_that_were_loaded(tmp_path: Path) -> None:
    """vLLM makes GPTQ's biases for every model, and notes which a checkpoint has."""
    format = layers.FORMATS["gptq"]
    made = written(format, tmp_path)
    layer = layers.load(empty(format), made)
    bias = torch.randn(layers.E, H).half()
    list(layer.load_weights([(f"{e}.down_proj.bias", bias[e]) for e in range(layers.E)]))
    layer.quant_method.process_weights_after_loading(layer)
    problem = layer.quant_method.moekit_experts.kernel.problem
    assert problem.has_bias
    x, routing = layers.inputs(H)
    x = x.half()
    out = layer.quant_method.apply(layer, x, routing.topk_weights, routing.topk_ids).float()
    want = layers.expected_output(made, x, routing)
    want += (routing.topk_weights[..., None] * bias[routing.topk_ids].float()).sum(1)
    assert layers.relative_rms(out, want) < rms_bound(problem)


def test_a_layer_that_moekit_cannot_compute_is_as_before(tmp_path: Path) -> None:
    format = layers.FORMATS["fp8-block"]
    made = written(format, tmp_path)
    layer = layers.load(empty(format), made)
    layer.quant_method.weight_block_size = [64, 64]
    before = held_parameters(layer)
    with pytest.raises(MoekitError, match=r"stays with vLLM: .*blocks of 128 x 128"):
        layer.quant_method.process_weights_after_loading(layer)
    assert held_parameters(layer) == before


def held_parameters(layer: Any) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in layer.named_parameters()}
