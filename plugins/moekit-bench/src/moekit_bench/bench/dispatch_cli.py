"""``python -m moekit bench --dispatch``: dispatchers alone, over numbers of tokens."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moekit.discovery.registry import registry
from moekit.discovery.specs import DispatcherSpec
from moekit.errors import MoekitError
from moekit.problem import DTYPES, DeviceSpec, MoEProblem, ParallelConfig
from moekit.problem.quant import SCHEMES
from moekit_bench.bench import shapes
from moekit_bench.bench.dispatch import DispatchCell, measure_rank, merge
from moekit_bench.bench.dispatch_report import markdown
from moekit_bench.bench.environment import (
    answered,
    command,
    device_facts,
    recorded,
    versions,
    whole,
)
from moekit_bench.bench.measure import first_line
from moekit_bench.bench.report import Json, shown_error

FORMAT = 1
_TOKENS = "1,4,16,64,128,256,512,1024,2048,4096,8192"
_SECONDS_A_CELL = 180.0


def main(argv: Sequence[str]) -> int:
    """Runs the command; 0: all that was measured is right, 1: not so, 2: a wrong question."""
    args = _parser().parse_args(argv)

    def answer() -> int:
        if args.from_json is not None:
            recorded(args.from_json, lambda data: _write(data, args, last=True))
            return 0
        return on_ranks(_Sweep(args, command("bench", "--dispatch", *argv)), args.ranks)

    return answered(answer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moekit bench --dispatch",
        description="Times dispatchers without experts, over tokens per rank; each is checked. "
        "Starts its own ranks, or uses torchrun's. See docs/bench.md.",
    )
    add = parser.add_argument
    add("--dispatchers", metavar="LIST", help="default: every installed one that moves tokens")
    add("--ranks", type=whole(1), metavar="N", help="default: one per GPU; without GPUs 2")
    add("--sizes", default="256:8:7168", metavar="E:K:H", help="default: %(default)s")
    add("--tokens", default=_TOKENS, metavar="LIST", help="per rank; default: %(default)s")
    add("--quant", default="none", metavar="LIST", help="what travels; default: %(default)s")
    add("--routing", default="uniform", metavar="LIST", help=f"of {', '.join(shapes.ROUTINGS)}")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--device", help="cpu or cuda; default: this machine's GPUs, else its CPU")
    add(
        "--inputs", type=whole(1), default=3, metavar="N",
        help="different inputs; default: %(default)s",
    )  # fmt: skip
    add("--replays", type=whole(1), default=10, metavar="N", help="turns; default: %(default)s")
    add("--no-graph", action="store_true", help="no CUDA graphs")
    add("--seed", type=int, default=0, metavar="N")
    add("--markdown", type=Path, metavar="FILE", help="the report; default: standard output")
    add("--json", type=Path, metavar="FILE", help="everything, rewritten after every cell")
    add(
        "--from",
        dest="from_json",
        type=Path,
        metavar="FILE",
        help="measure nothing: render a recorded --json again",
    )
    return parser


class Ranks(Protocol):
    """What runs a function on every rank: `moekit.testing.distributed.RankPool`, or torchrun's."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...


class _Sweep:
    """What was asked for, and what came of it."""

    share = False

    def __init__(self, args: argparse.Namespace, command: str) -> None:
        self.args = args
        here = DeviceSpec.detect() if args.device is None else DeviceSpec.parse(args.device)
        self.device = here
        self.ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 0)) or default_ranks(here)
        if self.ranks < 2:
            raise MoekitError(f"{self.ranks} rank: tokens move between at least 2; set --ranks")
        self.sizes = numbers(args.sizes.replace(":", ","), "--sizes")
        if len(self.sizes) != 3:
            raise MoekitError(f"--sizes {args.sizes}: want EXPERTS:TOP_K:HIDDEN, as in 256:8:7168")
        self.tokens = numbers(args.tokens, "--tokens")
        self.routings = known(args.routing, shapes.ROUTINGS, "--routing")
        self.schemes = known(args.quant, SCHEMES, "--quant")
        every = registry().dispatchers
        names = list(every) if args.dispatchers is None else split(args.dispatchers)
        self.specs = [registry().dispatcher(name) for name in names]
        if args.dispatchers is None:
            self.specs = [spec for spec in self.specs if spec.moves_tokens]
        if not self.specs:
            raise MoekitError("no dispatcher to measure: name --dispatchers")
        device = torch.device(here.type)
        self.data: Json = {
            "format": FORMAT,
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions([]) | distributions(self.specs),
            "device": device_facts(device, here),
            "ranks": self.ranks,
            "settings": {
                name: getattr(args, name)
                for name in ("sizes", "dtype", "inputs", "replays", "no_graph", "seed")
            },
            "refused": [],
            "cells": [],
        }

    def run(self, ranks: Ranks, leader: bool = True) -> int:
        """leader: writes and prints."""
        cells = [(s, r, t) for s in self.schemes for r in self.routings for t in self.tokens]
        start = time.monotonic()
        for number, (scheme, routing, tokens) in enumerate(cells):
            results = []
            for spec in self.specs:
                problem = self._problem(scheme, tokens)
                if reasons := spec.unsupported(problem):
                    self._refuse(scheme, tokens, spec.name, "; ".join(reasons))
                    continue
                result = {"name": spec.name} | self._measure(ranks, spec, problem, routing)
                results.append(result)
            self.data["cells"].append(
                {"scheme": scheme, "routing": routing, "tokens": tokens, "dispatchers": results}
            )
            if leader:
                text = "; ".join(map(_one_line, results)) or "nobody"
                done = f"[{number + 1}/{len(cells)}, {time.monotonic() - start:.0f} s]"
                print(f"{done} {scheme} {routing} T={tokens}: {text}", file=sys.stderr, flush=True)
                _write(self.data, self.args, last=False)
        if leader:
            _write(self.data, self.args, last=True)
        measured = [r for c in self.data["cells"] for r in c["dispatchers"]]
        return int(not measured or not all(r["right"] for r in measured))

    def _problem(self, scheme: str, tokens: int) -> MoEProblem:
        experts, top_k, hidden = self.sizes
        return MoEProblem(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=hidden,
            dtype=DTYPES[self.args.dtype],
            quant=scheme,
            max_num_tokens=tokens,
            parallel=ParallelConfig(ep_size=self.ranks),
            device=self.device,
        )

    def _measure(
        self, ranks: Ranks, spec: DispatcherSpec, problem: MoEProblem, routing: str
    ) -> Json:
        args, tokens = self.args, problem.max_num_tokens
        assert tokens is not None
        cell = DispatchCell(
            spec, problem, tokens, routing, args.inputs, args.replays, not args.no_graph, args.seed
        )
        try:
            return {"reason": ""} | merge(ranks.run(measure_rank, cell))
        except Exception as error:
            return {"reason": cause(error), "right": False, "us": None}

    def _refuse(self, scheme: str, tokens: int, name: str, reason: str) -> None:
        self.data["refused"].append(
            {"scheme": scheme, "tokens": tokens, "name": name, "reason": reason}
        )


