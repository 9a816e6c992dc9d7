"""Whole layers over ranks: every dispatcher with every experts backend, over numbers of tokens.

benchmarks/layer_dispatch.py is its command line; ``python -m moekit tune --ep N`` fills the tuned
table and finds the choice's regret by it. docs/bench.md says how times are taken.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moekit.discovery.registry import registry
from moekit.discovery.specs import DispatcherSpec
from moekit.errors import MoekitError
from moekit.problem import DTYPES, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.quant import SCHEMES
from moekit.selection import select
from moekit.selection.tuned.plan import serving
from moekit.selection.tuned.plan import split as buckets
from moekit_bench.bench import contestants, report, shapes
from moekit_bench.bench.dispatch_cli import (
    Ranks,
    cause,
    default_ranks,
    distributions,
    known,
    numbers,
)
from moekit_bench.bench.dispatch_cli import on_ranks as on_ranks
from moekit_bench.bench.dispatch_cli import split as split
from moekit_bench.bench.dispatch_layers import LayerCell, measure_layers, merge_layers
from moekit_bench.bench.dispatch_report import not_measured
from moekit_bench.bench.environment import device_facts, recorded_device, versions, whole

Json = dict[str, Any]

FORMAT = 1
# All experts of the layer, where moekit_bench.shapes has one rank's.
LAYERS = {"dsv3": "256:8:7168:2048", "qwen3-235b": "128:8:4096:1536"}
EXPERTS = "torch,triton,triton_batched,deepgemm,deepgemm_batched"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured, and how."""
    add = parser.add_argument
    add("--layer", default="dsv3", metavar="E:K:H:I", help=f"or of {', '.join(LAYERS)}")
    add("--dispatchers", metavar="LIST", help="default: every installed one that moves tokens")
    add("--experts", metavar="LIST", help=f"default: those installed of {EXPERTS}")
    add("--quant", default="none,fp8_block", metavar="LIST", help="default: %(default)s")
    add("--tokens", default="1,16,128,1024,4096", metavar="LIST", help="default: %(default)s")
    add("--ranks", type=whole(1), metavar="N", help="default: one per GPU; without GPUs 2")
    add("--share-devices", action="store_true", help="more ranks than GPUs: for the errors alone")
    add("--routing", default="uniform", metavar="KIND", help=f"of {', '.join(shapes.ROUTINGS)}")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--device", help="cpu or cuda; default: this machine's GPUs, else its CPU")
    add(
        "--inputs", type=whole(1), default=2, metavar="N",
        help="different inputs; default: %(default)s",
    )  # fmt: skip
    add("--replays", type=whole(1), default=5, metavar="N", help="turns; default: %(default)s")
    add("--no-graph", action="store_true", help="no CUDA graphs")
    add("--overlap", action="store_true", help="also what calls in flight and shared experts save")
    add("--seconds", type=float, metavar="S", help="start no cell after so many")
    add("--seed", type=int, default=0, metavar="N")
    add("--markdown", type=Path, metavar="FILE", help="the report; default: standard output")
    add("--json", type=Path, metavar="FILE", help="everything, rewritten after every cell")


