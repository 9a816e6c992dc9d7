"""A `RoutingLog` records the experts of each token, and replays them in another pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import E, H, I, K, random_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moekit
from moekit import RoutingLog
from moekit.errors import InvalidInput
from moekit.layer.replicas import Placement
from moekit.testing import relative_error
from moekit.testing.distributed import RankPool

T = 11
SCORES = {"softmax": F.softmax, "sigmoid": lambda x, dim: x.sigmoid()}


class Model(nn.Module):
    """Two layers whose router has much more noise than another order of sums would give."""

    def __init__(self, noise: float = 0.0, **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gates = nn.ModuleList(nn.Linear(H, E) for _ in range(2))
        arguments = {"params_dtype": torch.float32, "device": "cpu", **arguments}
        self.layers = nn.ModuleList(moekit.FusedMoE(E, K, H, I, **arguments) for _ in range(2))
        self.noise, self.seen, self.wrap = noise, [], lambda function, x: function(x)
        for layer in self.layers if not arguments.get("trainable") else ():
            layer.load_weights(random_weights(layer.problem))
        for layer in self.layers:  # note the ids that the experts' kernel gets
            kernel = layer.kernel
            layer.flow.kernel = Watched(kernel, self.seen)

    def forward(self, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):

            def block(x: Tensor, layer: Any = layer, gate: Any = gate) -> Tensor:
                logits = gate(x.float())
                return x + layer(x, logits + self.noise * torch.randn_like(logits))

            x = self.wrap(block, x)
        return x


class Watched:
    """A kernel that keeps the ids of its calls."""

    def __init__(self, kernel: Any, seen: list[Tensor]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __call__(self, x: Tensor, weights: Any, routing: Any) -> Tensor:
        self.seen.append(routing.topk_ids.clone())
        return self.kernel(x, weights, routing)

    def start(self, x: Tensor, *, routing: Any, **more: Any) -> Any:
        self.seen.append(routing.topk_ids.clone())
        return self.kernel.start(x, routing=routing, **more)


def distinct(*shape: int) -> Tensor:
    return torch.rand(*shape, E).argsort(-1)[..., :K]


def test_a_rollout_and_a_training_pass_use_the_same_experts() -> None:
    """Both differ in backend, dtype and noise; the trainer's checkpoints run each layer again."""
    server = Model(params_dtype=torch.bfloat16, experts="reference")
    trainer = Model(noise=5.0, trainable=True)
    x = torch.randn(T, H)
    log = RoutingLog.of(server, max_tokens=T)
    with torch.no_grad(), log.record() as step:
        server(x.bfloat16())
        ids = step.take().result()
    assert log.layers == ("layers.0", "layers.1") and ids.shape == (T, 2, K)
    assert torch.equal(torch.stack(server.seen, 1), ids.long())
    replayed = RoutingLog.of(trainer, max_tokens=T)
    trainer.wrap = partial(checkpoint, use_reentrant=False)
    with replayed.replay(dict(zip(log.layers, ids.unbind(1), strict=True))):
        trainer(x.requires_grad_()).square().sum().backward()
    forward, backward = torch.stack(trainer.seen[:2], 1), torch.stack(trainer.seen[:1:-1], 1)
    assert torch.equal(forward, ids.long()) and torch.equal(backward, ids.long())
    assert all(gate.weight.grad.abs().sum() > 0 for gate in trainer.gates)
    replayed.detach()
    trainer.seen.clear()
    trainer(x)
    assert not torch.equal(torch.stack(trainer.seen[:2], 1), ids.long()), "the noise decides"
    first, second = (RoutingLog.of(trainer, max_tokens=T) for _ in range(2))
    for gone in (replayed, first):  # its layers would route freely
        with pytest.raises(InvalidInput, match="is detached, or another one took its layers"):
            gone.replay(ids).__enter__()
    first.detach()
    with second.replay(ids):
        trainer.seen.clear()
        trainer(x)
    assert torch.equal(torch.stack(trainer.seen[:2], 1), ids.long())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORES)
def test_weights_and_gradients_come_from_the_full_scores(scoring, renormalize, bias) -> None:
    """The replayed experts are the worst ones. A token without a record gets the best ones."""
    logits, twin = (torch.randn(T, E).requires_grad_() for _ in range(2))
    twin.data.copy_(logits.data)
    ids = logits.detach().argsort(1)[:, None, :K].clone()
    ids[4] = -1
    options = {"renormalize": renormalize, "scoring": scoring, "routed_scaling_factor": 2.5}
    options |= {"correction_bias": torch.randn(E) / 9} if bias else {}
    log = RoutingLog({"a": (E, K)}, T)
    with log.replay(ids) as block:
        found = moekit.route(logits, K, **options, log=log["a"])
        taken = block.take().result()
    own = moekit.route(logits.detach(), K, **options)
    wanted = torch.where(ids[:, 0] < 0, own.topk_ids, ids[:, 0])
    assert torch.equal(found.topk_ids, wanted) and torch.equal(taken[:, 0].long(), wanted)
    weights = SCORES[scoring](twin, dim=1).gather(1, wanted)
    weights = weights / weights.sum(1, keepdim=True) if renormalize else weights
    torch.testing.assert_close(found.topk_weights, 2.5 * weights)
    factor = torch.randn(T, K)
    (found.topk_weights * factor).sum().backward()
    (2.5 * weights * factor).sum().backward()
    torch.testing.assert_close(logits.grad, twin.grad)
    assert torch.equal(moekit.route(logits, K, **options, log=log["a"]).topk_ids, own.topk_ids)


