"""Launch Triton kernels by a short key instead of inspecting every argument on every call.

Triton's own inspection takes the host longer than a small kernel takes the device. So does the
Python that chooses and divides the work of a call: `Launches` runs it once.

Programmatic dependent launch, PDL (Hopper and later): a kernel starts while the previous one is
still ending, which hides the gap between them. In return, every program of a kernel with a
constexpr ``PDL`` calls `wait_then_launch_dependents` before it touches memory that the previous
kernel writes or reads, except by atomics that order the two. Memory written by earlier kernels is
visible at once, because the previous kernel has waited for them. MOEKIT_TRITON_PDL=0 in the
environment turns PDL off.
"""

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.language.extra import cuda

from moekit.plugin import Located, switch

from .numerics import INTERPRETED

__all__ = [
    "Constants", "Launcher", "Launches", "cdiv", "launches_of", "next_power_of_2",
    "pdl_enabled", "wait_then_launch_dependents",
]  # fmt: skip

_MAX_RECORDINGS = 64  # a `Launches` that has more forgets them all
_MAX_DESCRIPTORS = 256  # for each argument, by address
# Its ``launches`` are the list to which `Launches` records in this thread.
_tape = threading.local()
# One thread compiles at a time.
_compiling = threading.Lock()
_RUNTIME = triton.knobs.runtime
_ONES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())  # pad a grid to three dimensions


class Constants(str):
    """The base of dataclasses that are one constexpr of a kernel: a str of the fields.

    Triton writes constants as JSON if an engine listens to its compilations, as vLLM does.
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
            found = self._compiled[key] = compiled, *how, values
        elif _profiled():
            found[0][(*grid, 1, 1)[:3]](*args, *found[4])
        else:
            _, run, function, metadata, values = found
            # `compiled[grid](...)` calls this after it has looked up the stream and hooks.
            run(
                *grid, *_ONES[len(grid)], torch._C._cuda_getCurrentRawStream(device), function,
                metadata, None, None, None, *passed, *values,
            )  # fmt: skip
        if (launches := getattr(_tape, "launches", None)) is not None:
            run, *how = found[1:4]
            launches.append((run, (*grid, *_ONES[len(grid)]), how, args, found[4]))


def _profiled() -> bool:
    """Return whether a profiler follows Triton's launches."""
    hooks = _RUNTIME.launch_enter_hook
    return hooks is not None and bool(getattr(hooks, "calls", True))


