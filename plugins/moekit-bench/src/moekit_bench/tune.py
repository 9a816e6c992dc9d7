"""``python -m moekit tune``: measure what `compose` chooses from, or what its choice loses."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import moekit
from moekit.errors import MoekitError
from moekit.plugin import MoEProblem, registry

from . import layers, options, regret
from .bench import add_experts_sweep, experts_workload, layers_workload, recorded, sweep_on_ranks
from .codec import from_json, read_recording, replace_file
from .environment import command, made_with
from .experts import ExpertsWorkload
from .experts_report import markdown, summarized
from .implementations import AUTO, Implementation, backends
from .internals import Key, tuned_tables
from .options import names, whole
from .processes import on_devices
from .records import ExpertsRun, LayersRun, all_right, now
from .sweep import Files, Sweep
from .tables import TunedTable, add_to, check_single, rounded, table_file

Tuner = Callable[[Sequence[str]], int]
"""Takes --shapes, --quant and --seconds, as `tune` does, and returns an exit code."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; ``tune NAME ...`` is the backend's own tuner.

    Returns:
        0: all is measured, and no regret is above --limit, 1: not so, 2: the arguments are wrong.
    """
    if argv and not argv[0].startswith("-"):
        return _own_tuner(argv[0], argv[1:])
    args = _parser().parse_args(argv)

    def answer() -> int:
        if args.select and args.recorded is not None:
            return _select_recorded(args)
        if args.ep > 1 and not (args.select or args.regret):
            raise MoekitError(
                f"--ep {args.ep} measures combinations of dispatcher and experts: add --select to "
                "fill their table, or --regret"
            )
        if args.ep > 1:
            return _on_ranks(args, argv)
        if args.regret:
            return _regret(args, argv)
        return _select(args, argv) if args.select else _all(args, argv)

    return options.answered(answer)


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
    add("--limit", type=float, default=5.0, metavar="%", help="of regret; default: %(default)s")
    add("--markdown", type=Path, metavar="FILE", help="default: standard output")
    add(
        "--output", type=Path, metavar="FILE",
        help="--select: the table; default: by device, in MOEKIT_TUNED or the user's cache",
    )  # fmt: skip
    add("--again", action="store_true", help="--select: also measure what the table has")
    add(
        "--seconds", type=options.seconds, metavar="S",
        help="begin no measurement after S seconds; the same command continues",
    )  # fmt: skip
    add(
        "--gpus",
        type=whole(0),
        default=0,
        metavar="N",
        help="--select: measure on the first N devices at once",
    )
    add(
        "--ep", type=whole(1), default=1, metavar="N",
        help="--select, --regret: measure combinations of dispatcher and experts on N ranks, one "
        "per device; --shapes are then whole layers (dsv3, or E:K:H:I), and --dispatcher is a list "
        "(default: all that move tokens)",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="--regret: write the measurements")
    add(
        "--from", dest="recorded", type=Path, metavar="FILE",
        help="measure nothing, and read a recording made with --json: with --regret of `bench` or "
        "`bench --layers`, with --select of `bench --layers`",
    )  # fmt: skip
    parser.set_defaults(routing="uniform", no_graph=False)
    return parser


def _own_tuner(name: str, argv: Sequence[str]) -> int:
    loaded = registry().expert(name).load()
    if not hasattr(loaded, "tune"):
        raise MoekitError(f"experts {name!r} have no tuner; see `tune --help`")
    return int(loaded.tune(list(argv)))


def _all(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the backends' own tuners, then fill the table of the choice among them."""
    if args.recorded is not None or args.json is not None:
        raise MoekitError(
            "--from and --json have no effect on the backends' tuners: add --select or --regret"
        )
    begin, argv = time.monotonic(), [*argv, "--select"]
    # Tiles take half of the time: the choice is measured with them.
    half = None if args.seconds is None else args.seconds / 2
    codes = [_tiles(args, name, tune, half) for name, tune in _tuners(args).items()]
    if args.seconds is not None:
        args.seconds = max(1e-3, args.seconds - (time.monotonic() - begin))
        argv += ["--seconds", str(args.seconds)]
    return max(_select(args, argv), *codes, 0)


def _tuners(args: argparse.Namespace) -> dict[str, Tuner]:
    """Return the tuners of backends that support one of the problems here, by a backend's name."""
    found = _backends(args)
    problems = experts_workload(args, found, "").problems.values()
    tuners: dict[Tuner, str] = {}  # backends may share one
    for name in (i.name for i in found if not i.left_out):
        if any(moekit.explain(problem, args.dispatcher, name).chosen for problem in problems):
            tune = getattr(registry().expert(name).load(), "tune", None)
            if tune is not None:
                tuners.setdefault(tune, name)
    return {name: tune for tune, name in tuners.items()}


