"""vLLM's requests return the experts that moekit's layers compute, and transformers trains on them.

vLLM returns them only with its second model runner, whose kernels are Triton's. Its builds for CPUs
use these kernels if Triton has a backend for CPUs; here they are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_engines import Engines, assert_same  # noqa: E402

PROMPT = list(range(3, 40))
ROUTED = {"enable_return_routed_experts": True, "enable_prefix_caching": True}


@pytest.fixture
def interpreted(tmp_path: Any) -> Iterator[Any]:
    with Engines(tmp_path, TRITON_INTERPRET=1, VLLM_USE_V2_MODEL_RUNNER=1) as engines:
        yield engines


def test_a_trainer_replays_the_experts_of_an_engine(saved: Any, interpreted: Any) -> None:
    """The trainer's router has moved since. With MLA, vLLM has no prefix caching on CPUs, which
    returned experts need."""
    from transformers import AutoModelForCausalLM

    import moekit.integrations.transformers as integration
    from moekit.integrations.packed_layer import Layer

    path, asked = saved("qwen3_moe"), {"prompts": [PROMPT, [5] * 3], "engine": ROUTED}
    stock, ours = (interpreted(path, mode, **asked) for mode in ("off", "require"))
    assert "local + torch" in "".join(ours["log"])
    assert_same(stock["first"], ours["first"])
    for theirs, mine in zip(stock["first"], ours["first"], strict=True):
        theirs, mine = (torch.tensor(each["experts"]).sort().values for each in (theirs, mine))
        assert torch.equal(mine, theirs) and len(mine) in (len(PROMPT) + 11, 3 + 11)
    ids = torch.tensor(ours["first"][0]["experts"])
    tokens = torch.tensor([PROMPT + ours["first"][0]["tokens"][:-1]])
    assert ids.shape == (tokens.shape[1], 2, 2) and ids[:, 1].unique().numel() > 3
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
