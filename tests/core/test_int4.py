"""int4 weights: representation, checkpoint packings, zero points, act-order, the torch experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moekit import SCHEMES, ExpertWeights, MoEProblem
from moekit.errors import WeightsError
from moekit.problem.convert import quantize_with_zeros
from moekit.problem.int4 import AWQ_ORDER, IN_ORDER, repack_rows, unpack_rows
from moekit.problem.quantize import dequantize, pack_int4, quantize, unpack_int4

INT4 = sorted(n for n, s in SCHEMES.items() if s.weight and s.weight.dtype == "int4")
ACT_ORDER = [name for name in INT4 if SCHEMES[name].weight.act_order]
INT4 = [name for name in INT4 if name not in ACT_ORDER]


def problem(scheme: str, **changes) -> MoEProblem:
    sizes = dict(num_experts=4, top_k=2, hidden_size=128, intermediate_size=96)
    return MoEProblem(**{**sizes, **changes}, quant=scheme, dtype=torch.float32, device="cpu")


def make_weights(p: MoEProblem) -> ExpertWeights:
    L, H, inner = p.num_local_experts, p.hidden_size, p.local_intermediate_size
    w13, w2 = torch.randn(L, p.w13_rows, H), torch.randn(L, H, inner)
    return ExpertWeights(w13 + 0.5, w2 - 0.5).quantize(p.quant)


def in_act_order(weights: ExpertWeights, p: MoEProblem) -> tuple[ExpertWeights, ExpertWeights]:
    """(the same groups on shuffled columns, what they dequantize from: plain columns)."""
    changes = {}
    for name in ("w13", "w2"):
        q = unpack_int4(getattr(weights, name))
        L, _, K = q.shape
        order = torch.stack([torch.randperm(K) for _ in range(L)])
        g_idx = order // p.quant.weight.group[1]
        changes[name] = pack_int4(q.gather(2, order[:, None].expand(q.shape)))
        changes[f"{name}_g_idx"] = g_idx.int()
    return replace(weights, **changes), weights


def test_two_columns_a_byte() -> None:
    values = torch.arange(16, dtype=torch.uint8).view(1, 16)
    packed = pack_int4(values)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_int4(packed), values)


@pytest.mark.parametrize("scheme", INT4)
@pytest.mark.parametrize("columns", [64, 200, 256])
def test_round_trip_within_half_a_step(scheme: str, columns: int) -> None:
    quant = SCHEMES[scheme].weight
    x = torch.randn(3, 40, columns) + torch.randn(3, 40, 1)
    if quant.zero_points:
        q, scale, zeros = quantize_with_zeros(x, quant)
        assert zeros.shape == scale.shape and zeros.dtype == torch.uint8
    else:
        (q, scale), zeros = quantize(x, quant), None
    assert q.shape == (3, 40, columns // 2) and q.dtype == torch.uint8
    assert scale.shape == (3, *quant.scale_shape(40, columns))
    back = dequantize(q, scale, quant, zero_points=zeros)
    group = columns if quant.group[1] < 0 else quant.group[1]
    step = scale.repeat_interleave(group, dim=2)[..., :columns]
    # a rounded zero point may push the ends of the range out by half a step more
    assert ((back - x).abs() <= step * (1.01 if quant.zero_points else 0.501)).all()
    assert float(((back - x).abs() / step).mean()) < 0.26


def test_words_of_eight_rows() -> None:
    values = torch.randint(16, (3, 16, 64), dtype=torch.uint8)
    for order in (IN_ORDER, AWQ_ORDER):
        shifts = 4 * torch.tensor(order)
        words = (values.long().unflatten(1, (2, 8)) << shifts[:, None]).sum(2)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        assert torch.equal(unpack_rows(words, order), values)
        assert torch.equal(repack_rows(words, order), pack_int4(values))


@pytest.mark.parametrize("scheme", ACT_ORDER)
def test_act_order(scheme: str) -> None:
    """Shuffled columns dequantize to the shuffled matrix."""
    p = problem(scheme)
    shuffled, plain = in_act_order(make_weights(p), p)
    shuffled.check(p)
    got, want = (w.canonical(p).dequantize(p.quant) for w in (shuffled, plain))
    assert got.w13_g_idx is None and got.w13_zero_points is None
    for name in ("w13", "w2"):
        a, b = getattr(got, name), getattr(want, name)
        assert not torch.equal(a, b)
        assert torch.equal(a.sort(dim=2).values, b.sort(dim=2).values)


@pytest.mark.parametrize(
    ("scheme", "change", "said"),
    [
        ("int4_w4a16_g32_zp", lambda w: dict(w2_zero_points=None), "w2_zero_points are missing"),
        ("int4_w4a16_g32", lambda w: dict(w13_zero_points=w.w13), "w13_zero_points are given"),
        (
            "int4_w4a16_g32_zp",
            lambda w: dict(w2_zero_points=w.w2_zero_points[:, :1]),
            "w2_zero_points are .4, 1, 3. torch.uint8, expected",
        ),
        ("int4_w4a16_g32_zp", lambda w: dict(w2_zero_points=w.w2_zero_points + 99), "at most 15"),
        (
            "int4_w4a16_channel",
            lambda w: dict(w2_g_idx=torch.zeros(4, 96, dtype=torch.int32)),
            "scheme int4_w4a16_channel has no act-order: leave it out",
        ),
        (
            "int4_w4a16_g32_zp",
            lambda w: dict(w13_g_idx=torch.arange(128).expand(4, -1) // 32),
            "w13_g_idx is given, .*: use int4_w4a16_g32_zp_act_order, or leave it out",
        ),
        (
            "int4_w4a16_g32_act_order",
            lambda w: dict(w2_g_idx=torch.full((4, 96), 3)),
            r"w2_g_idx names groups 3 to 3, expected each of 0\.\.2 for 32 columns",
        ),
        (
            "int4_w4a16_g64_act_order",
            lambda w: dict(w2_g_idx=torch.arange(96).expand(4, -1) % 2),
            r"w2_g_idx names groups 0 to 1, expected each .*cut between groups",
        ),
        (
            "int4_w4a16_g32_act_order",
            lambda w: dict(w2_g_idx=torch.zeros(4, 95)),
            "w2_g_idx is \\(4, 95\\)",
        ),
        ("int4_w4a16_g32", lambda w: dict(w13=w.w13[..., 1:]), "w13 has shape .4, 192, 63."),
    ],
)
def test_faults_are_named(scheme: str, change, said: str) -> None:
    p = problem(scheme)
    weights = make_weights(p)
    weights.check(p)
    with pytest.raises(WeightsError, match=said):
        replace(weights, **change(weights)).check(p)
