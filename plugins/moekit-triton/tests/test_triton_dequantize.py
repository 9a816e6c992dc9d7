"""Frozen quantized experts in training: their weights in bits, gradients, memory, and refusals."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from moekit_triton import moekit_experts, training
from moekit_triton.kernels.dequantize import dequantize
from moekit_triton.training_adapters import TrainableAdapterTriton

import moekit
from moekit import DeviceSpec, MoEProblem
from moekit.plugin import SCHEMES, AdapterSlots
from moekit.testing.adapters import random_adapters
from moekit.testing.cases import make_case
from moekit.testing.gradients import leaves, random_grad
from moekit.testing.memory import beyond_stated, poisoned_allocations

SPEC = moekit_experts()[0]
QUANTIZED = sorted(SPEC.schemes - {"none"})


def problem_of(device, quant: str, **changes) -> MoEProblem:
    sizes = dict(num_experts=3, top_k=2, hidden_size=272, intermediate_size=128)
    return MoEProblem(**sizes | dict(device=str(device), quant=quant, training=True) | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant", QUANTIZED)
def test_bits_of_weights(device, quant, dtype):
    """All codes, partial blocks and groups; experts without rows are left alone."""
    operand, draw = SCHEMES[quant].weight, torch.Generator().manual_seed(7)
    each, ends = operand.codes.per_byte, torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    for n, k in ((144, 272), (1, 8), (256, 128)):
        codes = torch.randint(0, 256, (3, n, k // each), generator=draw).to(torch.uint8)
        codes[:, 0, : k // each] = torch.arange(256).repeat(2)[: k // each].to(torch.uint8)
        codes = codes.view(operand.torch_dtype)
        if codes.dtype.is_floating_point:
            codes = torch.where(codes.float().isnan(), torch.zeros_like(codes), codes)
        scale = torch.randn(3, *operand.scale_shape(n, k), generator=draw) / 64
        if operand.microscaled:
            scale = torch.exp2(scale.mul(160).round())
        held = {"w2": codes, "w2_scale": scale}
        if operand.zero_points:
            held["w2_zero_points"] = torch.randint(0, 16, scale.shape, generator=draw).byte()
        held = {name: t.to(device) for name, t in held.items()}
        want = moekit.plugin.dequantize(
            held["w2"], held["w2_scale"], operand, dtype, zero_points=held.get("w2_zero_points")
        )
        views = {name: t.mT.contiguous().mT for name, t in held.items()}
        for given in (held, views):
            with poisoned_allocations():
                got = dequantize(given, "w2", operand, dtype, ends)
            assert got[1].isnan().all(), "an expert without rows was written"
            assert got.is_contiguous() and got.dtype == dtype
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(got[::2].view(bits), want[::2].view(bits)), (n, k)


def check_step(case):
    """Compare a step in bits with the same step over dequantized weights."""
    p, stack = case.problem, case.adapters
    plain = p.replace(quant="none")
    found, outs = [], []
    for problem, held in ((p, case.weights), (plain, case.weights.dequantize(p.quant, p.dtype))):
        held = replace(held, w13_input_scale=None, w2_input_scale=None)
        kernel = moekit.compose(problem, "local", "triton")
        packed = kernel.pack(held)
        if stack is not None:
            assert type(kernel.experts) is TrainableAdapterTriton
        names = ("x", "topk_weights") + (() if stack is None else tuple(stack.tensors()))
        given = leaves(case, names)
        weights = replace(packed, adapters=given.adapters)
        out = kernel(given.x, weights, given.routing)
        out.backward(random_grad(case))
        tensors = {} if stack is None else given.adapters.tensors()
        found.append([given.x.grad, given.routing.topk_weights.grad, *(
            t.grad for t in tensors.values())])  # fmt: skip
        with torch.no_grad():
            outs += [out.detach(), kernel(given.x, weights, given.routing)]
    assert all(t is not None and t.any() for t in found[0])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(out, outs[0]) for out in outs[1:3])


@pytest.mark.parametrize("quant", ["fp8_block", "int8_channel_token", "int4_w4a16_g32_zp"])
@pytest.mark.parametrize("adapters", [None, AdapterSlots(2, 4)])
def test_step_equals_dequantized_weights(device, quant, adapters):
    p = problem_of(device, quant, adapters=adapters)
    case = make_case(p, 12, "masked")
    stack = None if adapters is None else random_adapters(p)
    if stack is not None:
        ids = torch.arange(12, dtype=torch.int32, device=device) % 3 - 1
        case = replace(case, adapters=stack, routing=replace(case.routing, adapter_ids=ids))
    check_step(case)


@pytest.mark.parametrize("quant", ["fp8_block", "int4_w4a16_g128"])
def test_specialized_warps(specialized, device, quant):
    p = problem_of(device, quant, hidden_size=256)
    assert training.choose_tiles(p, 2000).specialized
    check_step(make_case(p, 1000, "masked"))


@pytest.mark.parametrize(
    "quant", [pytest.param("fp8_w8a16_block", marks=pytest.mark.full), "mxfp4_w4a16"]
)
def test_memory_of_frozen_steps(device, monkeypatch, quant):
    """Nothing but one dequantized weight is added, and packing copies nothing."""
    p = problem_of(device, quant, num_experts=8)
    case = make_case(p, 8)
    kernel = moekit.compose(p, "local", "triton")
    packed = kernel.pack(case.weights)
    held = case.weights.canonical(p).tensors()
    assert packed["w13"].data_ptr() == held["w13"].data_ptr()
    x, grad = case.x.clone().requires_grad_(), random_grad(case)

    def step() -> None:
        torch.autograd.grad(kernel(x, packed, case.routing), x, grad)

    step()
    if device.type == "cpu":  # the interpreter leaves arguments to the garbage collector

        def collected(*given):
            gc.collect()
            return dequantize(*given)

        monkeypatch.setattr(training, "dequantize", collected)
    said = beyond_stated(kernel, len(x), step, 2 * x.nbytes)
    assert not said, said
    assert kernel.experts.workspace(8) == ()
    assert kernel.experts.apply_unreduced(None, packed, ()) is None  # packed for training alone
    stated = kernel.experts.transient_bytes(8)
    plain = moekit.compose(p.replace(quant="none"), "local", "triton").experts
    largest = 8 * p.w13_rows * p.hidden_size * p.dtype.itemsize
    assert stated == plain.transient_bytes(8) + largest


def test_refusals():
    """Scales in two levels and act-order are refused, and frozen fp8 blocks are not."""
    p = MoEProblem(num_experts=4, top_k=2, hidden_size=256, intermediate_size=256,
                   device=DeviceSpec("cuda", (9, 0)), training=True)  # fmt: skip
    for quant in ("nvfp4_w4a16", "int4_w4a16_g32_act_order"):
        assert f"quant scheme {quant} is not supported" in "; ".join(
            SPEC.unsupported(p.replace(quant=quant))
        )
    assert not [r for r in SPEC.unsupported(p.replace(quant="fp8_block")) if "backward" in r]
    assert "dequantized to bfloat16" in SPEC.description(p.replace(quant="fp8_block"))
