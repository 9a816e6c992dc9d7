"""Symmetric memory: a buffer on every rank, whose address all ranks know."""

from __future__ import annotations

import ctypes
import json
import math
import random
import socket
import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _unregister_process_group,
)

from moekit.errors import BackendError, GroupMismatch, PeerFailed
from moekit.plugin import CallBuffers, Located, ProcessVariables, exchange, reason_of

from .layout import Layout

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's interface.
_ATOMICS = 3
_MAX_REGIONS = 4096


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
        if any(ranks := self.ranks.tolist()):
            lost = [str(rank) for rank, each in enumerate(ranks) if each]
            raise PeerFailed(
                f"rank {', '.join(lost)} did not come to an earlier call in time: it died, hangs, "
                "or makes its calls in another order. Start the ranks again"
            )


@dataclass
class Buffer:
    """The memory of one call: no other call may use it from its dispatch to its combine.

    bytes: this rank's buffer, uint8. peers: int64 addresses of all ranks' buffers. used: int32, the
    rows of each batch in the call before; rows: int32 (1,), the end of them. counters: int32, zero
    between kernels. epoch: int64, the number of calls. refused: int32 (1,), not zero where this
    rank makes the call NaN on all ranks. memory: all of these, and the tensors of ``lost``.
    """

    bytes: Tensor
    peers: Tensor
    used: Tensor
    rows: Tensor
    counters: Tensor
    epoch: Tensor
    refused: Tensor
    lost: Lost
    handle: Any = None
    regions: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    memory: Located = field(init=False)

    def __post_init__(self) -> None:
        held = {**vars(self), **vars(self.lost)}.values()
        self.memory = Located(each for each in held if isinstance(each, Tensor))

    @classmethod
    def of(
        cls, memory: Tensor, addresses: list[int], lost: Lost, chunks: int, handle: Any = None
    ) -> Buffer:
        device, ranks = memory.device, len(addresses)

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            bytes=memory,
            peers=torch.tensor(addresses, dtype=torch.int64, device=device),
            used=ints(ranks),
            rows=ints(1),
            counters=ints(1 + ranks + chunks),
            epoch=ints(1, torch.int64),
            refused=ints(1),
            lost=lost,
            handle=handle,
        )

    def region(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a part of this rank's buffer as a tensor, which calls of one size share."""
        key = offset, shape, dtype
        found = self.regions.get(key)
        if found is None:
            if len(self.regions) >= _MAX_REGIONS:
                self.regions.clear()
            with torch.inference_mode(False):  # calls outside of inference mode use it too
                part = self.bytes[offset : offset + math.prod(shape) * dtype.itemsize]
                found = self.regions[key] = part.view(dtype).view(shape)
        return found


class Buffers:
    """The buffers of a group's in-flight calls."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout, device: torch.device) -> None:
        self.group, self.layout, self._device = group, layout, device
        self.lost = Lost.of(group.size(), device)
        self.calls = CallBuffers(self._open, group)

    def _open(self) -> Buffer:
        """Make a buffer that all ranks reach; collective."""
        memory, addresses, handle = open_memory(self.layout.nbytes, self.group, self._device)
        memory.zero_()
        # Rows that no call has written have no expert.
        memory[self.layout.ids : self.layout.weights].fill_(0xFF)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        exchange("open a buffer", "", self.group)
        return Buffer.of(memory, addresses, self.lost, self.layout.chunks, handle)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * len(self.calls.all)

    def take(self) -> Buffer:
        """Return a buffer that no call uses. Collective where it must be made."""
        self.lost.check()
        return self.calls.take()

    def free(self) -> None:
        self.calls.all.clear()


def open_memory(
    nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Tensor, list[int], Any]:
    """Return memory (nbytes,) uint8, all ranks' addresses of theirs, and what keeps them valid.

    Collective. Raises GroupMismatch on all ranks if some cannot reach each other's memory, and
    BackendError if some have too little.
    """
    import torch.distributed._symmetric_memory as symmetric

    _check_reach(group, device)
    memory, fault = torch.empty(0), ""
    with _torch_variables:
        try:
            memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # the other ranks would wait for this one's address
            fault = reason_of(error)
        said = exchange("allocate a buffer", fault, group)
        if faults := [f"rank {rank}: {each}" for rank, each in enumerate(said) if each]:
            raise BackendError(
                f"every rank needs {nbytes:,} bytes of symmetric memory, and some have none: "
                f"{'; '.join(faults)}; lower max_num_tokens"
            )
        handle = _rendezvous(memory, group)
    return memory, list(handle.buffer_ptrs), handle


class _OneRendezvous(Store):
    """The part of a group's store for one rendezvous, whose keys carry numbers that count from 0.

    Torch numbers its keys, "<use>/<number>/<rank>", by what the process has exchanged in all of its
    groups. Ranks that had served other groups would wait for keys of different numbers
    (pytorch/pytorch#196082). Torch 2.11 and 2.12 call `set`, `wait` and `get`; later releases get
    several keys at once and call ``barrier``, which end in these methods and `add`.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        exchanged, rank = key.rsplit("/", 1)
        return f"{self._numbers.setdefault(exchanged, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._key(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


# Torch binds one socket of a process for each rendezvous, and Python's threads run while it waits.
_one_at_a_time = threading.Lock()
_TURNS = 1000  # of 55 ms on average


def _rendezvous(memory: Tensor, group: dist.ProcessGroup) -> Any:
    """Return torch's handle of the ranks' memory (nbytes,) uint8; collective.

    Raises PeerFailed on all ranks if another thread of one of them does not end its own.
    """
    said: list[str] = []
    for _ in range(_TURNS):  # until all have the lock: threads may serve groups in opposite orders
        locked = _one_at_a_time.acquire(timeout=random.uniform(0.01, 0.1))
        try:
            said = exchange("meet in turn", uuid.uuid4().hex if locked else "", group)
            if "" not in said:
                return _rendezvous_as(f"moekit_nvlink-{said[0]}", memory, group)
        finally:
            if locked:
                _one_at_a_time.release()
    waiting = ", ".join(str(rank) for rank, each in enumerate(said) if not each)
    raise PeerFailed(
        f"another thread of rank {waiting} has been opening a buffer for a minute: its group waits "
        "for a rank that died or hangs. Start the ranks again"
    )


def _rendezvous_as(name: Any, memory: Tensor, group: dist.ProcessGroup) -> Any:
    """Do it in a group that is registered for that time. name: str, new, the same on all ranks."""
    import torch.distributed._symmetric_memory as symmetric

    # Torch keeps neither the Python object of a store nor a registered group alive.
    store = _OneRendezvous(PrefixStore(name, group.get_group_store()))
    own = ProcessGroup(store, group.rank(), group.size())
    _register_process_group(name, own)
    try:
        return symmetric.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)


def _check_reach(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise GroupMismatch unless all ranks reach each other's memory."""
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
        for rank, (_, gpu) in enumerate(ranks)
        if gpu != mine[1] and gpu in here and not _reaches(index, here.index(gpu))
    ]
    faults = [
        f"the GPU of rank {rank} cannot reach the memory of the GPUs of ranks {said}"
        for rank, said in enumerate(exchange("say which ranks are in reach", str(apart), group))
        if said != "[]"
    ]
    if faults:
        raise GroupMismatch(
            "; ".join(faults) + " over NVLink, and PCIe lacks its atomic operations; use 'naive', "
            "which needs no such access"
        )


def _reaches(mine: int, other: int) -> bool:
    """Return whether a GPU can access another one's memory, atomically too."""
    if not torch.cuda.can_device_access_peer(mine, other):
        return False
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except (OSError, AttributeError):  # it cannot be asked
        return True
    value = ctypes.c_int(1)
    return ask(ctypes.byref(value), _ATOMICS, mine, other) != 0 or value.value != 0


# Torch would refuse ranks that share a GPU, and ranks that each see one GPU only, and set up
# multicast, which some hosts announce and lack.
_TORCH = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_torch_variables = ProcessVariables(_TORCH)
