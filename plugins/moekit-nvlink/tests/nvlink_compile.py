"""Compile every kernel for compute capability 9.0, without a GPU, and print what they take.

    python plugins/moekit-nvlink/tests/nvlink_compile.py [--quick] [80 | 86 | 89 | 90 | 100 | 120]

Needs a triton wheel with the NVIDIA backend, as PyPI's; the version is that of PYTHONPATH. One line
for each kernel and layer: registers and bytes of stack a thread, shared memory, and how many copies
from global to shared memory run asynchronously (cp.async). Exits with 1 if a kernel does not
compile, spills more than a few values that are used once, or needs more shared memory than a block
of that capability can have.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from moekit_nvlink import transfer
from moekit_nvlink.buffers import Buffer, Lost
from moekit_nvlink.settings import Settings
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import moekit
from moekit.plugin import Routing

_STACK_LIMIT = 32
_SHARED = {"80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
_CAPABILITY = next((each for each in sys.argv[1:] if each in _SHARED), "90")
_TYPES = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32",
          torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}  # fmt: skip
_LAUNCHERS = [
    name for name, found in vars(transfer).items() if isinstance(found, transfer.Launcher)
]


@dataclass(frozen=True)
class Layer:
    batched: bool
    push: bool
    tokens: int
    ep: int = 2
    tp: int = 1
    copies: int = 1
    experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    quant: str = "none"
    dtype: torch.dtype = torch.bfloat16

    def launches(self):
        """Return (kernel, arguments, constants) of every launch of a call."""
        problem = moekit.MoEProblem(
            num_experts=self.experts, top_k=self.top_k, hidden_size=self.hidden,
            intermediate_size=256 * self.tp, max_num_tokens=self.tokens, quant=self.quant,
            dtype=self.dtype, device="cpu",
            parallel=moekit.ParallelConfig(
                ep_size=self.ep, tp_size=self.tp, dp_size=self.ep * self.tp // self.copies
            ),
        )  # fmt: skip
        kind = transfer.AssignmentTransfer if self.batched else transfer.RowTransfer
        rank = kind.of(problem, Settings(self.push, 32))
        cpu, ranks = torch.device("cpu"), self.ep * self.tp
        # The pages are never touched.
        memory = torch.empty(rank.layout.nbytes, dtype=torch.uint8)
        buffer = Buffer.of(memory, [memory.data_ptr()] * ranks, Lost.of(ranks, cpu))
        ids = torch.zeros(self.tokens, self.top_k, dtype=torch.int32)
        x = torch.empty(self.tokens, self.hidden, dtype=self.dtype)
        scale = None
        if problem.quant.activation is not None:
            x = x.to(problem.quant.activation.torch_dtype)
            scale = torch.empty(problem.quant.activation.scale_shape(self.tokens, self.hidden))
        recorded: list = []
        with mock.patch.multiple(transfer, **{n: self._record(n, recorded) for n in _LAUNCHERS}):
            steps, arrived = rank.send(buffer, x, scale, Routing(ids.float(), ids))
            out = torch.empty(self.tokens, self.hidden, dtype=self.dtype)
            steps += rank.gather(arrived.handle, out)
            for step in steps:
                step()
        return recorded

    @staticmethod
    def _record(name: str, to: list):
        kernel = getattr(transfer, name)._kernel
        return lambda grid, *args, **constants: to.append((kernel, args, constants))


_QUICK = [
    Layer(batched, push, tokens) for batched in (False, True) for push in (False, True)
    for tokens in (128, 4096)[: 1 if batched else 2]
]  # fmt: skip
LAYERS = [
    *_QUICK,
    *(replace(layer, quant="fp8_block") for layer in _QUICK),
    *(replace(layer, ep=8) for layer in _QUICK),
    *(replace(layer, ep=4, tp=2, experts=250) for layer in _QUICK),
    *(replace(layer, ep=4, copies=2, top_k=32) for layer in _QUICK),
    *(replace(layer, dtype=torch.float32, hidden=2880) for layer in _QUICK),
]


def compiled(kernel, args, constants):
    """Compile a launch as Triton's launcher would specialize it."""
    constants = dict(constants)
    options = {n: constants.pop(n) for n in ("num_warps", "num_stages") if n in constants}
    signature, attrs = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], aligned = _TYPES[value.dtype], value.data_ptr() % 16 == 0
        elif value == 1:
            signature[name], aligned = "constexpr", False
            constants[name] = 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attrs[(i,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(kernel.arg_names[len(args) :], "constexpr")
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", int(_CAPABILITY), 32), options=options)


def facts(made) -> tuple[int, int, int, int]:
    """Return registers, bytes of stack, shared bytes, and asynchronous copies."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        said = subprocess.run(
            [cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return registers, stack, made.metadata.shared, made.asm["ptx"].count("cp.async.c")


def main() -> int:
    bad, seen = 0, set()
    print(f"triton {triton.__version__}")
    for layer in _QUICK if "--quick" in sys.argv else LAYERS:
        for kernel, args, constants in layer.launches():
            key = (kernel.__name__, repr(sorted(constants.items())), args[0].dtype)
            if key in seen:
                continue
            seen.add(key)
            registers, stack, shared, copies = facts(compiled(kernel, args, constants))
            wrong = stack > _STACK_LIMIT or shared > _SHARED[_CAPABILITY]
            bad += wrong
            print(
                f"{kernel.__name__:22}{'WRONG ' * wrong} {registers:4} registers {stack:4} "
                f"stack {shared:7} shared {copies:3} cp.async  "
                f"{'ll' if layer.batched else 'ht'} {'push' if layer.push else 'pull'} "
                f"T={layer.tokens} ep={layer.ep} tp={layer.tp} copies={layer.copies} "
                f"K={layer.top_k} H={layer.hidden} {layer.quant} {str(layer.dtype)[6:]}",
                flush=True,
            )
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
