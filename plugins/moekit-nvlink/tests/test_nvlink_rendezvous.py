"""Ranks open memory in groups that not all of them belong to."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from moekit_nvlink import buffers
from torch.distributed import distributed_c10d as c10d

from moekit.testing.distributed import RankPool

_exchanges = 0


def rendezvous(memory, group: str):
    """Exchange addresses twice as torch 2.11 to 2.15 do, with one count for all groups."""
    global _exchanges
    found = c10d._resolve_process_group(group)
    store, all_ranks, addresses = found.get_group_store(), range(found.size()), []
    for _ in range(2):
        keys = [f"CUDASymmetricMemory/{_exchanges}/{rank}" for rank in all_ranks]
        _exchanges += 1
        store.set(keys[found.rank()], str(memory.data_ptr()))
        store.wait(keys, timedelta(seconds=5))
        addresses.append([int(store.get(key)) for key in keys])
    assert addresses[0] == addresses[1]
    return SimpleNamespace(buffer_ptrs=addresses[0])


def open_in_groups(rank: int, world: int) -> None:
    import torch.distributed._symmetric_memory as symmetric

    groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
    device = torch.device("cpu")
    with (
        mock.patch.object(symmetric, "rendezvous", rendezvous),
        mock.patch.object(symmetric, "empty", lambda nbytes, **_: torch.empty(nbytes)),
        mock.patch.object(buffers, "_check_reach", lambda *_: None),
    ):
        for group in (groups[0], groups[0], groups[1], groups[2], groups[2]):
            if rank in dist.get_process_group_ranks(group):
                memory, addresses, _ = buffers.open_memory(64, group, device)
                want = buffers.exchange("compare addresses", str(memory.data_ptr()), group)
                assert addresses == [int(each) for each in want]


def test_ranks_that_served_other_groups_before() -> None:
    with RankPool(3) as pool:
        pool.run(open_in_groups)
