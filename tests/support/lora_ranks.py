"""The ranks' part of test_lora_ranks.py: adapters over some ranks against the whole layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from layer_cases import K, logits_for
from layer_ranks import Case, group_of, my_layer, my_weights

import moekit
from moekit import Routing
from moekit.lora import Adapter, AdapterSlots
from moekit.testing import oracle
from moekit.testing.adapters import random_adapters
from moekit.testing.cases import random_x, whole
from moekit.testing.compare import complain

SLOTS = AdapterSlots(3, 6)
NAMES = ("one", "two", None, "three")


def adapted(case: Case, rank: int, **knobs: Any) -> tuple[Any, Any, Any, Any]:
    """Return a layer with three adapters, the whole layer's problem, weights and stack."""
    layer = my_layer(replace(case, knobs={**case.knobs, **knobs, "adapters": SLOTS}), rank)
    if layer is None:
        return None, None, None, None
    mine, everything = my_weights(layer)
    layer.load_weights(mine)
    problem = whole(layer.problem).replace(num_redundant_experts=0, max_num_tokens=None)
    stack = random_adapters(problem)
    for slot, name in enumerate(n for n in NAMES if n):
        given = {n: t[slot] for n, t in stack.tensors().items()}
        assert layer.adapters.load(name, Adapter(float(stack.scaling[slot]), **given)) == slot
    return layer, problem, everything, stack


def run_case(rank: int, world_size: int, case: Case) -> str:
    """Run the calls of ``case``, and return their faults as text."""
    layer, problem, everything, stack = adapted(case, rank)
    if layer is None:
        return ""
    batch, faults = rank * case.batches // case.ranks, []
    for number, counts in enumerate(case.tokens):
        tokens, key = counts[batch % len(counts)], (number, batch)
        x = random_x(layer.problem, tokens, key)
        logits = logits_for(layer, tokens, key)
        ids = layer.adapters.ids([NAMES[(n + batch) % 4] for n in range(tokens)])
        out = layer(x, logits, adapter_ids=ids)
        if layer.partial:
            dist.all_reduce(out, group=group_of(case.ranks))
        routing = replace(moekit.route(logits, K, renormalize=True), adapter_ids=ids)
        want = oracle(x, everything, routing, problem, stack)
        if complaint := complain(out, want, layer.problem):
            faults.append(f"call {number}, {tokens} tokens: {complaint}")
    layer.destroy()
    return "; ".join(faults)


def train(rank: int, world_size: int, case: Case) -> str:
    """Differentiate a call of every batch, and compare the sums over ranks with one rank's."""
    layer, problem, everything, stack = adapted(case, rank, trainable=True)
    if layer is None:
        return ""
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    held = {n: t.requires_grad_() for n, t in layer.adapters.adapters.tensors().items()}
    wide = replace(stack, **{n: t.clone().requires_grad_() for n, t in stack.tensors().items()})
    faults, L = [], layer.local_experts
    for batch in range(case.batches):
        tokens = case.tokens[0][batch % len(case.tokens[0])]
        x, logits = random_x(layer.problem, tokens, batch), logits_for(layer, tokens, batch)
        ids = layer.adapters.ids([NAMES[(n + batch) % 4] for n in range(tokens)])
        routing = replace(moekit.route(logits, K, renormalize=True), adapter_ids=ids)
        given = x.clone().requires_grad_()
        want = oracle(given, everything, routing, problem, wide)
        if tokens:
            want.sum().backward()
        if batch == rank * case.batches // case.ranks:
            own = x.clone().requires_grad_()
            out = layer(own, logits, adapter_ids=ids)
            out.sum().backward()
            if tokens and (said := complain(own.grad, given.grad, layer.problem)):
                faults.append(f"x: {said}")
    for name, t in held.items():
        right = getattr(wide, name).grad[:, list(L)].flatten(0, 1).flatten(1)
        if said := complain(t.grad.flatten(0, 1).flatten(1), right, layer.problem):
            faults.append(f"{name}: {said}")
    layer.destroy()
    return "; ".join(faults)


def uneven(rank: int, world_size: int) -> str:
    """Compose for experts that ranks cannot share evenly, and return the reason."""
    try:
        my_layer(Case(dp=2, ep=True, knobs={"num_experts": 7, "adapters": SLOTS}), rank)
    except moekit.MoekitError as error:
        return str(error)
    return ""


def no_ids(rank: int, world_size: int) -> str:
    """Call without adapter_ids, and return what this rank hears of it."""
    layer, *_ = adapted(Case(dp=2, ep=True, knobs={"num_experts": 8}), rank)
    if layer is None:
        return ""
    x = random_x(layer.problem, 3, 0)
    routing = Routing(torch.ones(3, K), torch.arange(3 * K).view(3, K) % 8)
    try:
        layer(x, topk_weights=routing.topk_weights, topk_ids=routing.topk_ids)
    except moekit.MoekitError as error:
        return str(error)
    return ""
