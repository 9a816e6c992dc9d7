"""DeepGEMM's GEMMs alone: what the plugin takes for granted, and which settings are fastest.

    python benchmarks/device/deepgemm_gemms.py [probe blocks expected batched] [--shapes mixtral]

probe: both layouts against fp32, and that unused blocks stay untouched. blocks: whole blocks and
bare GEMMs by rows of a block. expected: bare GEMMs by the number of rows per expert that the
library is told, from which it chooses its tiles. batched: whole blocks beside the bare GEMMs.
The library compiles kernels at first use (some 10 s each) and keeps them in DG_JIT_CACHE_DIR.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import (
    DEVICE,
    Call,
    in_turns,
    normal,
    part,
    problem_of,
    routings_of,
    run_parts,
    say,
    tflops,
    verdict,
)
from moekit_bench import random_weights
from moekit_deepgemm.gemms import Gemms
from moekit_deepgemm.plan import expected_slab_rows
from moekit_kernels.align import SortedAssignments, align
from torch import Tensor

import moekit
from moekit.plugin import Dispatched, PackedWeights, Workspace, dequantize, quant, quantize
from moekit.testing import relative_error


def experts_of(problem: moekit.MoEProblem, name: str, block_m: int | None = None) -> Any:
    spec = moekit.registry().expert(name)
    experts = spec.load()(spec, problem)
    experts.block_m = block_m
    return experts


# -- the library alone ----------------------------------------------------------------------------


def probe(args: argparse.Namespace) -> None:
    for scheme in ("fp8", "bf16"):
        for block_m in (128, 64, 32, 16, 0):
            with part(f"probe {scheme} block_m={block_m}"):
                probe_one(scheme, block_m)


def probe_one(scheme: str, block_m: int) -> None:
    """Check one layout: ends of groups, or the masked one for ``block_m`` 0."""
    L, N, K, counts = 4, 384, 512, [70, 0, 1, 130]
    w = normal(L, N, K, std=K**-0.5)
    w_scale, w_fp32 = None, w.float()
    if scheme == "fp8":
        operand = quant.scheme("fp8_block").weight
        assert operand is not None
        w, w_scale = quantize(w, operand)
        w_fp32 = dequantize(w, w_scale, operand)
    starts, ends, row = [], [], 0
    for expert, count in enumerate(counts):
        row = row if block_m else expert * 256
        starts.append(row)
        ends.append(row + count)
        row += -(-count // block_m) * block_m if block_m else 256
    rows = row + 4 * block_m  # the last ones are unused
    a, scale, a_fp32 = operand_of(scheme, (rows, K) if block_m else (L, 256, K))
    out = torch.full((rows, N), 7.0, device=DEVICE, dtype=torch.bfloat16)
    numbers = torch.tensor(ends if block_m else counts, dtype=torch.int32, device=DEVICE)
    named = {"w": w} if w_scale is None else {"w": w, "w_scale": w_scale}
    packed = PackedWeights("deepgemm", named)
    if block_m:
        Gemms().contiguous(a, scale, packed, "w", out, numbers, block_m, block_m)
    else:
        Gemms().masked(a, scale, packed, "w", out.view(L, 256, N), numbers, 64)
    a_fp32 = a_fp32.view(rows, K)
    worst = max(
        relative_error(out[s:e], a_fp32[s:e] @ w_fp32[expert].T)
        for expert, (s, e) in enumerate(zip(starts, ends, strict=True))
        if e > s
    )
    what = f"probe {scheme} {f'ends of groups, block_m {block_m}' if block_m else 'masked'}"
    say(f"{verdict(what, worst, 1e-2)} {what}: error {worst:.1e}, unused blocks untouched: "
        f"{bool((out[row:] == 7).all())}")  # fmt: skip


def operand_of(scheme: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return random a, its scale as the GEMM reads it (None for bf16), and a in fp32."""
    a = normal(*shape)
    if scheme == "bf16":
        return a, None, a.float()
    operand = quant.scheme("fp8_block").activation
    assert operand is not None
    q, scale = quantize(a, operand)
    return q, scale.transpose(-1, -2).contiguous(), dequantize(q, scale, operand)


# -- settings -------------------------------------------------------------------------------------


def standard_calls(
    experts: Any, packed: Any, tokens: int, workspace: Workspace
) -> tuple[list[Call], list[Call]]:
    """Return the calls of whole blocks and of the bare GEMMs, one for each routing."""
    p = experts.problem
    x = normal(tokens, p.hidden_size)
    out, scratch = torch.empty_like(x), workspace.take(experts.workspace(tokens), x.device)
    blocks: list[Call] = []
    bare: list[Call] = []
    for routing in routings_of(p, tokens):
        ids = routing.topk_ids
        arrived = Dispatched(x, None, ids, routing.topk_weights)
        blocks.append(partial(experts.apply, out, arrived, packed, scratch))
        blocks[-1]()  # writes what the bare GEMMs read
        plan = experts._plan(ids.numel())
        ends_L = torch.zeros(p.num_local_experts, dtype=torch.int32, device=DEVICE)
        rows = torch.empty(ids.numel(), dtype=torch.int32, device=DEVICE)
        layout = SortedAssignments(None, None, None, plan.block_m, rows, ends_L)
        align(ids, p.num_local_experts, layout, scratch[2])
        steps = (("w13", *experts._views("w13", (plan.rows,), scratch[3:])),
                 ("w2", *experts._views("w2", (plan.rows,), scratch[3:])))  # fmt: skip
        bare.append(partial(gemms, experts, packed, steps, ends_L, plan))
    return blocks, bare


