"""Generate tokens with a Hugging Face MoE model, with and without moekit, and compare them.

    python examples/hf_generate.py                       # a small Qwen3-MoE with random weights
    python examples/hf_generate.py path/to/checkpoint --dtype bfloat16

This needs transformers: pip install 'moekit[hf]'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moekit.integrations.transformers


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if both implementations generate the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", help="a model's folder; default: random weights")
    parser.add_argument("--dtype", default="float32", help="bfloat16 may choose other tokens")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per sequence")
    args = parser.parse_args(argv)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dtype = getattr(torch, args.dtype)

    moekit.integrations.transformers.install()

    if args.checkpoint:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype)
    else:
        model = small_model(dtype)
    model = model.to(device).eval()
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(vocabulary, (2, 8), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(device)

    tokens = {}
    for implementation in ("eager", "moekit"):
        model.set_experts_implementation(implementation)
        generate(model, prompt, 2)  # packs, compiles
        start = time.perf_counter()
        tokens[implementation] = generate(model, prompt, args.tokens)
        seconds = time.perf_counter() - start
        print(f"{implementation:>6}: {tokens[implementation][0].tolist()}")
        print(f"        {prompt.shape[0] * args.tokens / seconds:.0f} tokens/s on {device}")

    layers = moekit.integrations.transformers.kernels(model)
    kernel = next(iter(layers.values()))
    print(f"{len(layers)} layers ran {kernel.explanation.chosen}")
    memory = moekit.integrations.transformers.memory(model)
    print(
        f"experts: {memory.parameters:,} bytes of parameters, {memory.packed:,} packed in addition"
    )
    same = torch.equal(tokens["eager"], tokens["moekit"])
    print("equal tokens" if same else "DIFFERENT tokens")
    return 0 if same else 1


def small_model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_experts=16,
        num_experts_per_tok=4, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the new tokens (B, tokens) of a greedy search."""
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
        min_new_tokens=tokens, max_new_tokens=tokens,
    )  # fmt: skip
    return out[:, prompt.shape[1] :]


if __name__ == "__main__":
    raise SystemExit(main())
