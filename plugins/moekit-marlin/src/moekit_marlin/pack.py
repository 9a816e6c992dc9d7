"""ExpertWeights -> what the operator reads: stored values, padding of I, act-order, scales.

Per expert and GEMM: ``w13``, ``w2`` int32 (L, K / 16, N * bits / 2); ``*_scale`` (L, G, N) in the
problem's dtype, or e8m0 or E5M3 as uint8 (torch can do little with its own e8m0); ``*_global`` fp32
(L,) for nvfp4; ``*_zeros`` int32 (L, G, N / 8); ``*_bias`` (L, N); ``w13_columns`` int32 (L, H).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.errors import WeightsError
from moekit.plugin import ExpertWeights, MoEProblem, OperandQuant, PackedWeights, unpack_int4

from . import layout
from .sizes import group_of, padded_intermediate


def _type_id(exponent: int, mantissa: int, signed: bool, bias: int, finite: bool, nan: int) -> int:
    """Return the library's number of a format (vllm/scalar_type.py: ScalarType.id)."""
    id, offset = 0, 0
    for field, width in ((exponent, 8), (mantissa, 8), (signed, 1), (bias, 32), (finite, 1)):
        id |= int(field) << offset
        offset += width
    return id | nan << offset


@dataclass(frozen=True)
class Stored:
    """A weight format of the operator: value = (stored - offset) * scale."""

    type_id: int
    bits: int
    offset: int = 0
    # The operator reads fp8 with the exponent bias of the 16-bit dtype: the scale has the rest.
    scale_exponent: int = 0
    has_zeros: bool = False
    e8m0: bool = False
    e5m3: bool = False


def stored(operand: OperandQuant, dtype: torch.dtype) -> Stored:
    if operand.dtype == "float8_e4m3fn":
        exponent = 127 - 7 if dtype == torch.bfloat16 else 15 - 7
        return Stored(_type_id(4, 3, True, 0, True, 2), 8, scale_exponent=exponent)
    if operand.dtype == "float4_e2m1":
        power = operand.microscaled
        return Stored(_type_id(2, 1, True, 0, True, 0), 4, e8m0=power, e5m3=not power)
    if operand.dtype == "int8":
        return Stored(_type_id(0, 8, False, 128, False, 1), 8, offset=128)
    assert operand.dtype == "int4"
    if operand.zero_points:
        return Stored(_type_id(0, 4, False, 0, False, 1), 4, has_zeros=True)
    return Stored(_type_id(0, 4, False, 8, False, 1), 4, offset=8)


def pack(weights: ExpertWeights, problem: MoEProblem, backend: str) -> PackedWeights:
    """Return canonical ``weights`` (gate and up in halves, 3-D scales) in the operator's layout."""
    operand = problem.quant.weight
    assert operand is not None
    kind = stored(operand, problem.dtype)
    inner = padded_intermediate(problem)
    halves = 2 if problem.activation.gated else 1
    w13_columns, w2_columns = map(_column_order, (weights.w13_g_idx, weights.w2_g_idx))
    experts: dict[str, Tensor] = {}
    # w2's columns are w13's rows of gate and of up; sorting those rows sorts the activations.
    for name, columns, rows, split, n, k in (
        ("w13", w13_columns, w2_columns, halves, halves * inner, problem.hidden_size),
        ("w2", w2_columns, None, 1, problem.hidden_size, inner),
    ):
        values: Tensor = getattr(weights, name)
        packed = []
        for e in range(weights.num_experts):
            q_NK = _stored_values(values[e], kind)
            if columns is not None:
                q_NK = q_NK[:, columns[e]]
            row_order = None if rows is None else rows[e : e + 1]
            q_NK = _place_rows(q_NK[None], row_order, split, n, kind.offset)
            q_NK = F.pad(q_NK, (0, k - q_NK.shape[2]), value=kind.offset)
            packed.append(layout.pack_weights(q_NK, kind.bits))
        experts[name] = torch.cat(packed)

        scale_LNG = _per_row(getattr(weights, f"{name}_scale"), operand, values.shape[1])
        groups = k // group_of(problem) if group_of(problem) > 0 else 1
        scale_LGN = _pad_groups(_place_rows(scale_LNG, rows, split, n), groups)
        if kind.e8m0:
            experts[f"{name}_scale"] = layout.pack_exponents(scale_LGN)
        elif kind.e5m3:
            scale_LGN, factor_L = _split_scales(scale_LGN, problem, name)
            experts[f"{name}_scale"] = layout.pack_e5m3(scale_LGN)
            experts[f"{name}_global"] = factor_L
        else:
            scale_LGN = _scale_in(scale_LGN, kind, problem, name)
            experts[f"{name}_scale"] = layout.permute_scales(scale_LGN)
        if kind.has_zeros:
            zeros_LNG = getattr(weights, f"{name}_zero_points")
            zeros_LGN = _pad_groups(_place_rows(zeros_LNG, rows, split, n), groups)
            experts[f"{name}_zeros"] = layout.pack_zeros(zeros_LGN)
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            bias_LN1 = _place_rows(bias.to(problem.dtype)[..., None], rows, split, n)
            experts[f"{name}_bias"] = layout.permute_channels(bias_LN1[..., 0])
    if w13_columns is not None:
        experts["w13_columns"] = w13_columns.int()
    return PackedWeights(backend, experts)


