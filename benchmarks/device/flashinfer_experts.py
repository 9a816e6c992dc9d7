"""`flashinfer_cutlass` beside the library's own call, in turns, tuned and untuned.

    python benchmarks/device/flashinfer_experts.py [bf16 fp8 fp8_block] [--shapes mixtral]

Prints Markdown: microseconds of a whole block in a CUDA graph over three routings.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from common import Call, in_turns, normal, problem_of, routings_of, run_parts, say, us_of
from moekit_bench import random_weights
from moekit_flashinfer import library

import moekit
from moekit.plugin import Dispatched, Workspace


def calls(kernel: Any, packed: Any, tokens: int) -> dict[str, list[Call]]:
    """Return the library's calls and the adapter's, one for each routing."""
    p, experts = kernel.problem, kernel.experts
    x, scale = normal(tokens, p.hidden_size), None
    if p.quant.name == "fp8_tensor_static":
        x, scale = experts.quantize(x, packed, None)
    y = torch.empty(tokens, p.hidden_size, dtype=p.dtype, device="cuda")
    scratch = kernel.workspace.take(experts.workspace(tokens), x.device)
    routed = [
        Dispatched(x, scale, r.topk_ids.int(), r.topk_weights) for r in routings_of(p, tokens)
    ]

    def bare(t: Dispatched) -> None:
        experts._core.cutlass_fused_moe(
            x, t.topk_ids, t.topk_weights, packed["w13"], packed["w2"], p.dtype,
            quant_scales=experts._scales(packed), output=y,
            use_deepseek_fp8_block_scale=p.quant.name == "fp8_block",
        )  # fmt: skip

    return {
        "library": [partial(bare, t) for t in routed],
        "adapter": [partial(experts.apply, y, t, packed, scratch) for t in routed],
    }


def compare(scheme: str, args: argparse.Namespace) -> None:
    for name in args.shapes:
        problem = problem_of(name, scheme)
        kernel = moekit.compose(
            problem, "local", "flashinfer_cutlass", workspace=Workspace(), checked=False
        )
        packed = kernel.pack(random_weights(problem, torch.device("cuda")))
        say(f"\n### {name}, {scheme}; FlashInfer {library.FLASHINFER.version() or '(unpacked)'}\n")
        untuned = {T: us_of(calls(kernel, packed, T)["library"]) for T in args.tokens}
        if scheme != "fp8_block":  # the library does not choose that kernel by time
            start = time.monotonic()
            with kernel.experts.tuning():  # type: ignore[attr-defined]
                calls(kernel, packed, max(args.tokens))["adapter"][0]()
            say(f"tuned in {time.monotonic() - start:.0f} s\n")
        say("| T | untuned | library | adapter | ratio | host library | host adapter |")
        say("|---|---|---|---|---|---|---|")
        for tokens in args.tokens:
            bare, adapter = in_turns(calls(kernel, packed, tokens)).values()
            say(
                f"| {tokens} | {untuned[tokens]:.0f} | {bare.us:.0f} | {adapter.us:.0f} | "
                f"{adapter.us / bare.us:.3f} | {bare.host_us:.0f} | {adapter.host_us:.0f} |"
            )


PARTS = {
    "bf16": partial(compare, "none"),
    "fp8": partial(compare, "fp8_tensor_static"),
    "fp8_block": partial(compare, "fp8_block"),
}

if __name__ == "__main__":
    run_parts(__doc__, PARTS, tokens=(1, 16, 64, 256, 1024, 4096))
