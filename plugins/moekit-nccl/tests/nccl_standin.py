"""A stand-in for the parts of `nccl.ep` that the dispatchers use, on the CPU over gloo.

Where the library would end the process, this raises. What the library leaves undefined is garbage
here: rows that nobody sent, weights of slots without an expert, and the order of rows where it
promises none. Importing this module makes it `nccl` in this process; `registry` offers the
dispatchers over it as ``<name>_standin``.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import types
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from vendor_stand_ins import exchange, garbage, on_cpu

live: list[Any] = []
_building = threading.local()  # the process group that a communicator is made for


class _Live:
    """An object of the library, which must be destroyed once and not be used afterwards."""

    def _open(self):
        live.append(self)

    def _check_open(self):
        assert self in live, "used after destroy()"

    def destroy(self):
        assert self in live, "destroyed twice"
        live.remove(self)


# -- nccl.core ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UniqueId:
    as_bytes: bytes

    @classmethod
    def from_bytes(cls, value):
        assert len(value) == 128
        return cls(value)


def get_unique_id(empty=False):
    return UniqueId(os.urandom(128))


class WindowFlag(IntEnum):
    DEFAULT = 0
    COLL_SYMMETRIC = 1


class Window(_Live):
    def __init__(self, buffer):
        self.begin, self.end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        self._open()

    close = _Live.destroy


@dataclass(frozen=True)
class Team:
    n_ranks: int


class Communicator(_Live):
    hosts, gin_type = 1, 0  # tests change these

    def __init__(self, group, ranks):
        self.group, self.ranks = group, ranks  # ranks: their indices in the group
        self.rank = ranks.index(group.rank())
        self._open()

    @classmethod
    def init(cls, nranks, rank, unique_id):
        group = _building.group
        assert (group.size(), group.rank()) == (nranks, rank)
        ids = [None] * nranks
        dist.all_gather_object(ids, unique_id.as_bytes, group=group)
        assert len(set(ids)) == 1
        return cls(group, list(range(nranks)))

    @property
    def team_lsa(self):
        return Team(len(self.ranks) // self.hosts)

    def split(self, color, key):
        colors = [None] * len(self.ranks)
        dist.all_gather_object(colors, (color, key), group=self.group)
        same = sorted((k, rank) for rank, (c, k) in enumerate(colors) if c == color)
        return Communicator(self.group, [rank for _, rank in same])

    def register_window(self, buffer, flags):
        self._check_open()
        assert flags == WindowFlag.COLL_SYMMETRIC
        sizes = [size for [size] in exchange(self.group, torch.tensor([buffer.nbytes]))]
        assert len({int(size) for size in sizes}) == 1
        return Window(buffer)

    @on_cpu
    def allgather(self, sent, received, *, stream):
        self._check_open()
        assert sent.is_contiguous() and received.is_contiguous()
        assert received.numel() == len(self.ranks) * sent.numel() and sent.numel()
        with _disable_current_modes():
            parts = received.view(-1).view(torch.uint8).chunk(len(self.ranks))
            mine = sent.view(-1).view(torch.uint8).clone()
            works = []
            for part, rank in zip(parts, self.ranks, strict=True):
                if rank == self.group.rank():
                    part.copy_(mine)
                    continue
                other = dist.get_global_rank(self.group, rank)
                works.append(dist.isend(mine, other, group=self.group))
                works.append(dist.irecv(part, other, group=self.group))
            for work in works:
                work.wait()

    def destroy(self):
        super().destroy()


# -- nccl.ep --------------------------------------------------------------------------------------

Algorithm = IntEnum("Algorithm", [("LOW_LATENCY", 0), ("HIGH_THROUGHPUT", 1)])
Layout = IntEnum("Layout", [("UNSET", 0), ("EXPERT_MAJOR", 1), ("RANK_MAJOR", 2), ("FLAT", 3)])
PassDir = IntEnum("PassDir", [("FWD", 0), ("BWD", 1)])
ExpertIdKind = IntEnum("ExpertIdKind", [("AUTO", 0), ("LOCAL", 1), ("GLOBAL", 2)])
ZeroCopyMode = IntEnum("ZeroCopyMode", [("AUTO", 0), ("OFF", 1), ("ON", 2)])
DispatchQuantizationRecipe = IntEnum("DispatchQuantizationRecipe", [("NONE", 0), ("FWD", 1)])
_SENT = (torch.bfloat16, torch.float16, torch.float32)
_FORWARDED = (*_SENT, torch.float8_e4m3fn)


def _at(address, dtype, shape):
    """The tensor at an address, which must live, as the library would read it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class Tensor:
    def __init__(self, buffer, *, dtype=None, shape=None, window=None, window_offset=None):
        self.raw = (buffer, dtype, shape) if isinstance(buffer, int) else None
        if self.raw:
            with _disable_current_modes():
                buffer = _at(*self.raw)
        assert isinstance(buffer, torch.Tensor) and buffer.dim() and buffer.is_contiguous()
        assert buffer.dtype in (*_FORWARDED, torch.int32, torch.int64), "no such type in NCCL"
        assert (window is None) == (window_offset is None)
        if window is not None and buffer.numel():
            assert window.begin + window_offset == buffer.data_ptr()
            assert buffer.data_ptr() + buffer.nbytes <= window.end
        self._buffer, self.window = None if self.raw else buffer, window

    @property
    def buffer(self):
        """A descriptor holds an address, where another tensor may lie at the next call."""
        return _at(*self.raw) if self.raw else self._buffer


