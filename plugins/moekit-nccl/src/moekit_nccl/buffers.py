"""The library's groups, and the memory of calls: shared by layers of one process group and size.

The library ends the process if sizes do not fit or CUDA has failed, so moekit checks both before.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import nccl.core
import nccl.core.interop.torch
import nccl.ep as ep
import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError
from moekit.plugin import (
    CallBuffers,
    Lease,
    SharedBuffers,
    exchange,
    farewell,
    gpu_fault,
    round_up,
)

from . import library

logger = logging.getLogger("moekit")
library.LIBRARY.check(ep, library.CALLS)
BYTE = torch.float8_e4m3fn  # quantized rows travel in this dtype: the library forwards no int8
_COMPILING_SECONDS = 30.0  # ranks wait this long inside a kernel for other ranks that compile it
# How long a rank waits for the other ranks before it leaves buffers to the end of the process.
_FAREWELL_SECONDS = 20.0


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a group of the library is made, equal on all ranks.

    experts: experts of all ranks; each slice of an expert counts as an expert. slots: experts of
    one token, slices included. capacity: the most tokens that one rank sends. share: the
    number of ranks that hold the same tokens. wire: the dtype of quantized rows, their number of
    one-byte columns, and their number of fp32 scales, padded to 16 bytes.
    """

    low_latency: bool
    experts: int
    slots: int
    capacity: int
    hidden_size: int
    dtype: torch.dtype
    wire: tuple[torch.dtype, int, int] | None
    share: int
    timeout: float

    @property
    def row_bytes(self) -> tuple[int, int, int]:
        """Return the most bytes of a dispatched row, of its scales, and of a combined row."""
        back = self.hidden_size * self.dtype.itemsize
        _, columns, scales = self.wire or (None, 0, 0)
        return max(back, columns), 4 * scales, back


