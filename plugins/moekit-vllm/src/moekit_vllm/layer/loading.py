"""A layer with parameters that an engine's loader fills, as vLLM's layer has them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import moekit
from moekit import ExpertWeights, PackedWeights
from moekit.checkpoint import PushedExperts
from moekit.errors import WeightsError
from moekit_vllm.packed import copy, forms

Mapped = tuple[str, str, int, str]
"""(parameter name, checkpoint name, physical expert, shard), as in vLLM's expert mappings."""


class LoadingLayer(moekit.FusedMoE):
    """moekit's layer with parameters, `weight_loader` and `process_weights_after_loading`.

    A subclass calls `prepare_loading` after the constructor of `moekit.FusedMoE`.
    """

    def prepare_loading(
        self, make_loader: Callable[..., PushedExperts], expert_mapping: list[Mapped] | None
    ) -> None:
        """Make the parameters.

        Args:
            make_loader: `PushedExperts` with all arguments except ``experts`` and ``out``.
            expert_mapping: What `load_weights` needs.
        """
        self.expert_mapping, self._make_loader = expert_mapping, make_loader
        self._pushed = make_loader(experts=self.local_experts)
        self._lock = threading.Lock()  # loaders may push from several threads
        self._own: PackedWeights | None = None  # those that this layer packed from its parameters
        self._replaced: PackedWeights | None = None  # those that an update replaces
        self._register_parameters()

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
        which, suffix = self._name_of(param)
        known = self._pushed.shards(which)
        if shard_id not in known:
            raise WeightsError(
                f"{self.prefix}: shard_id={shard_id!r} for {which}_{suffix}: expected "
                f"{' or '.join(known)}"
            )
        with self._lock:
            if not self._pushed.loading and self._pushed.experts != self.local_experts:
                # `moekit.eplb` has moved experts since, and they are loaded to where they are now.
                self._pushed = self._make_loader(experts=self.local_experts, out=self._pushed.out)
            try:
                needed = self._pushed.push(suffix, shard_id, expert_id, loaded_weight)
            finally:
                if self._pushed.loading and self.packed is not None:
                    # `load_weights` was given the caller's tensors, which are not written to.
                    self._replaced = self.packed if self.packed is self._own else None
                    self.packed = self._own = None
                self._show_storage()
        return needed if return_success else None

    def _name_of(self, param: nn.Parameter) -> tuple[str, str]:
        """Return ("w13" or "w2", suffix) of a parameter; raise WeightsError unless it is known."""
        for name, own in self._parameters.items():
            if own is param:
                which, _, suffix = name.partition("_")
                return which, suffix
        raise WeightsError(
            f"{self.prefix}: param is no parameter of this layer: pass one of "
            f"{', '.join(self._parameters)}"
        )

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
        packed, old = self.kernel.pack(self._pushed.finish()), self._replaced
        if old is not None and forms(old) == forms(packed):
            copy(packed, into=old)
            packed = old
        self.packed, self._own, self._replaced = packed, packed, None
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
            ckpt_gate_proj_name: What the checkpoint calls the gate projection; without a gate, the
                up projection. ``ckpt_up_proj_name`` is then "".
            num_redundant_experts: Replicas, which repeat the first experts.

        Returns:
            For each physical expert (``experts.w13_``, ``experts.0.gate_proj.``, its number, "w1")
            and so on: replace the second in a name by the first to get a parameter's name.
        """
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
        if lacking := self._pushed.lacking():
            return (
                f"{lacking}; pass them to weight_loader(), then call "
                "process_weights_after_loading()"
            )
        return "call process_weights_after_loading(), which packs what was loaded"

    # -- the module -------------------------------------------------------------------------

    def destroy(self) -> None:
        """Free the parameters, and what `moekit.FusedMoE.destroy` frees; idempotent."""
        self._pushed.release("w13", "w2")
        self._own = self._replaced = None
        self._show_storage()
        super().destroy()

    @contextmanager
    def _without_parameters(self) -> Iterator[None]:
        """Hide the parameters: they hold weights in moekit's layout, until these are packed."""
        held, self._parameters = self._parameters, {}
        try:
            yield
        finally:
            self._parameters = held

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadingLayer:
        with self._without_parameters():  # they stay as the layer was composed
            super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, *args: Any, **keywords: Any) -> None:
        """Save nothing."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        *more: Any,
    ) -> None:
        """Load nothing, and report the parameters as missing: `weight_loader` loads them."""
        with self._without_parameters():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, *more
            )
        names = ", ".join(f"{prefix}{name}" for name in self._parameters)
        missing_keys.append(
            f"{names} (a state_dict does not hold them: pass the checkpoint's tensors to "
            "weight_loader(), call process_weights_after_loading(), and load the other modules "
            "with strict=False)"
        )
