"""``python -m moekit bench``: a sweep, its progress, and where the results go."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from moekit.discovery.registry import registry
from moekit.errors import MoekitError
from moekit.problem import DTYPES, DeviceSpec, MoEProblem
from moekit.problem.quant import SCHEMES
from moekit.problem.weights import ExpertWeights
from moekit_bench.bench import contestants, dispatch_cli, report, shapes
from moekit_bench.bench.cells import Case, Result, release, run_cell
from moekit_bench.bench.contestants import Contestant, KernelCall
from moekit_bench.bench.environment import (
    answered,
    command,
    device_facts,
    recorded,
    versions,
    whole,
)
from moekit_bench.bench.limits import Ceilings, known_ceilings, measure_ceilings, parse_ceilings
from moekit_bench.bench.measure import Call, DeviceLost, check_alive, first_line
from moekit_bench.bench.progress import Progress
from moekit_bench.bench.report import Json
from moekit_bench.bench.shapes import Shape

FORMAT = 1
_TOKENS = "1,16,64,256,1024,4096,16384"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0: every cell has a right result, 1: some has none, 2: a wrong question."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--dispatch" in given:  # has options of its own, --help included
        return dispatch_cli.main([a for a in given if a != "--dispatch"])
    args = _parser().parse_args(argv)

    def answer() -> int:
        if args.list_shapes:
            print(_shape_list())
            return 0
        if args.from_json is not None:
            recorded(args.from_json, lambda data: _write(data, args, last=True))
            return 0
        return Sweep(args, command("bench", *given)).run()

    return answered(answer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit bench",
        description="Times experts backends and peers on the whole routed-experts block, each "
        "checked against the fp32 oracle. See docs/bench.md.",
    )
    add_sweep(parser)
    add = parser.add_argument
    add("--routing", default="uniform", metavar="LIST", help=f"of {', '.join(shapes.ROUTINGS)}")
    add(
        "--ep",
        type=whole(1),
        default=1,
        metavar="N",
        help="the experts of one of N ranks, for tokens most of whose choices are other ranks'; "
        "--shapes are whole layers",
    )
    add(
        "--peers",
        action="append",
        default=[],
        metavar="PATH",
        help="adapter file or folder of them (benchmarks/peers); may be repeated",
    )
    add("--only-peers", metavar="LIST", help="of --peers, these names only")
    add("--no-graph", action="store_true", help="eager times only")
    add(
        "--ceilings",
        metavar="WHAT",
        help="bf16=791,fp8=1424,read=4490 (TFLOP/s, GB/s), or `measure`; default: what is known "
        "for the device",
    )
    add("--markdown", type=Path, metavar="FILE", help="the report; default: standard output")
    add("--json", type=Path, metavar="FILE", help="everything, rewritten after every cell")
    add("--plot", type=Path, metavar="DIR", help="a PNG per shape and scheme (needs matplotlib)")
    add(
        "--from",
        dest="from_json",
        type=Path,
        metavar="FILE",
        help="measure nothing: render a recorded --json again",
    )
    add("--list-shapes", action="store_true", help="print the named shapes, and stop")
    add(
        "--dispatch",
        action="store_true",
        help="time dispatchers instead: `bench --dispatch --help` has the options",
    )
    return parser  # fmt: skip


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """The options that say what is measured, and how; `moekit tune` has them too."""
    add = parser.add_argument
    add(
        "--shapes",
        default="mixtral,qwen3-30b,dsv3-ep8",
        metavar="LIST",
        help="names (`bench --list-shapes`) or sizes E:K:H:I; default: %(default)s",
    )
    add("--tokens", default=_TOKENS, metavar="LIST", help="default: %(default)s")
    add("--quant", default="none", metavar="LIST", help=f"of {', '.join(SCHEMES)}")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--device", help="a torch device; default: this machine's accelerator, else its CPU")
    add(
        "--experts",
        metavar="LIST",
        help="backends; default: every installed one that supports the problem; none: ''",
    )
    add("--dispatcher", default="local", metavar="NAME", help="default: %(default)s")
    add(
        "--inputs",
        type=whole(1),
        default=3,
        metavar="N",
        help="different inputs and routings a graph covers, more where their weights fit the L2 "
        "cache; default: %(default)s",
    )
    add("--replays", type=whole(1), default=10, metavar="N", help="turns; default: %(default)s")
    add("--seed", type=int, default=0, metavar="N")


def _shape_list() -> str:
    return "\n".join(
        f"{s.name:<14} E {s.num_experts:<4} K {s.top_k:<2} H {s.hidden_size:<5} "
        f"I {s.intermediate_size:<6} {s.activation:<10} {s.source}"
        for s in shapes.SHAPES.values()
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class Sweep:
    """Cells measured one by one: per shape and scheme weights and contestants are made once, and
    freed after. Subclasses may say which `cells`, and what to `keep` of them."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args = args
        self.device = _device(args.device)
        self.spec = DeviceSpec.of(self.device)
        self.shapes = [shapes.shape(text) for text in _split(args.shapes)]
        self.schemes = _split(args.quant)
        self.routings = _split(args.routing)
        self.tokens = _numbers(args.tokens)
        self.problems = {  # all of them now, so that a typing error costs no time
            (shape.name, scheme): self._problem(shape, scheme)
            for shape in self.shapes
            for scheme in self.schemes
        }
        for kind in self.routings:
            if kind not in shapes.ROUTINGS:
                raise MoekitError(
                    f"routing {kind!r} is unknown; choose from {', '.join(shapes.ROUTINGS)}"
                )
        if not (self.shapes and self.schemes and self.routings and self.tokens):
            raise MoekitError("--shapes, --quant, --routing and --tokens: want at least one each")
        self.contestants = self._contestants()
        self.ceilings = self._ceilings()
        cells = len(self.problems) * len(self.routings) * len(self.tokens)
        self.progress = Progress(cells)
        self.data: Json = {
            "format": FORMAT,
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(self.contestants),
            "device": device_facts(self.device, self.spec),
            "ceilings": None if self.ceilings is None else _ceilings_dict(self.ceilings),
            "settings": {
                name: getattr(args, name)
                for name in ("dtype", "dispatcher", "ep", "inputs", "replays", "no_graph", "seed")
            },
            "refused": [],
            "cells": [],
            "summary": [],
        }

    def run(self) -> int:
        complete = self.measure()
        _write(self.data, self.args, last=True)
        cells = self.data["cells"]
        return int(
            not complete or not all(any(r["right"] for r in c["contestants"]) for c in cells)
        )

    def measure(self) -> bool:
        """Measures all cells; whether none is missing."""
        try:
            for shape in self.shapes:
                for scheme in self.schemes:
                    self._sweep(shape, self.problems[shape.name, scheme])
        except DeviceLost as error:
            self.progress.say(f"error: {error}; the cells that are left cannot be measured")
        except KeyboardInterrupt:
            self.progress.say("interrupted; these are the cells so far")
        return len(self.data["cells"]) == self.progress.total

    def cells(self, problem: MoEProblem) -> list[tuple[str, int]]:
        """What is measured of a problem: (routing, tokens)."""
        return [(kind, tokens) for kind in self.routings for tokens in self.tokens]

    def keep(
        self, shape: Shape, case: Case, calls: Mapping[str, Call], results: Mapping[str, Result]
    ) -> None:
        """What happens after each cell."""
        kinds = {c.name: c.kind for c in self.contestants}
        self.data["cells"].append(report.cell_dict(shape, case, results, kinds))
        _write(self.data, self.args, last=False)

    def _sweep(self, shape: Shape, problem: MoEProblem) -> None:
        title = f"{shape.name} {problem.quant.name}"
        cells = self.cells(problem)
        if not cells:
            return
        try:
            self.progress.doing(f"{title}: weights")
            weights = shapes.random_weights(problem, self.device, self.args.seed)
        except Exception as error:
            check_alive(self.device)
            self._refuse(title, shape, problem, "all", f"no weights: {first_line(error)}")
            self.progress.done += len(cells)
            return
        calls = dict(self._calls(title, shape, problem, weights))
        self._grow_workspaces(title, calls)
        for kind, tokens in cells:
            try:
                case = Case.make(
                    problem, weights, tokens, kind, count=self.args.inputs, seed=self.args.seed
                )
                results = run_cell(
                    case,
                    calls,
                    ceilings=self.ceilings,
                    replays=self.args.replays,
                    graph=not self.args.no_graph,
                    log=lambda name, t=tokens: self.progress.doing(  # type: ignore[misc]
                        f"{title} T={t}: {name}"
                    ),
                )
            except DeviceLost:
                raise
            except Exception as error:  # out of memory for the inputs or the oracle
                check_alive(self.device)
                release(self.device)
                self._refuse(title, shape, problem, "all", f"T={tokens}: {first_line(error)}")
                self.progress.done += 1
                continue
            self.keep(shape, case, calls, results)
            self.progress.cell(f"{title} {kind} T={tokens}", results)
        calls.clear()
        del weights
        release(self.device)

    def _calls(
        self, title: str, shape: Shape, problem: MoEProblem, weights: ExpertWeights
    ) -> Iterator[tuple[str, Call]]:
        for contestant in self.contestants:
            reason = contestant.left_out
            if problem.parallel.ep_size > 1 and contestant.kind == contestants.PEER:
                reason = "--ep: adapters are not told which experts are other ranks'"
            if not reason:
                self.progress.doing(f"{title}: making {contestant.name}")
                try:
                    yield contestant.name, contestant.make(problem, weights, self.device)
                    continue
                except Exception as error:
                    check_alive(self.device)
                    reasons = getattr(error, "reasons", ())
                    reason = "; ".join(reasons) if reasons else first_line(error)
                release(self.device)
            self._refuse(title, shape, problem, contestant.name, reason)

    def _grow_workspaces(self, title: str, calls: Mapping[str, Call]) -> None:
        """The largest call first: a workspace that grows between captures is kept once more."""
        for name, call in calls.items():
            if isinstance(call, KernelCall):
                self.progress.doing(f"{title}: warming up {name}")
                try:
                    call.warmup(max(self.tokens))
                except Exception:  # reported by the cell that needs so much
                    check_alive(self.device)
                    release(self.device)

    def _refuse(
        self, title: str, shape: Shape, problem: MoEProblem, name: str, reason: str
    ) -> None:
        entry = {"shape": shape.name, "scheme": problem.quant.name, "name": name, "reason": reason}
        if not any((r["name"], r["reason"]) == (name, reason) for r in self.data["refused"]):
            self.progress.doing("")
            self.progress.say(f"{title}: without {name}: {reason}")
        self.data["refused"].append(entry)

    def _problem(self, shape: Shape, scheme: str) -> MoEProblem:
        return shape.problem(
            quant=scheme,
            dtype=DTYPES[self.args.dtype],
            device=self.spec,
            ep=self.args.ep,
        )

    def _contestants(self) -> list[Contestant]:
        names = None if self.args.experts is None else _split(self.args.experts)
        registry().dispatcher(self.args.dispatcher)  # or it says which there are
        found = contestants.experts(names, self.args.dispatcher)
        peers = contestants.peers(self.args.peers)
        if self.args.only_peers is not None:
            wanted = _split(self.args.only_peers)
            if unknown := sorted(set(wanted) - {p.name for p in peers}):
                there = ", ".join(p.name for p in peers) or "none"
                raise MoekitError(f"no peer {', '.join(unknown)}; there are: {there}")
            peers = [p for p in peers if p.name in wanted]
        every = [*found, *peers]
        taken = [c.name for c in every]
        if twice := sorted({name for name in taken if taken.count(name) > 1}):
            raise MoekitError(f"two contestants are called {', '.join(twice)}: rename the peer")
        if not every:
            raise MoekitError("nobody to measure: name --experts or --peers")
        return every

    def _ceilings(self) -> Ceilings | None:
        if self.args.ceilings is None:
            return known_ceilings(self.spec.name)
        if self.args.ceilings == "measure":
            return measure_ceilings(self.device)
        return parse_ceilings(self.args.ceilings)


