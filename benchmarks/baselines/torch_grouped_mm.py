"""torch alone: argsort, two grouped GEMMs, SiLU * mul and a weighted sum.

bf16 through F.grouped_mm; fp8 channel x token through torch._scaled_grouped_mm (CUTLASS). Training
has the order of operations of transformers 5.24's grouped_mm, with autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _glue import quantize, silu_mul, sorted_by_expert, weighted_sum
from moekit_bench import Unavailable

name, trains = "torch_grouped_mm", True


def version() -> str:
    return f"torch {torch.__version__}"


def make(problem, weights, device):
    if problem.activation.name != "silu" or problem.activation.clamped or problem.has_bias:
        raise Unavailable("only plain silu without biases")
    L, top_k = problem.num_experts, problem.top_k
    w13, w2 = weights.w13.mT, weights.w2.mT

    def bf16(x, routing):
        order, ends, place = sorted_by_expert(routing.topk_ids, L)
        h = F.grouped_mm(x[order // top_k], w13, offs=ends)
        z = F.grouped_mm(silu_mul(h), w2, offs=ends)
        return weighted_sum(z, place, routing.topk_weights)

    def training(x, routing):
        (T, K), H = routing.topk_ids.shape, x.shape[1]
        ids, order = torch.sort(routing.topk_ids.reshape(-1))
        counts = torch.histc(ids.float(), bins=L, min=0, max=L - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // K], w13, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, w2, offs=ends)
        weighted = y * routing.topk_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return weighted[back].view(T, K, H).sum(dim=1).to(x.dtype)

    if problem.quant.name == "none":
        if problem.training:
            return training
        if problem.dtype != torch.bfloat16:
            raise Unavailable(f"F.grouped_mm is for bfloat16, not {problem.dtype_name}")
        return bf16
    if problem.quant.name != "fp8_channel_token":
        raise Unavailable(f"torch has no grouped GEMM for {problem.quant.name}")
    if device.type != "cuda" or not hasattr(torch, "_scaled_grouped_mm"):
        raise Unavailable("torch._scaled_grouped_mm needs a GPU and a torch that has it")
    scales = weights.w13_scale[..., 0].contiguous(), weights.w2_scale[..., 0].contiguous()

    def gemm(a, a_scale, w, w_scale, ends):
        return torch._scaled_grouped_mm(
            a, w, a_scale.view(-1), w_scale, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip

    def fp8(x, routing):
        order, ends, place = sorted_by_expert(routing.topk_ids, L)
        h = gemm(*quantize(x, x.shape[1], order // top_k), w13, scales[0], ends)
        z = gemm(*quantize(h, h.shape[1] // 2, gated=True), w2, scales[1], ends)
        return weighted_sum(z, place, routing.topk_weights)

    return fp8
