"""A layer with parameters that an engine's loader fills, as vLLM's layer has them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import moekit
from moekit import ExpertWeights, PackedWeights
from moekit.checkpoint import PushedExperts
from moekit.errors import WeightsError
from moekit_vllm.packed import copy, forms, tensors


class LoadingLayer(moekit.FusedMoE):
    """moekit's layer with parameters, `weight_loader` and `process_weights_after_loading`.

    A subclass calls `prepare_loading` after the constructor of `moekit.FusedMoE`.
    """

    def prepare_loading(self, make_loader: Callable[..., PushedExperts]) -> None:
        """Make the parameters.

        Args:
            make_loader: `PushedExperts` with all arguments except ``experts`` and ``out``.
        """
        self._make_loader = make_loader
        self._pushed = make_loader(experts=self.local_experts)
        self._lock = threading.Lock()  # loaders may push from several threads
        # What this layer packed from its parameters, which the next update overwrites.
        self._own: PackedWeights | None = None
        # A cycle of references would keep a dropped model's memory.
        this: Any = weakref.proxy(self)
        self.flow.advice = partial(type(self)._advice, this)
        for which in ("w13", "w2"):
            for suffix in self._pushed.suffixes:
                parameter = nn.Parameter(torch.empty(0, device=self.device), requires_grad=False)
                vars(parameter)["weight_loader"] = partial(type(self).weight_loader, this)
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
                self._show_storage()
        return needed if return_success else None

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
        packed, own = self.kernel.pack(self._pushed.finish()), self._own
        if own is not None and forms(own) == forms(packed):
            copy(packed, into=own)
            packed = own
        self.packed = self._own = packed
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors(packed).values()}
        for which, held in list(self._pushed.out.items()):
            if held.untyped_storage().data_ptr() not in used:
                self._pushed.release(which)
        self._show_storage()

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
        """Free the parameters, and what `moekit.FusedMoE.destroy` frees; idempotent."""
        self._free()
        super().destroy()

    def _free(self) -> None:
        self._pushed.release("w13", "w2")
        self._own = None
        self._show_storage()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadingLayer:
        # The parameters stay as the layer was composed.
        held, self._parameters = self._parameters, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = held
        return self

    def _save_to_state_dict(self, *args: Any, **keywords: Any) -> None:
        """Save nothing: the parameters hold weights in moekit's layout, until they are packed."""

    def _load_from_state_dict(
        self, state_dict: object, prefix: str, metadata: object, strict: bool, missing: list[str],
        *more: object,
    ) -> None:  # fmt: skip
        """Load nothing, and report the parameters as missing: `weight_loader` loads them."""
        missing += [f"{prefix}{name} (pass it to weight_loader())" for name in self._parameters]
