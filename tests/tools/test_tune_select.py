"""`explain` and `compose` choose by tuned tables."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tuned_tables import PROBLEM, fakes, make_table, movers, no_tables, write_table

import moekit
from moekit.cli.main import main
from moekit.discovery import registry as plugins
from moekit.errors import BackendBroken
from moekit.selection import select
from moekit.selection.composite_experts import CompositeExperts
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case

tuned = pytest.fixture(no_tables, name="tuned")

# Cross at T = 100: 10 T^.2 = 1 T^.7
CROSSING = {"flat": (10, 0.2), "steep": (1, 0.7)}


def order(explanation: moekit.Explanation, dispatcher: str = "local") -> list[str]:
    return [p.experts for p in explanation.combinations if p.dispatcher == dispatcher]


def test_measured_times_count_before_priorities(tuned: Path) -> None:
    write_table(tuned / "x.json", make_table({"a": (3, 1), "b": (1, 1), "torch": (2, 1)}))
    found = fakes("a", "b", priority=50)
    explanation = moekit.explain(PROBLEM, backends=found)
    assert order(explanation) == ["b", "torch", "a", "reference"]
    assert explanation.chosen.dispatcher == "local"
    assert explanation.why == "by measurement (cpu, T=1..256)"
    assert explanation.note == "measured 2026-01-02 with acme 1.0"
    assert f"chosen: local + b ({explanation.why})\n  tuned table: " in str(explanation)
    kernel = moekit.compose(PROBLEM, backends=found)
    assert kernel.experts.spec.name == "b" and kernel.explanation == explanation
    near = moekit.explain(PROBLEM.replace(hidden_size=80), backends=found)
    assert near.why == "by measurement (cpu, T=1..256, nearest shape E 4 K 2 H 64 I 48)"
    far = moekit.explain(PROBLEM.replace(hidden_size=512), backends=found)
    assert far.why == "by priority" and far.note == "" and order(far)[0] == "a"


def test_expected_times_and_gains(tuned: Path) -> None:
    """Times belong to the problem's own shape and device; gains to the nearest one."""
    write_table(tuned / "x.json", make_table({"a": (300, 0.5), "b": (99.5, 0.5)}))
    found = fakes("a", "b", "new", priority=50)
    explanation = moekit.explain(PROBLEM, backends=found)
    times = "tuned table: 99.5 µs at T=1, 398 µs at T=16 and 1,592 µs at T=256 for a call"
    gain = "3.02, 3.02 and 3.02 times as fast as 'a'"
    assert explanation.chosen.experts == "b"
    assert explanation.expected == f"{times}; {gain}, which priority prefers"
    assert explanation.as_dict()["expected"] == explanation.expected
    assert moekit.compose(PROBLEM, backends=found).explanation.expected == explanation.expected
    near = moekit.explain(PROBLEM.replace(hidden_size=80), backends=found).expected
    assert near == f"tuned table: {gain} at T=1, 16 and 256, which priority prefers"
    # By name, or without a rival in the table, there are times and no gain.
    assert moekit.explain(PROBLEM, experts="b", backends=found).expected == times
    for case in (
        moekit.explain(PROBLEM, experts="new", backends=found),
        moekit.explain(PROBLEM.replace(hidden_size=80), experts="b", backends=found),
        moekit.explain(PROBLEM.replace(hidden_size=512), backends=found),
        moekit.explain(PROBLEM.replace(batch_invariant=True), backends=found),
    ):
        assert case.expected == ""


def test_expected_times_of_composites_and_of_failures(tuned: Path) -> None:
    write_table(tuned / "x.json", make_table(CROSSING))
    explanation = moekit.explain(PROBLEM, backends=fakes("flat", "steep", priority=50))
    assert explanation.chosen.experts == "steep:100|flat"
    assert explanation.expected == (
        "tuned table: 1.0 µs at T=1, 7.0 µs at T=16 and 30.3 µs at T=256 for a call; "
        "10.00, 2.50 and 1.00 times as fast as 'flat', which priority prefers"
    )
    write_table(tuned / "x.json", make_table({"a": {1: 2.0, 16: None, 256: 9.0}, "b": (5, 1)}))
    ran = moekit.explain(PROBLEM, experts="a", backends=fakes("a", "b")).expected
    assert ran == "tuned table: 2.0 µs at T=1 and 9.0 µs at T=256 for a call"


