"""The kernel and packed weights of one MoE layer, and updates of the weights in place.

A layer with packed weights keeps SGLang's parameters, because models look them up by name when they
load weights. Parameters that hold no packed weights are empty. When new weights come for one of
them, all get room again, and when the last has come, the weights are packed into the memory that
CUDA graphs hold. Weights that moekit computes with as SGLang holds them change by SGLang's copy
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moekit import ModularKernel, PackedWeights, Routing
from moekit.engines.kernels import kernel_for, on_all_ranks, warm_up
from moekit.engines.packed import against_graphs, copy, held
from moekit.engines.weights import refusal
from moekit.errors import MoekitError
from moekit_sglang import versions
from moekit_sglang.problem import dispatches, problem_of, scaling
from moekit_sglang.settings import SGLANG, Mode
from moekit_sglang.weights import read

_receiving: dict[int, Any] = {}  # layers that have received some of their new weights
_lock = threading.Lock()  # SGLang may load experts in several threads


@dataclass(eq=False)
class LayerExperts:
    """The kernel and packed weights that compute a layer's experts instead of SGLang's kernel.

    Attributes:
        kernel: Shared by layers with equal problems.
        packed: The weights. Those that belong to one expert are parameters of the layer, so that
            SGLang moves experts between ranks (EPLB) as it does with its own.
        scale: The factor of the router's weights.
        emptied: The meta tensors of the layer's parameters that hold no packed weights, by name.
        room: The memory of emptied parameters while the layer receives new weights.
        received: (parameter, expert, part) of each new matrix.
    """

    kernel: ModularKernel
    packed: PackedWeights
    scale: float
    emptied: Mapping[str, Tensor]
    room: dict[str, Tensor] = field(default_factory=dict)
    received: set[tuple[Any, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, layer: Any, method: Any, before: LayerExperts | None) -> LayerExperts:
        """Pack a layer's loaded parameters; the layer then holds the packed weights instead.

        before: What this returned before the weights were updated. It keeps its memory, which CUDA
        graphs may have captured. If this raises, the layer is as it was.
        """
        if before is not None and before.emptied and not before.room:
            return before  # nothing new has come
        group = versions.expert_ranks().cpu_group if dispatches(layer) else None
        with torch.inference_mode(False), torch.no_grad():
            with on_all_ranks(group, SGLANG):  # before others wait for this rank in `compose`
                quant, loaded = read(layer, method)
                problem = problem_of(layer, quant, loaded)
            cpu_kernel = method.moekit_mode is not Mode.REQUIRE and versions.has_cpu_kernel()
            with on_all_ranks(group, SGLANG):
                kernel = kernel_for(
                    problem, SGLANG, lambda: versions.expert_ranks().device_group, cpu_kernel
                )
                packed = kernel.pack(loaded)
                graphs = problem.device.type == "cuda" and versions.captures_graphs()
                captures = "SGLang --disable-cuda-graph" if graphs else ""
                held_before = None if before is None else before.packed
                if reasons := against_graphs(kernel, packed, held_before, captures):
                    raise refusal(*reasons)
            del loaded
            if before is not None:
                copy(packed, into=before.packed)
                before._empty(layer)
                return before
            parameters = held(layer, packed)
            made = cls(kernel, packed, scaling(layer), _meta(layer, parameters))
            for name, parameter in parameters.items():
                layer.register_parameter(name, parameter)
            made._empty(layer)
        layer.deprecate_flag = True  # DeepEPMoE: SGLang's name for "the method computes the layer"
        layer.dispatcher.skip_local_expert_mapping = True  # moekit takes ids of all ranks' experts
        return made

    def __call__(self, x: Tensor, chosen: Any) -> Tensor:
        """Return this rank's partial sum (T, H) in x's dtype; the whole sum if moekit dispatches.

        Args:
            x: (T, H).
            chosen: SGLang's output of the router, with weights and physical experts (T, K).
        """
        if self.room:
            raise MoekitError(
                f"{len(self.received)} matrices of new weights have come for an MoE layer, which "
                "are not all; send the others before the next request"
            )
        warm_up(self.kernel, self.packed, len(x))
        weights = chosen.topk_weights.float()
        if self.scale != 1.0:
            weights = weights * self.scale
        most = versions.most_tokens() if self.kernel.problem.parallel.moves_tokens else None
        routing = Routing(weights, chosen.topk_ids, max_tokens=most)
        return self.kernel(x, self.packed, routing)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.packed.experts.values())).device

    # -- new weights in place ------------------------------------------------------------

    def receive(self, layer: Any, param: Any, expert: int | None, part: str) -> None:
        """Give a layer's emptied parameters room, and note which matrix SGLang loads into one.

        expert, part: Which of this rank's experts, or None for all; and "w1", "w2", "w3" or "w13".
        """
        if not self.emptied:
            return
        with _lock:
            if not self.room:
                for name, meta in self.emptied.items():
                    self.room[name] = torch.zeros_like(meta, device=self._device)
                    getattr(layer, name).data = self.room[name]
            _receiving[id(layer)] = layer
            self.received.add((id(param), expert, part))

    def complete(self, layer: Any) -> bool:
        """Return whether every expert's parts of every parameter with a loader have come."""
        for name, param in layer.named_parameters(recurse=False):
            if not hasattr(param, "weight_loader") or name.endswith("_sort_indices"):
                continue
            came = {key[1:] for key in self.received if key[0] == id(param)}
            if any(expert is None for expert, _ in came):
                continue
            parts = {part for _, part in came} or {"w1"}
            if name.startswith("w13") and layer.moe_runner_config.is_gated and parts != {"w13"}:
                parts = {"w1", "w3"}
            if len(came) < layer.num_local_experts * len(parts):
                return False
        return True

    def _empty(self, layer: Any) -> None:
        """Free the parameters that hold no packed weights; they keep their names and loaders."""
        for name, meta in self.emptied.items():
            getattr(layer, name).data = torch.empty(0, dtype=meta.dtype, device=self._device)
        self.room.clear()
        self.received.clear()
        _receiving.pop(id(layer), None)


def _meta(layer: Any, kept: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the layer's parameters outside ``kept`` that have elements, as meta tensors."""
    own = dict(layer.named_parameters(recurse=False))
    return {n: p.detach().to("meta") for n, p in own.items() if n not in kept and p.numel()}


def finish_updates() -> None:
    """Pack the weights of layers that have received all of theirs."""
    for layer in list(_receiving.values()):
        experts = layer.quant_method.moekit_experts
        if experts.complete(layer):
            layer.quant_method.process_weights_after_loading(layer)
