"""Check the descriptions in hf_models.py with a plain-torch MoE layer that uses nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
import torch.nn.functional as F
from hf_models import DEEPSEEK_V3, GPT_OSS, LLAMA4, MIXTRAL, MODELS, QWEN3_MOE, HFModel
from torch import Tensor

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One model that was saved, loaded again by transformers, and run once."""

    hf: HFModel
    path: Path
    model: Any  # PreTrainedModel
    logits_BSV: Tensor
    layers: hfm.Captures


Make = Callable[[HFModel, torch.dtype], Case]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(name: str, dtype: torch.dtype) -> Case:
        hf = next(m for m in MODELS if m.name == name)
        path = hfm.save(hf, tmp_path_factory.mktemp(name), dtype)
        model = hfm.load(path.parent)
        return Case(hf, path, model, *hfm.forward(hf, model, hfm.token_ids()))

    return lambda hf, dtype: make(hf.name, dtype)


def read(case: Case, layer: int) -> dict[str, Tensor]:
    """Return the layer's tensors by the described names, as they are on disk."""
    with safetensors.safe_open(case.path, "pt") as file:
        return {key: file.get_tensor(key) for key in case.hf.keys(layer)}


def rms_error(out: Tensor, expected: Tensor) -> float:
    """RMS(out - expected) / RMS(expected)."""
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def expert_weights(hf: HFModel, t: dict[str, Tensor], layer: int) -> tuple[Tensor, ...]:
    """Return (gate_EIH, up_EIH, down_EHI, gate_bias_EI, up_bias_EI, down_bias_EH)."""
    n, e, i = hf.names, hf.num_experts, hf.intermediate_size
    if n.gate_up is None:
        keys = [name.format(layer=layer, expert="%d") for name in (n.gate, n.up, n.down) if name]
        weights = [torch.stack([t[key % x] for x in range(e)]) for key in keys]
        return *weights, torch.zeros(e, i), torch.zeros(e, i), torch.zeros(e, hf.hidden_size)
    halves = (slice(0, None, 2), slice(1, None, 2)) if n.interleaved else (slice(i), slice(i, None))
    gate_up, down = t[n.gate_up.format(layer=layer)].mT, t[n.down.format(layer=layer)].mT
    gate_up_bias, down_bias = torch.zeros(e, 2 * i), torch.zeros(e, hf.hidden_size)
    if n.gate_up_bias:
        gate_up_bias = t[n.gate_up_bias.format(layer=layer)]
    if n.down_bias:
        down_bias = t[n.down_bias.format(layer=layer)]
    return *(gate_up[:, s] for s in halves), down, *(gate_up_bias[:, s] for s in halves), down_bias


def route(hf: HFModel, t: dict[str, Tensor], layer: int, x_TH: Tensor) -> tuple[Tensor, ...]:
    """Return (logits_TE, topk_ids_TK, topk_weights_TK), each in the described dtype."""
    r, n, k = hf.routing, hf.names, hf.top_k
    dtypes = {"model": x_TH.dtype, "float32": FP32}
    bias = t[n.router_bias.format(layer=layer)] if n.router_bias else None
    logits_type, score_type = dtypes[r.logits_dtype], dtypes[r.score_dtype]
    weight = t[n.router.format(layer=layer)].to(logits_type)
    logits_TE = F.linear(x_TH.to(logits_type), weight, bias)
    score = torch.sigmoid if r.scoring == "sigmoid" else partial(torch.softmax, dim=-1)
    if r.topk_first:
        chosen_TK, ids_TK = logits_TE.topk(k)
        weights_TK = score(chosen_TK.to(score_type))
    else:
        scores_TE = score(logits_TE.to(score_type))
        choice_TE = scores_TE
        if n.correction_bias:
            choice_TE = choice_TE + t[n.correction_bias.format(layer=layer)]
        if r.num_groups > 1:
            groups_TGE = choice_TE.unflatten(1, (r.num_groups, -1))
            best_TG = groups_TGE.topk(2).values.sum(-1).topk(r.topk_groups).indices
            kept = torch.zeros(groups_TGE.shape[:2], dtype=torch.bool).scatter(1, best_TG, True)
            choice_TE = groups_TGE.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        ids_TK = choice_TE.topk(k).indices
        weights_TK = scores_TE.gather(1, ids_TK)
    if r.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + r.renormalize_eps)
    return logits_TE, ids_TK, (weights_TK * r.scaling_factor).to(dtypes[r.weights_dtype])


