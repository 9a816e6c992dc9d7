"""Write this CPU's entries of the shipped cost table of the `torch` experts.

    python benchmarks/cpu_costs_table.py AVX512_BF16
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/cpu_costs_table.py AVX2
    python benchmarks/cpu_costs_table.py worth

The argument is the capability that the numbers stand for. Entries of that capability are replaced.
``worth`` instead prints how many cells of the shipped tables would be slower without each method.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import moekit
from moekit.backends import cpu_costs, cpu_experts

TABLE = Path(cpu_costs.__file__).with_suffix(".json")
SIZES = ((16, 256, 512), (64, 2048, 768))  # experts, hidden, intermediate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("AVX2", "AVX512", "AVX512_BF16", "AMX", "worth"))
    args = parser.parse_args()
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else []
    if args.name == "worth":
        return worth(tables)
    tables = [t for t in tables if t["capability"] != args.name]
    for dtype in ("bfloat16", "float16", "float32"):
        for experts, hidden, inner in SIZES:
            problem = moekit.MoEProblem(
                num_experts=experts, top_k=2, hidden_size=hidden, intermediate_size=inner,
                dtype=getattr(torch, dtype), device="cpu",
            )  # fmt: skip
            timed = cpu_experts._timed(problem, cpu_experts.methods_for(problem))
            if timed is None:
                parser.exit(1, "other work took the cores: nothing was written\n")
            tables.append({
                "capability": args.name,
                "measured": f"{cpu_costs.cpu_name()}, {cpu_costs.capability()}, "
                f"{torch.get_num_threads()} threads, torch {torch.__version__}",
                "dtype": dtype,
                "elements": 3 * hidden * inner,
                "seconds": {w: [[n, float(f"{t:.3g}")] for n, t in p] for w, p in timed.items()},
            })  # fmt: skip
    rows = ",\n".join(json.dumps(t) for t in tables)
    TABLE.write_text(f"[\n{rows}\n]\n")


def worth(tables: list[dict]) -> None:
    """Print, for each method, the cells that lose over 3 % without it, and the largest loss.

    First among all methods, then among those that run one expert after another: only these run
    single tokens and quantized weights.
    """
    print("| method | of all | largest | of loops | largest |", "|---|---|---|---|---|", sep="\n")
    for method in (*cpu_experts.LOOPS, *cpu_experts.ALL_AT_ONCE):
        row = [method]
        for among in ((*cpu_experts.LOOPS, *cpu_experts.ALL_AT_ONCE), cpu_experts.LOOPS):
            losses = []
            for table in tables:
                seconds = {m: dict(p) for m, p in table["seconds"].items() if m in among}
                for rows in cpu_costs.ROWS:
                    times = {m: s[rows] for m, s in seconds.items() if rows in s}
                    others = [t for m, t in times.items() if m != method]
                    losses.append(min(others, default=math.inf) / min(times.values()))
            slower, most = sum(loss > 1.03 for loss in losses), max(losses)
            # Where a method took 3 times as long as the fastest, it was not timed with more rows.
            largest = f"{most:.2f}" if most < math.inf else "over 3"
            row += [f"{slower} of {len(losses)}", largest] if method in among else ["", ""]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
