"""Plans: interpolation, buckets, and that no plan is slower than the tolerance allows."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from moekit.selection.tuned.plan import (
    TOLERANCE,
    Curve,
    best_plan,
    join,
    plan,
    serving,
    split,
    time_at,
)

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
INF = math.inf


def power(a: float, b: float, tokens=TOKENS) -> Curve:
    return [(t, a * t**b) for t in tokens]


def roofline(overhead: float, read: float, flop: float, tokens=TOKENS) -> Curve:
    return [(t, overhead + max(read * min(1, t / 16), flop * t)) for t in tokens]


class Counted(list):
    """A curve that counts how often its points are read."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)

    def __iter__(self):
        for point in super().__iter__():
            Counted.reads += 1
            yield point


def test_planning_takes_time_with_the_points_of_a_table() -> None:
    reads = []
    for points in (200, 400, 800):
        Counted.reads = 0
        tokens = range(1, points + 1)
        curves = {
            name: Counted((t, 10 + t + (t * step % 13) / 10) for t in tokens)
            for name, step in (("a", 7919), ("b", 7907))
        }
        assert plan(curves) is not None
        reads.append(Counted.reads)
    assert reads[1] < 2.6 * reads[0] and reads[2] < 2.6 * reads[1], reads


# -- interpolation -----------------------------------------------------------------------------


def test_power_laws_are_interpolated_exactly():
    for exponent in (0.0, 0.3, 1.0, 1.7):
        curve = power(7.0, exponent)
        for tokens in (1, 2, 5, 16, 17, 300, 4095, 16384):
            assert time_at(curve, tokens) == pytest.approx(7.0 * tokens**exponent)


def test_times_outside_the_measured_range():
    curve = [(16, 10.0), (64, 20.0)]
    assert time_at(curve, 1) == time_at(curve, 16) == 10
    assert time_at(curve, 640) == pytest.approx(200)
    assert time_at([(16, 10.0)], 3) == 10 and time_at([(16, 10.0)], 32) == 20


def test_times_next_to_a_failure_are_infinite():
    curve = [(1, 5.0), (16, INF), (64, 20.0), (256, 30.0), (1024, INF)]
    times = [time_at(curve, t) for t in (1, 2, 16, 63, 64, 256, 257, 5000)]
    assert times == [5, INF, INF, INF, 20, 30, INF, INF]


