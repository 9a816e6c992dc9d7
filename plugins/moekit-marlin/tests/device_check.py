"""Everything about Marlin that only a GPU can tell, in one run; no pytest, no network.

    MOEKIT_VLLM_PATH=/folder/with/the/.so/files python tests/device_check.py [part ...]

Parts (default: all): library layout operator experts graph memory blocks timing profile. A part
that fails prints its traceback and the others go on; the last lines count failures. --only TEXT:
operator, experts and graph take only the weight types and schemes with TEXT in their name.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator

import marlin_timing
import torch
from moekit_marlin import layout, library
from torch import Tensor

import moekit
from moekit.backends.reference import oracle
from moekit.problem.quant import E2M1
from moekit.runtime.workspace import Workspace

_arguments = argparse.ArgumentParser()
_arguments.add_argument("parts", nargs="*")
_arguments.add_argument("--only", default="")
ARGS = _arguments.parse_args()

DEVICE = torch.device("cuda")
FAILURES: list[str] = []

# value = (stored - offset) * scale; fp8: offset None. As tests/marlin_stand_in.py has them.
UINT8B128 = 8 << 8 | 128 << 17 | 1 << 50
FP8 = 4 | 3 << 8 | 1 << 16 | 1 << 49 | 2 << 50
UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
UINT4 = 4 << 8 | 1 << 50
FP4 = 2 | 1 << 8 | 1 << 16 | 1 << 49
TYPES = {
    "int8": (UINT8B128, 8),
    "fp8": (FP8, 8),
    "int4": (UINT4B8, 4),
    "int4+zp": (UINT4, 4),
    "mxfp4": (FP4, 4),
}
GROUPS = {"fp8": (-1, 128), "mxfp4": (32,)}
RAW_LIMIT = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
LIMIT = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


def say(*words: object) -> None:
    print(*words, flush=True)


def judge(what: str, error: float, limit: float) -> str:
    """'ok' or 'FAIL', remembered."""
    if error <= limit:  # NaN is not
        return "ok"
    FAILURES.append(f"{what}: {error:.3g} > {limit:.3g}")
    return "FAIL"


def relative(out: Tensor, want: Tensor) -> float:
    return float((out.float() - want.float()).norm() / want.float().norm())


# -- library ------------------------------------------------------------------------------------


def show_library() -> None:
    import triton

    say(f"torch {torch.__version__}  triton {triton.__version__}  moekit {moekit.__version__}")
    say(f"{torch.cuda.get_device_name()}  {torch.cuda.get_device_properties(0)}")
    folder = library.VLLM.folder()
    say(f"folder {folder}  version {folder and library.VLLM.version()}")
    say(f"reasons against it: {library.unsupported()}")
    start = time.time()
    say(library.operator()._schema)
    say(f"loaded in {time.time() - start:.1f} s; vllm imported: {'vllm' in sys.modules}")
    for state in moekit.registry().plugins:
        say(f"plugin {state.name}: {state.state} {state.reason}")
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, quant="int8_w8a16"
    )
    say(moekit.explain(problem, experts="marlin"))


# -- layout -------------------------------------------------------------------------------------


def words(values: Tensor, bits: int) -> Tensor:
    """(..., n) -> int32 (..., n * bits / 32), the first value in the lowest bits."""
    per_word = 32 // bits
    total = (
        values.long().unflatten(-1, (-1, per_word))
        << bits * torch.arange(per_word, device=values.device)
    ).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def repack() -> None:
    """layout.pack_weights against the library's own gptq_marlin_repack and awq_marlin_repack."""
    folder = library.VLLM.folder()
    assert folder is not None
    path = folder / "_C_stable_libtorch.abi3.so"
    if not path.exists():
        say(f"no {path.name} here: not compared")
        return
    torch.ops.load_library(str(path))
    say(torch.ops._C.gptq_marlin_repack.default._schema)
    for bits in (4, 8):
        for n, k in ((64, 128), (128, 64), (256, 256), (768, 2048), (2880, 2944)):
            if n % 64 or k % 16:
                continue
            q_NK = torch.randint(1 << bits, (n, k), dtype=torch.uint8, device=DEVICE)
            ours = layout.pack_weights(q_NK[None], bits)[0]
            gptq = words(q_NK, bits).T.contiguous()  # (K / per_word, N)
            theirs = torch.ops._C.gptq_marlin_repack(gptq, k, n, bits, False)
            same = ours.shape == theirs.shape and torch.equal(ours, theirs)
            order = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
            mixed = q_NK.T.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
            awq = torch.ops._C.awq_marlin_repack(words(mixed, bits), k, n, bits, False)
            same_awq = torch.equal(ours, awq)
            verdict = judge(f"layout {bits} bits N={n} K={k}", float(not (same and same_awq)), 0)
            say(f"  {bits} bits N={n:5} K={k:5}: gptq {same}, awq {same_awq}  {verdict}")


