"""Compile a call's Triton and Gluon kernels for a GPU that need not be here.

A process that does not interpret compiles what would be launched:

    with recorded(capability=(9, 0)) as launches:
        experts.apply(...)  # tensors of the CPU: nothing runs, and outputs keep what they hold
    print(launches[0].compiled().stack)

Needs a triton wheel with the NVIDIA backend, as PyPI's.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


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
    """A kernel, its constants and options as text, and what Triton made of it or raised."""

    kernel: Any
    name: str
    made: Any

    def compiled(self) -> Compiled:
        """Return what was compiled. Raises what Triton or ptxas raised."""
        if isinstance(self.made, Exception):
            raise self.made
        asm, said = self.made.asm, _resources(self.made.asm["cubin"])
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}
        sizes = found["REG"], found["STACK"], self.made.metadata.shared
        return Compiled(*sizes, asm["ttgir"], asm["ptx"])


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
def recorded(*, capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Compile launches instead of running them, as on a GPU of that compute capability.

    A launch that compiles to the same code as an earlier one is not recorded again. A `Launcher`
    that was recorded launches nothing in this process any more.
    """
    found: list[Launch] = []
    compile_only, (major, minor) = JITFunction.run, capability
    target = GPUTarget("cuda", 10 * major + minor, 32)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> _Nothing:
        made: Any
        try:
            made = compile_only(kernel, *args, grid=grid, warmup=True, **named)
        except Exception as error:
            made = error
        if all(made is not launch.made for launch in found):
            types = " ".join(str(each.dtype)[6:] for each in args if isinstance(each, torch.Tensor))
            words = ", ".join(f"{name}={value}" for name, value in named.items())
            found.append(Launch(kernel, f"{kernel.__name__}({words}) {types}", made))
        return _Nothing()

    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: target,
        )
    )
    device = SimpleNamespace(multi_processor_count=132, name="")
    with (
        mock.patch.object(JITFunction, "run", run),
        # Engines listen to compilations: Triton then writes each kernel's constants as JSON.
        mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: None),
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: 0,
            get_device_capability=lambda *_: capability,
            get_device_properties=lambda *_: device,
        ),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True),
    ):
        yield found
