"""``python -m moekit tune``: measures what the choice among experts backends is made from."""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from moekit_bench.bench import contestants
from moekit_bench.bench.cells import Case, Result
from moekit_bench.bench.cli import Sweep, add_sweep
from moekit_bench.bench.contestants import AUTO, Contestant, KernelCall
from moekit_bench.bench.environment import answered, command, recorded, whole
from moekit_bench.bench.measure import Call
from moekit_bench.bench.report import Json
from moekit_bench.bench.shapes import Shape
from moekit_bench.tune import ranks, regret
from moekit_bench.tune.write import add_to as add_to
from moekit_bench.tune.write import made_with, table_file, write
from torch import Tensor

from moekit.discovery.registry import registry
from moekit.errors import MoekitError
from moekit.problem import MoEProblem
from moekit.selection import select
from moekit.selection.tuned import table as tables
from moekit.selection.tuned.table import Key, Record


def main(argv: Sequence[str]) -> int:
    """Runs the command; 0: all measured, and no regret above --limit; 1: not so; 2: a wrong
    question. ``tune NAME ...`` is the named backend's own tuner."""
    if argv and not argv[0].startswith("-"):
        return _own_tuner(argv[0], argv[1:])
    args = _parser().parse_args(argv)

    def answer() -> int:
        if args.select and args.measured is not None:
            return ranks.record(args)
        if args.ep > 1:
            return ranks.main(args, argv)
        return _regret(args, argv) if args.regret else _select(args, argv)

    return answered(answer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit tune",
        description="Measures installed experts backends for the choice among them, or what that "
        "choice loses. `tune BACKEND ...` runs a backend's own tuner. See docs/bench.md.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--select", action="store_true", help="measure, and fill the tuned table")
    what.add_argument("--regret", action="store_true", help="compare the choice with the fastest")
    add_sweep(parser)
    add = parser.add_argument
    add("--limit", type=float, default=5.0, metavar="%", help="of regret; default: %(default)s")
    add("--markdown", dest="summary", type=Path, metavar="FILE", help="default: standard output")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="--select: the table; default: by device, in MOEKIT_TUNED or the user's cache",
    )
    add("--again", action="store_true", help="--select: measure what the table has, too")
    add("--gpus", type=whole(0), default=0, metavar="N", help="--select: on the first N devices")
    add(
        "--ep",
        type=whole(1),
        default=1,
        metavar="N",
        help="pairs of dispatcher and experts on N ranks, one per device; --shapes are then whole "
        "layers (dsv3, or E:K:H:I), --dispatcher a list (default: all that move tokens)",
    )
    add("--json", type=Path, metavar="FILE", help="--regret: write the measurements")
    add(
        "--from",
        dest="measured",
        type=Path,
        metavar="FILE",
        help="measure nothing: --regret of a "
        "bench's --json; --select: the pairs in benchmarks/layer_dispatch.py's",
    )
    parser.set_defaults(
        routing="uniform", peers=[], only_peers=None, no_graph=False, ceilings=None,
        markdown=None, plot=None,
    )  # fmt: skip
    return parser


def _own_tuner(name: str, argv: Sequence[str]) -> int:
    loaded = registry().expert(name).load()
    if not hasattr(loaded, "tune"):
        raise MoekitError(f"experts {name!r} have no tuner of their own; see `tune --help`")
    return int(loaded.tune(list(argv)))


# -- tune --select ----------------------------------------------------------------------------


