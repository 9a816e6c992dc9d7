"""Types and ranges of the fields of config.json and hf_quant_config.json that moekit reads.

They are checked once, so the code that uses the fields can trust them. A field that is null counts
as missing.
"""

from __future__ import annotations

from moekit.untrusted.files import (
    Kind,
    either,
    flag,
    integer,
    mapping,
    number,
    sequence,
    table,
    text,
)

# The fields of sizes, whose names differ between model types.
INNER = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Far above every model in use, and small enough that loops up to them take no time.
MAX_EXPERTS = 1 << 14
_MAX_LAYERS = 1 << 14
_MAX_SIZE = 1 << 22
_MAX_TARGETS = 10_000


def _per_layer(kind: Kind) -> Kind:
    return either(kind, sequence(kind, 0, _MAX_LAYERS))


_SIZE = _per_layer(integer(0, _MAX_SIZE))
_COUNT = _per_layer(integer(0, MAX_EXPERTS))
_GROUP = integer(-1, _MAX_SIZE, zero=False)
_BLOCK = sequence(integer(1, _MAX_SIZE), 2, 2)
_LIMIT = number(1e-6, 1e6)

_OPERAND = mapping(
    {
        "num_bits": integer(1, 64),
        "type": text,
        "strategy": text,
        "group_size": _GROUP,
        "block_structure": either(_BLOCK, text),
        "dynamic": either(flag, text),
    }
)

QUANTIZATION = mapping(
    {
        "quant_method": text,
        "quant_algo": text,
        "activation_scheme": text,
        "version": text,
        "checkpoint_format": text,
        "group_size": _GROUP,
        "weight_block_size": _BLOCK,
        "sym": flag,
        "desc_act": flag,
        "static_groups": flag,
        "config_groups": table(
            mapping(
                {
                    "targets": sequence(text, 0, _MAX_TARGETS),
                    "weights": _OPERAND,
                    "input_activations": _OPERAND,
                }
            ),
            most=_MAX_TARGETS,
        ),
    }
)

_FIELDS: dict[str, Kind] = {
    "model_type": text,
    "dtype": text,
    "torch_dtype": text,
    "hidden_act": text,
    "mlp_hidden_act": text,
    "swiglu_limit": _LIMIT,
    "swiglu_alpha": _LIMIT,
    "num_hidden_layers": integer(0, _MAX_LAYERS),
    **dict.fromkeys(("hidden_size", *INNER), _SIZE),
    **dict.fromkeys((*TOP_K, *EXPERTS), _COUNT),
    "quantization_config": QUANTIZATION,
    "compression_config": QUANTIZATION,
}
# Where multimodal models keep the language model's config; at most thinker_config -> text_config.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

CONFIG = mapping(_FIELDS)
for _ in range(2):
    CONFIG = mapping({**_FIELDS, **dict.fromkeys(NESTED, CONFIG)})

HF_QUANT_CONFIG = mapping({"quantization": QUANTIZATION})