def test_names_and_variables_count_before_tables(tuned: Path, monkeypatch) -> None:
    write_table(tuned / "x.json", make_table({"a": (3, 1), "b": (1, 1)}))
    found = fakes("a", "b")
    named = moekit.explain(PROBLEM, experts="a", backends=found)
    assert named.chosen.experts == "a" and "experts by name" in named.why and named.note == ""
    there = moekit.explain(PROBLEM, "local", backends=found)
    assert there.why == "dispatcher by name, experts by measurement (cpu, T=1..256)"
    assert there.chosen.experts == "b"
    monkeypatch.setenv("MOEKIT_EXPERTS", "a")
    assert moekit.compose(PROBLEM, backends=found).experts.spec.name == "a"


def test_unmeasured_backends_follow_by_priority_and_are_named(tuned: Path) -> None:
    write_table(tuned / "x.json", make_table({"a": (3, 1), "torch": (2, 1)}))
    found = fakes("a", "new", "newer", priority=50)
    explanation = moekit.explain(PROBLEM, backends=found)
    assert order(explanation) == ["torch", "a", "new", "newer", "reference"]
    assert "not measured: new, newer (python -m moekit tune --select)" in explanation.note
    # One alone is no comparison.
    write_table(tuned / "x.json", make_table({"torch": (2, 1), "gone": (1, 1)}))
    assert moekit.explain(PROBLEM, backends=found).why == "by priority"


def test_unsupported_and_reference_backends_are_not_chosen_by_measurement(tuned: Path) -> None:
    times = {"a": (3, 1), "b": (2, 1), "reference": (1, 1), "nobody": (0.1, 1)}
    write_table(tuned / "x.json", make_table(times))
    found = fakes("a", "b")
    assert order(moekit.explain(PROBLEM, backends=found))[0] == "b"
    picky = fakes("a", "c", check=lambda p: ["cannot"])
    picky.register(found.expert("b"))
    write_table(tuned / "y.json", make_table({"torch": (4, 1)}))
    explanation = moekit.explain(PROBLEM, backends=picky)
    assert explanation.chosen.experts == "b" and explanation.rejected_experts["a"] == ("cannot",)


def test_backends_that_failed_are_not_chosen(tuned: Path) -> None:
    times = {"a": {1: None, 16: None, 256: None}, "b": (5, 1), "torch": (9, 1)}
    write_table(tuned / "x.json", make_table(times))
    assert order(moekit.explain(PROBLEM, backends=fakes("a", "b")))[0] == "b"


# -- composites --------------------------------------------------------------------------------


def test_a_composite_is_chosen_where_curves_cross(tuned: Path, caplog) -> None:
    write_table(tuned / "x.json", make_table(CROSSING))
    found = fakes("flat", "steep")
    with caplog.at_level(logging.INFO, "moekit"):
        kernel = moekit.compose(PROBLEM, backends=found)
    assert str(kernel.explanation.chosen) == "local + steep:100|flat"
    assert "steep:100|flat (by measurement" in caplog.text
    assert kernel.explanation.note.startswith("measured 2026-01-02 with acme 1.0; ")
    assert kernel.explanation.note.endswith("; weights held once")
    assert order(kernel.explanation)[1:] == ["steep", "flat", "torch", "reference"]
    experts = kernel.experts
    assert isinstance(experts, CompositeExperts)
    assert [experts.member(rows).spec.name for rows in (1, 100, 101)] == ["steep", "steep", "flat"]
    packed = kernel.pack(make_case(PROBLEM, 1).weights)
    assert packed.extra_bytes == 0
    for tokens in (0, 100, 101):
        check_call(kernel, make_case(PROBLEM, tokens), packed)
    # As a name it gives the same again.
    again = moekit.compose(PROBLEM, experts=kernel.explanation.chosen.experts, backends=found)
    assert again.experts.spec == experts.spec