# -- where ranks come from ----------------------------------------------------------------------


class Sweep(Protocol):
    """What runs on ranks: over ``ranks`` of them, on devices of one kind.

    share: they are more than there are devices, and may be.
    """

    device: DeviceSpec
    share: bool
    ranks: int

    def run(self, ranks: Ranks, leader: bool = True) -> int: ...


def on_ranks(sweep: Sweep, asked: int | None) -> int:
    """``sweep.run`` on torchrun's ranks if this process is one and none were asked for, else on
    ranks of our own."""
    if "RANK" in os.environ and asked is None:
        return _torchrun(sweep)
    return _spawned(sweep)


class _Pools:
    """Ranks of our own; new ones after a failure, which may have left them unusable."""

    def __init__(self, world_size: int, device_type: str) -> None:
        try:
            from moekit.testing.distributed import RankPool
        except ImportError as error:
            raise MoekitError(
                f"{error}; or start the ranks with torchrun: torchrun --nproc-per-node "
                f"{world_size} -m moekit bench --dispatch"
            ) from error
        self._make = partial(RankPool, world_size, device_type, _SECONDS_A_CELL)
        self._pool = self._make()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if self._pool.closed:
            self._pool = self._make()
        try:
            return self._pool.run(function, *args)
        except Exception:
            self._pool.close()
            raise

    def close(self) -> None:
        self._pool.close()


class _Torchrun:
    """This process is one of the ranks. One that fails ends itself, and torchrun the others."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            mine = function(dist.get_rank(), dist.get_world_size(), *args)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone


def _spawned(sweep: Sweep) -> int:
    count = torch.cuda.device_count()
    if sweep.device.type == "cuda" and sweep.ranks > count and not sweep.share:
        raise MoekitError(
            f"{sweep.ranks} ranks want as many GPUs, there are {count}; ask for fewer, or, of "
            "benchmarks/layer_dispatch.py, for errors alone with --share-devices"
        )
    pools = _Pools(sweep.ranks, sweep.device.type)
    try:
        return sweep.run(pools)
    finally:
        pools.close()


def _torchrun(sweep: Sweep) -> int:
    backend = "gloo"
    if sweep.device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local % torch.cuda.device_count() if sweep.share else local)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        return sweep.run(_Torchrun(), leader=dist.get_rank() == 0)
    finally:
        dist.destroy_process_group()


def default_ranks(device: DeviceSpec) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 2


# -- reading and writing --------------------------------------------------------------------------


def _one_line(r: Json) -> str:
    if r["us"] is None:
        return f"{r['name']} failed ({r['reason']})"
    wrong = "" if r["right"] else f", wrong ({shown_error(r)})"
    return f"{r['name']} {r['us']:.0f} us{wrong}"


def _write(data: Json, args: argparse.Namespace, *, last: bool) -> None:
    """Rewrites the files, so that a run that is stopped leaves what it had."""
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(data))
    elif last:
        print(markdown(data), end="")


def cause(error: Exception) -> str:
    """What a rank raised, rather than that ranks failed."""
    tracebacks = getattr(error, "tracebacks", {})
    for rank, text in sorted(tracebacks.items()):
        return f"rank {rank}: {text.strip().splitlines()[-1]}"
    return first_line(error)


def distributions(specs: Sequence[DispatcherSpec]) -> dict[str, str]:
    names = {spec.name for spec in specs}
    return {
        state.distribution: state.version
        for state in registry().plugins
        if names & {spec.name for spec in state.dispatchers} and state.distribution != "moekit"
    }


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def known(text: str, choices: Sequence[str] | Any, option: str) -> list[str]:
    names = split(text)
    if not names or (unknown := [n for n in names if n not in choices]):
        wrong = "nothing" if not names else ", ".join(unknown)
        raise MoekitError(f"{option}: {wrong} is no choice; choose from {', '.join(choices)}")
    return names


def numbers(text: str, option: str) -> list[int]:
    parts = split(text)
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise MoekitError(f"{option} {text!r}: want positive whole numbers")
    return [int(part) for part in parts]
