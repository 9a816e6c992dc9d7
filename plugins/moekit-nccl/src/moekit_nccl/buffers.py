"""The library's groups, and the memory of calls: shared by layers of one process group and size.

Nothing here may reach the library with sizes that it does not take, or on a device whose context an
earlier failure has ended: the library ends the process then.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import nccl.core
import nccl.core.interop.torch
import nccl.ep as ep
import torch
import torch.distributed as dist
from torch import Tensor

from moekit.errors import BackendError, PeerFailed
from moekit.plugin import Agreement, CallBuffers, Lease, SharedBuffers, exchange, round_up

from . import library

logger = logging.getLogger("moekit")

# Bytes that the library allocates in each group beside what grows with the sizes.
_WORKSPACE_BYTES = 32 << 20
# Ranks wait inside a kernel for others that still compile it, so the library waits longer than
# ``peer_timeout``.
_COMPILING_SECONDS = 30.0
# How long a rank waits for the other ranks before it leaves buffers to the end of the process.
_FAREWELL_SECONDS = 20.0
_ALIGNMENT = 256


@dataclass(frozen=True)
class Wire:
    """Quantized rows: columns of ``dtype``, one byte each, and fp32 scales, which fill 16 bytes."""

    dtype: torch.dtype
    columns: int
    scales: int

    @property
    def padded_scales(self) -> int:
        return round_up(self.scales, 4)


@dataclass(frozen=True)
class Sizes:
    """What a group of the library is made for, equal on all ranks.

    experts, slots: of all ranks, and of one token. Each slice of an expert counts as an expert.
    capacity: tokens that one rank sends. share: ranks that hold the same tokens.
    """

    low_latency: bool
    experts: int
    slots: int
    capacity: int
    hidden_size: int
    dtype: torch.dtype
    wire: Wire | None
    share: int
    timeout: float

    @property
    def token_bytes(self) -> int:
        """The most bytes of a token on its way to the experts, and back."""
        back = self.hidden_size * self.dtype.itemsize
        there = 0 if self.wire is None else self.wire.columns + 4 * self.wire.padded_scales
        return round_up(max(back, there), 16)


class Connection:
    """An NCCL communicator for the ranks of a process group, apart from torch's own."""

    abandoned = False  # a rank is missing, for which `destroy` would wait

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connect the ranks; collective."""
        self.rank, self.ranks = group.rank(), group.size()
        first = not self.rank
        mine = bytes(nccl.core.get_unique_id().as_bytes).hex() if first else ""
        name, *_ = exchange("connect by NCCL", mine, group)
        unique = nccl.core.UniqueId.from_bytes(bytes.fromhex(name))
        self.comm = nccl.core.Communicator.init(self.ranks, self.rank, unique)
        # Groups of ranks that load and store in each other's memory.
        self.hosts = self.ranks // int(self.comm.team_lsa.n_ranks)
        self._parts: dict[int, Any] = {}

    def sharers(self, share: int) -> Any:
        """Return the communicator of the ``share`` ranks that hold this rank's tokens. Collective
        at the first call."""
        if share not in self._parts:
            self._parts[share] = self.comm.split(color=self.rank // share, key=self.rank)
        return self._parts[share]

    def reaches_hosts(self) -> bool:
        """Return whether kernels can use a network. True if NCCL is too old to be asked."""
        try:
            return bool(int(self.comm.gin_type))
        except Exception:  # the binding's own error: its structures are newer than this NCCL
            return True

    def destroy(self) -> None:
        for comm in () if self.abandoned else (*self._parts.values(), self.comm):
            comm.destroy()


class Held:
    """A group of the library, and a handle with the memory of its rows for each call in flight."""

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes, device: torch.device) -> None:
        """Make the group and the first handle; collective."""
        self.group, self.sizes, self.device = group, sizes, device
        self.farewell = Agreement(group, _FAREWELL_SECONDS)
        self._lease: Lease[Connection] = _connections.lease(group, lambda: Connection(group))
        self.connection = self._lease.value
        if why := self._unsupported():
            self._lease.release()
            raise BackendError(why)
        self.sharers = self.connection.sharers(sizes.share) if sizes.share > 1 else None
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY if sizes.low_latency else _HIGH_THROUGHPUT,
            num_experts=sizes.experts,
            max_dispatch_tokens_per_rank=sizes.capacity,
            # No rank can get more rows, so none overflows.
            max_recv_tokens_per_rank=0 if sizes.low_latency else self.rows,
            max_token_bytes=sizes.token_bytes,
            timeout_ns=int((sizes.timeout + _COMPILING_SECONDS) * 1e9),
            zero_copy=ep.ZeroCopyMode.AUTO if sizes.low_latency else ep.ZeroCopyMode.ON,
        )
        self.library = ep.Group.create(self.connection.comm, config)
        self.calls: CallBuffers[Slabs | Rows] = CallBuffers(self._open, group, most=None)

    def _unsupported(self) -> str:
        """Return why the connected ranks cannot be served, or "". Equal on all ranks."""
        ranks, hosts = self.connection.ranks, self.connection.hosts
        if hosts > 1 and not self.connection.reaches_hosts():
            return (
                f"the {ranks} ranks are in {hosts} groups that share no memory, and NCCL found no "
                "network that kernels can use between them (GIN): it needs InfiniBand or RoCE "
                "cards, see NCCL_GIN_TYPE and NCCL_DEBUG=INFO"
            )
        if (per_host := self.sizes.experts // hosts) % 4 and not self.sizes.low_latency:
            return f"{per_host} experts on the ranks that share memory are not a multiple of 4"
        return ""

    @property
    def rows(self) -> int:
        """The most rows that one rank receives."""
        return self.connection.ranks * self.sizes.capacity

    @cached_property
    def local_experts(self) -> int:
        return self.sizes.experts // self.connection.ranks

    def stream(self) -> int:
        """Return the current stream as the library takes it."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def nbytes(self) -> int:
        """The bytes of all calls' memory, and about what the library allocates."""
        s, rows = self.sizes, self.rows
        if s.low_latency:  # two buffers, each for what a combine sends and receives
            library = 2 * s.capacity * (s.experts + s.slots) * s.token_bytes * 65 // 64
        else:
            library = rows * (s.token_bytes + 8 * s.experts // self.connection.hosts)
            library += rows * -(-s.experts // 8)
        return _WORKSPACE_BYTES + library + sum(call.nbytes for call in self.calls.all)

    def _open(self) -> Slabs | Rows:
        return Slabs(self) if self.sizes.low_latency else Rows(self)

    def free(self) -> None:
        """Destroy everything if all ranks do, as the library waits for every rank."""
        if why := self._missing():
            logger.warning("NCCL's buffers are left to the end of the process: %s", why)
            self.connection.abandoned = True
            _left.append(self)
            return
        for call in self.calls.all:
            call.free()
        self.library.destroy()
        self._lease.release()

    def _missing(self) -> str:
        """Return why some rank does not free its part, or an empty string."""
        if self.group in _unresponsive:
            return "a rank did not answer before"
        fault = self._fault()
        try:
            dist.get_process_group_ranks(self.group)
            self.farewell.agree("free its NCCL buffers", fault)
        except PeerFailed as error:
            _unresponsive.add(self.group)
            return str(error)
        except (KeyError, ValueError):
            return "the process group was destroyed first; destroy kernels before their group"
        return fault or ""

    def _fault(self) -> str | None:
        """Return why this rank's GPU does not end its calls, for which the library would wait."""
        last, end = self.calls.stream, time.monotonic() + _FAREWELL_SECONDS
        try:
            while last is not None and not last.query():
                if time.monotonic() > end:
                    return "its GPU still waits for another rank"
                time.sleep(0.01)
        except RuntimeError as error:
            return f"its GPU has failed: {error}"
        return None


class Rows:
    """The memory of a high-throughput call, which other ranks write and read: x, scales and y."""

    def __init__(self, held: Held) -> None:
        """Allocate, register, and make a handle; collective."""
        s, rows = held.sizes, held.rows
        self.ids, self.weights = (
            torch.empty((rows, s.slots), dtype=dtype, device=held.device)
            for dtype in (torch.int64, torch.float32)
        )
        row = s.hidden_size * s.dtype.itemsize
        scales = 0 if s.wire is None else 4 * s.wire.padded_scales
        sent = row if s.wire is None else max(row, s.wire.columns)
        ends = [0]
        for nbytes in (sent, scales, row):
            ends.append(ends[-1] + round_up(rows * nbytes, _ALIGNMENT))
        self._memory = nccl.core.interop.torch.empty(ends[-1], dtype=torch.uint8)
        self._window = held.connection.comm.register_window(
            self._memory, nccl.core.WindowFlag.COLL_SYMMETRIC
        )
        self._ends, self._rows = ends, rows
        self.x, self.y = (self._part(i, s.dtype, s.hidden_size) for i in (0, 2))
        self.x_tensor, self.y_tensor = self._tensor(0, self.x), self.y_rows(rows)
        self.got = self._outputs(self.x_tensor, None)
        self.quantized, self.scales, self.got_quantized = self.x, self.y, self.got
        if s.wire is not None:
            self.quantized = self._part(0, s.wire.dtype, s.wire.columns)
            self.scales = self._part(1, torch.float32, s.wire.padded_scales)
            self.got_quantized = self._outputs(
                self._tensor(0, as_bytes(self.quantized)), self._tensor(1, self.scales)
            )
        nowhere = torch.full((1, s.slots), -1, dtype=torch.int64, device=held.device)
        self.handle = held.library.create_handle(
            ep.Layout.FLAT, ep.Tensor(nowhere), stream=held.stream()
        )

    def y_rows(self, rows: int) -> Any:
        """Return the first rows of y as the library takes them."""
        return self._tensor(2, self.y[:rows])

    def _part(self, i: int, dtype: torch.dtype, columns: int) -> Tensor:
        nbytes = self._rows * columns * dtype.itemsize
        return self._memory[self._ends[i] :][:nbytes].view(dtype).view(self._rows, columns)

    def _tensor(self, i: int, part: Tensor) -> Any:
        return ep.Tensor(part, window=self._window, window_offset=self._ends[i])

    def _outputs(self, tokens: Any, scales: Any) -> Any:
        weights, ids = ep.Tensor(self.weights), ep.Tensor(self.ids)
        return ep.DispatchOutputs(tokens=tokens, topk_weights=weights, topk_idx=ids, scales=scales)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + self.ids.nbytes + self.weights.nbytes

    def free(self) -> None:
        self.handle.destroy()
        self._window.close()


class Slabs:
    """The memory of a low-latency call: received rows (L, C, H), with scales, and their counts."""

    def __init__(self, held: Held) -> None:
        """Allocate, and make a handle; collective."""
        s, shape = held.sizes, (held.local_experts, held.rows)
        columns, dtype = s.hidden_size, s.dtype
        if s.wire is not None:
            columns, dtype = s.wire.columns, s.wire.dtype
        # One allocation serves both kinds of rows, of which a layer may send either.
        width = max(columns * dtype.itemsize, s.hidden_size * s.dtype.itemsize)
        self._memory = torch.empty((*shape, width), dtype=torch.uint8, device=held.device)
        self.counts = torch.empty(shape[0], dtype=torch.int32, device=held.device)
        self.info = ep.LayoutInfo(expert_counters=ep.Tensor(self.counts))
        self.x = self._slab(s.dtype, s.hidden_size)
        self.got = ep.DispatchOutputs(tokens=ep.Tensor(self.x))
        self.quantized, self.scales, self.got_quantized = self.x, self.x[..., :0], self.got
        if s.wire is not None:
            self.quantized = self._slab(dtype, columns)
            self.scales = torch.empty(
                (*shape, s.wire.padded_scales), dtype=torch.float32, device=held.device
            )
            self.got_quantized = ep.DispatchOutputs(
                tokens=ep.Tensor(as_bytes(self.quantized)), scales=ep.Tensor(self.scales)
            )
        nowhere = torch.full((1, s.slots), -1, dtype=torch.int64, device=held.device)
        self.handle = held.library.create_handle(
            ep.Layout.EXPERT_MAJOR, ep.Tensor(nowhere), stream=held.stream()
        )

    def _slab(self, dtype: torch.dtype, columns: int) -> Tensor:
        experts, rows, _ = self._memory.shape
        nbytes = experts * rows * columns * dtype.itemsize
        return self._memory.view(-1)[:nbytes].view(dtype).view(experts, rows, columns)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + self.scales.nbytes + self.counts.nbytes

    def free(self) -> None:
        self.handle.destroy()


_HIGH_THROUGHPUT = ep.Algorithm.HIGH_THROUGHPUT
_connections: SharedBuffers[Connection] = SharedBuffers(Connection.destroy)
_shared: SharedBuffers[Held] = SharedBuffers(Held.free)
_unresponsive: set[dist.ProcessGroup] = set()
# Kept, as the objects of the library might otherwise wait for other ranks when they are collected.
_left: list[Held] = []


def lease(group: dist.ProcessGroup, sizes: Sizes, device_type: str) -> Lease[Held]:
    """Take the buffers of a group and sizes; collective if there are none yet."""
    # The library copies 16 bytes of a map at once, which has 4 bytes for a token and a rank.
    sizes = replace(sizes, capacity=round_up(sizes.capacity, 4))
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return _shared.lease((group, sizes, device.index), lambda: Held(group, sizes, device))


def protocol(name: str) -> str:
    """Return what must be equal on all ranks, apart from the problem."""
    return f"{name} 1 of nccl.ep {ep.get_lib_version()} over NCCL {library.loaded_nccl()}"


def as_bytes(rows: Tensor) -> Tensor:
    """Return one-byte rows as a type that the library forwards: it has none for int8."""
    return rows.view(torch.float8_e4m3fn)
