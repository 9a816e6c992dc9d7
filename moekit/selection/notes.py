"""Notes of an explanation: they tell users of limits of a combination's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from moekit.contract.sums import Sums
from moekit.problem import MoEProblem
from moekit.runtime.rows import quantized_by
from moekit.selection.candidates import Candidate
from moekit.selection.composite import CompositeDispatcherSpec, members


def notes(problem: MoEProblem, candidate: Candidate) -> Iterator[str]:
    dispatcher, experts = candidate.dispatcher, candidate.experts
    if isinstance(dispatcher, CompositeDispatcherSpec):
        last = dispatcher.buckets[-1][1]
        yield f"calls without max_tokens go to {last}; every dispatcher keeps its buffers"
    yield from _arithmetic(problem, candidate)
    yield from experts.notes(problem)
    seen = experts.bridged_to(dispatcher.format)
    taken = dispatcher.weights_in_fp32 or Sums.of(problem, seen) is not Sums.BY_DISPATCHER
    if problem.dtype_name == "float16" and not (taken and seen.weights_in_fp32):
        yield ("an expert's output above 65504 becomes infinite in float16, for any router weight")


def _arithmetic(problem: MoEProblem, candidate: Candidate) -> Iterator[str]:
    """Yield who quantizes the activations, if the scheme quantizes them."""
    scheme = problem.quant.name
    if problem.training and problem.quant.activation is not None:
        yield f"activations stay exact ({problem.dtype_name}), because gradients are wanted"
    by = quantized_by(problem, candidate.dispatcher, candidate.experts)
    if by == "sender":
        yield f"activations are quantized to {scheme} for the transfer"
    elif by == "receiver":
        yield f"activations are quantized to {scheme} when they arrive"
    elif by == "experts":
        exact = [each.name for each in members(candidate.experts) if each.emulates]
        others = [each.name for each in members(candidate.experts) if not each.emulates]
        if exact:
            yield (
                f"activations stay exact ({problem.dtype_name}) in {', '.join(exact)}, which "
                f"emulates {scheme}"
            )
        if others:
            yield f"{', '.join(others)} quantizes activations to {scheme}"
