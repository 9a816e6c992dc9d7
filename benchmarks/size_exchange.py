"""Median time in which the ranks of a host exchange three numbers: by gloo, and by naive's board.

python benchmarks/size_exchange.py [--ranks 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from moekit_naive.board import board_of

from moekit.testing.distributed import RankPool

TURNS = 2000


def medians(rank: int, ranks: int) -> dict[str, float]:
    """Return microseconds by name."""
    board = board_of(dist.group.WORLD, 30.0)
    assert board is not None, "the ranks do not share memory"
    mine, everyone = torch.zeros(3, dtype=torch.int64), torch.zeros(3 * ranks, dtype=torch.int64)
    parts = list(everyone.chunk(ranks))
    return {
        "gloo": median(lambda: dist.all_gather(parts, mine)),
        "board": median(lambda: board.exchange([rank, 0, 0])),
    }


def median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    with RankPool(ranks) as pool:
        for name, us in pool.run(medians)[0].items():
            print(f"{name}: {us:.1f} us")


if __name__ == "__main__":
    main()
