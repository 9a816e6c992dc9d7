"""Whole Hugging Face models with experts_implementation="moekit" against eager experts."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hf_models as hfm
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install moekit[hf]")

import moekit.integrations.transformers as integration  # noqa: E402

FP32 = torch.float32
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Further models, with the facts that `hfm.save` needs.
MODELS = {hf.name: hf for hf in hfm.MODELS} | {
    "qwen2_moe": replace(
        hfm.QWEN3_MOE,
        name="qwen2_moe",
        config=dict(
            moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8,
            norm_topk_prob=False,
        ),
    ),
    "deepseek_v2": replace(
        hfm.DEEPSEEK_V3,
        name="deepseek_v2",
        config={
            **{k: v for k, v in hfm.DEEPSEEK_V3.config.items() if k != "norm_topk_prob"},
            "topk_method": "group_limited_greedy",
        },
    ),
}  # fmt: skip
MODELS["llama4"] = MODELS.pop("llama4_text")


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()


Load = Callable[[str, torch.dtype, str, str], Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function that loads a model by name, dtype, implementation and device."""
    from transformers import AutoModelForCausalLM

    @cache
    def saved(name: str, dtype: torch.dtype) -> Path:
        return hfm.save(MODELS[name], tmp_path_factory.mktemp(name), dtype).parent

    @cache
    def loaded(name: str, dtype: torch.dtype, implementation: str, device: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            saved(name, dtype),
            dtype="auto",
            attn_implementation="eager",
            experts_implementation=implementation,
            local_files_only=True,
        )
        assert model.config._experts_implementation == implementation
        return model.eval().to(device)

    return loaded


def errors(got_BSV: Tensor, want_BSV: Tensor) -> Tensor:
    """Return the relative RMS error of each token's logits, (B * S,)."""
    got, want = (logits.float().flatten(0, 1) for logits in (got_BSV, want_BSV))
    return (got - want).norm(dim=1) / want.norm(dim=1)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(hfm.token_ids().to(model.device), use_cache=False).logits


@torch.no_grad()
def generated(model: Any, **options: Any) -> Tensor:
    prompt = hfm.token_ids(batch=2, sequence=5).to(model.device)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
        min_new_tokens=12, max_new_tokens=12, **options,
    )  # fmt: skip


every_model = pytest.mark.parametrize("name", MODELS)
every_device = pytest.mark.parametrize("device", DEVICES)


def check_that_moekit_ran(model: Any, name: str) -> None:
    """Check that moekit ran every MoE layer, with the problem of the model's description."""
    hf, kernels = MODELS[name], integration.kernels(model)
    assert len(kernels) == len(hf.moe_layers)
    for kernel in kernels.values():
        problem = kernel.problem
        sizes = (problem.num_experts, problem.hidden_size, problem.intermediate_size)
        assert sizes == (hf.num_experts, hf.hidden_size, hf.intermediate_size)
        assert problem.top_k == hf.top_k
        assert problem.activation == hf.activation
        assert problem.has_bias == hf.has_bias
        assert problem.apply_router_weight_on_input == hf.weight_on_input


@every_device
@every_model
def test_fp32_logits_and_generated_tokens(load: Load, name: str, device: str) -> None:
    eager, moekit = (load(name, FP32, how, device) for how in ("eager", "moekit"))
    want = logits(eager)
    assert errors(logits(moekit), want).max() < 1e-4
    check_that_moekit_ran(moekit, name)
    tokens = generated(eager)
    assert torch.equal(generated(moekit), tokens)
    assert len(tokens[:, 5:].unique()) > 3  # something happened


@every_device
def test_static_cache(load: Load, device: str) -> None:
    """transformers compiles the decoding step if there is an accelerator."""
    eager, moekit = (load("qwen3_moe", FP32, how, device) for how in ("eager", "moekit"))
    assert torch.equal(generated(moekit, cache_implementation="static"), generated(eager))


def test_example_generates_equal_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "hf_generate.py"
    assert runpy.run_path(str(path))["main"](["--tokens", "6"]) == 0
    assert "equal tokens" in capsys.readouterr().out


def test_benchmark_times_tiny_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "--tiny --device cpu --models mixtral --baselines eager --prefill 8 --batches 1"
    monkeypatch.setattr("sys.argv", ["", *given.split(), "--repeats", "1"])
    path = Path(__file__).parents[2] / "benchmarks" / "hf_generate.py"
    runpy.run_path(str(path))["main"]()
    said = capsys.readouterr().out
    assert re.search(r"mixtral +\| decode B=1 +\| +[.\d]+ +\| +[.\d]+ ", said), said


# -- models without the experts interface ---------------------------------------------------


def outside(name: str) -> Any:
    """Return a tiny model with random weights and eager experts."""
    transformers = importlib.import_module("transformers")
    sizes = dict(vocab_size=hfm.VOCAB, hidden_size=64, num_attention_heads=4, pad_token_id=0)
    if name == "dbrx":
        config = transformers.DbrxConfig(
            d_model=64, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=hfm.VOCAB,
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
            ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, hidden_size=64),
        )  # fmt: skip
    elif name == "longcat_flash":
        config = transformers.LongcatFlashConfig(
            **sizes, num_layers=2, n_routed_experts=6, zero_expert_num=3, moe_topk=4,
            expert_ffn_hidden_size=48, ffn_hidden_size=96, q_lora_rank=32, kv_lora_rank=32,
            qk_rope_head_dim=16, qk_nope_head_dim=16, head_dim=16, v_head_dim=16,
        )  # fmt: skip
    else:
        config = importlib.import_module("transformers.models.step3p7").Step3p7TextConfig(
            **sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=16,
            intermediate_size=96, moe_intermediate_size=48, share_expert_dim=48, n_routed_experts=6,
            num_experts_per_tok=2, mlp_layer_types=["sparse"] * 2, swiglu_limits=[0.5, None],
            sliding_window=8,
        )  # fmt: skip
    torch.manual_seed(0)
    kinds = dict(
        dbrx="DbrxForCausalLM", longcat_flash="LongcatFlashForCausalLM", step3p7="Step3p7TextModel"
    )
    kind = getattr(importlib.import_module(f"transformers.models.{name}"), kinds[name])
    model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


@torch.no_grad()
def states(model: Any) -> Tensor:
    return model(hfm.token_ids(), use_cache=False)[0]


@pytest.mark.parametrize("name", ["dbrx", "longcat_flash", "step3p7"])
def test_models_without_the_experts_interface(name: str, tmp_path: Path) -> None:
    model = outside(name)
    want = states(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="moekit"
    )
    model.set_experts_implementation("moekit")
    for each in (model, loaded):
        assert errors(states(each), want).max() < 1e-5
        assert len(integration.kernels(each)) == 2
    model.set_experts_implementation("eager")
    integration.repack(model)
    assert torch.equal(states(model), want) and not integration.kernels(model)
