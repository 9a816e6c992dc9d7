"""`FusedMoE` with the interface of vLLM's layer of that name, in its versions 0.9 to 0.14.

It also takes those keywords of later versions, up to 0.33, that change what the layer computes.

A model file that is written against vLLM's layer runs with one changed import::

    from moekit_vllm import FusedMoE

moekit computes, and vLLM need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit import Activation, LayerParallelism, QuantScheme
from moekit.checkpoint import PushedExperts
from moekit_vllm.layer import keywords as vllm
from moekit_vllm.layer.loading import LoadingLayer
from moekit_vllm.layer.quantization import resolve


class FusedMoE(LoadingLayer):
    """A layer of routed experts with vLLM's constructor, parameters and weight loader::

        self.experts = FusedMoE(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336,
                                tp_size=2, quant_config=quant_config, prefix=f"{prefix}.experts")
        ...
        out = self.experts(hidden_states=hidden_states, router_logits=router_logits)

    `parameters` lists what a loader fills: ``w13_weight``, ``w2_weight``, ``w13_weight_scale`` and
    so on, as the checkpoint's tensors are called. Only the parameters of weights hold values, in
    moekit's layout; scales and the like are empty, because the layer converts them as they
    arrive. Pass tensors to `weight_loader`, then call `process_weights_after_loading`, which packs
    them. Loading again updates the weights.

    Args:
        reduce_results: Sum the ranks' outputs. By default the caller sums.
        quant_config: How the checkpoint stores experts: a model's ``quantization_config`` as a
            mapping or an object with ``to_dict``, or a scheme of moekit or its name, whose tensors
            are called as compressed-tensors does (fp8 per tensor and in blocks: as DeepSeek does).
        quant: The scheme, if not the one that fits the checkpoint best.
        dequantize: Convert weights of the checkpoint's format to ``params_dtype``.
        activation: A name in vLLM, or an `Activation`.
        is_act_and_mul: False removes the gate; pass its experts' only projection as "w1".
        tp_size: Tensor-parallel ranks; the rank comes from torch.distributed.
        ep_size: 1, or all ranks: each holds whole experts.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize) -> (weights,
            ids)``, called with these keywords in place of all routing options.
        hash_indices_table: The routing's ``hash_table``, (V, K). Calls then need ``input_ids``.
        apply_routed_scale_to_output: Multiply the output by ``routed_scaling_factor``, not the
            weights.
        is_fused_checkpoint_transposed: Tensors of all experts hold matrices as (in, out).
        keywords: Other arguments of `moekit.FusedMoE` and fields of its records, which mean the
            same there, and vLLM's ``use_grouped_topk`` (without it, groups are ignored),
            ``swiglu_limit``, ``swiglu_alpha``, ``swiglu_beta``, ``activation_situ_beta`` and
            ``activation_situ_linear_beta``.

    Raises:
        InvalidProblem: A keyword of vLLM's belongs to a part that this layer does not have, or
            values do not fit each other.
        TypeError: A keyword is unknown.
        MoekitError: What `moekit.FusedMoE` raises.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        *,
        quant_config: Any = None,
        quant: QuantScheme | str | None = None,
        dequantize: bool = False,
        activation: Activation | str = "silu",
        is_act_and_mul: bool = True,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        custom_routing_function: Callable[..., Any] | None = None,
        hash_indices_table: Tensor | None = None,
        apply_routed_scale_to_output: bool = False,
        is_fused_checkpoint_transposed: bool = False,
        prefix: str = "",
        **keywords: Any,
    ) -> None:
        vllm.drop_unused(keywords)
        if reduce_results or keywords.get("parallelism") is None:
            keywords["reduce_results"] = reduce_results
        vllm.set_ranks(keywords, tp_size, ep_size, dp_size)
        fields = {n: v for n, v in keywords.items() if n in LayerParallelism.__dataclass_fields__}
        spread = keywords.get("parallelism") or LayerParallelism(**fields)
        sizes = (hidden_size, intermediate_size, spread.config().tp_size)
        format, scheme = resolve(quant_config, quant, dequantize, sizes, prefix or "experts")
        computed = vllm.activation_of(activation, is_act_and_mul, keywords)
        output_scale = vllm.set_routing(
            keywords, custom_routing_function, hash_indices_table, apply_routed_scale_to_output
        )
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            params_dtype=torch.get_default_dtype() if params_dtype is None else params_dtype,
            quant=scheme,
            activation=computed,
            is_act_and_mul=None if is_act_and_mul else False,
            prefix=prefix or None,
            **keywords,
        )
        self.quant_config, self._group = quant_config, spread.group
        self._output_scale = output_scale
        self.layer_name = self.prefix
        # Ranks that hold slices of the same expert, and ranks over which experts are spread.
        self.tp_size, self.ep_size = self.problem.parallel.tp_size, self.problem.parallel.ep_size
        # Physical experts of all ranks, and of this rank.
        self.global_num_experts = self.problem.num_physical_experts
        self.local_num_experts = self.problem.num_local_experts
        self.expert_map = self._expert_map()
        # Of gate and up in one tensor, rows alternate by the name in vLLM.
        alternates = activation != "swigluoai_uninterleave"
        make_loader = partial(
            PushedExperts,
            self.problem,
            format,
            dequantize=dequantize and bool(format.dtype),
            interleaved=self.problem.activation.name == "swigluoai" and alternates,
            transposed=is_fused_checkpoint_transposed,
            device=self.device,
            name=self.prefix,
        )
        self.prepare_loading(make_loader)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """Compute the layer's output.

        Args:
            hidden_states: (..., H) in params_dtype.
            router_logits: (..., E + identity experts), any float dtype.
            input_ids: (...) int32 or int64, the rows of ``hash_indices_table``. Without a table
                they have no effect.

        Returns:
            (..., H) in params_dtype; this rank's partial sum if `partial`.

        Raises:
            InvalidInput: A tensor does not fit; the other ranks then raise PeerFailed.
            WeightsError: The weights are not loaded and processed.
        """
        hashed = self.router.config.hash_table is not None
        out = super().forward(hidden_states, router_logits, token_ids=input_ids if hashed else None)
        return out if self._output_scale == 1.0 else out * self._output_scale

    def _expert_map(self) -> Tensor | None:
        """Return each physical expert's place on this rank, (P,) int32, -1 elsewhere; or None."""
        if self.ep_size == 1:
            return None
        replicas = self.problem.num_redundant_experts
        slots = list(self.problem.local_experts if replicas else self.local_experts)
        found = torch.full((self.global_num_experts,), -1, dtype=torch.int32, device=self.device)
        found[slots] = torch.arange(len(slots), dtype=torch.int32, device=self.device)
        return found

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Return whether this layer's output is already summed over ranks.

        A model then sums partial outputs of shared experts itself before it adds them.
        """
        return self.problem.parallel.num_ranks > 1 and not self.partial

    def maybe_all_reduce_tensor_model_parallel(self, final_hidden_states: Tensor) -> Tensor:
        """Return the sum over ranks of partial outputs; complete ones as they are."""
        if not self.partial:
            return final_hidden_states
        total = final_hidden_states.clone()
        dist.all_reduce(total, group=self._group)
        return total


class SharedFusedMoE(FusedMoE):
    """`FusedMoE` with shared experts; a call returns the outputs of both.

    Args:
        shared_experts: (..., H) -> (..., H), or None. The caller keeps its parameters.
        gate: Computes the router's logits from the hidden states, in place of the caller.
        keywords: The arguments of `FusedMoE`. Shared experts run before the routed ones, so
            ``use_overlapped`` has no effect.
    """

    shared_experts: Callable[[Tensor], Tensor] | None
    gate: Callable[[Tensor], Any] | None

    def __init__(
        self,
        shared_experts: Callable[[Tensor], Tensor] | None,
        gate: Callable[[Tensor], Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        # Not as submodules, because the model has their parameters under other names.
        object.__setattr__(self, "shared_experts", shared_experts)
        object.__setattr__(self, "gate", gate)

    @property
    def is_internal_router(self) -> bool:
        """Return whether the layer computes the router's logits, and ignores those it is given."""
        return self.gate is not None

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the outputs of the shared and of the routed experts; see `FusedMoE.forward`.

        With ``reduce_results`` both are summed over the ranks.
        """
        if self.gate is not None:
            found = self.gate(hidden_states)
            router_logits = found[0] if isinstance(found, tuple) else found
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        if shared is not None and self.ranks.sums:
            self.ranks.sum_all(shared := shared.clone())
        return shared, super().forward(hidden_states, router_logits, input_ids)
