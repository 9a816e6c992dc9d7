"""Find the scheme of moekit that computes with the weights as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from moekit.checkpoint.scales import cuts_a_cell, neuron_ranges, refines
from moekit.errors import WeightsError
from moekit.formats.format import Format
from moekit.problem.quant import SCHEMES, OperandQuant, QuantScheme


def scheme_for(format: Format, intermediate_size: int, tp_size: int = 1) -> str | None:
    """Return the scheme with the fewest scales that represents the stored weights exactly.

    It does so on every rank of tensor parallelism, and is in act-order if the format is.

    Returns:
        The scheme's name, or None if there is none.
    """
    if not format.dtype:
        return "none"
    fitting = [
        scheme
        for scheme in SCHEMES.values()
        if scheme.activation == format.activation
        and not mismatch(format, scheme)
        and not cuts_groups(format, scheme.weight, intermediate_size, tp_size)
        and (scheme.weight is None or scheme.weight.act_order == format.act_order)
    ]

    def coarseness(scheme: QuantScheme) -> tuple[bool, int]:
        assert scheme.weight is not None
        areas = [1 << 20 if g < 0 else g for g in scheme.weight.group]
        return scheme.weight.group == format.group, prod(areas)

    return max(fitting, key=coarseness).name if fitting else None


def described(formats: Sequence[Format]) -> str:
    """Return the names of formats, for errors."""
    return " and ".join(sorted(map(str, formats)))


def mismatch(format: Format, scheme: QuantScheme) -> str:
    """Return why ``scheme`` does not compute with weights in ``format``; "" if it does.

    Act-order is not compared, because checkpoints also claim it for columns that are in order.
    """
    weight = scheme.weight
    if weight is None:
        return "" if not format.dtype else "the scheme has unquantized weights"
    if weight.dtype != format.dtype:
        return f"the scheme has {weight.dtype} weights"
    if weight.zero_points != format.zero_points:
        return f"the scheme has {'' if weight.zero_points else 'no '}zero points"
    if weight.scale_dtype not in ("float32", format.scale_dtype):
        return f"the scheme has {weight.scale_dtype} scales"
    if not refines(format.group, weight.group):
        return f"the scheme has one scale per {weight.group}"
    return ""


def cuts_groups(
    format: Format, weight: OperandQuant | None, intermediate_size: int, tp_size: int
) -> bool:
    """Return whether a rank of tensor parallelism has two stored groups of w2 in one group.

    Blocks of rows and columns are never cut; see `MoEProblem.local_neurons`.
    """
    if weight is None or weight.group[0] != 1:
        return False
    return any(
        cuts_a_cell(
            neuron_ranges(intermediate_size, tp_size, rank, format.group, weight.group),
            format.group[1],
            weight.group[1],
        )
        for rank in range(tp_size)
    )


def no_scheme(formats: Sequence[Format], intermediate_size: int, tp_size: int) -> str:
    """Say why no scheme computes with the stored weights, and what to do."""
    format, *others = formats
    instead = "load them with dequantize=True"
    if others:
        why = "moekit has no scheme for several formats"
    elif scheme_for(format, intermediate_size) is not None:
        why = f"tp_size={tp_size} cuts its groups of {format.group[1]} columns of w2"
        instead = f"use expert parallelism, or {instead}"
    elif (operand := format.activation) is not None:
        when = "static" if operand.static else "dynamic"
        why = (
            f"moekit has no scheme for them with {operand.dtype} activations, a {when} "
            f"{operand.scale_dtype} scale per {operand.group}"
        )
        instead = f"choose another scheme for these weights with quant=..., or {instead}"
    else:
        why = "moekit has no scheme for them"
    return f"the experts are stored as {described(formats)}: {why}; {instead}"


def scheme_of(
    format: Format, quant: QuantScheme | None, intermediate_size: int, tp_size: int = 1
) -> QuantScheme:
    """Return ``quant`` if it computes with weights in ``format``; by default, the best one.

    Raises:
        WeightsError: ``quant`` does not, or moekit has no scheme for the format.
    """
    if quant is None:
        name = scheme_for(format, intermediate_size, tp_size)
        if name is None:
            raise WeightsError(no_scheme([format], intermediate_size, tp_size))
        return SCHEMES[name]
    if why := mismatch(format, quant):
        raise WeightsError(
            f"the experts are stored as {format}, which does not fit quant={quant.name!r}: {why}; "
            "leave quant out, or pass dequantize=True"
        )
    return quant
