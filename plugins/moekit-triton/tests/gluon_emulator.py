"""Run Gluon kernels of specialized warps on the CPU, in plain Python: `launch(kernel, grid, ...)`.

Each warp group of a program is a thread; barriers, their phases and their byte counts are those of
the hardware, and a wait that nothing will end raises an error. Shared memory starts as NaN, and
loads beyond a tensor bring zeros. Not emulated: layouts (of registers and of swizzled memory) and
the order of memory accesses of the asynchronous proxy. Programs run one after another, so a kernel
whose programs wait for each other does not end.
"""

from __future__ import annotations

import inspect
import threading
import types
from typing import Any

import torch

_SECONDS = 20.0
_ATOMIC = threading.Lock()
_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32,
    "int64": torch.int64,
}  # fmt: skip


class Deadlock(Exception):
    """A barrier that nothing completes."""


def _dtype(given: Any) -> torch.dtype:
    return given if isinstance(given, torch.dtype) else _DTYPES[str(given)]


class _Type:
    layout = None


class Value:
    """A tensor in registers."""

    type = _Type()

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def to(self, dtype: Any) -> Value:
        return Value(self.data.to(_dtype(dtype)))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, order: Any) -> Value:
        return Value(self.data.permute(*order))

    def split(self) -> tuple[Value, Value]:
        assert self.data.shape[-1] == 2
        return Value(self.data[..., 0]), Value(self.data[..., 1])


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def _operator(name: str) -> Any:
    def apply(self: Value, other: Any = None) -> Value:
        args = () if other is None else (_plain(other),)
        return Value(getattr(self.data, name)(*args))

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "floordiv", "mod", "lt", "le",
              "gt", "ge", "neg", "and", "or", "eq"):  # fmt: skip
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


