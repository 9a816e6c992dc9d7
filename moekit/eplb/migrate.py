"""Move packed weights to a new placement: bytes travel between ranks, tensors stay in place.

A packed tensor is a row of bytes for each expert. All experts of a migration move together, one
column of bytes at a time: each rank copies the column of the experts that it sends to a staging
buffer, one all-to-all exchanges the buffers, and each rank writes what it received. Everything
that is overwritten was staged before, so experts may trade places in any cycle, and the buffers
are as small as the columns are narrow.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights
from moekit.errors import GroupMismatch, InvalidInput, MoekitError, PeerFailed, WeightsError
from moekit.layer.replicas import Placement
from moekit.runtime.checks import device_of
from moekit.runtime.group import has_backend, same
from moekit.runtime.workspace import settle
from moekit.untrusted.code import describe


@dataclass(frozen=True)
class MigrationReport:
    """The result of a migration, summed over all ranks.

    Attributes:
        received: Experts that came from another rank.
        copied: Experts that came from their own rank.
        bytes_moved: Bytes of the received experts; under tensor parallelism, of this rank's slice.
        seconds: Wall time on this rank, including the device's work.
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


class MigrationInterrupted(WeightsError):
    """A transfer failed: the layer's packed weights are a mix of both placements."""


@torch.inference_mode()
def migrate(
    packed: PackedWeights,
    old: Placement,
    new: Placement,
    group: dist.ProcessGroup | None = None,
    *,
    staging_bytes: int = 2**27,
) -> MigrationReport:
    """Move the experts of ``packed`` from their ``old`` to their ``new`` placement, in place.

    Collective over ``group``; no call may be in flight. Addresses do not change, so captured CUDA
    graphs stay valid. (If a backend packs without copying, the caller's own tensors are
    also overwritten.) Everything that was derived for an expert moves with it. Shared tensors do
    not move and must be equal on all ranks.

    Args:
        group: The layer's ranks, where a rank is ``ep_rank * tp_size + tp_rank``. None: one rank.
        staging_bytes: Limit of a rank's staging buffer. At least one byte for each expert that
            the rank moves is needed.

    Raises:
        InvalidInput, WeightsError, GroupMismatch: On the ranks whose arguments are wrong, before
            anything moves.
        PeerFailed: On the other ranks.
        GroupMismatch: On all ranks, if placements or packed tensors differ.
        MigrationInterrupted: The transfer failed. Load the weights again.
    """
    started = time.perf_counter()
    error: Exception | None = None
    common = {"old placement": digest(old), "new placement": digest(new)}
    try:
        common |= _form(packed) | {"staging_bytes": str(staging_bytes)}
        _check(packed, old, new, group)
        transfer = _Transfer(packed, old, new, group, staging_bytes)
    except Exception as found:  # of any kind: the other ranks must not wait for this one
        error = found
    agree(group, common, error)
    try:
        transfer.run()
    except RuntimeError as fault:
        raise MigrationInterrupted(
            f"the migration failed: {fault}. The layer's weights are a mix of both placements: "
            "load them again"
        ) from fault
    settle(transfer.staging.device)
    moves, rank_of = transfer.moves, old.rank_of
    received = sum(rank_of[source] != rank_of[target] for source, target in moves)
    moved = received * sum(row.shape[1] for row in transfer.rows)
    return MigrationReport(received, len(moves) - received, moved, time.perf_counter() - started)


