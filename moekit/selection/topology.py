"""Ranks on several hosts: which dispatchers serve them, and what memory each rank needs.

Nothing is created, and neither a GPU nor a vendor's library is needed. Dispatchers compute their
`Footprint` with the functions that size their buffers, or with their library's documented formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moekit.backends.bridge import bridge
from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing
from moekit.contract.explanation import Explanation
from moekit.contract.pending import Pending
from moekit.contract.sizes import Footprint, size_text
from moekit.contract.specs import DispatcherSpec
from moekit.discovery.registry import Registry, registry
from moekit.errors import InvalidInput
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.runtime.memory import MemoryReport
from moekit.selection.composite import find_experts
from moekit.untrusted.code import Fault, contained, shown


@dataclass(frozen=True)
class OnHosts:
    """The needs of a dispatcher on the hosts of a problem.

    footprint: None if the dispatcher computes none.
    experts: the best experts backend for it; empty if it cannot do the problem.
    memory: what a call of this combination needs; None if unknown, and then why_not says why.
    reasons: why it cannot do the problem.
    """

    dispatcher: str
    serves: bool
    footprint: Footprint | None
    experts: str = ""
    memory: MemoryReport | None = None
    why_not: str = ""
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-ready; sizes are bytes on a rank."""
        f, m = self.footprint, self.memory
        return {
            "serves": self.serves,
            "rows": f and f.rows,
            "buffers": f and dict(f.buffers),
            "transient": f and f.transient,
            "source": f and f.source,
            "across": list(f.across) if f else [],
            "experts": self.experts or None,
            "workspace": m and m.workspace,
            "intermediate": m and m.intermediate,
            "total": m and m.total,
            "why_not": self.why_not,
        }


def weight_bytes(problem: MoEProblem) -> int:
    """Return the bytes of this rank's experts: values, fp32 scales, zero points, g_idx, biases."""
    p, operand = problem, problem.quant.weight
    one = 0
    for rows, columns in ((p.w13_rows, p.hidden_size), (p.hidden_size, p.local_intermediate_size)):
        if operand is None:
            one += rows * columns * p.dtype.itemsize
        else:
            one += rows * (-(-columns // 2) if operand.packed else columns)
            one += math.prod(operand.scale_shape(rows, columns)) * (5 if operand.zero_points else 4)
            one += 4 * columns if operand.act_order else 0
        one += rows * p.dtype.itemsize if p.has_bias else 0
    return p.num_local_experts * one


def on_hosts(
    problem: MoEProblem, explanation: Explanation, *, backends: Registry | None = None
) -> list[OnHosts]:
    """Return every dispatcher that moves tokens; those that can do ``problem`` first, best first.

    Raises InvalidInput if the problem has no max_num_tokens, which the sizes follow from.
    """
    if problem.max_num_tokens is None:
        raise InvalidInput(
            "sizes on a rank follow from max_num_tokens, which is not set: set --max-num-tokens"
        )
    backends = backends or registry()
    known = backends.dispatchers
    best = {each.dispatcher: each.experts for each in reversed(explanation.combinations)}
    order = dict.fromkeys(each.dispatcher for each in explanation.combinations)
    order |= dict.fromkeys(explanation.rejected_dispatchers)
    found = [
        _on_hosts(problem, known[name], best.get(name, ""), backends)
        for name in order
        if name in known and known[name].moves_tokens
    ]
    rejected = explanation.rejected_dispatchers
    return [replace(each, reasons=rejected.get(each.dispatcher, ())) for each in found]


def as_dict(problem: MoEProblem, found: Sequence[OnHosts]) -> dict[str, Any]:
    """Return the key ``topology`` of `python -m moekit explain --nodes --json`."""
    return {
        "ranks": problem.parallel.num_ranks,
        "nodes": problem.parallel.nodes,
        "tokens": problem.max_num_tokens,
        "weights": weight_bytes(problem),
        "dispatchers": {each.dispatcher: each.as_dict() for each in found},
    }


def lines(problem: MoEProblem, found: Sequence[OnHosts]) -> list[str]:
    """Return what `python -m moekit explain --nodes` prints."""
    parallel = problem.parallel
    hosts = f"{parallel.nodes} host" + "s" * (parallel.nodes > 1)
    weights = size_text(weight_bytes(problem))
    text = [
        f"{parallel.num_ranks} ranks on {hosts}, {parallel.num_ranks // parallel.nodes} on each, "
        f"with {problem.max_num_tokens} tokens each; a rank holds {weights} of weights"
    ]
    for each in found:
        text += [f"  {each.dispatcher}", *(f"    {line}" for line in _lines(each))]
    return text


def _lines(found: OnHosts) -> Iterator[str]:
    if found.reasons:
        yield f"cannot do the problem: {'; '.join(found.reasons)}"
    footprint, memory = found.footprint, found.memory
    if footprint is None:
        yield found.why_not or "memory unknown: it declares no footprint"
        return
    buffers = ", ".join(f"{what} {size_text(n)}" for what, n in footprint.buffers.items()) or "none"
    yield f"buffers: {buffers} ({footprint.source})"
    call = f"a call: {footprint.rows} rows, {size_text(footprint.transient)} in the dispatcher"
    if memory is not None:
        call += (
            f"; with {found.experts} {size_text(memory.intermediate + memory.workspace)}, "
            f"{size_text(memory.total)} with buffers"
        )
    elif found.why_not:
        call += f"; with {found.experts} unknown: {found.why_not}"
    yield call
    yield from footprint.across


def _on_hosts(
    problem: MoEProblem, spec: DispatcherSpec, experts: str, backends: Registry
) -> OnHosts:
    if spec.footprint is None:
        return OnHosts(spec.name, bool(experts), None, experts)
    try:
        with contained():
            footprint = spec.footprint(problem)
            if not isinstance(footprint, Footprint):
                raise TypeError(f"it returned {shown(footprint)} instead of a Footprint")
    except Fault as fault:
        why = f"its footprint failed: {fault}"
        return OnHosts(spec.name, bool(experts), None, experts, None, why)
    if not experts:
        return OnHosts(spec.name, False, footprint)
    try:
        with contained():
            memory = _memory(problem, spec, footprint, experts, backends)
    except Fault as fault:  # some experts need their library or a GPU to compute it
        return OnHosts(spec.name, True, footprint, experts, None, str(fault))
    return OnHosts(spec.name, True, footprint, experts, memory)


def _memory(
    problem: MoEProblem,
    spec: DispatcherSpec,
    footprint: Footprint,
    experts: str,
    backends: Registry,
) -> MemoryReport:
    """Return `ModularKernel.memory` of a dispatcher that has sizes only, and these experts."""
    experts_spec = find_experts(experts, backends)
    gemms = bridge(experts_spec.load(), experts_spec, problem, spec.format)
    return ModularKernel(_SizesOnly(spec, problem, footprint), gemms, checked=False).memory()


class _SizesOnly(PrepareAndFinalize):
    """A dispatcher that answers with the sizes of a footprint, and cannot run."""

    def __init__(self, spec: DispatcherSpec, problem: MoEProblem, footprint: Footprint) -> None:
        super().__init__(spec, problem)
        self._footprint = footprint

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        raise AssertionError("this dispatcher has sizes only")

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        raise AssertionError("this dispatcher has sizes only")

    def max_rows(self, num_tokens: int) -> int:
        return self._footprint.rows

    def buffer_bytes(self) -> int:
        return self._footprint.buffer_bytes

    def transient_bytes(self, num_tokens: int) -> int:
        return self._footprint.transient