@pytest.mark.parametrize("how", ["context_fn", "entered again", "inside", "reentrant"])
def test_recomputation_in_any_order(how: str) -> None:
    """A pipeline runs forward, forward, backward, backward, with random routers."""
    model = Model(noise=5.0, trainable=True)
    log = RoutingLog.of(model, max_tokens=T)
    more = {"context_fn": log.contexts} if how == "context_fn" else {}
    model.wrap = partial(
        checkpoint, use_reentrant=how == "reentrant", preserve_rng_state=False, **more
    )
    blocks, losses, ids = [log.record(), log.replay(distinct(T, 2)), log.record()], [], []
    for block in blocks:
        with block:
            losses.append(model(torch.randn(T, H, requires_grad=True)).sum())
            ids.append(block.take().result().long())
            if how in ("inside", "reentrant"):
                losses[-1].backward()
    forwards = [model.seen[0:2], model.seen[2:4], model.seen[4:6]]
    if how in ("inside", "reentrant"):
        forwards = [model.seen[4 * n : 4 * n + 4] for n in range(3)]
        forwards = [[*calls[:2], *calls[:1:-1]] for calls in forwards]
    for calls, wanted in zip(forwards, ids, strict=True):
        assert all(torch.equal(got, wanted[:, n % 2]) for n, got in enumerate(calls))
    model.seen.clear()
    for n in (1, 0, 2) if how in ("context_fn", "entered again") else ():
        with blocks[n] if how == "entered again" else log.record():
            losses[n].backward()
        assert torch.equal(torch.stack(model.seen[::-1], 1), ids[n])
        model.seen.clear()


def test_a_forgotten_block_is_an_error() -> None:
    model = Model(noise=5.0, trainable=True)
    model.wrap = partial(checkpoint, use_reentrant=False)
    log, x = RoutingLog.of(model, max_tokens=T), torch.randn(T, H, requires_grad=True)
    with log.record():
        loss = model(x).sum()
    with pytest.raises(InvalidInput, match=r"'layers\.1' runs again in backward, outside"):
        loss.backward()
    model(x).sum().backward()  # no block, no replay
    with log.record() as step:
        with pytest.raises(InvalidInput, match="call take.. in its block"):
            step.take()
        model(x)
        with pytest.raises(InvalidInput, match=r"'layers\.0' runs twice in one block"):
            model(x)
    with (
        log.replay(distinct(5, 2)),
        pytest.raises(InvalidInput, match=r"'layers\.0' got 11 tokens in a block of 5; at"),
    ):
        model(x)
    with log.record(), pytest.raises(InvalidInput, match=r"got 12 tokens.* at most max.*=11"):
        model(torch.randn(12, H))


def test_steps_of_a_server_and_a_prefix_cache() -> None:
    """Two requests share the slots of their prefix, and each gets all of its ids."""
    model = Model(noise=5.0)
    log, table = RoutingLog.of(model, max_tokens=T), torch.full((32, 2, K), -1, dtype=torch.int16)
    steps = [[3, 4, 5, 6], [7], [20], [21]]  # a prompt, its token, two of the other request
    pending = []
    with torch.no_grad(), log.record() as step:
        for slots in steps:
            model(torch.randn(len(slots), H))
            pending.append(step.take())
    for slots, each in zip(steps, pending, strict=True):
        table[slots] = each.result()
    rows = torch.cat([torch.stack(model.seen[n : n + 2], 1) for n in range(0, 8, 2)])
    assert torch.equal(table[[3, 4, 5, 6, 7]].long(), rows[:5])
    assert torch.equal(table[[3, 4, 5, 6, 20, 21]].long(), rows[[0, 1, 2, 3, 5, 6]])


