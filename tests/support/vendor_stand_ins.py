"""What the stand-ins for vendors' libraries share."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes


def on_cpu(function: Any) -> Any:
    """Put a library's tensors on its device, even where torch has another default device."""

    @functools.wraps(function)
    def without_default(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return without_default


def exchange(group: Any, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """Every rank's tensors, by rank."""
    with _disable_current_modes():
        mine = [
            (t.contiguous().view(-1).view(torch.uint8).numpy(), t.dtype, t.shape) for t in tensors
        ]
        everyone: list[Any] = [mine] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        return [
            [torch.from_numpy(sent).view(dtype).view(shape) for sent, dtype, shape in theirs]
            for theirs in everyone
        ]


def garbage(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    with _disable_current_modes():
        made.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, or -1
        return made.fill_(123456) if dtype in (torch.int32, torch.int64) else made
