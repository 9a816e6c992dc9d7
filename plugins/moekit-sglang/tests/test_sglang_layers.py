"""moekit takes some of SGLang's layers, leaves others, and says why. SGLang is a stand-in."""

from __future__ import annotations

import logging
import sys

import moekit_sglang
import pytest
import sglang_standin as standin
import torch
from engine_layers import INNER, E, H, drawn, error
from moekit_sglang import experts, versions
from sglang_layers import calls, made, started, taken, want
from sglang_layers import sglang as sglang  # a fixture

import moekit
from moekit.errors import MoekitError

HOOKS = "sglang.srt.plugins.hook_registry"
GPT_OSS = dict(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)


SILU, NO_GATE = moekit.Activation("silu"), {"is_gated": False}


@pytest.mark.parametrize(
    ("config", "activation", "interleaved", "factor"),
    [
        ({}, SILU, False, 1.0),
        ({"activation": "gelu"}, moekit.Activation("gelu"), False, 1.0),
        ({"swiglu_limit": 0.5}, moekit.Activation("silu", limit=0.5), False, 1.0),
        ({"gemm1_clamp_limit": 0.5}, moekit.Activation("swiglustep", limit=0.5), False, 1.0),
        (GPT_OSS, moekit.Activation("swigluoai"), True, 1.0),
        (GPT_OSS | {"gate_up_interleaved": False}, moekit.Activation("swigluoai"), False, 1.0),
        ({"routed_scaling_factor": 2.5}, SILU, False, 2.5),
        ({"routed_scaling_factor": 2.5, "fuses": True}, SILU, False, 1.0),
        ({"shared": 1}, SILU, False, 1.0),
        (NO_GATE, moekit.Activation("silu_no_mul"), False, 1.0),
        (NO_GATE | {"activation": "gelu"}, moekit.Activation("gelu_no_mul"), False, 1.0),
        (NO_GATE | {"activation": "relu2"}, moekit.Activation("relu2"), False, 1.0),
    ],
)
def test_a_layer_computes_what_sglang_computes(config, activation, interleaved, factor) -> None:
    started()
    halves = 1 if "is_gated" in config else 2
    biases = {"w13_weight_bias": torch.rand(E, halves * INNER), "w2_weight_bias": torch.rand(E, H)}
    weights = drawn(halves=halves, **biases)
    layer, (x, topk) = made(weights, **config), calls()
    expected = factor * want(weights, x, topk, activation, interleaved)
    assert taken(layer) and error(layer(x, topk), expected) < 1e-5


@pytest.mark.parametrize("moved", [False, True])
def test_ranks_sum_to_the_whole(monkeypatch, moved) -> None:
    """With expert parallelism SGLang's dispatcher passes global ids, and SGLang adds up."""
    started()
    weights, total = drawn(), torch.zeros(9, H)
    for rank in range(2):
        standin.split.moe_ep_size, standin.split.moe_ep_rank = 2, rank
        mine = slice(3 * rank, 3 * rank + 3)
        layer = made({name: tensor[mine] for name, tensor in weights.items()})
        assert taken(layer)
        if moved:  # EPLB exchanges two experts between memories that the layer shows
            order = torch.tensor([1, 0, 2])
            for param in layer.parameters():
                if len(param) == 3:
                    param.data.copy_(param.data[order].clone())
        total += layer(*calls())
    if moved:
        order = [1, 0, 2, 4, 3, 5]
        weights = {name: tensor[order] for name, tensor in weights.items()}
    assert error(total, want(weights, *calls())) < 1e-5


def of(where, name, value):
    """Return a function that sets one of the engine's arguments or choices."""
    return lambda: setattr(where, name, value)


ENGINE, CHOSEN = standin.arguments, standin.chosen


@pytest.mark.parametrize(
    ("reason", "change", "config"),
    [
        ("moekit has no LoRA", of(ENGINE, "enable_lora", True), {}),
        ("offloads weights", of(ENGINE, "cpu_offload_gb", 8), {}),
        ("runner 'triton_kernel' chooses", of(CHOSEN, "runner", "triton_kernel"), {}),
        ("by --moe-a2a-backend deepep", of(CHOSEN, "all_to_all", "deepep"), {}),
        ("--enable-torch-compile", of(ENGINE, "enable_torch_compile", True), {}),
        ("faster on this CPU", of(CHOSEN, "amx", True), {}),
        ("--disable-shared-experts-fusion", of(standin.split, "moe_ep_size", 2), {"shared": 1}),
        ("no_combine", None, {"no_combine": True}),
        ("per token is unknown", None, {"top_k": None}),
        ("'tanh' is unknown", None, {"activation": "tanh"}),
        ("no 'gelu' with the numbers", None, {"activation": "gelu", "swiglu_limit": 1.0}),
        (
            "scales their sum",
            None,
            {"apply_router_weight_on_input": True, "routed_scaling_factor": 2.0},
        ),
        ("gemm1_beta=0.0", None, GPT_OSS | {"gemm1_beta": 0.0}),
    ],
)
def test_sglang_keeps_a_layer_and_says_why_once(caplog, reason, change, config) -> None:
    caplog.set_level(logging.INFO, "sglang.moekit")
    if change is not None:
        change()
    started()
    layers = [made(**config) for _ in range(2)]
    assert not any(map(taken, layers))
    assert torch.equal(layers[0](*calls()), torch.zeros(9, H))
    (line,) = [r.message for r in caplog.records if "stays with SGLang" in r.message]
    assert reason in line and "hidden 64, intermediate 32" in line


