"""Why a combination was chosen, and why each other backend was not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from moekit.contract.sums import Sums
from moekit.problem import MoEProblem

_RUNNERS_UP = 2


@dataclass(frozen=True)
class Combination:
    """A dispatcher and experts that can do a problem together.

    experts: a backend or a composite (`moekit.selection.composite`).
    bridged: their formats differ, so moekit converts between them.
    sums: who weights the experts' rows and sums them over K.
    fused: one fused kernel is dispatcher and experts (`moekit.plugin.FusedSpec`).
    """

    dispatcher: str
    experts: str
    bridged: bool
    sums: Sums
    fused: bool = False

    def __str__(self) -> str:
        if self.fused:
            return f"{self.experts} (fused)"
        return f"{self.dispatcher} + {self.experts}" + (" (bridged)" if self.bridged else "")

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        return {**vars(self), "sums": self.sums.value}


@dataclass(frozen=True)
class Explanation:
    """The combinations that can do ``problem``, best first, and why each other backend cannot.

    why: what decided the order: names, variables, measurements or priorities.
    rejected_dispatchers, rejected_experts: every reason, by the backend's name.
    named: the backends that the user named, as keys of `reasons`.
    faults: the reasons that quote a variable of the environment, or that a failing check made.
    expected: the chosen experts' times in the tuned tables, and their gain over the experts that
        priority prefers; empty where the tables have neither.
    packages: returns the lines of `not_installed`.
    notes: returns what `note` joins. It is called when the note is read, because some backends
        know only after they packed weights how they will run.
    """

    problem: MoEProblem
    combinations: tuple[Combination, ...]
    why: str
    rejected_dispatchers: Mapping[str, tuple[str, ...]]
    rejected_experts: Mapping[str, tuple[str, ...]]
    named: frozenset[str] = frozenset()
    expected: str = ""
    faults: frozenset[str] = frozenset()
    packages: Callable[[], Iterable[str]] = field(default=tuple, compare=False, repr=False)
    notes: Callable[[], Sequence[str]] = field(default=tuple, compare=False, repr=False)

    @property
    def chosen(self) -> Combination | None:
        """The best combination; None if nothing can do the problem."""
        return self.combinations[0] if self.combinations else None

    @property
    def note(self) -> str:
        """What else users should know of the choice; may be empty."""
        return "; ".join(self.notes())

    @property
    def not_installed(self) -> tuple[str, ...]:
        """Lines on packages of moekit's repository that have backends for the problem."""
        return tuple(self.packages())

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
            "expected": self.expected,
            "runners_up": [each.as_dict() for each in self.combinations[1:]],
            "rejected_dispatchers": {n: list(r) for n, r in self.rejected_dispatchers.items()},
            "rejected_experts": {n: list(r) for n, r in self.rejected_experts.items()},
            "not_installed": list(self.not_installed),
        }

    def text(self, *, every: bool = False, how: str = "text(every=True) gives the reasons") -> str:
        """Return what people should know: the choice, why, and what else there is.

        Without ``every`` these are two runners-up, the reasons against backends that were named,
        and `faults`. If nothing can do the problem and no named backend is why, all reasons are
        there. ``how`` says how to get the reasons that are left out.
        """
        runners_up = self.combinations[1 : None if every else 1 + _RUNNERS_UP]
        named = [name for name in self.reasons() if name in self.named]
        every = every or (self.chosen is None and not named)
        told = list(self.reasons()) if every else named
        lines = [f"chosen: {self.chosen or 'nothing'} ({self.why})"]
        lines += [f"  {line}" for line in (self.expected, self.note) if line]
        if self.chosen is not None:
            lines.append(f"  weighted and summed over top-k by {self.chosen.sums.value}")
        lines += [f"  then: {each}" for each in runners_up]
        lines += [f"  not {line}" for line in self.refusals(told)]
        left = {name: why for name, why in self.reasons().items() if name not in told}
        for fault in sorted(self.faults.intersection(chain(*left.values()))):
            blamed = ", ".join(name for name, why in left.items() if fault in why)
            lines.append(f"  not {blamed}: {fault}")
        if others := sum(not self.faults.issuperset(why) for why in left.values()):
            words = "1 other" if others == 1 else f"{others} others"
            lines.append(f"  {words} cannot run it: {how}")
        lines += [f"  {line}" for line in self.not_installed]
        return "\n".join(lines)

    def refusals(self, names: Collection[str] | None = None) -> list[str]:
        """Return a line for each of these keys of `reasons`."""
        return [
            f"{name}: {'; '.join(why)}"
            for name, why in self.reasons().items()
            if names is None or name in names
        ]

    def __str__(self) -> str:
        return self.text()
