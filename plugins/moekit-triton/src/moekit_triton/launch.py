"""Launches by a short key, instead of Triton's inspection of every argument on every call.

That inspection takes the host longer than a small kernel takes the device.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .numerics import INTERPRETED


class Launcher:
    """Calls a `triton.jit` function: ``launcher(grid, *arguments, num_warps=..., CONSTANT=...)``.

    The key holds what Triton specializes on: dtypes, alignment to 16 bytes, integers that are 1 or
    multiples of 16, constants, device. The first call of a key goes through Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], tuple[Any, list[object]]] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if INTERPRETED:
            self._kernel[grid](*args, **constants, **options)
            return
        device = torch.cuda.current_device()
        key = (device, num_warps, num_stages, *constants.values(), *map(_kind, args))
        found = self._compiled.get(key)
        if found is None:
            compiled = self._kernel[grid](*args, **constants, **options)
            names = self._kernel.arg_names[len(args) :]
            self._compiled[key] = compiled, [constants[name] for name in names]
            return
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*args, *values)


def _kind(value: Any) -> object:
    """What of an argument decides which compiled kernel fits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return None if value is None else type(value)
