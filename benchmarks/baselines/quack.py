"""quack-kernels (CuTe DSL): the gather inside GEMM 1, SwiGLU in its epilogue.

MOEKIT_QUACK_TUNED=1 autotunes each size at its first call (minutes a cell); otherwise the
library's default configuration is used. The library must be in a site-packages folder: its cache
requires that.
"""

from __future__ import annotations

import importlib.metadata
import os

import torch
import torch.nn.functional as F
from _glue import sorted_by_expert, weighted_sum
from moekit_bench import Unavailable

name = "quack"


def version() -> str:
    try:
        return f"quack-kernels {importlib.metadata.version('quack-kernels')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def make(problem, weights, device):
    if device.type != "cuda" or problem.device.capability[0] < 9:
        raise Unavailable(f"needs SM90 or later (got {problem.device})")
    if problem.quant.name != "none" or problem.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"bf16 and fp16 only, not {problem.quant.name} {problem.dtype_name}")
    if problem.activation.name != "silu" or problem.activation.clamped or problem.has_bias:
        raise Unavailable("only plain silu without biases")
    try:
        from quack.gemm_interface import gemm, gemm_act
    except ImportError as error:
        hint = "pip install 'quack-kernels==0.6.5' 'nvidia-cutlass-dsl[cu13]==4.7.1'"
        raise Unavailable(f"quack does not import ({error}): {hint}") from error
    L, top_k = problem.num_experts, problem.top_k
    # Its SwiGLU reads columns gate 0, up 0, gate 1, ...
    halves = weights.w13.unflatten(1, (2, -1))
    w13, w2 = halves.transpose(1, 2).flatten(1, 2).contiguous().mT, weights.w2.mT
    tuned = os.environ.get("MOEKIT_QUACK_TUNED", "") == "1"

    def call(x, routing):
        order, ends, place = sorted_by_expert(routing.topk_ids, L)
        starts = F.pad(ends, (1, 0))
        rows = (order // top_k).int()
        _, act = gemm_act(
            x, w13, activation="swiglu", cu_seqlens_m=starts, A_idx=rows, store_preact=False,
            tuned=tuned,
        )  # fmt: skip
        z = gemm(act, w2, cu_seqlens_m=starts, tuned=tuned)
        return weighted_sum(z, place, routing.topk_weights)

    return call
