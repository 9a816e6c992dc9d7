"""The ranks' part of test_layer_ranks.py: a layer over some ranks against the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from layer_cases import E, H, I, K, expected, logits_for
from torch import Tensor

import moekit
from moekit import ExpertWeights, FusedMoE, ParallelConfig
from moekit.errors import MoekitError
from moekit.testing.cases import (
    device_of,
    random_weights,
    random_x,
    tp_shard,
    unquantized_weights,
    use_seed,
    whole,
)
from moekit.testing.compare import complain

EXPERTS = E + 1  # not divisible by any number of ranks above one


@dataclass(frozen=True)
class Case:
    """A layer on the first ``tp * dp`` ranks, or on ``parallel`` = (ep_size, tp_size, dp_size).

    tokens: For each call, the tokens of each batch, repeated if there are more batches.
    shared: There are shared experts. knobs: Arguments of FusedMoE.
    """

    tp: int = 1
    dp: int = 1
    ep: bool = False
    parallel: tuple[int, int, int] | None = None
    tokens: tuple[tuple[int, ...], ...] = ((7, 5), (1, 1), (6, 8))
    shared: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp if self.parallel is None else self.parallel[0] * self.parallel[1]

    @property
    def batches(self) -> int:
        return self.dp if self.parallel is None else self.parallel[2]


_groups: dict[int, dist.ProcessGroup | None] = {}


def group_of(ranks: int) -> dist.ProcessGroup | None:
    """Return the group of the first ``ranks`` ranks, None for one. Every rank must call it."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(range(ranks))) if ranks > 1 else None
    return _groups[ranks]


def begin(rank: int, world_size: int, seed: int) -> None:
    """Seed the rank, so that every rank draws the same numbers."""
    use_seed(seed)


def my_layer(case: Case, rank: int, device: str = "cpu") -> FusedMoE | None:
    """Return this rank's layer without weights; None for ranks outside it."""
    group = group_of(case.ranks)
    if rank >= case.ranks:
        return None
    knobs: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": K,
        "hidden_size": H,
        "intermediate_size": I,
        "params_dtype": torch.float32,
        "device": device,
        "group": group,
        "experts": "torch",
        "peer_timeout": 20.0,
        "shared_experts": torch.sin if case.shared else None,
    }
    if case.parallel is not None:
        ep_size, tp_size, dp_size = case.parallel
        knobs["parallel"] = ParallelConfig(
            ep_size=ep_size,
            ep_rank=rank // tp_size,
            tp_size=tp_size,
            tp_rank=rank % tp_size,
            dp_size=dp_size,
        )
    else:
        knobs.update(tp_size=case.tp, dp_size=case.dp, enable_expert_parallel=case.ep)
    return FusedMoE(**{**knobs, **case.knobs})


def my_weights(layer: FusedMoE) -> tuple[ExpertWeights, ExpertWeights]:
    """Return this rank's weights, and the whole layer's logical experts."""
    everything = whole(layer.problem).replace(num_redundant_experts=0, max_num_tokens=None)
    if layer.problem.parallel.tp_size == 1:
        all_experts = random_weights(everything)
        return all_experts.select(layer.local_experts), all_experts
    all_experts = unquantized_weights(everything)
    mine = tp_shard(all_experts.select(layer.local_experts), layer.problem)
    return mine, all_experts.to(device_of(layer.problem))


def run_case(rank: int, world_size: int, case: Case, device: str = "cpu") -> str:
    """Run ``case``, and return its faults as text."""
    layer = my_layer(case, rank, device)
    if layer is None:
        return ""
    mine, everything = my_weights(layer)
    layer.load_weights(mine)
    batch = rank * case.batches // case.ranks
    faults = []
    for number, counts in enumerate(case.tokens):
        tokens, key = counts[batch % len(counts)], (number, batch)
        x = random_x(layer.problem, tokens, key)
        logits = logits_for(layer, tokens, key).to(x.device)
        out = layer(x, logits)
        if layer.partial:
            dist.all_reduce(out, group=group_of(case.ranks))
        routing = moekit.route(logits, K, renormalize=True)
        shared = torch.sin if case.shared else None
        want = expected(layer.problem, everything, x, routing, shared)
        if complaint := complain(out, want, layer.problem):
            faults.append(f"call {number}, {tokens} tokens: {complaint}")
    layer.destroy()
    return "; ".join(faults)