def test_the_modes(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "sglang.moekit")
    monkeypatch.setenv("MOEKIT_SGLANG", "off")
    started()
    assert not taken(made()) and not standin.HookRegistry.hooks
    monkeypatch.setenv("MOEKIT_SGLANG", "require")
    standin.chosen.amx = True
    started()
    assert taken(made()) and taken(made())
    (line,) = [r.message for r in caplog.records if "6 experts, top 2" in r.message]
    assert "local + torch" in line
    with pytest.raises(MoekitError, match="MOEKIT_SGLANG=require, but MoE layer .* stays with"):
        made(no_combine=True)
    monkeypatch.setenv("MOEKIT_SGLANG", "yes")
    with pytest.raises(SystemExit, match="must be one of off, on, require"):
        moekit_sglang.register()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setattr(versions, "installed", lambda: None), "SGLang is not installed"),
        (lambda m: m.setattr(versions, "installed", lambda: "0.5.14"), "supports 0.5.15 to 0.5.23"),
        (lambda m: m.setattr(versions, "installed", lambda: "0.6.0"), "this is SGLang 0.6.0"),
        (lambda m: m.setattr(versions, "LOADERS", ("sglang.gone",)), "SGLang has no sglang.gone"),
        (lambda m: m.delitem(sys.modules, HOOKS), "other modules than expected"),
    ],
)
def test_another_version(monkeypatch, caplog, change, reason) -> None:
    change(monkeypatch)
    started()
    assert not taken(made()) and reason in caplog.text
    monkeypatch.setenv("MOEKIT_SGLANG", "require")
    with pytest.raises(SystemExit, match="every MoE layer stays with SGLang"):
        moekit_sglang.register()


@pytest.mark.parametrize("wrapped", [1, 2, 3])
def test_hooks_of_which_sglang_takes_some(monkeypatch, caplog, wrapped) -> None:
    """Those that it has taken change nothing."""
    stock, taken_hooks = versions.register_hook, []

    def register(*hook) -> None:
        if len(taken_hooks) == wrapped:
            raise KeyError("no such hook")
        taken_hooks.append(stock(*hook))

    monkeypatch.setattr(versions, "register_hook", register)
    monkeypatch.setenv("MOEKIT_DISPATCHER", "naive")
    standin.chosen.all_to_all = "deepep"
    started()
    layer = made()
    assert not taken(layer) and isinstance(layer.dispatcher, standin.StandardDispatcher)
    assert "no such hook" in caplog.text


def test_registering_twice_wraps_once() -> None:
    moekit_sglang.register()
    started()
    assert all(len(hooks) == 1 for hooks in standin.HookRegistry.hooks.values())
    assert taken(made())


def test_a_router_of_another_kind_of_weights() -> None:
    """SGLang's router may return weights of 16 bits and ids of 64 bits."""
    started()
    layer, (x, topk) = made(), calls()
    other = standin.TopK(topk.topk_weights.bfloat16(), topk.topk_ids.long())
    expected = want(drawn(), x, other._replace(topk_weights=other.topk_weights.float()))
    assert error(layer(x, other), expected) < 1e-5


def test_kernels_compile_before_the_engine_serves(monkeypatch) -> None:
    """They compile for the tokens that SGLang schedules: a prompt's chunk, or the largest graph."""
    asked = []
    monkeypatch.setattr(experts.Computed, "warm_up", lambda *given: asked.append(given[3:]))
    started()
    layer = made()
    standin.arguments.cuda_graph_max_bs_decode = 256
    made()
    vars(standin.arguments).update(chunked_prefill_size=-1, max_prefill_tokens=512)
    made()
    layer(*calls())
    sizes = (64, 64), (256, 256), (512, 512), (9, None)
    assert asked == [(tokens, torch.int32, most) for tokens, most in sizes]
    assert versions.most_captured() == 0
    standin.arguments.device = "cuda"
    assert versions.most_captured() == 256
