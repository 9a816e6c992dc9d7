"""Read a GGUF model's metadata about its experts, in the terms of config.json.

The fields are those that llama.cpp's converter writes (gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moekit.checkpoint.headers import Entry

_DTYPES = {"F16": "float16", "F32": "float32"}

# The activation of the routed experts of each architecture, as llama.cpp's graphs compute it.
_SILU = (
    "afmoe", "arctic", "bailingmoe", "bailingmoe2", "dbrx", "deepseek", "deepseek2", "dots1",
    "ernie4_5-moe", "glm4moe", "granitehybrid", "granitemoe", "hunyuan-moe", "jamba", "lfm2moe",
    "llada-moe", "llama", "llama4", "minimax-m2", "olmoe", "phimoe", "qwen2moe", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vlmoe",
)  # fmt: skip
# ggml's gelu is the approximation by tanh; its gelu_erf is the exact one.
_OTHERS = {"gpt-oss": "swigluoai", "grok": "gelu_pytorch_tanh", "nemotron_h_moe": "relu2"}
_ACTIVATIONS = dict.fromkeys(_SILU, "silu") | _OTHERS
# Architectures that moekit treats differently, by the name that transformers has for them.
_MODEL_TYPES = {"gpt-oss": "gpt_oss", "llama4": "llama4_text"}


def config_of(metadata: Mapping[str, Any], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the metadata as the fields of config.json that moekit reads, unchecked.

    ``entries`` tells the dtype, which GGUF does not say: that of the first experts if they are not
    quantized, else bfloat16. The activation of an unknown architecture is none that moekit has.
    """
    arch = metadata.get("general.architecture")

    def said(*names: str) -> Any:
        fields = (metadata.get(f"{arch}.{name}") for name in names)
        return next((value for value in fields if value not in (None, 0)), None)

    first = next((e for name, e in sorted(entries.items()) if ".ffn_down_exps." in name), None)
    return {
        "model_type": _MODEL_TYPES.get(str(arch), arch),
        "hidden_size": said("embedding_length"),
        "moe_intermediate_size": said("expert_feed_forward_length", "feed_forward_length"),
        "num_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "num_hidden_layers": said("block_count"),
        "hidden_act": _ACTIVATIONS.get(str(arch), f"of the GGUF architecture {str(arch)[:100]!r}"),
        "dtype": _DTYPES.get(first.dtype if first else "", "bfloat16"),
    }