def _struct(name, **defaults):
    """A keyword-only record, as the library's are."""

    def __init__(self, **given):
        assert given.keys() <= defaults.keys(), given
        vars(self).update({**defaults, **given})

    return type(name, (), {"__init__": __init__})


GroupConfig = _struct(
    "GroupConfig", algorithm=Algorithm.LOW_LATENCY, num_experts=0, max_dispatch_tokens_per_rank=0,
    max_recv_tokens_per_rank=0, max_token_bytes=0, timeout_ns=0, zero_copy=ZeroCopyMode.AUTO,
)  # fmt: skip
LayoutInfo = _struct("LayoutInfo", expert_counters=None, recv_topk_idx_kind=ExpertIdKind.AUTO)
DispatchConfig = _struct(
    "DispatchConfig",
    pass_direction=PassDir.FWD,
    quantization_recipe=DispatchQuantizationRecipe.NONE,
)
CombineConfig = _struct("CombineConfig", pass_direction=PassDir.FWD)
DispatchInputs = _struct("DispatchInputs", tokens=None, topk_weights=None, scales=None)
DispatchOutputs = _struct(
    "DispatchOutputs", tokens=None, topk_weights=None, topk_idx=None, scales=None
)
CombineInputs = _struct("CombineInputs", tokens=None, topk_weights=None)
CombineOutputs = _struct("CombineOutputs", tokens=None, topk_weights=None)


def _of(tensor, dtype=None, dims=2):
    """The buffer of a descriptor that the library requires."""
    found = tensor.buffer
    assert found.dim() == dims and (dtype is None or found.dtype == dtype)
    return found


