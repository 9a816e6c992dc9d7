"""One expert's tensors, from the files into their final place, converted on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moekit.checkpoint.files import empty
from moekit.checkpoint.formats import Grid, Part, scale_values
from moekit.checkpoint.scales import Regrid, requantize, sources
from moekit.checkpoint.schemes import scheme_for
from moekit.checkpoint.share import Piece, Share
from moekit.problem.quant import INT4_ZERO, pack_int4, unpack_int4

_CHUNK = 1 << 22  # numbers that are dequantized at a time


class _Stored(NamedTuple):
    part: Part
    name: str
    expert: list[slice]  # selects the expert where one tensor holds them all
    shape: tuple[int, ...]


class _Scales(NamedTuple):
    """As stored: (entries along N, along K); zero points (rows, entries along K)."""

    scale: Tensor
    zeros: Tensor | None


class Reader:
    """Reads the experts of a `Share`. `expert` may run in several threads, one per slot.

    out: "w13" (L, 2I, H or H / 2) and "w2" (L, H, I or I / 2), written slot by slot.
    extras: per slot, what else ExpertWeights has of the expert. faults: what only reading shows.
    """

    def __init__(self, share: Share, out: dict[str, Tensor]) -> None:
        self.share, self.format, self.checkpoint = share, share.format, share.checkpoint
        self.out = out
        self.extras: list[dict[str, Tensor]] = [{} for _ in share.experts]
        self.faults: list[str] = []
        self._regrid: dict[str, Regrid] = {}
        weight = share.problem.quant.weight
        if weight is not None and self.format.dtype:
            for which, pieces in (("w13", share.w13), ("w2", share.w2)):
                self._regrid[which] = self._side_by_side(pieces, which == "w2", weight.group)

    def _side_by_side(self, pieces: Sequence[Piece], beside: bool, group: Grid) -> Regrid:
        """The entries of each row and column of w13, whose pieces lie one below the other, or of
        w2, whose pieces lie ``beside`` each other."""
        first, joined = 0, []
        for piece in pieces:
            extent = piece.columns if beside else piece.rows
            entries = sources(extent, self.format.group[1 if beside else 0])
            # Zeros have the last block's scale; those of a rank without neurons one of their own.
            last = entries[-1:] if len(entries) else torch.zeros(1, dtype=torch.int64)
            entries = torch.cat([entries, last.expand(piece.room - len(entries))])
            joined.append(entries + first)
            first = int(joined[-1][-1]) + 1
        if beside:
            return Regrid(sources(pieces[0].rows, self.format.group[0]), torch.cat(joined), group)
        columns = sources(pieces[0].columns, self.format.group[1])
        return Regrid(torch.cat(joined), columns, group)

    def expert(self, slot: int) -> None:
        """Everything of the expert in ``slot``."""
        share, expert = self.share, self.share.experts[slot]
        self._check_shapes(expert)
        # Where w2's groups are scattered over all neurons, a rank takes those of its groups.
        order = None
        if share.problem.parallel.tp_size > 1 and not share.dequantize:
            order = self._order(share.w2[0], expert)
        for which, pieces in (("w13", share.w13), ("w2", share.w2)):
            matrix = self.out[which][slot]
            for piece in pieces:
                self._place(piece, expert, matrix, order)
            if self.format.dtype and not share.dequantize:
                self._scale(slot, which, pieces, matrix, order)

    def _place(self, piece: Piece, expert: int, matrix: Tensor, order: Tensor | None) -> None:
        """The piece, into its rows and columns of w13 or w2."""
        if not piece.neurons:
            return
        halved = 2 if matrix.dtype == torch.uint8 else 1
        left, width = piece.left // halved, len(piece.columns) // halved
        target = matrix[piece.at : piece.at + len(piece.rows), left : left + width]
        # What does not fill whole rows is not contiguous, as reading wants it.
        out = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        if self.share.dequantize:
            self._dequantize(piece, expert, out)
        elif order is None:
            self._read(piece, expert, piece.rows, piece.columns, out)
        else:
            self._read_neurons(piece, expert, order, out)
        if out is not target:
            target.copy_(out)

    # -- stored entries -----------------------------------------------------------------------

    def _stored(self, piece: Piece, role: str, expert: int) -> _Stored:
        part = self.format.parts[role]
        name = self.share.name(piece.template, expert, part.suffix)
        shape = part.shape(piece.n, piece.k)
        if "{expert}" in piece.template:
            return _Stored(part, name, [], shape)
        stack = (self.share.problem.num_experts, *shape)
        return _Stored(part, name, [slice(expert, expert + 1)], stack)

    def _entries(self, piece: Piece, role: str, expert: int, rows: range, columns: range) -> Tensor:
        """The entries that cover ``rows`` and ``columns``: (along N, along K, *tail)."""
        part, name, which, shape = self._stored(piece, role, expert)
        if part.grid == (-1, -1) and prod(self.checkpoint.shape(name)) == 1:
            return self.checkpoint.read(name, shape=(1, 1))
        extents = {"N": rows, "K": columns}
        cuts = [part.cells(axis, extents[axis]) for axis in part.axes]
        read = self.checkpoint.read(name, *which, *cuts, shape=shape).flatten(0, len(which))
        return read.mT if part.axes == "KN" else read

    def _check_shapes(self, expert: int) -> None:
        """compressed-tensors says the shape once more."""
        if "shape" not in self.format.parts:
            return
        for piece in self.share.pieces:
            said = self._entries(piece, "shape", expert, piece.rows, piece.columns).tolist()
            if said != [piece.n, piece.k]:
                name = self._stored(piece, "shape", expert).name
                self.faults.append(f"{name} says {said}, want {[piece.n, piece.k]}")

    # -- weights ------------------------------------------------------------------------------

    def _read_neurons(self, piece: Piece, expert: int, order: Tensor, out: Tensor) -> None:
        """The piece's neurons, counted in ``order``, of the whole int4 matrix."""
        neurons = order[piece.neurons.start : piece.neurons.stop]
        whole = empty((piece.n, piece.k // 2), out.dtype)
        self._read(piece, expert, range(piece.n), range(piece.k), whole)
        if piece in self.share.w2:
            out.copy_(pack_int4(unpack_int4(whole)[:, neurons]))
        else:
            out.copy_(whole[piece.rows_of(neurons)])

    def _read(self, piece: Piece, expert: int, rows: range, columns: range, out: Tensor) -> None:
        """The matrix's rows and columns in the core's form; straight from the file if that is the
        stored one."""
        part, name, which, shape = self._stored(piece, "weight", expert)
        unit = part.grid[1]
        if self.format.packs_rows or columns.start % unit or len(columns) % unit:
            read = self._entries(piece, "weight", expert, rows, columns).contiguous()
            core = self.format.core_weight(read)
            top = rows.start - part.cells("N", rows).start * part.grid[0]
            left = columns.start - part.cells("K", columns).start * unit
            if self.format.packed:
                left //= 2
            out.copy_(core[top : top + len(rows), left : left + out.shape[1]])
        else:
            dtype = self.checkpoint.dtype(name)
            assert isinstance(dtype, torch.dtype)
            entries = out.view(dtype)
            if part.axes == "KN":
                read = self._entries(piece, "weight", expert, rows, columns)
                _bytes(entries).copy_(_bytes(read))
            else:
                cuts = [part.cells("N", rows), part.cells("K", columns)]
                if part.tail:
                    entries = torch.unflatten(entries, 1, (-1, *part.tail))
                if which:
                    entries = entries.unsqueeze(0)
                self.checkpoint.read_into(entries, name, *which, *cuts, shape=shape)
        if self.format.biased:
            out.view(torch.uint8).bitwise_xor_(128)
        if not is_finite(out):
            self.faults.append(f"{name} holds values that are not finite")

    # -- scales -------------------------------------------------------------------------------

    def _scale(
        self,
        slot: int,
        which: str,
        pieces: Sequence[Piece],
        matrix: Tensor,
        order: Tensor | None,
    ) -> None:
        """Scales, zero points and g_idx of w13 or w2, for the groups of the problem's scheme;
        where a group meets several stored scales, ``matrix`` is rounded to the largest."""
        weight = self.share.problem.quant.weight
        assert weight is not None
        extras, expert = self.extras[slot], self.share.experts[slot]
        stored = [self._scales_of(piece, expert, order) for piece in pieces]
        if weight.per_tensor:
            distinct = {piece.template: s.scale for piece, s in zip(pieces, stored, strict=True)}
            extras[f"{which}_scale"] = torch.cat([s.view(1) for s in distinct.values()])
            return
        dim, regrid = (0 if which == "w13" else 1), self._regrid[which]
        scale = torch.cat([s.scale for s in stored], dim)
        new = regrid(scale)
        extras[f"{which}_scale"] = new
        if regrid.mixes:
            requantize(matrix, scale, regrid, new, weight)
        zeros = [s.zeros for s in stored if s.zeros is not None]
        if zeros:
            extras[f"{which}_zero_points"] = regrid(torch.cat(zeros, dim))
        if "g_idx" in self.format.parts:
            self._place_g_idx(
                slot, which, pieces, sorted_columns=which == "w2" and order is not None
            )

    def _scales_of(
        self, piece: Piece, expert: int, order: Tensor | None = None, whole_k: bool = False
    ) -> _Scales:
        """Of the piece's rows (of its neurons in ``order``) and columns, or all columns."""
        rows, columns = piece.rows, range(piece.k) if whole_k else piece.columns
        if not piece.neurons:
            extents = zip((rows, columns), self.format.group, strict=True)
            entries = [len(torch.unique(sources(extent, group))) for extent, group in extents]
            return _Scales(torch.ones([max(n, 1) for n in entries]), None)
        picked = None
        if order is not None and piece in self.share.w13:
            picked = piece.rows_of(order[piece.neurons.start : piece.neurons.stop])
            rows = range(piece.n)
        stored = self._entries(piece, "scale", expert, rows, columns)
        scale, factor = scale_values(stored), torch.ones(1)
        if "global_scale" in self.format.parts:
            factor = self._entries(piece, "global_scale", expert, rows, columns).float()
            scale = scale / factor if self.format.divides else scale * factor
        low, high = torch.aminmax(scale)
        # e4m3 rounds a group's small scale to zero, and a pruned matrix has no other.
        or_zero = stored.dtype == torch.float8_e4m3fn and bool((factor > 0).all())
        if not ((low >= 0 if or_zero else low > 0) and high < torch.inf):  # also where one is NaN
            name = self._stored(piece, "scale", expert).name
            wrong = "negative or not finite" if or_zero else "not finite and positive"
            self.faults.append(f"{name} holds values that are {wrong}")
        zeros = self._zeros_of(piece, expert, rows, columns)
        if picked is not None:  # int4: each row has scales of its own
            scale, zeros = scale[picked], None if zeros is None else zeros[picked]
        return _Scales(scale, zeros)

    def _zeros_of(self, piece: Piece, expert: int, rows: range, columns: range) -> Tensor | None:
        """uint8 (rows, entries along K)."""
        if "zeros" not in self.format.parts:
            return None
        zeros = self.format.core_zeros(self._entries(piece, "zeros", expert, rows, columns))
        top = rows.start % self.format.parts["zeros"].grid[0]
        zeros = zeros[top : top + len(rows)]
        if self.format.zero_points:
            return zeros
        if bool((zeros != INT4_ZERO).any()):
            name = self._stored(piece, "zeros", expert).name
            self.faults.append(f"{name} is not all {INT4_ZERO}, but the weights are symmetric")
        return None

    # -- act-order ----------------------------------------------------------------------------

    def _g_idx(self, piece: Piece, expert: int) -> Tensor:
        part, name, which, shape = self._stored(piece, "g_idx", expert)
        return self.checkpoint.read(name, *which, shape=shape).flatten().long()

    def _order(self, piece: Piece, expert: int) -> Tensor | None:
        """The matrix's columns, sorted by group; None if groups are runs of columns."""
        if "g_idx" not in self.format.parts:
            return None
        g_idx = self._g_idx(piece, expert)
        runs = torch.arange(piece.k) // self.format.group[1]
        if torch.equal(g_idx, runs):
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order], runs):
            name = self._stored(piece, "g_idx", expert).name
            self.faults.append(f"{name} does not name groups of {self.format.group[1]} columns")
            return None
        return order

    def _place_g_idx(
        self, slot: int, which: str, pieces: Sequence[Piece], *, sorted_columns: bool
    ) -> None:
        """Each column's group in the problem's scheme."""
        weight, expert = self.share.problem.quant.weight, self.share.experts[slot]
        assert weight is not None
        columns = self.out[which].shape[2] * 2
        g_idx = groups = torch.arange(columns) // weight.group[1]
        # Matrices that share their inputs, gate and up, share the order.
        matrices = list({piece.template: piece for piece in pieces}.values())
        order = None if sorted_columns else self._order(matrices[0], expert)
        if order is not None:
            g_idx = torch.empty_like(groups)
            g_idx[order] = groups
        if len({tuple(self._g_idx(p, expert).tolist()) for p in matrices}) > 1:
            names = " and ".join(self._stored(p, "g_idx", expert).name for p in matrices)
            self.faults.append(f"{names} differ: gate and up have one order; use dequantize=True")
        elif order is not None and not weight.act_order:
            name = self._stored(matrices[0], "g_idx", expert).name
            self.faults.append(f"{name} is in act-order; use {self._in_act_order()}")
        self.extras[slot][f"{which}_g_idx"] = g_idx.int()

    def _in_act_order(self) -> str:
        """What to ask for where groups turn out to be no runs of columns."""
        p, format = self.share.problem, replace(self.format, act_order=True)
        other = scheme_for(format, p.intermediate_size, p.parallel.tp_size)
        return f"quant={other!r}" if other else "quant='none' and dequantize=True"

    # -- dequantization -----------------------------------------------------------------------

    def _dequantize(self, piece: Piece, expert: int, out: Tensor) -> None:
        """The piece's values, in fp32 until they are rounded to ``out``'s dtype."""
        format = self.format
        dtype = self.checkpoint.dtype(self._stored(piece, "weight", expert).name)
        assert isinstance(dtype, torch.dtype)
        core = {"int8": torch.int8}.get(format.dtype, torch.uint8 if format.packed else dtype)
        columns = len(piece.columns)
        q = empty((len(out), columns // 2 if format.packed else columns), core)
        self._read(piece, expert, piece.rows, piece.columns, q)
        if not format.dtype:
            out.copy_(q)
            return
        ordered = self._order(piece, expert) is not None
        scales = self._scales_of(piece, expert, whole_k=ordered)
        rows = sources(piece.rows, format.group[0])
        entries = sources(piece.columns, format.group[1])
        if ordered:
            mine = slice(piece.columns.start, piece.columns.stop)
            entries = self._g_idx(piece, expert)[mine]
        step = max(1, _CHUNK // columns)
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            zeros = None if scales.zeros is None else scales.zeros[part][:, entries].float()
            values = format.values(q[part], zeros)
            values *= scales.scale[rows[part]][:, entries]
            out[part].copy_(values)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, at a fraction of what reading the tensor costs; true of
    integers."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # no infinities, and two NaNs: 0x7F and 0xFF
        return int(tensor.view(torch.int8).max()) < 0x7F and int(_bytes(tensor).max()) < 0xFF
    # fp16 is the only one in which a sum of usual numbers overflows.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _bytes(tensor: Tensor) -> Tensor:
    """Bytes instead of 8-bit floats, which not every operator takes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
