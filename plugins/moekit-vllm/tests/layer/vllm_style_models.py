"""MoE blocks as vLLM's model files have them, with its loader loop; only FusedMoE's import differs.

A model here has the MoE blocks alone. `hf_models.forward_with` runs them inside transformers'
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from moekit_vllm import FusedMoE
from torch import Tensor, nn


class Block(nn.Module):
    """A gate and experts; `arguments` has the layer's arguments, as vLLM's model files do."""

    gate_name, gate_bias = "gate", False

    def __init__(self, config: Any, prefix: str, **how: Any) -> None:
        super().__init__()
        arguments = self.arguments(config)
        gate = nn.Linear(config.hidden_size, arguments["num_experts"], bias=self.gate_bias)
        self.add_module(self.gate_name, gate)
        self.experts = FusedMoE(
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            reduce_results=False,
            prefix=f"{prefix}.experts",
            **arguments,
            **how,
        )

    def arguments(self, config: Any) -> dict[str, Any]:
        inner = config.intermediate_size
        return dict(num_experts=config.num_local_experts, intermediate_size=inner)

    def forward(self, hidden_states: Tensor) -> Tensor:
        router_logits = self.get_submodule(self.gate_name)(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class MixtralMoE(Block):
    def forward(self, hidden_states: Tensor) -> Tensor:
        out = super().forward(hidden_states)
        if self.experts.tp_size > 1:
            out = self.experts.maybe_all_reduce_tensor_model_parallel(out)
        return out


class DeepseekV2MoE(Block):
    def __init__(self, config: Any, prefix: str, **how: Any) -> None:
        super().__init__(config, prefix, **how)
        self.scale = config.routed_scaling_factor
        # The router reads it at every call, so it may be loaded later.
        self.gate.e_score_correction_bias = self.experts.router.config.e_score_correction_bias
        inner = config.moe_intermediate_size * config.n_shared_experts
        shared = {"gate_proj": inner, "up_proj": inner}
        self.shared_experts = nn.ModuleDict(
            {name: nn.Linear(config.hidden_size, rows, bias=False) for name, rows in shared.items()}
        )
        self.shared_experts["down_proj"] = nn.Linear(inner, config.hidden_size, bias=False)

    def arguments(self, config: Any) -> dict[str, Any]:
        bias = nn.Parameter(torch.empty(config.n_routed_experts), requires_grad=False)
        return dict(
            num_experts=config.n_routed_experts,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            use_grouped_topk=True,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            scoring_func="sigmoid",
            e_score_correction_bias=bias,
        )

    def routed(self, hidden_states: Tensor) -> Tensor:
        logits = F.linear(hidden_states.float(), self.gate.weight.float())
        return self.experts(hidden_states, logits) * self.scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        mlp = self.shared_experts
        gated = F.silu(mlp["gate_proj"](hidden_states)) * mlp["up_proj"](hidden_states)
        return self.routed(hidden_states) + mlp["down_proj"](gated)


class GptOssMLP(Block):
    gate_name, gate_bias = "router", True

    def arguments(self, config: Any) -> dict[str, Any]:
        return super().arguments(config) | dict(
            has_bias=True, activation="swigluoai", is_fused_checkpoint_transposed=True
        )


class MoEModel(nn.Module):
    """The MoE blocks of a model, under the names of its checkpoint.

    Args:
        blocks: The module path of each layer's block.
        make: ``(prefix) -> block``.
        names: What the checkpoint calls gate, down and up.
    """

    def __init__(
        self,
        blocks: Iterable[str],
        make: Callable[[str], nn.Module],
        names: tuple[str, str, str],
        num_redundant_experts: int = 0,
    ) -> None:
        super().__init__()
        for path in blocks:
            *parents, last = path.split(".")
            owner: nn.Module = self
            for name in parents:
                if not hasattr(owner, name):
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.add_module(last, make(path))
        self.names, self.num_redundant_experts = names, num_redundant_experts

    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:
        experts = next(m for m in self.modules() if isinstance(m, FusedMoE))
        gate, down, up = self.names
        return FusedMoE.make_expert_params_mapping(
            ckpt_gate_proj_name=gate,
            ckpt_down_proj_name=down,
            ckpt_up_proj_name=up,
            num_experts=experts.global_num_experts - self.num_redundant_experts,
            num_redundant_experts=self.num_redundant_experts,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        params_dict = dict(self.named_parameters())
        loaded_params: set[str] = set()
        expert_params_mapping = self.get_expert_mapping()
        for name, loaded_weight in weights:
            is_expert_weight = False
            for param_name, weight_name, expert_id, shard_id in expert_params_mapping:
                if weight_name not in name:
                    continue
                is_expert_weight = True
                name_mapped = name.replace(weight_name, param_name)
                if name_mapped not in params_dict:
                    continue
                param = params_dict[name_mapped]
                success = param.weight_loader(
                    param,
                    loaded_weight,
                    name_mapped,
                    shard_id=shard_id,
                    expert_id=expert_id,
                    return_success=True,
                )
                if success:
                    name = name_mapped
                    break
            else:
                if is_expert_weight:
                    continue  # an expert of another rank
                if ".experts." in name and self._load_stack(name, loaded_weight, params_dict):
                    continue
                if name not in params_dict:
                    continue
                with torch.no_grad():
                    params_dict[name].copy_(loaded_weight)
            loaded_params.add(name)
        return loaded_params

    @staticmethod
    def _load_stack(name: str, loaded_weight: Tensor, params_dict: dict[str, Any]) -> bool:
        """Load a tensor of all of gpt-oss's experts as it is."""
        stem, _, weight_name = name.rpartition(".")
        what, _, suffix = weight_name.partition("_proj")
        shard = "w13" if what == "gate_up" else "w2"
        full_name = f"{stem}.{shard}_{suffix.lstrip('_') or 'weight'}"
        param = params_dict.get(full_name)
        if param is not None:
            param.weight_loader(param, loaded_weight, full_name, shard_id=shard, expert_id=0)
        return param is not None
