"""Whole layers over the GPUs of this host: the same as `python -m moekit bench --layers`.

python benchmarks/layer_dispatch.py --json layers.json --markdown layers.md
torchrun --nproc-per-node 4 benchmarks/layer_dispatch.py
"""

import sys

from moekit.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--layers", *sys.argv[1:]]))
