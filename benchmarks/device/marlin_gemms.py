"""Marlin experts: whole blocks beside the bare operator, and the operator by block size.

    MOEKIT_VLLM_PATH=<folder of vllm> python benchmarks/device/marlin_gemms.py [whole blocks]

Weights are random bits, as time does not depend on them. Microseconds of one call in a CUDA graph
over three routings, in turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from common import DEVICE, Call, in_turns, normal, part, problem_of, routings_of, run_parts, say
from marlin_library import listed
from moekit_bench import random_weights
from moekit_marlin import library, sizes

import moekit
from moekit.plugin import Dispatched, Workspace

SCHEMES = ("int4_w4a16_g128", "fp8_w8a16_channel", "int8_w8a16", "fp8_w8a16_block")
BLOCKS = (8, 16, 32, 48, 64)


class Layer:
    """Experts of one shape and scheme, with packed weights."""

    def __init__(self, name: str, scheme: str) -> None:
        self.problem = problem_of(name, scheme)
        spec = moekit.registry().expert("marlin")
        self.experts: Any = spec.load()(spec, self.problem)
        weights = random_weights(self.problem, DEVICE)
        self.packed = self.experts.pack(weights.canonical(self.problem))
        self.workspace = Workspace()

    def whole(self, tokens: int) -> list[Call]:
        x = normal(tokens, self.problem.hidden_size)
        y, scratch = (
            torch.empty_like(x),
            self.workspace.take(self.experts.workspace(tokens), DEVICE),
        )
        return [
            partial(
                self.experts.apply, y, Dispatched(x, None, r.topk_ids, r.topk_weights),
                self.packed, scratch,
            )
            for r in routings_of(self.problem, tokens)
        ]  # fmt: skip

    def bare(
        self, tokens: int, block: int, tile: tuple[int, int, int] = (-1, -1, -1)
    ) -> list[Call]:
        """Return both GEMMs alone; the lists of blocks are made beforehand."""
        p, inner = self.problem, self.experts._inner
        assignments = tokens * p.top_k
        x, a = normal(tokens, p.hidden_size), normal(assignments, inner)
        h = torch.empty(assignments, self.experts._w13_rows, dtype=p.dtype, device=DEVICE)
        z = torch.empty(assignments, p.hidden_size, dtype=p.dtype, device=DEVICE)
        locks = torch.zeros(sizes.LOCKS, dtype=torch.int32, device=DEVICE)
        unused, operator = torch.ones(1, device=DEVICE), library.operator()

        def run(lists: tuple[torch.Tensor, ...]) -> None:
            for source, out, name, top_k in ((x, h, "w13", p.top_k), (a, z, "w2", 1)):
                scale = self.packed[f"{name}_scale"].view(self.experts._scale_dtype)
                operator(
                    source, out, self.packed[name], None, scale, None, None,
                    self.packed.get(f"{name}_zeros"), locks, *lists, unused, block, top_k, False,
                    self.experts._type_id, source.shape[0], out.shape[1], source.shape[1],
                    False, True, False, *tile,
                )  # fmt: skip

        return [
            partial(run, listed(r.topk_ids, p.num_experts, block)) for r in routings_of(p, tokens)
        ]


def whole(args: argparse.Namespace) -> None:
    for scheme in SCHEMES:
        for name in args.shapes:
            layer = Layer(name, scheme)
            for tokens in args.tokens:
                block = layer.experts._block(tokens, layer.problem.top_k)
                calls = {"whole": layer.whole(tokens), "bare": layer.bare(tokens, block)}
                times = in_turns(calls)
                block_us, bare_us = times["whole"].us, times["bare"].us
                say(f"  {scheme} {name} T={tokens}: whole {block_us:.1f} us, bare GEMMs "
                    f"{bare_us:.1f} us ({block_us / bare_us:.2f})")  # fmt: skip
            del layer
            torch.cuda.empty_cache()


def blocks(args: argparse.Namespace) -> None:
    """Print the time of every block size, and whether a tile beats the operator's own choice."""
    for name in args.shapes:
        for scheme in SCHEMES[:2]:
            layer = Layer(name, scheme)
            for tokens in args.tokens:
                found = in_turns({str(b): layer.bare(tokens, b) for b in BLOCKS})
                used = layer.experts._block(tokens, layer.problem.top_k)
                best = min(timing.us for timing in found.values())
                shown = "  ".join(f"{b}: {t.us:.1f}" for b, t in found.items())
                say(f"  {name} {scheme} T={tokens} | {shown} | in use {used}, slower than the best "
                    f"by {found[str(used)].us / best - 1:.1%}")  # fmt: skip
                if tokens in (64, 1024):
                    tiles(layer, tokens, used)
            del layer
            torch.cuda.empty_cache()


def tiles(layer: Layer, tokens: int, block: int) -> None:
    """Time tiles, one thread block per SM: with more, the operator's locks never open."""
    for tile in ((128, 128, 1), (64, 256, 1), (64, 128, 1), (128, 64, 1), (-1, -1, -1)):
        with part(f"tile {tile}"):  # not every tile has a kernel
            (timing,) = in_turns({"": layer.bare(tokens, block, tile)}).values()
            say(f"    tile (K, N, blocks per SM) {tile}: {timing.us:.1f} us")


if __name__ == "__main__":
    run_parts(__doc__, {"whole": whole, "blocks": blocks}, tokens=(1, 16, 64, 256, 1024, 4096))
