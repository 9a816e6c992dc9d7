"""Compile the kernels of every launch plan and of training for a GPU that is not here.

    python plugins/moekit-triton/tests/triton_compile.py [--quick] [80 | 86 | 89 | 90 | 100 | 120]

Prints one line for each kernel: registers and bytes of stack of a thread, and shared memory. Exits
with 1 if a kernel does not compile, needs more shared memory than a block can have, or reads memory
in a slow way. Specialized warps are compiled with every version of triton, also those with which
moekit does not choose them; --quick leaves them out.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

import torch
import triton
from gpu_compile import Compiled, recorded
from moekit_triton import capabilities, moekit_experts, training, training_adapters
from moekit_triton.calls import Buffers, Call, CallAdapters, Layer, low_rank_entries
from moekit_triton.heuristics import Planner
from moekit_triton.kernels.tiles import GemmTile
from moekit_triton.packing import pack_weights
from moekit_triton.plans import LaunchPlan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moekit import DeviceSpec, MoEProblem
from moekit.plugin import AdapterSlots, Dispatched, Wanted
from moekit.testing.adapters import random_adapters
from moekit.testing.cases import random_weights

_ARCHITECTURES = [80, 86, 89, 90, 100, 120]
_SIZES = {
    "qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "gpt-oss": (32, 4, 2880, 2880)
}  # fmt: skip
_SLOTS = AdapterSlots(2, 32)
_QUICK = [("qwen3-30b", {}, (1,)), ("qwen3-30b", {"quant": "int4_w4a16_g128"}, (16,)),
          ("qwen3-30b", {"adapters": _SLOTS}, (1,)),
          ("qwen3-30b", {"adapters": _SLOTS, "quant": "fp8_block"}, (16,))]  # fmt: skip
_MOST_SINGLES = 64  # a kernel loads that many scales
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
_ALL = [
    *(("qwen3-30b", {"quant": quant}, _TOKENS) for quant in (
        "none", "fp8_block", "fp8_channel_token", "int8_channel_token",
        "int8_w8a16", "fp8_w8a16_block", "int4_w4a16_g128", "int4_w4a16_g32_zp", "mxfp4_w4a16",
    )),
    *(("mixtral", {"quant": quant}, _TOKENS) for quant in ("none", "fp8_block")),
    *(("gpt-oss", {"quant": quant, "has_bias": True, "activation": "swigluoai"}, _TOKENS)
      for quant in ("none", "fp8_block", "mxfp4_w4a16")),
    ("qwen3-30b", {"dtype": torch.float16}, _TOKENS),
    ("qwen3-30b", {"dtype": torch.float32}, _TOKENS),
    ("qwen3-30b", {"activation": "relu2"}, _TOKENS),
    *(("qwen3-30b", {"quant": quant, "batch_invariant": True}, _TOKENS)
      for quant in ("none", "fp8_block")),
    *(("qwen3-30b", {"quant": quant, "adapters": _SLOTS}, _TOKENS)
      for quant in ("none", "fp8_block", "fp8_channel_token", "int4_w4a16_g128")),
    ("mixtral", {"adapters": AdapterSlots(2, 128, separate=True)}, _TOKENS),
    ("gpt-oss", {"quant": "mxfp4_w4a16", "has_bias": True, "activation": "swigluoai",
                 "adapters": AdapterSlots(1, 8)}, _TOKENS),
]  # fmt: skip
_SMALL_TILES = training.Tiles(*[GemmTile(64, 32, 32, tma=True)] * 6)  # which compile fast
_TRAINED: list = [
    ("qwen3-30b", {}),
    ("qwen3-30b", {"quant": "fp8_block"}),
    ("qwen3-30b", {"quant": "int4_w4a16_g32_zp", "adapters": _SLOTS}),
    ("gpt-oss", {"has_bias": True, "activation": "swigluoai"}),
    ("gpt-oss", {"quant": "mxfp4_w4a16", "has_bias": True, "activation": "swigluoai"}),
    ("qwen3-30b", {"quant": "int8_channel_token", "dtype": torch.float32}),
    ("qwen3-30b", {"quant": "int4_w4a16_channel", "dtype": torch.float16}),
    ("qwen3-30b", {"dtype": torch.float32}),
    ("qwen3-30b", {"dtype": torch.float16, "activation": "relu2"}),
    ("qwen3-30b", {"adapters": _SLOTS}),
]


def plans(problems: list, device: DeviceSpec) -> Iterator[tuple[MoEProblem, LaunchPlan]]:
    """Yield the plans of all numbers of tokens, each with a problem of few experts."""
    for name, changes, tokens in problems:
        p = problem_of(name, device, **changes)
        if moekit_experts()[0].unsupported(p):
            continue
        planner = Planner(p)
        for plan in dict.fromkeys(planner.plan(rows, p.top_k) for rows in tokens):
            yield small_of(p), plan


def problem_of(name: str, device: DeviceSpec, **changes: Any) -> MoEProblem:
    experts, top_k, hidden, inner = _SIZES[name]
    return MoEProblem(num_experts=experts, top_k=top_k, hidden_size=hidden,
                      intermediate_size=inner, device=device, **changes)  # fmt: skip


def small_of(p: MoEProblem) -> MoEProblem:
    """Return a problem of few experts whose kernels are the same: sizes keep their remainders."""
    return p.replace(
        num_experts=4, top_k=2, hidden_size=512 + p.hidden_size % 512,
        intermediate_size=512 + p.intermediate_size % 512,
    )  # fmt: skip


def call(problem: MoEProblem, plan: LaunchPlan, rows: int, live_R: Tensor | None) -> Call:
    """Return a call on the CPU; nothing reads its values."""
    layer = Layer.of(problem)
    weights = random_weights(problem.replace(device="cpu"), torch.device("cpu"))
    packed = pack_weights("triton", weights, problem)
    specs = plan.workspace(layer, rows, problem.top_k)
    buffers = Buffers(*(torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs))
    x = torch.zeros(rows, problem.hidden_size, dtype=problem.dtype)
    ids = torch.zeros(rows, problem.top_k, dtype=torch.int64)
    y_rows = ids.numel() if problem.batch_invariant else rows  # then K's sum is the dispatcher's
    y = torch.zeros(y_rows, problem.hidden_size, dtype=problem.dtype)
    adapters = None
    if problem.adapters is not None:
        memory = torch.empty(low_rank_entries(problem, rows))
        stack = random_adapters(problem.replace(device="cpu"))
        adapters = CallAdapters(stack, torch.zeros(rows, dtype=torch.int32), memory)
    return Call(layer, packed, buffers, x, None, ids, ids.float(), y, live_R, adapters)


class _NoValues(TorchDispatchMode):
    """Fail where the host reads a tensor's values, or makes a tensor whose size depends on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **kwargs or {})