def gemms(experts: Any, packed: Any, steps: Sequence[Any], counts: Tensor, how: Any) -> None:
    for name, a, scale, out in steps:
        experts._gemm(a, scale, packed, name, out, counts, how)


def blocks(args: argparse.Namespace) -> None:
    for scheme in ("fp8_block", "none"):
        for name in args.shapes:
            p, workspace = problem_of(name, scheme), Workspace()
            default = experts_of(p, "deepgemm")
            packed = default.pack(random_weights(p, DEVICE).canonical(p))
            for tokens in args.tokens:
                chosen = default._plan(tokens * p.top_k).block_m
                few = scheme == "fp8_block" and tokens * p.top_k / p.num_experts <= 64
                found: dict[str, list[Call]] = {}
                for block_m in (16, 32, 64, 128) if few else (64, 128):
                    experts = experts_of(p, "deepgemm", block_m)
                    whole, bare = standard_calls(experts, packed, tokens, workspace)
                    label = f"block_m {block_m}{' (in use)' if block_m == chosen else ''}"
                    found |= {label: whole, f"{label}, bare GEMMs": bare}
                for label, timing in in_turns(found).items():
                    say(f"{name:9} {scheme:9} T={tokens:5} {timing.us:8.1f} us "
                        f"{tflops(p, tokens, timing.us):6.0f} TFLOP/s {label}")  # fmt: skip
            del packed, workspace
            torch.cuda.empty_cache()


def expected(args: argparse.Namespace) -> None:
    for name in args.shapes:
        p, workspace = problem_of(name, "fp8_block"), Workspace()
        default = experts_of(p, "deepgemm")
        packed = default.pack(random_weights(p, DEVICE).canonical(p))
        for tokens in args.tokens:
            used = default._plan(tokens * p.top_k)
            if used.expected_m is None:
                say(f"expected {name} T={tokens}: the plan follows the number of assignments")
                continue
            found = {}
            for quarters in (1, 2, 3, 4, 8):
                plan = replace(used, expected_m=max(1, used.expected_m * quarters // 4))
                experts = experts_of(p, "deepgemm")
                experts._plan = lambda assignments, plan=plan: plan
                label = f"expected_m {plan.expected_m}{' (in use)' if quarters == 4 else ''}"
                found[label] = standard_calls(experts, packed, tokens, workspace)[1]
            for label, timing in in_turns(found, 15).items():
                say(f"expected {name:9} T={tokens:5} bare GEMMs {timing.us:8.1f} us {label}")
        del packed, workspace
        torch.cuda.empty_cache()


def batched(args: argparse.Namespace) -> None:
    for name in args.shapes:
        p = problem_of(name, "fp8_block")
        experts = experts_of(p, "deepgemm_batched")
        packed = experts.pack(random_weights(p, DEVICE).canonical(p))
        assert p.quant.activation is not None
        for tokens in (16, 128, 512):
            capacity = -(-tokens // 128) * 128
            x = normal(p.num_local_experts, capacity, p.hidden_size)
            arrived = {"bf16": (x, None), "fp8": quantize(x, p.quant.activation)}
            y, scratch = torch.empty_like(x), Workspace().take(experts.workspace(capacity), DEVICE)
            expected_m = expected_slab_rows(capacity, p.top_k, p.num_physical_experts)
            steps = (
                ("w13", *experts._input(capacity, p.hidden_size, scratch),
                 experts._output(capacity, p.w13_rows, scratch)),
                ("w2", *experts._input(capacity, p.local_intermediate_size, scratch), y),
            )  # fmt: skip
            found: dict[str, list[Call]] = {}
            for routing in routings_of(p, tokens):
                ids = routing.topk_ids.flatten()
                counts_L = torch.bincount(ids, minlength=p.num_local_experts).int()
                for kind, given in arrived.items():
                    made = Dispatched(*given, expert_num_tokens=counts_L)
                    call = partial(experts.apply, y, made, packed, scratch)
                    found.setdefault(f"{kind} rows", []).append(call)
                bare = partial(gemms, experts, packed, steps, counts_L, expected_m)
                found.setdefault("bare GEMMs", []).append(bare)
            times = ", ".join(f"{kind} {t.us:.1f} us" for kind, t in in_turns(found).items())
            say(f"batched {name:9} T={tokens} C={capacity}: {times}")
        del packed
        torch.cuda.empty_cache()


PARTS = {"probe": probe, "blocks": blocks, "expected": expected, "batched": batched}

if __name__ == "__main__":
    run_parts(__doc__, PARTS)
