"""The kernel and packed weights of one MoE layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

import moekit
from moekit import ModularKernel, MoEProblem, PackedWeights, Routing
from moekit.errors import MoekitError, Unsupported
from moekit.problem.problem import summary
from moekit_vllm import versions, weights
from moekit_vllm.problem import problem_of
from moekit_vllm.settings import say_once

# Experts that are right everywhere and fast nowhere on a GPU: vLLM's own kernels are faster.
_SLOW_ON_GPUS = frozenset({"reference", "torch"})

_kernels: dict[MoEProblem, ModularKernel] = {}
_by_name: WeakValueDictionary[str, LayerExperts] = WeakValueDictionary()


@dataclass(eq=False)
class LayerExperts:
    """What computes a layer's routed experts instead of vLLM's kernel.

    Attributes:
        kernel: Shared by layers with equal problems.
        packed: The weights; each is a parameter of the layer, or a buffer if it belongs to no
            single expert. So vLLM moves experts between ranks (EPLB), counts memory and restores
            weights as it does for its own.
        to_physical: (P,) int64, the place of each of vLLM's physical experts in moekit's order,
            or None if both have the same order.
        names: What the layer calls the packed tensors. vLLM restores them by name after it has
            loaded weights into parameters made anew.
    """

    kernel: ModularKernel
    packed: PackedWeights
    to_physical: Tensor | None
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: Any, method: Any, before: LayerExperts | None) -> LayerExperts:
        """Pack a layer's loaded parameters; the layer then holds the packed weights instead.

        Args:
            layer: A `RoutedExperts` layer of vLLM.
            method: Its quantization method.
            before: What this method returned before the weights were updated. It keeps its memory,
                which CUDA graphs may have captured.

        Raises:
            MoekitError: moekit cannot compute the layer; it is as it was before.
        """
        if versions.prepared_elsewhere():
            reason = "another process has prepared its weights for vLLM's own kernels"
            raise Unsupported(reason, [reason])
        with torch.inference_mode(False), torch.no_grad():
            quant, loaded = weights.read(layer, method)
            kernel = kernel_for(problem_of(layer, quant, loaded))
            packed = kernel.pack(loaded)
            del loaded
            made = cls(kernel, packed, _order(layer, kernel.problem))
            if before is not None and _alike(before.packed, packed):
                _copy(packed, into=before.packed)
                made = before
            _hold(layer, made)
        _by_name[layer.layer_name] = made
        return made

    def __call__(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's partial sum (T, H) in x's dtype.

        Args:
            x: (T, H).
            topk_weights: (T, K).
            topk_ids: (T, K) vLLM's physical experts, of all ranks.
        """
        ids = topk_ids
        if self.to_physical is not None:
            ids = torch.where(ids < 0, -1, self.to_physical[ids.clamp(min=0)])
        return self.kernel(x, self.packed, Routing(topk_weights.float(), ids))


def kernel_for(problem: MoEProblem) -> ModularKernel:
    """Return the kernel for a problem; equal problems share one.

    Raises:
        MoekitError: No backend computes the problem, or none that suits a GPU.
    """
    kernel = _kernels.get(problem)
    if kernel is None:
        # Ids come from vLLM's router, and checks by value would wait for the GPU.
        kernel = moekit.compose(problem, checked=False)
        name = kernel.experts.spec.name
        named = kernel.explanation is not None and kernel.explanation.named
        if problem.device.type == "cuda" and name in _SLOW_ON_GPUS and not named:
            reason = (
                f"of moekit's installed backends only {name!r} computes it on {problem.device}, "
                f"which is slower than vLLM's kernels: pip install moekit-triton, or set "
                f"MOEKIT_EXPERTS={name}"
            )
            raise Unsupported(reason, [reason])
        _kernels[problem] = kernel
        why = "" if kernel.explanation is None else f" ({kernel.explanation.why})"
        say_once(f"moekit: {summary(problem)}: {_names(kernel)}{why}")
    return kernel


def _names(kernel: ModularKernel) -> str:
    return f"{kernel.dispatcher.spec.name} + {kernel.experts.spec.name}"


def _order(layer: Any, problem: MoEProblem) -> Tensor | None:
    """Return where vLLM's physical experts are in moekit's contiguous order, None for the same."""
    experts = layer.expert_map
    if experts is None:
        return None
    start = problem.local_experts.start
    places = torch.where(experts >= 0, experts + start, -1).long()
    mine = torch.arange(len(places), device=places.device)
    linear = torch.where((mine >= start) & (mine < problem.local_experts.stop), mine, -1)
    return None if torch.equal(places, linear) else places


# -- the layer's tensors -----------------------------------------------------------------


def _tensors(packed: PackedWeights) -> Mapping[str, Tensor]:
    return {**packed.experts, **packed.shared}


def _alike(one: PackedWeights, other: PackedWeights) -> bool:
    def form(packed: PackedWeights) -> Any:
        return {n: (t.shape, t.dtype, t.device) for n, t in _tensors(packed).items()}

    return one.backend == other.backend and bool(form(one) == form(other))


def _copy(packed: PackedWeights, into: PackedWeights) -> None:
    """Write the values of ``packed`` where it is not the same memory."""
    held = _tensors(into)
    for name, new in _tensors(packed).items():
        if new.data_ptr() != held[name].data_ptr():
            held[name].copy_(new)


def _hold(layer: Any, made: LayerExperts) -> None:
    """Make the packed tensors the layer's, and drop its parameters that they do not share."""
    parameters = dict(layer.named_parameters(recurse=False))
    shared = {(p.data_ptr(), p.shape): name for name, p in parameters.items()}
    for name, tensor in made.packed.experts.items():
        held = made.names.setdefault(
            name, shared.get((tensor.data_ptr(), tensor.shape), f"moekit_{name}")
        )
        old = parameters.pop(held, None)
        if old is None or old.data_ptr() != tensor.data_ptr() or old.dtype != tensor.dtype:
            setattr(layer, held, nn.Parameter(tensor, requires_grad=False))
    for name, tensor in made.packed.shared.items():
        layer.register_buffer(f"moekit_{name}", tensor, persistent=False)
    for name in parameters:
        delattr(layer, name)


# -- torch.compile -----------------------------------------------------------------------


@torch.library.custom_op("moekit::vllm_experts", mutates_args=())
def _operator(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    """A layer's experts as one operator, for code that torch.compile compiles."""
    experts = _by_name.get(layer)
    if experts is None:
        raise MoekitError(f"no layer {layer!r} of vLLM is alive whose experts moekit computes")
    return experts(x, topk_weights, topk_ids)


@_operator.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
