"""Events, and rows that travel over gloo, for the buffers of the stand-in for `deep_ep`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from vendor_stand_ins import exchange, garbage, on_cpu


class EventOverlap:
    """``finish`` writes what the transfer brings."""

    def __init__(self, finish):
        self._finish = finish

    @property
    def waited(self):
        return self._finish is None

    @on_cpu
    def current_stream_wait(self):
        finish, self._finish = self._finish, None
        if finish is not None:
            with _disable_current_modes():
                finish()


def by_rank(sources, arrived):
    """The rows that each rank's tokens get here, and what it sent of these tokens."""
    rank_R, token_R = torch.tensor(sources, dtype=torch.long).view(-1, 2).unbind(1)
    for rank, theirs in enumerate(arrived):
        rows = (rank_R == rank).nonzero().flatten()
        yield rows, [t.view(torch.uint8)[token_R[rows]].view(t.dtype) for t in theirs]


def delivered(sources, arrived, rows, held):
    """Return memory for x (with scales if it has any), ids and weights, and a function to fill it.

    held: the experts of this rank, whose ids become local ones.
    """
    x, ids, weights, *scales = (garbage((rows, t.shape[1]), t.dtype) for t in arrived[0])

    def write():
        for at, (their_x, their_ids, their_weights, *their_scales) in by_rank(sources, arrived):
            here = (their_ids >= held.start) & (their_ids < held.stop)
            x.view(torch.uint8)[at] = their_x.view(torch.uint8)
            ids[at] = torch.where(here, their_ids - held.start, -1)
            weights[at] = their_weights
            for mine, theirs in zip(scales, their_scales, strict=True):
                mine[at] = theirs

    return (x, *scales) if scales else x, ids, weights, write


class Stream:
    """A buffer's kernels run here. The counts that they write arrive when the host waits for it."""

    def __init__(self):
        self.counts = []

    def synchronize(self):
        self.counts.clear()


class _Base:
    live: list[_Base] = []

    def _open(self, group, explicitly_destroy):
        assert explicitly_destroy, "or Python's end may hang"
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.generator = torch.Generator().manual_seed(self.rank)
        self.stream = Stream()
        self.events: list[EventOverlap] = []
        _Base.live.append(self)

    def _event(self, finish, asynchronous):
        event = EventOverlap(finish)
        self.events = [e for e in self.events if not e.waited] + [event]
        if not asynchronous:
            event.current_stream_wait()
        return event

    def get_comm_stream(self):
        return self.stream

    def destroy(self):
        assert self in _Base.live, "destroyed twice"
        assert all(event.waited for event in self.events), "memory of a transfer was given away"
        dist.barrier(self.group)
        _Base.live.remove(self)

    def _check_open(self):
        assert self in _Base.live, "used after destroy()"

    def _shuffled(self, n):
        return torch.randperm(n, generator=self.generator).tolist()


def sent_again(buffer, x, handle):
    """Sends x by a handle: each row comes where the row of this token was."""
    assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
    assert x.shape[0] == handle.tokens, "as many tokens as the first time"
    arrived = exchange(buffer.group, x)
    received = garbage((handle.rows, x.shape[1]), x.dtype)

    def finish():
        for rows, (theirs,) in by_rank(handle.sources, arrived):
            received[rows] = theirs

    return received, finish


def summed_by_rank(buffer, x, handle, topk_weights, local_experts=0):
    """Sends rows back to where they came from; ``finish`` writes the sums in rank order.

    local_experts: take a router weight only from the rank that has the expert.
    """
    assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
    assert x.shape[0] == handle.rows
    combined, combined_weights = garbage((handle.tokens, x.shape[1]), x.dtype), None
    sent = [x]
    if topk_weights is not None:
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert topk_weights.dim() == 2 and topk_weights.shape[0] == x.shape[0]
        assert topk_weights.shape[1] <= 32
        combined_weights = garbage((handle.tokens, topk_weights.shape[1]), torch.float32)
        sent.append(topk_weights)
    with _disable_current_modes():
        where = torch.tensor(handle.sources, dtype=torch.long).view(-1, 2)
        arrived = exchange(buffer.group, where, *(t[: len(where)] for t in sent))

    def finish():
        total = torch.zeros(combined.shape)
        if topk_weights is not None:
            combined_weights.zero_()
        for rank, (where, rows, *weights) in enumerate(arrived):
            mine = where[:, 0] == buffer.rank
            tokens = where[mine, 1]
            total[tokens] += rows[mine].float()
            for theirs in weights:
                kept = theirs[mine]
                if local_experts:
                    owner_TK = handle.topk_idx.div(local_experts, rounding_mode="floor")
                    kept = torch.where(owner_TK[tokens] == rank, kept, 0.0)
                combined_weights[tokens] += kept
        combined.copy_(total)

    return combined, combined_weights, finish
