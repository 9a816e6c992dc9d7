"""How a checkpoint's model chooses experts, from its config.json, as arguments of `FusedMoE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moekit.checkpoint.config import model_type_of, problem_from_config, text_config
from moekit.checkpoint.files import Checkpoint, named
from moekit.checkpoint.names import ExpertNames
from moekit.errors import WeightsError
from moekit.problem import ParallelConfig

# Softmax over all experts, then top-k; renormalized as ``norm_topk_prob`` says, or always.
_SOFTMAX = frozenset({
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "olmoe",
    "flex_olmo",
})  # fmt: skip
_SOFTMAX_ALWAYS = frozenset({
    "mixtral", "minimax", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "qwen3_5_moe_text", "hunyuan_v1_moe",
})  # fmt: skip
# Sigmoid with a bias for the choice, groups, and a factor.
_SIGMOID = frozenset({
    "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite",
    "glm_moe_dsa", "dots1",
})  # fmt: skip
_FIELDS = (
    "num_experts", "top_k", "hidden_size", "intermediate_size", "activation", "has_bias",
    "apply_router_weight_on_input",
)  # fmt: skip
_BIAS = "e_score_correction_bias"


def layer_arguments(
    path: str | Path | Checkpoint,
    layer: int,
    names: ExpertNames | None,
    dequantize: bool,
    tp_size: int,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `FusedMoE` for a layer of a checkpoint; see its `from_checkpoint`.

    Args:
        tp_size: Ranks that the scheme's groups are cut for.
        given: Arguments that the caller states.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    fields = {name: given[name] for name in _FIELDS if name in given}
    problem = problem_from_config(
        checkpoint,
        layer=layer,
        names=names,
        dequantize=dequantize,
        parallel=ParallelConfig(tp_size=tp_size),
        device="cpu",
        **fields,
    )
    with named(checkpoint):
        routing = routing_of(checkpoint, layer, given)
    return {
        **{name: getattr(problem, name) for name in (*_FIELDS, "quant")},
        "params_dtype": given.get("params_dtype", problem.dtype),
        **({} if "routing" in given else routing),
    }


def routing_of(checkpoint: Checkpoint, layer: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the routing of a layer, as keywords of `FusedMoE`.

    Args:
        given: Keywords that the caller states. With one of routing among them, a model type that
            is not known here is no error.

    Raises:
        WeightsError: The model type's routing is not known.
    """
    config, model_type = text_config(checkpoint), model_type_of(checkpoint)
    if model_type in _SOFTMAX_ALWAYS:
        return {"renormalize": True}
    if model_type in _SOFTMAX and "norm_topk_prob" in config:
        return {"renormalize": bool(config["norm_topk_prob"])}
    if model_type in _SIGMOID:
        grouped = (config.get("n_group") or 1) > 1
        return {
            "scoring_func": "sigmoid",
            "renormalize": bool(config.get("norm_topk_prob", True)),
            "routed_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
            "num_expert_group": config["n_group"] if grouped else None,
            "topk_group": config.get("topk_group") if grouped else None,
            _BIAS: _correction_bias(checkpoint, layer),
        }
    if given.keys() & {"routing", "renormalize", "scoring_func", "custom_routing_function"}:
        return {}
    raise WeightsError(
        f"how model type {model_type!r} routes is not known: pass it, for example "
        "scoring_func='softmax' and renormalize=True"
    )


def _correction_bias(checkpoint: Checkpoint, layer: int) -> Tensor | None:
    wanted = f"layers.{layer}.", f".{_BIAS}"
    found = [n for n in checkpoint.names() if wanted[0] in n and n.endswith(wanted[1])]
    if len(found) > 1:
        raise WeightsError(f"layer {layer} has several biases of the router: {', '.join(found)}")
    return checkpoint.read(found[0]).float() if found else None
