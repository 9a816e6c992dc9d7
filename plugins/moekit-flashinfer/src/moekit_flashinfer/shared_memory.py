"""Memory that all ranks of a group map, from the library's allocator."""

from __future__ import annotations

import platform
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError

from . import footprint, library

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

    Construction is collective. Any number of threads may construct, each in a group of its own.
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
        self.nbytes = footprint.pages(nbytes)

    def free(self) -> None:
        """Unmap the memory after this rank's kernels; ranks that still map it keep it alive."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._memory.close_mnnvl_memory(self._memory.ptr)
        del self._memory.ptr, self.tensor
