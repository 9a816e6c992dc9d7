"""Runs both backends on a Hopper GPU with the true library: right numbers first, then times.

    MOEKIT_DEEPGEMM_PATH=<.../deep_gemm> python plugins/moekit-deepgemm/tests/device_check.py

Needs torch, triton, pluggy and nvcc; not that the packages are installed. Options: --only with some
of `probe numbers graph time batched bf16 profile expected` (default: all but the last), --shapes,
--tokens, --workers (processes that compile the library's kernels beforehand; 0: none). A failing
part prints its traceback, and the rest goes on. Kernels are kept in DG_JIT_CACHE_DIR (default:
/tmp/moekit_deepgemm_jit).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from device_common import (
    SHAPES,
    TOKENS,
    backends,
    error_of,
    experts_of,
    make_routing,
    make_weights,
    part,
    problem_of,
    say,
)
from device_times import profile, time_batched, time_expected, time_standard
from moekit_deepgemm import library, moekit_experts

import moekit
from moekit.backends.reference import oracle
from moekit.contract import Dispatched
from moekit.problem import quant
from moekit.runtime.workspace import Workspace

PARTS = ("probe", "numbers", "graph", "time", "batched", "bf16", "profile", "expected")

# -- the library alone


PROBES = [(scheme, block_m) for scheme in ("fp8", "bf16") for block_m in (128, 64, 32, 16, 0)]


def probe() -> None:
    """Does the library do what this plugin takes for granted? Small, every variant by itself."""
    for scheme, block_m in PROBES:
        with part(f"probe {scheme} block_m={block_m}"):
            probe_one(scheme, block_m)


def probe_one(scheme: str, block_m: int) -> None:
    """Both layouts of the library: ends of groups, or (block_m 0) masked."""
    gemms = experts_of(problem_of((4, 2, 512, 256)), "deepgemm")._gemms
    L, N, K = 4, 384, 512
    counts = [70, 0, 1, 130]
    w = torch.randn(L, N, K, device="cuda", dtype=torch.bfloat16) * K**-0.5
    w_scale, w_fp32 = None, w.float()
    if scheme == "fp8":
        operand = quant.scheme("fp8_block").weight
        w, w_scale = quant.quantize(w, operand)
        w_fp32 = quant.dequantize(w, w_scale, operand)
    starts, ends, row = [], [], 0
    for expert, count in enumerate(counts):
        row = row if block_m else expert * 256
        starts.append(row)
        ends.append(row + count)
        row += -(-count // block_m) * block_m if block_m else 256
    rows = row + 4 * block_m  # unused ones behind
    a, scale, a_fp32 = operand_of(scheme, (rows, K) if block_m else (L, 256, K))
    out = torch.full((rows, N), 7.0, device="cuda", dtype=torch.bfloat16)
    begin = time.monotonic()
    if block_m:
        ends_L = torch.tensor(ends, dtype=torch.int32, device="cuda")
        gemms.contiguous(a, scale, w, w_scale, out, ends_L, block_m, block_m)
    else:
        counts_L = torch.tensor(counts, dtype=torch.int32, device="cuda")
        gemms.masked(a, scale, w, w_scale, out.view(L, 256, N), counts_L, 64)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    a_fp32 = a_fp32.view(rows, K)
    errors = [
        error_of(out[s:e], a_fp32[s:e] @ w_fp32[expert].T)
        for expert, (s, e) in enumerate(zip(starts, ends, strict=True))
        if e > s
    ]
    layout = f"ends of groups, block_m {block_m}" if block_m else "masked"
    say(f"probe {scheme} {layout}: errors by group {[f'{e:.1e}' for e in errors]}, first call "
        f"{seconds:.1f} s, unused blocks untouched: {bool((out[row:] == 7).all())}")  # fmt: skip


def operand_of(scheme: str, shape: tuple[int, ...]):
    """Random (a, its scale as the GEMM reads it, a in fp32); the scale is None for bf16."""
    a = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    if scheme == "bf16":
        return a, None, a.float()
    operand = quant.scheme("fp8_block").activation
    q, scale = quant.quantize(a, operand)
    wanted = scale.transpose(-1, -2).contiguous()
    return q, wanted, quant.dequantize(q, scale, operand)


# -- numbers


class NaNWorkspace(Workspace):
    """Scratch full of NaN: what is read before it is written shows."""

    def take(self, specs, device):
        views = super().take(specs, device)
        for buffer in views:
            buffer.view(-1).view(torch.uint8).fill_(255)
        return views


NUMBERS = {
    "fp8": dict(sizes=(8, 2, 512, 256)),
    "fp8 bias clamp": dict(sizes=(8, 2, 512, 256), has_bias=True,
                           activation=moekit.Activation("silu", limit=1.5)),
    "fp8 relu2": dict(sizes=(8, 2, 512, 512), activation="relu2"),
    "fp8 one rank of two": dict(sizes=(16, 4, 512, 256),
                                parallel=moekit.ParallelConfig(ep_size=2, ep_rank=1, dp_size=1)),
    "fp8 many experts": dict(sizes=(128, 8, 256, 128)),
    "bf16": dict(sizes=(8, 2, 512, 256), quant="none"),
    "bf16 bias swigluoai": dict(sizes=(8, 2, 320, 192), quant="none", has_bias=True,
                                activation="swigluoai"),
}  # fmt: skip


def numbers() -> None:
    for name, given in NUMBERS.items():
        p = problem_of(**given)
        limit = 9e-2 if p.quant.activation else 8e-3
        weights = make_weights(p)
        for dispatcher, experts in (
            ("local", "deepgemm"),
            ("batched_reference", "deepgemm_batched"),
            ("local", "deepgemm_batched"),
        ):
            with part(f"numbers {name}: {dispatcher} + {experts}"):
                kernel = moekit.compose(
                    p, dispatcher, experts, workspace=NaNWorkspace(), backends=backends()
                )
                packed = kernel.pack(weights)
                for tokens in (1, 3, 17, 128, 1000) + ((8192,) if experts == "deepgemm" else ()):
                    routing = make_routing(p, tokens, absent=0.2 if tokens > 1 else 0.0)
                    x = torch.randn(tokens, p.hidden_size, device="cuda").to(p.dtype)
                    x[(routing.topk_ids < 0).all(dim=1)] = float("nan")
                    before = torch.cuda.memory_allocated()
                    out = kernel(x, packed, routing)
                    same = torch.equal(out, kernel(x, packed, routing))
                    error = error_of(out, oracle(x, weights, routing, p))
                    verdict = "ok  " if error < limit and same else "WRONG"
                    kept = torch.cuda.memory_allocated() - before >> 20
                    say(f"{verdict} {name:20} {dispatcher:17} {experts:16} T={tokens:5} "
                        f"error {error:.2e}, repeatable {same}, kept {kept} MiB")  # fmt: skip


def graph() -> None:
    """A captured call, replayed with other tokens and routings, one of them all to one expert."""
    p, T = problem_of((8, 2, 512, 256)), 300
    weights = make_weights(p)
    kernel = moekit.compose(p, "local", "deepgemm", workspace=Workspace(), backends=backends())
    packed = kernel.pack(weights)
    x = torch.randn(T, p.hidden_size, device="cuda").bfloat16()
    routing = make_routing(p, T)
    out = torch.empty_like(x)

    def before_dispatch() -> None:
        kernel(x, packed, routing, out=out)

    def by_the_experts() -> None:
        tokens = Dispatched(x, None, routing.topk_ids, routing.topk_weights)
        scratch = kernel.workspace.take(kernel.experts.workspace(T), x.device)
        kernel.experts.apply(out, tokens, packed, scratch)

    for run in (before_dispatch, by_the_experts):
        run()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        for kind in ("random", "one expert"):
            new = make_routing(p, T, absent=0.1)
            if kind == "one expert":
                new.topk_ids[:, 0], new.topk_ids[:, 1] = 3, -1
            x.normal_()
            routing.topk_ids.copy_(new.topk_ids)
            routing.topk_weights.copy_(new.topk_weights.nan_to_num(1.0))
            out.fill_(float("nan"))
            captured.replay()
            error = error_of(out, oracle(x, weights, routing, p))
            say(f"graph, quantized {run.__name__}, {kind}: error {error:.2e}")


# -- compiling beforehand, in parallel


def jobs(shapes: list[str], parts: list[str], most: int) -> list[tuple[str, str, int]]:
    found = [(f"probe:{s}:{b}", "deepgemm", 0) for s, b in PROBES] if "probe" in parts else []
    if "numbers" in parts or "graph" in parts:
        for name in NUMBERS:
            found += [(name, "deepgemm", 8192), (name, "deepgemm_batched", 1000)]
    for shape in shapes:
        if "time" in parts or "profile" in parts:
            found += [(f"{shape}:{b}", "deepgemm", min(most, 1024 if b < 64 else most))
                      for b in (64, 128, 32, 16)]  # fmt: skip
        if "batched" in parts:
            found.append((f"{shape}:", "deepgemm_batched", 512))
        if "bf16" in parts:
            found += [(f"{shape}:{b}:none", "deepgemm", most) for b in (64, 128)]
    return found


def compile_one(what: str, name: str, tokens: int) -> None:
    """Runs one call, which compiles what it and smaller ones need."""
    shape, *rest = what.split(":")
    if shape == "probe":
        return probe_one(rest[0], int(rest[1]))
    if shape in NUMBERS:
        p, block_m = problem_of(**NUMBERS[shape]), None
    else:
        block_m = int(rest[0]) if rest[0] else None
        p = problem_of(SHAPES[shape], **({"quant": "none"} if len(rest) > 1 else {}))
    experts = experts_of(p, name, block_m)
    packed = experts.pack(blank_weights(p))
    scratch = Workspace().take(experts.workspace(tokens), torch.device("cuda"))
    L, H = p.num_local_experts, p.hidden_size
    if name == "deepgemm":
        routing = make_routing(p, tokens)
        ids = torch.where(routing.topk_ids < L, routing.topk_ids, -1)
        x = torch.randn(tokens, H, device="cuda").bfloat16()
        experts.apply(torch.empty_like(x), Dispatched(x, None, ids, routing.topk_weights), packed,
                      scratch)  # fmt: skip
    else:
        x = torch.randn(L, tokens, H, device="cuda").bfloat16()
        counts = torch.zeros(L, dtype=torch.int32, device="cuda")
        experts.apply(torch.empty_like(x), Dispatched(x, expert_num_tokens=counts), packed, scratch)
    torch.cuda.synchronize()


def blank_weights(p: moekit.MoEProblem) -> moekit.ExpertWeights:
    """Zeros in the packed form: quick to make, and little memory for many processes."""
    L, inner, operand = p.num_local_experts, p.local_intermediate_size, p.quant.weight
    named = {}
    for name, rows, cols in (
        ("w13", p.w13_rows, p.hidden_size),
        ("w2", p.hidden_size, inner),
    ):
        dtype = p.dtype if operand is None else operand.torch_dtype
        named[name] = torch.zeros(L, rows, cols, dtype=dtype, device="cuda")
        if operand is not None:
            shape = (L, *operand.scale_shape(rows, cols))
            named[f"{name}_scale"] = torch.ones(shape, dtype=torch.float32, device="cuda")
    return moekit.ExpertWeights(**named)


def compile_all(todo: list[tuple[str, str, int]], workers: int) -> None:
    start, running, waiting = time.monotonic(), [], list(todo)
    say(f"compiling: {len(todo)} jobs in {workers} processes")
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            command = [sys.executable, __file__, "--compile", *map(str, job)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            running.append((job, process, time.monotonic()))
        for entry in list(running):
            job, process, begin = entry
            if process.poll() is not None:
                running.remove(entry)
                tail = "" if process.returncode == 0 else "\n" + process.stdout.read()[-3000:]
                say(f"  {job}: {time.monotonic() - begin:.0f} s, rc {process.returncode}{tail}")
        time.sleep(0.2)
    kernels = len(list(Path(os.environ["DG_JIT_CACHE_DIR"]).rglob("kernel.cubin")))
    say(f"compiling took {time.monotonic() - start:.0f} s, {kernels} kernels in the cache")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="+", default=PARTS[:-1], choices=PARTS)
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    options.add_argument("--workers", type=int, default=14)
    options.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    torch.manual_seed(0)
    if chosen.compile:
        what, name, tokens = chosen.compile
        compile_one(what, name, int(tokens))
        return
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, nvcc {library.nvcc()}")
    say(f"candidates {library.candidates()}, faults {library.unsupported()}")
    for spec in moekit_experts():
        say(f"{spec.name} on mixtral: reasons {spec.unsupported(problem_of(SHAPES['mixtral']))}")
    with part("load"):
        before = torch.cuda.memory_allocated()
        module = library.load()
        say(f"DeepGEMM {module.__version__} loaded from {module.__file__}, "
            f"{torch.cuda.memory_allocated() - before >> 20} MiB taken, "
            f"SMs {module.get_num_sms()}, "
            f"alignment {module.get_mk_alignment_for_contiguous_layout()}")  # fmt: skip
    if chosen.workers:
        with part("compiling"):
            todo = jobs(chosen.shapes, chosen.only, max(chosen.tokens))
            compile_all(todo, chosen.workers)
    for name, run in (
        ("probe", probe),
        ("numbers", numbers),
        ("graph", graph),
        ("time", lambda: time_standard(chosen.shapes, chosen.tokens)),
        ("batched", lambda: time_batched(chosen.shapes)),
        ("bf16", lambda: time_standard(
            chosen.shapes, [t for t in chosen.tokens if t in (16, 1024, 16384)], quant="none")),
        ("profile", lambda: profile(chosen.shapes)),
        ("expected", lambda: time_expected(chosen.shapes, chosen.tokens)),
    ):  # fmt: skip
        if name in chosen.only:
            with part(name):
                run()
    say("done")


if __name__ == "__main__":
    main()
