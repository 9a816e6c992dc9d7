"""vLLM captures the experts that moekit's layers compute, and transformers trains on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_engines import assert_same  # noqa: E402

PROMPT = list(range(3, 40))


def test_a_trainer_replays_the_experts_of_an_engine(saved: Any, engines: Any) -> None:
    """The engine's first layer is dense. The trainer's router has moved since."""
    from transformers import AutoModelForCausalLM

    import moekit.integrations.transformers as integration
    from moekit.integrations.packed_layer import Layer

    path, asked = saved("deepseek_v2"), {"prompts": [PROMPT], "routed": True}
    stock, ours = (engines(path, mode, **asked) for mode in ("off", "require"))
    assert "local + torch" in "".join(ours["log"])
    assert_same(stock["first"], ours["first"])
    theirs, ids = (torch.tensor(sum(each["routed"], [])) for each in (stock, ours))
    tokens = torch.tensor([PROMPT + ours["first"][0]["tokens"][:-1]])
    assert ids.shape == (tokens.shape[1], 2, 3) == theirs.shape
    assert torch.equal(ids.sort().values, theirs.sort().values)
    integration.install()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, experts_implementation="moekit"
        ).train()
        log, seen, run = integration.routing_log(model, max_tokens=64), [], Layer.differentiate
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight.normal_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Layer, "differentiate", lambda *args: seen.append(args[2]) or run(*args))
            with log.replay(ids):
                model(tokens, use_cache=False).logits.square().mean().backward()
            assert torch.equal(seen.pop(), ids[:, 1])
            assert model.model.layers[1].mlp.gate.weight.grad.any()
            model(tokens, use_cache=False)
            assert not torch.equal(seen.pop(), ids[:, 1])
    finally:
        integration.uninstall()
