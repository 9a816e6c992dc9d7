"""Plans: which backend serves which range of tokens, made from measured times.

A curve interpolates log time over log T between measured token counts, so that it is exact for
times that follow a power of T.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

# (tokens, microseconds) in the order of tokens; infinite where the backend failed.
Curve = Sequence[tuple[int, float]]
# (most tokens that the backend serves, its name) in the order of tokens; None for the last.
Buckets = tuple[tuple["int | None", str], ...]
_Span = tuple[float, float]

# A backend this close to the fastest is as good: less is noise, and not worth a second backend.
TOLERANCE = 1.03
# Backends share weights whose packed form copies at most this part of the canonical tensors.
SHARING = 0.05


@dataclass(frozen=True)
class Plan:
    """The division of calls between backends.

    cost: the mean of log time over log T, to compare plans; infinite if the plan serves no calls of
        some size that another backend serves.
    """

    buckets: Buckets
    cost: float


def serving(buckets: Buckets, tokens: float) -> str:
    """Return the name of the backend that serves a call of ``tokens``."""
    return next(name for most, name in buckets if most is None or tokens <= most)


def join(buckets: Buckets) -> str:
    """Return the name of these buckets' composite, as in ``triton:64|deepgemm``."""
    return "|".join(name if most is None else f"{name}:{most}" for most, name in buckets)


def split(name: str) -> Buckets:
    """Return the buckets of a name that `join` made."""
    parts = [part.partition(":") for part in name.split("|")]
    return tuple((int(most) if most else None, member) for member, _, most in parts)


def time_at(curve: Curve, tokens: float) -> float:
    """Return microseconds at ``tokens``, interpolated between measurements.

    Times are constant below the smallest measured T, proportional to T above the largest, and
    infinite next to a failure.
    """
    (low, first), (high, last) = curve[0], curve[-1]
    if tokens <= low:
        return first
    if tokens >= high:
        return last * tokens / high
    after = bisect_left(curve, (tokens,))
    (a, at_a), (b, at_b) = curve[after - 1], curve[after]
    if tokens == b or math.inf in (at_a, at_b):
        return at_b if tokens == b else math.inf
    share = math.log(tokens / a) / math.log(b / a)
    return math.exp((1 - share) * math.log(at_a) + share * math.log(at_b))


def best_plan(
    curves: Mapping[str, Curve], copied: Mapping[str, float], high: int | None = None
) -> Plan | None:
    """Return the fastest plan that holds the weights once; None if no backend has a time.

    It consists of backends that share the weights (``copied`` up to `SHARING`), or of one backend
    that does not.
    """
    sharing = {name for name in curves if copied.get(name, math.inf) <= SHARING}
    sets = [sharing, *({name} for name in curves if name not in sharing)]
    plans = [made for names in sets if (made := plan(curves, high, names)) is not None]
    return min(plans, key=lambda made: made.cost, default=None)


def plan(
    curves: Mapping[str, Curve], high: int | None = None, allowed: Collection[str] | None = None
) -> Plan | None:
    """Return the plan of the fewest backends that is fast enough; None if no backend has a time.

    At every T up to ``high`` (default: the largest measured) its backend is within `TOLERANCE` of
    the fastest. Of plans with equally few backends it is the fastest on average.

    allowed: the backends that may serve, and that are compared; default: all.
    """
    able = {name: c for name, c in curves.items() if allowed is None or name in allowed}
    # By the name that serves the last span: (switches, cost, that name).
    best: dict[str, tuple[int, float, str]] = {}
    came_from: list[dict[str, str]] = []  # for each span, the name before each name
    covered: list[_Span] = []
    lacking = 0.0
    for span in _spans(curves, high):
        fit = _fit(able, span)
        if not fit:  # the neighbours' backends serve it too
            lacking = math.inf if _fit(curves, span) else lacking
            continue
        before = list(best.values()) or [(0, 0.0, "")]
        best, names = {}, {}
        for name, log in fit.items():
            switches, cost, names[name] = min(
                (switches + (last != name), cost, last) for switches, cost, last in before
            )
            best[name] = switches, cost + _width(span) * log, name
        came_from.append(names)
        covered.append(span)
    if not best:
        return None
    _, cost, last = min(best.values())
    path = [last]
    for names in reversed(came_from[1:]):
        path.append(names[path[-1]])
    starts = [start for start, _ in covered]
    return Plan(_buckets(curves, starts, path[::-1]), cost / sum(map(_width, covered)) + lacking)


def _buckets(curves: Mapping[str, Curve], starts: Sequence[float], names: Sequence[str]) -> Buckets:
    """Return buckets with whole bounds for names that serve from these starts on."""
    buckets: list[tuple[int | None, str]] = [(None, names[0])]
    for start, name in zip(starts, names, strict=True):
        if name == buckets[-1][1]:
            continue
        _, leaving = buckets.pop()
        most = math.floor(start * (1 + 1e-9))
        most -= time_at(curves[name], most) * (1 + 1e-9) < time_at(curves[leaving], most)
        earlier = (buckets[-1][0] or 0) if buckets else 0
        if most > earlier:  # else no whole number is left for it
            buckets.append((most, leaving))
        elif buckets and buckets[-1][1] == name:
            buckets.pop()
        buckets.append((None, name))
    return tuple(buckets)


def _spans(curves: Mapping[str, Curve], high: int | None) -> list[_Span]:
    """Return ranges of tokens in which no interpolated curve bends, and no two curves cross.

    A backend that is fast enough at both ends of a span is fast enough in all of it.
    """
    if not curves:
        return []
    measured = {tokens for curve in curves.values() for tokens, _ in curve}
    most = max(measured) if high is None else max(1, high)
    ends = sorted({min(tokens, most) for tokens in (*measured, most)})
    grid = {float(end) for end in ends}
    for a, b in itertools.pairwise(ends):
        for one, other in itertools.combinations(curves.values(), 2):
            grid.update(_crossing(one, other, a, b))
    return list(itertools.pairwise(sorted(grid))) or [(float(most), float(most))]


def _crossing(one: Curve, other: Curve, a: int, b: int) -> Iterator[float]:
    """Yield the tokens strictly between ``a`` and ``b`` at which two curves cross, if they do."""
    times = [time_at(curve, tokens) for curve in (one, other) for tokens in (a, b)]
    if math.inf not in times:
        at_a, at_b = math.log(times[0] / times[2]), math.log(times[1] / times[3])
        if at_a * at_b < 0:
            yield a * (b / a) ** (at_a / (at_a - at_b))


def _fit(curves: Mapping[str, Curve], span: _Span) -> dict[str, float]:
    """Return the mean log time of the backends that are fast enough at both ends of ``span``."""
    times = {name: [time_at(curve, end) for end in span] for name, curve in curves.items()}
    times = {name: ends for name, ends in times.items() if math.inf not in ends}
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    return {
        name: sum(map(math.log, ends)) / 2
        for name, ends in times.items()
        if all(t <= TOLERANCE * f for t, f in zip(ends, fastest, strict=True))
    }


def _width(span: _Span) -> float:
    return math.log(span[1] / span[0]) or 1.0
