"""Every backend packs the same weights, whichever form the checkpoint has.

`ModularKernel.pack` converts them, so the kit need not test it for each backend.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weight_forms import interleaved

import moekit
from moekit.problem.quant import SCHEMES
from moekit.testing.calls import check_call, same_bits
from moekit.testing.cases import make_case, random_weights
from moekit.testing.experts_base import sizes_of


def kernel_of(scheme, **changes):
    problem = moekit.MoEProblem(**sizes_of(4, 2, 160, 144), quant=scheme, device="cpu", **changes)
    return moekit.compose(problem, experts="torch")


# Act-order concerns columns, so its rows are the same as without it.
PER_ROW = sorted(
    n
    for n, s in SCHEMES.items()
    if s.weight is None or (s.weight.group[0] in (1, -1) and not s.weight.act_order)
)


@pytest.mark.parametrize("scheme", PER_ROW)
def test_alternating_rows_of_gate_and_up(scheme):
    kernel = kernel_of(scheme, has_bias=True)
    weights = random_weights(kernel.problem)
    plain, mixed = kernel.pack(weights), kernel.pack(interleaved(weights))
    assert plain.experts.keys() == mixed.experts.keys()
    for name, tensor in plain.experts.items():
        assert same_bits(tensor, mixed.experts[name]), name


@pytest.mark.parametrize(
    "scheme", [n for n, s in SCHEMES.items() if s.weight is not None and s.weight.per_tensor]
)
def test_scale_each_for_gate_and_up(scheme):
    kernel = kernel_of(scheme)
    plain = random_weights(kernel.problem)
    pair = plain.w13_scale.view(-1, 1) * torch.tensor([1.0, 0.5])
    case = make_case(kernel.problem, 17, weights=replace(plain, w13_scale=pair))
    # The oracle must also distinguish the scales.
    one = make_case(kernel.problem, 17, weights=plain)
    assert not torch.allclose(case.reference(), one.reference())
    check_call(kernel, case)