def test_monotone_between_neighbours():
    draw = random.Random(1)
    for _ in range(200):
        curve = [(t, draw.uniform(1, 1000)) for t in TOKENS]
        for (a, at_a), (b, at_b) in itertools.pairwise(curve):
            for t in {a, (a + b) // 2, b}:
                assert min(at_a, at_b) * 0.999 <= time_at(curve, t) <= max(at_a, at_b) * 1.001


# -- plans -------------------------------------------------------------------------------------


def test_one_backend_where_one_is_best():
    curves = {"fast": power(10, 0.5), "slow": power(11, 0.5)}
    assert plan(curves).buckets == ((None, "fast"),)


def test_two_backends_and_where_they_cross():
    # 10 T^.2 = 1 T^.7 at T = 100
    made = plan({"flat": power(10, 0.2), "steep": power(1, 0.7)})
    assert made.buckets == ((100, "steep"), (None, "flat"))
    assert join(made.buckets) == "steep:100|flat" and split("steep:100|flat") == made.buckets
    assert [serving(made.buckets, t) for t in (1, 100, 101, 10**6)] == ["steep"] * 2 + ["flat"] * 2


def test_only_sizes_that_can_be_called_count():
    curves = {"flat": power(10, 0.2), "steep": power(1, 0.7)}
    assert plan(curves, 90).buckets == ((None, "steep"),)
    assert plan(curves, 101).buckets == ((None, "steep"),), "too little gain for a second one"
    assert plan(curves, 200).buckets == ((100, "steep"), (None, "flat"))
    assert plan(curves, 1).buckets == ((None, "steep"),)
    assert len(plan(curves, 10**6).buckets) == 2


@pytest.mark.parametrize("gain", [1.0, 1.02, 1.029])
def test_a_small_gain_is_not_worth_a_second_backend(gain: float):
    curves = {"a": [(1, 10.0), (64, 100.0)], "b": [(1, 10.0 * gain), (64, 100.0 / gain)]}
    assert len(plan(curves).buckets) == 1
    large = {"a": [(1, 10.0), (64, 100.0)], "b": [(1, 10.4), (64, 100.0 / 1.04)]}
    assert plan(large).buckets == ((8, "a"), (None, "b"))


def test_a_backend_may_serve_twice():
    curves = {"ends": [(1, 10.0), (64, 40.0), (4096, 900.0)],
              "middle": [(1, 20.0), (64, 20.0), (4096, 1800.0)]}  # fmt: skip
    made = plan(curves)
    assert [name for _, name in made.buckets] == ["ends", "middle", "ends"]


def test_a_backend_does_not_serve_where_it_failed():
    curves = {"fast": [(1, 1.0), (64, 2.0), (256, INF)], "slow": [(1, 9.0), (64, 9.0), (256, 9.0)]}
    assert plan(curves).buckets == ((64, "fast"), (None, "slow"))
    assert plan(curves, 64).buckets == ((None, "fast"),)
    assert plan({"fast": curves["fast"]}).buckets == ((None, "fast"),)
    assert plan(curves, allowed={"fast"}).cost == INF, "it leaves out what the other one does"
    assert plan({"none": [(1, INF)]}) is None
    assert plan({}) is None and plan(curves, allowed=set()) is None


def test_a_backend_that_failed_below_serves_above():
    curves = {"fast": [(1, INF), (16, 2.0), (64, 2.0)], "slow": [(1, 9.0), (16, 9.0), (64, 9.0)]}
    assert plan(curves).buckets == ((15, "slow"), (None, "fast"))


def test_memory_counts_before_speed():
    """A backend that copies the weights serves alone, or not at all."""
    curves = {"a": power(10, 0.2), "b": power(1, 0.7), "own": power(0.9, 0.69)}
    assert join(best_plan(curves, {"a": 0.0, "b": 0.01, "own": 1.0}).buckets) == "b:100|a"
    assert "own" in join(plan(curves).buckets), "it would be faster with both"
    alone = {**curves, "own": power(0.5, 0.6)}
    assert join(best_plan(alone, {"a": 0.0, "b": 0.0, "own": 1.0}).buckets) == "own"
    assert join(best_plan(alone, {}).buckets) == "own", "unknown is not shared"
    assert best_plan({}, {}) is None


def random_curves(draw: random.Random) -> dict[str, Curve]:
    def one() -> Curve:
        tokens = sorted(draw.sample(range(1, 20000), draw.randint(1, 7)))
        if draw.random() < 0.5:
            tokens = list(TOKENS)
        kind = draw.random()
        if kind < 0.5:
            curve = power(draw.uniform(1, 50), draw.uniform(0, 1.2), tokens)
        elif kind < 0.8:
            args = draw.uniform(5, 60), draw.uniform(50, 600), draw.uniform(0.1, 2)
            curve = roofline(*args, tokens)
        else:
            curve = [(t, draw.uniform(5, 500)) for t in tokens]
        return [(t, INF if draw.random() < 0.05 else us) for t, us in curve]

    return {f"b{i}": one() for i in range(draw.randint(1, 6))}


def test_no_plan_is_slower_than_the_tolerance_allows():
    """At every whole T the plan's interpolated time is within the tolerance of the best one."""
    for seed in range(400):
        check_no_choice_is_slower(random.Random(seed))


def check_no_choice_is_slower(draw: random.Random):
    curves = random_curves(draw)
    high = draw.choice([None, 1, 7, 100, 5000, 40000])
    made = plan(curves, high)
    most = high or max(t for curve in curves.values() for t, _ in curve)
    if made is None:  # nobody works at two neighbouring sizes
        pairs = [p for curve in curves.values() for p in itertools.pairwise(curve)]
        assert all(INF in (us, later) for (t, us), (_, later) in pairs if t < most)
        return
    bounds = [bound for bound, _ in made.buckets]
    assert bounds[-1] is None and all(1 <= b for b in bounds[:-1])
    assert all(a < b for a, b in itertools.pairwise(bounds[:-1]))
    assert all(a != b for (_, a), (_, b) in itertools.pairwise(made.buckets))
    low = min(t for curve in curves.values() for t, _ in curve)
    counts = {min(most, round(math.exp(draw.uniform(0, math.log(most))))) for _ in range(60)}
    counts |= {t for t in (low, most, *(b for b in bounds[:-1]), *(b + 1 for b in bounds[:-1]))}
    for tokens in counts:
        if not low <= tokens <= most:
            continue
        times = {name: time_at(curve, tokens) for name, curve in curves.items()}
        # Who works at this very T alone, between failures, does not serve.
        sides = [t for t in (tokens * 0.999999, tokens * 1.000001) if low <= t <= most] or [tokens]
        fit = [us for name, us in times.items()
               if any(time_at(curves[name], side) < INF for side in sides)]  # fmt: skip
        if min(fit, default=INF) < INF:
            chosen = times[serving(made.buckets, tokens)]
            assert chosen <= min(fit) * TOLERANCE * (1 + 1e-9), (tokens, made.buckets)


@pytest.mark.parametrize("seed", range(20))
def test_never_more_backends_than_needed(seed: int):
    """One backend serves alone if it is within the tolerance everywhere; no bucket is needless."""
    draw = random.Random(seed)
    curves = {f"b{i}": power(draw.uniform(1, 20), draw.uniform(0, 1)) for i in range(4)}
    made = plan(curves)
    singles = [n for n, c in curves.items()
               if all(time_at(c, t) <= TOLERANCE * min(time_at(o, t) for o in curves.values())
                      for t in range(1, 16385, 7))]  # fmt: skip
    assert (len(made.buckets) == 1) == bool(singles)
    # Power laws: a lower exponent is best from some T on, so nobody is best twice.
    assert len({name for _, name in made.buckets}) == len(made.buckets)


def test_the_cost_is_the_area_below_the_curve():
    curves = {"a": power(10, 0.2), "b": power(1, 0.7)}
    both, a, b = (plan(curves, allowed=names).cost for names in ({"a", "b"}, {"a"}, {"b"}))
    mean = math.log(16384) / 2
    assert a == pytest.approx(math.log(10) + 0.2 * mean)
    assert b == pytest.approx(0.7 * mean)
    assert both < min(a, b)
