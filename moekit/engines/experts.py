"""The kernel and packed weights of one MoE layer, which compute it instead of the engine's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moekit.contract import PackedWeights
from moekit.engines.facts import refusal
from moekit.engines.kernels import kernel_for, on_all_ranks
from moekit.engines.mode import Engine
from moekit.kernel import ModularKernel
from moekit.problem import ExpertWeights, MoEProblem
from moekit.problem.problem import summary

# The largest call of each kernel and dtype of ids for which `Computed.warm_up` has run.
_warmed: dict[tuple[ModularKernel, torch.dtype], int] = {}


@dataclass(eq=False)
class Computed:
    """The kernel and the packed weights of one layer.

    Attributes:
        kernel: Shared by layers with equal problems.
        packed: The weights. Those that belong to one expert are parameters of the layer, so that
            the engine moves experts between ranks (EPLB) as it does with its own.
        captured: The tokens of the engine's largest CUDA graph, or 0.
    """

    kernel: ModularKernel
    packed: PackedWeights
    captured: int

    def warm_up(
        self, engine: Engine, packed: PackedWeights, tokens: int, ids: torch.dtype, most: int | None
    ) -> None:
        """Compile the kernels of calls of up to ``tokens``, unless a larger call has done so.

        Otherwise they would compile while the engine serves. An engine's first call has the most
        tokens, because it measures the memory. Engines run each size of a graph before they capture
        it, so calls of up to ``captured`` tokens compile then. Kernels on CPUs are not compiled.

        ids: Their dtype.
        most: The most tokens of any rank, where ranks exchange tokens: these warm up together.
        """
        problem, known = self.kernel.problem, (self.kernel, ids)
        largest = most or 0 if problem.parallel.moves_tokens else tokens
        if largest <= _warmed.get(known, 0):
            return
        _warmed[known] = largest
        if problem.device.type == "cpu" or torch.cuda.is_current_stream_capturing():
            return
        begin = time.perf_counter()
        self.kernel.warmup(packed, largest, ids_dtype=ids, above=self.captured)
        seconds = time.perf_counter() - begin
        engine.say_once(
            f"moekit: {summary(problem)}: it took {seconds:.1f} s to compile or load the kernels "
            f"of calls of up to {largest} tokens"
        )


def pack(
    engine: Engine,
    load: Callable[[], tuple[MoEProblem, ExpertWeights]],
    before: Computed | None,
    name: str,
    *,
    ranks: Any,
    group: Any,
    cpu_kernel: bool,
    captured: int,
    eager: str,
) -> Computed:
    """Return the kernel of a layer, and its loaded weights as the kernel packs them.

    Args:
        load: Returns the layer's problem and weights.
        before: The layer's before an update of its weights. The new weights are written into its
            memory, which CUDA graphs may have captured, and it is returned. If this raises, it has
            its old weights on every rank of the group.
        ranks: Returns the engine's group of the ranks over which it spreads experts.
        group: The group of the ranks that must agree about the layer, or None.
        cpu_kernel: The engine has a kernel for the layer on this CPU, and may use it.
        captured: The tokens of the engine's largest CUDA graph, or 0.
        eager: The engine's option that turns CUDA graphs off.
    """
    with on_all_ranks(group, engine):  # before others wait for this rank in `compose`
        problem, loaded = load()
    with on_all_ranks(group, engine):
        kernel = kernel_for(problem, engine, lambda: ranks().device_group, cpu_kernel)
        if before is None and captured:
            _check_graphs(kernel, engine.name, eager)
        if before is not None and kernel is not before.kernel:
            raise refusal(f"they make it another problem ({summary(problem)})")
        made = Computed(kernel, kernel.pack(loaded), captured)
    if before is None:
        return made
    with on_all_ranks(group, engine):
        kernel.repack_(before.packed, made.packed, name=name)
    return before


def _check_graphs(kernel: ModularKernel, engine: str, eager: str) -> None:
    """Raise Unsupported if a kernel cannot be in the CUDA graphs that an engine captures."""
    specs = (kernel.dispatcher.spec, kernel.experts.spec)
    if unfit := [repr(spec.name) for spec in specs if not spec.graph_safe]:
        names = " and ".join(unfit)
        raise refusal(f"{names} cannot be in the CUDA graphs that {engine} captures: use {eager}")


def held(layer: nn.Module, packed: PackedWeights) -> dict[str, nn.Parameter]:
    """Return parameters for the packed experts: the layer's own where they share memory."""
    own = {p.data_ptr(): (name, p) for name, p in layer.named_parameters(recurse=False)}
    found = {}
    for name, tensor in packed.experts.items():
        known, parameter = own.get(tensor.data_ptr(), ("", None))
        form = tensor.shape, tensor.stride(), tensor.dtype
        if parameter is not None and (parameter.shape, parameter.stride(), parameter.dtype) == form:
            found[known] = parameter
        else:
            found[f"moekit_{name}"] = nn.Parameter(tensor, requires_grad=False)
    return found


def hold(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace all parameters of the layer by these."""
    for name in dict(layer.named_parameters(recurse=False)):
        delattr(layer, name)
    for name, parameter in parameters.items():
        setattr(layer, name, parameter)
