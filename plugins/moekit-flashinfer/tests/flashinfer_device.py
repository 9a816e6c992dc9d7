"""Measures this plugin on GPUs, beside the bare library in the same run; prints markdown.

    python flashinfer_device.py experts [--shapes mixtral] [--schemes none] [--tokens 1 1024]
    python flashinfer_device.py exchange --ranks 4 [--tokens 16 4096] [--wires none fp8_block]

Needs the library (see the package's docstring) and the GPUs; the packages may be installed or not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(ROOT),
    *(str(ROOT / "plugins" / f"moekit-{name}" / "src") for name in ("flashinfer", "triton")),
]

import flashinfer_exchange  # noqa: E402
import torch  # noqa: E402
from moekit_bench import Timing, measure  # noqa: E402
from moekit_flashinfer import library, moekit_dispatchers, moekit_experts  # noqa: E402

import moekit  # noqa: E402
from moekit.backends.reference import oracle  # noqa: E402
from moekit.contract import Dispatched  # noqa: E402
from moekit.discovery.registry import Registry, registry  # noqa: E402
from moekit.runtime.workspace import Workspace  # noqa: E402
from moekit.testing import relative_error  # noqa: E402
from moekit.testing.distributed import RankPool  # noqa: E402

SHAPES = {  # E, K, H, I
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
}
SCHEMES = ("none", "fp8_tensor_static", "fp8_block")
BF16_FLOPS, FP8_FLOPS, BANDWIDTH = 791e12, 1424e12, 4.49e12  # measured ceilings of an H200
ROUTINGS = 3


def say(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def part(title: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    except Exception:
        say(f"FAILED {title}")
        traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()
    say(f"<!-- {title}: {time.monotonic() - start:.0f} s -->")


def backends() -> Registry:
    found = registry()
    for spec in (*moekit_dispatchers(), *moekit_experts()):
        if spec.name not in {**found.dispatchers, **found.experts}:
            found.register(spec)
    return found


def timed(calls: list[Callable[[], object]]) -> Timing:
    """Of one call, in a graph over all of them and on the host; by moekit_bench, whose inputs are
    not looked at."""
    turn, unused = itertools.cycle(calls), torch.empty(1, device="cuda")

    def call(x: torch.Tensor, routing: moekit.Routing) -> torch.Tensor:
        next(turn)()
        return x

    pairs = [(unused, moekit.Routing(unused, unused))] * len(calls)
    timing = measure(call, pairs, unused.device)
    assert timing.graph_us is not None, timing.note
    return timing


def limit_us(p: moekit.MoEProblem, tokens: int) -> float:
    per_expert = p.hidden_size * (p.w13_rows + p.intermediate_size)
    active = p.num_experts * (1 - (1 - p.top_k / p.num_experts) ** tokens)
    width = 2 if p.quant.weight is None else 1
    flops = 2 * tokens * p.top_k * per_expert / (BF16_FLOPS if width == 2 else FP8_FLOPS)
    return max(flops, active * per_expert * width / BANDWIDTH) * 1e6


def make_weights(p: moekit.MoEProblem) -> moekit.ExpertWeights:
    parts = []
    for rows, columns in ((p.w13_rows, p.hidden_size), (p.hidden_size, p.intermediate_size)):
        parts.append(torch.empty(p.num_experts, rows, columns, dtype=p.dtype, device="cuda"))
        parts[-1].normal_(std=columns**-0.5)
    weights = moekit.ExpertWeights(*parts).quantize(p.quant)
    if p.quant.activation is not None and p.quant.activation.static:
        scale = torch.tensor(5.0 / 448, device="cuda")
        weights = moekit.ExpertWeights(
            **{**weights.tensors(), "w13_input_scale": scale, "w2_input_scale": scale}
        )
    return weights


def experts(shape: str, scheme: str, tokens: list[int], tune: bool) -> None:
    E, K, H, inner = SHAPES[shape]
    p = moekit.MoEProblem(
        num_experts=E, top_k=K, hidden_size=H, intermediate_size=inner, quant=scheme, device="cuda"
    )
    kernel = moekit.compose(
        p, "local", "flashinfer_cutlass", backends=backends(), workspace=Workspace(), checked=False
    )
    weights = make_weights(p)
    packed = kernel.pack(weights)
    made = kernel.experts

    def data(T: int) -> tuple[torch.Tensor, list[Dispatched], torch.Tensor]:
        x = torch.randn(T, H, dtype=p.dtype, device="cuda")
        scale = None
        if scheme == "fp8_tensor_static":
            x, scale = made.quantize(x, packed, None)
        routed = []
        for _ in range(ROUTINGS):
            ids = torch.rand(T, E, device="cuda").argsort(dim=1)[:, :K].int().contiguous()
            routed.append(Dispatched(x, scale, ids, torch.rand(T, K, device="cuda")))
        return x, routed, torch.empty(T, H, dtype=p.dtype, device="cuda")

    def calls(T: int) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        x, routed, y = data(T)
        scratch = kernel.workspace.take(made.workspace(T), x.device)
        adapted = [lambda t=t: made.apply(y, t, packed, scratch) for t in routed]
        bare = [
            lambda t=t: made._core.cutlass_fused_moe(
                x, t.topk_ids, t.topk_weights, packed["w13"], packed["w2"], p.dtype,
                quant_scales=made._scales(packed), output=y,
                use_deepseek_fp8_block_scale=scheme == "fp8_block",
            )
            for t in routed
        ]  # fmt: skip
        return bare, adapted

    say(f"\n### {shape}, {scheme}: E {E}, K {K}, H {H}, I {inner}; microseconds\n")
    untuned = {T: timed(calls(T)[0]).us for T in tokens}
    if tune and scheme != "fp8_block":
        tuner = made._core.AutoTuner.get()
        tuner.warmup, tuner.repeat = 1, 3
        start = time.monotonic()
        with made.tuning():
            calls(max(tokens))[1][0]()
        say(f"tuned in {time.monotonic() - start:.0f} s\n")
    say("| T | limit | untuned | library | adapter | ratio | fraction | host library · adapter |")
    say("|---|---|---|---|---|---|---|---|")
    for T in tokens:
        bare, adapted = calls(T)
        # alternating: clocks drift
        runs = [(timed(bare), timed(adapted)) for _ in range(2)]
        library_us, adapter_us = (min(t.us for t in column) for column in zip(*runs, strict=True))
        host = " · ".join(f"{timing.host_us:.0f}" for timing in runs[-1])
        limit = limit_us(p, T)
        say(
            f"| {T} | {limit:.0f} | {untuned[T]:.0f} | {library_us:.0f} | {adapter_us:.0f} | "
            f"{adapter_us / library_us:.3f} | {limit / adapter_us:.2f} | {host} |"
        )
    T = 64
    x = torch.randn(T, H, dtype=p.dtype, device="cuda")
    ids = torch.rand(T, E, device="cuda").argsort(dim=1)[:, :K].contiguous()
    routing = moekit.Routing(torch.rand(T, K, device="cuda"), ids)
    out = kernel(x, packed, routing)
    error = relative_error(out, oracle(x, weights, routing, p))
    say(f"\nrelative RMS error against the fp32 oracle, T = {T}: {error:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["experts", "exchange"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--no-tuning", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wires", nargs="*", default=["none", "fp8_block"])
    args = parser.parse_args()
    name = torch.cuda.get_device_name()
    version = library.FLASHINFER.version() or "(unpacked)"
    say(f"{name}, torch {torch.__version__}, flashinfer {version}")
    if args.what == "experts":
        for shape in args.shapes:
            for scheme in args.schemes:
                # fp8_block compiles kernels for each size, seconds each
                few = [64, 4096] if scheme == "fp8_block" else [1, 16, 64, 256, 1024, 4096]
                tokens = args.tokens or few
                with part(f"{shape} {scheme}"):
                    experts(shape, scheme, tokens, not args.no_tuning)
                torch.cuda.empty_cache()
        return
    with RankPool(args.ranks, "cuda", timeout=540) as pool:
        for wire in args.wires:
            with part(f"exchange {wire}"):
                for line in flashinfer_exchange.table(
                    pool, wire, args.tokens or [16, 128, 1024, 4096]
                ):
                    say(line)


if __name__ == "__main__":
    main()
