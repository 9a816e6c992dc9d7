"""The kernel and packed weights of one MoE layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moekit import ExpertWeights, MoEProblem, Routing
from moekit.engines.experts import Computed, held, hold, pack
from moekit.engines.facts import refusal
from moekit.errors import WeightsError
from moekit_vllm import versions
from moekit_vllm.lora import ServedAdapters
from moekit_vllm.problem import exchanges_tokens, load
from moekit_vllm.settings import VLLM, Mode


@dataclass(eq=False)
class LayerExperts(Computed):
    """A layer's routed experts, which moekit computes instead of vLLM's kernel.

    Attributes:
        parameters: The packed weights by the names under which the layer holds them.
        lora: The adapters, or None in an engine without LoRA.
        to_physical: (P,) int64, the position of each of vLLM's physical experts in moekit's order,
            or None if both have the same order.
    """

    to_physical: Tensor | None
    parameters: Mapping[str, nn.Parameter]
    lora: ServedAdapters | None = None

    @classmethod
    def of(cls, layer: Any, method: Any, before: LayerExperts | None) -> LayerExperts:
        """Pack a layer's loaded parameters; the layer then holds the packed weights instead.

        before: What this returned before the weights were updated. If this raises, the layer is as
        it was.
        """
        if versions.prepared_elsewhere():
            raise refusal("another process has prepared its weights for vLLM's own kernels")
        may_keep = method.moekit_mode is not Mode.REQUIRE and layer.expert_map is None
        made = pack(
            VLLM,
            lambda: _load(layer, method),
            before,
            layer.layer_name,
            ranks=versions.expert_ranks,
            group=_sharing(layer),
            cpu_kernel=may_keep and versions.has_cpu_kernel(method),
            captured=versions.most_captured(),
            eager="--enforce-eager",
        )
        problem, packed = made.kernel.problem, made.packed
        order = _order(layer, problem)
        if before is None:
            served = None if problem.adapters is None else ServedAdapters(problem)
            parameters = held(layer, packed)
            before = cls(made.kernel, packed, made.captured, order, parameters, served)
        elif order is not None and before.to_physical is not None:
            before.to_physical.copy_(order)  # vLLM's sleep mode may have discarded it
        hold(layer, before.parameters)
        return before

    @property
    def dispatches(self) -> bool:
        """Return whether a dispatcher of moekit moves the tokens."""
        return self.kernel.problem.parallel.moves_tokens

    def __call__(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's partial sum (T, H) in x's dtype; the whole sum if `dispatches`.

        Args:
            x: (T, H).
            topk_weights: (T, K).
            topk_ids: (T, K) vLLM's physical experts, of all ranks.
        """
        packed, slots, most = self.packed, None, None
        if self.lora is not None:
            packed, slots = replace(packed, adapters=self.lora.stack), self.lora.ids(len(x))
        if self.dispatches:
            most = versions.most_tokens(self.kernel.problem.parallel.ep_size)
        ids = topk_ids
        if self.to_physical is not None:
            ids = torch.where(ids < 0, -1, self.to_physical[ids.clamp(min=0)])
        self.warm_up(VLLM, packed, len(x), ids.dtype, most)
        routing = Routing(topk_weights.float(), ids, max_tokens=most, adapter_ids=slots)
        return self.kernel(x, packed, routing)


def _load(layer: Any, method: Any) -> tuple[MoEProblem, ExpertWeights]:
    problem, weights = load(layer, method)
    _order(layer, problem)  # raises before the ranks compose a kernel
    return problem, weights


def _sharing(layer: Any) -> Any:
    """Return the group of the ranks that must agree about a layer: they exchange tokens.

    In engines with elastic ranks, all ranks leave the layer to vLLM, and some load it alone.
    """
    alone = not exchanges_tokens(layer) or versions.elastic()
    return None if alone else versions.expert_ranks().cpu_group


def _order(layer: Any, problem: MoEProblem) -> Tensor | None:
    """Return where vLLM's physical experts are in moekit's contiguous order, None for the same."""
    experts = layer.expert_map
    if experts is None:
        return None
    mine = problem.local_experts
    places = torch.where(experts >= 0, experts + mine.start, -1).long()
    linear = torch.full_like(places, -1)
    linear[mine.start : mine.stop] = torch.arange(mine.start, mine.stop, device=places.device)
    if torch.equal(places, linear):
        return None
    if problem.parallel.moves_tokens:
        raise refusal("moekit's dispatchers need vLLM's linear placement of experts")
    return places


def repack_(
    model: nn.Module, new: Mapping[str, ExpertWeights], checksums: Mapping[str, str] | None = None
) -> None:
    """Write new experts into layers that moekit computes in a running engine, on this rank.

    CUDA graphs use the new weights. Call it between requests in each worker, for example by
    ``LLM.collective_rpc``. A layer's weights are this rank's, as `moekit.ModularKernel.repack_`
    takes them, in the order of `MoEProblem.local_experts`.

    Args:
        model: vLLM's model, a worker's ``model_runner.model``.
        new: the weights by the layers' names in vLLM, such as "model.layers.0.mlp.experts".
        checksums: ``ExpertWeights.checksum()`` at the source, by the same names.

    Raises:
        WeightsError: A layer is missing, or its weights do not fit. Earlier layers have their new
            weights.
    """
    ours: dict[str, LayerExperts] = {}
    for layer in model.modules():
        experts = getattr(getattr(layer, "quant_method", None), "moekit_experts", None)
        if experts is not None:
            ours[str(layer.layer_name)] = experts
    sums = checksums or {}
    if unknown := sorted({*new, *sums} - ours.keys()):
        raise WeightsError(f"moekit does not compute {unknown} here, but {sorted(ours)}")
    if sums and (odd := sorted(new.keys() ^ sums.keys())):
        raise WeightsError(f"give new weights and a checksum of each layer: {odd} have one of them")
    for name, each in new.items():
        mine = ours[name]
        mine.kernel.repack_(mine.packed, each, checksum=sums.get(name), name=name)


# -- torch.compile -----------------------------------------------------------------------


@torch.library.custom_op("moekit::vllm_experts", mutates_args=())
def _operator(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    """Run a layer's experts as one operator, for code that torch.compile compiles."""
    # By vLLM's table of the engine that runs: two engines of a process have layers of one name.
    experts: LayerExperts = versions.running_layer(layer).quant_method.moekit_experts
    return experts(x, topk_weights, topk_ids)


@_operator.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
