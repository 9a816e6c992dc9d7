"""device_check.py's parts about the libraries alone: what they do, and quack tile by tile."""

from __future__ import annotations

import time

import torch
from cutlass_device import (
    ARGS,
    DEVICE,
    SHAPES,
    bad,
    chosen_shapes,
    error_of,
    microseconds,
    part,
    problem_of,
    routing_of,
    say,
    sorted_groups,
)
from moekit_cutlass import library, providers, w4a8
from moekit_cutlass.providers import Quack, QuackPlan, Scales, Tile

import moekit
from moekit.problem.quant import pack_int4


def probe() -> None:
    """Does each do what this plugin takes for granted? Small, every variant by itself."""
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
                        h = moekit.problem.activation.apply_activation(h, problem.activation)
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


def probe_w4a8() -> None:
    """The operator against the weights that the packed tables hold: no error but bf16's is left."""
    for L, H, inner in ((5, 512, 256), (3, 1024, 1280)):
        problem = problem_of((L, 2, H, inner), library.W4A8)
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
            say(f"tables: error {error_of(real, exact):.2e}")
            for rows in (1, 20, 40, 200, 1500):
                for holes in (0.0, 0.5, 1.0):
                    ids = routing_of(problem, rows, holes=holes).topk_ids
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
    error = error_of(out[:used], want[:used]) if used else 0.0
    tail = out[used:].float().isnan().all()
    told = f"{what}: error {error:.1e}, rows behind untouched {bool(tail)} {more}"
    say(f"ok {told}") if error < 1e-2 else bad(f"WRONG {told}")


FIRST_TILES = [
    Tile(m, n, pingpong, cluster)
    for m, n, pingpong in (
        (128, 192, True), (128, 160, True), (128, 128, True), (192, 128, True), (64, 256, True),
        (256, 128, False), (256, 192, False), (128, 256, False),
    )
    for cluster in ((2, 1), (1, 1), (1, 2))
]  # fmt: skip
SECOND_TILES = [*FIRST_TILES, *(Tile(m, 208, m == 128, (2, 1)) for m in (128, 256))]


def sweep() -> None:
    """quack's GEMMs alone, tile by tile, with the gather fused and with rows copied before."""
    stop = time.monotonic() + ARGS.budget
    cells = [(name, T) for T in (16384, 4096) for name in chosen_shapes()]
    for step in ("gather", "copied", "second"):
        dead: set[Tile] = set()
        for name, T in cells:
            problem = problem_of(SHAPES[name], "none")
            E, K, H, inner = SHAPES[name]
            n, k = (H, inner) if step == "second" else (2 * inner, H)
            w = torch.randn(E, n, k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5
            groups = sorted_groups(routing_of(problem, T).topk_ids, E)
            x = torch.randn(T if step == "gather" else T * K, k, device=DEVICE).to(torch.bfloat16)
            out = torch.empty(T * K, n if step == "second" else inner, device=DEVICE, dtype=x.dtype)
            found_times = []
            for tile in SECOND_TILES if step == "second" else FIRST_TILES:
                gather = step == "gather"
                if tile in dead or (gather and tile.cluster[1] > 1):
                    continue
                if time.monotonic() > stop:
                    say("sweep: out of budget")
                    return
                quack = Quack(problem, QuackPlan(gather=gather, first=tile, second=tile))
                call = quack.second if step == "second" else quack.first
                try:
                    call(x, w, groups, out, None)
                    torch.cuda.synchronize()
                    captured = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(captured):
                        call(x, w, groups, out, None)
                    found_times.append((microseconds(captured.replay, 1, 5), tile))
                except Exception as error:
                    dead.add(tile)
                    say(f"sweep {step} {tile}: {type(error).__name__}: {str(error)[:160]}")
            found_times.sort(key=lambda item: item[0])
            for us, tile in found_times[:5]:
                tflops = 2e-6 * T * K * n * k / us
                say(f"sweep {step} {name} T={T} {us:8.0f} us {tflops:5.0f} TFLOP/s {tile}")