class Group(_Live):
    def __init__(self, comm, config):
        c, self.comm, self.config = config, comm, config
        comm._check_open()
        self.group, self.ranks = comm.group, len(comm.ranks)
        self.low_latency = c.algorithm == Algorithm.LOW_LATENCY
        assert c.num_experts > 0 and c.num_experts % self.ranks == 0
        self.local = c.num_experts // self.ranks
        self.capacity, self.first = c.max_dispatch_tokens_per_rank, comm.rank * self.local
        self.generator = torch.Generator().manual_seed(comm.rank)
        assert self.capacity > 0 and c.max_token_bytes % 16 == 0 < c.max_token_bytes
        if not self.low_latency:
            assert c.max_recv_tokens_per_rank >= self.capacity, "eager mode is not known here"
            team = comm.team_lsa.n_ranks
            assert self.local * team % 4 == 0 and self.capacity * team % 4 == 0
        said = torch.tensor([c.num_experts, self.capacity, c.max_recv_tokens_per_rank])
        assert len({tuple(s.tolist()) for [s] in exchange(self.group, said)}) == 1
        self._open()

    @classmethod
    def create(cls, comm, config):
        return cls(comm, config)

    def create_handle(self, layout, topk_idx, *, stream):
        self._check_open()
        assert layout == (Layout.EXPERT_MAJOR if self.low_latency else Layout.FLAT)
        made = (LowLatencyHandle if self.low_latency else HighThroughputHandle)(self)
        made.slots = topk_idx.buffer.shape[1]
        assert 0 < made.slots <= 32
        made.update(topk_idx, stream=stream)
        return made

    def destroy(self):
        dist.barrier(self.group)
        super().destroy()

    def check_sent(self, inputs, config, tokens):
        """The rows and scales of a dispatch, the latter None or a tensor."""
        forwards = config is not None and (
            config.quantization_recipe == DispatchQuantizationRecipe.FWD
        )
        x = _of(inputs.tokens)
        assert x.shape[0] == tokens <= self.capacity and x.data_ptr() % 16 == 0
        row, scales = x.shape[1] * x.itemsize, None
        assert row % 16 == 0 and x.dtype in (_FORWARDED if forwards else _SENT)
        assert forwards == (inputs.scales is not None)
        if forwards:
            scales = _of(inputs.scales, torch.float32)
            assert scales.shape[0] == tokens and scales.shape[1] * 4 % 16 == 0
            assert scales.data_ptr() % 16 == 0
            row += scales.shape[1] * 4
        assert row <= self.config.max_token_bytes
        return x, scales


class _Handle(_Live):
    def __init__(self, group):
        self.group = group
        self._open()

    def _check(self):
        self._check_open()
        self.group._check_open()


class HighThroughputHandle(_Handle):
    """sources: rank and token of each row. ids: (R, slots), the experts of a row that are here."""

    @on_cpu
    def update(self, topk_idx, *, stream):
        self._check()
        g, ids = self.group, _of(topk_idx)
        assert ids.shape[1] == self.slots and ids.shape[0] <= g.capacity
        self.mine, self.sources, self.experts = ids.clone(), [], []
        for rank, [theirs] in enumerate(exchange(g.group, ids)):
            assert not len(theirs) or int(theirs.max()) < g.config.num_experts
            for token, row in enumerate((theirs - g.first).tolist()):
                if here := sorted((e, k) for k, e in enumerate(row) if 0 <= e < g.local):
                    self.sources.append((rank, token))
                    self.experts.append(here)  # in the order of experts, not of slots
        assert len(self.sources) <= g.config.max_recv_tokens_per_rank

    @on_cpu
    def dispatch(self, inputs, outputs, *, layout_info=None, config=None, stream):
        self._check()
        g, back = self.group, config is not None and config.pass_direction == PassDir.BWD
        x, scales = g.check_sent(inputs, config, len(self.mine))
        rows = g.config.max_recv_tokens_per_rank
        out = _of(outputs.tokens, x.dtype)
        assert out.shape == (rows, x.shape[1])
        assert (outputs.tokens.window is not None) or g.config.zero_copy != ZeroCopyMode.ON
        sent = [x]
        if back:
            assert inputs.topk_weights is outputs.topk_weights is outputs.topk_idx is None
        else:
            weights = _of(inputs.topk_weights, torch.float32)
            assert weights.shape == self.mine.shape
            sent.append(weights)
            got_weights = _of(outputs.topk_weights, torch.float32)
            got_ids = _of(outputs.topk_idx, torch.int64)
            assert got_weights.shape == got_ids.shape == (rows, self.slots)
            assert layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL, "set it: AUTO may change"
        if scales is not None:
            sent.append(scales)
            got_scales = _of(outputs.scales, torch.float32)
            assert got_scales.shape == (rows, scales.shape[1])
            assert (outputs.scales.window is None) == (outputs.tokens.window is None)
        arrived = exchange(g.group, *sent)
        with _disable_current_modes():
            out.view(torch.uint8).fill_(0xFF)
            if not back:
                got_ids.fill_(-1)
                got_weights.fill_(float("nan"))
            for row, (rank, token) in enumerate(self.sources):
                theirs = arrived[rank]
                out.view(torch.uint8)[row] = theirs[0].view(torch.uint8)[token]
                if scales is not None:
                    got_scales[row] = theirs[-1][token]
                for i, (expert, slot) in enumerate(() if back else self.experts[row]):
                    got_ids[row, i], got_weights[row, i] = expert, theirs[1][token, slot]

    @on_cpu
    def combine(self, inputs, outputs, *, config=None, stream):
        self._check()
        g, back = self.group, config is not None and config.pass_direction == PassDir.BWD
        y, out = _of(inputs.tokens), _of(outputs.tokens)
        assert y.dtype in _SENT and out.dtype == y.dtype and out.data_ptr() % 16 == 0
        assert out.shape == (len(self.mine), y.shape[1]) and len(y) >= len(self.sources)
        assert (inputs.tokens.window is not None) or g.config.zero_copy != ZeroCopyMode.ON
        assert back == (inputs.topk_weights is not None)
        with _disable_current_modes():
            count = len(self.sources)
            where = torch.tensor(self.sources, dtype=torch.long).view(-1, 2)
            sent = [where, y[:count]]
            if back:
                grads = _of(inputs.topk_weights, torch.float32)
                assert grads.shape == (len(y), self.slots)
                of_slots = torch.zeros(count, self.slots)
                for row, here in enumerate(self.experts):
                    for i, (_, slot) in enumerate(here):
                        of_slots[row, slot] = grads[row, i]
                sent.append(of_slots)
        arrived, total = exchange(g.group, *sent), torch.zeros(out.shape)
        with _disable_current_modes():
            if back:
                out_weights = _of(outputs.topk_weights, torch.float32)
                assert out_weights.shape == self.mine.shape
                out_weights.zero_()
            for where, rows, *weights in arrived:
                mine = where[:, 0] == g.comm.rank
                tokens = where[mine, 1]
                total[tokens] += rows[mine].float()
                for theirs in weights:
                    out_weights[tokens] += theirs[mine]
            out.copy_(total)


