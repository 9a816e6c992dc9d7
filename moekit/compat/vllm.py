"""`FusedMoE` with the interface of vLLM's layer of that name, in its versions 0.9 to 0.14.

A model file that is written against vLLM's layer runs with one changed import::

    from moekit.compat.vllm import FusedMoE

moekit computes, and vLLM need not be installed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moekit.checkpoint.pushed import PushedExperts
from moekit.compat import arguments
from moekit.compat.quantization import resolve
from moekit.contract import PackedWeights
from moekit.errors import WeightsError
from moekit.layer.layer import FusedMoE as Layer
from moekit.problem.activation import Activation
from moekit.problem.weights import ExpertWeights
from moekit.untrusted.arguments import (
    FLAG,
    FUNCTION,
    MAX_EXPERTS,
    MAX_WIDTH,
    NAME,
    accept,
    optional,
    sequence,
    shown,
    size,
)

Mapped = tuple[str, str, int, str]
"""(parameter name, checkpoint name, physical expert, shard), as in vLLM's expert mappings."""


class FusedMoE(Layer):
    """A layer of routed experts with vLLM's constructor, parameters and weight loader::

        self.experts = FusedMoE(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336,
                                tp_size=2, quant_config=quant_config, prefix=f"{prefix}.experts")
        ...
        out = self.experts(hidden_states=hidden_states, router_logits=router_logits)

    `parameters` lists what a loader fills: ``w13_weight``, ``w2_weight``, ``w13_weight_scale`` and
    so on, as the checkpoint's tensors are called. Only the parameters of weights hold values, in
    moekit's layout; those of scales and the like are empty, because they are converted as they
    arrive. Pass tensors to `weight_loader`, then call `process_weights_after_loading`, which packs
    them. Loading again updates the weights.

    Args:
        num_experts: Routed experts of the whole model.
        top_k: Experts of each token.
        hidden_size: H.
        intermediate_size: I of the whole model.
        params_dtype: Dtype of activations and unquantized weights. Default: torch's default dtype.
        reduce_results: Sum the ranks' outputs. By default the caller sums.
        renormalize: Scale each token's weights to a sum of one.
        use_grouped_topk: Choose experts from the best groups. Without it, groups are ignored.
        num_expert_group: Number of expert groups.
        topk_group: Number of groups that a token's experts may come from.
        quant_config: How the checkpoint stores experts: a model's ``quantization_config``, an
            object of vLLM's QuantizationConfig, or a scheme of moekit or its name, whose tensors
            are called as compressed-tensors does (fp8 per tensor and in blocks: as DeepSeek does).
        tp_size: Tensor-parallel ranks; the rank comes from torch.distributed.
        ep_size: 1, or all ranks: each holds whole experts.
        dp_size: Number of token batches that the ranks hold.
        prefix: The layer's name, unique among living layers.
        custom_routing_function: ``(hidden_states, gating_output, topk, renormalize) -> (weights,
            ids)``, called with these keywords in place of all routing options.
        scoring_func: "softmax", "sigmoid" or "sqrtsoftplus".
        routed_scaling_factor: Multiplies the weights.
        e_score_correction_bias: (E,), added to the scores for the choice only.
        apply_router_weight_on_input: Scale each token instead of its result; needs ``top_k=1``.
        activation: A name, or an `Activation`.
        is_act_and_mul: False removes the gate; pass its experts' only projection as "w1".
        enable_eplb: Allow redundant experts, whose load `moekit.eplb` balances.
        num_redundant_experts: Replicas beyond one of each expert.
        has_bias: The experts have biases.
        is_sequence_parallel: Ranks that hold the same tokens each dispatch a share of them.
        expert_mapping: What `load_weights` needs, from `make_expert_params_mapping`.
        zero_expert_num: Number of identity experts.
        zero_expert_type: "identity" or None.
        is_fused_checkpoint_transposed: Tensors of all experts hold matrices as (in, out).
        dequantize: Convert weights of the checkpoint's format to ``params_dtype``.
        keywords: Arguments of `moekit.FusedMoE` that vLLM's layer does not have: ``parallelism``,
            ``parallel``, ``group``, ``expert_placement_strategy``, ``device``, ``max_num_tokens``,
            ``dispatcher``, ``experts``, ``checked``, ``peer_timeout``, and ``quant``, the scheme,
            if not the one that fits best.

    Raises:
        InvalidProblem: A keyword is unknown, or values do not fit each other.
        GroupMismatch: The process group does not fit, or ranks passed different arguments.
        BackendError: No backend can run the problem; see `moekit.compose`.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., Any] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: Activation | str = "silu",
        is_act_and_mul: bool = True,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        expert_mapping: list[Mapped] | None = None,
        zero_expert_num: int = 0,
        zero_expert_type: str | None = None,
        is_fused_checkpoint_transposed: bool = False,
        dequantize: bool = False,
        **keywords: Any,
    ) -> None:
        accept(_KINDS, locals())
        rest = arguments.take_rest(keywords, inspect.signature(FusedMoE).parameters)
        spread = arguments.parallelism(
            rest.pop("parallelism", None),
            tp_size=tp_size,
            ep_size=ep_size,
            dp_size=dp_size,
            is_sequence_parallel=is_sequence_parallel,
            enable_eplb=enable_eplb,
            num_redundant_experts=num_redundant_experts,
            reduce_results=reduce_results,
            **{name: rest.pop(name) for name in _OF_PARALLELISM if name in rest},
        )
        sizes = (hidden_size, intermediate_size, spread.config().tp_size)
        format, scheme = resolve(
            quant_config, rest.pop("quant", None), dequantize, sizes, prefix or "experts"
        )
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            params_dtype=torch.get_default_dtype() if params_dtype is None else params_dtype,
            quant=scheme,
            activation=activation,
            is_act_and_mul=None if is_act_and_mul else False,
            has_bias=has_bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            routing=arguments.routing(
                renormalize=renormalize,
                use_grouped_topk=use_grouped_topk,
                num_expert_group=num_expert_group,
                topk_group=topk_group,
                custom_routing_function=custom_routing_function,
                scoring_func=scoring_func,
                routed_scaling_factor=routed_scaling_factor,
                e_score_correction_bias=e_score_correction_bias,
                zero_expert_num=zero_expert_num,
                zero_expert_type=zero_expert_type,
            ),
            parallelism=spread,
            prefix=prefix or None,
            **rest,
        )
        self.expert_mapping, self.quant_config = expert_mapping, quant_config
        self._group = spread.group
        self._make_loader = partial(
            PushedExperts,
            self.problem,
            format,
            dequantize=dequantize and bool(format.dtype),
            interleaved=self.problem.activation.name == "swigluoai",
            transposed=is_fused_checkpoint_transposed,
            device=self.device,
            name=self.prefix,
        )
        self._pushed = self._make_loader(experts=self.local_experts)
        self._own: PackedWeights | None = None  # those that this layer packed from its parameters
        self._replaced: PackedWeights | None = None  # those that an update replaces
        self._register_parameters()

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, router_logits: Tensor
    ) -> Tensor:
        """Compute the layer's output.

        Args:
            hidden_states: (..., H) in params_dtype.
            router_logits: (..., E + identity experts), any float dtype.

        Returns:
            (..., H) in params_dtype; this rank's partial sum if `partial`.

        Raises:
            InvalidInput: A tensor does not fit; the other ranks then raise PeerFailed.
            WeightsError: The weights are not loaded and processed.
        """
        return super().forward(hidden_states, router_logits)

    # -- parameters -------------------------------------------------------------------------

    def _register_parameters(self) -> None:
        this = weakref.ref(self)  # a cycle of references would keep a dropped model's memory

        def load(*arguments: Any, **keywords: Any) -> bool | None:
            if (layer := this()) is None:
                raise WeightsError("the layer of this parameter is gone: keep it while loading")
            return layer.weight_loader(*arguments, **keywords)

        self.flow.advice = lambda: "" if (layer := this()) is None else layer._advice()
        for which in ("w13", "w2"):
            for suffix in self._pushed.suffixes:
                parameter = nn.Parameter(torch.empty(0, device=self.device), requires_grad=False)
                parameter.weight_loader = load  # type: ignore[attr-defined]
                self.register_parameter(f"{which}_{suffix}", parameter)
        self._show_storage()

    def _show_storage(self) -> None:
        """Let the parameters of weights hold what was pushed, or nothing after it is freed."""
        for which in ("w13", "w2"):
            parameter = self.get_parameter(f"{which}_{self._pushed.weight_suffix}")
            held = self._pushed.out.get(which)
            if held is None:
                held = parameter.data.new_empty(0)
            if parameter.data_ptr() != held.data_ptr() or parameter.shape != held.shape:
                parameter.data = held

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
            loaded_weight: The whole tensor for one expert, or a stack of those of all experts. It
                is not kept, so its memory may be reused.
            weight_name: The parameter's name, with any prefix.
            shard_id: "w1" (gate), "w3" (up), "w2" (down), or "w13" for gate and up in one tensor.
            expert_id: The physical expert, as in `make_expert_params_mapping`.
            return_success: Return whether this rank needs the tensor, instead of None.

        Raises:
            WeightsError: The tensor or an argument does not fit. Loading may go on with the right
                one.
        """
        which, suffix = self._name_of(param, weight_name)
        accept({"return_success": FLAG}, {"return_success": return_success}, WeightsError)
        known = self._pushed.shards(which)
        if not isinstance(shard_id, str) or shard_id not in known:
            raise WeightsError(
                f"{self.prefix}: shard_id={shown(shard_id)} for {which}_{suffix}: expected "
                f"{' or '.join(known)}"
            )
        if not self._pushed.loading and self._pushed.experts != self.local_experts:
            # `moekit.eplb` has moved experts since, and they are loaded to where they are now.
            self._pushed = self._make_loader(experts=self.local_experts, out=self._pushed.out)
        try:
            needed = self._pushed.push(suffix, shard_id, expert_id, loaded_weight)
        finally:
            if self._pushed.loading and self.packed is not None:
                # Tensors that `load_weights` was given are the caller's, and are not written to.
                self._replaced = self.packed if self.packed is self._own else None
                self.packed = self._own = None
            self._show_storage()
        return needed if return_success else None

    def _name_of(self, param: nn.Parameter, weight_name: str) -> tuple[str, str]:
        """Return ("w13" or "w2", suffix) of a parameter; raise WeightsError unless it is known."""
        name = next((name for name, own in self._parameters.items() if own is param), None)
        if name is None:
            raise WeightsError(
                f"{self.prefix}: {shown(weight_name)} is loaded into a tensor that is no parameter "
                f"of this layer: pass one of {', '.join(self._parameters)}"
            )
        if not isinstance(weight_name, str) or weight_name.rpartition(".")[2] != name:
            raise WeightsError(
                f"{self.prefix}: weight_name={shown(weight_name)} for the parameter {name}: it "
                "must end in the parameter's name"
            )
        which, _, suffix = name.partition("_")
        return which, suffix

    @torch.no_grad()
    def process_weights_after_loading(self) -> None:
        """Pack what was loaded, on every rank by itself; without anything new, do nothing.

        After an update the packed weights stay where they were, so captured CUDA graphs remain
        valid. Where the backend packs a copy, the parameters are freed until the next update: call
        this for each layer as soon as it is loaded, and only one layer's weights are held twice.

        Raises:
            WeightsError: Lists tensors that are missing, or values that do not fit.
        """
        if self.packed is not None and not self._pushed.loading:
            return
        packed = self.kernel.pack(self._pushed.finish())
        self.packed = self._own = _in_place(self._replaced, packed)
        self._replaced = None
        tensors = (*self.packed.experts.values(), *self.packed.shared.values())
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for which, held in list(self._pushed.out.items()):
            if held.untyped_storage().data_ptr() not in used:
                self._pushed.release(which)
        self._show_storage()

    def load_weights(  # type: ignore[override]
        self, weights: ExpertWeights | Iterable[tuple[str, Tensor]]
    ) -> Iterator[str] | None:
        """Load (name, tensor) of a checkpoint by ``expert_mapping``, or pack `ExpertWeights`.

        Args:
            weights: Names are relative to the layer: ``0.gate_proj.weight``.

        Returns:
            An iterator that loads while it is consumed, over the names of parameters; None for
            `ExpertWeights`.

        Raises:
            WeightsError: There is no ``expert_mapping``, or a tensor does not fit.
        """
        if not isinstance(weights, ExpertWeights):
            return self._load_named(weights)
        self._pushed.release("w13", "w2")
        self._show_storage()
        self._own = self._replaced = None
        super().load_weights(weights)
        return None

    def _load_named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        if self.expert_mapping is None:
            raise WeightsError(
                f"{self.prefix}: loading by names needs expert_mapping: construct the layer with "
                "expert_mapping=FusedMoE.make_expert_params_mapping(...)"
            )
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            full, known = f"experts.{name}", False
            for param_name, weight_name, expert_id, shard_id in self.expert_mapping:
                if weight_name not in full:
                    continue
                known, mapped = True, full.replace(weight_name, param_name).removeprefix("experts.")
                param = self._parameters.get(mapped)
                if param is None and mapped.endswith("_bias") and not bool(tensor.any()):
                    continue  # some quantizers write zeros for experts without biases
                if param is None:
                    raise WeightsError(
                        f"{self.prefix}: {name} belongs into the parameter {mapped}, but this "
                        f"layer's are {', '.join(self._parameters)}: check has_bias and "
                        "quant_config"
                    )
                if self.weight_loader(param, tensor, mapped, shard_id, expert_id, True):
                    yield mapped
            if not known:
                raise WeightsError(f"{self.prefix}: expert_mapping has no entry for {name}")

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
    ) -> list[Mapped]:
        """Return which tensor of a checkpoint belongs into which parameter.

        Args:
            model: Has no effect; newer versions of vLLM pass it.
            ckpt_gate_proj_name: What the checkpoint calls the gate projection, of experts without
                a gate their up projection.
            ckpt_down_proj_name: The down projection.
            ckpt_up_proj_name: The up projection; "" for experts without a gate.
            num_experts: The model's logical experts.
            num_redundant_experts: Replicas, which repeat the first experts.

        Returns:
            For each physical expert (``experts.w13_``, ``experts.0.gate_proj.``, its number, "w1")
            and so on: replace the second in a name by the first to get a parameter's name.

        Raises:
            InvalidProblem: A number is out of range.
        """
        accept(_MAPPING, locals())
        projections = {
            "w1": ckpt_gate_proj_name,
            "w2": ckpt_down_proj_name,
            "w3": ckpt_up_proj_name,
        }
        return [
            (
                f"experts.{'w2' if shard == 'w2' else 'w13'}_",
                f"experts.{physical % num_experts}.{name}.",
                physical,
                shard,
            )
            for physical in range(num_experts + num_redundant_experts)
            for shard, name in projections.items()
            if name
        ]

    def _advice(self) -> str:
        """Say what to do for a call without weights."""
        missing = self._pushed.missing()
        if missing:
            return (
                f"{len(missing)} tensors are not loaded, {missing[0]} for example; pass them to "
                "weight_loader(), then call process_weights_after_loading()"
            )
        return "call process_weights_after_loading(), which packs what was loaded"

    # -- ranks ------------------------------------------------------------------------------

    @property
    def layer_name(self) -> str:
        """The layer's name."""
        return self.prefix

    @property
    def tp_size(self) -> int:
        """Number of ranks that hold slices of the same expert."""
        return self.problem.parallel.tp_size

    @property
    def ep_size(self) -> int:
        """Number of ranks over which whole experts are spread."""
        return self.problem.parallel.ep_size

    @property
    def global_num_experts(self) -> int:
        """Physical experts of all ranks."""
        return self.problem.num_physical_experts

    @property
    def local_num_experts(self) -> int:
        """Physical experts of this rank."""
        return self.problem.num_local_experts

    @cached_property
    def expert_map(self) -> Tensor | None:
        """The place on this rank of each physical expert, (P,) int32, -1 elsewhere; or None."""
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

    # -- the module -------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the parameters, and what `moekit.FusedMoE.destroy` frees; idempotent."""
        self._pushed.release("w13", "w2")
        self._own = self._replaced = None
        self._show_storage()
        super().destroy()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedMoE:
        held, self._parameters = self._parameters, {}  # they stay as the layer was composed
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = held
        return self

    def _save_to_state_dict(self, *args: Any, **keywords: Any) -> None:
        """Save nothing: parameters hold weights in moekit's layout, until they are packed."""

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        """Load nothing: see `weight_loader`."""


