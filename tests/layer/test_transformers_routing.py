"""Models of transformers replay the experts of a rollout in a training pass."""

from __future__ import annotations

import copy
from typing import Any

import hf_models as hfm
import pytest
import torch
from test_transformers_layer import installed  # noqa: F401 (a fixture)
from test_transformers_models import MODELS
from test_transformers_training import OUTSIDE, built, eager
from torch import Tensor

from moekit.errors import InvalidInput
from moekit.integrations.packed_layer import Layer
from moekit.integrations.transformers import routing_log

B, S = 2, 5


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Return a list that gets the ids and weights of each call of moekit's experts."""
    seen: list[tuple[Tensor, Tensor]] = []
    for name in ("run", "differentiate"):
        original: Any = getattr(Layer, name)

        def call(self: Layer, x: Tensor, ids: Tensor, w: Tensor, *a: Any, o=original, **k: Any):
            seen.append((ids.clone(), w.detach().clone()))
            return o(self, x, ids, w, *a, **k)

        monkeypatch.setattr(Layer, name, call)
    return seen


@pytest.mark.parametrize("name", [*MODELS, *OUTSIDE])
def test_training_replays_the_rollout(monkeypatch: Any, name: str) -> None:
    """The trainer's weights have moved since the rollout, and its layers are checkpointed."""
    server, trainer, tokens = built(name).eval(), built(name), hfm.token_ids(B, S)
    log = routing_log(server, max_tokens=B * S)
    seen = watched(monkeypatch)
    with torch.no_grad(), log.record() as step:
        server(tokens, use_cache=False)
        ids = step.take().result()
    assert len(log.layers) == len(seen) >= 2
    identity = ids.flatten(0, 1).long()
    for n, (own, _) in enumerate(seen):
        known = own >= 0  # not LongCat-Flash's identity experts
        assert torch.equal(own[known].long(), ids[:, n].long()[known]) and (identity >= 0).all()
    with torch.no_grad():
        for path, parameter in trainer.named_parameters():
            if "gate" in path or "router" in path or "experts" not in path:
                parameter.add_(torch.randn_like(parameter), alpha=0.7 * float(parameter.std()))
    theirs = eager(trainer)
    seen.clear()
    trainer(tokens, use_cache=False)
    count = len(log.layers)
    moved = [i for i, _ in seen[:count]]
    assert any(not torch.equal(i.long(), ids[:, n].long()) for n, i in enumerate(moved))
    seen.clear()
    grads = []
    for model in (trainer, theirs):
        log = routing_log(model, max_tokens=B * S)
        more = {"use_reentrant": False, "context_fn": log.contexts}
        model.gradient_checkpointing_enable(more)
        with log.replay(ids):
            loss = model(tokens, use_cache=False)[0].float().pow(2).mean()
        loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        log.detach()
    for n, (own, _) in enumerate(seen):
        at = n if n < count else 2 * count - 1 - n
        assert torch.equal(own.long()[own >= 0], ids[:, at].long()[own >= 0])
    assert len(seen) == 2 * count and grads[0].keys() == grads[1].keys()
    for path, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][path], rtol=2e-3, atol=1e-5)
    seen.clear()
    trainer(tokens, use_cache=False)
    assert all(torch.equal(a, b) for (a, _), b in zip(seen, moved, strict=False))


def test_generate_is_recorded_step_by_step() -> None:
    model, steps = built("qwen3_moe").eval(), []
    log, tokens = routing_log(model, max_tokens=B * S), hfm.token_ids(B, S)
    with torch.no_grad(), log.record() as step:
        hook = model.register_forward_hook(lambda *_: steps.append(step.take()))
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
            min_new_tokens=4, max_new_tokens=4,
        )  # fmt: skip
        hook.remove()
    found = torch.cat([each.result().view(B, -1, 2, 3) for each in steps], 1)
    with torch.no_grad(), routing_log(model, B * out.shape[1]).record() as step:
        model(out[:, :-1], use_cache=False)
        whole = step.take().result().view(found.shape)
    assert torch.equal(found, whole)


def test_a_compiled_model_records_and_replays() -> None:
    torch._dynamo.reset()
    model, tokens = built("mixtral").eval(), hfm.token_ids(B, S)
    log = routing_log(model, B * S)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        with log.record() as step:
            compiled(tokens, use_cache=False)
            ids = step.take().result()
        given = (ids + 1) % 8
        with log.replay(given) as step:
            got = compiled(tokens, use_cache=False).logits
            assert torch.equal(step.take().result(), given)
        with log.replay(given):
            torch.testing.assert_close(got, model(tokens, use_cache=False).logits)


def test_another_log_detaches_the_first() -> None:
    model, tokens = built("mixtral").eval(), hfm.token_ids(B, S)
    block, calls = model.model.layers[0].mlp, []
    block.forward = lambda x, own=block.forward: (calls.append(1), own(x))[1]  # as accelerate does
    first, log = (routing_log(model, B * S) for _ in range(2))
    first.detach()
    ids = torch.arange(4).view(2, 2).expand(B * S, 2, 2)
    with torch.no_grad(), log.replay(ids) as step:
        model(tokens, use_cache=False)
        assert torch.equal(step.take().result().long(), ids)
    with pytest.raises(InvalidInput, match="another one took its layers"), first.replay(ids):
        model(tokens, use_cache=False)
    log.detach()
    model(tokens, use_cache=False)
    assert len(calls) == 2


def test_a_copy_of_a_model_has_no_log() -> None:
    model, tokens = built("mixtral").eval(), hfm.token_ids(B, S)
    log = routing_log(model, B * S)
    copied = copy.deepcopy(model)
    with torch.no_grad(), log.replay(torch.arange(4).view(2, 2).expand(B * S, 2, 2)):
        got = copied(tokens, use_cache=False).logits
        assert not torch.equal(got, model(tokens, use_cache=False).logits)
        torch.testing.assert_close(got, copy.deepcopy(copied)(tokens, use_cache=False).logits)
    log.detach()
    torch.testing.assert_close(got, model(tokens, use_cache=False).logits)
    for block in (layer.mlp for layer in copied.model.layers):
        assert block.forward.__self__ is block