class LowLatencyHandle(_Handle):
    """The library keeps the address of the ids, and reads them again in the combine."""

    @on_cpu
    def update(self, topk_idx, *, stream):
        self._check()
        assert topk_idx.buffer.shape[1] == self.slots
        self.ids = topk_idx.buffer

    @on_cpu
    def dispatch(self, inputs, outputs, *, layout_info, config=None, stream):
        self._check()
        g, ids = self.group, self.ids
        assert inputs.topk_weights is None
        x, scales = g.check_sent(inputs, config, len(ids))
        assert x.shape[1] % 16 == 0
        shape = (g.local, g.ranks * g.capacity)
        slab, counts = _of(outputs.tokens, x.dtype, 3), _of(layout_info.expert_counters, dims=1)
        assert slab.shape == (*shape, x.shape[1]) and counts.dtype == torch.int32
        assert counts.shape == (g.local,)
        if scales is not None:
            got_scales = _of(outputs.scales, torch.float32, 3)
            assert got_scales.shape == (*shape, scales.shape[1])
        arrived = exchange(g.group, ids, x, *([] if scales is None else [scales]))
        self.sources = []
        with _disable_current_modes():
            slab.view(torch.uint8).fill_(0xFF)
            for expert in range(g.local):
                found = [
                    (rank, token)
                    for rank, (theirs, *_) in enumerate(arrived)
                    for token in (theirs == g.first + expert).nonzero()[:, 0].tolist()
                ]
                order = torch.randperm(len(found), generator=g.generator).tolist()
                self.sources.append([found[i] for i in order])
                counts[expert] = len(found)
                for row, (rank, token) in enumerate(self.sources[-1]):
                    theirs = arrived[rank]
                    slab.view(torch.uint8)[expert, row] = theirs[1].view(torch.uint8)[token]
                    if scales is not None:
                        got_scales[expert, row] = theirs[2][token]

    @on_cpu
    def combine(self, inputs, outputs, *, config=None, stream):
        self._check()
        g, ids, y = self.group, self.ids, _of(inputs.tokens, dims=3)
        out, weights = _of(outputs.tokens, y.dtype), _of(outputs.topk_weights, torch.float32)
        assert y.shape[:2] == (g.local, g.ranks * g.capacity) and y.shape[2] % 128 == 0
        assert y.dtype in _SENT and out.shape == (len(ids), y.shape[2])
        assert weights.shape == ids.shape and out.data_ptr() % 16 == y.data_ptr() % 16 == 0
        with _disable_current_modes():
            rows = [
                (e, r, *source) for e, found in enumerate(self.sources)
                for r, source in enumerate(found)
            ]  # fmt: skip
            which = torch.tensor(rows, dtype=torch.long).view(-1, 4)
            values = y[which[:, 0], which[:, 1]]
        arrived, total = exchange(g.group, values, which), torch.zeros(out.shape)
        with _disable_current_modes():
            found = {
                (token, rank * g.local + expert): value.float()
                for rank, (theirs, where) in enumerate(arrived)
                for value, (expert, _, source, token) in zip(theirs, where.tolist(), strict=True)
                if source == g.comm.rank
            }
            for token, slot in (ids >= 0).nonzero().tolist():
                total[token] += weights[token, slot] * found.pop((token, int(ids[token, slot])))
            assert not found, "rows came back that nobody asked for"
            out.copy_(total)


