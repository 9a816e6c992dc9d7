"""Read one expert's tensors into their final place, and convert them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.checkpoint.schemes import firsts, scheme_for, sources
from moekit.checkpoint.share import Piece, Share
from moekit.formats.format import Format, Grid
from moekit.formats.gguf import BlockFormat, dequantize
from moekit.problem.quant import INT4_ZERO
from moekit.problem.quantize import pack_int4, unpack_int4

_CHUNK = 1 << 22  # values that are dequantized at a time
_NOT_FINITE = "holds values that are not finite"


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
        self.share, self.format, self.tensors = share, share.format, share.checkpoint
        self.out = out
        self.extras: list[dict[str, Tensor]] = [{} for _ in share.experts]
        self.faults: list[str] = []
        # The stored row and column of each scale of w13 and w2.
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}
        weight = share.problem.quant.weight
        if weight is not None and self.format.dtype:
            self._taken = {w: self._joined(share.of(w), w == "w2", weight.group) for w in out}

    def _joined(self, pieces: Sequence[Piece], along_k: bool, group: Grid) -> tuple[Tensor, Tensor]:
        """Return the stored row and column of each scale per ``group`` of the joined pieces.

        They are joined along N for w13, and along K for w2.
        """
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
            rows, columns = sources(pieces[0].rows, self.format.group[0]), torch.cat(joined)
        else:
            rows, columns = torch.cat(joined), sources(pieces[0].columns, self.format.group[1])
        return firsts(rows, group[0]), firsts(columns, group[1])

    def expert(self, slot: int) -> None:
        """Read everything of the physical expert ``slot`` of this rank."""
        for which in ("w13", "w2"):
            for piece in self.share.of(which):
                self.place(slot, which, piece)
            self.finish(slot, which)

    def place(self, slot: int, which: str, piece: Piece) -> None:
        """Read a piece into its rows and columns of w13 or w2 of a physical expert."""
        if not piece.neurons:
            return
        expert, matrix = self.share.experts[slot], self.out[which][slot]
        n = 1 if self.share.dequantize else self.format.per_byte
        left, width = piece.left // n, len(piece.columns) // n
        out = matrix[piece.at : piece.at + len(piece.rows), left : left + width]
        if self.share.dequantize:
            self._dequantize(piece, expert, out)
        elif which == "w2" and (picked := self._picked(piece, expert)) is not None:
            whole = unpack_int4(self._weights(piece, expert, piece.rows, range(piece.k)))
            out.copy_(pack_int4(whole[:, picked]))
        else:
            rows, mine = self._rows(piece, expert)
            out.copy_(self._weights(piece, expert, rows, piece.columns)[mine])

    def finish(self, slot: int, which: str) -> None:
        """Read what belongs to w13 or w2 of a physical expert after its pieces are placed."""
        pieces, expert = self.share.of(which), self.share.experts[slot]
        if self.format.dtype and not self.share.dequantize:
            self._scale(slot, which)
        along_n = pieces if which == "w13" else pieces[:1]  # the pieces of w2 have the same rows
        if self.share.problem.has_bias:
            bias = torch.cat([self._bias(piece, expert) for piece in along_n])
            if not is_finite(bias):
                layer = self.share.layer
                self.faults.append(f"layer {layer}'s {which}_bias holds values that are not finite")
            dtype = self.share.problem.dtype if self.share.dequantize else bias.dtype
            self.extras[slot][f"{which}_bias"] = bias.to(dtype)

    # -- stored entries -----------------------------------------------------------------------

    def _fault(self, piece: Piece, role: str, expert: int, what: str) -> None:
        self.faults.append(f"{self.share.locate(piece, role, expert).name} {what}")

    def _format(self, piece: Piece, expert: int) -> Format:
        return self.share.formats.of(piece.template, expert)

    def _entries(self, piece: Piece, role: str, expert: int, rows: range, columns: range) -> Tensor:
        """View the entries that cover ``rows`` and ``columns``: (along N, along K, *tail)."""
        part, name, which, shape = self.share.locate(piece, role, expert)
        if part.grid == (-1, -1) and prod(self.tensors.shape(name)) == 1:
            return self.tensors.view(name, shape=(1, 1))
        extents = {"N": rows, "K": columns}
        cuts = [part.cells(axis, extents[axis]) for axis in part.axes]
        found = self.tensors.view(name, *which, *cuts, shape=shape).flatten(0, len(which))
        return found.mT if part.axes == "KN" else found

    def _weights(self, piece: Piece, expert: int, rows: range, columns: range) -> Tensor:
        """Return rows and columns of a matrix as the core's tensor, a view if it is stored so."""
        part, format = self.share.locate(piece, "weight", expert).part, self._format(piece, expert)
        core = format.core_weight(self._entries(piece, "weight", expert, rows, columns))
        top = rows.start - part.cells("N", rows).start * part.grid[0]
        left = columns.start - part.cells("K", columns).start * part.grid[1]
        n = format.per_byte
        core = core[top : top + len(rows), left // n : (left + len(columns)) // n]
        if format.biased:
            core = (core.view(torch.uint8) ^ 128).view(core.dtype)
        if not is_finite(core):
            self._fault(piece, "weight", expert, _NOT_FINITE)
        return core

    def _bias(self, piece: Piece, expert: int) -> Tensor:
        """Read the bias of the piece's rows, padded with zeros."""
        rows, mine = self._rows(piece, expert)
        bias = self._entries(piece, "bias", expert, rows, piece.columns)[mine]
        return F.pad(bias, (0, piece.room - len(bias))) if piece in self.share.w13 else bias

    # -- scales -------------------------------------------------------------------------------

    def _scale(self, slot: int, which: str) -> None:
        """Read scales, zero points and g_idx of w13 or w2, for the groups of the scheme."""
        weight, pieces = self.share.problem.quant.weight, self.share.of(which)
        assert weight is not None
        extras, expert = self.extras[slot], self.share.experts[slot]
        scales, zeros = zip(*(self._scales_of(piece, expert) for piece in pieces), strict=True)
        if weight.per_tensor:
            distinct = {p.template: scale.view(1) for p, scale in zip(pieces, scales, strict=True)}
            extras[f"{which}_scale"] = torch.cat(list(distinct.values()))
            return
        dim, (rows, columns) = (0 if which == "w13" else 1), self._taken[which]
        extras[f"{which}_scale"] = torch.cat(scales, dim)[rows][:, columns]
        if held := [each for each in zeros if each is not None]:
            extras[f"{which}_zero_points"] = torch.cat(held, dim)[rows][:, columns]
        if "g_idx" in self.format.parts:
            extras[f"{which}_g_idx"] = self._placed_g_idx(which, expert)

    def _scales_of(
        self, piece: Piece, expert: int, whole_k: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read the scales (entries along N, along K) of a piece, and zero points (rows, along K).

        whole_k: read the scales of all columns.
        """
        format = self._format(piece, expert)
        rows, columns = piece.rows, range(piece.k) if whole_k else piece.columns
        if not piece.neurons:
            extents = zip((rows, columns), format.group, strict=True)
            entries = [len(torch.unique(sources(extent, group))) for extent, group in extents]
            shape = [max(n, 1) for n in entries]
            return torch.ones(shape, dtype=torch.float32, device="cpu"), None
        rows, mine = self._rows(piece, expert)
        factor = None
        if "global_scale" in format.parts:
            factor = self._entries(piece, "global_scale", expert, rows, columns).float()
        scale = format.core_scale(self._entries(piece, "scale", expert, rows, columns), factor)
        if not bool(torch.isfinite(scale).all()):
            self._fault(piece, "scale", expert, _NOT_FINITE)
        zeros = self._zeros_of(piece, expert, rows, columns)
        return scale[mine], None if zeros is None else zeros[mine]

    def _zeros_of(self, piece: Piece, expert: int, rows: range, columns: range) -> Tensor | None:
        """Read zero points (rows, entries along K) uint8; None if the weights are symmetric."""
        format = self._format(piece, expert)
        if "zeros" not in format.parts:
            return None
        zeros = format.core_zeros(self._entries(piece, "zeros", expert, rows, columns))
        top = rows.start % format.parts["zeros"].grid[0]
        zeros = zeros[top : top + len(rows)]
        if format.zero_points:
            return zeros
        if bool((zeros != INT4_ZERO).any()):
            what = f"is not all {INT4_ZERO}, but the weights are symmetric"
            self._fault(piece, "zeros", expert, what)
        return None

    # -- act-order ----------------------------------------------------------------------------

    def _g_idx(self, piece: Piece, expert: int) -> Tensor:
        """Read the group of each column, (K,) int64."""
        _, name, which, shape = self.share.locate(piece, "g_idx", expert)
        return self.tensors.view(name, *which, shape=shape).flatten().long()

    def _order(self, piece: Piece, expert: int) -> Tensor | None:
        """Return the matrix's columns sorted by group; None if they are in order."""
        format = self._format(piece, expert)
        if "g_idx" not in format.parts:
            return None
        g_idx = self._g_idx(piece, expert)
        runs = torch.arange(piece.k, device="cpu") // format.group[1]
        # Older versions of llm-compressor fill with -1 what no calibration has ordered.
        if torch.equal(g_idx, runs) or bool((g_idx == -1).all()):
            return None
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order], runs):
            what = f"does not form groups of {format.group[1]} columns"
            self._fault(piece, "g_idx", expert, what)
            return None
        return order

    def _picked(self, piece: Piece, expert: int) -> Tensor | None:
        """Return the stored rows of w13, or columns of w2, that the piece has in act-order.

        The groups of w2 are scattered over all neurons. So a rank of tensor parallelism counts its
        neurons in the order of their groups. None: `Piece.rows` and `Piece.columns` hold.
        """
        share, along_k = self.share, piece in self.share.w2
        if share.dequantize or share.problem.parallel.tp_size == 1:
            return None
        if (order := self._order(share.w2[0], expert)) is None:
            return None
        extent, neurons = piece.columns if along_k else piece.rows, piece.neurons
        per = len(extent) // len(neurons)  # 2 where rows of gate and up alternate
        first = extent.start - per * neurons.start + per * order[neurons.start : neurons.stop]
        return (first[:, None] + torch.arange(per, device="cpu")).flatten()

    def _rows(self, piece: Piece, expert: int) -> tuple[range, Tensor | slice]:
        """Return stored rows to read, and which of them are the piece's."""
        picked = self._picked(piece, expert) if piece in self.share.w13 else None
        return (piece.rows, slice(None)) if picked is None else (range(piece.n), picked)

    def _placed_g_idx(self, which: str, expert: int) -> Tensor:
        """Return each column's group in the problem's scheme, int32."""
        weight = self.share.problem.quant.weight
        assert weight is not None
        columns = self.out[which].shape[2] * 2
        groups = torch.arange(columns, dtype=torch.int32, device="cpu") // weight.group[1]
        # Gate and up have the same inputs, so they must have the same order.
        first, *others = {piece.template: piece for piece in self.share.of(which)}.values()
        # A rank of tensor parallelism has the columns of w2 sorted; see `_picked`.
        sorts = which == "w2" and self.share.problem.parallel.tp_size > 1
        order = None if sorts else self._order(first, expert)
        stored = self._g_idx(first, expert)
        if others and not torch.equal(stored, self._g_idx(others[0], expert)):
            other = self.share.locate(others[0], "g_idx", expert).name
            what = f"and {other} differ, but both need the same order; use dequantize=True"
            self._fault(first, "g_idx", expert, what)
        elif order is not None and not weight.act_order:
            what = f"is in act-order; use {self._in_act_order()}"
            self._fault(first, "g_idx", expert, what)
        elif order is not None:
            return torch.empty_like(groups).index_copy_(0, order, groups)
        return groups

    def _in_act_order(self) -> str:
        """Return the arguments for weights whose groups turn out not to be in order."""
        p, format = self.share.problem, replace(self.format, act_order=True)
        other = scheme_for(format, p.intermediate_size, p.parallel.tp_size)
        return f"quant={other!r}" if other else "quant='none' and dequantize=True"

    # -- dequantization -----------------------------------------------------------------------

    def _dequantize(self, piece: Piece, expert: int, out: Tensor) -> None:
        """Dequantize the piece in fp32, rounded once to ``out``'s dtype."""
        format = self._format(piece, expert)
        if not format.dtype:
            out.copy_(self._weights(piece, expert, piece.rows, piece.columns))
            return
        values = self._values(piece, expert)
        step = max(1, _CHUNK // len(piece.columns))
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            out[part].copy_(values(part))
        if is_finite(out):
            return
        if isinstance(format, BlockFormat):
            return self._fault(piece, "weight", expert, _NOT_FINITE)
        overflow = f"is too large: {self.share.problem.dtype_name} overflows"
        self._fault(piece, "scale", expert, overflow)

    def _values(self, piece: Piece, expert: int) -> Callable[[slice], Tensor]:
        """Return a function that computes some of the piece's rows in fp32."""
        format = self._format(piece, expert)
        if isinstance(format, BlockFormat):
            left = piece.columns.start % format.weight.grid[1]
            mine = slice(left, left + len(piece.columns))
            blocks = self._entries(piece, "weight", expert, piece.rows, piece.columns)
            return lambda part: dequantize(blocks[part], format.block)[:, mine]
        q = self._weights(piece, expert, piece.rows, piece.columns)
        ordered = self._order(piece, expert) is not None
        scale, zeros = self._scales_of(piece, expert, whole_k=ordered)
        rows = sources(piece.rows, format.group[0])
        entries = sources(piece.columns, format.group[1])
        if ordered:
            entries = self._g_idx(piece, expert)[piece.columns.start : piece.columns.stop]

        def values(part: slice) -> Tensor:
            zero = None if zeros is None else zeros[part][:, entries].float()
            return format.values(q[part], zero) * scale[rows[part]][:, entries]

        return values


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; true for integers.

    This costs a fraction of the time that reading the tensor takes.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # no infinities, and two NaNs: 0x7F and 0xFF
        signed, bytes_ = tensor.view(torch.int8), tensor.view(torch.uint8)
        return int(signed.max()) < 0x7F and int(bytes_.max()) < 0xFF
    # Only in fp16 does a sum of usual values overflow.
    total = tensor.sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