@pytest.mark.parametrize(
    ("most", "chosen"), [(90, "steep"), (101, "steep"), (2000, "steep:100|flat"), (1, "steep")]
)
def test_only_sizes_up_to_max_num_tokens_count(tuned: Path, most: int, chosen: str) -> None:
    write_table(tuned / "x.json", make_table(CROSSING))
    problem = PROBLEM.replace(max_num_tokens=most)
    assert moekit.explain(problem, backends=fakes("flat", "steep")).chosen.experts == chosen


def test_a_composite_with_two_copies_of_the_weights_must_be_named(tuned: Path) -> None:
    times = {**CROSSING, "own": {1: 50.0, 16: 50.0, 64: 8.0, 256: 90.0}}
    found = fakes("flat", "steep", "own")
    write_table(tuned / "x.json", make_table(times, copied={"own": 1.0}))
    explanation = moekit.explain(PROBLEM, backends=found)
    assert explanation.chosen.experts == "steep:100|flat"
    assert "|own:" in explanation.note and "more than one form" in explanation.note
    wanted = explanation.note.partition("experts='")[2].partition("'")[0]
    kernel = moekit.compose(PROBLEM, experts=wanted, backends=found)
    assert (
        kernel.experts.spec.name == wanted and kernel.explanation.note == "weights held 2.00 times"
    )
    for copied in ({"flat": 0.5}, {"flat": None}):
        write_table(tuned / "x.json", make_table(CROSSING, copied=copied))
        assert "|" not in moekit.explain(PROBLEM, backends=found).chosen.experts


def test_members_that_do_not_agree_on_summing_are_not_composed(tuned: Path) -> None:
    """One sums over top-k and one does not, so the better one is chosen alone."""
    write_table(tuned / "x.json", make_table(CROSSING))
    found = fakes("flat")
    other = found.expert("reference")
    found.register(type(other)(**{**vars(other), "name": "steep", "priority": 0}))
    explanation = moekit.explain(PROBLEM, backends=found)
    assert order(explanation)[:2] == ["steep", "flat"] or order(explanation)[:2] == [
        "flat",
        "steep",
    ]
    check_call(moekit.compose(PROBLEM, backends=found), make_case(PROBLEM, 5))


def test_a_composite_with_a_member_that_does_not_load_is_skipped(tuned: Path, caplog) -> None:
    write_table(tuned / "x.json", make_table({**CROSSING, "torch": (50, 0.5)}))
    found = fakes("flat")
    found.register(type(found.expert("flat"))(
        **{**vars(found.expert("flat")), "name": "steep", "target": "no_such_module:X"}
    ))  # fmt: skip
    assert moekit.explain(PROBLEM, backends=found).chosen.experts == "steep:100|flat"
    kernel = moekit.compose(PROBLEM, backends=found)
    assert kernel.experts.spec.name == "flat"
    assert "no_such_module" in caplog.text
    assert "does not load" in kernel.explanation.rejected_experts["steep:100|flat"][0]
    with pytest.raises(BackendBroken):
        moekit.compose(PROBLEM, experts="steep:100|flat", backends=found)


# -- dispatchers -------------------------------------------------------------------------------

MOVING = PROBLEM.replace(num_experts=16, parallel=moekit.ParallelConfig(ep_size=4))


def test_times_on_one_rank_order_experts_of_standard_dispatchers(tuned: Path) -> None:
    write_table(tuned / "x.json", make_table({"a": (2, 1), "b": (1, 1)}))
    found = movers("a", "b", priorities={"rows": 60})
    explanation = moekit.explain(MOVING, backends=found)
    assert order(explanation, "rows")[:2] == ["b", "a"] and order(explanation, "slabs")[0] == "a"
    assert explanation.why == (
        "dispatcher by priority, experts by measurement (cpu, T=1..256, experts on one rank)"
    )
    slabs_first = moekit.explain(MOVING, backends=movers("a", "b", priorities={"slabs": 200}))
    assert slabs_first.chosen.dispatcher == "slabs" and slabs_first.why == "by priority"