class LayerSweep:
    """What was asked for, and what came of it. Subclasses may say what is `wanted` of a cell, and
    what to `keep` of it."""

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args, here = args, DeviceSpec.detect()
        self.device = here if args.device is None else DeviceSpec.parse(args.device)
        started = int(os.environ.get("WORLD_SIZE", 0))  # by torchrun
        self.ranks = args.ranks or started or default_ranks(self.device)
        if self.ranks < 2:
            raise MoekitError(f"{self.ranks} rank: tokens move between at least 2; set --ranks")
        fewer = self.device.type == "cuda" and 0 < torch.cuda.device_count() < self.ranks
        self.share = args.share_devices and fewer
        self.shape = shapes.shape(LAYERS.get(args.layer, args.layer))
        self.tokens = numbers(args.tokens, "--tokens")
        self.schemes = known(args.quant, SCHEMES, "--quant")
        (self.routing,) = known(args.routing, shapes.ROUTINGS, "--routing")[:1]
        every = registry()
        movers = [name for name, spec in every.dispatchers.items() if spec.moves_tokens]
        names = movers if args.dispatchers is None else split(args.dispatchers)
        self.dispatchers = [every.dispatcher(name) for name in names]
        listed = [name for name in EXPERTS.split(",") if name in every.experts]
        self.experts = listed if args.experts is None else split(args.experts)
        for name in self.experts:
            select.find_experts(name, every)
        if not self.dispatchers or not self.experts:
            raise MoekitError("nothing to measure: name --dispatchers and --experts")
        self.data: Json = {
            "format": FORMAT,
            "what": "layers",
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(contestants.experts(self.experts))
            | distributions(self.dispatchers),
            "device": device_facts(torch.device(self.device.type), self.device),
            "ranks": self.ranks,
            "layer": {
                name: getattr(self.shape, name)
                for name in (
                    "num_experts",
                    "top_k",
                    "hidden_size",
                    "intermediate_size",
                    "activation",
                    "has_bias",
                )
            },
            "settings": {
                name: getattr(args, name)
                for name in ("layer", "dtype", "routing", "inputs", "replays", "no_graph", "seed")
            }
            | {"share_devices": self.share},
            "refused": [],
            "cells": [],
        }

    def problem(self, scheme: str, tokens: int) -> MoEProblem:
        """As rank 0 sees it, of capacity ``tokens``."""
        return self.shape.problem(
            quant=scheme,
            dtype=DTYPES[self.args.dtype],
            max_num_tokens=tokens,
            parallel=ParallelConfig(ep_size=self.ranks),
            device=self.device,
        )

    def wanted(self, spec: DispatcherSpec, problem: MoEProblem) -> list[str]:
        """The experts to pair ``spec`` with; what cannot be paired goes to ``refused``."""
        able: list[str] = []
        if why := spec.unsupported(problem):
            self._refuse(problem, spec.name, "; ".join(why))
            return able
        for name in self.experts:
            if why := select.find_experts(name, registry()).unsupported(problem):
                self._refuse(problem, f"{spec.name} + {name}", "; ".join(why))
            else:
                able.append(name)
        return able

    def keep(self, spec: DispatcherSpec, problem: MoEProblem, results: list[Json]) -> None:
        """``results``: of each of the experts."""

    def run(self, ranks: Ranks, leader: bool = True) -> int:
        """0: all that was measured is right. leader: writes and prints."""
        cells = [(s, t) for s in self.schemes for t in self.tokens]
        start = time.monotonic()
        for number, (scheme, tokens) in enumerate(cells):
            problem = self.problem(scheme, tokens)
            pairs: list[Json] = []
            for spec in self.dispatchers:
                if self._late(start, ranks):
                    self._refuse(problem, spec.name, f"--seconds {self.args.seconds:g} were over")
                    continue
                names = self.wanted(spec, problem)
                results = self._measure(ranks, spec, problem, names) if names else []
                if leader and results:
                    self.keep(spec, problem, results)
                pairs += [{"dispatcher": spec.name} | result for result in results]
            self.data["cells"].append({"scheme": scheme, "tokens": tokens, "pairs": pairs})
            if leader:
                done = f"[{number + 1}/{len(cells)}, {time.monotonic() - start:.0f} s]"
                text = "; ".join(_one_line(r) for r in pairs) or "nobody"
                print(f"{done} {scheme} T={tokens}: {text}", file=sys.stderr, flush=True)
                self.write(last=False)
        if leader:
            self.write(last=True)
        measured = [r for c in self.data["cells"] for r in c["pairs"] if r["us"] is not None]
        failed = any(r["reason"] for c in self.data["cells"] for r in c["pairs"])
        return int(not measured or failed or not all(r["right"] for r in measured))

    def write(self, *, last: bool) -> None:
        """Rewrites the files, so that a run that is stopped leaves what it had."""
        args = self.args
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        if args.markdown is not None:
            args.markdown.parent.mkdir(parents=True, exist_ok=True)
            args.markdown.write_text(markdown(self.data))
        elif last:
            print(markdown(self.data), end="")

    def _measure(
        self, ranks: Ranks, spec: DispatcherSpec, problem: MoEProblem, names: Sequence[str]
    ) -> list[Json]:
        args = self.args
        assert problem.max_num_tokens is not None
        cell = LayerCell(
            spec, tuple(names), problem, problem.max_num_tokens, self.routing, args.inputs,
            args.replays, not args.no_graph, args.overlap, args.seed,
        )  # fmt: skip
        try:
            return merge_layers(ranks.run(measure_layers, cell))
        except Exception as error:
            if len(names) > 1:  # who of them it was, and the others' times
                return [r for name in names for r in self._measure(ranks, spec, problem, [name])]
            return [{"experts": names[0], "reason": cause(error), "us": None, "right": False}]

    def _late(self, start: float, ranks: Ranks) -> bool:
        """Whether the time is over, by the first rank's clock."""
        if self.args.seconds is None:
            return False
        return bool(ranks.run(_first, time.monotonic() - start > self.args.seconds)[0])

    def _refuse(self, problem: MoEProblem, name: str, reason: str) -> None:
        where = {"scheme": problem.quant.name, "tokens": problem.max_num_tokens}
        self.data["refused"].append(where | {"name": name, "reason": reason})


