"""``python -m moekit tune --ep N``: the choice among pairs of dispatcher and experts on N ranks."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence

import torch
from moekit_bench.bench import contestants
from moekit_bench.bench.dispatch_cli import distributions, on_ranks
from moekit_bench.bench.dispatch_layers_cli import Json, LayerSweep, check_timed, problem_of
from moekit_bench.bench.environment import command, recorded
from moekit_bench.tune import regret
from moekit_bench.tune.write import add_to, made_with, table_file, write

from moekit.discovery.registry import registry
from moekit.discovery.specs import DispatcherSpec
from moekit.errors import MoekitError
from moekit.problem import MoEProblem
from moekit.selection.tuned import table as tables
from moekit.selection.tuned.table import Key, Record


class _Pairs(LayerSweep):
    """Records what the table lacks, or has of other versions."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        super().__init__(args, command)
        if bad := [name for name in self.experts if "|" in name]:
            raise MoekitError(f"--experts {', '.join(bad)}: name the backends themselves")
        self.file = table_file(args.output, self.device)
        add_to(self.file, {})  # what cannot be written or read ends the run before it begins
        self.table = tables.read(self.file)
        people = {c.name: c for c in contestants.experts(self.experts)}
        self.made_with = {
            (d.name, e): made_with([people[e]], d, registry().experts[e], more=distributions([d]))
            for d in self.dispatchers
            for e in self.experts
        }

    def wanted(self, spec: DispatcherSpec, problem: MoEProblem) -> list[str]:
        times = self.table.get(Key.of(problem), {})
        able = super().wanted(spec, problem)
        if self.args.again:
            return able

        def known(experts: str) -> bool:
            pair = (spec.name, experts)
            record = times.get(pair, {}).get(problem.max_num_tokens or 0)
            return record is not None and record.made_with == self.made_with[pair]

        return [name for name in able if not known(name)]

    def keep(self, spec: DispatcherSpec, problem: MoEProblem, results: list[Json]) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        assert problem.max_num_tokens is not None
        times = {}
        for r in results:
            pair = (spec.name, r["experts"])
            us = round(r["us"], 3) if r["right"] else None
            record = Record(us, r.get("copied"), now, self.made_with[pair])
            times[pair] = {problem.max_num_tokens: record}
        add_to(self.file, {Key.of(problem): times})

    def write(self, *, last: bool) -> None:
        """The table is the report."""

    def regrets(self) -> list[regret.Cell]:
        """Of the table as it is now."""
        table, cells = tables.read(self.file), []
        for scheme in self.schemes:
            largest = self.problem(scheme, max(self.tokens))
            able = {
                d.name: [
                    e for e in self.experts if registry().experts[e].priority_for(largest) >= 0
                ]
                for d in self.dispatchers
            }
            title = f"{self.args.layer} {scheme} on {self.ranks} ranks"
            cells += regret.of_pairs(title, Key.of(largest), table, able)
        return cells


class _Measured(LayerSweep):
    """Measurements for --regret; its report is the regret's."""

    def write(self, *, last: bool) -> None:
        if self.args.json is not None:
            self.args.json.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """0: all measured, and no regret above --limit; 1: not so."""
    if args.measured is not None or args.gpus not in (0, args.ep):
        raise MoekitError(
            f"--ep {args.ep} measures on {args.ep} devices: leave out --gpus; and with --from, "
            "which tells the ranks, leave out --ep"
        )
    if torch.cuda.is_available() and args.device is None and torch.cuda.device_count() < args.ep:
        raise MoekitError(f"--ep {args.ep}: there are {torch.cuda.device_count()} devices")
    if args.regret and args.json is not None and "," in args.shapes:
        raise MoekitError(f"--json holds one shape: leave it out, or one of --shapes {args.shapes}")
    cells, complete, line = [], True, command("tune", *argv)
    shown, leader = "The choice", os.environ.get("RANK", "0") == "0"
    for layer in args.shapes.split(","):
        asked = _options(args, layer.strip())
        sweep = (_Measured if args.regret else _Pairs)(asked, line)
        code = on_ranks(sweep, asked.ranks)
        failed = any(r["reason"] for c in sweep.data["cells"] for r in c["pairs"])
        complete &= code == 0 or (not args.regret and not failed)
        if isinstance(sweep, _Pairs):
            shown = f"Tuned table {sweep.file.name}"
            cells += sweep.regrets()
        else:
            shown = f"The choice on {sweep.data['ranks']} x {sweep.data['device']['name']}"
            cells += regret.of_layers(sweep.data)
    if leader:
        write(regret.markdown(shown, cells, args.limit), args.summary)
    missed = args.regret and regret.worst(cells) > args.limit
    print(f"{len(cells)} cells", file=sys.stderr)
    return int(not complete or missed)


def record(args: argparse.Namespace) -> int:
    """Puts the pairs that benchmarks/layer_dispatch.py measured into the table."""
    return recorded(args.measured, lambda data: _record(args, data))


def _record(args: argparse.Namespace, data: Json) -> int:
    if data.get("what") != "layers":
        raise MoekitError(f"{args.measured} is no JSON of benchmarks/layer_dispatch.py")
    check_timed(data)
    found = {n: v for n, v in data["versions"].items() if n != "python"}
    made = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    cells: dict[str, list[regret.Cell]] = {}
    able: dict[str, dict[str, list[str]]] = {}
    for cell in data["cells"]:
        problem = problem_of(data, cell["scheme"], cell["tokens"])
        title = f"{data['settings']['layer']} {cell['scheme']} on {data['ranks']} ranks"
        file, times = table_file(args.output, problem.device), {}
        for r in cell["pairs"]:
            us = round(r["us"], 3) if r["right"] else None
            one = Record(us, r.get("copied"), data["date"], made)
            times[r["dispatcher"], r["experts"]] = {cell["tokens"]: one}
            spec = registry().experts.get(r["experts"])
            if spec is None or spec.priority_for(problem) >= 0:
                able.setdefault(title, {}).setdefault(r["dispatcher"], []).append(r["experts"])
        key = Key.of(problem)
        add_to(file, {key: times})
        cells[title] = regret.of_pairs(title, key, tables.read(file), able.get(title, {}))
    shown = [cell for group in cells.values() for cell in group]
    write(
        regret.markdown(f"Tuned table, from {args.measured.name}", shown, args.limit), args.summary
    )
    return 0


def _options(args: argparse.Namespace, layer: str) -> argparse.Namespace:
    """The sweep's, of one layer."""
    dispatchers = None if args.dispatcher == "local" else args.dispatcher
    experts = args.experts
    if experts is None:
        usable = registry().experts.values()
        experts = ",".join(spec.name for spec in usable if spec.priority >= 0)
    return argparse.Namespace(
        **{**vars(args), "layer": layer, "dispatchers": dispatchers, "experts": experts},
        ranks=None if "RANK" in os.environ else args.ep,
        overlap=False,
        seconds=None,
        share_devices=False,
    )
