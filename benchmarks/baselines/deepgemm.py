"""Bare DeepGEMM, contiguous layout: fp8 128 x 128 blocks, and bf16.

Timed are quantization with the scatter, both GEMMs, SiLU * mul with quantization, and the weighted
sum. Not timed is the map that pads each expert's rows to the library's multiple: the first call
with a routing makes it. The library is the deep_gemm folder that MOEKIT_DEEPGEMM_PATH names, or
third_party/deep_gemm in the vllm folder that MOEKIT_VLLM_PATH names, else an installed deep_gemm.
It compiles with nvcc at the first call of a size.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import torch
from _glue import quantize, silu_mul, sorted_by_expert, weighted_sum
from moekit_bench import Unavailable

name = "deepgemm_bare"
_KEEP = 64


def folder() -> str:
    """Return the folder that the environment names, or an empty string."""
    inside_vllm = os.environ.get("MOEKIT_VLLM_PATH")
    inside = str(Path(inside_vllm, "third_party", "deep_gemm")) if inside_vllm else ""
    return os.environ.get("MOEKIT_DEEPGEMM_PATH") or inside


def version() -> str:
    file = Path(folder(), "__init__.py")
    found = re.search(r"__version__ = '(.+?)'", file.read_text()) if file.is_file() else None
    return f"deep_gemm {found[1]}" if found else ""


def library():
    for loaded in ("deep_gemm", "_moekit_deep_gemm", "vllm.third_party.deep_gemm"):
        if loaded in sys.modules:  # its operators can be registered only once
            return sys.modules[loaded]
    if not (named := folder()):
        return importlib.import_module("deep_gemm")
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", Path(named, "__init__.py"), submodule_search_locations=[named]
    )
    module = sys.modules["deep_gemm"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["deep_gemm"]
        raise
    return module


def make(problem, weights, device):
    if device.type != "cuda" or problem.device.capability != (9, 0):
        raise Unavailable(f"needs SM90 (got {problem.device})")
    if problem.activation.name != "silu" or problem.activation.clamped or problem.has_bias:
        raise Unavailable("only plain silu without biases")
    if problem.quant.name not in ("none", "fp8_block") or problem.dtype != torch.bfloat16:
        raise Unavailable(f"bf16 and fp8_block only, not {problem.quant.name}")
    try:
        deep_gemm = library()
    except (ImportError, OSError, AssertionError) as error:
        hint = "pip install vllm, or set MOEKIT_DEEPGEMM_PATH"
        raise Unavailable(f"deep_gemm does not import ({error}): {hint}") from error
    L, top_k = problem.num_experts, problem.top_k
    multiple = deep_gemm.get_mk_alignment_for_contiguous_layout()
    maps = {}

    def padded(routing):
        """Return source_M (the token of each padded row, or -1), experts_M (int32) and place_TK."""
        if id(routing) in maps:
            return maps[id(routing)][1]
        order, ends, place = sorted_by_expert(routing.topk_ids, L)
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        sizes = (counts + multiple - 1) // multiple * multiple
        shift = (sizes - counts).cumsum(0) - (sizes - counts)  # padding before each expert
        place = place + shift[routing.topk_ids]
        experts = torch.repeat_interleave(torch.arange(L, device=device), sizes).int()
        source = torch.full_like(experts, -1)
        source[place.view(-1)] = (torch.arange(place.numel(), device=device) // top_k).int()
        while len(maps) >= _KEEP:
            del maps[next(iter(maps))]
        # The routing is held so that no other one gets its id.
        maps[id(routing)] = routing, (source, experts, place)
        return source, experts, place

    def fp8(x, routing):
        source, experts, place = padded(routing)
        gemm = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        h = x.new_empty((len(source), weights.w13.shape[1]))
        a = quantize(x, 128, source, columns_first=True)
        gemm(a, (weights.w13, weights.w13_scale), h, experts)
        z = x.new_empty((len(source), x.shape[1]))
        a = quantize(h, 128, gated=True, columns_first=True)
        gemm(a, (weights.w2, weights.w2_scale), z, experts)
        return weighted_sum(z, place, routing.topk_weights)

    def bf16(x, routing):
        source, experts, place = padded(routing)
        gemm = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
        h = x.new_empty((len(source), weights.w13.shape[1]))
        gemm(x[source.clamp(min=0)], weights.w13, h, experts)
        z = x.new_empty((len(source), x.shape[1]))
        gemm(silu_mul(h), weights.w2, z, experts)
        return weighted_sum(z, place, routing.topk_weights)

    return fp8 if problem.quant.weight else bf16
