"""Symmetric memory: a buffer on every rank, whose address all ranks know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import InvalidInput, PeerFailed

from .footprint import Layout

_IN_FLIGHT = 2


@dataclass
class Buffer:
    """The memory of one call: no other call may use it from its dispatch to its combine.

    bytes: this rank's buffer, uint8. peers: int64 addresses of all ranks' buffers. used: int32, the
    rows of each rank in the call before. counters: int32, zero between kernels. epoch: int64, the
    number of calls. error: int32 in host memory, 1 where a rank did not come.
    """

    bytes: Tensor
    peers: Tensor
    used: Tensor
    counters: Tensor
    epoch: Tensor
    error: Tensor
    handle: Any = None
    busy: bool = False

    @classmethod
    def of(cls, memory: Tensor, addresses: list[int], ranks: int, handle: Any = None) -> Buffer:
        device = memory.device

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            bytes=memory,
            peers=torch.tensor(addresses, dtype=torch.int64, device=device),
            used=ints(ranks),
            counters=ints(1 + ranks),
            epoch=ints(1, torch.int64),
            error=torch.zeros(ranks, dtype=torch.int32, pin_memory=device.type == "cuda"),
            handle=handle,
        )

    def region(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a part of this rank's buffer as a tensor."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset : offset + nbytes].view(dtype).view(shape)


class Buffers:
    """One buffer for each in-flight call. All ranks take them in one order."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout, device: torch.device) -> None:
        self.group, self.layout, self._device = group, layout, device
        self._buffers = [self._open()]

    def _open(self) -> Buffer:
        """Collective."""
        import torch.distributed._symmetric_memory as symmetric

        layout = self.layout
        memory = symmetric.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        memory.zero_()
        # Rows that no call has written have no expert.
        ids = memory[layout.ids : layout.weights]
        ids.fill_(0xFF)
        handle = symmetric.rendezvous(memory, self.group)
        torch.cuda.synchronize(self._device)
        dist.barrier(self.group, device_ids=[self._device.index or 0])
        return Buffer.of(memory, list(handle.buffer_ptrs), layout.ranks, handle)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * len(self._buffers)

    def take(self) -> Buffer:
        """Return a buffer that no call uses. Collective where it must be made."""
        buffer = next((s for s in self._buffers if not s.busy), None)
        if buffer is None:
            if len(self._buffers) == _IN_FLIGHT:
                raise InvalidInput(
                    f"{_IN_FLIGHT} calls are in flight, and this would be one more: take the "
                    "result of one first"
                )
            if torch.cuda.is_current_stream_capturing():
                raise InvalidInput(
                    "a second call in flight needs a second buffer, which cannot be made while a "
                    "graph is captured: have two calls in flight once before capturing"
                )
            buffer = self._open()
            self._buffers.append(buffer)
        if any(lost := buffer.error.tolist()):
            ranks = [rank for rank, each in enumerate(lost) if each]
            raise PeerFailed(
                f"rank {', '.join(map(str, ranks))} did not come to an earlier call in time: it "
                "died, hangs, or makes its calls in another order. Start the ranks again"
            )
        buffer.busy = True
        return buffer

    def free(self) -> None:
        self._buffers.clear()
