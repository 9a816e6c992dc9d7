"""Compute what the choice among experts loses on shapes that no tuned table has.

    python benchmarks/choice_regret.py

Reads the shipped tables of the choice, needs no GPU, and holds out one shape at a time: each rule
sees only the other shapes of the table (or another device's table), and chooses a backend for the
held-out one. Regret is the chosen backend's measured time over the fastest backend's, minus one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moekit.selection.tuned import SHIPPED
from moekit.selection.tuned.choice import _RIDGE
from moekit.selection.tuned.files import size_distance
from moekit.selection.tuned.table import Key, read

Times = Mapping[str, float]  # backend -> microseconds
Curve = Sequence[tuple[float, float]]  # (log rows per expert, log time over the fastest one's)


@dataclass(frozen=True)
class Shape:
    """One shape of a device's table: the times of each backend by tokens."""

    key: Key
    cells: Mapping[int, Times]

    def rows(self, tokens: int) -> float:
        """Return the logarithm of an expert's rows on average."""
        return math.log(tokens * self.key.top_k / self.key.experts)

    def curves(self) -> dict[str, Curve]:
        """Return each backend's times relative to the fastest one's, by rows."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for tokens, times in sorted(self.cells.items()):
            for backend, us in times.items():
                found[backend].append((self.rows(tokens), math.log(us / min(times.values()))))
        return dict(found)


Rule = Callable[[Shape, int, Sequence[Shape]], str]


def at(curve: Curve, rows: float) -> float:
    """Interpolate a curve, which is constant beyond its ends."""
    if rows <= curve[0][0]:
        return curve[0][1]
    for (low, a), (high, b) in zip(curve, curve[1:], strict=False):
        if rows <= high:
            return a + (b - a) * (rows - low) / (high - low)
    return curve[-1][1]


def priority(held: Shape, tokens: int, table: Sequence[Shape]) -> str:
    """Choose as `compose` does where no near shape was measured."""
    return "triton"


def _others(held: Shape, table: Sequence[Shape]) -> list[Shape]:
    return [s for s in table if s.key.scheme == held.key.scheme and s.key.sizes != held.key.sizes]


def nearest_shape(held: Shape, tokens: int, table: Sequence[Shape]) -> str:
    """Choose the fastest of the nearest other shape at as many rows per expert."""
    others = _others(held, table)
    near = min(others, key=lambda s: size_distance(s.key.sizes, held.key.sizes)).curves()
    known = sorted(set(near) & set(held.cells[tokens]))
    return min(known, key=lambda backend: at(near[backend], held.rows(tokens)))


def mean_of_shapes(held: Shape, tokens: int, table: Sequence[Shape]) -> str:
    """Choose the fastest of all other shapes on average, at as many rows per expert."""
    curves = [s.curves() for s in _others(held, table)]
    costs = {}
    for backend in sorted(held.cells[tokens]):
        known = [at(c[backend], held.rows(tokens)) for c in curves if backend in c]
        costs[backend] = sum(known) / len(known) if known else math.inf
    return min(costs, key=costs.__getitem__)


def other_device(held: Shape, tokens: int, table: Sequence[Shape]) -> str:
    """Choose the fastest for the same shape on the other device, rows scaled by ridge points."""
    same = [s for s in table if replace(s.key, device=held.key.device) == held.key]
    if not same:
        return priority(held, tokens, table)
    shift = math.log(_RIDGE[same[0].key.device] / _RIDGE[held.key.device])
    curves = same[0].curves()
    known = sorted(set(curves) & set(held.cells[tokens]))
    return min(known, key=lambda backend: at(curves[backend], held.rows(tokens) + shift))


def tables() -> dict[str, list[Shape]]:
    """Return the shapes of each shipped table that were measured on one rank, by device."""
    found: dict[str, list[Shape]] = {}
    for file in sorted(SHIPPED.glob("*/*.json")):
        for key, times in read(file).items():
            if key.ranks == 1:
                cells: dict[int, dict[str, float]] = defaultdict(dict)
                for (_, backend), records in times.items():
                    for tokens, record in records.items():
                        if record.us is not None:
                            cells[tokens][backend] = record.us
                found.setdefault(key.device, []).append(Shape(key, dict(cells)))
    return found


def main() -> None:
    """Print a row for each rule and device."""
    shapes = tables()
    rules = {
        "priority": (priority, False),
        "nearest other shape": (nearest_shape, False),
        "mean of other shapes": (mean_of_shapes, False),
        "same shape, other device": (other_device, True),
    }
    print("| rule | device | cells | mean regret | worst | cells above 2 % | worst cell |")
    print("|---|---|---|---|---|---|---|")
    for name, (rule, elsewhere) in rules.items():
        for device, table in shapes.items():
            seen = [s for d, t in shapes.items() if (d != device) == elsewhere for s in t]
            regrets = []
            for held in table:
                for tokens, times in held.cells.items():
                    chosen = rule(held, tokens, seen)
                    cell = f"{held.key}, {held.key.scheme}, T={tokens}: {chosen}"
                    regrets.append((times[chosen] / min(times.values()) - 1, cell))
            worst, where = max(regrets)
            mean = sum(r for r, _ in regrets) / len(regrets)
            above = sum(r > 0.02 for r, _ in regrets)
            print(
                f"| {name} | {device} | {len(regrets)} | {mean:.2%} | {worst:.1%} | {above} "
                f"| {where} |"
            )


if __name__ == "__main__":
    main()
