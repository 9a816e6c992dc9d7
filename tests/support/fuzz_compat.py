"""Calls of `moekit.compat.vllm` with arguments of wrong types and values, for `fuzz_surface`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fuzz_junk import E, H, I, K, T
from torch import nn

import moekit
from moekit.compat.vllm import FusedMoE

CONFIGS = (
    None,
    "fp8_block",
    "int4_w4a16_g32",
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 4, "sym": True, "desc_act": False},
    {"quant_method": "compressed-tensors", "format": "pack-quantized",
     "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}},
)  # fmt: skip
SHAPES = {"w1": (I, H), "w3": (I, H), "w2": (H, I), "w13": (2 * I, H)}


def layer(d: Any) -> Callable[[], object]:
    """Construct a layer, and load and call it."""
    sizes = d(E), d(K), d(H), d(I)
    config = d(*CONFIGS)
    if isinstance(config, dict) and d.random.random() < 0.5 and config:
        key = d.random.choice(list(config))
        config = {**config, key: d(config[key])}
    if d.random.random() < 0.1:
        fields = d.some(weight_bits=(4, 8), group_size=(32, -1), is_sym=(True,), full_config=({},))
        name = d("gptq", "fp8", "compressed-tensors", "modelopt")
        config = SimpleNamespace(get_name=lambda: name, **fields)
    more = d.some(
        params_dtype=(None, torch.float32, torch.bfloat16),
        reduce_results=(False, True),
        renormalize=(True, False),
        use_grouped_topk=(True, False),
        num_expert_group=(2, None),
        topk_group=(1, None),
        tp_size=(None, 1),
        ep_size=(None, 1),
        dp_size=(None, 1),
        prefix=("", "a.experts"),
        custom_routing_function=(None,),
        scoring_func=("softmax", "sigmoid", "sqrtsoftplus"),
        routed_scaling_factor=(1.0, 2.5),
        e_score_correction_bias=(None, lambda: torch.zeros(E)),
        apply_router_weight_on_input=(False,),
        activation=("silu", "gelu", "swigluoai", "relu2"),
        is_act_and_mul=(True, False),
        enable_eplb=(True, False),
        num_redundant_experts=(0, 2),
        has_bias=(False, True),
        is_sequence_parallel=(False,),
        expert_mapping=(None, []),
        zero_expert_num=(0, 1),
        zero_expert_type=(None, "identity"),
        is_fused_checkpoint_transposed=(False, True),
        dequantize=(False, True),
        swiglu_limit=(None, 7.0),
        swiglu_alpha=(None, 1.702),
        activation_situ_beta=(None, 1.0),
        hash_indices_table=(None, lambda: torch.arange(K).expand(9, K)),
        apply_routed_scale_to_output=(False, True),
        ckpt_names=(None, ("gate", "down", "up")),
        gate=(None,),
        router_logits_dtype=(None, torch.float32),
        parallelism=(None, lambda: moekit.LayerParallelism()),
        quant=(None, "none", "fp8_block"),
    )

    def call() -> object:
        made = FusedMoE(*sizes, quant_config=config, device="cpu", **more)
        return repr(made), [name for name, _ in made.named_parameters()]

    return call


def loading(d: Any) -> Callable[[], object]:
    """Push tensors into a layer, then process and call it."""
    shard = d("w1", "w2", "w3", "w13")
    shape = SHAPES.get(shard if isinstance(shard, str) else "w1", (I, H))
    name = "w2_weight" if shape == SHAPES["w2"] else "w13_weight"
    given = dict(
        loaded_weight=d(lambda: torch.ones(shape), lambda: torch.ones(E, *shape)),
        weight_name=d(f"a.{name}"),
        shard_id=shard,
        expert_id=d(*range(E)),
        return_success=d(True, False),
    )
    mapping = d.some(
        ckpt_gate_proj_name=("g",),
        ckpt_down_proj_name=("d",),
        ckpt_up_proj_name=("u", ""),
        num_experts=(E,),
        num_redundant_experts=(0, 1),
    )
    for count in ("num_experts", "num_redundant_experts"):  # a long list takes memory
        if type(mapping.get(count)) is int and mapping[count] > 100:
            mapping.pop(count)
    whole, param = d.random.random() < 0.5, d(None)
    tensor = d(lambda: torch.ones(I, H))

    def call() -> object:
        made = FusedMoE(E, K, H, I, params_dtype=torch.float32, device="cpu")
        if whole:
            for each_name, shards in (("w13_weight", ("w1", "w3")), ("w2_weight", ("w2",))):
                own = made.get_parameter(each_name)
                for each in shards:
                    own.weight_loader(own, torch.ones(E, *SHAPES[each]), each_name, each, 0)
            made.process_weights_after_loading()
        own = made.get_parameter(name)
        made.weight_loader(own if param is None else param, **given)
        if isinstance(param, nn.Parameter):
            raise AssertionError("a foreign parameter was accepted")
        made.process_weights_after_loading()
        return made(torch.ones(T, H), torch.ones(T, E))

    def named() -> object:
        if len(mapping.keys() - {"num_redundant_experts"}) < 4:
            return None  # Python names the missing arguments
        made = FusedMoE(
            E, K, H, I, params_dtype=torch.float32, device="cpu",
            expert_mapping=FusedMoE.make_expert_params_mapping(**mapping),
        )  # fmt: skip
        return list(made.load_weights([("0.g.weight", tensor)]))

    return d.random.choice((call, call, named))
