"""Hold out a shape of the tuned tiles, and compare the plan chosen without it with the tuned one.

    python benchmarks/device/tile_regret.py                        # no GPU: how often plans agree
    python benchmarks/device/tile_regret.py --record regret.json   # on a GPU: times and regret
    python benchmarks/device/tile_regret.py --from regret.json     # the regret of a recording

For each entry of the shipped table of --device (default: this GPU's, else the H200's) and each
number of rows, two plans are chosen that know nothing of the entry's shape: "other shapes" from the
entries of other shapes, as moekit does for a shape that no table has, and "rules" from no table.
Regret is a plan's time over the tuned plan's, minus one.

The table holds the fastest plan of a cell only. So without a GPU regret is known where the chosen
plan is that one (it is 0); elsewhere the chosen plan's time is missing. --record times it beside
the tuned plan, in turns, and continues a file that is there. Plans for so few tokens that moekit
uses dot products are left out. Table keys have no top-k: 8, or a quarter of the experts if fewer.
Needs triton 3.6, with which the tables were made: other versions lack the specialized tiles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from moekit_bench import Timer
from moekit_triton import tables
from moekit_triton.heuristics import Planner, dots_pay, sorting_pays
from moekit_triton.plans import TilePlan
from moekit_triton.search import Case, interleaved_us
from moekit_triton.tune import random_packed, rows_per_expert, token_count

from moekit import DeviceSpec, MoEProblem
from moekit.plugin import replace_file

CHOICES = ("other shapes", "rules")
_DEVICE = DeviceSpec("cuda", (9, 0), "NVIDIA H200")


@dataclass(frozen=True)
class Cell:
    """A number of tokens of a held-out entry: the tuned plan, and the plans of `CHOICES`."""

    problem: MoEProblem
    tokens: int
    tuned: TilePlan
    chosen: Mapping[str, TilePlan]

    @property
    def name(self) -> str:
        p = self.problem
        return (
            f"E {p.num_experts} H {p.hidden_size} I {p.intermediate_size} {p.quant.name}"
            f"{' bias' * p.has_bias}, {rows_per_expert(p, self.tokens):g} rows an expert"
        )


def problem_of(entry: tables.Entry, device: DeviceSpec) -> MoEProblem:
    """Return the problem of an entry's key."""
    key = entry.key
    return MoEProblem(
        num_experts=key["experts"], top_k=max(1, min(8, key["experts"] // 4)),
        hidden_size=key["hidden"], intermediate_size=key["intermediate"], quant=key["scheme"],
        dtype=getattr(torch, key["dtype"]), has_bias=key["bias"], device=device,
        activation="silu" if key["gated"] else "silu_no_mul",
    )  # fmt: skip


def same_shape(entry: tables.Entry, other: tables.Entry) -> bool:
    return all(entry.key[name] == other.key[name] for name in ("experts", "hidden", "intermediate"))


def cells(
    entries: Sequence[tables.Entry], device: DeviceSpec, borrowed: Sequence[tables.Entry] = ()
) -> Iterator[Cell]:
    """Yield every cell of ``entries``, with the plans that are chosen without its shape. borrowed:
    entries that count where no other shape is near."""
    for entry in entries:
        p, near = problem_of(entry, device), ()
        for some in (entries, borrowed):
            others = [other for other in some if not same_shape(entry, other)]
            near = near or tables.nearest_plans(others, p)
        planners = {"other shapes": Planner(p, measured=near), "rules": Planner(p, measured=())}
        for rows, _ in entry.plans:
            tokens = token_count(p, rows)
            if dots_pay(p, tokens, p.top_k):
                continue
            per_expert, sort = rows_per_expert(p, tokens), sorting_pays(p, tokens, p.top_k)
            yield Cell(
                p, tokens, Planner(p, measured=entry.plans, own=True).tiles(per_expert, sort=sort),
                {name: each.tiles(per_expert, sort=sort) for name, each in planners.items()},
            )  # fmt: skip


def agreement(found: Sequence[Cell]) -> str:
    """Return a table: how often a choice is the tuned plan, or has its tile of a GEMM."""
    lines = ["| choice | scheme | cells | tuned plan | tile of GEMM 1 | tile of GEMM 2 |"]
    lines.append("|---|---|---|---|---|---|")
    for name in CHOICES:
        schemes = sorted({cell.problem.quant.name for cell in found})
        for scheme in (*schemes, "all"):
            some = [
                (c.tuned, c.chosen[name]) for c in found if scheme in ("all", c.problem.quant.name)
            ]
            same = [
                sum(a == b for a, b in some),
                sum(a.first == b.first for a, b in some),
                sum(a.second == b.second for a, b in some),
            ]
            lines.append(f"| {name} | {scheme} | {len(some)} | {' | '.join(map(str, same))} |")
    return "\n".join(lines)


def times(cell: Cell, packed: Any) -> tuple[dict[str, float], Any]:
    """Return the microseconds of a call by each different plan, and the weights for the next."""
    p = cell.problem.replace(device="cuda")
    case = Case.make(p, packed or random_packed(p), cell.tokens, 3)
    plans = {"tuned": cell.tuned, **cell.chosen}
    different = list(dict.fromkeys(plans.values()))
    launches = [case.launches(plan, "gemm_1", "gemm_2") for plan in different]
    us = interleaved_us(Timer(torch.device("cuda")), launches, 10e3)
    each = {name: us[different.index(plan)] / len(case.calls) for name, plan in plans.items()}
    return each, case.calls[0].weights


def record(found: Sequence[Cell], file: Path) -> dict[str, dict[str, float]]:
    """Time every cell that ``file`` lacks; the file is rewritten after each."""
    known: dict[str, dict[str, float]] = json.loads(file.read_text()) if file.exists() else {}
    problem, packed = None, None
    for i, cell in enumerate(found, 1):
        if cell.name in known:
            continue
        if cell.problem != problem:
            problem, packed = cell.problem, None
            torch.cuda.empty_cache()
        try:
            known[cell.name], packed = times(cell, packed)
        except torch.OutOfMemoryError:
            print(f"{cell.name}: out of memory", file=sys.stderr)
            continue
        replace_file(file, json.dumps(known, indent=1) + "\n")
        print(f"[{i}/{len(found)}] {cell.name}", file=sys.stderr, flush=True)
    return known


def regret(recorded: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table: what each choice loses, on average and in its worst cell."""
    lines = ["| choice | cells | mean regret | worst | cells above 10 % | worst cell |"]
    lines.append("|---|---|---|---|---|---|")
    for name in CHOICES:
        lost: dict[str, float] = defaultdict(float)
        for cell, us in recorded.items():
            lost[cell] = us[name] / us["tuned"] - 1
        mean = math.exp(sum(map(math.log1p, lost.values())) / len(lost)) - 1
        worst = max(lost, key=lost.__getitem__)
        above = sum(value > 0.1 for value in lost.values())
        lines.append(
            f"| {name} | {len(lost)} | {mean:.2%} | {lost[worst]:.1%} | {above} | {worst} |"
        )
    for cell, us in recorded.items():
        if us["rules"] < 0.985 * us["tuned"]:
            lines.append(f"The rules beat the table by {us['tuned'] / us['rules'] - 1:.0%}: {cell}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="whose shipped table, such as 'NVIDIA H200'")
    parser.add_argument("--record", type=Path, metavar="FILE", help="time the plans on this GPU")
    parser.add_argument("--from", dest="recorded", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.recorded is not None:
        print(regret(json.loads(args.recorded.read_text())))
        return 0
    if not triton.__version__.startswith("3.6."):
        parser.error(f"the tuned plans are of triton 3.6, and this is {triton.__version__}")
    here = DeviceSpec.detect()
    if args.record is not None and here.type != "cuda":
        parser.error("--record times plans on a CUDA device, and torch finds none here")
    device = here if here.type == "cuda" else _DEVICE
    entries = tables.FILES.known(args.device or device.name)
    if not entries:
        parser.error(f"no shipped table for {args.device or device.name}: name one with --device")
    found = list(cells(entries, device, tables.FILES.known(_DEVICE.name)))
    print(agreement(found))
    if args.record is not None:
        print(regret(record(found, args.record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
