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
_ATTEMPTS, _GREEDY = 16, 6


def covering_array(
    dimensions: Mapping[str, Sequence[Any]],
    possible: Callable[[Row], Row | None],
    draw: random.Random,
    most: int | None = None,
) -> list[Row]:
    """Return cases that have all possible pairs of values of two dimensions.

    Args:
        dimensions: the name of each dimension -> its values, which are hashable.
        possible: returns a case itself, or with other values where its own contradict each other,
            or None. A pair counts as impossible if no case around it comes back with the pair.
        draw: breaks ties.
        most: return at most this many cases, those that cover most pairs.
    """
    values = [(name, value) for name, each in dimensions.items() for value in each]
    # A value is a bit. A mask of each value holds the others that it has not met.
    bit = {value: i for i, value in enumerate(values)}
    unmet = [
        sum(1 << j for j, (other, _) in enumerate(values) if other != name) for name, _ in values
    ]
    rows: list[Row] = []
    while any(unmet) and (most is None or len(rows) < most):
        first = max(range(len(values)), key=lambda i: unmet[i].bit_count())
        second = unmet[first].bit_length() - 1
        start = dict((values[first], values[second]))
        for attempt in range(_ATTEMPTS):
            row = dict(start)
            for name in draw.sample(list(dimensions), len(dimensions)):
                options = draw.sample(list(dimensions[name]), len(dimensions[name]))
                mask = sum(1 << bit[each] for each in row.items()) if attempt < _GREEDY else 0
                gains = [(unmet[bit[name, value]] & mask).bit_count() for value in options]
                row.setdefault(name, options[gains.index(max(gains))])
            found = possible({name: row[name] for name in dimensions})
            if found is not None and start.items() <= found.items():
                rows.append(found)
                met = sum(1 << bit[each] for each in found.items())
                for each in found.items():
                    unmet[bit[each]] &= ~met
                break
        else:
            unmet[first] &= ~(1 << second)
            unmet[second] &= ~(1 << first)
    return rows
