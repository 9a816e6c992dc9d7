"""The dispatchers on the CPU: ranks are processes that share memory of this host.

Triton's interpreter runs the kernels of all ranks at the same time, so they wait for each other's
flags as GPUs do. Importing this module puts shared memory in the place of symmetric memory in this
process; `registry` offers the dispatchers as ``<name>_standin`` and ``<name>_push_standin``.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import replace

import torch
import torch.distributed as dist
from moekit_nvlink import buffers, dispatcher, moekit_dispatchers
from moekit_nvlink.settings import Settings
from torch import Tensor

from moekit.discovery.registry import Registry
from moekit.discovery.registry import registry as installed
from moekit.plugin import DispatcherSpec, exchange


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


class _Push:
    def __init__(self, *args, **kwargs) -> None:
        read = Settings.read
        dispatcher.Settings.read = lambda: replace(read(), push=True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            dispatcher.Settings.read = read


class HighThroughput(dispatcher.HighThroughputDispatcher):
    pass


class LowLatency(dispatcher.LowLatencyDispatcher):
    pass


class HighThroughputPush(_Push, dispatcher.HighThroughputDispatcher):
    pass


class LowLatencyPush(_Push, dispatcher.LowLatencyDispatcher):
    pass


def specs() -> list[DispatcherSpec]:
    made = []
    for spec, names in zip(
        moekit_dispatchers(),
        (("HighThroughput", "HighThroughputPush"), ("LowLatency", "LowLatencyPush")),
        strict=True,
    ):
        for way, name in zip(("", "_push"), names, strict=True):
            made.append(replace(spec, name=f"{spec.name}{way}_standin", devices=("cpu",),
                                target=f"nvlink_standin:{name}"))  # fmt: skip
    return made


def registry() -> Registry:
    made = Registry(plugins=installed().plugins)
    for spec in specs():
        made.register(spec)
    return made
