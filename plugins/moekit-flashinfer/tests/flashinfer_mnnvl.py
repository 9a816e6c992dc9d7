"""`flashinfer.comm.mnnvl` on the CPU: a segment for each rank, in one file that all ranks map.

As in the library, attributes of the class hold the ranks and the next free address, and its methods
read them again after they have waited for other ranks. The later version asks all ranks about their
devices and hosts, and passes descriptors through sockets in the temporary directory.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from flashinfer_standins import Descriptor, Driver, is_later
from torch import Tensor

_GRANULARITY, _PAGE = 2 << 20, 512 << 20


class MnnvlMemory:
    comm: Any = None
    current_start_address = current_rank_stride = current_mem_offset = 0
    allocated_map: dict[int, tuple[int, int, int, int]] = {}
    address_refcnt: dict[int, int] = {}
    _fabric_supported: bool | None = None

    @staticmethod
    def initialize() -> None: ...

    def __init__(self, mapping: Any, size: int) -> None:
        self._size = size
        self.ptr, self._map = MnnvlMemory.open_mnnvl_memory(size)

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            MnnvlMemory.close_mnnvl_memory(self.ptr)

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> Tensor:
        assert MnnvlMemory.comm.Get_size() == len(self._map), "segments that are not mapped"
        tensor = torch.from_numpy(self._map).view(dtype)[:, : self._size // dtype.itemsize]
        tensor._capsule_wrapper = Descriptor()  # type: ignore[attr-defined]
        return tensor

    @staticmethod
    def open_mnnvl_memory(size: int) -> tuple[int, Any]:
        comm = MnnvlMemory.comm
        assert set(comm.allgather(size)) == {size}, "ranks allocate different sizes"
        if is_later() and MnnvlMemory._fabric_supported is None:
            MnnvlMemory._fabric_supported = all(comm.allgather(False))
        aligned = -(-size // _GRANULARITY) * _GRANULARITY
        if MnnvlMemory.current_mem_offset + aligned > MnnvlMemory.current_rank_stride:
            MnnvlMemory.new_mnnvl_memory_address(aligned)
        if is_later():
            assert len(set(comm.allgather(socket.gethostname()))) == 1
            exchange_sockets(comm)
        segments = _mapped_file(comm, size)
        ptr = MnnvlMemory.current_start_address + MnnvlMemory.current_mem_offset
        for rank in range(comm.Get_size()):
            Driver.map(ptr + rank * MnnvlMemory.current_rank_stride, aligned)
        start = MnnvlMemory.current_start_address
        MnnvlMemory.allocated_map[ptr] = (
            aligned,
            start,
            MnnvlMemory.current_rank_stride,
            MnnvlMemory.current_mem_offset,
        )
        MnnvlMemory.address_refcnt[start] = MnnvlMemory.address_refcnt.get(start, 0) + 1
        MnnvlMemory.current_mem_offset += aligned
        Driver.comms[segments.ctypes.data] = comm
        return ptr, segments

    @staticmethod
    def new_mnnvl_memory_address(size: int) -> None:
        stride = -(-size // _PAGE) * _PAGE
        ranks = MnnvlMemory.comm.Get_size()
        MnnvlMemory.current_start_address = Driver.reserve(stride * ranks)
        MnnvlMemory.current_rank_stride, MnnvlMemory.current_mem_offset = stride, 0

    @staticmethod
    def close_mnnvl_memory(ptr: int) -> None:
        aligned, start, stride, offset = MnnvlMemory.allocated_map.pop(ptr)
        ranks = MnnvlMemory.comm.Get_size()
        for rank in range(ranks):
            Driver.unmap(start + rank * stride + offset, aligned)
        MnnvlMemory.address_refcnt[start] -= 1
        if not MnnvlMemory.address_refcnt[start]:
            del MnnvlMemory.address_refcnt[start]
            Driver.free(start, ranks * stride)
            if start == MnnvlMemory.current_start_address:
                MnnvlMemory.current_start_address = 0
                MnnvlMemory.current_rank_stride = MnnvlMemory.current_mem_offset = 0


def exchange_sockets(comm: Any) -> None:
    """Bind a socket where the library binds one, and tell its path to the other ranks."""
    with tempfile.TemporaryDirectory(prefix=f"cuda_fd_xchg_{os.getpid()}_") as folder:
        path = os.path.join(folder, "fd.sock")
        comm.allgather(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(path)


def _mapped_file(comm: Any, size: int) -> Any:
    """Return (ranks, bytes) of zeros, further apart than their size."""
    ranks, stride = comm.Get_size(), -(-size // 4096) * 4096 + 4096
    file = Path(tempfile.mkstemp(prefix="moekit-standin-")[1])
    shared = Path(comm.allgather(str(file))[0])
    if comm.Get_rank() == 0:
        shared.write_bytes(b"\0" * (stride * ranks))
    comm.allgather(None)
    segments = numpy.memmap(shared, numpy.uint8, "r+", shape=(ranks, stride))
    comm.allgather(None)
    file.unlink()
    return segments
