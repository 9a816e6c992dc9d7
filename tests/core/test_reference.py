"""The fp32 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moekit
from moekit.backends.reference import expert_mlp, oracle
from moekit.testing.cases import make_case


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of an fp32 tensor that is made while it is active."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float32:
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize(
    "quant", ["none", "fp8_block", "fp8_tensor_static", "int8_w8a16", "mxfp4_w4a16", "nvfp4"]
)
def test_oracle_holds_one_expert_in_fp32(quant: str) -> None:
    """With 256 experts of 7168 x 2048, all of them would be 45 GB."""
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=256, quant=quant, device="cpu"
    )
    case = make_case(problem, 5)
    with Largest() as seen:
        out = oracle(case.x, case.weights, case.routing, problem)
    assert seen.numel == problem.w13_rows * problem.hidden_size
    fp32, want = case.weights.canonical(problem).dequantize(problem.quant), torch.zeros_like(out)
    for expert in range(problem.num_experts):
        token, slot = (case.routing.topk_ids == expert).nonzero(as_tuple=True)
        y = expert_mlp(case.x[token].float(), fp32, expert, problem)
        want.index_add_(0, token, case.routing.topk_weights[token, slot, None] * y)
    assert torch.equal(out, want)