class Pointer:
    """A tensor's elements from an offset on; offsets may be a Value."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, by: Any) -> Pointer:
        offset = self.offset
        if isinstance(offset, Value) or not isinstance(by, Value):
            return Pointer(self.memory, offset + by)
        return Pointer(self.memory, by + offset)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data, self.layout = data, layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, at: int) -> Shared:
        assert 0 <= at < len(self.data)
        return Shared(self.data[at], self.layout)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.layout)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(*order), self.layout)

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        assert self.data.shape == value.data.shape and self.data.dtype == value.data.dtype
        self.data.copy_(value.data)


class Barriers:
    """A tensor of mbarriers: arrivals and bytes that complete a phase."""

    def __init__(self, count: int) -> None:
        self._each = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        assert 0 <= at < len(self._each)
        return self._each[at]


class Barrier:
    def __init__(self) -> None:
        self._change = threading.Condition()
        self._expected = self._arrived = self._bytes = self._phases = 0

    def init(self, count: int) -> None:
        self._expected = count

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        with self._change:
            self._arrived += count
            self._bytes += nbytes
            assert self._arrived <= self._expected, "more arrivals than the barrier's count"
            self._complete()

    def copied(self, nbytes: int) -> None:
        with self._change:
            self._bytes -= nbytes
            self._complete()

    def _complete(self) -> None:
        if self._arrived == self._expected and self._bytes == 0:
            self._arrived = 0
            self._phases += 1
            self._change.notify_all()

    def wait(self, phase: int) -> None:
        """Wait until the phase of this parity, the current or the last one, is complete."""
        with self._change:
            if not self._change.wait_for(lambda: self._phases % 2 != phase, _SECONDS):
                raise Deadlock(f"{self._arrived} of {self._expected} arrivals, {self._bytes} bytes")


class Descriptor:
    """A tensor descriptor on the CPU."""

    def __init__(self, given: Any) -> None:
        self.base, self.block_shape = given.base, list(given.block_shape)
        self.shape, self.strides, self.layout = given.shape, given.strides, given.layout
        self.dtype = given.base.dtype
        self._whole = torch.as_strided(given.base, list(given.shape), list(given.strides))

    def _part(self, coord: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        begins = [min(max(c, 0), n) for c, n in zip(coord, self.shape, strict=True)]
        ends = [
            max(b, min(c + n, m))
            for b, c, n, m in zip(begins, coord, self.block_shape, self.shape, strict=True)
        ]
        part = self._whole[tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))]
        return part, tuple(slice(b - c, e - c) for b, e, c in zip(begins, ends, coord, strict=True))

    def load(self, coord: list[int], to: torch.Tensor) -> None:
        part, at = self._part(coord)
        to.zero_()
        to[at] = part

    def store(self, coord: list[int], source: torch.Tensor) -> None:
        part, at = self._part(coord)
        part.copy_(source[at])


class _Mbarrier:
    MBarrierLayout = staticmethod(lambda: "barriers")
    init = staticmethod(lambda bar, count: bar.init(count))

    @staticmethod
    def wait(bar: Barrier, phase: int, pred: Any = True) -> None:
        if pred:
            bar.wait(phase)

    @staticmethod
    def arrive(bar: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            bar.arrive(count)

    @staticmethod
    def expect(bar: Barrier, nbytes: int, pred: Any = True) -> None:
        if pred:
            bar.arrive(1, nbytes)


class _Tma:
    store_wait = staticmethod(lambda pendings: None)


def _async_load(
    desc: Descriptor, coord: list[int], bar: Barrier, to: Shared, pred: Any = True
) -> None:
    if pred:
        assert to.shape == desc.block_shape and to.dtype == desc.dtype
        desc.load(coord, to.data)
        bar.copied(to.data.numel() * to.data.element_size())


def _async_store(desc: Descriptor, coord: list[int], source: Shared) -> None:
    assert source.shape == desc.block_shape and source.dtype == desc.dtype
    desc.store(coord, source.data)


def _reinterpret(memory: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    assert _dtype(dtype) == memory.data.dtype and memory.data.is_contiguous()
    return Shared(memory.data.view(shape), layout)


_ASM = {
    "ex2.approx.ftz.f32 $0, $1;": torch.exp2,
    "rcp.approx.ftz.f32 $0, $1;": torch.reciprocal,
}


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    memory, offset = pointer.memory.flatten(), pointer.offset
    if not isinstance(offset, Value):
        return memory[offset].item()
    allowed = torch.as_tensor(_plain(mask)).broadcast_to(offset.data.shape)
    at = torch.where(allowed, offset.data, 0)
    assert bool((at >= 0).all()) and bool((at < len(memory)).all()), "read out of bounds"
    return Value(
        torch.where(allowed, memory[at.long()], torch.as_tensor(other, dtype=memory.dtype))
    )


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    memory, offset = pointer.memory.view(-1), pointer.offset
    if not isinstance(offset, Value):
        memory[offset] = _plain(value)
        return
    allowed = torch.as_tensor(_plain(mask)).broadcast_to(offset.data.shape)
    at, values = offset.data[allowed], torch.as_tensor(_plain(value), dtype=memory.dtype)
    memory[at.long()] = values.broadcast_to(offset.data.shape)[allowed]


def _elementwise(function: Any, scalar: Any) -> Any:
    def apply(*args: Any) -> Any:
        if not any(isinstance(x, Value) for x in args):
            return scalar(*args)
        return Value(function(*(torch.as_tensor(_plain(x)) for x in args)))

    return apply


class _Language:
    """`gluon.language`, for one warp group of a program."""

    def __init__(self, program: int, programs: int, warps: int) -> None:
        self._program, self._programs, self._warps = program, programs, warps
        self.float32, self.int32, self.int64 = torch.float32, torch.int32, torch.int64
        self.static_range = self.range = range
        self.constexpr = lambda value: value
        self.BlockedLayout = self.SliceLayout = self.NVMMADistributedLayout = lambda *_: None
        self.SwizzledSharedLayout = self.BlockedLayout
        self.load, self.store = _load, _store
        self.minimum, self.maximum = _elementwise(torch.fmin, min), _elementwise(torch.fmax, max)
        self.where = _elementwise(torch.where, lambda c, a, b: a if c else b)
        self.abs = _elementwise(torch.abs, abs)
        self.convert_layout = lambda value, *_, **__: value

    def program_id(self, axis: int) -> int:
        return self._program

    def num_programs(self, axis: int) -> int:
        return self._programs

    def num_warps(self) -> int:
        return self._warps

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def zeros(shape: list[int], dtype: Any, layout: Any = None) -> Value:
        return Value(torch.zeros(shape, dtype=_dtype(dtype)))

    @staticmethod
    def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Value:
        return Value(torch.full(shape, value, dtype=_dtype(dtype)))

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Value:
        return Value(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def expand_dims(x: Value, axis: int) -> Value:
        return Value(x.data.unsqueeze(axis))

    @staticmethod
    def join(x: Value, y: Value) -> Value:
        return Value(torch.stack([x.data, y.data], dim=-1))

    @staticmethod
    def max(x: Value, axis: int) -> Any:
        found = x.data.amax(dim=axis)
        return found.item() if found.dim() == 0 else Value(found)

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        memory = torch.empty(shape, dtype=_dtype(dtype))
        memory.view(torch.uint8).fill_(0xFF)
        return Shared(memory, layout)

    @staticmethod
    def atomic_add(pointer: Pointer, value: Any, sem: str = "") -> Any:
        memory, offset = pointer.memory.view(-1), pointer.offset
        with _ATOMIC:
            if isinstance(offset, Value):
                return memory.index_add_(0, offset.data.long(), value.data)
            before = int(memory[offset])
            memory[offset] = before + value
            return before

    @staticmethod
    def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
        if asm.startswith("ld."):
            return _load(args[0])
        if asm.startswith(("fence.", "cp.async.bulk.wait_group")):
            return 0
        return Value(_ASM[asm](*(x.data for x in args)))

    def warp_specialize(self, partitions: Any, worker_warps: list[int], registers: Any) -> None:
        errors: list[BaseException] = []

        def run(function: Any, args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(_emulated(function.emulated, language), args))
            for (function, args), language in zip(
                partitions,
                [_Language(self._program, self._programs, n) for n in (4, *worker_warps)],
                strict=True,
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, Deadlock)), errors[0])


def _warpgroup_mma(
    a: Shared, b: Shared, acc: Value, *, use_acc: bool = True, is_async: bool = False
) -> Value:
    product = a.data.float() @ b.data.float()
    return Value(acc.data + product if use_acc else product)


def _warpgroup_mma_wait(pendings: int, deps: tuple[Value, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def _emulated(function: Any, language: _Language, made: dict[Any, Any] | None = None) -> Any:
    """Return a Python function that runs a kernel's code in this module's language."""
    made = {} if made is None else made
    if function in made:
        return made[function]
    names = dict(function.__globals__)
    run = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    run.emulated = function
    made[function] = run
    known = {
        "gl": language, "tl": language, "mbarrier": _Mbarrier, "tma": _Tma,
        "async_load": _async_load, "async_store": _async_store, "reinterpret": _reinterpret,
        "warpgroup_mma": _warpgroup_mma, "warpgroup_mma_wait": _warpgroup_mma_wait,
        "fence_async_shared": lambda: None, "wait_then_launch_dependents": lambda: None,
    }  # fmt: skip
    for name in function.__code__.co_names:
        value = names.get(name)
        if name in known:
            names[name] = known[name]
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
        elif hasattr(value, "fn") and inspect.isfunction(value.fn):
            names[name] = _emulated(value.fn, language, made)
    return run


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel's programs, as `moekit_kernels.launch.Launcher` is called."""
    constants = {k: v for k, v in constants.items() if k not in ("num_warps", "num_stages")}
    given = [
        Pointer(x) if isinstance(x, torch.Tensor) else Descriptor(x)
        if hasattr(x, "block_shape") else x
        for x in args
    ]  # fmt: skip
    for program in range(grid[0]):
        run = _emulated(kernel.fn, _Language(program, grid[0], 4))
        run(*given, **constants, PDL=False)