class SharedFusedMoE(FusedMoE):
    """`FusedMoE` with shared experts, whose output it returns beside that of the routed experts.

    Args:
        shared_experts: (..., H) -> (..., H), or None. The caller keeps its parameters.
        gate: Computes the router's logits from the hidden states, in place of the caller.
        use_overlapped: Has no effect: shared experts run before the routed ones.
        keywords: The arguments of `FusedMoE`.
    """

    shared_experts: Callable[[Tensor], Tensor] | None
    gate: Callable[[Tensor], Any] | None

    def __init__(
        self,
        shared_experts: Callable[[Tensor], Tensor] | None,
        gate: Callable[[Tensor], Any] | None = None,
        use_overlapped: bool = True,
        **keywords: Any,
    ) -> None:
        accept(dict.fromkeys(("shared_experts", "gate"), optional(FUNCTION)), locals())
        super().__init__(**keywords)
        # Not as submodules, because the model has their parameters under names of its own.
        object.__setattr__(self, "shared_experts", shared_experts)
        object.__setattr__(self, "gate", gate)

    @property
    def is_internal_router(self) -> bool:
        """Whether the layer computes the router's logits, and ignores those it is given."""
        return self.gate is not None

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, router_logits: Tensor
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
        return shared, super().forward(hidden_states, router_logits)


