"""Why a combination was chosen, and why each other backend was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moekit.discovery.specs import BackendSpec, DispatcherSpec
from moekit.problem import MoEProblem


@dataclass(frozen=True)
class Pair:
    """A possible choice. ``experts`` may be a composite (`moekit.selection.composite`). ``bridged``: their
    formats differ, so the core converts between them."""

    dispatcher: str
    experts: str
    bridged: bool

    def __str__(self) -> str:
        return f"{self.dispatcher} + {self.experts}" + (" (bridged)" if self.bridged else "")


@dataclass(frozen=True)
class Explanation:
    """What could do ``problem``, best first, and why each other backend could not.

    rejected_dispatchers, rejected_experts: name -> every reason. why: what decided the order. note:
    what else there is to know of a choice by measurement, of a composite, or of experts that
    emulate the scheme; else empty.
    """

    problem: MoEProblem
    pairs: tuple[Pair, ...]
    why: str
    rejected_dispatchers: Mapping[str, tuple[str, ...]]
    rejected_experts: Mapping[str, tuple[str, ...]]
    note: str = ""

    @property
    def chosen(self) -> Pair | None:
        return self.pairs[0] if self.pairs else None

    def reasons(self) -> dict[str, tuple[str, ...]]:
        return {
            **{f"dispatcher {name}": why for name, why in self.rejected_dispatchers.items()},
            **{f"experts {name}": why for name, why in self.rejected_experts.items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the shape `python -m moekit explain --json` documents."""

        def pair(p: Pair) -> dict[str, Any]:
            return {"dispatcher": p.dispatcher, "experts": p.experts, "bridged": p.bridged}

        return {
            "problem": repr(self.problem),
            "chosen": pair(self.pairs[0]) if self.pairs else None,
            "why": self.why,
            "note": self.note,
            "runners_up": [pair(p) for p in self.pairs[1:]],
            "rejected_dispatchers": {n: list(r) for n, r in self.rejected_dispatchers.items()},
            "rejected_experts": {n: list(r) for n, r in self.rejected_experts.items()},
        }

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen or 'nothing'} ({self.why})"]
        lines += [f"  {self.note}"] if self.note else []
        lines += [f"  then: {pair}" for pair in self.pairs[1:]]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.reasons().items()]
        return "\n".join(lines)

    def _without(self, spec: BackendSpec, reason: str) -> Explanation:
        """The same with one more backend rejected."""
        more = {spec.name: (reason,)}
        if isinstance(spec, DispatcherSpec):
            pairs = tuple(p for p in self.pairs if p.dispatcher != spec.name)
            rejected = {**self.rejected_dispatchers, **more}
            return replace(self, pairs=pairs, rejected_dispatchers=rejected)
        pairs = tuple(p for p in self.pairs if p.experts != spec.name)
        return replace(self, pairs=pairs, rejected_experts={**self.rejected_experts, **more})


def summary(problem: MoEProblem) -> str:
    """``problem`` in one line, for people (``repr`` is for Python)."""
    p, parallel = problem, problem.parallel
    limit = f" (limit {p.activation.limit:g})" if p.activation.clamped else ""
    words = [
        f"{p.num_experts} experts",
        f"top {p.top_k}",
        f"hidden {p.hidden_size}",
        f"intermediate {p.intermediate_size}",
        p.dtype_name,
        f"quant {p.quant.name}",
        p.activation.name + limit,
    ]
    words += ["bias"] if p.has_bias else []
    words += ["weight on input"] if p.apply_router_weight_on_input else []
    words += [f"{p.num_redundant_experts} redundant"] if p.num_redundant_experts else []
    words += [] if p.max_num_tokens is None else [f"at most {p.max_num_tokens} tokens"]
    for kind in ("ep", "tp", "dp"):
        if (size := getattr(parallel, f"{kind}_size")) > 1:
            words.append(f"{kind} {size}")
    words += [f"{parallel.nodes} hosts"] if parallel.nodes > 1 else []
    return f"{', '.join(words)} on {p.device}"
