"""Tiny random MoE models in the format of Hugging Face, for engines on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers as hf

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def qwen3_moe() -> hf.PreTrainedModel:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_COMMON, intermediate_size=256, num_key_value_heads=2, head_dim=32,
            moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        )
    )  # fmt: skip


def mixtral() -> hf.PreTrainedModel:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **_COMMON, intermediate_size=96, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, head_dim=32,
        )
    )  # fmt: skip


def deepseek_v2() -> hf.PreTrainedModel:
    """A dense layer, then one with shared experts and a scaled sum of routed ones."""
    return hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(
            **_COMMON, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=8,
            n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1, kv_lora_rank=512,
            q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
            topk_method="greedy", n_group=1, topk_group=1, num_key_value_heads=4,
            routed_scaling_factor=2.5,
        )
    )  # fmt: skip


def gpt_oss() -> hf.PreTrainedModel:
    """Biases, interleaved gate and up, and a clamped activation."""
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_COMMON, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2,
            num_key_value_heads=2, head_dim=32, sliding_window=64,
            layer_types=["full_attention", "full_attention"],
        )
    )  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


MODELS = {m.__name__: m for m in (qwen3_moe, mixtral, deepseek_v2, gpt_oss)}


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a model with random weights; its router prefers some experts clearly."""
    model = MODELS[name]()
    draw = torch.Generator().manual_seed(seed)
    for path, p in model.named_parameters():
        if p.dim() > 1:
            p.data.normal_(0.0, 0.1, generator=draw)
        else:
            p.data.normal_(float("norm" in path), 0.05, generator=draw)
    model.save_pretrained(folder)
    return folder
