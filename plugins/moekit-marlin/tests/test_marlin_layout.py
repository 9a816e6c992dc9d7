"""Packing against the operator's own view of the layout."""

import marlin_stand_in as stand_in
import pytest
import torch
from moekit_marlin import layout

SHAPES = [(1, 64, 16), (2, 128, 64), (3, 192, 48), (2, 320, 128)]


def random_values(*shape: int, bits: int) -> torch.Tensor:
    return torch.randint(1 << bits, shape, dtype=torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_where_the_lanes_look(shape, bits):
    q = random_values(*shape, bits=bits)
    before = q.clone()
    packed = layout.pack_weights(q, bits)
    experts, n, k = shape
    assert packed.shape == (experts, k // 16, n * bits // 2) and packed.dtype == torch.int32
    assert torch.equal(stand_in.weights_of(packed, bits), q.long())
    assert torch.equal(q, before)


@pytest.mark.parametrize("bits", [4, 8])
def test_first_words_by_hand(bits):
    """Lane 0 holds column 0 (and 8) of rows 0, 1, 8, 9."""
    q = torch.zeros(1, 64, 16, dtype=torch.uint8)
    for value, (n, k) in enumerate(
        [(0, 0), (0, 1), (0, 8), (0, 9), (8, 0), (8, 1), (8, 8), (8, 9)]
    ):
        q[0, n, k] = value + 1
    words = layout.pack_weights(q, bits).view(torch.uint8)[0, 0, : 4 if bits == 4 else 8]
    if bits == 4:  # nibbles 1 3 5 7 2 4 6 8
        assert words.tolist() == [0x31, 0x75, 0x42, 0x86]
    else:
        assert words.tolist() == [1, 3, 2, 4, 5, 7, 6, 8]


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_scales(groups):
    scale = torch.randn(3, groups, 192)
    permuted = layout.permute_scales(scale)
    assert permuted.is_contiguous()
    assert torch.equal(stand_in.columns_of(permuted, grouped=groups > 1), scale)
    assert not torch.equal(permuted, scale)


@pytest.mark.parametrize("groups", [2, 5])
def test_exponents(groups):
    scale = torch.exp2(torch.randint(-126, 128, (3, groups, 192)).float())
    scale[0, 1, :7] = 0.0  # padding
    packed = layout.pack_exponents(scale)
    assert packed.dtype == torch.uint8 and packed.shape == scale.shape
    assert torch.equal(stand_in.exponents_of(packed), scale)


def test_exponents_by_hand():
    """Lane 0's first word: columns 0, 8, 16 and 24, the middle two swapped."""
    scale = torch.ones(1, 2, 64)
    scale[0, 0, [0, 8, 16, 24]] = torch.tensor([2.0, 4.0, 8.0, 16.0])
    assert layout.pack_exponents(scale)[0, 0, :5].tolist() == [128, 130, 129, 131, 127]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e5m3(dtype):
    """Every byte from 2 on, and zero."""
    bytes = torch.randint(0x80, 0xF8, (2, 3, 192), dtype=torch.int16)
    scale = (bytes << 7).view(torch.float16).float()
    assert scale.min() >= 2 and scale.max() <= 61440
    scale[0, 1, :9] = 0.0
    packed = layout.pack_e5m3(scale)
    assert packed.dtype == torch.uint8 and packed.shape == scale.shape
    assert torch.equal(stand_in.e5m3_of(packed, dtype), scale)


def test_e5m3_as_vllm_packs_it():
    """Lane 0's first word: columns 0, 8, 16 and 24, the middle two swapped; 1.5 * 2**e is E4."""
    scale = torch.full((1, 2, 64), 2.0)
    scale[0, 0, [0, 8, 16, 24]] = torch.tensor([3.0, 6.0, 12.0, 0.0])
    assert layout.pack_e5m3(scale)[0, 0, :5].tolist() == [0x84, 0x94, 0x8C, 0, 0x80]


def test_channels():
    bias = torch.randn(3, 96)
    permuted = layout.permute_channels(bias)
    assert torch.equal(stand_in.columns_of(permuted, grouped=False), bias)


@pytest.mark.parametrize("groups", [1, 3])
def test_zero_points(groups):
    zeros = random_values(2, groups, 128, bits=4)
    packed = layout.pack_zeros(zeros)
    assert packed.shape == (2, groups, 16) and packed.dtype == torch.int32
    assert torch.equal(stand_in.zeros_of(packed), zeros.long())


@pytest.mark.parametrize("bits", [4, 8])
def test_expert_major(bits):
    q, order = random_values(4, 64, 32, bits=bits), torch.tensor([2, 0, 3, 1])
    assert torch.equal(layout.pack_weights(q[order], bits), layout.pack_weights(q, bits)[order])


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
def test_int4_product(group, zero_points):
    """x @ dequantized w, once from plain values, once as the operator reads the packed tensors."""
    experts, n, k = 2, 128, 256
    groups = 1 if group < 0 else k // group
    q = random_values(experts, n, k, bits=4)
    scale = (torch.rand(experts, groups, n) + 0.5).bfloat16()
    zeros = random_values(experts, groups, n, bits=4) if zero_points else None
    offset = 8 if zeros is None else zeros.transpose(1, 2).repeat_interleave(k // groups, 2).float()
    plain = (q.float() - offset) * scale.float().transpose(1, 2).repeat_interleave(k // groups, 2)
    type_id = stand_in.UINT4 if zero_points else stand_in.UINT4B8
    packed = (
        layout.pack_weights(q, 4),
        layout.permute_scales(scale),
        None if zeros is None else layout.pack_zeros(zeros),
    )
    x = torch.randn(5, k)
    read = stand_in.dequantized(*packed, type_id, torch.bfloat16)
    assert torch.equal(torch.einsum("rk,lnk->lrn", x, read), torch.einsum("rk,lnk->lrn", x, plain))
