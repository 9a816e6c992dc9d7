"""Whole layers over the GPUs of this host: every dispatcher with every experts backend.

    python benchmarks/layer_dispatch.py --json layers.json --markdown layers.md
    python benchmarks/layer_dispatch.py --overlap --dispatchers deepep_ht,naive --experts triton
    torchrun --nproc-per-node 4 benchmarks/layer_dispatch.py
    python benchmarks/layer_dispatch.py --from layers.json          # render a recorded run again

Numbers first, against the fp32 oracle of one rank; then µs of prepare, experts and finalize, for
T = 1 .. 4096 tokens on each rank. Starts a rank per GPU, or uses torchrun's. Exit code 0: all that
was measured is right; 1: not so; 2: a wrong question. docs/bench.md has the JSON.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from moekit_bench.bench.dispatch_layers_cli import LayerSweep, add_options, markdown, on_ranks
from moekit_bench.bench.environment import answered, recorded


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add_options(parser)
    parser.add_argument(
        "--from", dest="recorded", type=Path, metavar="FILE", help="measure nothing"
    )
    args = parser.parse_args(argv)

    def answer() -> int:
        if args.recorded is not None:
            print(recorded(args.recorded, markdown), end="")
            return 0
        command = shlex.join(["python", *(sys.argv if argv is None else [__file__, *argv])])
        return on_ranks(LayerSweep(args, command), args.ranks)

    return answered(answer)


if __name__ == "__main__":
    sys.exit(main())