# -- the bare operator ----------------------------------------------------------------------------


def raw_weight(kind: str, experts: int, n: int, k: int, group: int, dtype: torch.dtype):
    """(arguments of the operator: type id, weight, scale, zeros), dequantized fp32 (L, N, K)."""
    type_id, bits = TYPES[kind]
    groups = 1 if group < 0 else k // group
    if kind == "mxfp4":
        q = torch.randint(16, (experts, n, k), dtype=torch.uint8, device=DEVICE)
        scale = torch.exp2(torch.randint(-20, -4, (experts, groups, n), device=DEVICE).float())
        codes = torch.tensor([*E2M1, *(-v for v in E2M1)], device=DEVICE)
        each = scale.transpose(1, 2).repeat_interleave(group, 2)
        stored = layout.pack_exponents(scale).view(torch.float8_e8m0fnu)
        return (type_id, layout.pack_weights(q, bits), stored, None), codes[q.long()] * each
    if kind == "fp8":
        f8 = torch.randn(experts, n, k, device=DEVICE).clamp(-4, 4).mul(100).to(torch.float8_e4m3fn)
        q, values = f8.view(torch.uint8), f8.float()
    else:
        q = torch.randint(1 << bits, (experts, n, k), dtype=torch.uint8, device=DEVICE)
        values = q.float()
    scale = (torch.rand(experts, groups, n, device=DEVICE) + 0.5) * 0.01
    exponent = {torch.bfloat16: 120, torch.float16: 8}[dtype] if kind == "fp8" else 0
    stored = (scale * 2.0**exponent).to(dtype)
    each = stored.float().mul(2.0**-exponent).transpose(1, 2).repeat_interleave(k // groups, 2)
    zeros = None
    if kind == "int4+zp":
        z = torch.randint(16, (experts, groups, n), dtype=torch.uint8, device=DEVICE)
        values = values - z.float().transpose(1, 2).repeat_interleave(k // groups, 2)
        zeros = layout.pack_zeros(z)
    elif kind != "fp8":
        values = values - (1 << bits - 1)
    packed = layout.pack_weights(q, bits)
    return (type_id, packed, layout.permute_scales(stored), zeros), values * each


def operator() -> None:
    """Every weight type, group, block and tile; what is compared is the operator's own rounding."""
    call = library.operator()
    experts, pairs = 3, 50
    locks = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        for kind in TYPES:
            if ARGS.only not in kind:
                continue
            if (kind, dtype) == ("mxfp4", torch.float16):  # no such kernel
                continue
            for group in GROUPS.get(kind, (-1, 32, 64, 128)):
                worst, failed = 0.0, ""
                for n, k in ((128, 128), (128, 192), (192, 256), (512, 384), (1024, 2048)):
                    if k % max(group, 1):
                        continue
                    (type_id, w, s, z), real = raw_weight(kind, experts, n, k, group, dtype)
                    x = torch.randn(pairs, k, device=DEVICE).to(dtype)
                    bias = torch.randn(experts, n, device=DEVICE).to(dtype)
                    ids = torch.randint(experts, (pairs,), device=DEVICE)
                    for block in (8, 16, 32, 48, 64):
                        lists = marlin_timing.listed(ids, experts, block)
                        for b in (None, bias):
                            out = torch.full((pairs, n), float("nan"), dtype=dtype, device=DEVICE)
                            stored_b = None if b is None else layout.permute_channels(b)
                            try:
                                call(
                                    x, out, w, stored_b, s, None, None, z, locks, *lists,
                                    x.new_ones(1, dtype=torch.float32), block, 1, False, type_id,
                                    pairs, n, k, False, True, False, -1, -1, -1,
                                )  # fmt: skip
                            except RuntimeError as error:
                                failed = f"{str(error).splitlines()[0][:160]} (N={n} K={k} {block})"
                                continue
                            want = torch.einsum("rk,rnk->rn", x.float(), real[ids])
                            want = want if b is None else want + b.float()[ids]
                            error = relative(out, want)
                            if not error <= RAW_LIMIT[dtype]:
                                where = f"N={n} K={k} block={block} bias={b is not None}"
                                failed = f"{error:.3g} at {where}"
                            worst = max(worst, error)
                if bool(locks.any()):
                    failed = "locks are not zero afterwards"
                    locks.zero_()
                name = f"operator {kind} group {group} {dtype}"
                verdict = judge(name, 1.0 if failed else worst, RAW_LIMIT[dtype])
                say(f"  {name:44} worst {worst:.2e}  {verdict}  {failed}")


# -- the experts ----------------------------------------------------------------------------------


class PoisonedWorkspace(Workspace):
    def take(self, specs, device):
        views = super().take(specs, device)
        for view in views:
            view.view(-1).view(torch.uint8).fill_(255)
        return views


def problems() -> Iterator[tuple[moekit.MoEProblem, int]]:
    known = moekit.registry().expert("marlin").schemes
    schemes = [name for name in moekit.SCHEMES if name in known]
    say(f"  schemes: {', '.join(schemes)}")
    for dtype in (torch.bfloat16, torch.float16):
        for scheme in schemes:
            for sizes in ((8, 2, 256, 192), (16, 4, 2048, 768), (4, 2, 2880, 1440)):
                names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
                given = dict(zip(names, sizes, strict=True))
                problem = moekit.MoEProblem(**given, quant=scheme, dtype=dtype)
                if (scheme, dtype) == ("mxfp4_w4a16", torch.float16):  # the spec refuses it
                    continue
                for tokens in (1, 2, 17, 64, 333, 1030):
                    yield problem, tokens
    base = problem.replace(quant="int8_w8a16", dtype=torch.bfloat16)
    for activation in sorted(moekit.registry().expert("marlin").activations):
        yield base.replace(activation=activation, has_bias=True), 65
    yield base.replace(quant="mxfp4_w4a16", activation="swigluoai", has_bias=True), 65
    clamped = moekit.Activation("silu", limit=0.5)
    yield base.replace(activation=clamped, has_bias=True), 65
    yield base.replace(top_k=1, apply_router_weight_on_input=True), 65
    yield base.replace(parallel=moekit.ParallelConfig(ep_size=2, ep_rank=1, dp_size=1)), 65


def make_weights(problem: moekit.MoEProblem) -> moekit.ExpertWeights:
    p, L = problem, problem.num_local_experts
    H, inner = p.hidden_size, p.local_intermediate_size

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE) * scale).to(p.dtype)

    weights = moekit.ExpertWeights(
        randn(L, p.w13_rows, H, scale=H**-0.5),
        randn(L, H, inner, scale=inner**-0.5),
        w13_bias=randn(L, p.w13_rows) if p.has_bias else None,
        w2_bias=randn(L, H) if p.has_bias else None,
    ).quantize(p.quant)
    if not p.quant.weight.act_order:
        return weights
    group = p.quant.weight.group[1]
    changes = {
        f"{name}_g_idx": torch.stack(
            [torch.randperm(k, device=DEVICE) // group for _ in range(L)]
        ).int()
        for name, k in (("w13", H), ("w2", inner))
    }
    return dataclasses.replace(weights, **changes)


def make_call(problem: moekit.MoEProblem, tokens: int) -> tuple[Tensor, moekit.Routing]:
    p = problem
    x = torch.randn(tokens + 1, p.hidden_size, device=DEVICE).to(p.dtype)
    ids = torch.rand(tokens + 1, p.num_experts, device=DEVICE).argsort(1)[:, : p.top_k]
    ids = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.1, -1, ids)
    ids[-1], x[-1] = -1, float("nan")
    if tokens == 1:
        ids[0] = torch.arange(p.top_k, device=DEVICE)
    weights = torch.rand(ids.shape, device=DEVICE) * 2 + 0.1
    return x, moekit.Routing(weights, ids)


