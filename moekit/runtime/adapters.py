"""The adapters of a call (LoRA): their checks, and how a row's adapter reaches the experts.

A dispatcher that moves tokens is made for `MoEProblem.dispatched`, in which one id names an expert
and an adapter: ``expert * (S + 1) + adapter + 1``. So it sends a token's adapter with its experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moekit.contract import Adapters, Dispatched, Routing
from moekit.errors import BackendBroken, InvalidInput, WeightsError
from moekit.problem import MoEProblem


def check(
    problem: MoEProblem, routing: Routing, adapters: Adapters | None, x: Tensor, by_value: bool
) -> None:
    """Raise WeightsError or InvalidInput if a call cannot use the adapters or their ids."""
    ids, slots = routing.adapter_ids, problem.adapters
    if slots is None:
        given = "adapters" if adapters is not None else "adapter_ids"
        raise WeightsError(
            f"{given} are given, but the kernel was composed without adapters: pass "
            "adapters=AdapterSlots(count, rank) to the layer or the problem"
        )
    if adapters is None:
        raise WeightsError("adapter_ids are given, but no adapters: pass Stack.on(weights)")
    _check_stack(adapters, problem, x)
    if torch.is_grad_enabled() and any(t.requires_grad for t in adapters.tensors().values()):
        raise WeightsError(
            "the adapters require a gradient, which this call does not compute: call a kernel "
            "composed for problem.replace(training=True)"
        )
    if ids is None:
        if slots.count > 1:
            raise InvalidInput(f"adapter_ids must name one of {slots.count} adapters, or -1")
        ids = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    if ids.shape != x.shape[:1] or ids.dtype != torch.int32 or ids.device != x.device:
        raise InvalidInput(
            f"adapter_ids are {tuple(ids.shape)} {ids.dtype} on {ids.device}, expected "
            f"({len(x)},) int32 on {x.device}"
        )
    if by_value and ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high >= slots.count:
            raise InvalidInput(
                f"adapter_ids span [{low}, {high}], expected -1 (none) or 0..{slots.count - 1}"
            )
        if not bool(adapters.scaling[ids[ids >= 0]].isfinite().all()):
            raise InvalidInput("adapter_ids name a slot that holds no adapter: load one into it")


def shapes(problem: MoEProblem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a stack's matrices by name, see `Adapters`."""
    p, slots = problem, problem.adapters
    assert slots is not None
    groups = 2 if slots.separate and p.activation.gated else 1
    first = slots.count, p.num_local_experts
    return {
        "w13_a": (*first, groups, slots.rank, p.hidden_size),
        "w13_b": (*first, p.w13_rows, slots.rank),
        "w2_a": (*first, slots.rank, p.local_intermediate_size),
        "w2_b": (*first, p.hidden_size, slots.rank),
    }


def _check_stack(adapters: Adapters, problem: MoEProblem, x: Tensor) -> None:
    wanted, found = shapes(problem), adapters.tensors()
    wrong = [
        f"{name} is {tuple(t.shape)} {t.dtype} on {t.device}, expected {wanted[name]} "
        f"{problem.dtype} on {x.device}"
        for name, t in found.items()
        if (t.shape, t.dtype, t.device) != (wanted[name], problem.dtype, x.device)
    ]
    wrong += [
        f"{name} has strides {t.stride()}: its last two dimensions must be contiguous"
        for name, t in found.items()
        if t.stride()[-2:] != (t.shape[-1], 1) and not t[0, 0].is_contiguous()
    ]
    wrong += [
        f"{name}_a and {name}_b must be given together, and one is missing"
        for name in ("w13", "w2")
        if (f"{name}_a" in found) != (f"{name}_b" in found)
    ]
    assert problem.adapters is not None
    scaling = adapters.scaling
    if scaling.shape != (problem.adapters.count,) or scaling.dtype != torch.float32:
        wrong.append(
            f"scaling is {tuple(scaling.shape)} {scaling.dtype}, expected "
            f"({problem.adapters.count},) float32"
        )
    if wrong:
        raise WeightsError(f"the adapters do not fit the problem: {'; '.join(wrong)}")


def with_ids(routing: Routing, adapters: Adapters | None, problem: MoEProblem) -> Routing:
    """Return the routing for the dispatcher. If weights have no adapters, no token has one."""
    ids, slots = routing.adapter_ids, problem.adapters
    assert slots is not None
    topk_ids = routing.topk_ids
    if adapters is None or ids is None:
        none = -1 if adapters is None else 0
        ids = torch.full((len(topk_ids),), none, dtype=torch.int32, device=topk_ids.device)
    if problem.parallel.moves_tokens:
        named = topk_ids * (slots.count + 1) + (ids[:, None] + 1).to(topk_ids.dtype)
        topk_ids = torch.where(topk_ids < 0, -1, named)
    return replace(routing, topk_ids=topk_ids, adapter_ids=ids.contiguous())


def arrived(tokens: Dispatched, problem: MoEProblem) -> Dispatched:
    """Return the tokens for the experts: with local expert ids, and the adapter of each row."""
    if not problem.parallel.moves_tokens:
        if tokens.adapter_ids is None:
            raise BackendBroken(
                "the dispatcher does not say which adapter (LoRA) each row has: correct it "
                "(Dispatched.adapter_ids), or name another dispatcher"
            )
        return tokens
    ids_RK, slots = tokens.topk_ids, problem.adapters
    assert ids_RK is not None and slots is not None
    real, each = ids_RK >= 0, slots.count + 1
    adapter_ids = torch.where(real, ids_RK % each - 1, -1).amax(dim=1).int()
    return replace(tokens, topk_ids=torch.where(real, ids_RK // each, -1), adapter_ids=adapter_ids)
