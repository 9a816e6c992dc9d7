"""Why a combination was chosen, and why each other backend was not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moekit.problem import MoEProblem


@dataclass(frozen=True)
class Combination:
    """A dispatcher and experts that can do a problem together.

    experts: a backend or a composite (`moekit.selection.composite`).
    bridged: their formats differ, so moekit converts between them.
    """

    dispatcher: str
    experts: str
    bridged: bool

    def __str__(self) -> str:
        return f"{self.dispatcher} + {self.experts}" + (" (bridged)" if self.bridged else "")

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {"dispatcher": self.dispatcher, "experts": self.experts, "bridged": self.bridged}


@dataclass(frozen=True)
class Explanation:
    """Which combinations can do ``problem``, best first, and why each other backend cannot.

    why: what decided the order: names, variables, measurements or priorities.
    rejected_dispatchers, rejected_experts: every reason, by the backend's name.
    note: what else users should know of the choice; may be empty.
    """

    problem: MoEProblem
    combinations: tuple[Combination, ...]
    why: str
    rejected_dispatchers: Mapping[str, tuple[str, ...]]
    rejected_experts: Mapping[str, tuple[str, ...]]
    note: str = ""

    @property
    def chosen(self) -> Combination | None:
        """The best combination; None if nothing can do the problem."""
        return self.combinations[0] if self.combinations else None

    @property
    def pairs(self) -> tuple[Combination, ...]:
        """Deprecated: the old name of `combinations`."""
        warnings.warn(
            "Explanation.pairs is now Explanation.combinations", DeprecationWarning, stacklevel=2
        )
        return self.combinations

    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Return every reason, by kind and name of the backend, as in ``dispatcher local``."""
        return {
            **{f"dispatcher {name}": why for name, why in self.rejected_dispatchers.items()},
            **{f"experts {name}": why for name, why in self.rejected_experts.items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, as `python -m moekit explain --json` documents it."""
        return {
            "problem": repr(self.problem),
            "chosen": None if self.chosen is None else self.chosen.as_dict(),
            "why": self.why,
            "note": self.note,
            "runners_up": [each.as_dict() for each in self.combinations[1:]],
            "rejected_dispatchers": {n: list(r) for n, r in self.rejected_dispatchers.items()},
            "rejected_experts": {n: list(r) for n, r in self.rejected_experts.items()},
        }

    def __str__(self) -> str:
        lines = [f"chosen: {self.chosen or 'nothing'} ({self.why})"]
        lines += [f"  {self.note}"] if self.note else []
        lines += [f"  then: {each}" for each in self.combinations[1:]]
        lines += [f"  not {name}: {'; '.join(why)}" for name, why in self.reasons().items()]
        return "\n".join(lines)


def summary(problem: MoEProblem) -> str:
    """Return ``problem`` in one line, to be read by people (``repr`` is Python)."""
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


def __getattr__(name: str) -> Any:
    if name == "Pair":
        warnings.warn("Pair is now Combination", DeprecationWarning, stacklevel=2)
        return Combination
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
