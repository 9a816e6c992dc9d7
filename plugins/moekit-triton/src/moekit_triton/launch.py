"""Launches by a short key, instead of Triton's inspection of every argument on every call.

That inspection takes the host longer than a small kernel takes the device.

Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends,
which hides the time between them. In return every program of a kernel with a constant PDL calls
`take_turn` before it touches what the kernel before writes or reads. What is older than that kernel
is there at once, as it has taken its own turn by then. MOEKIT_TRITON_PDL=0 in the environment turns
all this off.
"""

import functools
import os
import threading
from typing import Any

import torch
import triton
from triton.language.extra import cuda

from .numerics import INTERPRETED

# Of threads that call a kernel for the first time, one compiles it.
_compiling = threading.Lock()


class Launcher:
    """Calls a `triton.jit` function: ``launcher(grid, *arguments, num_warps=..., CONSTANT=...)``.

    The key holds what Triton specializes on: dtypes, alignment to 16 bytes, integers that are 1 or
    multiples of 16, constants, device. The first call of a key goes through Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._pdl = "PDL" in kernel.arg_names
        self._compiled: dict[tuple[object, ...], tuple[Any, list[object]]] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        **constants: Any,
    ) -> None:
        options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if INTERPRETED:
            if self._pdl:
                constants["PDL"] = False
            self._kernel[grid](*args, **constants, **options)
            return
        device = torch.cuda.current_device()
        if self._pdl:
            constants["PDL"] = overlaps(device)
            if constants["PDL"]:
                options["launch_pdl"] = True
        key = (device, num_warps, num_stages, *constants.values(), *map(_kind, args))
        found = self._compiled.get(key)
        if found is None:
            with _compiling:
                compiled = self._kernel[grid](*args, **constants, **options)
            names = self._kernel.arg_names[len(args) :]
            self._compiled[key] = compiled, [constants[name] for name in names]
            return
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*args, *values)


@functools.cache
def overlaps(device: int) -> bool:
    """Whether kernels on this device are launched before the one before them has ended."""
    wanted = os.environ.get("MOEKIT_TRITON_PDL", "1") != "0"
    return wanted and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def take_turn():
    """Waits until the kernel before has ended and what it wrote is visible, then lets the next one
    start (which it does when every program has said so or ended)."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


def _kind(value: Any) -> object:
    """What of an argument decides which compiled kernel fits."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if hasattr(value, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        return value.base.dtype, *value.block_shape
    return None if value is None else type(value)
