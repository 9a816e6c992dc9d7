"""Symmetric memory: a buffer on every rank, whose address all ranks know."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import GroupMismatch, InvalidInput, PeerFailed
from moekit.plugin import exchange

from .footprint import Layout

_IN_FLIGHT = 2


@dataclass(frozen=True)
class Lost:
    """The ranks that did not come to a call in time.

    flags: int32 (1 + ranks,) on the device: whether there are any, and which. ranks: int32 (ranks,)
    in host memory, 1 for each of them.
    """

    flags: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, ranks: int, device: torch.device) -> Lost:
        return cls(
            torch.zeros(1 + ranks, dtype=torch.int32, device=device),
            torch.zeros(ranks, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )

    def check(self) -> None:
        """Raise PeerFailed if there are any."""
        if lost := [str(rank) for rank, each in enumerate(self.ranks.tolist()) if each]:
            raise PeerFailed(
                f"rank {', '.join(lost)} did not come to an earlier call in time: it died, hangs, "
                "or makes its calls in another order. Start the ranks again"
            )


@dataclass
class Buffer:
    """The memory of one call: no other call may use it from its dispatch to its combine.

    bytes: this rank's buffer, uint8. peers: int64 addresses of all ranks' buffers. used: int32, the
    rows of each batch in the call before. counters: int32, zero between kernels. epoch: int64, the
    number of calls.
    """

    bytes: Tensor
    peers: Tensor
    used: Tensor
    counters: Tensor
    epoch: Tensor
    lost: Lost
    handle: Any = None
    busy: bool = False

    @classmethod
    def of(cls, memory: Tensor, addresses: list[int], lost: Lost, handle: Any = None) -> Buffer:
        device, ranks = memory.device, len(addresses)

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            bytes=memory,
            peers=torch.tensor(addresses, dtype=torch.int64, device=device),
            used=ints(ranks),
            counters=ints(1 + ranks),
            epoch=ints(1, torch.int64),
            lost=lost,
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
        self._lost = Lost.of(group.size(), device)
        self._buffers = [self._open()]

    def _open(self) -> Buffer:
        """Make a buffer that all ranks reach; collective."""
        memory, addresses, handle = open_memory(self.layout.nbytes, self.group, self._device)
        memory.zero_()
        # Rows that no call has written have no expert.
        memory[self.layout.ids : self.layout.weights].fill_(0xFF)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        exchange("open a buffer", "", self.group)
        return Buffer.of(memory, addresses, self._lost, handle)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * len(self._buffers)

    def take(self) -> Buffer:
        """Return a buffer that no call uses. Collective where it must be made."""
        self._lost.check()
        buffer = next((s for s in self._buffers if not s.busy), None)
        if buffer is None:
            if len(self._buffers) == _IN_FLIGHT:
                raise InvalidInput(
                    f"{_IN_FLIGHT} calls are in flight, and this would be one more: take the "
                    "result of one first"
                )
            cuda = self._device.type == "cuda"
            if cuda and torch.cuda.is_current_stream_capturing():
                raise InvalidInput(
                    "a second call in flight needs a second buffer, which cannot be made while a "
                    "graph is captured: have two calls in flight once before capturing"
                )
            buffer = self._open()
            self._buffers.append(buffer)
        buffer.busy = True
        return buffer

    def free(self) -> None:
        self._buffers.clear()


def open_memory(
    nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """Return memory (nbytes,) uint8, all ranks' addresses of theirs, and what keeps them valid.

    Collective. Raises GroupMismatch on all ranks if some cannot reach each other's memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    with _shared_devices(_meet(group, device)):
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
    return memory, list(handle.buffer_ptrs), handle


def _meet(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether ranks share a GPU. Raises GroupMismatch unless all reach each other."""
    mine = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]
    ranks = [json.loads(said) for said in exchange("say where ranks are", json.dumps(mine), group)]
    hosts = [host for host, _ in ranks]
    if len(set(hosts)) > 1:
        raise GroupMismatch(
            f"the ranks are on hosts {', '.join(hosts)}, and NVLink joins the GPUs of one; use "
            "'naive', or describe the hosts by ParallelConfig(nodes=...)"
        )
    here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    index = here.index(mine[1])
    apart = [
        rank
        for rank, (_, uuid) in enumerate(ranks)
        if uuid != mine[1]
        and uuid in here
        and not torch.cuda.can_device_access_peer(index, here.index(uuid))
    ]
    faults = [
        f"the GPU of rank {rank} cannot reach the memory of the GPUs of ranks {said}"
        for rank, said in enumerate(exchange("say which ranks are in reach", str(apart), group))
        if said != "[]"
    ]
    if faults:
        raise GroupMismatch("; ".join(faults) + "; use 'naive', which needs no such access")
    return len({uuid for _, uuid in ranks}) < len(ranks)


@contextmanager
def _shared_devices(shared: bool) -> Iterator[None]:
    """Let torch's symmetric memory take ranks that share a GPU, which run in turns."""
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    before = os.environ.get(name)
    if shared:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if shared and before is None:
            del os.environ[name]
        elif shared:
            os.environ[name] = str(before)
