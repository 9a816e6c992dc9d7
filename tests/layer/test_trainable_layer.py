"""`FusedMoE(trainable=True)`: parameters, and gradients through routing and shared experts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moekit
from moekit.errors import InvalidProblem, MoekitError, WeightsError
from moekit.lora import Adapter, AdapterSlots
from moekit.testing.adapters import random_adapters
from moekit.testing.distributed import RankPool
from moekit.training.operators import Saved

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


def test_chunks_and_checkpoints_give_equal_gradients() -> None:
    whole, x, logits = layer_of(), torch.randn(40, 32), torch.randn(40, 6)
    chunked = layer_of(max_num_tokens=16)
    chunked.load_state_dict(whole.state_dict())
    x.requires_grad_()
    forms = [
        whole,
        chunked,
        partial(checkpoint, whole, use_reentrant=False),
        partial(checkpoint, whole, use_reentrant=True),
    ]
    made = []
    for form in forms:
        x.grad = None
        form(x, logits).square().sum().backward()
        made.append(x.grad)
    for found in made[1:]:
        torch.testing.assert_close(found, made[0], rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()  # compiled code of several tests counts towards one limit


compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)


def selective(function: Callable) -> Callable:
    """Keep the outputs of `moe_forward`, and compute everything else again."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.moekit.moe_forward.default])
    return partial(checkpoint, function, use_reentrant=False, context_fn=kept)


