"""Measure the host time of an eager call: what each layer of moekit costs above its launches.

    python benchmarks/host_time.py [--models qwen3-30b,mixtral,gpt-oss-20b] [--tokens 1,16]
        [--experts triton] [--out FILE.md]

Times are microseconds until a call returns, from a drained queue (medians; the fastest on the CPU):
launch    experts.apply on buffers that are there already: the launches, and nothing around them
kernel    kernel(x, weights, routing); the script fails if kernel / launch exceeds 1.3
layer     FusedMoE given ids and weights; routed: given logits
module    transformers' experts module through moekit, with router weights in bf16, as its routers
          return them; graphed: as a CUDA graph; batched_mm: by transformers' own implementation

Without CUDA nothing is launched: apply returns at once, and there is neither batched_mm nor a
bound. The times are then of Python and torch's operators, whose number stands in brackets.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from moekit_bench import EAGER_CALLS, Table, Timer, inputs
from torch.utils._python_dispatch import TorchDispatchMode

import moekit
import moekit.integrations.transformers as integration
from moekit.integrations.packed_layer import Layer

BOUND = 1.3
COLUMNS = ("launch", "kernel", "layer", "routed", "module", "graphed", "batched_mm")
# model: transformers' module of experts, and (E, K, H, I)
MODELS = {
    "qwen3-30b": ("qwen3_moe", "Qwen3MoeExperts", (128, 8, 2048, 768)),
    "mixtral": ("mixtral", "MixtralExperts", (8, 2, 4096, 14336)),
    "gpt-oss-20b": ("gpt_oss", "GptOssExperts", (32, 4, 2880, 2880)),
}

Step = Callable[[], object]


class Operators(TorchDispatchMode):
    """Count torch's operators, except views, which never reach a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = func.is_view and isinstance(out, torch.Tensor)
        self.count += not (view and out.data_ptr() == args[0].data_ptr())
        return out


def experts_module(name: str, device: torch.device) -> Any:
    """Return transformers' experts module with random bf16 weights, small ones on the CPU."""
    model, cls, (experts, _, hidden, inner) = MODELS[name]
    if device.type == "cpu":
        hidden = inner = 64
    config = SimpleNamespace(
        num_experts=experts, num_local_experts=experts, hidden_size=hidden, hidden_act="silu",
        intermediate_size=inner, moe_intermediate_size=inner, swiglu_alpha=1.702, swiglu_limit=7.0,
        _experts_implementation="moekit",
    )  # fmt: skip
    found = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    with device:
        module = getattr(found, cls)(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
    return module


def steps(name: str, tokens: int, module: Any) -> dict[str, Step]:
    """Return what is timed, all with the same weights and the same input."""
    integration.repack(module)  # an earlier call replaced its graphs
    held = Layer.of(module)
    held.prepare(torch.bfloat16, MODELS[name][2][1], False)
    packed = held.packed
    assert packed is not None
    kernel, weights = packed.kernel, packed.weights
    kernel.checked = False
    p, device = kernel.problem, module.down_proj.device
    ((x, routing),) = inputs("uniform", tokens, 1, p, device)
    layer = moekit.FusedMoE(
        p.num_experts, p.top_k, p.hidden_size, p.intermediate_size, params_dtype=p.dtype,
        activation=p.activation, has_bias=p.has_bias, checked=False, device=device,
        dispatcher=kernel.dispatcher.spec.name, experts=kernel.experts.spec.name,
    )  # fmt: skip
    layer.packed = weights
    topk_weights, ids = routing.topk_weights, routing.topk_ids
    bf16_weights = topk_weights.bfloat16()
    logits = torch.randn(tokens, p.num_experts, device=device)
    arrived = kernel.dispatcher.prepare(x, routing, None).result()
    *leading, hidden = arrived.x.shape
    spec = kernel.experts.spec
    if spec.format is moekit.ActivationFormat.STANDARD and not spec.reduces:
        leading.append(p.top_k)
    y = torch.empty(*leading, hidden, dtype=p.dtype, device=device)
    kernel(x, weights, routing)  # the workspace is large enough from now on
    scratch = kernel.workspace.take(kernel.experts.workspace(arrived.x.shape[-2]), device)
    graphed = packed.graphed

    def by(implementation: str, graphed: Any = None) -> Step:
        chosen = replace(packed, graphed=graphed)

        def call() -> None:
            module.config._experts_implementation, held.packed = implementation, chosen
            module(x, ids, bf16_weights)

        return call

    found: dict[str, Step] = {
        "launch": lambda: kernel.experts.apply(y, arrived, weights, scratch),
        "kernel": lambda: kernel(x, weights, routing),
        "layer": lambda: layer(x, topk_weights=topk_weights, topk_ids=ids),
        "routed": lambda: layer(x, logits),
        "module": by("moekit"),
    }
    if device.type == "cuda":
        found["batched_mm"] = by("batched_mm")
        if graphed is not None:
            found["graphed"] = by("moekit", graphed)
    else:
        for experts in (kernel.experts, layer.kernel.experts):
            mock.patch.object(experts, "apply", lambda *args: None).start()
    return found


def measure(found: dict[str, Step], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the microseconds of each step; the first three rounds are not counted."""
    timer, cuda = Timer(device), device.type == "cuda"
    calls = EAGER_CALLS if cuda else 200
    taken: dict[str, list[float]] = {name: [] for name in found}
    for round in range(repeats + 3):
        for name, step in found.items():
            _, us = timer.eager_us(step, calls)
            if round >= 3:
                taken[name].append(us)
    typical = statistics.median if cuda else min  # without a device the fastest is undisturbed
    return {name: typical(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16")
    parser.add_argument("--experts", help="default: moekit's choice, on the CPU torch")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    integration.install(experts=args.experts or (None if cuda else "torch"))
    where = torch.cuda.get_device_name() if cuda else platform.machine()
    title = f"{where}, torch {torch.__version__}, moekit {moekit.__version__}; us on the host"
    table = Table("model: experts", "T", *COLUMNS, "kernel / launch")
    print("\n".join([title, "", *table]))
    worst = 0.0
    with torch.inference_mode():
        for name in args.models.split(","):
            module = experts_module(name, device)
            for tokens in map(int, args.tokens.split(",")):
                found = steps(name, tokens, module)
                times = measure(found, device, args.repeats)
                row = [f"{name}: {Layer.of(module).kernel.experts.spec.name}", str(tokens)]
                for column in COLUMNS:
                    if column not in found:
                        row.append("–")
                        continue
                    with torch.inference_mode(False), torch.no_grad(), Operators() as operators:
                        found[column]()
                    row.append(f"{times[column]:.1f} ({operators.count})")
                ratio = times["kernel"] / times["launch"]
                worst = max(worst, ratio)
                print(table.add(*row, f"{ratio:.2f}" if cuda else "–"), flush=True)
                mock.patch.stopall()
            del module, found
            gc.collect()
    if args.out:
        args.out.write_text("\n".join([title, "", *table]) + "\n")
    if cuda and worst > BOUND:
        sys.exit(f"kernel / launch reaches {worst:.2f}, beyond {BOUND}")


if __name__ == "__main__":
    main()
