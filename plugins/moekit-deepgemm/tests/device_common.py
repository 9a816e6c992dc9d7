"""What the device_*.py scripts share. Importing it makes the packages importable, installed or
not."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("DG_JIT_CACHE_DIR", "/tmp/moekit_deepgemm_jit")
ROOT = Path(__file__).resolve().parents[3]
for folder in ("", "plugins/moekit-kernels/src", "plugins/moekit-deepgemm/src"):
    sys.path.insert(0, str(ROOT / folder))

import torch  # noqa: E402
from moekit_deepgemm import moekit_experts  # noqa: E402

import moekit  # noqa: E402
from moekit.contract import Routing  # noqa: E402
from moekit.discovery.registry import Registry, registry  # noqa: E402

SHAPES = {  # E, K, H, I
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
}
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)


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
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if time.monotonic() - start > 20:
        say(f"  ({title}: {time.monotonic() - start:.0f} s)")


def backends() -> Registry:
    found = registry()
    for spec in moekit_experts():
        if spec.name not in found.experts:
            found.register(spec)
    return found


def problem_of(sizes: tuple[int, int, int, int], **changes) -> moekit.MoEProblem:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    given = dict(zip(names, sizes, strict=True), quant="fp8_block", device="cuda")
    return moekit.MoEProblem(**{**given, **changes})


def make_weights(p: moekit.MoEProblem) -> moekit.ExpertWeights:
    L, inner, parts = p.num_local_experts, p.local_intermediate_size, []
    for rows, cols in ((p.w13_rows, p.hidden_size), (p.hidden_size, inner)):
        parts.append(torch.empty(L, rows, cols, dtype=p.dtype, device="cuda"))
        parts[-1].normal_(std=cols**-0.5)
    bias = {}
    if p.has_bias:
        bias["w13_bias"] = torch.randn(L, p.w13_rows, dtype=p.dtype, device="cuda")
        bias["w2_bias"] = torch.randn(L, p.hidden_size, dtype=p.dtype, device="cuda")
    return moekit.ExpertWeights(*parts, **bias).quantize(p.quant)


def make_routing(p: moekit.MoEProblem, tokens: int, absent: float = 0.0) -> Routing:
    ids = torch.rand(tokens, p.num_experts, device="cuda").argsort(dim=1)[:, : p.top_k]
    ids = torch.where(torch.rand(ids.shape, device="cuda") < absent, -1, ids)
    weights = torch.rand(tokens, p.top_k, device="cuda") * 2 + 0.1
    return Routing(weights.masked_fill(ids < 0, float("nan")), ids.contiguous())


def error_of(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


def experts_of(p: moekit.MoEProblem, name: str, block_m: int | None = None):
    spec = backends().expert(name)
    experts = spec.load()(spec, p)
    experts.block_m = block_m
    return experts
