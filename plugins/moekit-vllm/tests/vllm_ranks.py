"""The ranks' part of test_vllm_dispatch.py: layers of the stand-in over processes."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import moekit_vllm
import test_vllm_hooks as one
import torch
import torch.distributed as dist
import vllm_standin as standin
from moekit_vllm import settings, versions

from moekit.errors import MoekitError


def run(rank: int, world_size: int, tokens: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    """Compute a layer whose ranks have tokens of their own; return what it says of itself."""
    distributed = ModuleType("vllm.distributed")
    group = SimpleNamespace(device_group=dist.group.WORLD)
    vars(distributed)["get_ep_group"] = lambda: group
    sys.modules.update(standin.modules() | {"vllm.distributed": distributed})
    versions.installed = lambda: "0.33.0"
    os.environ.update(MOEKIT_DISPATCHER="naive", MOEKIT_VLLM="require")
    settings._said.clear()
    standin.op_registry_oot.clear()
    moekit_vllm.register()
    fields = dict(fields)
    order = fields.pop("order", list(range(one.E)))
    more = {"hash_indices_table": 1} if fields.pop("hashed", False) else {}
    share = one.E // world_size
    held = order[rank * share : (rank + 1) * share]
    where = torch.full((one.E,), -1, dtype=torch.int32)
    where[held] = torch.arange(share, dtype=torch.int32)
    split = dict(ep_size=world_size, ep_rank=rank, use_ep=True, dp_size=world_size) | fields
    config = standin.config(one.E, one.K, one.H, one.INNER, max_num_tokens=16, **split)
    weights = one.drawn()
    try:
        layer = one.made(
            config, {n: w[held].clone() for n, w in weights.items()}, expert_map=where, **more
        )
    except MoekitError as error:
        return {"refused": str(error)}
    calls = one.calls(tokens[rank], seed=rank)
    out = one.applied(layer, *calls)
    try:
        layer.next_expert_map = where
        layer.update_expert_map_info()
        moved = ""
    except MoekitError as error:
        moved = str(error)
    return {
        "error": one.error(out, one.want(weights, *calls)) if tokens[rank] else float(out.numel()),
        "moves": layer.quant_method.supports_internal_mk,
        "said": sorted(settings._said),
        "moved": moved,
    }