def gradients(module: torch.nn.Module, function: Callable, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


class Model(torch.nn.Module):
    def __init__(self, **arguments) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gate, self.shared = torch.nn.Linear(32, 8), torch.nn.Linear(32, 32)
        self.experts = layer_of(**arguments, shared_experts=self.shared)
        self.autocast = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.gate(x)[:, : self.experts.router.width]
            return self.experts(x.tanh(), logits).sin()


_FULL = [pytest.param(form, marks=pytest.mark.full) for form in ("plain", "autocast", "two")]


@pytest.mark.parametrize("form", ["chunks", "zero_experts", "selective", *_FULL])
def test_compiled_layers_give_the_bits_of_eager_mode(form) -> None:
    arguments = {"chunks": {"max_num_tokens": 16}, "zero_experts": {"zero_expert_num": 2}}
    model: torch.nn.Module = Model(has_bias=True, **arguments.get(form, {}))
    model.autocast = form == "autocast"
    model = torch.nn.Sequential(model, Model()) if form == "two" else model
    function = compiled(selective(model) if form == "selective" else model)
    for tokens in (40, 7, 9):  # the second number makes the shape dynamic
        x = torch.randn(tokens, 32)
        wanted = gradients(model, model, x)
        for found, right in zip(gradients(model, function, x), wanted, strict=True):
            assert torch.equal(found, right)
    with torch.no_grad():
        assert torch.equal(function(x), model(x))


@pytest.mark.parametrize("experts", ["torch", "reference"])
def test_compiled_kernels(experts) -> None:
    """Calls with parameters, with packed experts and without buffers are traced."""
    problem = moekit.MoEProblem(**SIZES, dtype=torch.float32, device="cpu", training=True)
    kernel, layer = moekit.compose(problem, "local", experts), layer_of()
    frozen = moekit.compose(problem.replace(quant="int8_w8a16"), "local", experts)
    weights = moekit.ExpertWeights(layer.w13, layer.w2)
    packed = frozen.pack(weights.detach().quantize(frozen.problem.quant))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.p = layer, torch.nn.Parameter(torch.rand(9, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            routing = moekit.Routing(self.p[: len(x)], ids[: len(x)])
            for _ in range(2):
                x = frozen(kernel(x, weights, routing), packed, routing)
            return x

    ids, net = torch.stack([torch.randperm(6)[:2] for _ in range(9)]), Net()
    function = compiled(net)
    for tokens in (9, 5, 7):
        x = torch.randn(tokens, 32)
        found, right = gradients(net, function, x), gradients(net, net, x)
        assert all(map(torch.equal, found, right))
    with pytest.raises(Exception, match="torch.compile does not trace add_to"):
        compiled(kernel)(x, weights, moekit.Routing(net.p[:7], ids[:7]), add_to=weights)


@pytest.mark.parametrize("form", ["plain", "selective"])
def test_compiled_adapters(form) -> None:
    """Ids are computed in compiled code, and adapters are loaded after it is compiled."""
    layer = layer_of(adapters=AdapterSlots(2, 4)).requires_grad_(False)
    wide = moekit.MoEProblem(**SIZES, device="cpu", adapters=AdapterSlots(1, 4))
    drawn = random_adapters(wide).tensors().items()
    layer.adapters.load("first", Adapter(1.0, **{name: t[0] for name, t in drawn}))
    matrices = [t.requires_grad_() for t in layer.adapters.adapters.tensors().values()]

    class Net(torch.nn.Module):
        def parameters(self, recurse: bool = True):
            return iter(matrices)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = (x[:, 0] > 0).int() - 1
            return layer(x.tanh(), x[:, :6], adapter_ids=ids) + ids[:, None].sin()

    net = Net()
    function = compiled(selective(net) if form == "selective" else net)
    for tokens in (40, 7, 9):
        x = torch.randn(tokens, 32)
        found, right = gradients(net, function, x), gradients(net, net, x)
        assert all(map(torch.equal, found, right)) and any(t.any() for t in found[2:])
        layer.adapters.load("first", Adapter(0.5, **{name: -t[0] for name, t in drawn}))
    with torch.no_grad():
        assert torch.equal(function(x), net(x))


def test_compiled_calls_save_their_own_ids_of_adapters() -> None:
    """Compiled code may use the memory of ids again before the backward."""
    layer = layer_of(adapters=AdapterSlots(1, 4)).requires_grad_(False)
    packed = layer.kernel.frozen(moekit.ExpertWeights(layer.w13, layer.w2))
    held, layout, _ = layer.kernel._views(layer.adapters.on(packed))
    topk_ids, ids = torch.tensor([[0, 1], [2, 3]]), torch.tensor([-1, -1], dtype=torch.int32)
    _, key = torch.ops.moekit.moe_forward(
        torch.randn(2, 32), topk_ids, torch.rand(2, 2), [*held, ids], layer.kernel._number,
        f"{layout};adapter_ids", None, True, True,
    )  # fmt: skip
    ids.fill_(0)
    assert Saved.of(key).tensors[3].tolist() == [-1, -1]


def test_layers_share_compiled_code() -> None:
    x = torch.randn(9, 32)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        model = Model()
        found, right = gradients(model, compiled(model), x), gradients(model, model, x)
        assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("compile", [False, True])
def test_selective_checkpoints_dispatch_once(compile, monkeypatch) -> None:
    model, x = Model(), torch.randn(9, 32)
    dispatcher, calls = model.experts.kernel.dispatcher, []
    prepare = dispatcher.prepare
    monkeypatch.setattr(dispatcher, "prepare", lambda *a: calls.append(1) or prepare(*a))
    wanted = gradients(model, model, x)
    whole = partial(checkpoint, model, use_reentrant=False)
    for function, dispatched in ((selective(model), 1), (whole, 2)):
        function = compiled(function) if compile else function
        calls.clear()
        found = gradients(model, function, x)
        assert len(calls) == dispatched
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("wrap", [lambda model: model, compiled, selective])
def test_what_a_call_saves_lives_as_long_as_its_output(wrap, monkeypatch) -> None:
    model, x, saved = Model(), torch.randn(9, 32), []
    experts = model.experts.kernel.experts
    forward = experts.forward

    def watched(*arguments):
        made = forward(*arguments)
        saved.extend(weakref.ref(t.untyped_storage()) for t in made)
        saved.extend(weakref.ref(t) for t in made)
        return made

    monkeypatch.setattr(experts, "forward", watched)
    function = wrap(model)
    out = function(x)
    assert saved and any(ref() is not None for ref in saved)
    if wrap is not selective:  # which torch runs backwards once
        out.sum().backward(retain_graph=True)
    out.sum().backward()
    out = None
    gc.collect()
    assert not any(ref() is not None for ref in saved)
    out, saved[:] = function(x), []  # without a backward
    del out
    gc.collect()
    assert not any(ref() is not None for ref in saved)


@pytest.mark.parametrize("wrap", [lambda model: model, compiled])
def test_parameters_changed_before_the_backward(wrap) -> None:
    model = Model()
    out = wrap(model)(torch.randn(9, 32))
    with torch.no_grad():
        model.experts.w2.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_saved_tensors_may_be_offloaded() -> None:
    """Hooks may copy saved tensors in eager mode. In compiled code a copied key raises."""
    model, x = Model(), torch.randn(9, 32)
    wanted = gradients(model, model, x)
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    with copies:
        found = gradients(model, model, x)
    torch.testing.assert_close(found, wanted)
    with copies, pytest.raises(MoekitError, match="its key was copied"):
        gradients(model, compiled(model), x)


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


def _train_on_ranks(rank: int, world_size: int, form: str) -> tuple[torch.Tensor, ...]:
    layer = layer_of(dp_size=world_size, enable_expert_parallel=True)
    torch.manual_seed(3)
    w13, w2 = torch.randn(6, 32, 32) / 6, torch.randn(6, 32, 16) / 4
    held = list(layer.local_experts)
    layer.load_weights(moekit.ExpertWeights(w13[held], w2[held]))
    x, logits = torch.randn(2, 5, 32), torch.randn(2, 5, 6)
    mine = (3, 5)[rank]  # ranks have other numbers of tokens
    x, logits = x[rank, :mine].requires_grad_(), logits[rank, :mine].requires_grad_()
    function = selective(layer) if form == "selective" else layer
    function = compiled(layer) if form == "compiled" else function
    calls, prepare = [], layer.kernel.dispatcher.prepare
    layer.kernel.dispatcher.prepare = lambda *a: calls.append(1) or prepare(*a)
    function(x, logits).square().sum().backward()
    assert len(calls) == 1
    layer.destroy()
    return x.grad, logits.grad, layer.w13.grad, layer.w2.grad


@pytest.mark.parametrize("form", ["plain", "selective", "compiled"])
def test_ranks_train_one_layer(form) -> None:
    pytest.importorskip("moekit_naive")
    with RankPool(2) as pool:
        made = pool.run(_train_on_ranks, form)
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


def _give_wrong_weights(rank: int, world_size: int) -> str:
    layer = layer_of(dp_size=world_size, enable_expert_parallel=True)
    x, ids = torch.randn(4, 32), torch.arange(8).view(4, 2) % 6
    wrong = moekit.ExpertWeights(layer.w13, layer.w2[..., rank:])
    with pytest.raises(MoekitError) as told:
        layer.kernel(x, wrong, moekit.Routing(torch.rand(4, 2), ids))
    layer.destroy()
    return f"{type(told.value).__name__}: {told.value}"


def test_other_ranks_hear_of_wrong_weights() -> None:
    pytest.importorskip("moekit_naive")
    with RankPool(2) as pool:
        other, own = pool.run(_give_wrong_weights)
    assert own.startswith("WeightsError: ") and "w2 has shape (3, 32, 15)" in own
    assert other.startswith("PeerFailed: rank 1 failed: WeightsError: ")


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