def one(problem: moekit.MoEProblem, tokens: int, pair: tuple[str, str]) -> float:
    kernel = moekit.compose(problem, *pair, workspace=PoisonedWorkspace(), checked=True)
    weights = make_weights(problem)
    x, routing = make_call(problem, tokens)
    packed = kernel.pack(weights)
    out, again = kernel(x, packed, routing), kernel(x, packed, routing)
    assert torch.equal(out, again), "not deterministic"
    assert not out[-1].any() and bool(torch.isfinite(out).all()), "padding reached the output"
    rest = moekit.Routing(routing.topk_weights[:-1], routing.topk_ids[:-1])
    return relative(out[:-1], oracle(x[:-1], weights, rest, problem))


def experts() -> None:
    pairs = (("local", "marlin"), ("batched_reference", "marlin_batched"))
    jobs = [(p, t) for p, t in problems() if ARGS.only in p.quant.name]
    worst: dict[str, float] = {}
    for problem, tokens in jobs:
        for pair in pairs:
            if pair[0] != "local" and problem.parallel.ep_size > 1:
                continue
            name = f"{pair[1]} {problem.quant.name} {problem.dtype_name}"
            try:
                error = one(problem, tokens, pair)
            except Exception as fault:  # noqa: BLE001
                error = float("nan")
                first = str(fault).splitlines()[0] if str(fault) else ""
                say(f"  {name} T={tokens} {problem!r}: {type(fault).__name__}: {first[:300]}")
            verdict = judge(f"{name} T={tokens} {problem!r}", error, LIMIT[problem.dtype])
            if verdict != "ok":
                say(f"  FAIL {name} T={tokens} error {error:.3g}: {problem!r}")
            worst[name] = max(worst.get(name, 0.0), error)
    for name, error in worst.items():
        say(f"  {name:60} worst {error:.2e}")