def chunks_of(
    rank: int, world_size: int, case: Case, tokens: tuple[int, ...], most: int | None
) -> Any:
    """Return the sizes of the kernel calls of one layer call, and its fault if any."""
    layer = my_layer(replace(case, knobs={**case.knobs, "max_num_tokens": 3}), rank)
    assert layer is not None
    batch = rank * case.batches // case.ranks
    mine, everything = my_weights(layer)
    layer.load_weights(mine)
    sizes, start, all_reduce = [], layer.kernel.start, dist.all_reduce

    def counting(x: Tensor, **rest: Any) -> Any:
        sizes.append(x.shape[0])
        return start(x, **rest)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks exchanged token counts although max_tokens was given")

    layer.kernel.start = counting  # type: ignore[method-assign]
    if most is not None:
        dist.all_reduce = refused
    try:
        x, logits = random_x(layer.problem, tokens[batch], batch), logits_for(layer, tokens[batch])
        out = layer(x, logits, max_tokens=most)
    finally:
        dist.all_reduce = all_reduce
    want = expected(layer.problem, everything, x, moekit.route(logits, K, renormalize=True))
    return sizes, complain(out, want, layer.problem)


def one_fails(rank: int, world_size: int, case: Case, fault: str) -> list[str]:
    """Let rank 1 fail the second of three calls, and return every rank's outcomes."""
    layer = my_layer(replace(case, shared="shared" in fault), rank)
    if layer is None:
        return []
    mine, everything = my_weights(layer)
    outcomes = []
    for number in range(3):
        failing = number == 1 and rank == 1
        layer.load_weights(mine)
        batch = rank * case.batches // case.ranks
        x, logits = random_x(layer.problem, 5, batch), logits_for(layer, 5, batch)
        routing = moekit.route(logits, K, renormalize=True)
        if failing and fault == "no weights":
            layer.packed = None
        if failing and fault == "shape":
            x = x[:, 1:]
        if failing and fault == "fewer tokens":
            x, logits = x[1:], logits[1:]
        if failing and fault == "nan":
            logits = logits.clone()
            logits[2, 0] = float("nan")
        if failing and fault == "shared raises":
            shared, layer.flow.shared = layer.flow.shared, _broken
        if failing and fault == "prepare raises":
            prepare = partial(_broken_behind, layer.kernel.dispatcher.prepare)
            layer.kernel.dispatcher.prepare = prepare
        try:
            out = layer(x, logits)
            plus = torch.sin if layer.flow.shared else None
            want = expected(layer.problem, everything, x, routing, plus)
            outcomes.append(complain(out, want, layer.problem) or "ok")
        except (MoekitError, ZeroDivisionError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        if failing and fault == "shared raises":
            layer.flow.shared = shared
        if failing and fault == "prepare raises":
            del layer.kernel.dispatcher.prepare
    return outcomes


def _broken(x: Tensor) -> Tensor:
    raise ZeroDivisionError("planted")


def _broken_behind(prepare: Callable[..., object], *args: object) -> object:
    prepare(*args)
    raise ZeroDivisionError("planted")


def construct(rank: int, world_size: int, case: Case, different: dict[str, Any]) -> str:
    """Return the error of building a layer whose rank 1 has other arguments, or "ok"."""
    knobs = {**case.knobs, **(different if rank == 1 else {})}
    try:
        my_layer(replace(case, knobs=knobs), rank)
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def compiled(rank: int, world_size: int, case: Case) -> tuple[bool, int]:
    """Return if compiled code gives the same bits on every rank, and how often it compiled."""
    layer = my_layer(case, rank)
    if layer is None:
        return True, 1
    mine, _ = my_weights(layer)
    layer.load_weights(mine)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    fast = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    same = True
    with torch.inference_mode():
        for tokens in (5, 2, 9):
            tokens += rank * case.batches // case.ranks
            x, logits = random_x(layer.problem, tokens), logits_for(layer, tokens)
            same &= torch.equal(fast(x, logits), layer(x, logits))
    return same, graphs
