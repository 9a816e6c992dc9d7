"""Tiny random MoE models in the format of Hugging Face, for engines on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


_KV = {"num_key_value_heads": 2}
_SOME_DENSE = {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
_FULL = {"sliding_window": 64, "layer_types": ["full_attention", "full_attention"]}
# The names of the classes of transformers, and their configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe", _SOME_DENSE | _KV | dict(head_dim=32, num_experts=8, norm_topk_prob=True)
    ),
    "mixtral": (
        "Mixtral",
        _KV | dict(intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, head_dim=32),
    ),
    # A dense layer, then one with shared experts and a scaled sum of routed ones.
    "deepseek_v2": (
        "DeepseekV2",
        _SOME_DENSE
        | dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, kv_lora_rank=512)
        | dict(first_k_dense_replace=1, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64)
        | dict(v_head_dim=32, topk_method="greedy", n_group=1, topk_group=1, num_key_value_heads=4)
        | dict(routed_scaling_factor=2.5),
    ),
    # Biases, interleaved gate and up, and a clamped activation.
    "gpt_oss": (
        "GptOss",
        dict(intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, head_dim=32)
        | _KV | _FULL,
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        _SOME_DENSE | _KV | dict(shared_expert_intermediate_size=96, num_experts=8),
    ),
    "llama4": (
        "Llama4",
        dict(intermediate_size=64, intermediate_size_mlp=256, num_local_experts=4)
        | dict(num_experts_per_tok=1, interleave_moe_layer_step=1, head_dim=32)
        | dict(no_rope_layers=[1, 1], attention_chunk_size=512, rope_scaling=None)
        | _KV,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _SOME_DENSE
        | _GROUPS
        | dict(n_routed_experts=8, n_shared_experts=1, kv_lora_rank=512, q_lora_rank=None)
        | dict(qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, num_key_value_heads=4)
        | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    ),
}  # fmt: skip


# Those that have no test of their own.
FAMILIES = [n for n in MODELS if n not in ("qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss")]


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a model with random weights; its router prefers some experts clearly."""
    stem, fields = MODELS[name]
    config = f"{stem}Text" if stem == "Llama4" else stem
    model = getattr(hf, f"{stem}ForCausalLM")(getattr(hf, f"{config}Config")(**_COMMON | fields))
    draw = torch.Generator().manual_seed(seed)
    for path, p in model.named_parameters():
        if p.dim() > 1:
            p.data.normal_(0.0, 0.1, generator=draw)
        else:
            p.data.normal_(float("norm" in path), 0.05, generator=draw)
    for path, buffer in model.named_buffers():
        if path.endswith("correction_bias"):
            buffer.normal_(0.0, 0.05, generator=draw)
    model.save_pretrained(folder)
    return folder


def adapter_of(model: str, folder: Path) -> tuple[Path, Path]:
    """Save a random adapter of all experts in PEFT's format, and the model with it merged."""
    tensors, draw = load_file(f"{model}/model.safetensors"), torch.Generator().manual_seed(1)
    rank, alpha, adapter, merged = 4, 8, folder / "adapter", folder / "merged"
    factors: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors[name].shape
        a, b = (torch.randn(n, generator=draw) / 10 for n in ((rank, columns), (rows, rank)))
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"] = a, b
        tensors[name] = tensors[name] + alpha / rank * b @ a
    for made, held in ((adapter, factors), (merged, tensors)):
        made.mkdir()
        file = "adapter_model" if made is adapter else "model"
        save_file(held, made / f"{file}.safetensors", metadata={"format": "pt"})
    modules = ["gate_proj", "up_proj", "down_proj"]
    config = dict(peft_type="LORA", r=rank, lora_alpha=alpha, target_modules=modules, bias="none")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (merged / "config.json").write_text(Path(model, "config.json").read_text())
    return adapter, merged


def with_experts_of(model: str, other: str, folder: Path) -> Path:
    """Save a model with the experts of another one of its kind."""
    tensors, experts = (load_file(f"{path}/model.safetensors") for path in (model, other))
    tensors |= {name: tensor for name, tensor in experts.items() if ".experts." in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(Path(model, "config.json").read_text())
    return folder