class _Select(Sweep):
    """Records what the table lacks, or has of other versions."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args, "")
        if bad := [c.name for c in self.contestants if c.name == AUTO or "|" in c.name]:
            raise MoekitError(f"--experts {', '.join(bad)}: name the backends themselves")
        self.file = table_file(args.output, self.spec)
        add_to(self.file, {})  # what cannot be written or read ends the run before it begins
        self.table = tables.read(self.file)
        able = {name for p in self.problems.values() for name in self.wanted(p)}
        self.made_with = {c.name: _made_with(c) for c in self.contestants if c.name in able}
        self.progress.total = sum(len(self.cells(p)) for p in self.problems.values())

    def wanted(self, problem: MoEProblem) -> list[str]:
        """The contestants that can do it."""
        return [
            c.name
            for c in self.contestants
            if not c.left_out and select.explain(problem, self.args.dispatcher, c.name).chosen
        ]

    def cells(self, problem: MoEProblem) -> list[tuple[str, int]]:
        times, wanted = self.table.get(Key.of(problem), {}), self.wanted(problem)

        def known(name: str, tokens: int) -> bool:
            record = times.get((self.args.dispatcher, name), {}).get(tokens)
            return record is not None and record.made_with == self.made_with[name]

        return [
            (kind, tokens)
            for kind, tokens in super().cells(problem)
            if self.args.again or not all(known(name, tokens) for name in wanted)
        ]

    def keep(
        self, shape: Shape, case: Case, calls: Mapping[str, Call], results: Mapping[str, Result]
    ) -> None:
        super().keep(shape, case, calls, results)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        times = {}
        for name in self.wanted(case.problem):
            result, call = results.get(name), calls.get(name)
            timing = result.timing if result is not None and result.right else None
            record = Record(
                us=None if timing is None else round(timing.us, 3),
                copied=_copied(case, call) if isinstance(call, KernelCall) else None,
                date=now,
                made_with=self.made_with[name],
            )
            times[self.args.dispatcher, name] = {case.tokens: record}
        add_to(self.file, {Key.of(case.problem): times})


def _select(args: argparse.Namespace, argv: Sequence[str]) -> int:
    sweep = _Select(args)
    sweep.progress.say(f"{sweep.progress.total} cells to measure for {sweep.file}")
    complete = _on_many(sweep, argv) if args.gpus else sweep.measure()
    table, cells = tables.read(sweep.file), []
    for (shape, scheme), problem in sweep.problems.items():
        known = {c.name: registry().expert(c.name) for c in sweep.contestants}
        names = [n for n in sweep.wanted(problem) if known[n].priority_for(problem) >= 0]
        key = Key.of(problem)
        cells += regret.of_table(f"{shape} {scheme}", key, table, args.dispatcher, names)
    write(regret.markdown(f"Tuned table {sweep.file.name}", cells, args.limit), args.summary)
    return int(not complete)


def _on_many(sweep: _Select, argv: Sequence[str]) -> bool:
    """A process per device, for one shape and scheme at a time; whether all went well.

    A process that loses its device loses only the rest of its shape and scheme.
    """
    left = [(*names, n) for names, p in sweep.problems.items() if (n := len(sweep.cells(p)))]
    begin, kind, codes, done = time.monotonic(), sweep.spec.type, [0], 0
    lock = threading.Lock()

    def work(index: int) -> None:
        nonlocal done
        device = kind if kind == "cpu" else f"{kind}:{index}"
        while True:
            with lock:
                if not left:
                    return
                shape, scheme, cells = left.pop(0)
            more = ["--shapes", shape, "--quant", scheme, "--device", device, "--gpus", "0"]
            more += ["--output", str(sweep.file), "--markdown", os.devnull]
            again = [sys.executable, "-m", "moekit", "tune", *argv, *more]
            with subprocess.Popen(again, stderr=subprocess.PIPE, text=True) as child:
                for line in child.stderr or ():
                    sweep.progress.say(f"{device}: {line.rstrip()}")
            with lock:
                codes.append(child.returncode)
                done += cells
            seconds = time.monotonic() - begin
            rest = seconds / done * (sweep.progress.total - done)
            sweep.progress.say(
                f"[{done}/{sweep.progress.total} cells, {seconds:.0f} s, {rest:.0f} s left] "
                f"{shape} {scheme}: exit code {child.returncode}"
            )

    with ThreadPoolExecutor(sweep.args.gpus) as pool:
        workers = [pool.submit(work, index) for index in range(sweep.args.gpus)]
        try:
            wait(workers)
        except KeyboardInterrupt:  # the processes got it, too, and end
            left.clear()
            codes.append(1)
    for worker in workers:
        worker.result()
    return not any(codes)


def _made_with(contestant: Contestant) -> str:
    return made_with([contestant], registry().experts.get(contestant.name))


def _copied(case: Case, call: KernelCall) -> float:
    """Bytes of packed weights outside the canonical tensors, as a share of these."""

    def place(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    given = case.weights.tensors().values()
    known = {place(t) for t in given}
    packed = (*call.packed.experts.values(), *call.packed.shared.values())
    own = sum(t.nbytes for t in packed if place(t) not in known)
    return round(own / sum(t.nbytes for t in given), 4)


# -- tune --regret ----------------------------------------------------------------------------


class _Regret(Sweep):
    """A bench with the choice itself among the contestants."""

    def _contestants(self) -> list[Contestant]:
        return [*contestants.experts([AUTO], self.args.dispatcher), *super()._contestants()]


def _regret(args: argparse.Namespace, argv: Sequence[str]) -> int:
    complete = True
    if args.measured is None:
        sweep = _Regret(args, command("tune", *argv))
        complete = sweep.measure()
        title, cells = _choice(sweep.data)
    else:
        title, cells = recorded(args.measured, _choice)
    write(regret.markdown(title, cells, args.limit), args.summary)
    return int(not (complete and regret.worst(cells) <= args.limit))


def _choice(data: Json) -> tuple[str, list[regret.Cell]]:
    """Of the JSON of a bench, or of benchmarks/layer_dispatch.py."""
    of = regret.of_layers if data.get("what") == "layers" else regret.of_bench
    return f"The choice on {data['device']['name']}", of(data)
