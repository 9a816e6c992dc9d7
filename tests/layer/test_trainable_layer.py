"""`FusedMoE(trainable=True)`: parameters, and gradients through routing and shared experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import moekit
from moekit.errors import InvalidProblem, WeightsError
from moekit.testing.distributed import RankPool

SIZES = {"num_experts": 6, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
layer_of = partial(
    moekit.FusedMoE, **SIZES, params_dtype=torch.float32, device="cpu", trainable=True
)


def test_it_learns() -> None:
    """Chunks, biases, shared experts and router train together."""
    torch.manual_seed(1)
    shared, gate = torch.nn.Linear(32, 32), torch.nn.Linear(32, 6)
    layer = layer_of(has_bias=True, max_num_tokens=16, shared_experts=shared)
    modules = torch.nn.ModuleList([layer, shared, gate])
    before = {name: p.detach().clone() for name, p in modules.named_parameters()}
    optimizer = torch.optim.Adam(modules.parameters(), 1e-2)
    x, target = torch.randn(40, 32), torch.randn(40, 32)
    losses = []
    for _ in range(30):
        loss = mse_loss(layer(x, gate(x)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], losses
    for name, p in modules.named_parameters():  # of experts, each one
        assert (p != before[name]).flatten(1 if name.startswith("0.") else 0).any(-1).all(), name


def test_chunks_checkpoints_and_compiled_layers_give_equal_gradients() -> None:
    whole, x, logits = layer_of(), torch.randn(40, 32), torch.randn(40, 6)
    chunked = layer_of(max_num_tokens=16)
    chunked.load_state_dict(whole.state_dict())
    x.requires_grad_()
    forms = [
        whole,
        chunked,
        partial(checkpoint, whole, use_reentrant=False),
        partial(checkpoint, whole, use_reentrant=True),
        torch.compile(whole, backend="eager"),
    ]
    made = []
    for form in forms:
        x.grad = None
        form(x, logits).square().sum().backward()
        made.append(x.grad)
    for found in made[1:]:
        torch.testing.assert_close(found, made[0], rtol=1e-5, atol=1e-5)


def test_weights_are_parameters() -> None:
    layer = layer_of()
    weights = moekit.ExpertWeights(torch.randn(6, 32, 32), torch.randn(6, 32, 16))
    layer.load_weights(weights)
    assert set(layer.state_dict()) == {"w13", "w2"}
    assert torch.equal(layer.w13, weights.w13) and layer.w13.requires_grad
    with pytest.raises(WeightsError, match=r"w2 has shape \(6, 32, 15\), expected \(6, 32, 16\)"):
        layer.load_weights(moekit.ExpertWeights(weights.w13, weights.w2[..., 1:]))
    layer.warmup(4)
    with torch.no_grad():
        assert not layer(torch.randn(3, 32), torch.randn(3, 6)).requires_grad


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"quant": "fp8_block"}, "weights of fp8_block have no gradient"),
        ({"num_redundant_experts": 1}, "replicas of an expert would drift apart"),
        ({"parallel": moekit.parallel_config(2)}, "add up outputs without a backward.*dp_size"),
        ({"is_sequence_parallel": True}, "gathers outputs without a backward"),
    ],
)
def test_what_cannot_train_is_refused(arguments, says) -> None:
    with pytest.raises(InvalidProblem, match=f"trainable=True: .*{says}"):
        layer_of(**arguments)


def _train_on_ranks(rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    layer = layer_of(dp_size=world_size, enable_expert_parallel=True)
    torch.manual_seed(3)
    w13, w2 = torch.randn(6, 32, 32) / 6, torch.randn(6, 32, 16) / 4
    held = list(layer.local_experts)
    layer.load_weights(moekit.ExpertWeights(w13[held], w2[held]))
    x, logits = torch.randn(2, 5, 32), torch.randn(2, 5, 6)
    mine = (3, 5)[rank]  # ranks have other numbers of tokens
    x, logits = x[rank, :mine].requires_grad_(), logits[rank, :mine].requires_grad_()
    layer(x, logits).square().sum().backward()
    layer.destroy()
    return x.grad, logits.grad, layer.w13.grad, layer.w2.grad


def test_ranks_train_one_layer() -> None:
    pytest.importorskip("moekit_naive")
    with RankPool(2) as pool:
        made = pool.run(_train_on_ranks)
    layer = layer_of()
    torch.manual_seed(3)
    layer.load_weights(moekit.ExpertWeights(torch.randn(6, 32, 32) / 6, torch.randn(6, 32, 16) / 4))
    x, logits = torch.randn(2, 5, 32), torch.randn(2, 5, 6)
    x, logits = (torch.cat([t[0, :3], t[1]]).requires_grad_() for t in (x, logits))
    layer(x, logits).square().sum().backward()
    wanted = x.grad, logits.grad, layer.w13.grad, layer.w2.grad
    assert all(right.any() for right in wanted)
    for found, right in zip(zip(*made, strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(found), right, rtol=1e-4, atol=1e-5)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gate, self.experts = torch.nn.Linear(32, 6), layer_of()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


def _shard(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Block()
    mesh, policy = init_device_mesh("cpu", (world_size,)), MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model.experts, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x = torch.randn(world_size, 7, 32)[rank]  # of the seed in Block
    model(x).square().mean().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fsdp_shards_parameters_and_casts_them(dtype, error) -> None:
    with RankPool(2) as pool:
        made = pool.run(_shard, dtype)[0]
    model = Block()
    sum(model(x).square().mean() for x in torch.randn(2, 7, 32)).div(2).backward()
    for name, p in model.named_parameters():
        assert (made[name] - p.grad).norm() <= error * p.grad.norm(), name


def test_autocast_names_the_dtype() -> None:
    """Parameters and their gradients stay in fp32."""
    layer, x, logits = layer_of(), torch.randn(9, 32), torch.randn(9, 6)
    layer(x, logits).square().sum().backward()
    wanted, layer.w13.grad = layer.w13.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, logits)
    assert out.dtype is torch.bfloat16
    out.float().square().sum().backward()
    assert (layer.w13.grad - wanted).norm() <= 2e-2 * wanted.norm()