def _place_rows(x: Tensor, order_LR: Tensor | None, split: int, n: int, fill: int = 0) -> Tensor:
    """Sort the rows of each of ``split`` parts by ``order_LR``: (L, N, C) -> (L, n, C), padded."""
    parts = x.unflatten(1, (split, -1))
    if order_LR is not None:
        parts = parts.gather(2, order_LR[:, None, :, None].expand(*parts.shape))
    missing = n // split - parts.shape[2]
    return F.pad(parts, (0, 0, 0, missing), value=fill).flatten(1, 2)


def _stored_values(w: Tensor, kind: Stored) -> Tensor:
    """Return one expert's weight (N, K or K / 2) as uint8 (N, K), as the operator stores it."""
    return unpack_int4(w) if kind.bits == 4 else w.view(torch.uint8) ^ kind.offset


def _per_row(scale: Tensor, operand: OperandQuant, rows: int) -> Tensor:
    """Return a canonical scale (L, N or N / group or 1, G) as (L, N, G)."""
    group = operand.group[0]
    if group < 0:
        return scale.expand(-1, rows, -1)
    return scale.repeat_interleave(group, dim=1)[:, :rows] if group > 1 else scale


def _pad_groups(x_LNG: Tensor, groups: int) -> Tensor:
    """Pad and transpose (L, N, G) to (L, groups, N)."""
    return F.pad(x_LNG, (0, groups - x_LNG.shape[2])).transpose(1, 2)


def _scale_in(scale: Tensor, kind: Stored, problem: MoEProblem, name: str) -> Tensor:
    """Return scales in the problem's dtype, in which the operator multiplies weights."""
    result = (scale.float() * 2.0**kind.scale_exponent).to(problem.dtype)
    if not bool(torch.isfinite(result).all()):
        most = torch.finfo(problem.dtype).max * 2.0**-kind.scale_exponent
        other = "" if problem.dtype == torch.bfloat16 else "bfloat16, or "
        raise WeightsError(
            f"{name}_scale reaches {float(scale.max()):g}, but Marlin supports {most:g} at most "
            f"in {problem.dtype_name}: use {other}another backend"
        )
    return result


# E5M3's largest binade; with eight mantissas, one of its values is the largest scale's.
_TOP = 2.0**15
_LEAST = 2.0  # see `layout.pack_e5m3`
_EXACT = 1e-5  # fp32 products of a scale and a global scale are off by less


def _split_scales(scale_LGN: Tensor, problem: MoEProblem, name: str) -> tuple[Tensor, Tensor]:
    """Split nvfp4 scales into values of E5M3 (L, G, N) and the operator's factors (L,), fp32.

    A checkpoint's scale is an e4m3 number times an expert's global scale. Neither is known here,
    but the largest scale's mantissa has three bits: of the eight global scales that this allows,
    the right one makes all scales exact. Scales below 2**-14 of an expert's largest may become 0,
    as in vLLM.
    """
    exponent = 126 if problem.dtype == torch.bfloat16 else 14  # biases of bf16 or fp16, and of e2m1
    values = scale_LGN.float().clone()
    factors = torch.zeros(len(values), dtype=torch.float32, device="cpu")
    for expert, scale in enumerate(values):
        largest = float(scale.max())
        if not largest:
            continue
        tried = [_e5m3(scale / largest * (_TOP * (1 + i / 8))) for i in range(8)]
        errors = [error for _, error in tried]
        best = errors.index(min(errors))
        if errors[best] > _EXACT:
            raise WeightsError(
                f"the {name} scales of local expert {expert} are no e4m3 numbers times one global "
                "scale, which Marlin needs; gate and up may have different global scales: quantize "
                "them with one, or use another backend"
            )
        scale.copy_(tried[best][0])
        factors[expert] = largest / (_TOP * (1 + best / 8)) * 2.0**exponent
    return values, factors.to(scale_LGN.device)


def _e5m3(x: Tensor) -> tuple[Tensor, float]:
    """Return ``x`` (at most 61440) with three bits of mantissa, and the largest relative error."""
    bits = x.to(torch.float16).view(torch.int16)
    rounded = ((bits + 64) & -128).view(torch.float16).float()
    kept = rounded >= _LEAST
    error = torch.where(kept, (rounded / x - 1).abs(), 0.0)
    return torch.where(kept, rounded, 0.0), float(error.max())


def _column_order(g_idx: Tensor | None) -> Tensor | None:
    """Return the columns (L, K) int64 sorted by act-order group; None if already sorted."""
    if g_idx is None:
        return None
    order = g_idx.argsort(dim=1, stable=True)
    same = torch.arange(order.shape[1], device=order.device)
    return None if bool((order == same).all()) else order