def _device(name: str | None) -> torch.device:
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise MoekitError(f"device {name!r}: {first_line(error)}") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise MoekitError(f"device {name!r} was asked for, but torch sees no CUDA device here")
    else:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    return device


def _numbers(text: str) -> list[int]:
    parts = _split(text)
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise MoekitError(f"tokens {text!r}: want positive whole numbers, as in {_TOKENS}")
    return [int(part) for part in parts]


def _ceilings_dict(ceilings: Ceilings) -> Json:
    return {"flops": dict(ceilings.flops), "read": ceilings.read}


def _write(data: Json, args: argparse.Namespace, *, last: bool) -> None:
    """Rewrites the files, each at once, so that a run that is stopped leaves what it had."""
    data["summary"] = report.summarize(data["cells"])
    if args.json is not None:
        replace_file(args.json, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if args.markdown is not None:
        replace_file(args.markdown, report.markdown(data))
    if not last:
        return
    if args.markdown is None:
        print(report.markdown(data), end="")
    if args.plot is not None:
        try:
            for file in report.plot(data, args.plot):
                print(f"plot: {file}", file=sys.stderr)
        except MoekitError as error:  # the measurements are worth more than the picture
            print(f"no plots: {error}", file=sys.stderr)


def replace_file(file: Path, text: str) -> None:
    """Writes ``file`` at once: whoever reads it sees the old text or the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)