def experts(
    hf: HFModel, t: dict[str, Tensor], layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Compute the routed experts in fp32, one (token, expert) assignment at a time."""
    gate_EIH, up_EIH, down_EHI, gate_bias_EI, up_bias_EI, down_bias_EH = (
        w.float() for w in expert_weights(hf, t, layer)
    )
    act, on_input = hf.activation, hf.routing.weight_on_input
    out_TH = torch.zeros_like(x_TH, dtype=FP32)
    for token, (ids_K, weights_K) in enumerate(zip(ids_TK.tolist(), weights_TK, strict=True)):
        for e, w in zip(ids_K, weights_K.float(), strict=True):
            x_H = x_TH[token].float() * w if on_input else x_TH[token].float()
            gate_I = gate_EIH[e] @ x_H + gate_bias_EI[e]
            up_I = up_EIH[e] @ x_H + up_bias_EI[e]
            if act.limit is not None:
                gate_I, up_I = gate_I.clamp(max=act.limit), up_I.clamp(-act.limit, act.limit)
            if act.kind == "swigluoai":
                assert act.alpha is not None
                h_I = gate_I * torch.sigmoid(act.alpha * gate_I) * (up_I + 1)
            else:
                h_I = F.silu(gate_I) * up_I
            y_H = down_EHI[e] @ h_I + down_bias_EH[e]
            out_TH[token] += y_H if on_input else w * y_H
    return out_TH


def shared(hf: HFModel, t: dict[str, Tensor], layer: int, x_TH: Tensor) -> Tensor:
    """Return the shared experts' output_TH, fp32, or zeros."""
    n = hf.names
    if n.shared_gate is None or n.shared_up is None or n.shared_down is None:
        return torch.zeros_like(x_TH, dtype=FP32)
    keys = (name.format(layer=layer) for name in (n.shared_gate, n.shared_up, n.shared_down))
    gate_SH, up_SH, down_HS = (t[key].float() for key in keys)
    x_TH = x_TH.float()
    return (F.silu(x_TH @ gate_SH.T) * (x_TH @ up_SH.T)) @ down_HS.T


def moe(hf: HFModel, t: dict[str, Tensor], layer: int, x_TH: Tensor) -> Tensor:
    """Compute the whole MoE block from its description, out_TH fp32."""
    _, ids_TK, weights_TK = route(hf, t, layer, x_TH)
    return experts(hf, t, layer, x_TH, ids_TK, weights_TK) + shared(hf, t, layer, x_TH)


every_model = pytest.mark.parametrize("hf", MODELS, ids=lambda hf: hf.name)


@every_model
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_file_holds_exactly_the_described_tensors(
    case: Make, hf: HFModel, dtype: torch.dtype
) -> None:
    c = case(hf, dtype)
    with safetensors.safe_open(c.path, "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    for layer in hf.moe_layers:
        prefix = hf.names.router.format(layer=layer).rsplit(".", 2)[0] + "."
        assert hf.keys(layer) == {k: shape for k, shape in found.items() if k.startswith(prefix)}
        for key, tensor in read(c, layer).items():
            assert tensor.dtype == (FP32 if "correction_bias" in key else dtype), key
            assert tensor.float().std() > 0.02, key  # no parameter is all zeros or ones
    assert c.model.dtype == dtype
    assert c.model.config._experts_implementation == "eager"


@every_model
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_description_reproduces_every_block(case: Make, hf: HFModel, dtype: torch.dtype) -> None:
    c = case(hf, dtype)
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    for layer, seen in c.layers.items():
        t = read(c, layer)
        logits_TE, ids_TK, weights_TK = route(hf, t, layer, seen.x_TH)
        assert seen.x_TH.dtype == dtype
        assert (logits_TE.dtype, weights_TK.dtype) == (
            seen.logits_TE.dtype,
            seen.topk_weights_TK.dtype,
        )
        assert rms_error(logits_TE, seen.logits_TE) < 1e-6
        order, seen_order = ids_TK.argsort(1), seen.topk_ids_TK.argsort(1)
        assert torch.equal(ids_TK.gather(1, order), seen.topk_ids_TK.gather(1, seen_order))
        torch.testing.assert_close(
            weights_TK.gather(1, order), seen.topk_weights_TK.gather(1, seen_order)
        )
        assert rms_error(moe(hf, t, layer, seen.x_TH), seen.out_TH) < tolerance
        if seen.shared_TH is not None:
            assert rms_error(shared(hf, t, layer, seen.x_TH), seen.shared_TH) < tolerance


def _routing(hf: HFModel, **changes: Any) -> HFModel:
    return replace(hf, routing=replace(hf.routing, **changes))


def _names(hf: HFModel, **changes: Any) -> HFModel:
    return replace(hf, names=replace(hf.names, **changes))


def _activation(hf: HFModel, **changes: Any) -> HFModel:
    return replace(hf, activation=replace(hf.activation, **changes))


def _swapped(hf: HFModel) -> HFModel:
    return _names(hf, gate=hf.names.up, up=hf.names.gate)


WRONG = {
    "mixtral: w1 and w3 swapped": (MIXTRAL, _swapped(MIXTRAL)),
    "mixtral: not renormalized": (MIXTRAL, _routing(MIXTRAL, renormalize=False)),
    "qwen3_moe: gate and up swapped": (QWEN3_MOE, _swapped(QWEN3_MOE)),
    "qwen3_moe: not renormalized": (QWEN3_MOE, _routing(QWEN3_MOE, renormalize=False)),
    "deepseek_v3: gate and up swapped": (DEEPSEEK_V3, _swapped(DEEPSEEK_V3)),
    "deepseek_v3: softmax": (DEEPSEEK_V3, _routing(DEEPSEEK_V3, scoring="softmax")),
    "deepseek_v3: no groups": (DEEPSEEK_V3, _routing(DEEPSEEK_V3, num_groups=1)),
    "deepseek_v3: scaling dropped": (DEEPSEEK_V3, _routing(DEEPSEEK_V3, scaling_factor=1.0)),
    "deepseek_v3: not renormalized": (DEEPSEEK_V3, _routing(DEEPSEEK_V3, renormalize=False)),
    "deepseek_v3: no correction": (DEEPSEEK_V3, _names(DEEPSEEK_V3, correction_bias=None)),
    "deepseek_v3: no shared": (DEEPSEEK_V3, _names(DEEPSEEK_V3, shared_gate=None)),
    "gpt_oss: not interleaved": (GPT_OSS, _names(GPT_OSS, interleaved=False)),
    "gpt_oss: no gate_up bias": (GPT_OSS, _names(GPT_OSS, gate_up_bias=None)),
    "gpt_oss: no down bias": (GPT_OSS, _names(GPT_OSS, down_bias=None)),
    "gpt_oss: no router bias": (GPT_OSS, _names(GPT_OSS, router_bias=None)),
    "gpt_oss: softmax first": (GPT_OSS, _routing(GPT_OSS, topk_first=False)),
    "gpt_oss: no clamp": (GPT_OSS, _activation(GPT_OSS, limit=None)),
    "gpt_oss: alpha 1": (GPT_OSS, _activation(GPT_OSS, alpha=1.0)),
    "gpt_oss: silu": (GPT_OSS, _activation(GPT_OSS, kind="silu")),
    "llama4: weight on output": (LLAMA4, _routing(LLAMA4, weight_on_input=False)),
    "llama4: softmax": (LLAMA4, _routing(LLAMA4, scoring="softmax")),
    "llama4: interleaved": (LLAMA4, _names(LLAMA4, interleaved=True)),
    "llama4: no shared": (LLAMA4, _names(LLAMA4, shared_gate=None)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_described_fact_matters(case: Make, name: str) -> None:
    """Negative control: a description with one wrong fact gives very different numbers."""
    hf, wrong = WRONG[name]
    c = case(hf, FP32)
    for layer, seen in c.layers.items():
        assert rms_error(moe(wrong, read(c, layer), layer, seen.x_TH), seen.out_TH) > 0.02


def test_gpt_oss_clamps_have_an_effect(case: Make) -> None:
    c = case(GPT_OSS, FP32)
    limit = GPT_OSS.activation.limit
    assert limit is not None and limit == c.model.config.swiglu_limit
    for layer, seen in c.layers.items():
        gate_EIH, up_EIH, _, gate_bias_EI, up_bias_EI, _ = expert_weights(
            GPT_OSS, read(c, layer), layer
        )
        used_TE = F.one_hot(seen.topk_ids_TK, GPT_OSS.num_experts).sum(1).bool()
        gate = (torch.einsum("th,eih->tei", seen.x_TH, gate_EIH) + gate_bias_EI)[used_TE]
        up = (torch.einsum("th,eih->tei", seen.x_TH, up_EIH) + up_bias_EI)[used_TE]
        beyond = [gate > limit, gate < -limit, up > limit, up < -limit]
        assert min(mask.float().mean().item() for mask in beyond) > 0.02


@every_model
def test_replaced_layers_give_the_same_logits(case: Make, hf: HFModel) -> None:
    c = case(hf, FP32)
    tensors = {layer: read(c, layer) for layer in hf.moe_layers}

    def my_experts(layer: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return experts(hf, tensors[layer], layer, x_TH, ids_TK, weights_TK)

    def my_layer(layer: int, x_TH: Tensor) -> Tensor:
        return my_experts(layer, x_TH, *route(hf, tensors[layer], layer, x_TH)[1:])

    ids_BS = hfm.token_ids()
    for routed in (my_layer, hfm.after_own_router(hf, c.model, my_experts)):
        assert rms_error(hfm.forward_with(hf, c.model, ids_BS, routed), c.logits_BSV) < 1e-4
    without = hfm.forward_with(hf, c.model, ids_BS, lambda _, x_TH: torch.zeros_like(x_TH))
    assert rms_error(without, c.logits_BSV) > 0.1  # the routed experts matter
    assert torch.equal(hfm.forward(hf, c.model, ids_BS)[0], c.logits_BSV)  # and are back
