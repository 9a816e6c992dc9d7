"""The rows of calls that say their `max_tokens`, on ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

import moekit
from moekit.discovery.registry import registry
from moekit.testing.cases import make_case

CAPACITY = 16


def told_rows(
    rank: int, world: int, module: str, name: str, told: Sequence[int | None]
) -> list[int]:
    """Return the rows (R or C) of calls of one token on each rank in a kernel of `CAPACITY`.

    module: it has ``registry()`` of backends, or ``standin_spec()`` of the dispatcher.
    """
    made = importlib.import_module(module)
    backends = made.registry() if hasattr(made, "registry") else registry().copy()
    if name not in backends.dispatchers:
        own = name in registry().dispatchers
        backends.register(registry().dispatcher(name) if own else made.standin_spec())
    problem = moekit.MoEProblem(
        num_experts=8, top_k=2, hidden_size=512, intermediate_size=32, max_num_tokens=CAPACITY,
        parallel=moekit.ParallelConfig(ep_size=world, ep_rank=rank), dtype=torch.bfloat16,
        device="cpu",
    )  # fmt: skip
    kernel = moekit.compose(problem, name, "torch", group=dist.group.WORLD, backends=backends)
    dispatcher, rows = kernel.dispatcher, []
    case = make_case(problem.replace(parallel=moekit.ParallelConfig(), max_num_tokens=None), 1)
    taken = torch.int64 if dispatcher.spec.ids_dtype == "any" else None
    ids = case.routing.topk_ids.to(taken or getattr(torch, dispatcher.spec.ids_dtype))
    for most in told:
        routing = replace(case.routing, topk_ids=ids, max_tokens=most)
        tokens = dispatcher.prepare(case.x, routing, None).result()
        rows.append(tokens.x.shape[-2])
        dispatcher.finalize(torch.zeros_like(tokens.x), tokens, torch.empty_like(case.x)).result()
    kernel.destroy()
    return rows
