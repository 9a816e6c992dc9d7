"""Write this CPU's entries of the shipped cost table of the `torch` experts.

    python benchmarks/cpu_costs_table.py AVX512_BF16
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/cpu_costs_table.py AVX2

The argument is the capability that the numbers stand for. Entries of that capability are replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import moekit
from moekit.backends import cpu_costs, cpu_experts

TABLE = Path(cpu_costs.__file__).with_suffix(".json")
SIZES = ((16, 256, 512), (64, 2048, 768))  # experts, hidden, intermediate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("AVX2", "AVX512", "AVX512_BF16", "AMX"))
    args = parser.parse_args()
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else []
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


if __name__ == "__main__":
    main()
