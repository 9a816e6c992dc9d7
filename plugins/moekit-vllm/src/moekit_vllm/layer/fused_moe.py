"""`FusedMoE` with the interface of vLLM's layer of that name, in its versions 0.9 to 0.14.

It also takes those keywords of later versions, up to 0.33, that change what the layer computes.

A model file that is written against vLLM's layer runs with one changed import::

    from moekit_vllm import FusedMoE

moekit computes, and vLLM need not be installed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moekit
from moekit import Activation, ExpertWeights, LayerParallelism, PackedWeights, QuantScheme
from moekit.checkpoint import PushedExperts
from moekit.engines.packed import copy, forms, tensors
from moekit.errors import WeightsError
from moekit_vllm.layer import keywords as vllm


class FusedMoE(moekit.FusedMoE):
    """A layer of routed experts with vLLM's constructor, parameters and weight loader::

        self.experts = FusedMoE(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336,
                                tp_size=2, quant_config=quant_config, prefix=f"{prefix}.experts")
        ...
        out = self.experts(hidden_states=hidden_states, router_logits=router_logits)

    `parameters` lists what a loader fills: ``w13_weight``, ``w2_weight``, ``w13_weight_scale`` and
    so on, as the checkpoint's tensors are called. All are empty, because the layer converts tensors
    as they arrive. Pass them to `weight_loader`, then call `process_weights_after_loading`, which
    packs them. Loading again updates the weights.

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
        keywords: Other arguments of `moekit.FusedMoE`, and vLLM's ``use_grouped_topk`` (without
            it, groups are ignored), ``swiglu_limit``, ``swiglu_alpha``, ``swiglu_beta``,
            ``activation_situ_beta`` and ``activation_situ_linear_beta``.

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
        keywords["reduce_results"] = reduce_results
        vllm.set_ranks(keywords, tp_size, ep_size, dp_size)
        fields = {n: v for n, v in keywords.items() if n in LayerParallelism.__dataclass_fields__}
        spread = LayerParallelism(**fields)
        sizes = (hidden_size, intermediate_size, spread.config().tp_size)
        format, scheme = vllm.resolve(quant_config, quant, dequantize, sizes, prefix or "experts")
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
        self._make_loader = partial(
            PushedExperts,
            self.problem,
            format,
            dequantize=dequantize and bool(format.dtype),
            interleaved=self.problem.activation.name == "swigluoai" and alternates,
            transposed=is_fused_checkpoint_transposed,
            device=self.device,
            name=self.prefix,
        )
        self._pushed = self._make_loader(experts=self.local_experts)
        self._lock = threading.Lock()  # loaders may push from several threads
        # What this layer packed from pushed tensors, which the next update overwrites.
        self._own: PackedWeights | None = None
        self._make_parameters()

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

    # -- weights ----------------------------------------------------------------------------

    def _make_parameters(self) -> None:
        # A cycle of references would keep a dropped model's memory.
        this: Any = weakref.proxy(self)
        self.flow.advice = partial(FusedMoE._advice, this)
        empty = torch.empty(0, dtype=self.problem.dtype, device=self.device)
        for which in ("w13", "w2"):
            for suffix in self._pushed.suffixes:
                parameter = nn.Parameter(empty.clone(), requires_grad=False)
                vars(parameter)["weight_loader"] = partial(FusedMoE.weight_loader, this)
                self.register_parameter(f"{which}_{suffix}", parameter)

    @torch.no_grad()
    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Load one tensor of a checkpoint, as vLLM's loaders call it.

        Args:
            param: The parameter of this layer to load into.
            loaded_weight: The whole tensor for one expert, or a stack for all experts. It is not
                kept, so its memory may be reused.
            weight_name: Has no effect: the parameter says what is loaded.
            shard_id: "w1" (gate), "w3" (up), "w2" (down), or "w13" for gate and up in one tensor.
            expert_id: The physical expert, as in `make_expert_params_mapping`.
            return_success: Return whether this rank needs the tensor, instead of None.

        Raises:
            WeightsError: The tensor or an argument does not fit. Loading may go on with the right
                one.
        """
        name = next((name for name, own in self._parameters.items() if own is param), "")
        if not name:
            raise WeightsError(
                f"{self.prefix}: param is no parameter of this layer: pass one of "
                f"{', '.join(self._parameters)}"
            )
        with self._lock:
            if not self._pushed.loading and self._pushed.experts != self.local_experts:
                # `moekit.eplb` has moved experts since, and they are loaded to where they are now.
                self._pushed = self._make_loader(experts=self.local_experts, out=self._pushed.out)
            try:
                needed = self._pushed.push(
                    name.partition("_")[2], shard_id, expert_id, loaded_weight
                )
            finally:
                if self._pushed.loading:
                    self.packed = None
        return needed if return_success else None

    @torch.no_grad()
    def process_weights_after_loading(self) -> None:
        """Pack what was loaded, on every rank by itself; without anything new, do nothing.

        After an update the packed weights stay where they were, so captured CUDA graphs remain
        valid. Where the backend packs a copy, what was pushed is freed: call this for each layer as
        soon as it is loaded, and only one layer's weights are held twice.

        Raises:
            WeightsError: Lists tensors that are missing, or values that do not fit.
        """
        if self.packed is not None and not self._pushed.loading:
            return
        packed, own = self.kernel.pack(self._pushed.finish()), self._own
        if own is not None and forms(own) == forms(packed):
            copy(packed, into=own)
            packed = own
        self.packed = self._own = packed
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors(packed).values()}
        for which, held in list(self._pushed.out.items()):
            if held.untyped_storage().data_ptr() not in used:
                self._pushed.release(which)

    def load_weights(self, weights: ExpertWeights) -> None:
        """Pack weights of the caller's, as `moekit.FusedMoE.load_weights` does."""
        self._free()
        super().load_weights(weights)

    @classmethod
    def make_expert_params_mapping(
        cls,
        model: nn.Module | None = None,
        /,
        *,
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
    ) -> list[tuple[str, str, int, str]]:
        """Return which tensor of a checkpoint belongs into which parameter.

        Args:
            model: Has no effect; newer versions of vLLM pass it.
            ckpt_gate_proj_name: What the checkpoint calls the gate projection; without a gate, the
                up projection. ``ckpt_up_proj_name`` is then "".
            num_redundant_experts: Replicas, which repeat the first experts.

        Returns:
            For each physical expert (``experts.w13_``, ``experts.0.gate_proj.``, its number, "w1")
            and so on: replace the second in a name by the first to get a parameter's name.
        """
        shards = {"w1": ckpt_gate_proj_name, "w2": ckpt_down_proj_name, "w3": ckpt_up_proj_name}
        return [
            (
                f"experts.{'w2' if shard == 'w2' else 'w13'}_",
                f"experts.{physical % num_experts}.{name}.",
                physical,
                shard,
            )
            for physical in range(num_experts + num_redundant_experts)
            for shard, name in shards.items()
            if name
        ]

    def _advice(self) -> str:
        """Say what to do for a call without weights."""
        if lacking := self._pushed.lacking():
            return (
                f"{lacking}; pass them to weight_loader(), then call "
                "process_weights_after_loading()"
            )
        return "call process_weights_after_loading(), which packs what was loaded"

    # -- the module -------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free what was pushed, and what `moekit.FusedMoE.destroy` frees; idempotent."""
        self._free()
        super().destroy()

    def _free(self) -> None:
        self._pushed.release("w13", "w2")
        self._own = None

    def _save_to_state_dict(self, *args: Any, **keywords: Any) -> None:
        """Save nothing: the parameters are empty."""

    def _load_from_state_dict(
        self, state_dict: object, prefix: str, metadata: object, strict: bool, missing: list[str],
        *more: object,
    ) -> None:  # fmt: skip
        """Load nothing, and report the parameters as missing: `weight_loader` loads them."""
        missing += [f"{prefix}{name} (pass it to weight_loader())" for name in self._parameters]


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