class Connection:
    """An NCCL communicator for the ranks of a process group, apart from torch's own."""

    abandoned = False  # a rank is missing, for which `destroy` would wait

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks; collective."""
        self.rank, self.ranks = group.rank(), group.size()
        mine = "" if self.rank else bytes(nccl.core.get_unique_id().as_bytes).hex()
        first = bytes.fromhex(exchange("connect by NCCL", mine, group)[0])
        unique = nccl.core.UniqueId.from_bytes(first)
        self.comm = nccl.core.Communicator.init(self.ranks, self.rank, unique)
        # The number of groups of ranks that load and store in each other's memory.
        self.hosts = self.ranks // int(self.comm.team_lsa.n_ranks)

    def unsupported(self, sizes: Sizes) -> str:
        """Return why these ranks cannot be served, or "". Equal on all ranks."""
        try:
            network = self.hosts == 1 or int(self.comm.gin_type)
        except Exception:  # the binding raises it: its structures are newer than this NCCL
            network = True
        if not network:
            return (
                f"the ranks are in {self.hosts} groups that share no memory, and NCCL found no "
                "network for kernels between them (GIN), as InfiniBand or RoCE: see NCCL_DEBUG=INFO"
            )
        if (per_host := sizes.experts // self.hosts) % 4 and not sizes.low_latency:
            return f"{per_host} experts on the ranks that share memory are not a multiple of 4"
        return ""

    def destroy(self) -> None:
        if not self.abandoned:
            self.comm.destroy()


class Held:
    """A group of the library, and a handle with the memory of its rows for each call in flight."""

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes, device: torch.device) -> None:
        """Make the group and the first handle; collective."""
        self.group, self.sizes, self.device = group, sizes, device
        self._lease: Lease[Connection] = _connections.lease(group, lambda: Connection(group))
        self.connection = self._lease.value
        if why := self.connection.unsupported(sizes):
            self._lease.release()
            raise BackendError(why)
        self.sharers: Any = None  # a communicator of the ranks that hold this rank's tokens
        if sizes.share > 1:
            rank = self.connection.rank
            self.sharers = self.connection.comm.split(color=rank // sizes.share, key=rank)
        few, self._token_bytes = sizes.low_latency, sum(sizes.row_bytes[:2])
        # No rank can receive more rows than this, so no buffer overflows.
        self.rows = self.connection.ranks * sizes.capacity
        self.local = sizes.experts // self.connection.ranks
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY if few else ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=sizes.experts, max_token_bytes=self._token_bytes,
            max_dispatch_tokens_per_rank=sizes.capacity,
            max_recv_tokens_per_rank=0 if few else self.rows,
            timeout_ns=int((sizes.timeout + _COMPILING_SECONDS) * 1e9),
            zero_copy=ep.ZeroCopyMode.AUTO if few else ep.ZeroCopyMode.ON,
        )  # fmt: skip
        self.library = ep.Group.create(self.connection.comm, config)
        self.calls: CallBuffers[Memory] = CallBuffers(lambda: Memory(self), group, most=None)

    def stream(self) -> int:
        """Return the current stream as the library takes it."""
        on_gpu = self.device.type == "cuda"
        return int(torch.cuda.current_stream(self.device).cuda_stream) if on_gpu else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all calls' memory, plus an estimate of the library's own memory."""
        s = self.sizes
        if s.low_latency:  # two buffers, each for the sent and received rows of a combine
            library = 2 * s.capacity * (s.experts + s.slots) * self._token_bytes * 65 // 64
        else:
            library = self.rows * (self._token_bytes + 8 * s.experts // self.connection.hosts)
        return (32 << 20) + library + sum(call.nbytes for call in self.calls.all)

    def free(self) -> None:
        """Destroy everything if all ranks do: the library waits for each of them."""
        fault = "" if self.connection.abandoned else gpu_fault(self.calls.stream, _FAREWELL_SECONDS)
        if why := farewell(self.group, "its NCCL buffers", fault, _FAREWELL_SECONDS):
            logger.warning("NCCL's buffers are left to the end of the process: %s", why)
            self.connection.abandoned = True
            _left.append(self)
            return
        for call in self.calls.all:
            call.free()
        self.library.destroy()
        if self.sharers is not None:
            self.sharers.destroy()
        self._lease.release()


class Memory:
    """A handle, and the memory of a call's rows: x, scales and, high-throughput only, y.

    Leading dimensions are (R,), or (L, C) in low latency. High-throughput calls have ids and
    weights (R, slots), and other ranks write and read their rows.
    """

    def __init__(self, held: Held) -> None:
        """Allocate, and make a handle; collective."""
        s, few = held.sizes, held.sizes.low_latency
        self._lead = (held.local, held.rows) if few else (held.rows,)
        self._ends = [0]
        for nbytes in s.row_bytes[: 2 if few else 3]:
            nbytes *= math.prod(self._lead)
            self._ends.append(self._ends[-1] + round_up(nbytes, 256))
        self._memory: Tensor = nccl.core.interop.torch.empty(self._ends[-1], dtype=torch.uint8)
        self._window, lists = None, {}
        self.ids = torch.empty((held.rows, s.slots), dtype=torch.int64, device=held.device)
        self.weights = torch.empty_like(self.ids, dtype=torch.float32)
        self.counts = torch.empty(held.local, dtype=torch.int32, device=held.device)
        if few:
            self.info = ep.LayoutInfo(expert_counters=described(self.counts))
        else:
            self.info = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL)
            lists = {"topk_weights": described(self.weights), "topk_idx": described(self.ids)}
            self._window = held.connection.comm.register_window(
                self._memory, nccl.core.WindowFlag.COLL_SYMMETRIC
            )
            self.y = self._part(2, s.dtype, s.hidden_size)
            self.combined = ep.CombineInputs(tokens=self.tensor(2, self.y))
        # Outputs of a dispatch, by whether rows are quantized: tensors, and the library's record.
        x = self._part(0, s.dtype, s.hidden_size)
        self.x_tensor = self.tensor(0, x)
        self.got: dict[bool, tuple[Tensor, Tensor | None, Any]] = {}
        self.got[False] = x, None, ep.DispatchOutputs(tokens=self.x_tensor, **lists)
        if s.wire is not None:
            q, scales = self._part(0, *s.wire[:2]), self._part(1, torch.float32, s.wire[2])
            outputs = ep.DispatchOutputs(
                tokens=self.tensor(0, q.view(BYTE)), scales=self.tensor(1, scales), **lists
            )
            self.got[True] = q, scales, outputs
        nowhere = torch.full((1, s.slots), -1, dtype=torch.int64, device=held.device)
        layout = ep.Layout.EXPERT_MAJOR if few else ep.Layout.FLAT
        self.handle = held.library.create_handle(layout, described(nowhere), stream=held.stream())

    def _part(self, i: int, dtype: torch.dtype, columns: int) -> Tensor:
        shape = (*self._lead, columns)
        part = self._memory[self._ends[i] :][: math.prod(shape) * dtype.itemsize]
        return part.view(dtype).view(shape)

    def tensor(self, i: int, part: Tensor) -> Any:
        """Return the library's record for the first rows of x (0), scales (1) or y (2)."""
        if self._window is None:
            return described(part)
        return ep.Tensor(part, window=self._window, window_offset=self._ends[i])

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + self.ids.nbytes + self.weights.nbytes

    def free(self) -> None:
        self.handle.destroy()
        if self._window is not None:
            self._window.close()


_connections: SharedBuffers[Connection] = SharedBuffers(Connection.destroy)
_shared: SharedBuffers[Held] = SharedBuffers(Held.free)
_left: list[Held] = []  # kept, so that nothing of the library is collected


def described(tensor: Tensor) -> Any:
    """Return the library's record of a contiguous tensor, which must outlive the record."""
    return _described(tensor.data_ptr(), tensor.dtype, tensor.shape)


@lru_cache(4096)
def _described(address: int, dtype: torch.dtype, shape: torch.Size) -> Any:
    _, _, kind, _ = nccl.core.interop.torch.resolve_tensor(torch.empty(0, dtype=dtype))
    return ep.Tensor(address, dtype=kind, shape=shape)


# The library takes 10 us to make a record, and addresses repeat. Records must hold no memory.
record = lru_cache(4096)(lambda kind, **fields: kind(**fields))


def lease(group: dist.ProcessGroup, sizes: Sizes, device_type: str) -> Lease[Held]:
    """Take the buffers of a group and sizes; collective if there are none yet."""
    # The library copies a map of 4 bytes for each token and rank, 16 bytes at once.
    sizes = replace(sizes, capacity=round_up(sizes.capacity, 4))
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, torch.cuda.current_device())
    return _shared.lease((group, sizes, device), lambda: Held(group, sizes, device))