def test_logical_ids_before_replicas() -> None:
    """EPLB's physical ids differ, and replayed ids are mapped to them."""
    layer = moekit.FusedMoE(E, K, H, I, num_redundant_experts=2, device="cpu", trainable=False)
    layer.load_weights(random_weights(layer.problem))
    order = tuple(reversed(range(E))) + (0, 1)
    layer.set_replicas(Placement(order, E, 1).logical_to_physical())
    log, logits = RoutingLog.of(layer, T), torch.randn(T, E)
    ids, given = moekit.route(logits, K).topk_ids, distinct(T, 1)
    with log.record() as step:
        layer(torch.randn(T, H).bfloat16(), logits)
        assert torch.equal(step.take().result()[:, 0].long(), ids)
    with log.replay(given) as step:
        layer(torch.randn(T, H).bfloat16(), logits)
        assert torch.equal(step.take().result(), given.short())


@pytest.mark.parametrize("trainable", [False, True])
def test_compiled_layers(trainable: bool) -> None:
    torch._dynamo.reset()
    layer = moekit.FusedMoE(
        E, K, H, I, params_dtype=torch.float32, device="cpu", trainable=trainable
    )
    if not trainable:
        layer.load_weights(random_weights(layer.problem))
    log = RoutingLog.of(layer, 2 * T)
    compiled = torch.compile(
        lambda x, logits: layer(x, logits), backend="aot_eager", fullgraph=True
    )
    for tokens in (T, 7, 9):
        x, logits = torch.randn(tokens, H), torch.randn(tokens, E, requires_grad=trainable)
        ids = distinct(tokens, 1)
        with log.replay(ids):
            want = layer(x, logits)
        with log.replay(ids) as block:
            got = compiled(x, logits)
            assert torch.equal(block.take().result().long(), ids)
            if trainable:
                got.sum().backward()
        assert relative_error(got, want) < 1e-6
        with log.record() as block:
            compiled(x, logits)
            recorded = block.take().result()[:, 0].long()
        assert torch.equal(recorded, moekit.route(logits.detach(), K).topk_ids)


def _custom(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits.exp(), top_k, dim=-1)
    return values / (1 + values), ids


def _hidden(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True)
    return values[:, :top_k], ids[:, :top_k]


def test_routers_of_the_caller() -> None:
    x, logits, ids = torch.randn(T, H), torch.randn(T, E), distinct(T, 1)
    make = partial(moekit.FusedMoE, E, K, H, I, params_dtype=torch.float32, device="cpu")
    layer, other = make(custom_routing_function=_custom), make(custom_routing_function=_hidden)
    layer.load_weights(weights := random_weights(layer.problem))
    log = RoutingLog.of(layer, T)
    with log.replay(ids):
        got = layer(x, logits)
    own = logits.exp().gather(1, ids[:, 0])
    routed = {"topk_weights": own / (1 + own), "topk_ids": ids[:, 0]}
    assert relative_error(got, layer(x, **routed)) < 1e-6
    with log.record() as step:
        layer(x, **routed)
        assert torch.equal(step.take().result().long(), ids)
    with log.replay(distinct(T, 1)), pytest.raises(InvalidInput, match="give router_logits"):
        layer(x, **routed)
    other.load_weights(weights)
    log = RoutingLog.of(other, T)
    with log.record(), pytest.raises(InvalidInput, match=r"'fused_moe.*did not choose 3 of 6"):
        other(x, logits)


def test_all_layers_of_a_model_by_number() -> None:
    """vLLM also returns the layers without experts, in unsigned integers."""
    log = RoutingLog({f"model.layers.{n}.mlp": (200, 2) for n in (1, 3)}, T)
    array = torch.stack([torch.arange(5)[:, None] + torch.tensor([n, 190]) for n in range(4)], 1)
    for dtype in (torch.uint8, torch.uint16, torch.int16):
        with log.replay(array.to(dtype).numpy()):
            for n in (1, 3):
                part = log[f"model.layers.{n}.mlp"]
                assert torch.equal(part.choose(torch.zeros(5, 2).long()), array[:, n])
    with pytest.raises(InvalidInput, match="the one integer in each name is the index"):
        log.replay(array[:, :3])


def _named(ids: Tensor, **changes: Any) -> dict[str, Any]:
    return {"a": ids[:, 0], "b": ids[:, 1], **changes}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda ids: {"a": ids[:, 0]}, "layer 'b' has no topk_ids"),
        (lambda ids: ids[:, :1], r"topk_ids must be \(T, 2, K\) of \('a', 'b'\)"),
        (lambda ids: ids[..., :2], r"topk_ids of layer 'a' must be integers \(T, 3\)"),
        (lambda ids: _named(ids, b=ids[:4, 1]), "topk_ids of layer 'b' must be .* T the same"),
        (lambda ids: _named(ids, b=ids[:, 1].float()), "topk_ids of layer 'b' must be integers"),
        (lambda ids: ids.repeat(2, 1, 1), "topk_ids of layer 'a' .* at most 11"),
        (lambda ids: _named(ids, b=ids[:, 1] + 2**16), r"topk_ids of layer 'b' are .*0\.\.5"),
        (lambda ids: _named(ids, b=ids[:, 1] * 0), r"'b' are \[0, 0, 0\] for token 0"),
        (lambda ids: _named(ids, b=ids[:, 1] * 0 - 2), r"'b' are \[-2, -2, -2\] for token 0"),
        (lambda ids: _named(ids, b=ids[:, 1].clone().fill_diagonal_(-1)), "'b' are .* only -1"),
    ],
)  # fmt: skip
def test_wrong_ids_name_their_layer(wrong: Any, said: str) -> None:
    log = RoutingLog({"a": (E, K), "b": (E, K)}, T)
    log.replay(distinct(T, 2))
    with pytest.raises(InvalidInput, match=said):
        log.replay(wrong(distinct(T, 2)))


