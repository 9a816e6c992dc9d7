"""Launch Triton kernels by a short key instead of inspecting every argument on every call.

Triton's own inspection takes the host longer than a small kernel takes the device.

Programmatic dependent launch, PDL (Hopper and later): a kernel starts while the previous one is
still ending, which hides the gap between them. In return, every program of a kernel with a
constexpr ``PDL`` calls `wait_then_launch_dependents` before it touches memory that the previous
kernel writes or reads, except by atomics that order the two. Memory written by earlier kernels is
visible at once, because the previous kernel has waited for them. MOEKIT_TRITON_PDL=0 in the
environment turns PDL off.
"""

import functools
import threading
from typing import Any

import torch
import triton
from triton.language.extra import cuda

from moekit.plugin import switch

from .numerics import INTERPRETED

__all__ = [
    "Constants", "Launcher", "cdiv", "next_power_of_2", "pdl_enabled",
    "wait_then_launch_dependents",
]  # fmt: skip

# One thread compiles at a time.
_compiling = threading.Lock()
_RUNTIME = triton.knobs.runtime
_ONES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())  # what shorter grids lack


class Constants(str):
    """The base of dataclasses that are one constexpr of a kernel: a text of the fields.

    Triton writes constants as JSON where an engine listens to its compilations, as vLLM does.
    """

    def __new__(cls, *fields: object, **named: object) -> "Constants":
        return super().__new__(cls, f"{cls.__name__}{fields}{named}")


class Launcher:
    """Call a `triton.jit` function: ``launcher(grid, *arguments, num_warps=..., CONSTANT=...)``.

    Positional arguments first (tensors, numbers, tuples of them), all constexpr parameters by name
    (``PDL`` is added here). The key holds everything Triton specializes on: dtypes, alignment to 16
    bytes, integers that are 1 or multiples of 16, constants, device. The first call of a key goes
    through Triton. Products and sums are fused (fma) unless the launch says
    ``enable_fp_fusion=False``, in every version of Triton; from 3.10 on its default is not to.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._pdl = "PDL" in kernel.arg_names
        # By key: the compiled kernel, how it is launched, and the constants.
        self._compiled: dict[tuple[object, ...], tuple[Any, Any, Any, Any, list[object]]] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        *args: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        maxnreg: int | None = None,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        if INTERPRETED:
            if self._pdl:
                constants["PDL"] = False
            options = {"num_warps": num_warps, "num_stages": num_stages}
            self._kernel[grid](*args, **constants, **options)
            return
        device = torch.cuda.current_device()
        pdl = self._pdl and pdl_enabled(device)
        if self._pdl:
            constants["PDL"] = pdl
        kinds = [device, num_warps, num_stages, maxnreg, enable_fp_fusion, *constants.values()]
        passed = _passed(args, kinds)
        key = tuple(kinds)
        found = self._compiled.get(key)
        if found is None:
            options = {
                "num_warps": num_warps, "num_stages": num_stages,
                "enable_fp_fusion": enable_fp_fusion,
            }  # fmt: skip
            if pdl:
                options["launch_pdl"] = True
            if maxnreg is not None:
                options["maxnreg"] = maxnreg
            with _compiling:
                compiled = self._kernel[grid](*args, **constants, **options)
            values = [constants[name] for name in self._kernel.arg_names[len(args) :]]
            # Triton looks for these in Python.
            how = compiled.run, compiled.function, compiled.packed_metadata
            self._compiled[key] = compiled, *how, values
            return
        compiled, run, function, metadata, values = found
        hooks = _RUNTIME.launch_enter_hook
        if hooks is not None and getattr(hooks, "calls", True):  # a profiler's
            compiled[(*grid, 1, 1)[:3]](*args, *values)
            return
        # `compiled[grid](...)` ends in this, after it has looked for the stream and for hooks.
        run(
            *grid, *_ONES[len(grid)], torch._C._cuda_getCurrentRawStream(device), function,
            metadata, None, None, None, *passed, *values,
        )  # fmt: skip


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, in a tenth of the host time of Triton's function."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least ``n``; Triton's function is as slow."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def pdl_enabled(device: int) -> bool:
    """Return whether kernels on this device use programmatic dependent launch."""
    wanted = switch("MOEKIT_TRITON_PDL", True)
    return wanted and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_then_launch_dependents():
    """Wait until the previous kernel has ended and its writes are visible, then let the next one
    start (it starts when every program has called this or ended)."""
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()


def _passed(values: tuple[Any, ...], kinds: list[object]) -> tuple[Any, ...]:
    """Return the arguments with addresses in place of tensors, which Triton takes faster.

    kinds: gets the parts of the arguments that decide which compiled kernel fits.
    """
    passed: list[Any] = []
    for value in values:
        if value is None:
            kinds.append(None)
        elif type(value) is int:
            wide = not -(2**31) <= value < 2**31
            kinds.append(2 if value == 1 else (value % 16 == 0) + 3 * wide)
        elif isinstance(value, torch.Tensor):
            dtype, value = value.dtype, value.data_ptr()
            kinds.append(dtype if value % 16 == 0 else (dtype,))
        elif isinstance(value, tuple):
            kinds.append(len(value))
            value = _passed(value, kinds)
        elif hasattr(value, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
            kinds += (value.base.dtype, *value.block_shape)
        else:
            kinds.append(type(value))
        passed.append(value)
    return tuple(passed)
