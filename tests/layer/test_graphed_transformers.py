"""CUDA graph replays in transformers' models: same numbers, also when weights change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_stand_in import Device, device  # noqa: F401 (a fixture)
from test_transformers_layer import CHANGES, installed  # noqa: F401 (an autouse fixture)
from test_transformers_models import errors
from test_transformers_modules import both, inputs, module_of
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

import moekit.integrations.transformers as integration  # noqa: E402
from moekit.integrations.packed_layer import Layer  # noqa: E402

MODULES = {
    "read in place": ("qwen3_moe", "Qwen3MoeExperts", {}),
    "copied": ("gpt_oss", "GptOssExperts", dict(swiglu_alpha=1.702, swiglu_limit=7.0)),
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> nn.Module:
    integration.install(experts="torch")
    model, name, config = MODULES[request.param]
    return module_of(model, name, **config)


@torch.no_grad()
def check(module: nn.Module, tokens: int = 1, dtype: torch.dtype = torch.float32) -> None:
    ours, theirs = both(module, *inputs(tokens, dtype))
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    assert ours.dtype == dtype and errors(ours[None], theirs[None]).max() < bound


def test_a_decoding_step_is_replayed(module: nn.Module, device: Device) -> None:  # noqa: F811
    for tokens in (1, 40, 1, 1, 3, 1, 40, 40):
        check(module, tokens)
    assert device.captures == [1] and device.replays == 3
    for _ in range(3):
        check(module, 16)
        check(module, 17)
    assert device.captures == [1, 16]


def test_the_dtype_of_an_autocast_input_comes_out(device: Device) -> None:  # noqa: F811
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    for _ in range(3):
        check(module, 2, torch.bfloat16)
    assert device.replays == 2


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_noticed(
    module: nn.Module,
    device: Device,  # noqa: F811
    change: Callable[[nn.Module], None],
) -> None:
    for _ in range(3):
        check(module)
    before: Tensor = module(*(args := inputs(1)))
    with torch.no_grad():
        change(module)
    after = module(*args)
    assert not torch.allclose(before, after, rtol=1e-2)
    for _ in range(3):
        check(module)
    assert device.captures == [1, 1]


def test_two_layers_do_not_mix(device: Device) -> None:  # noqa: F811
    integration.install(experts="torch")
    layers = [module_of("qwen3_moe", "Qwen3MoeExperts") for _ in range(2)]
    with torch.no_grad():
        layers[1].down_proj.mul_(-2.0)
        for _ in range(4):
            x, ids, weights = inputs(1)
            outs = [layer(x, ids, weights) for layer in layers]
            torch.testing.assert_close(outs[1], -2 * outs[0])
            del outs
    assert device.captures == [1, 1] and device.replays == 6


def test_gradients_and_compiled_code_run_eagerly(device: Device) -> None:  # noqa: F811
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    x, ids, weights = inputs(1)
    for _ in range(3):
        assert module(x.requires_grad_(), ids, weights).requires_grad
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, ids, weights), module(x, ids, weights))
            assert Layer.of(module).packed.graphed is not None
    assert device.captures == [1] and device.replays == 2


def test_the_number_of_tokens_is_an_option(device: Device) -> None:  # noqa: F811
    module = module_of("qwen3_moe", "Qwen3MoeExperts")
    for most, captured in ((0, []), (2, [1, 2])):
        integration.install(graph_tokens=most)
        for _ in range(3):
            for tokens in (1, 2, 3):
                check(module, tokens)
        assert device.captures == captured
