"""The kernel and packed weights of one MoE layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import moekit
from moekit import ExpertWeights, ModularKernel, MoEProblem, PackedWeights, Routing
from moekit.errors import WeightsError
from moekit.plugin import exchange, reason_of, summary
from moekit_vllm import versions, weights
from moekit_vllm.lora import ServedAdapters
from moekit_vllm.problem import exchanges_tokens, problem_of, too_slow
from moekit_vllm.settings import Mode, say_once
from moekit_vllm.weights.parameters import refusal

# Seconds that a rank waits for the others: they load their weights at different speeds.
_PEER_TIMEOUT = 600.0
_kernels: dict[MoEProblem, ModularKernel] = {}
# The largest call of each kernel for which `_warm_up` has run.
_warmed: dict[ModularKernel, int] = {}


@dataclass(eq=False)
class LayerExperts:
    """The kernel and packed weights that compute a layer's routed experts instead of vLLM's kernel.

    Attributes:
        kernel: Shared by layers with equal problems.
        packed: The weights. Those that belong to one expert are parameters of the layer, so that
            vLLM moves experts between ranks (EPLB) and restores weights as it does for its own.
        parameters: The packed weights by the names under which the layer holds them.
        lora: The adapters, or None in an engine without LoRA.
        to_physical: (P,) int64, the place of each of vLLM's physical experts in moekit's order,
            or None if both have the same order.
    """

    kernel: ModularKernel
    packed: PackedWeights
    to_physical: Tensor | None
    parameters: Mapping[str, nn.Parameter]
    lora: ServedAdapters | None = None

    @classmethod
    def of(cls, layer: Any, method: Any, before: LayerExperts | None) -> LayerExperts:
        """Pack a layer's loaded parameters; the layer then holds the packed weights instead.

        before: What this returned before the weights were updated. It keeps its memory, which CUDA
        graphs may have captured. If this raises, the layer is as it was.
        """
        if versions.prepared_elsewhere():
            raise refusal("another process has prepared its weights for vLLM's own kernels")
        with torch.inference_mode(False), torch.no_grad():
            with _on_all_ranks(layer):  # before other ranks wait for this one in `compose`
                quant, loaded = weights.read(layer, method)
                problem = problem_of(layer, quant, loaded)
            cpu_kernel = layer.expert_map is None and versions.has_cpu_kernel(method)
            with _on_all_ranks(layer):
                kernel = _kernel_for(problem, cpu_kernel and method.moekit_mode is not Mode.REQUIRE)
                if before is None:
                    _check_graphs(kernel)
                packed, order = kernel.pack(loaded), _order(layer, problem)
            del loaded
            served = None if problem.adapters is None else ServedAdapters(problem)
            made = before or cls(kernel, packed, order, _held(layer, packed), served)
            if before is not None:
                with _on_all_ranks(layer):
                    before.kernel.repack_(before.packed, packed, name=layer.layer_name)
            if order is not None and made.to_physical is not None:
                made.to_physical.copy_(order)  # vLLM's sleep mode may have discarded it
            _hold(layer, made.parameters)
        return made

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
        # Ranks that exchange tokens warm up together: `most` is equal on all of them.
        largest = most or 0 if self.dispatches else len(x)
        if largest > _warmed.get(self.kernel, 0):
            _warm_up(self.kernel, packed, largest)
        ids = topk_ids
        if self.to_physical is not None:
            ids = torch.where(ids < 0, -1, self.to_physical[ids.clamp(min=0)])
        routing = Routing(topk_weights.float(), ids, max_tokens=most, adapter_ids=slots)
        return self.kernel(x, packed, routing)


def _warm_up(kernel: ModularKernel, packed: PackedWeights, num_tokens: int) -> None:
    """Compile what a kernel's calls of up to ``num_tokens`` need, or they would while vLLM serves.

    vLLM's first call has the most tokens: it measures the memory. Kernels on CPUs compile nothing.
    """
    _warmed[kernel] = num_tokens
    if kernel.problem.device.type == "cpu":
        return
    if not torch.cuda.is_current_stream_capturing():
        kernel.warmup(packed, num_tokens)


def _kernel_for(problem: MoEProblem, cpu_kernel: bool) -> ModularKernel:
    """Return the kernel for a problem, unless vLLM's is faster; equal problems share one."""
    kernel = _kernels.get(problem)
    if kernel is None:
        # Ids come from vLLM's router, and checks by value would wait for the GPU.
        group = versions.expert_ranks().device_group if problem.parallel.moves_tokens else None
        kernel = _kernels[problem] = _in_own_memory(
            lambda: moekit.compose(problem, group=group, checked=False, peer_timeout=_PEER_TIMEOUT)
        )
    explanation = kernel.explanation
    assert explanation is not None
    if reasons := too_slow(explanation, cpu_kernel):
        raise refusal(*reasons)
    expected = f"; {explanation.expected}" if explanation.expected else ""
    say_once(f"moekit: {summary(problem)}: {explanation.chosen} ({explanation.why}){expected}")
    return kernel


