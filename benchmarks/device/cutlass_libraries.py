"""Check each operator of the libraries that moekit-cutlass calls, alone, against fp32.

    MOEKIT_VLLM_PATH=<folder of vllm> python benchmarks/device/cutlass_libraries.py [probe w4a8]

An illegal memory access ends the process: run each part in its own.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import DEVICE, part, routings_of, run_parts, say, verdict, with_holes
from moekit_cutlass import providers, w4a8
from moekit_cutlass.kernels import Groups, sort_assignments
from moekit_cutlass.library import W4A8
from moekit_cutlass.providers import Quack, QuackPlan, Scales
from moekit_kernels.align import align_scratch

import moekit
from moekit.plugin import apply_activation
from moekit.problem.quant import pack_int4
from moekit.testing import relative_error


def problem_of(sizes: tuple[int, int, int, int], scheme: str, **changes) -> moekit.MoEProblem:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    given = dict(zip(names, sizes, strict=True), quant=scheme, device="cuda")
    return moekit.MoEProblem(**{**given, **changes})


def sorted_groups(ids_RK: torch.Tensor, experts: int) -> Groups:
    """Return expert-sorted rows, with the index of each row's source."""
    n = ids_RK.numel()

    def ints(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=DEVICE)

    groups = Groups(ids_RK, ints(n).view(ids_RK.shape), ints(experts + 1), ints(n))
    sort_assignments(groups, ints(align_scratch(n, experts)))
    return groups


def probe(args: argparse.Namespace) -> None:
    """Run every library, dtype and fused activation on small sizes."""
    L, H, inner, R, K = 5, 320, 272, 70, 2
    for counts in ("random", "empty", "few"):
        rows = 9 if counts == "few" else R
        ids = torch.randint(-1, L - 1, (rows, K), device=DEVICE)
        if counts == "empty":
            ids.fill_(-1)
        groups = sorted_groups(ids, L)
        S, offsets = rows * K, groups.offsets_L1.tolist()
        x = torch.randn(rows, H, device=DEVICE)
        w = torch.randn(L, 2 * inner, H, device=DEVICE) * H**-0.5
        for dtype in (torch.bfloat16, torch.float16):
            for activation, gather in (
                ("silu", True), ("silu", False), ("gelu", True), ("gelu_tanh", True),
                ("relu2", True), ("silu_no_mul", True), ("gelu_no_mul", True),
                ("gelu_tanh_no_mul", True),
            ):  # fmt: skip
                what = f"probe quack {counts} {dtype} {activation} gather={gather}"
                with part(what):
                    problem = problem_of(
                        (L, K, H, inner), "none", activation=activation, dtype=dtype
                    )
                    quack = Quack(problem, QuackPlan(gather=gather))
                    n = problem.w13_rows
                    source = x.to(dtype) if gather else x.to(dtype)[groups.rows_S.long()]
                    columns = inner if quack.activates else n
                    out = torch.full((S, columns), float("nan"), device=DEVICE, dtype=dtype)
                    start = time.monotonic()
                    w1 = w[:, :n].to(dtype).contiguous()
                    quack.first(source, w1, groups, out, None)
                    torch.cuda.synchronize()
                    seconds = time.monotonic() - start
                    h = by_group(x.to(dtype).float()[groups.rows_S.long()], w1.float(), offsets)
                    if quack.activates:
                        h = apply_activation(h, problem.activation)
                    report(what, out, h, offsets[-1], f"fused {quack.activates}, {seconds:.1f} s")
        for name in ("torch", "vllm"):
            with part(f"probe {name} fp8 {counts}"):
                problem = problem_of((L, K, H, inner), "fp8_channel_token")
                provider = providers._CLASSES[name](problem)
                a = (x[groups.rows_S.long()] * 40).to(torch.float8_e4m3fn)
                q = (w * 400).to(torch.float8_e4m3fn)
                scales = Scales(
                    torch.rand(S, 1, device=DEVICE), torch.rand(L, 2 * inner, device=DEVICE)
                )
                out = torch.full((S, 2 * inner), float("nan"), device=DEVICE, dtype=torch.bfloat16)
                out = provider.first(a, q, groups, out, scales)
                wide = scales.w[:, :, None] * q.float()
                want = by_group(a.float() * scales.a, wide, offsets)
                report(f"probe {name} fp8 {counts}", out, want, offsets[-1])


def probe_w4a8(args: argparse.Namespace) -> None:
    """Compare the operator with the weights that the packed tables hold: only rounding differs."""
    for L, H, inner in ((5, 512, 256), (3, 1024, 1280)):
        problem = problem_of((L, 2, H, inner), W4A8)
        n = problem.w13_rows
        codes = torch.randint(16, (L, n, H), dtype=torch.uint8, device=DEVICE)
        groups_of_scales = torch.rand(L, n, H // 128, device=DEVICE) + 0.1
        weights = moekit.ExpertWeights(
            pack_int4(codes), torch.zeros(L, H, inner // 2, dtype=torch.uint8, device=DEVICE),
            w13_scale=groups_of_scales, w2_scale=torch.ones(L, H, inner // 128, device=DEVICE),
        )  # fmt: skip
        with part(f"w4a8 {L} {H} {inner}"):
            packed = w4a8.pack(weights, problem, "cutlass")
            layout = packed["w13_layout"]
            say(f"layout {tuple(layout.shape)}: {layout[0].tolist()}, all alike "
                f"{bool((layout == layout[0]).all())}")  # fmt: skip
            table = packed["w13_table"].float().transpose(1, 2)  # (L, n, G, 8)
            value = codes.view(L, n, -1, 128).long() - 8
            found_there = table.gather(3, torch.where(value < 0, value + 8, (8 - value) % 8))
            real = torch.where(value < 0, found_there, -found_there) * (value != 0)
            real = real.view(L, n, H) * packed["w13_scale"][:, :, None]
            exact = (value * groups_of_scales[..., None]).view(L, n, H)
            say(f"tables: error {relative_error(real, exact):.2e}")
            for rows in (1, 20, 40, 200, 1500):
                for holes in (0.0, 0.5, 1.0):
                    ids = with_holes(routings_of(problem, rows, 1)[0], holes).topk_ids
                    groups = sorted_groups(ids, L)
                    S, offsets = ids.numel(), groups.offsets_L1.tolist()
                    a = torch.randn(S, H, device=DEVICE).mul(40).to(torch.float8_e4m3fn)
                    scales = Scales(
                        torch.rand(S, 1, device=DEVICE) + 0.1, packed["w13_scale"],
                        packed["w13_table"], layout,
                    )  # fmt: skip
                    out = torch.full((S, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
                    providers.VllmW4A8(problem).first(a, packed["w13"], groups, out, scales)
                    want = by_group(a.float() * scales.a, real, offsets)
                    report(f"w4a8 L {L} H {H} N {n} rows {S} holes {holes}", out, want, offsets[-1])


def by_group(x_SH: torch.Tensor, w_LNH: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    out = torch.zeros(x_SH.shape[0], w_LNH.shape[1], device=DEVICE)
    for expert, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        out[start:end] = x_SH[start:end] @ w_LNH[expert].T
    return out


def report(what: str, out: torch.Tensor, want: torch.Tensor, used: int, more: str = "") -> None:
    error = relative_error(out[:used], want[:used]) if used else 0.0
    untouched = bool(out[used:].float().isnan().all())
    say(f"{verdict(what, error, 1e-2)} {what}: error {error:.1e}, rows behind untouched "
        f"{untouched} {more}")  # fmt: skip


if __name__ == "__main__":
    run_parts(__doc__, {"probe": probe, "w4a8": probe_w4a8})
