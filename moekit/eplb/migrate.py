"""Packed weights follow a new placement: bytes travel between ranks, tensors stay where they are.

A packed tensor is a row of bytes per expert. All experts of a migration move together, a column of
bytes after the other: each rank stages the column of the experts that leave its slots, one
all-to-all delivers, the arrivals are written. What is overwritten has been staged before, so slots
may trade experts in any cycle, and the buffers are as small as the columns are narrow.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights
from moekit.errors import GroupMismatch, InvalidInput, PeerFailed, WeightsError
from moekit.problem.placement import Placement
from moekit.runtime.agreement import exchange, reason_of
from moekit.runtime.group import has_backend
from moekit.untrusted.arguments import GROUP, accept, instance, optional
from moekit.untrusted.arguments import size as size_kind


@dataclass(frozen=True)
class MigrationReport:
    """What a migration did on all ranks together.

    received: slots filled from another rank; bytes_moved: their bytes (under tensor parallelism,
    of this rank's slice). copied: slots filled from their own rank. seconds: wall time here, the
    device's work included.
    """

    received: int
    copied: int
    bytes_moved: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.received} experts moved between ranks and {self.copied} within one, "
            f"{self.bytes_moved / 2**20:.2f} MiB in {self.seconds * 1e3:.1f} ms"
        )


class HalfMoved(WeightsError):
    """A transfer broke off: what a layer has packed is half old and half new."""


_KINDS = {
    "packed": instance("PackedWeights", PackedWeights),
    "old": instance("a Placement", Placement),
    "new": instance("a Placement", Placement),
    "group": optional(GROUP),
    "staging_bytes": size_kind(1, 2**62),
}


@torch.inference_mode()
def migrate(
    packed: PackedWeights,
    old: Placement,
    new: Placement,
    group: dist.ProcessGroup | None = None,
    *,
    staging_bytes: int = 2**27,
) -> MigrationReport:
    """Moves the experts of ``packed`` from ``old`` to ``new`` slots on all ranks, between calls.

    In place: addresses stay, so captured CUDA graphs stay valid. (What a backend packs without a
    copy is overwritten in the caller's own tensors, too.) Whatever was derived per expert moves
    along. Shared tensors stay, and must be equal on all ranks.

    Collective over ``group``, where a rank is ep_rank * tp_size + tp_rank; None: one rank.
    staging_bytes: most that a rank allocates for it, if that is a byte for every expert it moves.

    Raises before anything moves: InvalidInput, WeightsError or GroupMismatch on the ranks at fault
    and PeerFailed on the others; GroupMismatch on all if they disagree on placements or the form
    of the weights. HalfMoved when the transfer breaks off: then load the weights again.
    """
    started = time.perf_counter()
    accept(_KINDS, locals(), InvalidInput)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    tp_size = max(1, size // old.ep_size)
    me, rank_of = rank // tp_size, old.rank_of
    error: Exception | None = None
    try:
        _check(packed, old, new, group)
        rows = [_rows(name, packed[name], old.slots(me)) for name in sorted(packed.experts)]
        moves, first = _plan(old, new), old.slots(me).start
        leaving = [(rank_of[t], s - first) for s, t in moves if rank_of[s] == me]
        arriving = sorted((rank_of[s], t - first) for s, t in moves if rank_of[t] == me)
        busiest = max(Counter(rank_of[slot] for move in moves for slot in move).values(), default=1)
        width = min(max(1, staging_bytes // busiest), max(row.shape[1] for row in rows))
        staging = rows[0].new_empty((len(leaving) + len(arriving)) * width)
    except Exception as found:  # whatever it is, no rank may wait for this one
        error = found
    common = {"old placement": digest(old), "new placement": digest(new)}
    agree(group, common | _form(packed) | {"staging_bytes": str(staging_bytes)}, error)

    # Sizes of the all-to-all: ranks of one tensor-parallel slice trade with each other.
    sends, receives = [0] * size, [0] * size
    for counts, others in ((sends, leaving), (receives, arriving)):
        for other, _ in others:
            counts[other * tp_size + rank % tp_size] += 1
    try:
        for column in (c for row in rows if moves for c in torch.split(row, width, dim=1)):
            n = column.shape[1]
            out = staging[: len(leaving) * n].view(len(leaving), n)
            got = staging[out.numel() :][: len(arriving) * n].view(len(arriving), n)
            for staged, (_, slot) in zip(out, leaving, strict=True):
                staged.copy_(column[slot])
            if group is None:
                got.copy_(out)
            else:
                dist.all_to_all_single(got, out, receives, sends, group=group)
            for staged, (_, slot) in zip(got, arriving, strict=True):
                column[slot].copy_(staged)
    except RuntimeError as fault:
        raise HalfMoved(
            f"the migration broke off: {fault}. The layer's weights are half old and half new: "
            "load them again"
        ) from fault
    if rows[0].device.type != "cpu":
        torch.get_device_module(rows[0].device).synchronize(rows[0].device)
    received = sum(rank_of[source] != rank_of[target] for source, target in moves)
    moved = received * sum(row.shape[1] for row in rows)
    return MigrationReport(received, len(moves) - received, moved, time.perf_counter() - started)


def _plan(old: Placement, new: Placement) -> list[tuple[int, int]]:
    """(source, target) slots, by target, of all slots whose expert changes.

    The source is on the target's rank if possible, else on the rank that sends least so far.
    """
    moves, sends = [], [0] * old.ep_size
    for target, expert in enumerate(new.physical_to_logical):
        if old.physical_to_logical[target] != expert:
            holders = [(old.rank_of[slot], slot) for slot in old.replicas[expert]]
            mine = old.rank_of[target]
            rank, source = min(holders, key=lambda h: (h[0] != mine, sends[h[0]], h[1]))
            sends[rank] += rank != mine
            moves.append((source, target))
    return moves


def _rows(name: str, tensor: Tensor, slots: range) -> Tensor:
    """A packed tensor (L, ...) as each expert's bytes, (L, bytes) uint8, in the same memory."""
    strides = tensor.stride()
    inner = sorted(range(1, tensor.dim()), key=lambda dim: -strides[dim])
    try:
        row = tensor.permute(0, *inner).view(len(slots), tensor[0].numel()).view(torch.uint8)
        if len(slots) > 1 and row.stride(0) < row.shape[1]:
            raise RuntimeError("experts overlap")
    except (RuntimeError, IndexError) as error:
        raise WeightsError(
            f"packed {name}, {tuple(tensor.shape)} with strides {strides}, is not one "
            f"dense block for each of {len(slots)} experts, so they cannot move: {error}"
        ) from error
    return row


def _check(
    packed: PackedWeights, old: Placement, new: Placement, group: dist.ProcessGroup | None
) -> None:
    was, wanted = ((p.num_experts, len(p.physical_to_logical), p.ep_size) for p in (old, new))
    if was != wanted:
        raise InvalidInput(
            f"placements of {was} and {wanted} (experts, slots, ranks): these cannot change"
        )
    if not packed.experts:
        raise WeightsError(f"what {packed.backend!r} packed has no tensor with an expert dimension")
    device, size = next(iter(packed.experts.values())).device, 1 if group is None else group.size()
    if size % old.ep_size or (group is not None and not has_backend(group, device.type)):
        backends = "" if group is None else f", with backends {dist.get_backend_config(group)},"
        raise GroupMismatch(
            f"a process group of {size}{backends} cannot move weights on {device} between "
            f"{old.ep_size} expert-parallel ranks; pass the group of the layer's ranks"
        )


def _form(packed: PackedWeights) -> dict[str, str]:
    """What ranks must have in common to exchange experts of ``packed``."""
    tensors = {n: (t.dtype, t.shape[1:], t.stride()[1:]) for n, t in sorted(packed.experts.items())}
    shared = {name: tensor.tolist() for name, tensor in sorted(packed.shared.items())}
    return {"backend": packed.backend, "packed tensors": str(tensors), "shared": str(shared)}


def digest(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def agree(
    group: dist.ProcessGroup | None, mine: Mapping[str, str], error: Exception | None
) -> None:
    """Raises ``error``; PeerFailed where others have one; GroupMismatch where ``mine`` differ."""
    if group is not None:
        said = json.dumps([dict(mine), None if error is None else reason_of(error)])
        everyone = [json.loads(text) for text in exchange("move experts", said, group)]
        failed = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in enumerate(everyone) if why)
        differ = {name: [other[name] for other, _ in everyone] for name in mine}
        differ = {name: values for name, values in differ.items() if len(set(values)) > 1}
        if failed and error is None:
            raise PeerFailed(f"{failed}. No rank moved anything")
        if differ and error is None:
            raise GroupMismatch(f"no rank moved anything, as ranks have different {differ}")
    if error is not None:
        raise error
