"""Types and ranges of the fields of config.json and hf_quant_config.json that moekit reads.

They are checked once, so the code that uses the fields can trust them. A field that is null counts
as missing.
"""

from __future__ import annotations

from moekit.untrusted.arguments import FLAG, Kind, either, items, real, record, size, table, text

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
    return either(kind, items(kind, 0, _MAX_LAYERS))


_TEXT = text(1000)
_SIZE = _per_layer(size(0, _MAX_SIZE))
_COUNT = _per_layer(size(0, MAX_EXPERTS))
_GROUP = either(size(1, _MAX_SIZE), size(-1, -1))
_BLOCK = items(size(1, _MAX_SIZE), 2, 2)
_LIMIT = real(above=1e-6, most=1e6)

_OPERAND = record(
    {
        "num_bits": size(1, 64),
        "type": _TEXT,
        "strategy": _TEXT,
        "group_size": _GROUP,
        "block_structure": either(_BLOCK, _TEXT),
        "dynamic": either(FLAG, _TEXT),
    }
)

QUANTIZATION = record(
    {
        "quant_method": _TEXT,
        "quant_algo": _TEXT,
        "activation_scheme": _TEXT,
        "version": _TEXT,
        "checkpoint_format": _TEXT,
        "group_size": _GROUP,
        "weight_block_size": _BLOCK,
        "sym": FLAG,
        "desc_act": FLAG,
        "static_groups": FLAG,
        "config_groups": table(
            record(
                {
                    "targets": items(_TEXT, 0, _MAX_TARGETS),
                    "weights": _OPERAND,
                    "input_activations": _OPERAND,
                }
            ),
            most=_MAX_TARGETS,
        ),
    }
)

_FIELDS: dict[str, Kind] = {
    "model_type": _TEXT,
    "dtype": _TEXT,
    "torch_dtype": _TEXT,
    "hidden_act": _TEXT,
    "mlp_hidden_act": _TEXT,
    "swiglu_limit": _LIMIT,
    "swiglu_alpha": _LIMIT,
    "num_hidden_layers": size(0, _MAX_LAYERS),
    **dict.fromkeys(("hidden_size", *INNER), _SIZE),
    **dict.fromkeys((*TOP_K, *EXPERTS), _COUNT),
    "quantization_config": QUANTIZATION,
    "compression_config": QUANTIZATION,
}
# Where multimodal models keep the language model's config; at most thinker_config -> text_config.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

CONFIG = record(_FIELDS)
for _ in range(2):
    CONFIG = record({**_FIELDS, **dict.fromkeys(NESTED, CONFIG)})

HF_QUANT_CONFIG = record({"quantization": QUANTIZATION})
