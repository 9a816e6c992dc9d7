"""The library's thread pool, one a process, and its objects for packed weights."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import library
from .kinds import Kind

logger = logging.getLogger("moekit.ktransformers")


@dataclass(frozen=True)
class Settings:
    """The settings of an object of the library; limit 0 means that silu is not clamped."""

    kind: Kind
    experts: int
    top_k: int
    hidden: int
    inner: int
    bits: int
    group: int
    per_channel: bool
    limit: float
    max_rows: int


class _Loaded:
    """An object of the library, and the state of the weights that it was loaded with."""

    def __init__(self, moe: Any, versions: tuple[int, ...]) -> None:
        self.moe, self.versions = moe, versions


class Pool:
    """The threads, shared by all layers of this process. Calls take turns: the library has one
    set of buffers."""

    def __init__(self, extension: Any, num_threads: int, nodes: int) -> None:
        self.num_threads, self.nodes = num_threads, nodes
        self._extension = extension
        self._lock = threading.Lock()
        # Keyed by the identities of the packed tensors; the end of any of them ends the entry.
        self._loaded: dict[tuple[object, ...], _Loaded] = {}
        config = extension.WorkerPoolConfig()
        config.subpool_count = nodes
        config.subpool_numa_map = list(range(nodes))
        config.subpool_thread_count = [num_threads // nodes] * nodes
        with _messages_to_stderr():
            self._infer = extension.CPUInfer(config)
        # Its destructor would print, and join threads, while the interpreter goes down.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._infer))

    def run(
        self,
        settings: Settings,
        weights: Mapping[str, Tensor],
        x_RH: Tensor,
        ids_RK: Tensor,
        weights_RK: Tensor,
        out_RH: Tensor,
    ) -> None:
        """Write the experts' outputs, weighted and summed over K; rows without expert are zero.

        All contiguous: x and out in bf16, ids in int64, weights in fp32.
        """
        rows, slots = ids_RK.shape
        assert slots <= settings.top_k, "the library's lists hold top_k slots a row"
        with self._lock:
            forward = self._object(settings, weights).forward
            x, out = x_RH.data_ptr(), out_RH.data_ptr()
            ids, router_weights = ids_RK.data_ptr(), weights_RK.data_ptr()
            for start in range(0, rows, settings.max_rows):
                count = ctypes.c_int(min(settings.max_rows, rows - start))
                forward(
                    ctypes.addressof(count),
                    slots,
                    ids + start * slots * 8,
                    router_weights + start * slots * 4,
                    x + start * settings.hidden * 2,
                    out + start * settings.hidden * 2,
                    False,
                )

    def _object(self, settings: Settings, weights: Mapping[str, Tensor]) -> Any:
        tensors = tuple(weights.values())
        key = (settings, *map(id, tensors))
        versions = tuple([t._version for t in tensors])
        loaded = self._loaded.get(key)
        if loaded is None:
            with _messages_to_stderr():
                moe = self._make(settings, weights)
                self._load(moe)
            loaded = self._loaded[key] = _Loaded(moe, versions)
            for tensor in tensors:
                weakref.finalize(tensor, self._loaded.pop, key, None).atexit = False
        elif loaded.versions != versions:  # experts have moved
            with _messages_to_stderr():
                self._load(loaded.moe)
            loaded.versions = versions
        return loaded.moe

    def _make(self, settings: Settings, weights: Mapping[str, Tensor]) -> Any:
        s, module = settings, self._extension.moe
        config = module.MOEConfig(s.experts, s.top_k, s.hidden, s.inner)
        config.pool = self._infer.backend_
        config.max_len = s.max_rows
        config.swiglu_limit = s.limit
        config.quant_config.bits = s.bits
        config.quant_config.group_size = s.group
        config.quant_config.per_channel = s.per_channel
        config.quant_config.zero_point = False
        config.gate_projs, config.up_projs = _halves(weights["w13"])
        config.down_projs = _addresses(weights["w2"])
        if s.bits:
            config.gate_scales, config.up_scales = _halves(weights["w13_scale"])
            config.down_scales = _addresses(weights["w2_scale"])
        else:
            none = [[0] * s.experts]
            config.gate_scales = config.up_scales = config.down_scales = none
        return getattr(module, s.kind.name)(config)

    def _load(self, moe: Any) -> None:
        """Load the weights whose addresses the object was made with, expert by expert in order."""
        self._infer.submit(moe.load_weights_task())
        self._infer.sync()


def _addresses(weights: Tensor) -> list[list[int]]:
    step = weights.stride(0) * weights.element_size()
    return [[weights.data_ptr() + expert * step for expert in range(weights.shape[0])]]


def _halves(weights: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses of each expert's gate rows, and of its up rows."""
    gate, up = weights.chunk(2, dim=1)
    return _addresses(gate), _addresses(up)


_pools: dict[int, Pool] = {}
_pools_lock = threading.Lock()


def pool() -> Pool:
    """Return the pool of this process; the first call makes it.

    A forked child gets another one: threads do not outlive a fork.
    """
    found = _pools.get(os.getpid())
    if found is None:
        with _pools_lock:
            found = _pools.get(os.getpid())
            if found is None:
                nodes, wanted = library.numa_nodes(), library.threads(torch.get_num_threads())
                if wanted > library.cores():
                    logger.warning(
                        "the ktransformers experts run %d threads on %d core(s): set %s to fewer",
                        wanted, library.cores(), library.THREADS_VARIABLE,
                    )  # fmt: skip
                _pools[os.getpid()] = found = Pool(library.load(), wanted // nodes * nodes, nodes)
    return found


@contextmanager
def _messages_to_stderr() -> Iterator[None]:
    """Send to stderr what the library prints to stdout within the context."""
    flush = ctypes.CDLL(None).fflush
    if sys.stdout is not None:
        sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