class _Transfer:
    """The all-to-all exchanges of one migration, with this rank's part and its staging buffer."""

    def __init__(
        self,
        packed: PackedWeights,
        old: Placement,
        new: Placement,
        group: dist.ProcessGroup | None,
        staging_bytes: int,
    ) -> None:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        tp_size = max(1, ranks // old.ep_size)
        me, rank_of = rank // tp_size, old.rank_of
        self.group = group
        self.rows = [_rows(name, packed[name], old.slots(me)) for name in sorted(packed.experts)]
        self.moves, first = _plan(old, new), old.slots(me).start
        leaving = [(rank_of[t], s - first) for s, t in self.moves if rank_of[s] == me]
        arriving = sorted((rank_of[s], t - first) for s, t in self.moves if rank_of[t] == me)
        self.sent, self.received = [s for _, s in leaving], [t for _, t in arriving]
        loads = Counter(rank_of[slot] for move in self.moves for slot in move)
        most = max(loads.values(), default=1)
        self.width = min(max(1, staging_bytes // most), max(row.shape[1] for row in self.rows))
        self.staging = self.rows[0].new_empty((len(leaving) + len(arriving)) * self.width)
        # Ranks with the same tensor-parallel slice exchange rows.
        self.send_splits, self.receive_splits = [0] * ranks, [0] * ranks
        for splits, others in ((self.send_splits, leaving), (self.receive_splits, arriving)):
            for other, _ in others:
                splits[other * tp_size + rank % tp_size] += 1

    def run(self) -> None:
        """Move all experts, one column of bytes at a time."""
        for row in self.rows if self.moves else ():
            for column in torch.split(row, self.width, dim=1):
                self._move(column)

    def _move(self, column: Tensor) -> None:
        n = column.shape[1]
        out = self.staging[: len(self.sent) * n].view(len(self.sent), n)
        got = self.staging[out.numel() :][: len(self.received) * n].view(len(self.received), n)
        for staged, slot in zip(out, self.sent, strict=True):
            staged.copy_(column[slot])
        if self.group is None:
            got.copy_(out)
        else:
            splits = (self.receive_splits, self.send_splits)
            dist.all_to_all_single(got, out, *splits, group=self.group)
        for staged, slot in zip(got, self.received, strict=True):
            column[slot].copy_(staged)


def _plan(old: Placement, new: Placement) -> list[tuple[int, int]]:
    """Return (source, target) physical ids of all that change, ordered by target.

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
    """View a packed tensor (L, ...) as the bytes of each expert, (L, bytes) uint8."""
    strides = tensor.stride()
    inner = sorted(range(1, tensor.dim()), key=lambda dim: -strides[dim])
    try:
        row = tensor.permute(0, *inner).view(len(slots), tensor[0].numel()).view(torch.uint8)
        if len(slots) > 1 and row.stride(0) < row.shape[1]:
            raise RuntimeError("experts overlap")
    except (RuntimeError, IndexError) as error:
        raise WeightsError(
            f"packed {name} {tuple(tensor.shape)} with strides {strides} must be one dense block "
            f"for each of {len(slots)} experts, or they cannot move: {error}"
        ) from error
    return row


def _check(
    packed: PackedWeights, old: Placement, new: Placement, group: dist.ProcessGroup | None
) -> None:
    """Raise unless the placements, the weights and the group fit each other."""
    was, wanted = ((p.num_experts, len(p.physical_to_logical), p.ep_size) for p in (old, new))
    if was != wanted:
        raise InvalidInput(
            "both placements must have the same numbers of experts, physical experts and ranks "
            f"(got {was} and {wanted})"
        )
    if not packed.experts:
        raise WeightsError(
            f"the weights that {packed.backend!r} packed have no tensor with an expert dimension, "
            "so experts cannot move"
        )
    device, ranks = device_of(packed), 1 if group is None else group.size()
    if ranks % old.ep_size or (group is not None and not has_backend(group, device.type)):
        backends = "" if group is None else f", with backends {dist.get_backend_config(group)},"
        raise GroupMismatch(
            f"a process group of {ranks} ranks{backends} cannot move weights on {device} between "
            f"{old.ep_size} expert-parallel ranks; pass the group of the layer's ranks"
        )


def _form(packed: PackedWeights) -> dict[str, str]:
    """Return what must be equal on all ranks to exchange experts of ``packed``, as text."""
    tensors = {n: (t.dtype, t.shape[1:], t.stride()[1:]) for n, t in sorted(packed.experts.items())}
    shared = {name: tensor.tolist() for name, tensor in sorted(packed.shared.items())}
    return {"backend": packed.backend, "packed tensors": str(tensors), "shared": str(shared)}


def digest(value: object) -> str:
    """Return a checksum of ``repr(value)``."""
    return f"{zlib.crc32(repr(value).encode()):08x}"


def agree(
    group: dist.ProcessGroup | None, mine: Mapping[str, str], error: Exception | None
) -> None:
    """Raise ``error`` if this rank has one; PeerFailed if another rank has one; GroupMismatch if
    ``mine`` differs between ranks. Collective, before anything moves."""
    fault, advice = None if error is None else describe(error), ". No rank has moved anything"
    try:
        if group is not None:
            same("move experts", mine, fault, group, advice=advice, failed=PeerFailed)
    except MoekitError:
        if error is None:
            raise
    if error is not None:
        raise error
