"""moekit takes some of SGLang's layers, leaves others, and says why. SGLang is a stand-in."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import moekit_sglang
import pytest
import sglang_standin as standin
import torch
from moekit_sglang import experts, versions
from sglang_layers import INNER, E, H, calls, drawn, error, made, started, taken, want
from sglang_layers import sglang as sglang  # a fixture

import moekit
from moekit.errors import MoekitError, Unsupported

GPT_OSS = dict(gemm1_alpha=1.702, gemm1_clamp_limit=7.0)


@pytest.mark.parametrize(
    ("config", "activation", "interleaved", "factor"),
    [
        ({}, None, False, 1.0),
        ({"activation": "gelu"}, "gelu", False, 1.0),
        ({"swiglu_limit": 0.5}, moekit.Activation("silu", limit=0.5), False, 1.0),
        ({"gemm1_clamp_limit": 0.5}, moekit.Activation("swiglustep", limit=0.5), False, 1.0),
        (GPT_OSS, moekit.Activation("swigluoai"), True, 1.0),
        (GPT_OSS | {"gate_up_interleaved": False}, moekit.Activation("swigluoai"), False, 1.0),
        ({"routed_scaling_factor": 2.5}, None, False, 2.5),
        ({"routed_scaling_factor": 2.5, "fuses": True}, None, False, 1.0),
    ],
)
def test_a_layer_computes_what_sglang_computes(config, activation, interleaved, factor) -> None:
    started()
    weights = drawn(w13_weight_bias=torch.rand(E, 2 * INNER), w2_weight_bias=torch.rand(E, H))
    layer = made(weights, **config)
    activation = moekit.Activation(activation) if isinstance(activation, str) else activation
    x, topk = calls()
    expected = factor * want(weights, x, topk, activation, interleaved)
    assert taken(layer) and error(layer(x, topk), expected) < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
def test_experts_without_a_gate(activation) -> None:
    started()
    layer = made(drawn(halves=1), activation=activation, is_gated=False)
    name = activation if activation == "relu2" else f"{activation}_no_mul"
    expected = want(drawn(halves=1), *calls(), moekit.Activation(name))
    assert taken(layer) and error(layer(*calls()), expected) < 1e-5


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


REFUSED = {
    "moekit has no LoRA": lambda: setattr(standin.arguments, "enable_lora", True),
    "offloads weights": lambda: setattr(standin.arguments, "cpu_offload_gb", 8),
    "runner 'triton_kernel' chooses": lambda: setattr(standin.chosen, "runner", "triton_kernel"),
    "by --moe-a2a-backend deepep": lambda: setattr(standin.chosen, "all_to_all", "deepep"),
    "--enable-torch-compile": lambda: setattr(standin.arguments, "enable_torch_compile", True),
    "faster on this CPU": lambda: setattr(standin.chosen, "amx", True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_sglang_keeps_a_layer_and_says_why_once(caplog, reason) -> None:
    caplog.set_level(logging.INFO, "sglang.moekit")
    REFUSED[reason]()
    started()
    assert not any(taken(made()) for _ in range(2))
    (line,) = [r.message for r in caplog.records if "stays with SGLang" in r.message]
    assert reason in line and "6 experts, top 2, hidden 64, intermediate 32" in line


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"no_combine": True}, "no_combine"),
        ({"top_k": None}, "per token is unknown"),
        ({"activation": "tanh"}, "'tanh' is unknown"),
        ({"activation": "gelu", "swiglu_limit": 1.0}, "no 'gelu' with the numbers"),
        ({"apply_router_weight_on_input": True, "routed_scaling_factor": 2.0}, "scales their sum"),
        (GPT_OSS | {"gemm1_beta": 0.0}, "gemm1_beta=0.0"),
    ],
)
def test_a_layer_that_moekit_does_not_know(caplog, config, reason) -> None:
    started()
    layer = made(**config)
    assert not taken(layer) and reason in caplog.text
    assert torch.equal(layer(*calls()), torch.zeros(9, H))


def test_shared_experts_that_every_rank_holds(caplog) -> None:
    started()
    assert taken(made(shared=1))
    standin.split.moe_ep_size = 2
    assert not taken(made(shared=1)) and "--disable-shared-experts-fusion" in caplog.text


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
        (
            lambda m: m.setattr(versions, "LOADERS", ("sglang.srt.utils.gone",)),
            "SGLang has no sglang.srt.utils.gone",
        ),
        (
            lambda m: m.delitem(sys.modules, "sglang.srt.plugins.hook_registry"),
            "other modules than expected",
        ),
    ],
)
def test_another_version(monkeypatch, caplog, change, reason) -> None:
    change(monkeypatch)
    started()
    assert not taken(made()) and reason in caplog.text
    monkeypatch.setenv("MOEKIT_SGLANG", "require")
    with pytest.raises(SystemExit, match="every MoE layer stays with SGLang"):
        moekit_sglang.register()


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


def test_graphs_need_backends_that_they_can_hold() -> None:
    from moekit.engines.packed import check_graphs

    unfit = SimpleNamespace(spec=SimpleNamespace(name="naive", graph_safe=False))
    kernel = SimpleNamespace(dispatcher=unfit, experts=unfit)
    with pytest.raises(Unsupported, match="graphs that SGLang captures: use --disable-cuda-graph"):
        check_graphs(kernel, "SGLang", "--disable-cuda-graph")


def test_kernels_compile_before_the_engine_serves(monkeypatch) -> None:
    """They compile for the tokens that SGLang schedules: a prompt's chunk, or the largest graph."""
    asked = []
    monkeypatch.setattr(
        experts, "warm_up", lambda kernel, packed, tokens, most=None: asked.append(tokens)
    )
    started()
    layer = made()
    standin.arguments.cuda_graph_max_bs_decode = 256
    made()
    vars(standin.arguments).update(chunked_prefill_size=-1, max_prefill_tokens=512)
    made()
    layer(*calls())
    assert asked == [64, 256, 512, 9]
