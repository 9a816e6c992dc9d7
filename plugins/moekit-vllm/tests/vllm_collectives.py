"""A plugin of vLLM that gives its CPU communicator the collectives of data parallelism.

On GPUs vLLM gathers and scatters different numbers of tokens of each rank. Its communicator for
CPUs has no such methods, so its data parallel engines fail there in their first step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    if isinstance(input_, (list, tuple)):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    mine = input_.new_zeros(max(sizes), *input_.shape[1:])
    mine[: len(input_)] = input_
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()
