"""Find faults of expert weights in shapes, dtypes, scales, zero points and act-order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.problem import quant
from moekit.problem.problem import DTYPES, MoEProblem
from moekit.problem.quant import OperandQuant, QuantScheme


def raise_faults(faults: list[str]) -> None:
    """Raise WeightsError if there are faults."""
    if faults:
        raise WeightsError("expert weights do not fit: " + "; ".join(faults))


def check(weights: Any, problem: MoEProblem, num_experts: int | None) -> None:
    """Implement `ExpertWeights.check`."""
    if weights.w13.is_meta:
        raise WeightsError("the weights are meta tensors, which hold no values: load them")
    H, scheme = problem.hidden_size, problem.quant
    L = problem.num_local_experts if num_experts is None else num_experts
    rows, inner = problem.w13_rows, problem.local_intermediate_size
    found = [
        f"{name} is on {tensor.device}, w13 on {weights.w13.device}"
        for name, tensor in weights.tensors().items()
        if tensor.device != weights.w13.device
    ]
    raise_faults(found)  # before any value is read
    for name, want in (("w13", (L, rows, H)), ("w2", (L, H, inner))):
        found += _matrix_faults(weights, name, want, problem)
    if weights.num_experts == problem.num_experts != L and num_experts is None:
        found.append(
            f"this rank holds {L} of the {weights.num_experts} experts: pass "
            "weights.select(local_experts), which layers and problems have"
        )
    if found and inner * problem.parallel.tp_size != problem.intermediate_size:
        held = problem.local_neurons
        found.append(
            f"{scheme.name} needs whole blocks of gate, up and w2: this rank's weights are "
            f"neurons {held.start} to {held.stop} of {problem.intermediate_size}, padded with "
            f"zeros to {inner} before they are quantized"
        )
    for name, shape in (("w13_bias", (L, rows)), ("w2_bias", (L, H))):
        bias = getattr(weights, name)
        if (bias is not None) != problem.has_bias:
            state = "given" if bias is not None else "missing"
            found.append(f"{name} is {state} but the problem has has_bias={problem.has_bias}")
        elif bias is not None and tuple(bias.shape) != shape:
            found.append(f"{name} has shape {tuple(bias.shape)}, expected {shape}")
        elif bias is not None and not bias.is_floating_point():
            found.append(f"{name} is {bias.dtype}, expected {problem.dtype}")
    for name in ("w13_input_scale", "w2_input_scale"):
        scale = getattr(weights, name)
        if scale is None and scheme.static:
            found.append(f"{name} is missing: scheme {scheme.name} has static activations")
        elif scale is not None and scale.numel() not in (1, L):
            found.append(f"{name} has shape {tuple(scale.shape)}, expected a scalar or ({L},)")
        elif scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
            found.append(f"{name} holds values that are not finite and positive")
    if weights.interleaved and not problem.activation.gated:
        found.append(f"interleaved w13, but {problem.activation.name} has no gate")
    raise_faults(found)


def odd_columns(name: str, columns: int, operand: OperandQuant) -> list[str]:
    """Return the fault of a matrix whose last byte of a row would not be full."""
    bits, per_byte = operand.codes.bits, operand.codes.per_byte
    if columns % per_byte == 0:
        return []
    return [f"{name} has {columns} columns, and a byte packs {per_byte} of {bits} bits"]


def _matrix_faults(
    weights: Any, name: str, want: tuple[int, int, int], problem: MoEProblem
) -> list[str]:
    """Return the faults of a matrix, its scale, its zero points and its g_idx."""
    scheme, tensor = problem.quant, getattr(weights, name)
    found, stored, dtype = [], want, problem.dtype
    if (operand := scheme.weight) is not None:
        dtype = operand.torch_dtype
        stored = (*want[:2], -(-want[2] // operand.codes.per_byte))
        found += odd_columns(name, want[2], operand)
    found += _int4_faults(weights, name, want, scheme)
    if tuple(tensor.shape) != stored:
        found.append(f"{name} has shape {tuple(tensor.shape)}, expected {stored}")
    elif tensor.dtype != dtype:
        found.append(f"{name} is {tensor.dtype}, expected {dtype} for scheme {scheme.name}")
    elif operand is not None:
        found += _scale_faults(weights, name, want, operand, problem.activation.gated)
    return found


def _scale_faults(
    weights: Any,
    name: str,
    shape: tuple[int, int, int],
    operand: OperandQuant,
    gated: bool,
) -> list[str]:
    scale, full = getattr(weights, f"{name}_scale"), _full_scale(shape, operand)
    allowed = [full[:n] for n in (3, 2, 1) if full[n:] == (1,) * (3 - n)]
    if name == "w13" and operand.per_tensor and gated:
        allowed.insert(2, (full[0], 2))
    if tuple(scale.shape) not in allowed:
        wanted = " or ".join(map(str, allowed))
        return [f"{name}_scale has shape {tuple(scale.shape)}, expected {wanted}"]
    if scale.dtype not in DTYPES.values():
        return [f"{name}_scale is {scale.dtype}, expected fp32 numbers"]
    if not bool(scale.isfinite().all()):
        return [f"{name}_scale holds values that are not finite"]
    if operand.microscaled and not bool((torch.frexp(scale.float()).mantissa == 0.5).all()):
        return [f"{name}_scale holds values that are not powers of two, which the scheme requires"]
    return []


def _full_scale(shape: tuple[int, int, int], operand: OperandQuant) -> tuple[int, int, int]:
    """Return the shape of the scale of an (L, N, K) weight, with all three dimensions."""
    return (shape[0], *operand.scale_shape(*shape[1:]))


def _int4_faults(
    weights: Any, name: str, shape: tuple[int, int, int], scheme: QuantScheme
) -> list[str]:
    """Return the faults of zero points and g_idx."""
    operand, found = scheme.weight, []
    L, rows, columns = shape
    zeros, g_idx = (getattr(weights, f"{name}_{what}") for what in ("zero_points", "g_idx"))
    needs_zeros = operand is not None and operand.zero_points
    if (zeros is not None) != needs_zeros:
        state = "given" if zeros is not None else "missing"
        found.append(f"{name}_zero_points are {state} for scheme {scheme.name}")
    elif zeros is not None and operand is not None:
        full = _full_scale(shape, operand)
        if tuple(zeros.shape) != full or zeros.dtype != torch.uint8:
            state = f"{tuple(zeros.shape)} {zeros.dtype}"
            found.append(f"{name}_zero_points are {state}, expected {full} torch.uint8")
        elif int(zeros.max()) > (most := 2**operand.codes.bits - 1):
            found.append(f"{name}_zero_points reach {int(zeros.max())}, expected at most {most}")
    if g_idx is not None:
        if operand is None or not operand.act_order:
            ordered = f"{scheme.name}_act_order"
            other = f"use {ordered}, or " if ordered in quant.SCHEMES else ""
            found.append(
                f"{name}_g_idx is given, but scheme {scheme.name} has no act-order: {other}leave "
                "it out if groups are runs of columns"
            )
        elif tuple(g_idx.shape) != (L, columns) or g_idx.is_floating_point():
            state = f"{tuple(g_idx.shape)} {g_idx.dtype}"
            found.append(f"{name}_g_idx is {state}, expected {(L, columns)} torch.int32")
        elif not in_order(g_idx.sort(dim=1).values, operand.group[1]):
            low, high = (int(v) for v in torch.aminmax(g_idx))
            found.append(
                f"{name}_g_idx names groups {low} to {high}, expected each of "
                f"0..{operand.scale_shape(rows, columns)[1] - 1} for {operand.group[1]} columns "
                "(the last one may have fewer); tensor parallelism must cut between groups, as "
                "load_experts does"
            )
    return found


def in_order(g_idx: Tensor, group: int) -> bool:
    """Return whether the groups that ``g_idx`` (L, K) names are runs of ``group`` columns."""
    columns = torch.arange(g_idx.shape[1], device=g_idx.device)
    return bool((g_idx == columns // group).all())
