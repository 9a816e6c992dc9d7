"""The ranks' part of test_vllm_dispatch.py: layers of the stand-in over processes."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import engine_layers as one
import moekit_vllm
import torch
import torch.distributed as dist
import vllm_standin as standin
from moekit_vllm import experts, settings, versions, weights
from vllm_layers import applied, made

import moekit
from moekit.engines import kernels
from moekit.errors import MoekitError


def start(rank: int, world_size: int, mode: str, dispatcher: str, **more: Any) -> None:
    """Put the stand-in where vLLM would be, with moekit in it.

    more: Attributes of vLLM's group of ranks.
    """
    distributed = ModuleType("vllm.distributed")
    world = dist.group.WORLD
    group = SimpleNamespace(device_group=world, cpu_group=world, **more)
    vars(distributed)["get_ep_group"] = lambda: group
    sys.modules.update(standin.modules() | {"vllm.distributed": distributed})
    versions.installed = lambda: "0.33.0"
    os.environ.update(MOEKIT_DISPATCHER=dispatcher, MOEKIT_VLLM=mode)
    settings.VLLM.said.clear()
    kernels._kernels.clear()
    standin.op_registry_oot.clear()
    moekit_vllm.register()


def layer_of(rank: int, world_size: int, order: list[int], fields: dict[str, Any], **more: Any):
    """Return a loaded layer with this rank's share of the experts."""
    share = one.E // world_size
    held = order[rank * share : (rank + 1) * share]
    where = torch.full((one.E,), -1, dtype=torch.int32)
    where[held] = torch.arange(share, dtype=torch.int32)
    split = dict(ep_size=world_size, ep_rank=rank, use_ep=True, dp_size=world_size) | fields
    config = standin.config(one.E, one.K, one.H, one.INNER, max_num_tokens=16, **split)
    weights = {n: w[held].clone() for n, w in one.drawn().items()}
    return made(config, weights, expert_map=where, **more)


def fail(
    rank: int, world_size: int, failing: int, step: str, mode: str, dispatcher: str
) -> list[dict[str, Any]]:
    """Make two layers, of which the first fails on one rank; return what computes each."""

    def broken(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(f"no memory to {step}")

    start(rank, world_size, mode, dispatcher)
    owner, name = {
        "read": (weights, "read"),
        "compose": (moekit, "compose"),
        "pack": (moekit.ModularKernel, "pack"),
    }[step]
    found = []
    for n in range(2):
        kept = getattr(owner, name)
        if rank == failing and n == 0:
            setattr(owner, name, broken)
        try:
            layer = layer_of(rank, world_size, list(range(one.E)), {}, layer_name=f"layers.{n}")
            found.append({"moekit": layer.quant_method.moekit_experts is not None})
        except MoekitError as error:
            found.append({"refused": str(error)})
        finally:
            setattr(owner, name, kept)
    return [{**each, "said": sorted(settings.VLLM.said)} for each in found]


def join(rank: int, world_size: int) -> dict[str, Any]:
    """Load a layer on the first rank alone, as a rank that joins a running engine does."""
    if rank:
        return {}
    start(rank, world_size, "on", "naive", tcp_store_group="vLLM's for elastic ranks")
    layer = layer_of(rank, world_size, list(range(one.E)), {})
    said = sorted(settings.VLLM.said)
    return {"moekit": layer.quant_method.moekit_experts is not None, "said": said}


def run(rank: int, world_size: int, tokens: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    """Compute a layer whose ranks have different tokens; return what it says of itself."""
    start(rank, world_size, "require", "naive")
    fields = dict(fields)
    order = fields.pop("order", list(range(one.E)))
    counts = fields.pop("counts", tokens)
    standin.dp_metadata = counts and SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts))
    more = {"hash_indices_table": 1} if fields.pop("hashed", False) else {}
    try:
        layer = layer_of(rank, world_size, order, fields, **more)
    except MoekitError as error:
        return {"refused": str(error)}
    calls = one.calls(tokens[rank], seed=rank)
    with patch.object(experts, "Routing", wraps=experts.Routing) as routing:
        out = applied(layer, *calls)
    want = one.want(one.drawn(), *calls)
    return {
        "error": one.error(out, want) if tokens[rank] else float(out.numel()),
        "max_tokens": routing.call_args.kwargs["max_tokens"],
        "moves": layer.quant_method.supports_internal_mk,
        "said": sorted(settings.VLLM.said),
    }
