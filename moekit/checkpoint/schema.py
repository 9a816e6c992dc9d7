"""The fields of config.json and hf_quant_config.json: their types and ranges, and what they mean.

They are checked once, so the code that uses the fields can trust them. A field that is null counts
as missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from moekit.errors import WeightsError
from moekit.formats.methods import QUANTIZATION
from moekit.untrusted.arguments import FLAG, Kind, either, matching, real, shown, size
from moekit.untrusted.json_kinds import items, record, text

# The fields of sizes, whose names differ between model types; the first that is there counts.
HIDDEN = ("moe_latent_size", "moe_hidden_size", "hidden_size")
INNER = (
    "moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size",
    "intermediate_size",
)  # fmt: skip
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts",
    "moe_topk", "moe_k",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVATIONS = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
WEIGHT_ON_INPUT = "moe_apply_router_weight_on_input"

# Far above every model in use, and small enough that loops up to them take no time.
_MAX_EXPERTS = 1 << 14
_MAX_LAYERS = 1 << 14
_MAX_SIZE = 1 << 22


def _per_layer(kind: Kind) -> Kind:
    return either(kind, items(kind, 0, _MAX_LAYERS))


_TEXT = text(1000)
_SIZE = _per_layer(size(0, _MAX_SIZE))
_COUNT = _per_layer(size(0, _MAX_EXPERTS))
_LIMIT = either(
    real(above=1e-6, most=1e6), matching("0", lambda v: v == 0 and type(v) in (int, float))
)

_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype", "expert_dtype", *ACTIVATIONS), _TEXT),
    **dict.fromkeys(("swiglu_limit", "swiglu_limits"), _per_layer(_LIMIT)),
    "swiglu_alpha": _LIMIT,
    "num_hidden_layers": size(0, _MAX_LAYERS),
    WEIGHT_ON_INPUT: FLAG,
    **dict.fromkeys((*HIDDEN, *INNER), _SIZE),
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

# Fields that may change what an expert computes, unless they describe something else.
_OF_EXPERTS = re.compile(
    "expert|moe|mlp|ffn|glu|latent|intermediate|softcap|clamp|clip|limit|(^|_)act(_|ivation|$)|"
    "hidden_size|hidden_dim"
)
_OF_OTHERS = re.compile(
    # other modules: the router, shared experts, attention
    "(moe_)?(n_|num_)?(router|routed|routing|shared?|mamba|vision|attn|attention|qk|rel|mtp)_.*|"
    "(use_)?expert_bias|num_expert_group|expert_capacity|expert_selection_fn|second_expert_policy|"
    "zero_expert_(num|type)|moe_(re)?norm.*|moe_.*capacity.*|enable_moe_fp32_combine|"
    "final_logit_softcapping|time_step_limit|rms_norm_eps_moe_gate|"
    # dense layers
    "dense_intermediate_size|intermediate_size_mlp|ffn_hidden_size|(de|en)coder_ffn_dim|mlp_ratio|"
    "mlp_bias|mlp_(alpha|beta)_factor|use_double_wide_mlp|hidden_size_per_layer_input|"
    # which layers have experts
    "mlp_layer_types|mlp_only_layers|(interleave_)?moe_layer.*|expert_layer_(offset|period)|"
    "(use|is|enable|num)_moe(_layers)?|moe_(start|end)_.*|"
    # training
    ".*_loss(_.*)?|.*_dropout(_.*)?"
)


def check_understood(config: Mapping[str, Any], given: Collection[str] = ()) -> None:
    """Raise WeightsError for a field that may change numbers and that moekit does not understand.

    Args:
        given: The fields of `MoEProblem` that the caller states. They replace what the config says.
    """
    for name, value in config.items():
        if name in _FIELDS or name in NESTED or not _changes_numbers(name, value):
            continue
        size_like = re.search("size|dim|latent|intermediate|layer", name)
        instead = ("hidden_size", "intermediate_size") if size_like else ("activation",)
        if not set(instead) <= set(given):
            raise WeightsError(
                f"config.json of model type {config.get('model_type')!r} has {name}={shown(value)},"
                " which moekit does not understand and which may change what experts compute: pass "
                f"{' and '.join(f'{field}=...' for field in instead)}, as the model computes them"
            )


def _changes_numbers(name: str, value: object) -> bool:
    """Return whether a field may change what experts compute."""
    if value in (None, False, 0, "", [], {}):
        return False
    if name == "per_layer_config" and isinstance(value, dict):  # fields by layer
        each = [entry for entry in value.values() if isinstance(entry, dict)]
        return any(_changes_numbers(n, v) for entry in each for n, v in entry.items())
    return name == "per_layer_config" or bool(
        _OF_EXPERTS.search(name) and not _OF_OTHERS.fullmatch(name)
    )
