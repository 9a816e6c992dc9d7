"""Whole calls of every plan repeat the launches of an earlier call. Launches are only noted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from moekit_kernels.launch import Launches
from moekit_triton.experts import AdapterTriton, BatchedTritonExperts, TritonExperts
from moekit_triton.pins import PLAN_VARIABLE
from moekit_triton.plans import Batched, plan_from_text
from noted_launches import Notes, python_calls
from triton_checks import compiled

from moekit import DeviceSpec, MoEProblem, registry
from moekit.contract import Adapters, Dispatched
from moekit.lora import AdapterSlots
from moekit.testing.cases import random_weights

H, I, K, R = 256, 128, 4, 24  # noqa: E741

GATHERED = "gathered: 16x32x128 w4 s5 | 16x64x64 g32 w4 s5 tma, fused"
PLANS = [
    ("none", "dot_products: 2 rows w4 | 4 rows w8"),
    ("fp8_block", "dot_products: 2 rows w4 | 4 rows w8"),
    ("none", "direct: 16x32x128 w4 s5 | 16x64x64 w4 s5 tma, fused"),
    ("none", GATHERED),
    ("fp8_channel_token", "gathered: 16x128x128 w4 s4 tma | 16x128x128 w4 s3 tma"),
    ("fp8_tensor_static", "gathered: 16x128x128 w4 s4 tma | 16x128x128 w4 s3 tma, fused"),
    ("int4_w4a16_g32_zp", "gathered: 16x64x128 w4 s4 | 16x64x128 w4 s4, fused, k2"),
    ("none", "sorted: 128x128x64 g8 w8 s4 tma | 128x256x64 g8 w8 s3 persistent"),
    ("none", "copied: tokens 128 | tokens 256"),
    ("none", "copied: 128x128x64 g8 w8 s3 halves | 128x256x64 g8 w8 s3 persistent"),
    ("fp8_block", "copied: specialized g4 halves | specialized g16 halves"),
    ("none", "ahead: specialized halves | specialized halves"),
    ("none", "batched: 16x32x128 w4 s5 | 16x64x64 g32 w4 s5 tma, fused"),
    ("fp8_block", "batched: 16x128x128 w4 s4 | 16x128x128 w4 s3 tma, fused"),
]
CASES = [(*plan, {}) for plan in PLANS]
CASES += [("none", GATHERED, {"adapters": AdapterSlots(2, 16)})]
CASES += [("none", GATHERED, {"batch_invariant": True}), ("none", GATHERED, {"has_bias": True})]


class Calls:
    """Calls of one backend, with its problem and plan, and new tensors for each call."""

    def __init__(self, monkeypatch, quant: str, text: str, **changes) -> None:
        plan = plan_from_text(text)
        compiled(monkeypatch, triton_version="3.6.0")
        monkeypatch.setenv(PLAN_VARIABLE, text)
        self.batched = isinstance(plan, Batched)
        name = "triton_batched" if self.batched else "triton"
        here = MoEProblem(num_experts=4, top_k=K, hidden_size=H, intermediate_size=I, quant=quant,
                          dtype=torch.bfloat16, device="cpu", **changes)  # fmt: skip
        self.problem = here.replace(device=DeviceSpec("cuda", (9, 0), "NVIDIA H200"))
        kind = BatchedTritonExperts if self.batched else TritonExperts
        kind = AdapterTriton if changes.get("adapters") else kind
        self.experts = kind(registry().expert(name), self.problem)
        self.weights = random_weights(here).canonical(here)

    def tensors(self, x_quantized: bool) -> tuple:
        """Return a call's arguments in new memory."""
        operand, rows = self.problem.quant.activation, (4, R) if self.batched else (R,)
        x, scale = torch.empty(*rows, H, dtype=torch.bfloat16), None
        if operand is not None and x_quantized:
            x = x.to(operand.torch_dtype)
            scale = torch.empty(*rows, operand.scale_shape(1, H)[1])
        tokens = Dispatched(x, scale, torch.zeros(R, K, dtype=torch.int32), torch.zeros(R, K),
                            num_rows=torch.ones(1, dtype=torch.int32))  # fmt: skip
        if self.batched:
            tokens = Dispatched(x, scale, expert_num_tokens=torch.ones(4, dtype=torch.int32))
        packed = self.experts.pack(self.weights)
        if (slots := self.problem.adapters) is not None:
            a, b = (2, 4, 1, slots.rank, H), (2, 4, 2 * I, slots.rank)
            stack = Adapters(torch.ones(2), torch.empty(a).bfloat16(), torch.empty(b).bfloat16())
            packed = replace(packed, adapters=stack)
            tokens = replace(tokens, adapter_ids=torch.zeros(R, dtype=torch.int32))
        specs = self.experts.workspace(R)
        memory = [torch.empty(each.shape, dtype=each.dtype) for each in specs]
        shape = (R, K, H) if self.problem.batch_invariant else x.shape
        return torch.empty(shape, dtype=torch.bfloat16), tokens, packed, memory


@pytest.mark.parametrize(("quant", "text", "changes"), CASES)
@pytest.mark.parametrize("unreduced", [False, True])
def test_calls_repeat_launches(monkeypatch, quant, text, changes, unreduced) -> None:
    """As without recordings, in other memory, of weights too; with few Python functions."""
    calls, notes = Calls(monkeypatch, quant, text, **changes), Notes(monkeypatch)
    if unreduced and (calls.batched or calls.problem.batch_invariant):
        pytest.skip("these experts sum nothing")
    experts = calls.experts

    def run(y, tokens, packed, memory):
        if not unreduced:
            return experts.apply(y, tokens, packed, memory)
        return experts.apply_unreduced(tokens, packed, memory)

    for x_quantized in (True, False)[: 1 if calls.batched else 2]:
        experts._launches = Launches()
        first, other = calls.tensors(x_quantized), calls.tensors(x_quantized)
        run(*first)
        notes.new()
        made, repeated = places(run(*other)), notes.new()
        assert None not in experts._launches._recordings.values(), "the call cannot be repeated"
        assert python_calls(partial(run, *other)) <= 70
        notes.new()
        experts._launches = Launches()
        assert made == places(run(*other)) and repeated == notes.new()
        assert repeated or unreduced


def places(made) -> list[object]:
    """Return where the tensors of unreduced rows are, and in which form."""
    tensors = [] if made is None else vars(made).values()
    return [t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
