"""Memory that all ranks of a group map, by the library's allocator."""

from __future__ import annotations

import platform
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError

from . import library

# What the driver hands out memory in.
_PAGE = 2 << 20

# The library makes its tensors of descriptors that only the tensor object keeps alive, but torch
# reads a descriptor once more when the storage goes, which views of the tensor can put off.
_descriptors: list[object] = []


def protocol(name: str) -> str:
    """What ranks must have in common to share memory."""
    # File descriptors do not cross hosts; the handles that aarch64 machines use do.
    host = "" if platform.machine() == "aarch64" else f" on host {socket.gethostname()}"
    return f"{name} of flashinfer {library.FLASHINFER.version() or 'of unknown version'}{host}"


class Peers:
    """The ranks of a group, as the library's allocator wants to talk to them.

    Its own adapter would create a new process group, which all processes of the world must do
    together, and which a layer's group need not span.
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

    Construction is collective. The library keeps the ranks to talk to in a class attribute, which
    is set before every use, so that layers of different groups do not get in each other's way.
    """

    def __init__(self, peers: Peers, nbytes: int, dtype: torch.dtype) -> None:
        self._peers = peers
        self._class = library.memory()
        self._class.initialize()
        self._class.comm = peers
        try:
            self._memory = self._class(None, nbytes)
        except RuntimeError as error:
            raise BackendError(
                f"{nbytes} bytes could not be shared between {peers.size} ranks: {error}"
            ) from error
        self.tensor: Tensor = self._memory.as_torch_strided_tensor(dtype)
        _descriptors.append(getattr(self.tensor, "_capsule_wrapper", None))
        self.nbytes = -(-nbytes // _PAGE) * _PAGE

    def free(self) -> None:
        """Peers that still map this rank's memory keep it alive; nothing of this rank may run."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._class.comm = self._peers
        self._class.close_mnnvl_memory(self._memory.ptr)
        del self._memory.ptr, self.tensor