def test_measured_combinations_order_dispatchers_too(tuned: Path) -> None:
    times = {"rows+a": (5, 0.6), "rows+b": (6, 0.6), "slabs+a": (2, 0.6), "slabs+b": (3, 0.6)}
    write_table(tuned / "x.json", make_table(times, MOVING), make_table({"a": (2, 1), "b": (1, 1)}))
    found = movers("a", "b", priorities={"rows": 200})
    explanation = moekit.explain(MOVING, backends=found)
    assert [str(p) for p in explanation.combinations[:2]] == [
        "slabs + a (bridged)",
        "slabs + b (bridged)",
    ]
    assert explanation.why == "by measurement (cpu, T=1..256, on 4 ranks)"
    with_experts = moekit.explain(MOVING, experts="b", backends=found)
    assert with_experts.chosen.dispatcher == "slabs"
    assert with_experts.why.startswith("dispatcher by measurement (cpu, T=1..256, on 4 ranks)")
    assert moekit.explain(MOVING, "rows", backends=found).chosen.experts == "a"


def test_a_composite_of_dispatchers_is_chosen_where_it_is_worth_its_buffers(tuned: Path) -> None:
    """Both have the layout of the best one, and serve its experts."""
    found = movers("a", "b")
    found.register(replace(found.dispatcher("rows"), name="few"))
    times = {"rows+a": (8, 0.5), "few+a": (2, 1), "slabs+b": (9, 0.5), "few+b": (9, 1)}
    write_table(tuned / "x.json", make_table(times, MOVING))
    explanation = moekit.explain(MOVING, backends=found)
    assert str(explanation.chosen) == "few:16|rows + a"
    assert "calls without max_tokens go to rows; every dispatcher keeps its" in explanation.note
    assert explanation.expected == (
        "tuned table: 2.0 µs at T=1, 32.0 µs at T=16 and 128 µs at T=256 for a call"
    )
    few = moekit.explain(MOVING.replace(max_num_tokens=12), backends=found)
    assert str(few.chosen) == "few + a"
    write_table(tuned / "x.json", make_table({**times, "few+a": (7.8, 0.5)}, MOVING))
    assert "|" not in str(moekit.explain(MOVING, backends=found).chosen)


def test_a_dispatcher_that_cannot_be_made_is_skipped(monkeypatch, caplog) -> None:
    def check(tokens, run=select.check_dispatcher):
        if tokens.spec.name == "rows":
            raise BackendBroken("no memory")
        return run(tokens)

    monkeypatch.setattr(select, "check_dispatcher", check)
    found = fakes("a")
    found.register(replace(found.dispatcher("local"), name="rows", priority=200))
    kernel = moekit.compose(PROBLEM, backends=found)
    assert kernel.explanation.chosen.dispatcher == "local"
    assert kernel.explanation.rejected_dispatchers["rows"] == ("no memory",)
    assert "passing over rows: no memory" in caplog.text


def test_dispatchers_that_move_tokens_are_no_choice_where_none_move() -> None:
    explanation = moekit.explain(PROBLEM, backends=movers("a", priorities={"rows": 200}))
    assert not {"rows", "slabs"} & {each.dispatcher for each in explanation.combinations}
    (reason,) = explanation.rejected_dispatchers["rows"]
    assert "every token stays on its rank" in reason
    named = moekit.explain(PROBLEM, "rows", backends=movers("a"))
    assert named.chosen.dispatcher == "rows" and "rows" not in named.rejected_dispatchers


# -- the command line --------------------------------------------------------------------------


def test_explain_prints_measured_choices(tuned: Path, capsys, monkeypatch) -> None:
    """A device that is not here is found by its architecture."""
    monkeypatch.setattr(plugins, "_registry", fakes("flat", "steep"))
    h200 = PROBLEM.replace(device=moekit.DeviceSpec("cuda", (9, 0), "NVIDIA H200"))
    write_table(tuned / "x.json", make_table(CROSSING, h200))
    sizes = "--num-experts 4 --top-k 2 --hidden-size 64 --intermediate-size 48 --dtype float32"
    args = ["explain", *sizes.split(), "--device", "sm90"]
    assert main([*args, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["why"] == "by measurement (NVIDIA H200, T=1..256)"
    assert told["chosen"]["experts"] == "steep:100|flat" and "acme 1.0" in told["note"]
    assert main(args) == 0
    assert "chosen: local + steep:100|flat (by measurement" in capsys.readouterr().out
    assert main([*args, "--experts", "steep:7|flat", "--max-num-tokens", "9"]) == 0
    assert "chosen: local + steep:7|flat (dispatcher by priority" in capsys.readouterr().out
