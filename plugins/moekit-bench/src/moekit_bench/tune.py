"""``python -m moekit tune``: measure what `compose` chooses from."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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

from . import options
from .bench import experts_sweep, layers_sweep
from .environment import made_with
from .implementations import backends, unnamed
from .internals import Key, Record, Table, user_path
from .internals import table as tuned_tables
from .options import positive
from .ranks import RanksSweep
from .records import Cell, Result, now

Combination = tuple[str, str]
"""The names of a dispatcher and of experts."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code, 1 if cells remain; ``tune NAME ...`` is the
    backend's own tuner. Raises MoekitError for a wrong argument or file."""
    if argv and not argv[0].startswith("-"):
        return _own_tuner(argv[0], argv[1:])
    args = _parser().parse_args(argv)
    args.experts = unnamed() if args.experts is None else args.experts
    if bad := [name for name in args.experts if "|" in name]:
        raise MoekitError(f"--experts {', '.join(bad)}: name the backends themselves")
    if args.ep > 1 and not args.select:
        raise MoekitError(
            f"--ep {args.ep} measures combinations of dispatcher and experts: add --select to fill "
            "their table"
        )
    return _select(args) if args.select else _all(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit tune",
        description="Run the tuners of the installed experts backends, then measure the backends "
        "and fill the table that moekit.compose chooses from. `tune BACKEND ...` runs the tuner of "
        "one backend; `tune BACKEND --help` has its options. See docs/bench.md.",
    )
    own = {"select": False, "output": None, "seconds": None, "dispatchers": None}
    options.add(parser, {**options.EXPERTS, **own})
    parser.add_argument(
        "--ep", type=positive, default=1, metavar="N",
        help="--select: measure combinations of dispatcher and experts on N ranks, one per device; "
        "--shapes are then whole layers (dsv3, or E:K:H:I), and --dispatchers counts",
    )  # fmt: skip
    # The other options of `bench`.
    parser.set_defaults(routing=["uniform"], batch_invariant=False)
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
    argv = ["--shapes", ",".join(args.shapes), "--quant", ",".join(args.quant)]
    # Tiles take half of the time: the choice is measured with them.
    argv += [] if args.seconds is None else ["--seconds", str(args.seconds / 2)]
    codes = [0]
    for name, tune in _tuners(args).items():
        print(f"python -m moekit tune {name} {' '.join(argv)}", file=sys.stderr, flush=True)
        codes.append(int(tune(argv)))
    if args.seconds is not None:
        args.seconds -= time.monotonic() - begin
    return max(_select(args), *codes)


def _tuners(args: argparse.Namespace) -> dict[str, Callable[[Sequence[str]], int]]:
    """Return the tuners of backends that support one of the problems here, by a backend's name.

    They take --shapes, --quant and --seconds, as `tune` does, and return an exit code.
    """
    sweep = experts_sweep(args, backends(args.experts), "")
    tuners: dict[Callable[[Sequence[str]], int], str] = {}  # backends may share one
    for name in args.experts:
        if any(_able(p, [name]) for p in sweep.problems.values()):
            tune = getattr(registry().expert(name).load(), "tune", None)
            if tune is not None:
                tuners.setdefault(tune, name)
    return {name: tune for tune, name in tuners.items()}


def _able(problem: MoEProblem, experts: Sequence[str]) -> list[Combination]:
    """Return the combinations that can do ``problem``: with `local`, or a fused kernel alone."""
    fused = {name for name in experts if registry().expert(name).fused}
    pairs = [(e if e in fused else "local", e) for e in experts]
    return [pair for pair in pairs if moekit.explain(problem, *pair).chosen]


# -- what is measured -------------------------------------------------------------------------


def _select(args: argparse.Namespace) -> int:
    if args.ep > 1:
        return _select_on_ranks(args)
    sweep = experts_sweep(args, backends(args.experts), "")
    problems = sweep.problems
    able = {group: _able(p, args.experts) for group, p in problems.items()}
    table = TunedTable(args.output, DeviceSpec.of(sweep.device))

    def wanted(cell: Cell) -> bool:
        group = cell.shape, cell.scheme
        return not all(table.knows(problems[group], each, cell.tokens) for each in able[group])

    def keep(cell: Cell) -> None:
        group, results = (cell.shape, cell.scheme), {r.name: r for r in cell.results}
        measured = {each: results.get(each[1], Result()) for each in able[group]}
        table.add(problems[group], cell.tokens, measured)

    sweep.cells = [cell for cell in sweep.cells if wanted(cell)]
    sweep.keep, sweep.end = keep, options.end(args)
    print(f"{len(sweep.cells)} cells to measure for {table.file}", file=sys.stderr)
    sweep.measure()
    return int(not sweep.complete)


def _select_on_ranks(args: argparse.Namespace) -> int:
    args.ranks = args.ep
    args.capacity = None  # tables hold times of kernels that a call fills
    end, sweeps = options.end(args), [layers_sweep(args) for args.layer in args.shapes]
    table = TunedTable(args.output, DeviceSpec.of(options.torch_device(args.device)))

    def wanted(problem: MoEProblem, dispatcher: str, experts: str) -> bool:
        return not table.knows(problem, (dispatcher, experts), problem.max_num_tokens or 0)

    def keep(sweep: RanksSweep, cell: Cell) -> None:
        measured = {(r.dispatcher or "", r.experts or ""): r for r in cell.results}
        table.add(sweep.problem(cell.scheme, cell.tokens), cell.tokens, measured)

    for sweep in sweeps:
        sweep.wanted, sweep.keep, sweep.end = wanted, partial(keep, sweep), end
        sweep.measure()
    return int(not all(sweep.complete for sweep in sweeps))


# -- the table --------------------------------------------------------------------------------


def add_to(file: Path, table: Table) -> None:
    """Merge ``table`` into ``file`` atomically; other writers wait."""
    check_writable(file)
    with FileLock(file.with_name(f".{file.name}.lock")):
        old = tuned_tables.read(file) if file.exists() else {}
        replace_file(file, tuned_tables.encode(tuned_tables.merge([old, table])))


class TunedTable:
    """The table that a run fills: the file ``output``, or the device's file in that folder."""

    def __init__(self, output: Path | None, device: DeviceSpec) -> None:
        place, self.made_with = output or user_path(), cache(made_with)
        file = device_file(device.name or device.type)
        self.file = place if place.suffix == ".json" else place / file
        add_to(self.file, {})  # a file that cannot be read or written ends the run now
        self._known = tuned_tables.read(self.file)

    def knows(self, problem: MoEProblem, combination: Combination, tokens: int) -> bool:
        """Return whether the table had a measurement of the same versions when the run began."""
        record = self._known.get(Key.of(problem), {}).get(combination, {}).get(tokens)
        return record is not None and record.made_with == self.made_with(*combination)

    def add(self, problem: MoEProblem, tokens: int, measured: Mapping[Combination, Result]) -> None:
        """Write one row per combination; a wrong result has no time."""
        times = {}
        for combination, r in measured.items():
            us = round(r.us, 3) if r.right and r.us is not None else None
            times[combination] = {tokens: Record(us, r.copied, now(), self.made_with(*combination))}
        add_to(self.file, {Key.of(problem): times})
