"""The buffers of the all-to-alls, in memory that all ranks of a group map.

All layers of a group and size share buffers; making and freeing them is collective.
"""

from __future__ import annotations

import platform
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError
from moekit.plugin import CallBuffers, SharedBuffers, round_up

from . import library

_PAGE = 2 << 20  # bytes, the driver's granularity
_COUNTS = "MOE_A2A_RECV_COUNTERS_OFFSET_INDEX"

# Only the library's tensor object keeps its descriptor alive, but torch reads the descriptor once
# more when the storage is freed, and views of the tensor can outlive the tensor object.
_descriptors: list[object] = []


def protocol(name: str) -> str:
    """Return what must be equal on all ranks that share memory."""
    # File descriptors do not cross hosts; the fabric handles of aarch64 machines do.
    host = "" if platform.machine() == "aarch64" else f" on host {socket.gethostname()}"
    return f"{name} of flashinfer {library.FLASHINFER.version() or 'of unknown version'}{host}"


class Ranks:
    """The ranks of a group, with the methods that the library's allocator calls.

    The library's own adapter would create a process group, which is collective over all processes
    of the world; a layer's group need not hold all of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def barrier(self) -> None:
        self.allgather(None)


class SharedMemory:
    """``nbytes`` on each rank of a group, mapped by all: ``tensor`` (ranks, nbytes / itemsize).

    Any number of threads may construct, each in another group.
    """

    def __init__(self, ranks: Ranks, nbytes: int, dtype: torch.dtype) -> None:
        mine = library.memory()  # its attributes hold the ranks and addresses of this memory
        mine.initialize()
        mine.comm = ranks
        try:
            self._memory = mine(None, nbytes)
        except (RuntimeError, OSError) as error:
            raise BackendError(
                f"sharing {nbytes} bytes between {ranks.size} ranks failed: {error}; all ranks "
                "must be on one host and able to pass file descriptors: FlashInfer 0.6 needs root "
                "or ptrace permission, 0.7 a temporary directory that all ranks share (set TMPDIR "
                "to a short path)"
            ) from error
        self.tensor: Tensor = self._memory.as_torch_strided_tensor(dtype)
        _descriptors.append(getattr(self.tensor, "_capsule_wrapper", None))
        self.nbytes = round_up(nbytes, _PAGE)

    def free(self) -> None:
        """Unmap the memory after this rank's kernels; ranks that still map it keep it alive."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._memory.close_mnnvl_memory(self._memory.ptr)
        del self._memory.ptr, self.tensor


class Fifos:
    """The two-sided FIFOs of one group, for data and for counts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.library = library.two_sided()
        self.ranks = Ranks(group)
        ranks = self.ranks.size
        nbytes = self.library.get_moe_commworkspace_size_per_rank(ranks)
        self.data = SharedMemory(self.ranks, nbytes, torch.uint64)
        nbytes = self.library.get_moe_prepare_workspace_size_per_rank(ranks)
        self.counts = SharedMemory(self.ranks, nbytes, torch.uint64)
        self.ranks.barrier()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.counts.nbytes

    def free(self) -> None:
        self.data.free()
        self.counts.free()


@dataclass
class CallBuffer:
    """The one-sided memory of one call."""

    memory: SharedMemory
    metainfo: Tensor
    counts_G: Tensor


class OneSidedBuffers:
    """The one-sided memory of a group's in-flight calls."""

    def __init__(self, group: dist.ProcessGroup, capacity: int, row_bytes: tuple[int, int]) -> None:
        """Allocate the memory of the first call; collective.

        Args:
            row_bytes: The most bytes of one token on its way to the experts, and back.
        """
        self.library = library.one_sided()
        self.ranks, self.capacity = Ranks(group), capacity
        self._nbytes = self.library.moe_a2a_get_workspace_size_per_rank(
            self.ranks.size, capacity, *row_bytes
        )
        # Layers of several schemes take turns here, and the library puts the experts' output right
        # behind what a dispatch sends. So a fast rank's tokens of the next layer could replace rows
        # that a slow rank still reads: the output lies behind the most that any dispatch sends.
        self.output_at = self._nbytes - round_up(self.ranks.size * capacity * row_bytes[1], 128)
        names, values = self.library.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
        self._index = dict(zip(map(str, names), map(int, values), strict=True))
        self.calls = CallBuffers(self._open, group)

    def _open(self) -> CallBuffer:
        """Allocate the memory of another call; collective."""
        memory = SharedMemory(self.ranks, self._nbytes, torch.uint8)
        metainfo = self.library.moe_a2a_initialize(
            memory.tensor, self.ranks.rank, self.ranks.size, self.capacity
        )
        self.ranks.barrier()  # initializing cleared this rank's own memory
        start = int(torch.utils.dlpack.from_dlpack(metainfo)[self._index[_COUNTS]])
        mine = memory.tensor[self.ranks.rank]
        counts_G = mine[start : start + 4 * self.ranks.size].view(torch.int32)
        return CallBuffer(memory, metainfo, counts_G)

    @property
    def nbytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.calls.all)

    def free(self) -> None:
        for buffer in self.calls.all:
            del buffer.counts_G
            buffer.memory.free()


fifos: SharedBuffers[Fifos] = SharedBuffers(Fifos.free)
one_sided: SharedBuffers[OneSidedBuffers] = SharedBuffers(OneSidedBuffers.free)
