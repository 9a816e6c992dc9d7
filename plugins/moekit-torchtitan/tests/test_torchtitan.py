"""MoE layers of torchtitan's debug models, with moekit's routed experts and with torchtitan's."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("torchtitan")

from moekit_torchtitan import MoekitRoutedExperts
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import MoE

from moekit.testing.distributed import RankPool

MODELS = {"qwen3": "debugmodel_moe", "deepseek_v3": "debugmodel"}
OURS = OverrideConfig(imports=[("moekit_torchtitan.routed_experts", {"experts": "torch"})])


def layer_of(model: str, ours: bool, expert_parallel: bool = False) -> MoE:
    """Return the first MoE layer of a debug model, with the same parameters at every call."""
    spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(MODELS[model])
    if ours:
        apply_overrides(OURS, spec.model)
    config = next(found for _, found, _, _ in spec.model.traverse(MoE.Config))
    if expert_parallel:
        shard(config)
    layer = config.build()
    torch.manual_seed(0)
    for _, parameter in sorted(layer.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.05)
    for buffer in layer.buffers():
        buffer.zero_()
    return layer


def shard(config: MoE.Config) -> None:
    import spmd_types as spmd
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)


def tokens(model: str, batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    width = {"qwen3": 256, "deepseek_v3": 256}[model]
    return torch.randn(batches, 16, width, requires_grad=True), torch.randn(batches, 16, width)


def assert_near(found: torch.Tensor, right: torch.Tensor, what: str) -> None:
    assert (found - right).norm() <= 2e-2 * right.norm(), what


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_equals_torchtitans(model) -> None:
    made = []
    for ours in (False, True):
        layer, (x, grad) = layer_of(model, ours), tokens(model, 2)
        out = layer(x)
        out.backward(grad)
        named = {name: p.grad for name, p in layer.named_parameters()}
        made.append({"out": out, "x": x.grad, **named})
    assert isinstance(layer.routed_experts, MoekitRoutedExperts)
    for name, right in made[0].items():
        assert_near(made[1][name], right, name)


def test_experts_of_another_class_stay_torchtitans(caplog) -> None:
    spec = importlib.import_module("torchtitan.models.gpt_oss").model_registry("debugmodel")
    apply_overrides(OURS, spec.model)
    config = next(found for _, found, _, _ in spec.model.traverse(MoE.Config))
    assert not isinstance(config.routed_experts, MoekitRoutedExperts.Config)
    assert caplog.text.count("moekit leaves GptOssGroupedExperts.Config to torchtitan") == 1


def _on_rank(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = "cpu"  # it takes a machine without accelerator for one with CUDA
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=world_size,
        world_size=world_size, spmd_backend="partial_dtensor",
    )  # fmt: skip
    dims.build_mesh()
    layer = layer_of("qwen3", True, expert_parallel=True)
    layer.parallelize(dims)
    x, grad = (t.detach()[2 * rank : 2 * rank + 2] for t in tokens("qwen3", 4))
    out = layer(x.requires_grad_())
    out.backward(grad)
    experts = layer.routed_experts.inner_experts.named_parameters()
    return {"out": out, "x": x.grad, **{name: p.grad.full_tensor() for name, p in experts}}


def test_expert_parallel_ranks_equal_one() -> None:
    pytest.importorskip("moekit_naive")
    with RankPool(2) as pool:
        made = pool.run(_on_rank)
    layer, (x, grad) = layer_of("qwen3", False), tokens("qwen3", 4)
    out = layer(x)
    out.backward(grad)
    for name in ("out", "x"):
        right = out if name == "out" else x.grad
        assert_near(torch.cat([each[name] for each in made]), right, name)
    for name, parameter in layer.routed_experts.inner_experts.named_parameters():
        assert_near(made[0][name], parameter.grad, name)
