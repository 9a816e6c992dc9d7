"""Packing by hand, as the library's lanes read it. The kit reads it through the stand-in."""

import pytest
import torch
from moekit_marlin import layout


@pytest.mark.parametrize(
    ("bits", "want"),
    [(4, [0x31, 0x75, 0x42, 0x86]), (8, [1, 3, 2, 4, 5, 7, 6, 8])],  # nibbles 1 3 5 7 2 4 6 8
)
def test_first_words(bits, want):
    """Lane 0 holds column 0 (and 8) of rows 0, 1, 8, 9."""
    q = torch.zeros(1, 64, 16, dtype=torch.uint8)
    places = [(0, 0), (0, 1), (0, 8), (0, 9), (8, 0), (8, 1), (8, 8), (8, 9)]
    for value, (n, k) in enumerate(places):
        q[0, n, k] = value + 1
    before = q.clone()
    packed = layout.pack_weights(q, bits)
    assert packed.shape == (1, 1, 32 * bits) and packed.dtype == torch.int32
    assert packed.view(torch.uint8)[0, 0, : len(want)].tolist() == want
    assert torch.equal(q, before)


@pytest.mark.parametrize(
    ("pack", "scales", "want"),
    [
        (layout.pack_exponents, [1.0, 2.0, 4.0, 8.0, 16.0], [128, 130, 129, 131, 127]),
        # 1.5 * 2**e is E4, as vllm packs it
        (layout.pack_e5m3, [2.0, 3.0, 6.0, 12.0, 0.0], [0x84, 0x94, 0x8C, 0, 0x80]),
    ],
)
def test_byte_scales(pack, scales, want):
    """Lane 0's first word: columns 0, 8, 16 and 24, the middle two swapped."""
    other, *first = scales
    scale = torch.full((1, 2, 64), other)
    scale[0, 0, [0, 8, 16, 24]] = torch.tensor(first)
    assert pack(scale)[0, 0, :5].tolist() == want


def test_channels():
    """Lane t of a row holds the columns 2 * t and 2 * t + 1 of each 8."""
    permuted = layout.permute_channels(torch.arange(64)).tolist()
    assert permuted[:8] == [0, 1, 8, 9, 16, 17, 24, 25] and permuted[8:10] == [2, 3]
    grouped = layout.permute_scales(torch.arange(64.0).expand(1, 2, 64))[0, 0]
    assert grouped[:9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1]
