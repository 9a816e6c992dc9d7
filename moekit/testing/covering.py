"""Draw a covering array: few cases in which every pair of values of two dimensions occurs.

Faults hide where two unusual values meet, and the product of all dimensions has too many cases to
run. Cases are chosen greedily (the method of AETG): each is built around a pair that no case has
yet, and has the values that cover most of the other pairs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

# Cases that are tried around a pair before it counts as impossible. The first of them are greedy.
_ATTEMPTS, _GREEDY = 24, 6


def covering_array(
    dimensions: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    draw: random.Random,
    most: int | None = None,
) -> list[Row]:
    """Return cases that have all possible pairs of values of two dimensions.

    Args:
        dimensions: the name of each dimension -> its values.
        allowed: tells whether a case is possible. A pair counts as impossible if no case around it
            is found to be allowed.
        draw: breaks ties.
        most: return at most this many cases, those that cover most pairs.
    """
    values = [(name, value) for name, each in dimensions.items() for value in each]
    # A value is a bit. A mask of each value holds the others that it has not met.
    of = {name: [i for i, (n, _) in enumerate(values) if n == name] for name in dimensions}
    unmet = [
        sum(1 << j for j, (other, _) in enumerate(values) if other != name) for name, _ in values
    ]
    rows: list[Row] = []
    while any(unmet) and (most is None or len(rows) < most):
        first = max(range(len(values)), key=lambda i: unmet[i].bit_count())
        second = unmet[first].bit_length() - 1
        for attempt in range(_ATTEMPTS):
            chosen = {values[i][0]: i for i in (first, second)}
            for name in draw.sample(list(of), len(of)):
                options = draw.sample(of[name], len(of[name]))
                mask = sum(1 << i for i in chosen.values()) if attempt < _GREEDY else 0
                gains = [(unmet[i] & mask).bit_count() for i in options]
                chosen.setdefault(name, options[gains.index(max(gains))])
            row = {name: values[chosen[name]][1] for name in dimensions}
            if allowed(row):
                rows.append(row)
                mask = sum(1 << i for i in chosen.values())
                for i in chosen.values():
                    unmet[i] &= ~mask
                break
        else:
            unmet[first] &= ~(1 << second)
            unmet[second] &= ~(1 << first)
    return rows
