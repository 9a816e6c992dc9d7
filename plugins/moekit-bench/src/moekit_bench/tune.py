"""``python -m moekit tune``: measure what `compose` chooses from, or what its choice loses."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from filelock import FileLock

import moekit
from moekit.errors import MoekitError
from moekit.plugin import (
    DeviceSpec,
    MoEProblem,
    check_writable,
    device_file,
    registry,
    replace_file,
)

from . import options, report
from .bench import add_experts_sweep, experts_sweep, layers_sweep
from .environment import made_with
from .implementations import AUTO, Implementation, backends
from .internals import Key, Record, Table, user_path
from .internals import table as tuned_tables
from .layers import LayersSweep
from .options import names, names_if_given, positive
from .records import Cell, Result, now

Tuner = Callable[[Sequence[str]], int]
"""Takes --shapes, --quant and --seconds, as `tune` does, and returns an exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; ``tune NAME ...`` is the backend's own tuner.

    Returns:
        0: all is measured, and no regret is above --limit, 1: not so.

    Raises:
        MoekitError: An argument is wrong, or a file cannot be read or written.
    """
    if argv and not argv[0].startswith("-"):
        return _own_tuner(argv[0], argv[1:])
    args = _parser().parse_args(argv)
    if args.markdown is not None:
        check_writable(args.markdown)
    if args.ep > 1 and not (args.select or args.regret):
        raise MoekitError(
            f"--ep {args.ep} measures combinations of dispatcher and experts: add --select to fill "
            "their table, or --regret"
        )
    if args.ep > 1:
        return _on_ranks(args)
    if args.regret:
        return _regret(args)
    return _select(args) if args.select else _all(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit tune",
        description="Run the tuners of the installed experts backends, then measure the backends "
        "and fill the table that moekit.compose chooses from. `tune BACKEND ...` runs the tuner of "
        "one backend; `tune BACKEND --help` has its options. See docs/bench.md.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--select", action="store_true", help="run no tuners: measure, and fill the table"
    )
    what.add_argument(
        "--regret", action="store_true", help="compare the choice with the fastest backend"
    )
    add_experts_sweep(parser)
    add = parser.add_argument
    add(
        "--limit", type=float, default=5.0, metavar="%",
        help="of regret; default: %(default)s",
    )  # fmt: skip
    add("--markdown", type=Path, metavar="FILE", help="--regret: default: standard output")
    add(
        "--output", type=Path, metavar="FILE",
        help="--select: the table; default: by device, in MOEKIT_TUNED or the user's cache",
    )  # fmt: skip
    add(
        "--seconds", type=float, metavar="S",
        help="begin no cell after S seconds; the same command continues",
    )  # fmt: skip
    add(
        "--ep", type=positive, default=1, metavar="N",
        help="--select, --regret: measure combinations of dispatcher and experts on N ranks, one "
        "per device; --shapes are then whole layers (dsv3, or E:K:H:I), and --dispatcher is a list "
        "(default: all that move tokens)",
    )  # fmt: skip
    # The other options of `bench`.
    parser.set_defaults(routing="uniform", measure_ceilings=False, batch_invariant=False)
    return parser


def _own_tuner(name: str, argv: Sequence[str]) -> int:
    loaded = registry().expert(name).load()
    if not hasattr(loaded, "tune"):
        raise MoekitError(
            f"experts {name!r} have no tuner of their own; to measure them: python -m moekit tune "
            f"--select --experts {name}"
        )
    return int(loaded.tune(list(argv)))


def _all(args: argparse.Namespace) -> int:
    """Run the backends' own tuners, then fill the table of the choice among them."""
    begin = time.monotonic()
    # Tiles take half of the time: the choice is measured with them.
    half = None if args.seconds is None else args.seconds / 2
    codes = [_tiles(args, name, tune, half) for name, tune in _tuners(args).items()]
    if args.seconds is not None:
        args.seconds = max(1e-3, args.seconds - (time.monotonic() - begin))
    return max(_select(args), *codes, 0)


