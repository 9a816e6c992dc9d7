"""Compile every kernel for compute capability 9.0, without a GPU, and print what they take.

    python plugins/moekit-nvlink/tests/nvlink_compile.py [--quick] [80 | 86 | 89 | 90 | 100 | 120]

Needs a triton wheel with the NVIDIA backend, as PyPI's; PYTHONPATH chooses the version. One line
for each kernel and layer: registers and bytes of stack a thread, shared memory, and how many copies
from global to shared memory run asynchronously (cp.async). Exits with 1 if a kernel does not
compile, spills more than a few values that are used once, needs more shared memory than a block of
that capability can have, or rounds sums over K otherwise than the experts do.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

import torch
import triton
from gpu_compile import recorded
from moekit_nvlink import transfer
from moekit_nvlink.buffers import Buffer, Lost
from moekit_nvlink.settings import Settings

import moekit
from moekit.plugin import Routing, Unreduced

_STACK_LIMIT = 32
_SHARED = {(8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448,
           (12, 0): 101376}  # fmt: skip
_CAPABILITY = next((divmod(int(each), 10) for each in sys.argv[1:] if each.isdecimal()), (9, 0))


@dataclass(frozen=True)
class Layer:
    batched: bool
    tokens: int
    ep: int = 2
    tp: int = 1
    copies: int = 1
    experts: int = 256
    top_k: int = 8
    hidden: int = 7168
    quant: str = "none"
    dtype: torch.dtype = torch.bfloat16
    training: bool = False

    def launch(self) -> None:
        """Launch the kernels of a call."""
        problem = moekit.MoEProblem(
            num_experts=self.experts, top_k=self.top_k, hidden_size=self.hidden,
            intermediate_size=256 * self.tp, max_num_tokens=self.tokens, quant=self.quant,
            dtype=self.dtype, device="cpu", training=self.training,
            parallel=moekit.ParallelConfig(
                ep_size=self.ep, tp_size=self.tp, dp_size=self.ep * self.tp // self.copies
            ),
        )  # fmt: skip
        kind = transfer.AssignmentTransfer if self.batched else transfer.RowTransfer
        rank = kind.of(problem, Settings(32))
        cpu, ranks = torch.device("cpu"), self.ep * self.tp
        # The pages are never touched.
        memory = torch.empty(rank.layout.nbytes, dtype=torch.uint8)
        buffer = Buffer.of(
            memory, [memory.data_ptr()] * ranks, Lost.of(ranks, cpu), rank.layout.chunks
        )
        ids = torch.zeros(self.tokens, self.top_k, dtype=torch.int32)
        x = torch.empty(self.tokens, self.hidden, dtype=self.dtype)
        scale = None
        if problem.quant.activation is not None:
            x = x.to(problem.quant.activation.torch_dtype)
            scale = torch.empty(problem.quant.activation.scale_shape(self.tokens, self.hidden))
        made, arrived = rank.send(buffer, x, scale, Routing(ids.float(), ids))
        steps = made()
        out = torch.empty(self.tokens, self.hidden, dtype=self.dtype)
        grads = torch.empty(self.tokens, self.top_k) if self.training else None
        steps += rank.gather(arrived.handle, out, grads)
        if rank.layout.chunks > 1:
            rows = torch.empty(rank.layout.rows * self.top_k, self.hidden, dtype=self.dtype)
            places = torch.zeros(rank.layout.rows, self.top_k, dtype=torch.int32)
            for each in (None, places):
                steps += rank.reduce(arrived.handle, Unreduced(rows, each), out)
        for step in steps:
            step()


_QUICK = [
    Layer(batched, tokens)
    for batched in (False, True) for tokens in (128, 1024, 4096)[: 1 if batched else 3]
]  # fmt: skip
LAYERS = [
    *_QUICK,
    *(replace(layer, quant="fp8_block") for layer in _QUICK),
    *(replace(layer, ep=8) for layer in _QUICK),
    *(replace(layer, training=True, ep=ep) for layer in _QUICK[:3] for ep in (2, 8)),
    *(replace(layer, ep=4, tp=2, experts=250) for layer in _QUICK),
    *(replace(layer, ep=4, copies=2, top_k=32) for layer in _QUICK),
    *(replace(layer, dtype=torch.float32, hidden=2880) for layer in _QUICK),
]


def main() -> int:
    bad, seen = 0, 0
    print(f"triton {triton.__version__}")
    with recorded(capability=_CAPABILITY) as launches:
        for layer in _QUICK if "--quick" in sys.argv else LAYERS:
            layer.launch()
            for launch in launches[seen:]:
                made = launch.compiled()
                wrong = made.stack > _STACK_LIMIT or made.shared > _SHARED[_CAPABILITY]
                # Its bits must equal the experts' sum.
                wrong |= launch.kernel.__name__ == "reduce_rows" and "fma.rn.f32" in made.ptx
                bad += wrong
                print(
                    f"{launch.kernel.__name__:22}{'WRONG ' * wrong} {made.registers:4} registers "
                    f"{made.stack:4} stack {made.shared:7} shared "
                    f"{made.ptx.count('cp.async.c'):3} cp.async  "
                    f"{'ll' if layer.batched else 'ht'} T={layer.tokens} "
                    f"ep={layer.ep} tp={layer.tp} copies={layer.copies} "
                    f"K={layer.top_k} H={layer.hidden} {layer.quant} {str(layer.dtype)[6:]}"
                    f"{' training' * layer.training}",
                    flush=True,
                )
            seen = len(launches)
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