_MAPPING = {
    **dict.fromkeys(("ckpt_gate_proj_name", "ckpt_down_proj_name", "ckpt_up_proj_name"), NAME),
    "num_experts": size(1, MAX_EXPERTS),
    "num_redundant_experts": size(0, MAX_EXPERTS),
}
_OF_PARALLELISM = ("group", "parallel", "expert_placement_strategy")
_FLAGS = (
    "reduce_results",
    "renormalize",
    "use_grouped_topk",
    "apply_router_weight_on_input",
    "is_act_and_mul",
    "enable_eplb",
    "has_bias",
    "is_sequence_parallel",
    "is_fused_checkpoint_transposed",
    "dequantize",
)
_KINDS = {
    **dict.fromkeys(_FLAGS, FLAG),
    **dict.fromkeys(("hidden_size", "intermediate_size"), size(1, MAX_WIDTH)),
    "num_redundant_experts": size(0, MAX_EXPERTS),
    "zero_expert_num": optional(size(0, MAX_EXPERTS)),
    "prefix": NAME,
    "expert_mapping": optional(sequence("(parameter, name, expert, shard)", tuple)),
}


def _in_place(old: PackedWeights | None, new: PackedWeights) -> PackedWeights:
    """Copy ``new`` into the tensors of ``old`` if they are alike; return the one to use."""
    if old is None:
        return new
    pairs = []
    for ours, theirs in ((old.experts, new.experts), (old.shared, new.shared)):
        if ours.keys() != theirs.keys():
            return new
        pairs += [(ours[name], theirs[name]) for name in ours]
    if any(_layout(a) != _layout(b) for a, b in pairs):
        return new
    for a, b in pairs:
        if a.data_ptr() != b.data_ptr():
            a.copy_(b)
    return old


def _layout(tensor: Tensor) -> Mapping[str, object]:
    names = ("shape", "dtype", "device")
    return {"strides": tensor.stride(), **{name: getattr(tensor, name) for name in names}}
