"""The kernel and packed weights of one MoE layer, and updates of the weights in place.

A layer with packed weights keeps SGLang's parameters, because models look them up by name when they
load weights. Parameters that hold no packed weights are empty. When new weights come for the layer,
these parameters get memory again. After the last matrix, the weights are packed into the memory
that CUDA graphs use. Weights that moekit uses as SGLang holds them change with SGLang's copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moekit import Routing
from moekit.engines.experts import Computed, held, pack
from moekit.engines.facts import refusal
from moekit.errors import MoekitError
from moekit_sglang import versions
from moekit_sglang.problem import dispatches, load, scaling
from moekit_sglang.settings import SGLANG, Mode

_lock = threading.Lock()  # SGLang may load experts in several threads


@dataclass(eq=False)
class LayerExperts(Computed):
    """A layer's experts, which moekit computes instead of SGLang's kernel.

    Attributes:
        scale: The factor of the router's weights.
        emptied: The meta tensors of the layer's parameters that hold no packed weights, by name.
        awaited: The names of the parameters that an update must bring.
        room: The memory of emptied parameters while the layer receives new weights.
        came: (parameter, expert, part) of each matrix that the update has brought.
    """

    scale: float
    emptied: Mapping[str, Tensor]
    awaited: Sequence[str]
    room: dict[str, Tensor] = field(default_factory=dict)
    came: set[tuple[Any, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, layer: Any, method: Any, before: LayerExperts | None) -> LayerExperts:
        """Pack a layer's loaded parameters; the layer then holds the packed weights instead.

        before: The result of the call before the update. If this raises, the layer is unchanged.
        """
        if before is not None and before.emptied and not before.room:
            return before  # nothing new has come, or it is packed already
        if before is not None and before.room and not before._complete(layer):
            raise refusal(f"only {len(before.came)} matrices came")
        made = pack(
            SGLANG,
            lambda: load(layer, method),
            before,
            f"MoE layer {layer.layer_id}",
            ranks=versions.expert_ranks,
            group=versions.expert_ranks().cpu_group if dispatches(layer) else None,
            cpu_kernel=method.moekit_mode is not Mode.REQUIRE and versions.has_cpu_kernel(),
            captured=versions.most_captured(),
            eager="--disable-cuda-graph",
        )
        if before is not None:
            before._empty(layer)
            return before
        kernel, packed = made.kernel, made.packed
        awaited, parameters = _awaited(layer, method.moekit_loaded), held(layer, packed)
        own = dict(layer.named_parameters(recurse=False))
        emptied = {
            name: param.detach().to("meta")
            for name, param in own.items()
            if name not in parameters and param.numel()
        }
        taken = cls(kernel, packed, made.captured, scaling(layer), emptied, awaited)
        for name, parameter in parameters.items():
            layer.register_parameter(name, parameter)
        taken._empty(layer)
        # Before the engine serves; its router's kernels return ids of 32 bits.
        most = versions.most_scheduled()
        taken.warm_up(SGLANG, packed, most, torch.int32, most)
        layer.deprecate_flag = True  # DeepEPMoE: SGLang's name for "the method computes the layer"
        layer.dispatcher.skip_local_expert_mapping = True  # moekit takes ids of all ranks' experts
        return taken

    def __call__(self, x: Tensor, chosen: Any) -> Tensor:
        """Return this rank's partial sum (T, H) in x's dtype; the whole sum if moekit dispatches.

        Args:
            x: (T, H).
            chosen: SGLang's output of the router, with weights and physical ids (T, K).
        """
        if self.room:
            raise MoekitError(
                f"only {len(self.came)} matrices of new weights have come for an MoE layer: send "
                "the others before the next request"
            )
        most = versions.most_tokens() if self.kernel.problem.parallel.moves_tokens else None
        self.warm_up(SGLANG, self.packed, len(x), chosen.topk_ids.dtype, most)
        weights = chosen.topk_weights.float()
        if self.scale != 1.0:
            weights = weights * self.scale
        routing = Routing(weights, chosen.topk_ids, max_tokens=most)
        return self.kernel(x, self.packed, routing)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.packed.experts.values())).device

    # -- new weights in place ------------------------------------------------------------

    def make_room(self, layer: Any) -> None:
        """Give a layer's emptied parameters memory for the checkpoint's layout."""
        with _lock:
            for name, meta in {} if self.room else self.emptied.items():
                self.room[name] = torch.zeros_like(meta, device=self._device)
                getattr(layer, name).data = self.room[name]

    def received(self, layer: Any, param: Any, expert: int | None, part: str) -> None:
        """Note a matrix that SGLang has loaded; pack the layer's weights after the last one.

        expert: One of this rank's experts, or None for all. part: "w1", "w2", "w3" or "w13".
        """
        with _lock:
            self.came.add((id(param), expert, part))
            full = expert is None or len(self.came) % layer.num_local_experts == 0
            last = full and bool(self.room) and self._complete(layer)
        if last:
            layer.quant_method.process_weights_after_loading(layer)

    def _complete(self, layer: Any) -> bool:
        """Return whether every expert's parts of every awaited parameter have come."""
        for name in self.awaited:
            param = getattr(layer, name)
            came = {key[1:] for key in self.came if key[0] == id(param)}
            if any(expert is None for expert, _ in came):
                continue
            parts = {part for _, part in came}
            if name.startswith("w13") and layer.moe_runner_config.is_gated and parts != {"w13"}:
                parts |= {"w1", "w3"}
            if len(came) < layer.num_local_experts * max(len(parts), 1):
                return False
        return True

    def _empty(self, layer: Any) -> None:
        """Free the parameters that hold no packed weights; they keep their names and loaders."""
        for name, meta in self.emptied.items():
            getattr(layer, name).data = torch.empty(0, dtype=meta.dtype, device=self._device)
        self.room.clear()
        self.came.clear()


def _awaited(layer: Any, loaded: set[int]) -> list[str]:
    """Return the names of the parameters that SGLang has ``loaded`` (ids).

    If it has loaded no file (load_format dummy), return the names that checkpoints have.
    """
    own = {n: p for n, p in layer.named_parameters(recurse=False) if hasattr(p, "weight_loader")}
    if any(id(param) in loaded for param in own.values()):
        return [name for name, param in own.items() if id(param) in loaded]
    return [name for name in own if not name.endswith(("_idx", "_sort_indices", "_shape"))]
