"""The measurements of a problem in the tuned tables, and the backends they choose for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moekit.problem import MoEProblem
from moekit.selection.tuned import any_for
from moekit.selection.tuned.files import nearest
from moekit.selection.tuned.plan import (
    Curve,
    Plan,
    best_plan,
    join,
    plan,
    serving,
    split,
    time_at,
)
from moekit.selection.tuned.table import Key, Times, known

# FLOP of bf16 products that a device does in the time in which it reads a byte, as measured: there
# a product stops being bound by memory. Sources: benchmarks/results, h200-bench and h100-choice.
_RIDGE = {"NVIDIA H100 80GB HBM3": 788 / 3.11, "NVIDIA H200": 791 / 4.49}


@dataclass(frozen=True)
class Choice:
    """plan: what is chosen; order: single backends, best first; note: where the times come from."""

    plan: Plan
    order: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Found:
    """The measurements that the tables have for a problem.

    key: the problem or the nearest shape that was measured; distance: 0 if it is the problem.
    high: the most tokens that a call can have, as the table counts them; None if the problem sets
        no limit.
    borrowed: measured on one rank, but the problem's tokens move between ranks.
    device: the problem's device if another device of its architecture was measured; else empty.
    """

    key: Key
    distance: float
    times: Times
    high: int | None
    borrowed: bool
    device: str = ""

    @property
    def scale(self) -> float:
        """Tokens on this device for each token on the measured one, at equal intensity.

        Which backend is best changes where experts stop being bound by memory, which is at more
        rows on a device that reads more slowly.
        """
        own, measured = _RIDGE.get(self.device), _RIDGE.get(self.key.device)
        return own / measured if own and measured else 1.0

    def curves(self, dispatcher: str, names: Collection[str]) -> dict[str, Curve]:
        """Return times by tokens of those experts backends that were measured with ``dispatcher``.

        Of a composite, each member's times count where it serves. Calls that say `max_tokens` cost
        as much in a kernel for more tokens.
        """
        buckets, points = split(dispatcher), dict[str, dict[int, float]]()
        for (measured, experts), records in self.times.items():
            for tokens, record in records.items() if experts in names else ():
                t = round(tokens * self.scale)
                if serving(buckets, t) == measured:
                    points.setdefault(experts, {})[t] = record.us or math.inf
        return {name: sorted(times.items()) for name, times in points.items()}

    def choose(self, dispatcher: str, names: Collection[str]) -> Choice | None:
        """Choose among these experts backends with ``dispatcher``; None if none was measured."""
        curves = self.curves(dispatcher, names)
        made = best_plan(curves, {n: self._copied(dispatcher, n) for n in curves}, self.high)
        if made is None:
            return None
        singles = {name: plan(curves, self.high, {name}) for name in curves}
        costs = {name: math.inf if p is None else p.cost for name, p in singles.items()}
        sole = made.buckets[0][1] if len(made.buckets) == 1 else ""
        order = sorted(curves, key=lambda name: (name != sole, costs[name], name))

        serve = {name for _, name in made.buckets}
        latest = max(
            (r for n in serve for r in self.times[dispatcher, n].values()), key=lambda r: r.date
        )
        notes = [f"measured {latest.date[:10]} with {latest.made_with}"]
        if missing := sorted(set(names) - curves.keys()):
            notes.append(f"not measured: {', '.join(missing)} (python -m moekit tune --select)")
        free = plan(curves, self.high)
        if free is not None and (gain := math.exp(made.cost - free.cost)) > 1.01:
            notes.append(
                f"experts={join(free.buckets)!r} would be {gain:.2f} times as fast on average, but "
                "hold weights in more than one form"
            )
        return Choice(made, tuple(order), "; ".join(notes))

    def expected(self, dispatcher: str, chosen: str, default: str) -> str:
        """Return the times of the chosen experts, and how much faster they are than the default.

        Times of another shape or device are left out, but their ratios count. The text is empty if
        the experts were not measured.

        Args:
            dispatcher: What they were measured with.
            chosen: The name of experts or of a composite.
            default: The experts that priority prefers.
        """
        buckets = split(chosen)
        curves = self.curves(dispatcher, {default, *(name for _, name in buckets)})
        if any(name not in curves for _, name in buckets):
            return ""
        all_us = {
            t: time_at(curves[serving(buckets, t)], t)
            for t in sorted({t for _, name in buckets for t, _ in curves[name]})
        }
        ran = [t for t, us in all_us.items() if us < math.inf]
        us = {t: all_us[t] for t in (*ran[:1], *ran[len(ran) // 2 :][:1], *ran[-1:])}
        parts = []
        if us and not self.distance and not self.device:
            times = [f"{n:,.{0 if n >= 100 else 1}f} µs at T={t}" for t, n in us.items()]
            parts.append(f"{_listed(times)} for a call")
        if us and default in curves and default != chosen:
            gains = [f"{time_at(curves[default], t) / n:.2f}" for t, n in us.items()]
            at = "" if parts else f" at T={_listed([str(t) for t in us])}"
            parts.append(
                f"{_listed(gains)} times as fast as {default!r}{at}, which priority prefers"
            )
        return "tuned table: " + "; ".join(parts) if parts else ""

    def held(self, names: Collection[str]) -> float:
        """Return how often these backends together hold the weights; infinite if unknown."""
        behind = {experts: dispatcher for dispatcher, experts in self.times}
        copied = [self._copied(behind.get(name, ""), name) for name in names]
        return sum(copied) + max(1 - min(1, share) for share in copied)

    def _copied(self, dispatcher: str, experts: str) -> float:
        shares = [r.copied for r in self.times.get((dispatcher, experts), {}).values()]
        return max((s for s in shares if s is not None), default=math.inf)

    def __str__(self) -> str:
        tokens = sorted({t for records in self.times.values() for t in records})
        text = f"{self.key.device or self.key.arch}, T={tokens[0]}..{tokens[-1]}"
        text += ", experts on one rank" if self.borrowed else ""
        text += f", on {self.key.ranks} ranks" if self.key.ranks > 1 else ""
        if self.device:
            text += f", the nearest device to {self.device}"
        return text + (f", nearest shape {self.key}" if self.distance else "")


def _listed(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def lookup(problem: MoEProblem) -> Found | None:
    """Return the times of ``problem`` or of the nearest shape; None if none is near.

    Where its device was not measured, another device of its architecture serves.
    """
    if not any_for(problem):
        return None
    table, wanted = known(str(problem.device)), Key.of(problem)
    by_name = sorted(table, key=lambda key: (key.device, str(key)))
    parallel, high = problem.parallel, problem.max_num_tokens
    if high is not None:  # the table counts tokens that bring all of their choices to this rank
        high = max(1, math.ceil(high * parallel.dp_size / parallel.ep_size))
    for device in dict.fromkeys((wanted.device, "")):
        for ranks in sorted({wanted.ranks, 1}, reverse=True):
            near = nearest(by_name, replace(wanted, ranks=ranks, device=device).distance)
            if near is not None:
                key, distance = near
                other = wanted.device if device != wanted.device else ""
                return Found(key, distance, table[key], high, ranks != wanted.ranks, other)
    return None