def train(problem: MoEProblem, tiles: training.Tiles) -> None:
    """Launch the kernels of a training step of 64 tokens on the CPU, which waits for no value."""
    weights = random_weights(problem.replace(device="cpu"), torch.device("cpu"))
    with mock.patch.object(training, "choose_tiles", lambda *_: tiles), _NoValues():
        experts: Any = training.TrainableTriton(moekit_experts()[0], problem)
        packed, trained = experts.pack(weights), dict(weights.tensors())
        if problem.quant.weight is not None:
            trained = {}
        if problem.adapters is not None:
            experts = training_adapters.TrainableAdapterTriton(moekit_experts()[0], problem)
            stack = random_adapters(problem.replace(device="cpu"))
            packed, trained = replace(packed, adapters=stack), stack.tensors()
        x = torch.zeros(64, problem.hidden_size, dtype=problem.dtype)
        ids = torch.zeros(64, problem.top_k, dtype=torch.int64)
        slots = torch.zeros(64, dtype=torch.int32) if problem.adapters is not None else None
        tokens = Dispatched(x, None, ids, ids.float(), adapter_ids=slots)
        saved = experts.forward(torch.empty_like(x), tokens, packed)
        wanted = Wanted(True, True, frozenset(trained))
        kept = experts.backward_input(x, tokens, packed, saved, wanted).kept
        for x_alone in (True, False):  # the others' results have no memory
            few = Wanted(x_alone, not x_alone, frozenset())
            experts.backward_input(x, tokens, packed, saved, few)
        for dtype, add in ((problem.dtype, False), (torch.float32, True)):
            into = {name: torch.zeros_like(t, dtype=dtype) for name, t in trained.items()}
            experts.backward_weight(x, tokens, saved, kept, into, add)


def slow_loads(made: Compiled) -> str:
    """Return what is wrong with a kernel's loads from global memory, "" if nothing is.

    Triton's versions find other layouts and other widths for the same code: 3.9 once read a row by
    16 bits at a time, and once gave the columns of a weight's row to two threads of a warp.
    """
    singles = len(re.findall(r"ld\.global(\.\w+)*\.[bu]16 ", made.ptx))
    if singles > _MOST_SINGLES:
        return f"{singles} loads of 16 bits"
    layout = r"(#\w+) = #ttg\.blocked<.*threadsPerWarp = \[([\d, ]+)\]"
    threads = dict(re.findall(layout, made.layouts))
    load = r"tt\.load .*tensor<(\d+(?:x\d+){2,})x!.*, (#\w+)>"
    for sizes, name in re.findall(load, made.layouts):
        large = math.prod(map(int, sizes.split("x"))) >= 1024
        if large and "32" not in threads[name].split(", "):
            return f"a warp has [{threads[name]}] threads in a tile of {sizes}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", nargs="?", type=int, choices=_ARCHITECTURES, default=90)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    capability = divmod(args.capability, 10)
    device = DeviceSpec("cuda", capability, "NVIDIA H200" if args.capability == 90 else "any")
    capabilities.GLUON_VERSIONS = (".".join(triton.__version__.split(".")[:2]),)
    print(f"triton {triton.__version__}")
    p = MoEProblem(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128, device=device)
    bad, most = 0, capabilities.shared_memory(p)
    with recorded(capability=capability) as launches:
        for problem, plan in plans(_QUICK if args.quick else _ALL, device):
            if not args.quick:
                plan.launch(call(problem, plan, 64, None))
            # So many rows are sorted in two launches.
            plan.launch(call(problem, plan, 1100, torch.zeros(1, dtype=torch.int32)))
        for name, changes in _TRAINED[: 3 if args.quick else None]:
            p = small_of(problem_of(name, device, training=True, **changes))
            plain = p.adapters is not None  # without specialized warps
            tiles = training.choose_tiles(p, 4096, not plain)
            train(p, _SMALL_TILES if args.quick else tiles)
    for launch in launches:
        try:
            made = launch.compiled()
        except Exception as error:
            bad += 1
            print(f"WRONG  {launch.name}: {type(error).__name__}: {error}", flush=True)
            continue
        wrong = f"more than {most} shared" if made.shared > most else slow_loads(made)
        bad += bool(wrong)
        print(
            f"{wrong and f'WRONG: {wrong}'}{made.registers:4} registers {made.stack:4} stack "
            f"{made.shared:7} shared  {launch.name}",
            flush=True,
        )
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