def _first(rank: int, world_size: int, value: bool) -> bool:
    return value


# -- the choice, and the report -------------------------------------------------------------------


def check_timed(data: Json) -> None:
    """Raises MoekitError if the times of a recorded run say nothing."""
    if _shared(data):
        raise MoekitError(
            f"{data['ranks']} ranks took turns on fewer devices (--share-devices), so their times "
            "say nothing; measure with a device for each rank"
        )


def _shared(data: Json) -> bool:
    return bool(data["settings"].get("share_devices"))


def problem_of(data: Json, scheme: str, tokens: int) -> MoEProblem:
    """The problem of a recorded cell."""
    return MoEProblem(
        **data["layer"],
        quant=scheme,
        dtype=DTYPES[data["settings"]["dtype"]],
        max_num_tokens=tokens,
        parallel=ParallelConfig(ep_size=data["ranks"]),
        device=recorded_device(data["device"]),
    )


def choice(problem: MoEProblem) -> str:
    """``dispatcher + experts`` that would be chosen now for calls of max_num_tokens; or nothing."""
    chosen = select.explain(problem).chosen
    assert problem.max_num_tokens is not None
    if chosen is None:
        return ""
    return pair(chosen.dispatcher, serving(buckets(chosen.experts), problem.max_num_tokens))


def pair(dispatcher: str, experts: str) -> str:
    return f"{dispatcher} + {experts}"


def times(cell: Json) -> dict[str, float | None]:
    """µs by pair; None where it failed or is wrong."""
    return {
        pair(r["dispatcher"], r["experts"]): r["us"] if r["right"] else None for r in cell["pairs"]
    }


def markdown(data: Json) -> str:
    """The whole report, from what goes to ``--json``."""
    device, settings, layer = data["device"], data["settings"], data["layer"]
    shown = (
        "Microseconds of prepare, experts and finalize, medians of "
        f"{settings['replays']} turns and of the ranks, in a CUDA graph where both declare it "
        "safe, else eager (`e`); **bold** the fastest, struck out what is wrong. Error: the "
        "largest, against the fp32 oracle."
    )
    if _shared(data):
        shown = (
            "Ranks took turns on fewer devices, so there are no times: relative errors against the "
            "fp32 oracle, struck out what is wrong."
        )
    known = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [
        f"# Layers over {data['ranks']} ranks, {data['date']}",
        "",
        f"    {data['command']}",
        "",
        f"{data['ranks']} {'ranks on fewer' if _shared(data) else '×'} {device['name']}; {known}",
        "",
        f"E {layer['num_experts']}, K {layer['top_k']}, H {layer['hidden_size']}, I "
        f"{layer['intermediate_size']}, {settings['dtype']}, {settings['routing']}; T tokens on "
        f"each rank. {shown}",
    ]
    for scheme in dict.fromkeys(c["scheme"] for c in data["cells"]):
        cells = [c for c in data["cells"] if c["scheme"] == scheme]
        lines += ["", f"## {scheme}", "", *_table(cells, timed=not _shared(data))]
        if not _shared(data):
            lines += ["", *_choices(data, cells), *_overlaps(cells)]
    lines += not_measured(data["refused"])
    return "\n".join(lines) + "\n"


