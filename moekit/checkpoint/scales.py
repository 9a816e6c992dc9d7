"""Map scales from the grid of the stored matrix to the grid of one rank's share.

A rank's share may begin within a stored block, while its own blocks are counted from its first row
and column. (`neuron_ranges` and `MoEProblem.local_neurons` avoid that where they can.) Along each
axis, `sources` returns the stored entry of each position. A new entry that covers one stored entry
takes its scale. One that covers several takes the largest of their scales, without signs, and 8-bit
values under a smaller scale are rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moekit.problem.quant import OperandQuant

_CHUNK = 256  # rows that are rounded at a time


def refines(stored: tuple[int, int], group: tuple[int, int]) -> bool:
    """Return whether scales per ``stored``, repeated, are also scales per ``group``."""
    return all(s < 0 or (g > 0 and s % g == 0) for s, g in zip(stored, group, strict=True))


def sources(extent: range, group: int) -> Tensor:
    """Return each position's entry (len(extent),) int64, relative to the first one's."""
    positions = torch.arange(extent.start, extent.stop, device="cpu")
    if group < 0:
        return torch.zeros_like(positions)
    return positions // group - extent.start // group


def cuts_a_cell(extents: Sequence[range], stored: int, group: int) -> bool:
    """Return whether a group of the joined ``extents`` covers several stored entries."""
    first = [0 if stored < 0 else extent.start // stored for extent in extents]
    entries = [sources(extent, stored) + n for extent, n in zip(extents, first, strict=True)]
    return _mixed(_cells(torch.cat(entries), group))


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


class Regrid:
    """Maps scales of stored entries to scales per ``group`` of an (n, k) matrix.

    Args:
        rows: (n,), the stored entry of each row.
        columns: (k,), the stored entry of each column.
        group: Rows and columns of a new entry; -1 for all of them.

    Attributes:
        mixes: Some new entries cover several stored ones.
    """

    def __init__(self, rows: Tensor, columns: Tensor, group: tuple[int, int]) -> None:
        self.rows, self.columns = rows, columns
        self._cells = tuple(_cells(s, g) for s, g in zip((rows, columns), group, strict=True))
        self._mixed = tuple(_mixed(cells) for cells in self._cells)
        self.mixes = any(self._mixed)

    def __call__(self, stored: Tensor) -> Tensor:
        """Return the new entries, each the largest of the ``stored`` (N, K) ones it covers."""
        for dim, (cells, mixed) in enumerate(zip(self._cells, self._mixed, strict=True)):
            if not mixed:
                if len(cells) != stored.shape[dim]:  # otherwise they equal the stored ones
                    stored = stored.index_select(dim, cells[:, 0])
                continue
            covered = stored.index_select(dim, cells.flatten())
            stored = torch.unflatten(covered, dim, tuple(cells.shape)).abs().amax(dim + 1)
        return stored


def _cells(source: Tensor, group: int) -> Tensor:
    """Return the stored entries that each new one covers, (new entries, group)."""
    n = len(source)
    group = n if group < 0 else min(group, n)
    return torch.cat([source, source[-1:].expand(-n % group)]).view(-1, group)


def _mixed(cells: Tensor) -> bool:
    return bool((cells != cells[:, :1]).any())


def requantize(
    q: Tensor, stored: Tensor, regrid: Regrid, new_scale: Tensor, quant: OperandQuant
) -> None:
    """Round the 8-bit ``q`` (n, k) from its ``stored`` scales to ``new_scale``, in place.

    Values whose scale does not change keep their bits.
    """
    new_rows, new_columns = (
        sources(range(extent), group) for extent, group in zip(q.shape, quant.group, strict=True)
    )
    for start in range(0, len(q), _CHUNK):
        part = slice(start, start + _CHUNK)
        old = stored[regrid.rows[part]][:, regrid.columns]
        new = new_scale[new_rows[part]][:, new_columns]
        if torch.equal(old, new):
            continue
        ratio = torch.where(new == 0, 0, old / new).to(q.device)
        values = (q[part].float() * ratio).clamp_(-quant.qmax, quant.qmax)
        q[part] = (values.round_() if quant.dtype == "int8" else values).to(q.dtype)
