"""Dot products: the two kernels against plain fp32, and when the plan is chosen."""

from __future__ import annotations

import pytest
import torch
from moekit_bench import SHAPES
from moekit_kernels.numerics import INTERPRETED
from moekit_kernels.numerics import Activation as KernelActivation
from moekit_triton import heuristics
from moekit_triton.heuristics import dot_products, dots_pay
from moekit_triton.kernels.gemv import gemv_down, gemv_up
from moekit_triton.kernels.tiles import DotTile
from moekit_triton.plans import Batched, DotProducts
from triton_checks import choose_plan

import moekit
from moekit import Activation
from moekit.problem import quant
from moekit.problem.activation import apply_activation
from moekit.problem.quant import SCHEMES

FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAN = float("nan")
UNPACKED = sorted(
    name
    for name in moekit.registry().expert("triton").schemes
    if (weight := SCHEMES[name].weight) is None or not weight.packed
)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert torch.isfinite(out.float()).all()
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def make_ids(rows: int, top_k: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return different experts for each row; some assignments and the last row have none."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)])
    ids[torch.rand(ids.shape) < 0.2] = -1
    ids[0, 0], ids[-1] = 0, -1
    return ids.to(device)


def make_weight(scheme: str, *shape: int, device: torch.device):
    """Return (stored values, scale as the experts pack it, fp32 values)."""
    operand, full = SCHEMES[scheme].weight, torch.randn(shape) / shape[-1] ** 0.5
    if operand is None:
        return full.bfloat16().to(device), None, full.bfloat16().float()
    q, scale = quant.quantize(full, operand)
    dims = 1 if operand.per_tensor else 2 if operand.group[1] < 0 else 3
    value = quant.dequantize(q, scale, operand)
    return q.to(device), scale.view(scale.shape[:dims]).to(device), value


# (N, K): whole tiles, several steps; partial ones in both; one scale block over gate and up
SHAPES_NK = [(128, 1024), (72, 264)]
CONFIGS = [DotTile(64, 1), DotTile(32, 2), DotTile(128)]
if not INTERPRETED:
    CONFIGS = [DotTile(8), DotTile(1, 1), DotTile(4, 2), DotTile(2, 8)]


def configs(n: int) -> list[DotTile]:
    """Distribute the cases over the shapes in the interpreter, which takes a second for each."""
    if not INTERPRETED:
        return CONFIGS
    return CONFIGS[:1] if n == SHAPES_NK[0][0] else CONFIGS[1:]


@pytest.mark.parametrize("scheme", UNPACKED)
@pytest.mark.parametrize(("n", "k"), SHAPES_NK)
@pytest.mark.parametrize("quantized", [False, True])
def test_up(device, scheme, n, k, quantized):
    """Check all weight and activation scales, bias, and 16-bit x where the scheme quantizes it."""
    operand = SCHEMES[scheme].activation
    if quantized and operand is None:
        pytest.skip("does not quantize activations")
    torch.manual_seed(0)
    rows, top_k, experts = 3, 3, 4
    ids = make_ids(rows, top_k, experts, device)
    w, w_scale, w_fp32 = make_weight(scheme, experts, 2 * n, k, device=device)
    x, x_scale = torch.randn(rows, k).bfloat16(), None
    value = x.float()
    if quantized:
        static = torch.tensor([[0.01]]) if operand.static else None
        x, x_scale = quant.quantize(x, operand, static)
        value, x_scale = quant.dequantize(x, x_scale, operand), x_scale.to(device)
    bias = torch.randn(experts, 2 * n).bfloat16()
    h = torch.einsum("rk,rsnk->rsn", value, w_fp32[ids.cpu()]) + bias.float()[ids.cpu()]
    want = apply_activation(h, Activation("silu")).flatten(0, 1)
    if x.dtype != INT8:
        x[-1] = torch.full((k,), NAN).to(x.dtype)  # no expert reads it
    used = ids.flatten().cpu() >= 0
    for gemv in configs(n):
        out = torch.full((rows * top_k, n), NAN, dtype=torch.float32, device=device)
        gemv_up(
            x.to(device), w, out, ids, KernelActivation("silu"), gemv,
            x_scale=x_scale, w_scale=w_scale, bias_LN=bias.to(device),
        )  # fmt: skip
        assert out[~used].isnan().all(), "an assignment without expert was written"
        assert relative_error(out.cpu()[used], want[used]) < 2e-6


@pytest.mark.parametrize("scheme", UNPACKED)
@pytest.mark.parametrize(("n", "k"), SHAPES_NK)
def test_down(device, scheme, n, k):
    torch.manual_seed(0)
    rows, top_k, experts = 3, 3, 4
    ids = make_ids(rows, top_k, experts, device)
    w, w_scale, w_fp32 = make_weight(scheme, experts, n, k, device=device)
    x = torch.randn(rows * top_k, k).bfloat16()
    weights = torch.rand(rows, top_k) + 0.5
    bias = torch.randn(experts, n).bfloat16()
    used = ids.cpu() >= 0
    y = torch.einsum("rsk,rsnk->rsn", x.float().view(rows, top_k, k), w_fp32[ids.cpu()])
    y = (y + bias.float()[ids.cpu()]) * weights[:, :, None]
    want = torch.where(used[:, :, None], y, 0.0).sum(dim=1)
    x[~used.flatten()] = NAN
    weights[~used] = NAN
    for gemv in configs(n):
        found = []
        for _ in range(2):
            out = torch.full((rows, n), NAN, dtype=torch.float32, device=device)
            gemv_down(
                x.to(device), w, out, ids, weights.to(device), gemv,
                w_scale=w_scale, bias_LN=bias.to(device),
            )  # fmt: skip
            found.append(out.cpu())
        assert torch.equal(found[0], found[1])
        assert (found[0][-1] == 0).all()
        assert relative_error(found[0], want) < 2e-6


@pytest.mark.parametrize(
    ("name", "tokens"), [("qwen3-30b", 4), ("mixtral", 2), ("dsv3-ep8", 2), ("dsv3-tp8", 8)]
)
def test_when_experts_are_hardly_shared(name, tokens):
    problem = SHAPES[name].problem(device="sm90")
    top_k = problem.top_k
    assert all(dots_pay(problem, rows, top_k) for rows in range(1, tokens + 1))
    assert not dots_pay(problem, 4 * tokens, top_k)
    assert isinstance(choose_plan(problem, 1, top_k), DotProducts)
    assert isinstance(choose_plan(problem, 1, top_k, batched=True), Batched)


@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_numbers_of_programs(name, tokens, monkeypatch):
    """GEMM 2 fills the multiprocessors, and GEMM 1 has no more programs than its sizes ask for."""
    monkeypatch.setattr(heuristics, "INTERPRETED", False)
    problem = SHAPES[name].problem(device="sm90")
    plan = dot_products(problem, tokens, problem.top_k)
    assert tokens * problem.hidden_size // plan.down.rows >= 2.5 * 132 or plan.down.rows == 1
    columns = tokens * problem.top_k * problem.intermediate_size
    assert plan.up.rows == (2 if columns <= 32768 else 8)