def _tuners(args: argparse.Namespace) -> dict[str, Tuner]:
    """Return the tuners of backends that support one of the problems here, by a backend's name."""
    found = _backends(args)
    problems = experts_sweep(args, found, "").problems.values()
    able = {name for problem in problems for name in _able(problem, args.dispatcher, found)}
    tuners: dict[Tuner, str] = {}  # backends may share one
    for name in (i.name for i in found if i.name in able):
        tune = getattr(registry().expert(name).load(), "tune", None)
        if tune is not None:
            tuners.setdefault(tune, name)
    return {name: tune for tune, name in tuners.items()}


def _tiles(args: argparse.Namespace, name: str, tune: Tuner, seconds: float | None) -> int:
    argv = ["--shapes", args.shapes, "--quant", args.quant]
    argv += [] if seconds is None else ["--seconds", str(seconds)]
    print(f"python -m moekit tune {name} {' '.join(argv)}", file=sys.stderr, flush=True)
    return int(tune(argv))


def _report(args: argparse.Namespace, title: str, choices: Sequence[report.Choice]) -> None:
    text = report.regret(title, choices, args.limit)
    if args.markdown is None:
        print(text, end="")
    else:
        replace_file(args.markdown, text)


def _check_single(names: Sequence[str]) -> None:
    """Raise MoekitError if a name stands for several backends, which tables do not hold."""
    if bad := [name for name in names if name == AUTO or "|" in name]:
        raise MoekitError(f"--experts {', '.join(bad)}: name the backends themselves")


# -- one rank ---------------------------------------------------------------------------------


def _backends(args: argparse.Namespace) -> list[Implementation]:
    return backends(names_if_given(args.experts), args.dispatcher)


def _select(args: argparse.Namespace) -> int:
    found = _backends(args)
    _check_single([i.name for i in found])
    sweep = experts_sweep(args, found, "")
    problems, known = sweep.problems, registry().experts
    able = {group: _able(problem, args.dispatcher, found) for group, problem in problems.items()}
    made = {
        (args.dispatcher, i.name): made_with(i, known.get(i.name))
        for i in found
        if any(i.name in names for names in able.values())
    }
    file = table_file(args.output, DeviceSpec.of(sweep.device))
    table = TunedTable(file, made)

    def wanted(cell: Cell) -> bool:
        group = cell.shape, cell.scheme
        asked = ((args.dispatcher, name) for name in able[group])
        return not all(table.knows(problems[group], names, cell.tokens) for names in asked)

    def keep(cell: Cell) -> None:
        group, results = (cell.shape, cell.scheme), {r.name: r for r in cell.results}
        measured = {(args.dispatcher, n): results.get(n, Result()) for n in able[group]}
        table.add(problems[group], cell.tokens, measured)

    sweep.cells = [cell for cell in sweep.cells if wanted(cell)]
    sweep.keep, sweep.end = keep, options.end(args)
    print(f"{len(sweep.cells)} cells to measure for {table.file}", file=sys.stderr)
    sweep.measure()
    return int(not sweep.complete)


def _able(problem: MoEProblem, dispatcher: str, found: Sequence[Implementation]) -> list[str]:
    names = [i.name for i in found if not i.left_out]
    return [name for name in names if moekit.explain(problem, dispatcher, name).chosen]


def _regret(args: argparse.Namespace) -> int:
    found = [*backends([AUTO], args.dispatcher), *_backends(args)]
    sweep = experts_sweep(args, found, "")
    sweep.end = options.end(args)
    sweep.measure()
    choices = sweep.choices()
    _report(args, f"The choice on {sweep.run.device['name']}", choices)
    return int(not (sweep.complete and report.worst(choices) <= args.limit))


# -- over ranks -------------------------------------------------------------------------------


