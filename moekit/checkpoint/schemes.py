"""Map stored scales to a rank's share, and find the scheme that computes with a stored format.

A rank's share may begin within a stored block, while its own blocks are counted from its first row
and column. (`neuron_ranges` and `MoEProblem.local_neurons` avoid that where they can.) Along each
axis, `sources` returns the stored entry of each position. A new entry takes the scale of the stored
entry that it is in; a share where it would cover several is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from moekit.errors import WeightsError
from moekit.formats.format import Format
from moekit.problem.quant import SCHEMES, OperandQuant, QuantScheme


def refines(stored: tuple[int, int], group: tuple[int, int]) -> bool:
    """Return whether scales per ``stored``, repeated, are also scales per ``group``."""
    return all(s < 0 or (g > 0 and s % g == 0) for s, g in zip(stored, group, strict=True))


def sources(extent: range, group: int) -> Tensor:
    """Return each position's entry (len(extent),) int64, relative to the first one's."""
    positions = torch.arange(extent.start, extent.stop, device="cpu")
    if group < 0:
        return torch.zeros_like(positions)
    return positions // group - extent.start // group


def firsts(entries: Tensor, group: int) -> Tensor:
    """Return the entry at the first position of each ``group`` of positions; -1 for all of them."""
    return entries[:: group if group > 0 else len(entries)]


def cuts_a_cell(extents: Sequence[range], stored: int, group: int) -> bool:
    """Return whether a group of the joined ``extents`` covers several stored entries."""
    positions = [torch.arange(extent.start, extent.stop, device="cpu") for extent in extents]
    entries = torch.cat(positions) // (stored if stored > 0 else extents[-1].stop)
    first = firsts(entries, group)
    repeats = group if group > 0 else len(entries)
    return not torch.equal(first.repeat_interleave(repeats)[: len(entries)], entries)


def neuron_ranges(
    total: int, tp_size: int, rank: int, stored: tuple[int, int], group: tuple[int, int]
) -> tuple[range, ...]:
    """Return the neurons of a rank of tensor parallelism, in order.

    They are one run of ``total / tp_size`` if that is a multiple of the block size of neurons
    (along N of w13 and K of w2). Otherwise, if the remainder divides the block size, they are
    whole blocks and a part of one of the last blocks. The sum over the ranks does not depend on
    which neurons each of them has.
    """
    share = total // tp_size
    block = max((g for s, g in zip(stored, group, strict=True) if s > 1), default=1)
    whole, rest = divmod(share, block)
    if tp_size == 1 or not rest or block % rest:
        return (range(rank * share, (rank + 1) * share),)
    start = tp_size * whole * block + rank * rest
    runs = (range(rank * whole * block, (rank + 1) * whole * block), range(start, start + rest))
    return tuple(run for run in runs if run)


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


def mismatch(format: Format, scheme: QuantScheme) -> str:
    """Return why ``scheme`` does not compute with weights in ``format``; "" if it does.

    Act-order is not compared, because checkpoints also claim it for columns that are in order.
    """
    weight = scheme.weight
    if weight is None:
        return "" if not format.dtype else "the scheme has unquantized weights"
    if weight.dtype != format.dtype or weight.codes != format.codes:
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


def misfit(format: Format, scheme: QuantScheme, intermediate_size: int, tp_size: int) -> str:
    """Return why ``scheme`` cannot hold weights in ``format``, and what to use; "" if it can."""
    weight = scheme.weight
    other = scheme_for(format, intermediate_size, tp_size)
    instead = [f"quant={other!r}"] * bool(other)
    plain = ["quant='none' and dequantize=True"] if format.dtype else []
    if why := mismatch(format, scheme):
        why = f"the experts are stored as {format}, which does not fit quant={scheme.name!r}: {why}"
    elif cuts_groups(format, weight, intermediate_size, tp_size):
        assert weight is not None
        why = (
            f"tp_size={tp_size} leaves {intermediate_size // tp_size} columns of w2 to a rank, "
            f"which cuts {weight.dtype} groups of {weight.group[1]}"
        )
        instead.append("expert parallelism")
    return why and f"{why}; use {' or '.join(instead + plain)}"


def scheme_of(
    format: Format, quant: QuantScheme | None, intermediate_size: int, tp_size: int = 1
) -> QuantScheme:
    """Return ``quant`` if it computes with weights in ``format``; by default, the best one.

    Raises:
        WeightsError: ``quant`` does not, or moekit has no scheme for the format.
    """
    if quant is not None:
        if mismatch(format, quant):
            raise WeightsError(misfit(format, quant, intermediate_size, tp_size))
        return quant
    if (name := scheme_for(format, intermediate_size, tp_size)) is not None:
        return SCHEMES[name]
    cut = scheme_for(format, intermediate_size) is not None
    operand = format.activation
    why = "moekit has no scheme for them"
    if cut:
        why = f"tp_size={tp_size} cuts its groups of {format.group[1]} columns of w2"
    elif operand is not None:
        scale = f"{'static' if operand.static else 'dynamic'} {operand.scale_dtype} scale"
        why += f" with {operand.dtype} activations, a {scale} per {operand.group}"
    instead = "use expert parallelism" if cut else "choose another scheme for them with quant=..."
    raise WeightsError(
        f"the experts are stored as {format}: {why}; {instead}, or load them with dequantize=True"
    )