def _tiles(args: argparse.Namespace, name: str, tune: Tuner, seconds: float | None) -> int:
    argv = ["--shapes", args.shapes, "--quant", args.quant]
    argv += [] if seconds is None else ["--seconds", str(seconds)]
    print(f"python -m moekit tune {name} {' '.join(argv)}", file=sys.stderr, flush=True)
    return int(tune(argv))


def _end(args: argparse.Namespace) -> float | None:
    return None if args.seconds is None else time.monotonic() + args.seconds


def _report(args: argparse.Namespace, title: str, choices: Sequence[regret.Choice]) -> None:
    text = regret.markdown(title, choices, args.limit)
    if args.markdown is None:
        print(text, end="")
    elif args.markdown != Path(os.devnull):
        replace_file(args.markdown, text)


# -- one rank ---------------------------------------------------------------------------------


def _backends(args: argparse.Namespace) -> list[Implementation]:
    return backends(None if args.experts is None else names(args.experts), args.dispatcher)


def _select(args: argparse.Namespace, argv: Sequence[str]) -> int:
    found = _backends(args)
    check_single([i.name for i in found])
    workload = experts_workload(args, found, "")
    able = {
        group: _able(problem, args.dispatcher, found)
        for group, problem in workload.problems.items()
    }
    table = TunedTable(
        table_file(args.output, workload.header.device.spec()),
        {
            (args.dispatcher, i.name): made_with(i, registry().experts.get(i.name))
            for i in found
            if any(i.name in group for group in able.values())
        },
        again=args.again,
    )
    workload.wanted = lambda cell: (
        not all(
            table.knows(
                workload.problems[cell.shape, cell.scheme], (args.dispatcher, name), cell.tokens
            )
            for name in able[cell.shape, cell.scheme]
        )
    )

    def keep(run: ExpertsRun) -> None:
        cell = run.cells[-1]
        group, results = (cell.shape, cell.scheme), {r.name: r for r in cell.results}
        times = {}
        for name in able[group]:
            r = results.get(name)
            us = r.us if r is not None and r.right else None
            times[args.dispatcher, name] = us, None if r is None else r.copied
        table.add(workload.problems[group], cell.tokens, times, now())

    sweep = Sweep(workload, keep, end=_end(args))
    print(f"{len(sweep.cells)} cells to measure for {table.file}", file=sys.stderr)
    if args.gpus:
        complete = on_devices(args.gpus, workload.device.type, sweep.cells, table.file, argv)
    else:
        sweep.measure()
        complete = sweep.complete
    choices = _choices_of_table(workload, able, table, args.dispatcher)
    _report(args, f"Tuned table {table.file.name}", choices)
    return int(not complete)


def _able(problem: MoEProblem, dispatcher: str, found: Sequence[Implementation]) -> list[str]:
    """Return the names of the backends that can do the problem."""
    names = [i.name for i in found if not i.left_out]
    return [name for name in names if moekit.explain(problem, dispatcher, name).chosen]


def _choices_of_table(
    workload: ExpertsWorkload,
    able: dict[tuple[str, str], list[str]],
    table: TunedTable,
    dispatcher: str,
) -> list[regret.Choice]:
    read, choices = table.read(), list[regret.Choice]()
    for group, problem in workload.problems.items():
        candidates = [n for n in able[group] if registry().expert(n).priority_for(problem) >= 0]
        choices += regret.of_table(
            " ".join(group), Key.of(problem), read, dispatcher, candidates
        )  # fmt: skip
    return choices


def _regret(args: argparse.Namespace, argv: Sequence[str]) -> int:
    complete = True
    if args.recorded is not None:
        run = _recording(args.recorded)
    else:
        found = [*backends([AUTO], args.dispatcher), *_backends(args)]
        files = Files(markdown, args.json)
        sweep = Sweep(
            experts_workload(args, found, command("tune", *argv)),
            lambda run: files.keep(summarized(run)),
            end=_end(args),
        )
        run = sweep.measure()
        complete = sweep.complete
    if isinstance(run, LayersRun):
        choices = regret.of_layers(run)
    else:
        choices = regret.of_experts(run)
    _report(args, f"The choice on {run.device.name}", choices)
    return int(not (complete and regret.worst(choices) <= args.limit))


def _recording(file: Path) -> ExpertsRun | LayersRun:
    data = read_recording(file)
    cls: type[ExpertsRun | LayersRun] = LayersRun if data.get("what") == "layers" else ExpertsRun
    return from_json(cls, data, str(file))


# -- over ranks -------------------------------------------------------------------------------


