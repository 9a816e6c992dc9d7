"""Read one expert's tensors into their final place, and convert them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.checkpoint.scales import Regrid, requantize, sources
from moekit.checkpoint.schemes import scheme_for
from moekit.checkpoint.share import Piece, Share
from moekit.formats.format import Grid
from moekit.formats.gguf import BlockFormat, dequantize
from moekit.problem.quant import INT4_ZERO, pack_int4, unpack_int4

_CHUNK = 1 << 22  # values that are dequantized at a time


class _Scales(NamedTuple):
    """Stored scales (entries along N, along K) and zero points (rows, entries along K)."""

    scale: Tensor
    zeros: Tensor | None


class Reader:
    """Reads the experts of a `Share`; several threads may call `expert`.

    Args:
        share: The part of a layer to read.
        out: "w13" (L, 2I, H or H / 2) and "w2" (L, H, I or I / 2), which `expert` fills.

    Attributes:
        extras: The other fields of ExpertWeights, for each physical expert.
        faults: Faults that only the tensors' values show.
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
                self._regrid[which] = self._joined(pieces, which == "w2", weight.group)

    def _joined(self, pieces: Sequence[Piece], along_k: bool, group: Grid) -> Regrid:
        """Return the regrid of joined pieces: those of w13 along N, those of w2 along K."""
        first, joined = 0, []
        for piece in pieces:
            extent = piece.columns if along_k else piece.rows
            entries = sources(extent, self.format.group[1 if along_k else 0])
            # Padding has the last block's scale, or its own on a rank without neurons.
            last = entries[-1:] if len(entries) else entries.new_zeros(1)
            entries = torch.cat([entries, last.expand(piece.room - len(entries))])
            joined.append(entries + first)
            first = int(joined[-1][-1]) + 1
        if along_k:
            return Regrid(sources(pieces[0].rows, self.format.group[0]), torch.cat(joined), group)
        columns = sources(pieces[0].columns, self.format.group[1])
        return Regrid(torch.cat(joined), columns, group)

    def expert(self, slot: int) -> None:
        """Read everything of the physical expert ``slot`` of this rank."""
        order = self.order(slot)
        for which in ("w13", "w2"):
            for piece in self.share.of(which):
                self.place(slot, which, piece, order)
            self.finish(slot, which, order)

    def order(self, slot: int) -> Tensor | None:
        """Return the order in which a rank of tensor parallelism takes the expert's neurons.

        In act-order the groups of w2 are scattered over all neurons, and a rank takes whole groups.
        None: the neurons are in order.
        """
        share = self.share
        if share.problem.parallel.tp_size == 1 or share.dequantize:
            return None
        return self._order(share.w2[0], share.experts[slot])

    def finish(self, slot: int, which: str, order: Tensor | None) -> None:
        """Read what belongs to w13 or w2 of a physical expert after its pieces are placed."""
        pieces, expert = self.share.of(which), self.share.experts[slot]
        self._check_shapes(pieces, expert)
        if self.format.dtype and not self.share.dequantize:
            self._scale(slot, which, pieces, self.out[which][slot], order)
        along_n = pieces if which == "w13" else pieces[:1]  # those of w2 have the same rows
        if biases := [self._bias(piece, expert, order) for piece in along_n if piece.bias]:
            bias = torch.cat(biases)
            if not is_finite(bias):
                layer = self.share.layer
                self.faults.append(f"layer {layer}'s {which}_bias holds values that are not finite")
            dtype = self.share.problem.dtype if self.share.dequantize else bias.dtype
            self.extras[slot][f"{which}_bias"] = bias.to(dtype)

    def place(self, slot: int, which: str, piece: Piece, order: Tensor | None) -> None:
        """Read a piece into its rows and columns of w13 or w2 of a physical expert."""
        if not piece.neurons:
            return
        expert, matrix = self.share.experts[slot], self.out[which][slot]
        halved = 2 if matrix.dtype == torch.uint8 else 1
        left, width = piece.left // halved, len(piece.columns) // halved
        out = matrix[piece.at : piece.at + len(piece.rows), left : left + width]
        if self.share.dequantize:
            self._dequantize(piece, expert, out)
        elif order is None:
            self._read(piece, expert, piece.rows, piece.columns, out)
        else:
            self._read_neurons(piece, expert, order, out)

    # -- stored entries -----------------------------------------------------------------------

    def _entries(self, piece: Piece, role: str, expert: int, rows: range, columns: range) -> Tensor:
        """View the entries that cover ``rows`` and ``columns``: (along N, along K, *tail)."""
        part, name, which, shape = self.share.locate(piece, role, expert)
        if part.grid == (-1, -1) and prod(self.checkpoint.shape(name)) == 1:
            return self.checkpoint.view(name, shape=(1, 1))
        extents = {"N": rows, "K": columns}
        cuts = [part.cells(axis, extents[axis]) for axis in part.axes]
        found = self.checkpoint.view(name, *which, *cuts, shape=shape).flatten(0, len(which))
        return found.mT if part.axes == "KN" else found

    def _check_shapes(self, pieces: Sequence[Piece], expert: int) -> None:
        """Compare the shapes that compressed-tensors stores with the expected ones."""
        for piece in pieces:
            if "shape" not in self.share.formats.of(piece.template, expert).parts:
                continue
            said = self._entries(piece, "shape", expert, piece.rows, piece.columns).tolist()
            if said != [piece.n, piece.k]:
                name = self.share.locate(piece, "shape", expert).name
                self.faults.append(f"{name} holds {said}, expected {[piece.n, piece.k]}")

    def _picked(self, piece: Piece, order: Tensor | None) -> Tensor | None:
        """Return the stored rows of the neurons that are counted in ``order``; None: `rows`."""
        if order is None or piece in self.share.w2:
            return None
        return piece.rows_of(order[piece.neurons.start : piece.neurons.stop])

    def _bias(self, piece: Piece, expert: int, order: Tensor | None) -> Tensor:
        """Read the bias of the piece's rows, padded with zeros."""
        picked = self._picked(piece, order)
        rows = piece.rows if picked is None else range(piece.n)
        bias = self._entries(piece, "bias", expert, rows, piece.columns)
        if picked is not None:
            bias = bias[picked]
        return F.pad(bias, (0, piece.room - len(bias))) if piece in self.share.w13 else bias

    # -- weights ------------------------------------------------------------------------------

    def _read_neurons(self, piece: Piece, expert: int, order: Tensor, out: Tensor) -> None:
        """Read the piece's neurons, which are counted in ``order``, of an int4 matrix."""
        whole = torch.empty((piece.n, piece.k // 2), dtype=out.dtype, device="cpu")
        self._read(piece, expert, range(piece.n), range(piece.k), whole)
        picked = self._picked(piece, order)
        if picked is not None:
            out.copy_(whole[picked])
        else:
            neurons = order[piece.neurons.start : piece.neurons.stop]
            out.copy_(pack_int4(unpack_int4(whole)[:, neurons]))

    def _read(self, piece: Piece, expert: int, rows: range, columns: range, out: Tensor) -> None:
        """Read rows and columns of a matrix as the core's tensor."""
        part, name, _, _ = self.share.locate(piece, "weight", expert)
        format, unit = self.share.formats.of(piece.template, expert), part.grid[1]
        core = format.core_weight(self._entries(piece, "weight", expert, rows, columns))
        top = rows.start - part.cells("N", rows).start * part.grid[0]
        left = columns.start - part.cells("K", columns).start * unit
        if format.packed:
            left //= 2
        out.copy_(core[top : top + len(rows), left : left + out.shape[1]])
        if format.biased:
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
        """Read scales, zero points and g_idx of w13 or w2, for the groups of the problem's scheme.

        If a group covers several stored scales, ``matrix`` is rounded to the largest of them.
        """
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
        """Read the scales of the piece's rows and columns.

        Args:
            order: If given, the piece's neurons are counted in it.
            whole_k: Read the scales of all columns.
        """
        format = self.share.formats.of(piece.template, expert)
        rows, columns = piece.rows, range(piece.k) if whole_k else piece.columns
        if not piece.neurons:
            extents = zip((rows, columns), format.group, strict=True)
            entries = [len(torch.unique(sources(extent, group))) for extent, group in extents]
            shape = [max(n, 1) for n in entries]
            return _Scales(torch.ones(shape, dtype=torch.float32, device="cpu"), None)
        picked = self._picked(piece, order)
        if picked is not None:
            rows = range(piece.n)
        stored = self._entries(piece, "scale", expert, rows, columns)
        factor = None
        if "global_scale" in format.parts:
            factor = self._entries(piece, "global_scale", expert, rows, columns).float()
        scale = format.core_scale(stored, factor)
        if not bool(torch.isfinite(scale).all()):
            name = self.share.locate(piece, "scale", expert).name
            self.faults.append(f"{name} holds values that are not finite")
        zeros = self._zeros_of(piece, expert, rows, columns)
        if picked is not None:  # int4: each row has its own scales
            scale, zeros = scale[picked], None if zeros is None else zeros[picked]
        return _Scales(scale, zeros)

    def _zeros_of(self, piece: Piece, expert: int, rows: range, columns: range) -> Tensor | None:
        """Read zero points (rows, entries along K) uint8; None if the weights are symmetric."""
        format = self.share.formats.of(piece.template, expert)
        if "zeros" not in format.parts:
            return None
        zeros = format.core_zeros(self._entries(piece, "zeros", expert, rows, columns))
        top = rows.start % format.parts["zeros"].grid[0]
        zeros = zeros[top : top + len(rows)]
        if format.zero_points:
            return zeros
        if bool((zeros != INT4_ZERO).any()):
            name = self.share.locate(piece, "zeros", expert).name
            self.faults.append(f"{name} is not all {INT4_ZERO}, but the weights are symmetric")
        return None

    # -- act-order ----------------------------------------------------------------------------

    def _g_idx(self, piece: Piece, expert: int) -> Tensor:
        """Read the group of each column, (K,) int64."""
        part, name, which, shape = self.share.locate(piece, "g_idx", expert)
        return self.checkpoint.view(name, *which, shape=shape).flatten().long()

    def _order(self, piece: Piece, expert: int) -> Tensor | None:
        """Return the matrix's columns sorted by group; None if they are in order."""
        format = self.share.formats.of(piece.template, expert)
        if "g_idx" not in format.parts:
            return None
        g_idx = self._g_idx(piece, expert)
        runs = torch.arange(piece.k, device="cpu") // format.group[1]
        # Older versions of llm-compressor fill with -1 what no calibration has ordered.
        if torch.equal(g_idx, runs) or bool((g_idx == -1).all()):
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order], runs):
            name = self.share.locate(piece, "g_idx", expert).name
            self.faults.append(f"{name} does not form groups of {format.group[1]} columns")
            return None
        return order

    def _place_g_idx(
        self, slot: int, which: str, pieces: Sequence[Piece], *, sorted_columns: bool
    ) -> None:
        """Store each column's group in the problem's scheme."""
        weight, expert = self.share.problem.quant.weight, self.share.experts[slot]
        assert weight is not None
        columns = self.out[which].shape[2] * 2
        g_idx = groups = torch.arange(columns, device="cpu") // weight.group[1]
        # Gate and up have the same inputs, so they must have the same order.
        matrices = list({piece.template: piece for piece in pieces}.values())
        order = None if sorted_columns else self._order(matrices[0], expert)
        if order is not None:
            g_idx = torch.empty_like(groups)
            g_idx[order] = groups
        if len({tuple(self._g_idx(p, expert).tolist()) for p in matrices}) > 1:
            names = " and ".join(self.share.locate(p, "g_idx", expert).name for p in matrices)
            self.faults.append(
                f"{names} differ, but gate and up must have the same order; use dequantize=True"
            )
        elif order is not None and not weight.act_order:
            name = self.share.locate(matrices[0], "g_idx", expert).name
            self.faults.append(f"{name} is in act-order; use {self._in_act_order()}")
        self.extras[slot][f"{which}_g_idx"] = g_idx.int()

    def _in_act_order(self) -> str:
        """Return the arguments for weights whose groups turn out not to be in order."""
        p, format = self.share.problem, replace(self.format, act_order=True)
        other = scheme_for(format, p.intermediate_size, p.parallel.tp_size)
        return f"quant={other!r}" if other else "quant='none' and dequantize=True"

    # -- dequantization -----------------------------------------------------------------------

    def _dequantize(self, piece: Piece, expert: int, out: Tensor) -> None:
        """Dequantize the piece in fp32, rounded once to ``out``'s dtype."""
        format = self.share.formats.of(piece.template, expert)
        if isinstance(format, BlockFormat):
            return self._dequantize_blocks(piece, expert, out)
        dtype = self.checkpoint.dtype(self.share.locate(piece, "weight", expert).name)
        assert isinstance(dtype, torch.dtype)
        if dtype == out.dtype:  # not quantized, and nothing to convert
            return self._read(piece, expert, piece.rows, piece.columns, out)
        core = {"int8": torch.int8}.get(format.dtype, torch.uint8 if format.packed else dtype)
        columns = len(piece.columns)
        stored = columns // 2 if format.packed else columns
        q = torch.empty((len(out), stored), dtype=core, device="cpu")
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
        if not is_finite(out):
            name = self.share.locate(piece, "scale", expert).name
            self.faults.append(f"{name} is too large: {self.share.problem.dtype_name} overflows")

    def _dequantize_blocks(self, piece: Piece, expert: int, out: Tensor) -> None:
        """Dequantize whole GGUF blocks of each row, and cut the piece's columns out of them."""
        part, name, _, _ = self.share.locate(piece, "weight", expert)
        block, finite = self.checkpoint.block(name), True
        left = piece.columns.start - part.cells("K", piece.columns).start * part.grid[1]
        step = max(1, _CHUNK // max(len(piece.columns), 1))
        for start in range(0, len(out), step):
            rows = piece.rows[start : start + step]
            values = self._entries(piece, "weight", expert, rows, piece.columns)
            if block:
                values = dequantize(values, block)
            values = values[:, left : left + len(piece.columns)]
            finite = finite and is_finite(values)
            out[start : start + step].copy_(values)
        if not finite:
            self.faults.append(f"{name} holds values that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; true for integers.

    This costs a fraction of the time that reading the tensor takes.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # no infinities, and two NaNs: 0x7F and 0xFF
        return int(tensor.view(torch.int8).max()) < 0x7F and int(_bytes(tensor).max()) < 0xFF
    # Only in fp16 does a sum of usual values overflow.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _bytes(tensor: Tensor) -> Tensor:
    """View 8-bit floats, which some operators do not support, as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
