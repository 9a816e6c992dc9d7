"""The dispatchers on the CPU: ranks are processes that share memory of this host.

Triton's interpreter runs the kernels of all ranks at the same time, so they wait for each other's
flags as GPUs do. Importing this module puts shared memory in the place of symmetric memory in this
process; `registry` offers the dispatchers as ``<name>_standin``.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from moekit_nvlink import buffers, dispatcher, moekit_dispatchers, training
from moekit_nvlink.settings import Settings
from moekit_nvlink.transfer import Tile
from nvlink_host import problems
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from moekit.discovery.registry import Registry
from moekit.discovery.registry import registry as installed
from moekit.plugin import DispatcherSpec, MoEProblem, Routing, exchange


def open_memory(nbytes: int, group: dist.ProcessGroup, device: torch.device):
    """Map a file of every rank. The own memory starts with garbage."""
    assert device.type == "cpu"
    handle, path = tempfile.mkstemp(prefix="moekit-nvlink-", dir="/dev/shm")
    try:
        os.ftruncate(handle, nbytes)
        paths = exchange("open shared memory", path, group)
        opened = [os.open(each, os.O_RDWR) for each in paths]
        exchange("have opened shared memory", "", group)
    finally:
        os.close(handle)
        os.unlink(path)
    maps = [mmap.mmap(each, nbytes) for each in opened]
    for each in opened:
        os.close(each)
    memories: list[Tensor] = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]
    mine = memories[group.rank()]
    mine.fill_(0xFF)
    return mine, [each.data_ptr() for each in memories], maps


buffers.open_memory = open_memory
_read_and_write = interpreter_builder.create_atomic_rmw
_LOOK = 0.0005  # seconds before a look at a flag


def _patient(op, ptr, val, *others):
    """Give the core to another rank before a look at a flag, which adds 0."""
    if not val.data.any():
        time.sleep(_LOOK)
    return _read_and_write(op, ptr, val, *others)


interpreter_builder.create_atomic_rmw = _patient
# The kit's calls are small: calls of 8 tokens and more leave sums to the combine.
sys.modules["moekit_nvlink.layout"].REDUCED_FROM = dispatcher.REDUCED_FROM = 8
# The interpreter runs one program after another.
_PROGRAMS = 6
Tile.few_programs = _PROGRAMS


class _StandIn:
    def __init__(self, *args, **kwargs) -> None:
        read = Settings.read
        Settings.read = lambda: replace(read(), programs=_PROGRAMS)
        try:
            super().__init__(*args, **kwargs)
        finally:
            Settings.read = read


class HighThroughput(_StandIn, dispatcher.HighThroughputDispatcher):
    pass


class TrainableHighThroughput(_StandIn, training.TrainableHighThroughput):
    pass


class LowLatency(_StandIn, dispatcher.LowLatencyDispatcher):
    pass


def _check(check, problem: MoEProblem) -> list[str]:
    few = (problem.max_num_tokens or 0) <= 64
    return check(problem) + ([] if few else ["more tokens take the interpreter minutes"])


def specs() -> list[DispatcherSpec]:
    made = []
    for spec, name in zip(moekit_dispatchers(), ("HighThroughput", "LowLatency"), strict=True):
        check = partial(_check, spec.check)
        trainable = spec.training and f"nvlink_standin:Trainable{name}"
        made.append(replace(spec, name=f"{spec.name}_standin", devices=("cpu",), check=check,
                            target=f"nvlink_standin:{name}", training=trainable))  # fmt: skip
    return made


def registry() -> Registry:
    made = Registry(plugins=installed().plugins)
    for spec in specs():
        made.register(spec)
    return made


def delayed_calls(rank: int, world: int, name: str, calls: int) -> None:
    """Make calls of changing T, one or two at a time, with delays; memory is poisoned at times."""
    spec = registry().dispatcher(name)
    problem = problems(world, 1, 5, 3, 16, 6, dtype=torch.float32)[rank]
    held = spec.load()(spec, problem)
    own, shared = random.Random(rank), random.Random(-1)
    draw = torch.Generator().manual_seed(rank)
    try:
        for call in range(calls):
            if call % 4 == 0:  # nobody writes or reads rows between two calls of all ranks
                dist.barrier()
                buffers_of_rank = held.lease.value
                at = buffers_of_rank.layout
                for buffer in buffers_of_rank.calls.all:
                    buffer.bytes[: at.ids] = 0xFF
                    buffer.bytes[at.weights : at.flags] = 0xFF
                dist.barrier()
            flights = [_started(held, own.randrange(7), draw) for _ in range(shared.randint(1, 2))]
            for x, routing, tokens in flights:
                time.sleep(own.choice((0, 0, 0.02)))
                out = torch.full_like(x, float("nan"))
                held.finalize(_returned(tokens), tokens, out).result()
                times = torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0).sum(1)
                assert ((out - x * times[:, None]).abs() < 1e-5).all(), f"call {call}"
            time.sleep(own.choice((0, 0, 0.05)))
    finally:
        held.destroy()


def refused_input(rank: int, world: int, name: str) -> None:
    """Let one rank, then all ranks, refuse a call of an unchecked kernel; the next one is right.

    So it is where a rank has room for fewer tokens than others pass. The buffers are made in
    inference mode, and used in and outside of it.
    """
    spec = registry().dispatcher(name)
    problem = problems(world, 1, 5, 3, 16, 6, dtype=torch.float32)[rank]
    draw = torch.Generator().manual_seed(rank)
    with torch.inference_mode():
        held = spec.load()(spec, problem)
    try:
        for refuse, narrow in (((), 4), ((1,), 4), ((), 4), (range(world), 4), ((), 2), ((), 4)):
            most = 4 if rank else narrow
            x, routing = _tokens(most, draw)
            routing = replace(routing, max_tokens=most)
            if rank in refuse:
                held.abort("7 tokens, but max_num_tokens=6")
                continue
            tokens, out = held.prepare(x, routing, None).result(), torch.empty_like(x)
            held.finalize(_returned(tokens), tokens, out).result()
            times = torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0).sum(1)
            right = ((out - x * times[:, None]).abs() < 1e-5).all()
            ends = refuse or narrow < 4
            assert out.isnan().all() if ends else right, f"rank {rank}, where {refuse} refuse"
    finally:
        held.destroy()


def _started(held, tokens: int, draw: torch.Generator):
    x, routing = _tokens(tokens, draw)
    return x, routing, held.prepare(x, routing, None).result()


def _tokens(tokens: int, draw: torch.Generator) -> tuple[Tensor, Routing]:
    x = torch.randn(tokens, 16, generator=draw)
    ids = torch.rand(tokens, 5, generator=draw).argsort(1)[:, :3].int()
    ids[torch.rand(ids.shape, generator=draw) < 0.3] = -1
    return x, Routing(torch.rand(tokens, 3, generator=draw), ids)


def _returned(tokens) -> Tensor:
    """Return the output of experts that return their input."""
    if tokens.expert_num_tokens is not None:
        real = torch.arange(tokens.x.shape[1]) < tokens.expert_num_tokens[:, None]
        return torch.where(real[..., None], tokens.x, float("nan"))
    weights = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0)
    used = (tokens.topk_ids >= 0).any(1, keepdim=True)
    return torch.where(used, tokens.x * weights.sum(1, keepdim=True), float("nan"))
