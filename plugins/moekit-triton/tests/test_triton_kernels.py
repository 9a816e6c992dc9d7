"""Every form of a GEMM's tiles in whole calls; the kit has those that the rules choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moekit_kernels.numerics import INTERPRETED
from moekit_triton.capabilities import fusable
from moekit_triton.kernels.tiles import GemmTile
from moekit_triton.plans import Batched, Direct, Gathered
from triton_checks import use_plan

import moekit
from moekit.problem.quant import SCHEMES
from moekit.runtime.workspace import Workspace
from moekit.testing.calls import check_call
from moekit.testing.cases import make_case, random_weights

# In steps of less than a group's columns, and with partial tiles in each direction. A fused
# quantization needs whole groups of 128 columns.
TILE = GemmTile(16 if INTERPRETED else 64, 128, 64, 2, num_stages=2)
LARGE = replace(TILE, block_m=32 if INTERPRETED else 128)
FORMS = {
    "plain": (TILE, TILE),
    "small": (replace(TILE, block_n=64), replace(TILE, block_n=32, block_k=32)),
    "halves": (replace(LARGE, halves=True),) * 2,
    "swapped": (replace(TILE, swapped=True),) * 2,
}
UNPACKED = sorted(
    name
    for name in moekit.registry().expert("triton").schemes
    if (weight := SCHEMES[name].weight) is None or not weight.packed
)


def in_fp8(scheme: str) -> bool:
    weight = SCHEMES[scheme].weight
    return weight is not None and weight.dtype == "float8_e4m3fn"


@pytest.mark.parametrize("scheme", UNPACKED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [Gathered, Direct, Batched])
def test_forms(device, monkeypatch, scheme, form, kind) -> None:
    if form == "swapped" and not in_fp8(scheme):
        pytest.skip("no rule swaps the operands of other weights")
    sizes = dict(num_experts=3, top_k=2, hidden_size=200, intermediate_size=136)
    problem = moekit.MoEProblem(**sizes, quant=scheme, has_bias=True, device=device.type)
    first, second = FORMS[form]
    use_plan(monkeypatch, kind(first, second, fused=fusable(problem, first.block_n)))
    names = ("local", "triton")
    if kind is Batched:
        names = ("batched_reference", "triton_batched")
    kernel = moekit.compose(problem, *names, workspace=Workspace())
    weights = random_weights(problem)
    packed = kernel.pack(weights)
    tokens = 23 if INTERPRETED else 110  # of which a hot expert's last block is over half full
    for routing in ("masked", "hot") if form == "halves" else ("masked",):
        check_call(kernel, make_case(problem, tokens, routing, 0, weights), packed)


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_wide_tiles_change_no_bit(device, monkeypatch, scheme) -> None:
    """Two tiles side by side, and a tile and a half, which is done singly."""
    for hidden in (256, 192):
        sizes = dict(num_experts=3, top_k=2, hidden_size=hidden, intermediate_size=128)
        problem, outs = moekit.MoEProblem(**sizes, quant=scheme, device=device.type), []
        case, first = make_case(problem, 70), GemmTile(64, 128, 64)
        for second in (GemmTile(64, 64, 64), GemmTile(64, 64, 64, wide=True)):
            use_plan(monkeypatch, Gathered(first, second, fused=True))
            kernel = moekit.compose(problem, "local", "triton")
            outs.append(check_call(kernel, case))
        assert torch.equal(*outs)
