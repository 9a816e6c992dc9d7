"""The ranks' part of test_sglang_dispatch.py: layers of the stand-in over processes."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import engine_layers
import sglang_layers as one
import sglang_standin as standin
import torch.distributed as dist
from moekit_sglang import hooks, problem, settings, versions

from moekit.engines import kernels
from moekit.errors import MoekitError


def start(rank: int, world_size: int, **chosen: Any) -> None:
    """Put the stand-in in SGLang's place, with moekit in it."""
    sys.modules.update(standin.modules())
    standin.reset()
    world = dist.group.WORLD
    group = SimpleNamespace(device_group=world, cpu_group=world)
    vars(standin.split).update(moe_ep_size=world_size, moe_ep_rank=rank, moe_ep_group=group)
    vars(standin.chosen).update(all_to_all="deepep", **chosen)
    standin.arguments.chunked_prefill_size = 16
    versions.installed = lambda: "0.5.23"
    os.environ.update(MOEKIT_DISPATCHER="naive", MOEKIT_SGLANG="on")
    settings.SGLANG.said.clear()
    kernels._kernels.clear()
    hooks._installed.clear()
    standin.HookRegistry.hooks.clear()
    one.started()


def layer_of(rank: int, world_size: int) -> Any:
    share = engine_layers.E // world_size
    held = slice(rank * share, (rank + 1) * share)
    return one.made({name: tensor[held] for name, tensor in engine_layers.drawn().items()})


def run(rank: int, world_size: int, tokens: list[int]) -> dict[str, Any]:
    """Return the errors of the layer's outputs against whole sums over this rank's own tokens."""
    start(rank, world_size, dp_tokens=tokens)
    layer = layer_of(rank, world_size)
    x, topk = one.calls(tokens[rank], rank)
    expected = one.want(engine_layers.drawn(), x, topk)
    return {
        "moekit": one.taken(layer),
        "error": engine_layers.error(layer(x, topk), expected) if len(x) else len(layer(x, topk)),
        "said": sorted(settings.SGLANG.said),
    }


def fail(rank: int, world_size: int, failing: int) -> dict[str, Any]:
    """Return who computes a layer that one rank cannot read, and who moves its tokens."""
    start(rank, world_size)
    kept = problem.read

    def broken(*_: Any) -> None:
        raise MoekitError("no memory")

    problem.read = broken if rank == failing else kept
    try:
        layer = layer_of(rank, world_size)
    finally:
        problem.read = kept
    return {
        "moekit": one.taken(layer),
        "dispatcher": type(layer.dispatcher).__name__,
        "said": sorted(settings.SGLANG.said),
    }
