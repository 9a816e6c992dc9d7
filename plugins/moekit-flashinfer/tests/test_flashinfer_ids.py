"""The plugin's own kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from moekit_flashinfer.kernels import dequantize_rows, local_ids, reroute

from moekit.problem import quant
from moekit.problem.quantize import quantize


def random_ids(rows: int, slots: int, experts: int, device: torch.device) -> torch.Tensor:
    ids = torch.rand(rows, experts).argsort(dim=1)[:, :slots].int()
    ids[torch.rand(ids.shape) < 0.3] = -1
    return ids.to(device)


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_rows_beyond_a_sources_count_have_no_expert(slots, device):
    counts = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    ids = torch.randint(0, 8, (15, slots), dtype=torch.int32, device=device)
    ids[8] = 2**31 - 1  # garbage of an earlier call
    got = local_ids(ids, 0, 8, counts).view(3, 5, slots)
    for source, count in enumerate(counts.tolist()):
        assert torch.equal(got[source, :count], ids.view(3, 5, slots)[source, :count])
        assert bool((got[source, count:] == -1).all())


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_reroute_names_no_new_expert(rows, slots, device):
    ids = random_ids(rows, slots, 16, device)
    got = reroute(ids, nowhere=9)
    assert bool((got >= 0).all())
    for before, after in zip(ids.tolist(), got.tolist(), strict=True):
        used = {expert for expert in before if expert >= 0}
        assert set(after) == (used or {9})
        assert all(a == b for a, b in zip(after, before, strict=True) if b >= 0)


def test_dequantized_rows_quantize_to_the_same_values(device):
    """The library quantizes what travelled quantized once more; nothing is lost by it."""
    operand = quant.SCHEMES["fp8_block"].activation
    x = torch.randn(33, 512, device=device) * torch.rand(33, 1, device=device)
    q, scale = quantize(x, operand)
    out = torch.empty(33, 512, dtype=torch.bfloat16, device=device)
    dequantize_rows(q, scale, torch.zeros(33, 1, dtype=torch.int32, device=device), out)
    again, _ = quantize(out.float(), operand)
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
