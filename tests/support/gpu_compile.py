"""Compile a call's Triton and Gluon kernels for a GPU that need not be here.

A process that does not interpret records what would be launched, and compiles it:

    with recorded(capability=(9, 0)) as launches:
        experts.apply(...)  # tensors of the CPU: nothing runs, and outputs keep what they hold
    print(launches[0].compile((9, 0)).stack)

Needs a triton wheel with the NVIDIA backend, as PyPI's.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

_TYPES = {
    torch.bool: "i1", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    """A compiled launch: registers and bytes of stack of a thread (values spill there), bytes of
    shared memory of a block, Triton's code for GPUs (ttgir: layouts), and PTX."""

    registers: int
    stack: int
    shared: int
    layouts: str
    ptx: str


@dataclass(frozen=True)
class Launch:
    """A kernel, and what Triton specializes it on: the types of its parameters, the values of
    constants, which parameters are multiples of 16, and options. A path is a parameter's index, and
    a member's index if the parameter is a tuple."""

    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    aligned: tuple[tuple[int, ...], ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Launch:
        """Specialize ``kernel(*args, **named)`` as Triton does."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | dict(named)
        options = {name: given.pop(name) for name in _OPTIONS if name in given}
        signature, constants = dict[str, Any](), dict[tuple[int, ...], Any]()
        aligned: list[tuple[int, ...]] = []

        def kind(value: Any, path: tuple[int, ...], special: bool) -> Any:
            if isinstance(value, tuple):  # Triton specializes the members
                found = [kind(each, (*path, i), True) for i, each in enumerate(value)]
                return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
            fixed = value is None or value is True or value is False
            if fixed or special and isinstance(value, int) and value == 1:
                constants[path] = value
                return "constexpr"
            multiple = isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0
            if special and (multiple or isinstance(value, int) and value % 16 == 0):
                aligned.append(path)
            return _type(value)

        for index, parameter in enumerate(kernel.params):
            name = parameter.name
            value = given[name] if name in given else parameter.default
            if parameter.is_constexpr:
                signature[name], constants[index,] = "constexpr", value
            else:
                signature[name] = kind(value, (index,), not parameter.do_not_specialize)
        return cls(kernel, signature, constants, tuple(aligned), options)

    @cached_property
    def name(self) -> str:
        """The kernel and its constants: launches of equal names compile to the same code."""
        names = self.kernel.arg_names
        constants = {
            ".".join([names[path[0]], *map(str, path[1:])]): value
            for path, value in self.constants.items() if value is not None
        }  # fmt: skip
        types = " ".join(str(kind) for kind in self.signature.values() if kind != "constexpr")
        words = ", ".join(f"{n}={v}" for n, v in {**constants, **self.options}.items())
        return f"{self.kernel.__name__}({words}) {types} {self.aligned}"

    def compile(self, capability: tuple[int, int]) -> Compiled:
        """Compile for a compute capability. Raises what Triton or ptxas raises."""
        source = (GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource)(
            self.kernel,
            dict(self.signature),
            dict(self.constants),
            {path: [["tt.divisibility", 16]] for path in self.aligned},
        )
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        made = triton.compile(source, target=target, options=dict(self.options))
        said = _resources(made.asm["cubin"])
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}
        text = made.asm["ttgir"], made.asm["ptx"]
        return Compiled(found["REG"], found["STACK"], made.metadata.shared, *text)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's descriptors
    return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"


def _resources(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Nothing:
    """In place of a compiled kernel: its launch does nothing."""

    function = packed_metadata = None

    def run(self, *args: object) -> None:
        """Do nothing."""


@contextlib.contextmanager
def recorded(*, capability: tuple[int, int], sms: int = 132) -> Iterator[list[Launch]]:
    """Record launches instead of running them, as on a GPU of that compute capability.

    A launch that compiles to the same code as an earlier one is not recorded again. A `Launcher`
    that was recorded launches nothing in this process any more.
    """
    found: list[Launch] = []
    names: set[str] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> _Nothing:
        launch = Launch.of(kernel, args, named)
        if launch.name not in names:
            names.add(launch.name)
            found.append(launch)
        return _Nothing()

    device = SimpleNamespace(multi_processor_count=sms, name="")
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: 0,
            get_device_capability=lambda *_: capability,
            get_device_properties=lambda *_: device,
        ),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True),
    ):
        yield found
