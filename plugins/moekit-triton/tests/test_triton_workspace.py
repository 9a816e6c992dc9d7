"""A workspace serves every call of at most its rows: whole calls on meta tensors."""

from __future__ import annotations

import pytest
import torch
from moekit_kernels import launch
from moekit_triton import plans
from moekit_triton.calls import GEMM_OUT
from moekit_triton.experts import TritonExperts
from moekit_triton.heuristics import sorting_pays
from moekit_triton.plans import Sorted
from triton_checks import compiled

from moekit import DeviceSpec, MoEProblem, registry
from moekit.contract import Dispatched, PackedWeights


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Choose plans as for an H200 under triton 3.6, and launch nothing."""
    compiled(monkeypatch, triton_version="3.6.0")
    monkeypatch.setattr(plans, "num_sms", lambda problem: 132)
    monkeypatch.setattr(launch.Launcher, "__call__", lambda *args, **constants: None)
    monkeypatch.setattr(launch.Launches, "__call__", lambda *args: args[-1]())


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(p: MoEProblem) -> PackedWeights:
    found, dtype = {}, p.dtype if p.quant.weight is None else p.quant.weight.torch_dtype
    for name, rows, columns in (
        ("w13", p.w13_rows, p.hidden_size), ("w2", p.hidden_size, p.local_intermediate_size),
    ):  # fmt: skip
        found[name] = meta(p.num_local_experts, rows, columns, dtype=dtype)
        if p.quant.weight is not None:
            blocks = -(-rows // 128), -(-columns // 128)
            scales = (rows,) if "channel" in p.quant.name else blocks
            found[name + "_scale"] = meta(p.num_local_experts, *scales)
        if p.has_bias:
            found[name + "_bias"] = meta(p.num_local_experts, rows, dtype=p.dtype)
    return PackedWeights("triton", found, {})


@pytest.mark.parametrize("changes", [
    {}, {"quant": "fp8_block"}, {"quant": "fp8_block", "has_bias": True},
    {"intermediate_size": 256}, {"intermediate_size": 256, "quant": "fp8_block"},
    {"hidden_size": 1040, "quant": "fp8_block", "dtype": torch.float16},
    {"hidden_size": 4100, "intermediate_size": 14336},  # near a sorted plan
    {"activation": "relu2"}, {"device": DeviceSpec("cuda", (8, 9))},
    {"device": DeviceSpec("cuda", (12, 1)), "dtype": torch.float16},
    {"batch_invariant": True}, {"batch_invariant": True, "quant": "fp8_block"},
    {"batch_invariant": True, "quant": "fp8_channel_token"},  # which keeps GEMM 1's result
])  # fmt: skip
@pytest.mark.parametrize("per_expert", [32, 128, 200, 700])
def test_fewer_rows_than_planned(changes, per_expert):
    """Check row counts around those from which rows are sorted, also with one id per row."""
    sizes = dict(num_experts=16, top_k=4, hidden_size=1024, intermediate_size=1024)
    p = MoEProblem(**{**sizes, "device": DeviceSpec("cuda", (9, 0), "NVIDIA H200"), **changes})
    triton, weights, operand = TritonExperts(registry().expert("triton"), p), packed(p), None
    edge = per_expert * p.num_experts // p.top_k
    sorts = set()
    for planned in (edge - 1, edge, edge + 1, 3 * edge):
        buffers = [meta(*b.shape, dtype=b.dtype) for b in triton.workspace(planned)]
        if p.batch_invariant and p.quant.name != "fp8_channel_token":
            assert buffers[GEMM_OUT].numel() == 0, "GEMM 2 writes the output"
        for rows in {1, edge // 4, edge // 3, edge - 1, edge, edge + 1, 2 * edge, planned}:
            for top_k in (p.top_k, 1) if rows <= planned else ():
                ids = meta(rows, top_k, dtype=torch.int64)
                x, x_scale = meta(rows, p.hidden_size, dtype=p.dtype), None
                operand = p.quant.activation
                if operand is not None and rows % 2:  # as a dispatcher may have quantized it
                    x = meta(rows, p.hidden_size, dtype=operand.torch_dtype)
                    x_scale = meta(*reversed(operand.scale_shape(rows, p.hidden_size))).t()
                tokens = Dispatched(x, x_scale, ids, meta(rows, top_k))
                y_rows = (rows, top_k) if p.batch_invariant else (rows,)
                y = meta(*y_rows, p.hidden_size, dtype=p.dtype)
                triton.apply(y, tokens, weights, buffers)
                plan = triton.plan(rows, top_k)
                sorts.add(isinstance(plan, Sorted))
                for spec, buffer in zip(
                    plan.workspace(triton._layer, rows, top_k), buffers, strict=True
                ):
                    assert spec.nbytes <= buffer.nbytes, "the plan needs more than is there"
    may_sort = not p.batch_invariant and sorting_pays(p, 3 * edge, p.top_k)
    assert (True in sorts) == may_sort
