"""DeepEP's buffers: one per group and size, shared by the layers of a model."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import deep_ep
import torch
import torch.distributed as dist

from moekit.errors import GroupMismatch
from moekit.plugin import Lease, ProcessVariables, SharedBuffers, farewell

logger = logging.getLogger("moekit")

# Multiprocessors for transfers, of an H200's 132: they fill the links.
NUM_SMS = 24
# What a `deep_ep.Buffer` holds beside its rows.
_WORKSPACE_BYTES = 32 << 20

# How long a rank waits for the other ranks before it leaves buffers to the end of the process.
_FAREWELL_SECONDS = 20.0

# Held while a setting of the process is changed, and never while this rank waits for others.
_lock = threading.Lock()


@dataclass(frozen=True)
class Held:
    """An object of deep_ep, and the bytes that it holds. The last lease frees it: collective.

    uncounted: kinds of calls that write a number of rows for which the host does not wait.
    """

    buffer: Any
    nbytes: int
    group: dist.ProcessGroup
    uncounted: set[str] = field(default_factory=set)


def _lease(
    group: dist.ProcessGroup, kind: tuple[str | int, ...], make: Callable[[], tuple[Any, int]]
) -> Lease[Held]:
    """Take a buffer of a kind; collective if there is none yet. make: return one and its bytes."""

    def hold() -> Held:
        buffer, nbytes = make()
        return Held(buffer, nbytes, group)

    return _shared.lease((group, kind), hold)


def _free(held: Held) -> None:
    """Destroy a buffer if all ranks do, as the library waits on the GPU for every rank."""
    if why := farewell(held.group, "its DeepEP buffers", timeout=_FAREWELL_SECONDS):
        logger.warning("DeepEP's buffers are left to the end of the process: %s", why)
        return
    held.buffer.destroy()
    _connected.pop(held.buffer, None)


_shared: SharedBuffers[Held] = SharedBuffers(_free)
# The ranks that each low-latency buffer connects over NVSHMEM, and those that threads are about to
# connect.
_connected: dict[Any, list[int]] = {}
_connecting: list[list[int]] = []


def protocol() -> str:
    """Return what must be equal on all ranks, apart from the problem."""
    version = getattr(deep_ep, "__version__", "1")
    return f"deep_ep {version} on {socket.gethostname()}"


def connected() -> list[int] | None:
    """Return the ranks that NVSHMEM connects in this process, or None."""
    return next(iter([*_connected.values(), *_connecting]), None)


def normal_configs(ranks: int) -> tuple[Any, Any]:
    """Return the library's configurations of dispatch and combine for `NUM_SMS`."""
    with _lock:
        before = deep_ep.Buffer.num_sms
        deep_ep.Buffer.set_num_sms(NUM_SMS)
        try:
            dispatch = deep_ep.Buffer.get_dispatch_config(ranks)
            return dispatch, deep_ep.Buffer.get_combine_config(ranks)
        finally:
            deep_ep.Buffer.set_num_sms(before)


def normal(group: dist.ProcessGroup, hidden_size: int) -> Lease[Held]:
    """Take a `deep_ep.Buffer` for bf16 rows. Its size does not depend on the number of tokens."""
    ranks = group.size()
    nbytes = max(c.get_nvl_buffer_size_hint(2 * hidden_size, ranks) for c in normal_configs(ranks))

    def make() -> tuple[Any, int]:
        buffer = deep_ep.Buffer(group, num_nvl_bytes=nbytes, explicitly_destroy=True)
        return buffer, nbytes + _WORKSPACE_BYTES

    return _lease(group, ("normal", nbytes), make)


def low_latency(
    group: dist.ProcessGroup, capacity: int, hidden_size: int, num_experts: int
) -> Lease[Held]:
    """Take a `deep_ep.Buffer` in low-latency mode, for ``capacity`` tokens of each rank. Raises
    GroupMismatch: NVSHMEM connects other ranks already, and it can do so once per process."""
    ranks = dist.get_process_group_ranks(group)
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        capacity, hidden_size, len(ranks), num_experts
    )

    def make() -> tuple[Any, int]:
        buffer = deep_ep.Buffer(
            group, num_rdma_bytes=nbytes, low_latency_mode=True,
            num_qps_per_rank=num_experts // len(ranks), explicitly_destroy=True,
        )  # fmt: skip
        _connected[buffer] = ranks
        return buffer, nbytes + _WORKSPACE_BYTES

    with _claimed(ranks):
        return _lease(group, ("low_latency", capacity, hidden_size, num_experts), make)


@contextmanager
def _claimed(ranks: list[int]) -> Iterator[None]:
    """Keep other threads from connecting other ranks. Raises GroupMismatch if one does already."""
    with _lock:
        if (others := connected()) not in (None, ranks):
            raise GroupMismatch(
                f"deepep_ll cannot connect ranks {ranks}: a kernel of this process connects ranks "
                f"{others}, and NVSHMEM connects only one set of ranks; destroy that kernel first"
            )
        _connecting.append(ranks)
    try:
        yield
    finally:
        with _lock:
            _connecting.remove(ranks)


def elastic(
    group: dist.ProcessGroup, capacity: int, hidden_size: int, top_k: int, device_type: str
) -> Lease[Held]:
    """Take a `deep_ep.ElasticBuffer` for ``capacity`` bf16 tokens of each rank."""

    def make() -> tuple[Any, int]:
        # The library uses the group's NCCL communicator, which torch creates at its first use.
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)
        with _without_network:
            buffer = deep_ep.ElasticBuffer(
                group, num_max_tokens_per_rank=capacity, hidden=hidden_size, num_topk=top_k,
                allow_hybrid_mode=False, explicitly_destroy=True,
            )  # fmt: skip
        return buffer, buffer.num_bytes

    return _lease(group, ("elastic", capacity, hidden_size, top_k), make)


# A single host need not have the network card that the library would set up.
_without_network = ProcessVariables({"EP_DISABLE_GIN": "1"})
