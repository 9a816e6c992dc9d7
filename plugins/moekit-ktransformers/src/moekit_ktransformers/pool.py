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

from moekit.plugin import MoEProblem

from . import library
from .kinds import Kind

logger = logging.getLogger("moekit.ktransformers")

MAX_ROWS = 512
"""Rows of one call of the library; its buffers grow with them. More rows take several calls."""


@dataclass
class _Loaded:
    """An object of the library, and the state of the weights that it was loaded with."""

    moe: Any
    versions: tuple[int, ...]


class Pool:
    """The threads, shared by all layers of this process. Calls take turns: the library has one
    set of buffers."""

    def __init__(self, extension: Any, num_threads: int) -> None:
        self._extension = extension
        self._lock = threading.Lock()
        # Keyed by the identities of the packed tensors; the end of any of them ends the entry.
        self._loaded: dict[tuple[object, ...], _Loaded] = {}
        config = extension.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [num_threads]
        with _messages_to_stderr():
            self._infer = extension.CPUInfer(config)
        # Its destructor would print, and join threads, while the interpreter goes down.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._infer))

    def run(
        self, kind: Kind, problem: MoEProblem, weights: Mapping[str, Tensor],
        x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor, out_RH: Tensor,
    ) -> None:  # fmt: skip
        """Write the experts' outputs, weighted and summed over K; rows without expert are zero.

        All contiguous: x and out in bf16, ids in int64, weights in fp32.
        """
        (rows, slots), row = ids_RK.shape, 2 * problem.hidden_size
        assert slots <= problem.top_k, "the library's lists hold top_k slots a row"
        with self._lock:
            forward = self._object(kind, problem, weights).forward
            x, out = x_RH.data_ptr(), out_RH.data_ptr()
            ids, router_weights = ids_RK.data_ptr(), weights_RK.data_ptr()
            for start in range(0, rows, MAX_ROWS):
                count = ctypes.c_int(min(MAX_ROWS, rows - start))
                forward(
                    ctypes.addressof(count), slots, ids + start * slots * 8,
                    router_weights + start * slots * 4, x + start * row, out + start * row, False,
                )  # fmt: skip

    def _object(self, kind: Kind, problem: MoEProblem, weights: Mapping[str, Tensor]) -> Any:
        tensors = tuple(weights.values())
        key = (kind, MAX_ROWS, problem.top_k, problem.activation.limit, *map(id, tensors))
        versions = tuple([t._version for t in tensors])
        loaded = self._loaded.get(key)
        if loaded is None:
            with _messages_to_stderr():
                moe = self._make(kind, problem, weights)
                self._load(moe)
            loaded = self._loaded[key] = _Loaded(moe, versions)
            for tensor in tensors:
                weakref.finalize(tensor, self._loaded.pop, key, None).atexit = False
        elif loaded.versions != versions:  # experts have moved
            with _messages_to_stderr():
                self._load(loaded.moe)
            loaded.versions = versions
        return loaded.moe

    def _make(self, kind: Kind, problem: MoEProblem, weights: Mapping[str, Tensor]) -> Any:
        p, quant, module = problem, problem.quant.weight, self._extension.moe
        per_channel = quant is not None and quant.group == (1, -1)
        config = module.MOEConfig(
            p.num_local_experts, p.top_k, p.hidden_size, p.local_intermediate_size
        )
        config.pool = self._infer.backend_
        config.max_len = MAX_ROWS
        config.swiglu_limit = p.activation.limit or 0.0  # 0: no clamp
        config.quant_config.bits = 0 if quant is None else 4 if quant.packed else 8
        config.quant_config.group_size = 0 if quant is None or per_channel else quant.group[1]
        config.quant_config.per_channel = per_channel
        config.quant_config.zero_point = False
        config.gate_projs, config.up_projs = _halves(weights["w13"])
        config.down_projs = _addresses(weights["w2"])
        if quant is not None:
            config.gate_scales, config.up_scales = _halves(weights["w13_scale"])
            config.down_scales = _addresses(weights["w2_scale"])
        else:
            none = [[0] * p.num_local_experts]
            config.gate_scales = config.up_scales = config.down_scales = none
        return getattr(module, kind.name)(config)

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
    with _pools_lock:
        found = _pools.get(os.getpid())
        if found is None:
            wanted = library.threads(torch.get_num_threads())
            if wanted > library.cores():
                logger.warning(
                    "the ktransformers experts run %d threads on %d core(s): set %s to fewer",
                    wanted, library.cores(), library.THREADS_VARIABLE,
                )  # fmt: skip
            _pools[os.getpid()] = found = Pool(library.load(), wanted)
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