def graph() -> None:
    problem = moekit.MoEProblem(
        num_experts=16, top_k=4, hidden_size=2048, intermediate_size=768, quant="fp8_w8a16_block"
    )
    for pair, quant in (
        (("local", "marlin"), "fp8_w8a16_block"),
        (("local", "marlin_batched"), "fp8_w8a16_block"),
        (("local", "marlin"), "mxfp4_w4a16"),
    ):
        problem = problem.replace(quant=quant)
        for tokens in (5, 200) if ARGS.only in quant else ():
            kernel = moekit.compose(problem, *pair, workspace=Workspace(), checked=False)
            packed = kernel.pack(make_weights(problem))
            x, routing = make_call(problem, tokens)
            kernel.warmup(packed, tokens + 1)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                out = kernel(x, packed, routing)
            same = []
            for _ in range(4):
                new_x, new = make_call(problem, tokens)
                x.copy_(new_x)
                routing.topk_ids.copy_(new.topk_ids)
                routing.topk_weights.copy_(new.topk_weights)
                captured.replay()
                torch.cuda.synchronize()
                same.append(torch.equal(out, kernel(x, packed, routing)))
            verdict = judge(f"graph {pair} {quant} T={tokens}", float(not all(same)), 0)
            say(f"  {pair} {quant} T={tokens}: replays equal eager calls {same}  {verdict}")


def memory() -> None:
    """Peak of a call against what the kernel states."""
    for quant in ("fp8_w8a16_channel", "int8_w8a16"):
        for tokens in (1, 16, 100, 1000):
            problem = moekit.MoEProblem(
                num_experts=16, top_k=4, hidden_size=2048, intermediate_size=768, quant=quant
            )
            kernel = moekit.compose(problem, "local", "marlin", workspace=Workspace())
            packed = kernel.pack(make_weights(problem))
            x, routing = make_call(problem, tokens)
            out = torch.empty_like(x)
            kernel(x, packed, routing, out=out)
            kernel.workspace = Workspace()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            kernel(x, packed, routing, out=out)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            report = kernel.memory(len(x))
            over = peak - report.total - 256 * 1024 - report.total // 50
            verdict = judge(f"memory {quant} T={tokens}", float(over), 0.0)
            say(f"  {quant} T={tokens}: peak {peak}, stated {report.total} {report}  {verdict}")


PARTS = {
    "library": show_library,
    "layout": repack,
    "operator": operator,
    "experts": experts,
    "graph": graph,
    "memory": memory,
    "blocks": marlin_timing.blocks,
    "timing": marlin_timing.timing,
    "profile": marlin_timing.profile,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for part in ARGS.parts or PARTS:
        say(f"\n== {part}")
        begun = time.time()
        try:
            PARTS[part]()
        except Exception:  # noqa: BLE001
            FAILURES.append(part)
            traceback.print_exc(file=sys.stdout)
        say(f"-- {part}: {time.time() - begun:.1f} s")
    say(f"\n{len(FAILURES)} failures")
    for failure in FAILURES[:40]:
        say(f"  {failure[:400]}")
    sys.exit(bool(FAILURES))