def get_lib_version():
    return "0.2.0"


def _module(name, **contents):
    """A module without a spec, so that nothing that looks for the library finds it."""
    made = types.ModuleType(name)
    vars(made).update(contents)
    sys.modules[name] = made
    return made


def _named(*names):
    return {name: globals()[name] for name in names}


_memory = _module(
    "nccl.core.interop.torch",
    resolve_tensor=lambda tensor: (tensor.data_ptr(), tensor.numel(), tensor.dtype, None),
    empty=lambda nbytes, dtype, device=None: garbage((nbytes,), dtype),
)
_interop = _module("nccl.core.interop", torch=_memory)
_core = _module(
    "nccl.core",
    interop=_interop,
    **_named("Communicator", "UniqueId", "WindowFlag", "get_unique_id"),
)
_ep = _module(
    "nccl.ep",
    **_named(
        "Algorithm", "CombineConfig", "CombineInputs", "CombineOutputs", "DispatchConfig",
        "DispatchInputs", "DispatchOutputs", "DispatchQuantizationRecipe", "ExpertIdKind", "Group",
        "GroupConfig", "Layout", "LayoutInfo", "PassDir", "Tensor", "ZeroCopyMode",
        "get_lib_version",
    ),
    Handle=HighThroughputHandle,
)  # fmt: skip
_module("nccl", core=_core, ep=_ep)

import moekit_nccl  # noqa: E402
from moekit_nccl import buffers  # noqa: E402
from moekit_nccl.dispatcher import (  # noqa: E402, F401 (spec.target names this module)
    HighThroughputDispatcher,
    LowLatencyDispatcher,
)
from moekit_nccl.training import TrainableHighThroughput  # noqa: E402, F401 (as above)

from moekit.contract.specs import DispatcherSpec  # noqa: E402
from moekit.discovery.registry import Registry  # noqa: E402
from moekit.discovery.registry import registry as installed  # noqa: E402


class Connection(buffers.Connection):
    def __init__(self, group):
        _building.group = group
        super().__init__(group)


buffers.Connection = Connection  # type: ignore[misc]


def specs() -> list[DispatcherSpec]:
    """The plugin's own, on the CPU."""
    return [
        replace(
            spec,
            name=f"{spec.name}_standin",
            target=f"{__name__}:{spec.target.split(':')[1]}",
            training=spec.training and f"{__name__}:{spec.training.split(':')[1]}",
            devices=("cpu",),
            requires=(),
        )
        for spec in moekit_nccl.moekit_dispatchers()
    ]


def registry() -> Registry:
    made = Registry(plugins=installed().plugins)
    for spec in specs():
        made.register(spec)
    return made