def test_layers_of_different_widths() -> None:
    log = RoutingLog({"a": (E, K), "b": (40, 2)}, T)
    with log.record() as step:
        ids = {"a": distinct(T, 1)[:, 0], "b": torch.tensor([[3, 39]] * T)}
        for name, each in ids.items():
            log[name].choose(each)
        taken = step.take().result()
    with log.replay(taken):
        for name, each in ids.items():
            assert torch.equal(log[name].choose(torch.zeros_like(each)), each)
        with pytest.raises(InvalidInput, match=r"layer 'b' needs topk_ids \(T, 2\)"):
            log["b"].choose(ids["a"])
        with pytest.raises(InvalidInput, match="log 'a' is for 6 experts, the logits for 40"):
            moekit.route(torch.zeros(T, 40), K, log=log["a"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_write_and_read_the_buffer() -> None:
    logits, ids = torch.randn(T, E, device="cuda"), distinct(T, 1)
    log = RoutingLog({"a": (E, K)}, 2 * T, "cuda")
    graphs, outs = [], []
    for block in (log.record, lambda: log.replay(ids)):
        with block():
            moekit.route(logits, K, log=log["a"])
        with block():
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                outs.append(moekit.route(logits, K, log=log["a"]))
    for _ in range(3):
        logits.copy_(torch.randn(T, E))
        with log.record() as step:
            graphs[0].replay()
            taken = step.take(T)
            logits.normal_()  # work that follows
        assert torch.equal(taken.result()[:, 0].long(), outs[0].topk_ids.cpu())
        given = distinct(T, 1)
        with log.replay(given):
            graphs[1].replay()
        assert torch.equal(outs[1].topk_ids.cpu(), given[:, 0])


def test_blocks_inside_blocks_and_passes_without_tokens() -> None:
    log, (outer, inner) = RoutingLog({"a": (E, K)}, T), distinct(2, T)
    with torch.no_grad(), log.record() as step:
        log["a"].choose(outer)
        with log.replay(inner[:, None]):
            assert torch.equal(log["a"].choose(outer), inner)
        assert torch.equal(step.take().result()[:, 0].long(), outer)
        log["a"].choose(outer[:0])
        assert step.take().result().shape == (0, 1, K)
    with log.replay(inner[:0, None]):
        with pytest.raises(InvalidInput, match="got 11 tokens in a block of 0; at"):
            log["a"].choose(outer)
        assert log["a"].choose(outer[:0]).shape == (0, K)


def _on_ranks(rank: int, world_size: int, logits: Tensor, ids: Tensor) -> tuple[Tensor, str]:
    """Return the ids of this rank's share, and its error after wrong ids on one rank."""
    layer = moekit.FusedMoE(
        E, K, H, I, params_dtype=torch.float32, device="cpu", tp_size=world_size,
        enable_expert_parallel=True, is_sequence_parallel=True,
    )  # fmt: skip
    layer.load_weights(random_weights(layer.problem))
    log, x, own = RoutingLog.of(layer, T), torch.randn(T, H), slice(6 * rank, 6 * rank + 6)
    with log.record() as step:
        layer(x, logits)
        recorded = step.take().result()
    with log.replay(ids[own]) as step:
        layer(x, logits)
        assert torch.equal(step.take().result(), ids[own].short())
    with log.replay(ids[own][rank:]), pytest.raises(moekit.MoekitError) as told:
        layer(x, logits)
    layer.destroy()
    return recorded, f"{type(told.value).__name__}: {told.value}"


def test_ranks_log_their_share() -> None:
    pytest.importorskip("moekit_naive")
    logits, ids = torch.randn(T, E), distinct(T, 1)
    with RankPool(2) as pool:
        (first, other), (second, wrong) = pool.run(_on_ranks, logits, ids)
    assert torch.equal(torch.cat([first, second])[:, 0].long(), moekit.route(logits, K).topk_ids)
    assert wrong.startswith("InvalidInput") and "got 5 tokens in a block of 4" in wrong
    assert other.startswith("PeerFailed: rank 1 failed: InvalidInput: layer 'fused_moe")