def _on_ranks(args: argparse.Namespace) -> int:
    args.ranks = None if "RANK" in os.environ else args.ep
    args.capacity = None  # tables hold times of kernels that a call fills
    choices, complete, heading, end = list[report.Choice](), True, "", options.end(args)
    args.dispatchers = None if args.dispatcher == "local" else args.dispatcher
    if args.experts is None:
        unnamed = [s.name for s in registry().experts.values() if s.priority >= 0]
        args.experts = ",".join(unnamed)
    for layer in names(args.shapes):
        args.layer = layer
        sweep = layers_sweep(args, "")
        sweep.end = end
        if args.regret:
            sweep.measure()
            complete &= sweep.complete and sweep.succeeded
            choices += sweep.choices()
            heading = f"The choice on {sweep.run.ranks} x {sweep.run.device['name']}"
        else:
            table = _layers_table(args, sweep)
            sweep.keep = partial(_add, table, sweep)
            sweep.measure()
            results = (r for cell in sweep.run.cells for r in cell.results)
            complete &= sweep.complete and not any(r.reason for r in results)
    if args.regret and os.environ.get("RANK", "0") == "0":
        _report(args, heading, choices)
    missed = args.regret and report.worst(choices) > args.limit
    return int(not complete or missed)


def _layers_table(args: argparse.Namespace, sweep: LayersSweep) -> TunedTable:
    """Return the table, and leave out of the sweep what it knows."""
    _check_single(sweep.experts)
    known = registry().experts
    made = {
        (d.name, i.name): made_with(i, known[i.name], d)
        for d in sweep.dispatchers
        for i in backends(sweep.experts)
    }
    table = TunedTable(table_file(args.output, sweep.device), made)
    sweep.wanted = lambda problem, dispatcher, experts: (
        not table.knows(problem, (dispatcher, experts), problem.max_num_tokens or 0)
    )
    return table


def _add(table: TunedTable, sweep: LayersSweep, cell: Cell) -> None:
    """Put a cell into the table."""
    measured = {(r.dispatcher or "", r.experts or ""): r for r in cell.in_default_mode}
    if measured:
        table.add(sweep.problem(cell.scheme, cell.tokens), cell.tokens, measured)


# -- the table --------------------------------------------------------------------------------


def table_file(output: Path | None, device: DeviceSpec) -> Path:
    """Return ``output`` if it is a file, else the device's file in that folder or the user's."""
    place = output or user_path()
    return place if place.suffix == ".json" else place / device_file(device.name or device.type)


def add_to(file: Path, table: Table) -> None:
    """Merge ``table`` into ``file`` atomically; other writers wait."""
    check_writable(file)
    with FileLock(file.with_name(f".{file.name}.lock")):
        old = tuned_tables.read(file) if file.exists() else {}
        replace_file(file, tuned_tables.encode(tuned_tables.merge([old, table])))


class TunedTable:
    """The table that a run fills.

    Args:
        made_with: (dispatcher, experts) -> the versions that a time depends on.
    """

    def __init__(self, file: Path, made_with: Mapping[tuple[str, str], str]) -> None:
        self.file, self.made_with = file, made_with
        add_to(file, {})  # a file that cannot be read or written ends the run before it begins
        self._known = tuned_tables.read(file)

    def knows(self, problem: MoEProblem, combination: tuple[str, str], tokens: int) -> bool:
        """Return whether the table had a measurement of the same versions when the run began."""
        record = self._known.get(Key.of(problem), {}).get(combination, {}).get(tokens)
        return record is not None and record.made_with == self.made_with[combination]

    def add(
        self,
        problem: MoEProblem,
        tokens: int,
        measured: Mapping[tuple[str, str], Result],
    ) -> None:
        """Write one row per combination; a wrong result has no time."""
        times = {}
        for combination, r in measured.items():
            us = round(r.us, 3) if r.right and r.us is not None else None
            times[combination] = {tokens: Record(us, r.copied, now(), self.made_with[combination])}
        add_to(self.file, {Key.of(problem): times})