def _on_ranks(args: argparse.Namespace, argv: Sequence[str]) -> int:
    _check_ranks(args)
    args.ranks = None if "RANK" in os.environ else args.ep
    choices, complete, title, end = list[regret.Choice](), True, "The choice", _end(args)
    for layer in names(args.shapes):
        experts = args.experts
        if experts is None:
            experts = ",".join(s.name for s in registry().experts.values() if s.priority >= 0)
        dispatchers = None if args.dispatcher == "local" else names(args.dispatcher)
        workload = layers_workload(
            args, layer, names(experts), dispatchers, command("tune", *argv),
            seconds=None if end is None else end - time.monotonic(),
        )  # fmt: skip
        if args.regret:
            files = Files(_no_report, args.json)
            run, whole = sweep_on_ranks(workload, args.ranks, keep=files.keep)
            complete &= whole and all_right(run)
            choices += regret.of_layers(run)
            title = f"The choice on {run.ranks} x {run.device.name}"
        else:
            table = _layers_table(args, workload)
            run, whole = sweep_on_ranks(workload, args.ranks, keep=partial(_add_cell, table))
            complete &= whole and not any(r.reason for c in run.cells for r in c.results)
            choices += _choices_of_layers_table(run, workload, table)
            title = f"Tuned table {table.file.name}"
    if os.environ.get("RANK", "0") == "0":
        _report(args, title, choices)
    missed = args.regret and regret.worst(choices) > args.limit
    return int(not complete or missed)


def _no_report(run: LayersRun) -> str:
    return ""


def _check_ranks(args: argparse.Namespace) -> None:
    if args.recorded is not None or args.gpus not in (0, args.ep):
        raise MoekitError(
            f"--ep {args.ep} measures on {args.ep} devices: leave out --gpus; and with --from, "
            "which tells the ranks, leave out --ep"
        )
    if torch.cuda.is_available() and args.device is None and torch.cuda.device_count() < args.ep:
        raise MoekitError(
            f"--ep {args.ep} needs as many devices, and there are {torch.cuda.device_count()}"
        )
    if args.regret and args.json is not None and len(names(args.shapes)) > 1:
        raise MoekitError(f"--json holds one shape: leave it out, or one of --shapes {args.shapes}")


def _layers_table(args: argparse.Namespace, workload: layers.LayersWorkload) -> TunedTable:
    """Return the table, and leave out of the workload what it knows."""
    check_single(list(workload.experts))
    implementations = {i.name: i for i in backends(workload.experts)}
    table = TunedTable(
        table_file(args.output, workload.device),
        {
            (d.name, e): made_with(implementations[e], registry().experts[e], d)
            for d in workload.dispatchers
            for e in workload.experts
        },
        again=args.again,
    )
    workload.wanted = lambda problem, dispatcher, experts: (
        not table.knows(problem, (dispatcher, experts), problem.max_num_tokens or 0)
    )
    return table


def _add_cell(table: TunedTable, run: LayersRun) -> None:
    cell = run.cells[-1]
    if cell.results:
        times = {
            (r.dispatcher, r.experts): (r.us if r.right else None, r.copied) for r in cell.results
        }
        table.add(run.problem(cell.scheme, cell.tokens), cell.tokens, times, now())


def _choices_of_layers_table(
    run: LayersRun, workload: layers.LayersWorkload, table: TunedTable
) -> list[regret.Choice]:
    read, choices = table.read(), list[regret.Choice]()
    for scheme in workload.schemes:
        largest = workload.problem(scheme, max(workload.tokens))
        known = registry().experts
        experts = [e for e in workload.experts if known[e].priority_for(largest) >= 0]
        able = {d.name: experts for d in workload.dispatchers}
        choices += regret.of_combinations(run.title(scheme), Key.of(largest), read, able)
    return choices


def _select_recorded(args: argparse.Namespace) -> int:
    """Put the combinations that `bench --layers` measured into the table."""
    run = recorded(LayersRun, args.recorded)
    run.check_timed()
    versions = {name: v for name, v in run.versions.items() if name != "python"}
    made = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    choices: dict[str, list[regret.Choice]] = {}
    able: dict[str, dict[str, list[str]]] = {}
    for cell in run.cells:
        problem, title = run.problem(cell.scheme, cell.tokens), run.title(cell.scheme)
        file, times = table_file(args.output, problem.device), {}
        for r in cell.results:
            us = rounded(r.us) if r.right else None
            one = tuned_tables.Record(us, r.copied, run.date, made)
            times[r.dispatcher, r.experts] = {cell.tokens: one}
            spec = registry().experts.get(r.experts)
            if spec is None or spec.priority_for(problem) >= 0:
                able.setdefault(title, {}).setdefault(r.dispatcher, []).append(r.experts)
        key = Key.of(problem)
        add_to(file, {key: times})
        read = tuned_tables.read(file)
        choices[title] = regret.of_combinations(title, key, read, able.get(title, {}))
    shown = [choice for group in choices.values() for choice in group]
    _report(args, f"Tuned table, from {args.recorded.name}", shown)
    return 0