class _Others(TorchDispatchMode):
    """Notes whether torch ran any operator but views and allocations."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran |= not (func.is_view or func is torch.ops.aten.empty.memory_format)
        return func(*args, **(kwargs or {}))


class Launches:
    """Records the launches of functions, and repeats them for tensors of the same forms.

    The functions start device work only through `Launcher`. They run in every call if torch works
    too, if an argument lies in none of the tensors, or if MOEKIT_TRITON_REPEAT=0 is in the
    environment.
    """

    def __init__(self) -> None:
        self._recordings: dict[tuple[object, ...], Any] = {}
        self._repeats = switch("MOEKIT_TRITON_REPEAT", True)

    def __call__(
        self,
        key: tuple[object, ...],
        given: Sequence[torch.Tensor | None],
        memory: Sequence[torch.Tensor],
        function: Callable[[], Any],
    ) -> Any:
        """Return what ``function`` returns: None, or views that begin where tensors of memory do.

        key: what decides the launches, apart from the dtypes, shapes and strides of ``given``.
        memory: tensors whose forms follow from the key and ``given``.
        """
        recording = getattr(_tape, "launches", None) is not None
        if INTERPRETED or recording or not self._repeats or _profiled():
            return function()
        held = memory if isinstance(memory, Located) else Located(memory)
        device, addresses = torch._C._cuda_getDevice(), [0, *held.addresses]
        form = [device, held.remainders, *key]
        for tensor in given:
            if tensor is None:
                form.append(None)
                addresses.append(0)
            else:
                addresses.append(address := tensor.data_ptr())
                strides = tensor.is_contiguous() or tensor.stride()
                form += tensor.dtype, tensor.shape, strides, address % 16
        recorded = self._recordings.get(found := tuple(form), ())
        if recorded is None:
            return function()
        if recorded:
            launches, template, inner, makers, made = recorded
            values = template.copy()
            addresses[0] = torch._C._cuda_getCurrentRawStream(device)
            values[: len(addresses)] = addresses
            for at, index, offset in inner:
                values[at] = addresses[index] + offset
            for at, make in makers:
                values[at] = make(values)
            for run, arguments in launches:
                run(*arguments(values))
            return made and [each and held.view(*each) for each in made]
        tape, others = list[tuple[Any, ...]](), _Others()
        _tape.launches = tape
        try:
            with others:
                made = function()
        finally:
            _tape.launches = None
        if len(self._recordings) >= _MAX_RECORDINGS:
            self._recordings.clear()
        self._recordings[found] = None
        if others.ran:
            return made
        with suppress(ValueError):
            starts = [(tensor.data_ptr(), tensor.dtype) for tensor in memory]
            parts = made and [
                None if t is None else (starts.index((t.data_ptr(), t.dtype)), t.shape, t.stride())
                for t in made
            ]
            spans = [_span(tensor) for tensor in (*memory, *given)]
            self._recordings[found] = *_recorded(tape, spans), parts
        return made


launches_of = functools.lru_cache(256)(lambda *what: Launches())
"""Return the `Launches` that all layers with the same arguments share."""


def _span(tensor: torch.Tensor | None) -> range:
    """Return the range of the addresses of the tensor's bytes."""
    if tensor is None or not tensor.numel():
        return range(0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start := tensor.data_ptr(), start + (last + 1) * tensor.itemsize)


def _recorded(tape: list[tuple[Any, ...]], spans: Sequence[range]) -> tuple[list[Any], ...]:
    """Return the launches, and what they take their arguments from: the stream, the addresses of
    ``spans``, constants, addresses within spans, and what functions make of values before.

    Raises ValueError for a tensor that begins in none of ``spans``, or in two of them.
    """
    values, inner, makers = [None] * (1 + len(spans)), list[Any](), list[Any]()

    def place(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    def argument(value: Any) -> int:
        described = hasattr(value, "block_shape")
        tensor = value.base if described else value
        if isinstance(value, tuple):
            made = len(inner), len(makers)
            parts = [*map(argument, value)]
            if made == (len(inner), len(makers)) and all(at > len(spans) for at in parts):
                return place(tuple([values[at] for at in parts]))
            pick = operator.itemgetter(*parts, 0)  # of two or more, which makes it a tuple
            makers.append((place(None), lambda values: pick(values)[:-1]))
        elif not isinstance(tensor, torch.Tensor):
            return place(value)
        elif not tensor.numel():
            return place(0)
        else:
            (index,) = (i for i, span in enumerate(spans, 1) if tensor.data_ptr() in span)
            offset = tensor.data_ptr() - spans[index - 1].start
            if described:
                makers.append((place(None), _descriptors(value, index, offset)))
            elif offset:
                inner.append((place(None), index, offset))
            else:
                return index
        return len(values) - 1

    launches = []
    for run, grid, how, args, constants in tape:
        head, tail = map(place, grid), map(place, (*how, None, None, None))
        places = *head, 0, *tail, *map(argument, args), *map(place, constants)
        launches.append((run, operator.itemgetter(*places)))
    return launches, values, inner, makers


def _descriptors(like: Any, index: int, offset: int) -> Callable[[Sequence[int]], Any]:
    kind, fields = type(like), {**vars(like), "base": None}

    @functools.lru_cache(_MAX_DESCRIPTORS)
    def descriptor(address: int) -> Any:
        made = object.__new__(kind)
        vars(made).update(fields, base=SimpleNamespace(data_ptr=lambda: address))
        return made

    return lambda values: descriptor(values[index] + offset)


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
