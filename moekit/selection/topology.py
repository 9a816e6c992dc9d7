"""Ranks on several hosts, on paper: who serves them, what changes, and what it takes on each rank.

Nothing is created, and neither a GPU nor a vendor's library is needed: dispatchers tell their
`Footprint` by the functions they size their buffers with, or by the library's documented formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moekit.backends.bridge import bridge
from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing
from moekit.discovery.footprint import Footprint
from moekit.discovery.registry import Registry, registry
from moekit.discovery.specs import DispatcherSpec
from moekit.errors import InvalidInput
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem
from moekit.runtime.memory import MemoryReport
from moekit.runtime.overlap import Pending
from moekit.selection.composite import find_experts
from moekit.selection.explanation import Explanation
from moekit.untrusted.code import Fault, contained, shown


@dataclass(frozen=True)
class OnHosts:
    """A dispatcher on the hosts of a problem. footprint: None if it does not tell. experts: the
    best that it can be paired with, empty if it does not serve. memory: of a call of that pair,
    None if it is not known, and then why_not says why."""

    dispatcher: str
    serves: bool
    footprint: Footprint | None
    experts: str = ""
    memory: MemoryReport | None = None
    why_not: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes on a rank."""
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
    """This rank's experts, canonical: values, scales in fp32, zero points, g_idx, biases."""
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
    """Every dispatcher that moves tokens, those that serve ``problem`` first and best first.

    Raises InvalidInput without max_num_tokens, which everything is sized for.
    """
    if problem.max_num_tokens is None:
        raise InvalidInput("sizes on a rank follow from max_num_tokens: set --max-num-tokens")
    known = (backends or registry()).dispatchers
    best = {pair.dispatcher: pair.experts for pair in reversed(explanation.combinations)}
    order = list(dict.fromkeys(pair.dispatcher for pair in explanation.combinations))
    order += [name for name in explanation.rejected_dispatchers if name not in order]
    return [
        _on_hosts(problem, known[name], best.get(name, ""), backends or registry())
        for name in order
        if name in known and known[name].moves_tokens
    ]


def as_dict(problem: MoEProblem, found: Sequence[OnHosts]) -> dict[str, Any]:
    """JSON-ready: the key ``topology`` of `python -m moekit explain --nodes --json`."""
    return {
        "ranks": problem.parallel.num_ranks,
        "nodes": problem.parallel.nodes,
        "tokens": problem.max_num_tokens,
        "weights": weight_bytes(problem),
        "dispatchers": {each.dispatcher: each.as_dict() for each in found},
    }


def lines(problem: MoEProblem, found: Sequence[OnHosts]) -> list[str]:
    """What `python -m moekit explain --nodes` prints."""
    parallel = problem.parallel
    hosts = f"{parallel.nodes} host" + "s" * (parallel.nodes > 1)
    text = [
        f"{parallel.num_ranks} ranks on {hosts}, {parallel.num_ranks // parallel.nodes} on each, "
        f"of {problem.max_num_tokens} tokens; on a rank: {_bytes(weight_bytes(problem))} of weights"
    ]
    for each in found:
        text.append(f"  {each.dispatcher} " + ("serves them" if each.serves else "does not"))
        if each.footprint is None:
            text.append("    it does not tell what it would take")
            continue
        f = each.footprint
        buffers = ", ".join(f"{what} {_bytes(n)}" for what, n in f.buffers.items()) or "none"
        text.append(f"    buffers: {buffers} ({f.source})")
        call = f"    a call: {f.rows} rows, {_bytes(f.transient)} in the dispatcher"
        if each.memory is not None:
            m = each.memory
            call += (
                f"; with {each.experts} {_bytes(m.intermediate + m.workspace)}, "
                f"{_bytes(m.total)} with buffers"
            )
        elif each.why_not:
            call += f"; with {each.experts} unknown: {each.why_not}"
        text.append(call)
        text += [f"    {sentence}" for sentence in f.across]
    return text


def _on_hosts(
    problem: MoEProblem, spec: DispatcherSpec, experts: str, backends: Registry
) -> OnHosts:
    if spec.footprint is None:
        return OnHosts(spec.name, bool(experts), None, experts)
    try:
        with contained():
            footprint = spec.footprint(problem)
            if not isinstance(footprint, Footprint):
                raise TypeError(f"it returned {shown(footprint)}, want a Footprint")
    except Fault as fault:
        why = f"its footprint failed: {fault}"
        return OnHosts(spec.name, bool(experts), None, experts, None, why)
    if not experts:
        return OnHosts(spec.name, False, footprint)
    try:
        with contained():
            memory = _memory(problem, spec, footprint, experts, backends)
    except Fault as fault:  # experts that want their library, or a GPU, to know
        return OnHosts(spec.name, True, footprint, experts, None, str(fault))
    return OnHosts(spec.name, True, footprint, experts, memory)


def _memory(
    problem: MoEProblem,
    spec: DispatcherSpec,
    footprint: Footprint,
    experts: str,
    backends: Registry,
) -> MemoryReport:
    """`ModularKernel.memory` of the pair, with a dispatcher that only says how much."""
    experts_spec = find_experts(experts, backends)
    gemms = bridge(experts_spec.load(), experts_spec, problem, spec.format)
    return ModularKernel(_OnPaper(spec, problem, footprint), gemms, checked=False).memory()


class _OnPaper(PrepareAndFinalize):
    """A dispatcher's sizes, and nothing behind them."""

    def __init__(self, spec: DispatcherSpec, problem: MoEProblem, footprint: Footprint) -> None:
        super().__init__(spec, problem)
        self._footprint = footprint

    def prepare(
        self, x_TH: Tensor, routing: Routing, quantize: Quantizer | None
    ) -> Pending[Dispatched]:
        raise AssertionError("on paper only")

    def finalize(self, y: Tensor, dispatched: Dispatched, out_TH: Tensor) -> Pending[Tensor]:
        raise AssertionError("on paper only")

    def max_rows(self, num_tokens: int) -> int:
        return self._footprint.rows

    def buffer_bytes(self) -> int:
        return self._footprint.buffer_bytes

    def transient_bytes(self, num_tokens: int) -> int:
        return self._footprint.transient


def _bytes(n: int) -> str:
    if n < 1000:
        return f"{n} B"
    power = min(3, int(math.log10(n)) // 3)
    return f"{n / 1000**power:.3g} {('kB', 'MB', 'GB')[power - 1]}"