def _in_own_memory(make: Callable[[], ModularKernel]) -> ModularKernel:
    """Return ``make()``, called in a thread whose memory vLLM does not take in sleep mode.

    What the thread that loads weights allocates comes from a pool, and sleep of level 2 discards
    it. Dispatchers keep counters and the addresses of other ranks' memory.
    """
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> ModularKernel:
        with torch.accelerator.device_index(index):
            kernel = make()
            if index is not None:
                torch.accelerator.synchronize()  # the calling thread has another stream
            return kernel

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@contextmanager
def _on_all_ranks(layer: Any) -> Iterator[None]:
    """Raise on every rank if the context raises on one. Collective if ranks exchange tokens.

    vLLM's kernels and moekit's move tokens in different ways, so a rank that alone left the layer
    to vLLM would hang. In engines with elastic ranks, all leave it to vLLM, and some load alone.
    """
    if not exchanges_tokens(layer) or versions.elastic():
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    mine = "" if error is None else reason_of(error)
    group = versions.expert_ranks().cpu_group
    said = exchange("load an MoE layer of vLLM", mine, group, _PEER_TIMEOUT)
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {why}" for rank, why in enumerate(said) if why]:
        raise refusal(f"other ranks leave it to vLLM ({'; '.join(failed)})")


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


# -- the layer's tensors -----------------------------------------------------------------


def _check_graphs(kernel: ModularKernel) -> None:
    """Refuse a kernel that cannot be in the CUDA graphs which vLLM captures."""
    specs = (kernel.dispatcher.spec, kernel.experts.spec)
    unfit = [repr(spec.name) for spec in specs if not spec.graph_safe]
    if unfit and versions.captures_graphs():
        names = " and ".join(unfit)
        raise refusal(
            f"{names} cannot be in the CUDA graphs that vLLM captures: use --enforce-eager"
        )


def _held(layer: Any, packed: PackedWeights) -> dict[str, nn.Parameter]:
    """Return parameters for the packed experts: the layer's own where they share memory."""
    own = {p.data_ptr(): (name, p) for name, p in layer.named_parameters(recurse=False)}
    held = {}
    for name, tensor in packed.experts.items():
        known, parameter = own.get(tensor.data_ptr(), ("", None))
        form = tensor.shape, tensor.stride(), tensor.dtype
        if parameter is not None and (parameter.shape, parameter.stride(), parameter.dtype) == form:
            held[known] = parameter
        else:
            held[f"moekit_{name}"] = nn.Parameter(tensor, requires_grad=False)
    return held


def _hold(layer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Give the layer these parameters in place of those that it has."""
    for name in dict(layer.named_parameters(recurse=False)):
        delattr(layer, name)
    for name, parameter in parameters.items():
        setattr(layer, name, parameter)


def repack_all(
    model: nn.Module, new: Mapping[str, ExpertWeights], checksums: Mapping[str, str]
) -> None:
    """Serve `moekit_vllm.repack_`."""
    ours: dict[str, LayerExperts] = {}
    for layer in model.modules():
        experts = getattr(getattr(layer, "quant_method", None), "moekit_experts", None)
        if experts is not None:
            ours[str(layer.layer_name)] = experts
    if unknown := sorted({*new, *checksums} - ours.keys()):
        raise WeightsError(f"moekit computes no layers {unknown} here, but {sorted(ours)}")
    for name, each in new.items():
        held = ours[name]
        held.kernel.repack_(held.packed, each, checksum=checksums.get(name), name=name)


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