def _table(cells: Sequence[Json], *, timed: bool) -> list[str]:
    """Times by T and the largest error, or the errors by T."""
    rows = dict.fromkeys((r["dispatcher"], r["experts"]) for c in cells for r in c["pairs"])
    largest = ["error"] if timed else []
    lines = report._table_head(
        ["dispatcher", "experts", *(f"T={c['tokens']}" for c in cells), *largest, "not so"]
    )
    for dispatcher, experts in rows:
        found = [
            next(
                (r for r in c["pairs"] if (r["dispatcher"], r["experts"]) == (dispatcher, experts)),
                None,
            )
            for c in cells
        ]
        text = _us if timed else _error
        texts = [text(r, c) for r, c in zip(found, cells, strict=True)]
        if timed:
            shown = [r for r in found if r and r["us"] is not None and r["error"] is not None]
            texts.append(f"{max(r['error'] for r in shown):.1e}" if shown else "–")
        reasons = dict.fromkeys(r["reason"] or "" for r in found if r and r["reason"])
        lines.append(report._table_row([dispatcher, experts, *texts, "; ".join(reasons)]))
    return lines


def _error(r: Json | None, cell: Json) -> str:
    if r is None or r["error"] is None:
        return "–"
    return f"{r['error']:.1e}" if r["right"] else f"~~{r['error']:.1e}~~"


def _us(r: Json | None, cell: Json) -> str:
    if r is None or r["us"] is None:
        return "–"
    text = report._us(r["us"]) + ("e" if r["note"] else "")
    if not r["right"]:
        return f"~~{text}~~"
    best = min(us for us in times(cell).values() if us is not None)
    return f"**{text}**" if r["us"] == best else text


def _choices(data: Json, cells: Sequence[Json]) -> list[str]:
    """Per T the fastest pair, and what would be chosen now."""
    lines = report._table_head(["T", "fastest", "µs", "chosen now", "µs", "regret"])
    for cell in cells:
        known = {name: us for name, us in times(cell).items() if us is not None}
        if not known:
            continue
        best, pick = min(known, key=lambda n: known[n]), ""
        try:
            pick = choice(problem_of(data, cell["scheme"], cell["tokens"]))
        except MoekitError:  # a report of another machine's backends
            pass
        regret = "–"
        if pick in known:
            regret = f"{100 * (known[pick] / known[best] - 1):.1f} %"
        lines.append(
            report._table_row(
                [
                    cell["tokens"],
                    best,
                    report._us(known[best]),
                    pick or "–",
                    report._us(known.get(pick)),
                    regret,
                ]
            )  # fmt: skip
        )
    return lines


def _overlaps(cells: Sequence[Json]) -> list[str]:
    rows = [(c["tokens"], r) for c in cells for r in c["pairs"] if r.get("overlap")]
    if not rows:
        return []
    lines = [
        "",
        "Two micro-batches of T tokens, and shared experts (an MLP of the experts' size):",
        "",
    ]
    lines += report._table_head(
        ["T", "dispatcher", "experts", "one after the other", "in flight", "run ahead", "saved",
         "shared after", "meanwhile", "beside", "saved", "difference"]
    )  # fmt: skip
    for tokens, r in rows:
        o = r["overlap"]
        ahead = o.get("run_ahead_us", o["in_flight_us"])  # absent in older records
        apart, batches = o["one_after_the_other_us"], min(o["in_flight_us"], ahead)
        best = min(o["meanwhile_us"], o["beside_us"])
        lines.append(
            report._table_row(
                [
                    tokens,
                    r["dispatcher"],
                    r["experts"],
                    report._us(apart),
                    report._us(o["in_flight_us"]),
                    report._us(o.get("run_ahead_us")),
                    f"{100 * (1 - batches / apart):.0f} %",
                    report._us(o["after_us"]),
                    report._us(o["meanwhile_us"]),
                    report._us(o["beside_us"]),
                    f"{100 * (1 - best / o['after_us']):.0f} %",
                    f"{max(v for k, v in o.items() if k.startswith('error')):.1e}",
                ]
            )  # fmt: skip
        )
    return lines


def _one_line(r: Json) -> str:
    name = f"{r['dispatcher']}+{r['experts']}"
    if r["us"] is None:
        return f"{name} failed ({r['reason']})"
    return f"{name} {r['us']:.0f}" + ("" if r["right"] else f" wrong ({report.shown_error(r)})")
