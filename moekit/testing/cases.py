"""Random weights, tokens and routings that make mistakes visible.

Activations leave their linear range, clamps take effect, experts, channels, groups and tokens
differ in scale, and router weights do not sum to one. Padding is NaN. Data are drawn on the CPU,
so that every device and every rank sees the same numbers.
"""

from __future__ import annotations

import math
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moekit.backends.reference import Product, oracle
from moekit.contract import Adapters, Routing
from moekit.problem import MoEProblem, ParallelConfig
from moekit.problem.activation import apply_activation
from moekit.problem.quant import OperandQuant
from moekit.problem.quantize import compute_scale
from moekit.problem.weights import ExpertWeights
from moekit.runtime.rows import ALIGNMENT

SEED_VARIABLE = "MOEKIT_TEST_SEED"

# The kinds of `random_routing`. A token names an expert at most once: routers choose distinct
# experts, and `max_rows` of a batched dispatcher relies on it.
ROUTINGS = ("random", "idle", "one_expert", "hot", "masked", "rows", "none")
# Routers of some models give negative weights and zeros.
SIGNED = "signed"
# Ranks share experts, so a call's tokens may all go to one rank.
LAST = "last"

# What is unusual in a call -> its routing, and changes of the problem.
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "idle_experts": ("idle", {}),
    "one_expert": ("one_expert", {}),
    "ids_of_-1": ("masked", {}),
    "tokens_without_experts": ("rows", {}),
    "no_experts_at_all": ("none", {}),
    "router_weights_of_zero": (SIGNED, {}),
    "top_1": ("masked", {"top_k": 1}),
    "weight_on_input": ("rows", {"top_k": 1, "apply_router_weight_on_input": True}),
    "replicas": ("masked", {"num_redundant_experts": 2}),
}

# What a rank may hold of a layer whose tokens do not move.
SHARES = {
    "all": ParallelConfig(),
    "of experts": ParallelConfig(ep_size=2, ep_rank=1, dp_size=1),
    "of I": ParallelConfig(tp_size=2, tp_rank=1, dp_size=1),
    "of both": ParallelConfig(ep_size=2, ep_rank=1, tp_size=2, dp_size=1),
}

_X_LIMIT = 4.0
_WEIGHT_RANGE = (0.5, 3.0)  # no weight and no sum over K is one, except by chance
GATE_STD = 3.0


def seed() -> int:
    """Return the run's seed: MOEKIT_TEST_SEED, else a number drawn once in a process."""
    asked = os.environ.get(SEED_VARIABLE)
    return int(asked) if asked else _drawn_seed()


@cache
def _drawn_seed() -> int:
    return secrets.randbelow(2**31)


def use_seed(value: int) -> None:
    """Make ``value`` the seed of this process (for rank processes)."""
    os.environ[SEED_VARIABLE] = str(value)


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for the seed and ``key``; equal keys give equal numbers on a device."""
    return torch.Generator(device).manual_seed(zlib.crc32(repr((seed(), *key)).encode()))


def device_of(problem: MoEProblem) -> torch.device:
    """Return the current device of the problem's type."""
    if problem.device.type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(problem.device.type).current_device()
    return torch.device(problem.device.type, index)


def whole(problem: MoEProblem) -> MoEProblem:
    """Return the same layer on one rank."""
    return problem.replace(parallel=ParallelConfig())


def layouts(world: int) -> list[ParallelConfig]:
    """Return ways for ``world`` ranks to share experts and tokens, other than the usual one."""
    made = [ParallelConfig(ep_size=world, dp_size=1)]
    if world > 1:
        made += [ParallelConfig(ep_size=1, tp_size=world, dp_size=world)]
    if world % 2 == 0:
        made += [ParallelConfig(ep_size=world // 2, tp_size=2, dp_size=1)]
    if world > 2 and world % 2 == 0:
        half = world // 2
        made += [
            ParallelConfig(ep_size=half, tp_size=2, dp_size=world),
            ParallelConfig(ep_size=half, tp_size=2, dp_size=half),
            ParallelConfig(ep_size=world, dp_size=half),
        ]
    return made


def layout_name(p: ParallelConfig) -> str:
    return f"ep{p.ep_size}-tp{p.tp_size}-dp{p.dp_size}"


def random_weights(
    problem: MoEProblem, key: object = 0, *, drawn_on: torch.device | None = None
) -> ExpertWeights:
    """Return this rank's weights in the problem's scheme: L experts, its share of I.

    Ranks select from one set of experts and cut it, and replicas repeat.

    Args:
        drawn_on: the device that draws, where the CPU would take too long; the ranks' sets then
            differ.
    """
    if drawn_on is not None:
        alone = problem.replace(
            num_experts=problem.num_local_experts,
            top_k=min(problem.top_k, problem.num_local_experts),
            parallel=ParallelConfig(),
        )
        return quantized(unquantized_weights(alone, key, drawn_on), problem)
    full = unquantized_weights(whole(problem).replace(num_redundant_experts=0), key)
    local = full.select([problem.logical_expert(p) for p in problem.local_experts])
    return quantized(local, problem) if problem.parallel.tp_size == 1 else tp_shard(local, problem)


def unquantized_weights(
    problem: MoEProblem, key: object = 0, drawn_on: torch.device | None = None
) -> ExpertWeights:
    """Return L experts in the problem's dtype, unquantized, on the CPU or ``drawn_on``.

    Behind the rank's neurons there are zeros, where blocks are padded.
    """
    drawn_on = drawn_on or torch.device("cpu")
    draw = generator("weights", key, device=drawn_on)
    L, H, inner = (
        problem.num_local_experts,
        problem.hidden_size,
        problem.local_intermediate_size,
    )
    rows = problem.w13_rows

    def matrix(n: int, k: int, std: float) -> Tensor:
        w: Tensor = torch.randn(L, n, k, generator=draw, device=drawn_on).mul_(std / k**0.5)
        # Experts differ, and so do channels and groups.
        w *= 0.6 + 0.8 * torch.rand(L, 1, 1, generator=draw, device=drawn_on)
        w *= torch.exp(0.3 * torch.randn(L, n, 1, generator=draw, device=drawn_on))
        w *= torch.tensor([0.6, 1.4, 1.0], device=drawn_on)[
            torch.arange(k, device=drawn_on) // 128 % 3
        ]
        return w.to(problem.dtype)

    bias: dict[str, Any] = {}
    if problem.has_bias:
        for name, n, std in (("w13_bias", rows, 1.5), ("w2_bias", H, 3.0)):
            b = torch.randn(L, n, generator=draw, device=drawn_on)
            bias[name] = b.mul(std).to(problem.dtype)
    made = ExpertWeights(matrix(rows, H, GATE_STD), matrix(H, inner, 1.0), **bias)
    if (held := len(problem.local_neurons)) < inner:
        for t in (made.w13, made.w13_bias):
            if t is not None:
                torch.unflatten(t, 1, (-1, inner))[:, :, held:] = 0
        made.w2[:, :, held:] = 0
    return made


def quantized(weights: ExpertWeights, problem: MoEProblem) -> ExpertWeights:
    """Return unquantized ``weights`` in the problem's scheme, with static scales, on its device.

    In act-order the values change, because the columns of a group lie anywhere.
    """
    made = weights.quantize(problem.quant)
    operand, activation = problem.quant.weight, problem.quant.activation
    if operand is not None and operand.dtype in ("int4", "int8") and not operand.zero_points:
        least: dict[str, Any] = {n: _least_codes(getattr(made, n)) for n in ("w13", "w2")}
        made = replace(made, **least)
    if operand is not None and operand.zero_points:
        made = replace(
            made,
            w13_zero_points=_extreme_zeros(made.w13_zero_points),
            w2_zero_points=_extreme_zeros(made.w2_zero_points),
        )
    if operand is not None and operand.act_order:
        # The order depends on the expert's values alone, so that its replicas have the same.
        w13_g_idx, w2_g_idx = (
            w_LNK[:, 0].argsort(dim=1, stable=True).argsort(dim=1).int() // operand.group[1]
            for w_LNK in (weights.w13, weights.w2)
        )
        made = replace(made, w13_g_idx=w13_g_idx, w2_g_idx=w2_g_idx)
    if activation is not None and activation.static:
        a1, a2 = _static_scales(weights, problem, activation)
        made = replace(made, w13_input_scale=a1, w2_input_scale=a2)
    return made.to(device_of(problem))


def _least_codes(codes: Tensor) -> Tensor:
    """Return symmetric codes whose even rows have -128 for -127, or -8 for -7.

    Checkpoints have these codes, and `ExpertWeights.quantize` gives none. Codes of 4 bits are
    stored plus 8, two in a byte.
    """
    made = codes.clone()
    even = made[:, ::2]
    if codes.dtype == torch.int8:
        even[even == -127] = -128
    else:
        low, high = even & 15, even >> 4
        even.copy_(low.where(low != 1, 0) | high.where(high != 1, 0) << 4)
    return made


def _extreme_zeros(zeros: Tensor | None) -> Tensor:
    """Return zero points (L, N, groups) that are 0 or 15 in two rows of 16.

    Checkpoints have these where all of a group have one sign, which random groups never do.
    """
    assert zeros is not None
    made = zeros.clone()
    made[:, 3::16], made[:, 10::16] = 0, 15
    return made


def _static_scales(
    weights: ExpertWeights, problem: MoEProblem, activation: OperandQuant
) -> tuple[Tensor, Tensor]:
    """Return scales as calibration finds them: hardly any value of a case saturates."""
    largest = _X_LIMIT * (_WEIGHT_RANGE[1] if problem.apply_router_weight_on_input else 1.0)
    sample = random_x(problem, 32, "calibration").cpu().float() * (largest / _X_LIMIT)
    h = torch.einsum("th,lnh->ltn", sample, weights.w13.float())
    if weights.w13_bias is not None:
        h += weights.w13_bias.float()[:, None]
    inner = apply_activation(h, problem.activation)
    a1 = torch.full((), largest / activation.qmax)
    # Products of two normal values have long tails, and e4m3 has range to spare.
    a2 = compute_scale(inner.flatten(0, 1), activation).view(()) * 4
    return a1, a2


def random_x(problem: MoEProblem, num_tokens: int, key: object = 0) -> Tensor:
    """Return tokens (T, H) of different magnitudes, in the problem's dtype on its device."""
    draw = generator("x", key)
    x = torch.randn(num_tokens, problem.hidden_size, generator=draw)
    x *= 0.5 + torch.rand(num_tokens, 1, generator=draw)
    return x.clamp(-_X_LIMIT, _X_LIMIT).to(problem.dtype).to(device_of(problem))


def random_routing(
    problem: MoEProblem, num_tokens: int, kind: str = "random", key: object = 0
) -> Routing:
    """Return logical ids (T, K) int64 and weights (T, K) fp32, on the problem's device.

    The weights of ids -1 are NaN, so that a backend that uses them fails.

    Args:
        kind: random: K distinct experts. idle: the first and the last expert get no token (where
            K allows). one_expert: every token has one assignment, all to the same expert. hot: the
            same, but the other K - 1 assignments are random. masked: a quarter of the ids are -1;
            of four tokens or more, one lacks its first id alone, one its last alone, one all.
            rows: every fourth token, from the first, and the last have no expert. none: no token
            has one. signed: random, with weights of either sign and zeros. last: every token has
            the last K experts.
    """
    assert kind in (*ROUTINGS, SIGNED, LAST), f"no kind of routing: {kind!r}"
    draw = generator("routing", kind, key)
    E, K = problem.num_experts, problem.top_k
    scores = torch.rand(num_tokens, E, generator=draw)
    if kind == "idle":
        for expert in (E - 1, 0)[: max(0, E - K)]:
            scores[:, expert] = -1.0
    if kind in ("one_expert", "hot"):
        scores[:, E // 2] = 2.0
    if kind == LAST:
        scores[:, E - K :] += 1.0
    ids = scores.argsort(dim=1, descending=True)[:, :K]
    low, high = _WEIGHT_RANGE
    weights = low + (high - low) * torch.rand(num_tokens, K, generator=draw)
    if kind == "one_expert":
        ids[:, 1:] = -1
    # The order of a token's assignments must not matter, so it is random.
    shuffle = torch.rand(num_tokens, K, generator=draw).argsort(dim=1)
    ids = ids.gather(1, shuffle)
    if kind == "masked" and num_tokens:
        masked = torch.rand(num_tokens, K, generator=draw) < 0.25
        for token, column in ((num_tokens // 2, 0), (-1, K - 1)):
            masked[token] = False
            masked[token, column] = True
        masked[num_tokens // 3] = True
        ids[masked] = -1
    if kind == "rows" and num_tokens:
        ids[::4] = ids[-1] = -1
    if kind == "none":
        ids[:] = -1
    if kind == SIGNED:
        weights *= torch.randint(-1, 2, weights.shape, generator=draw)
    weights[ids < 0] = float("nan")
    device = device_of(problem)
    return Routing(weights.to(device), ids.to(device))


@dataclass(frozen=True)
class Case:
    """The input of one call, and the layer's weights and adapters on this rank."""

    problem: MoEProblem
    weights: ExpertWeights
    x: Tensor
    routing: Routing
    adapters: Adapters | None = None

    def reference(self, around: Callable[[Product], Product] = lambda made: made) -> Tensor:
        """Return the oracle's output (T, H) fp32. around: changes its products, as in `oracle`."""
        return oracle(self.x, self.weights, self.routing, self.problem, self.adapters, around)

    def physical(self) -> Case:
        """Return the same call with ids of replicas, where the problem has some. Each expert's
        assignments take turns: a hash may send few tokens to one of two replicas."""
        p, ids = self.problem, self.routing.topk_ids.clone()
        for expert in range(p.num_redundant_experts):
            token, column = (ids == expert).nonzero()[1::2].T
            ids[token, column] = p.num_experts + expert
        return replace(self, routing=replace(self.routing, topk_ids=ids))


def make_case(
    problem: MoEProblem,
    num_tokens: int,
    kind: str = "random",
    key: object = 0,
    weights: ExpertWeights | None = None,
) -> Case:
    """Return a random call. Tokens without any expert are NaN.

    The kinds masked and rows have a token of zeros, whose dynamic scale must not be 0, and two
    neighbours that differ in their routing alone, as where a prompt repeats a word.
    """
    routing = random_routing(problem, num_tokens, kind, key)
    x = random_x(problem, num_tokens, key)
    routed = (routing.topk_ids >= 0).any(dim=1)
    if kind in ("masked", "rows") and num_tokens > 3:
        if len(pairs := (routed[:-1] & routed[1:]).nonzero()):
            x[pairs[-1] + 1] = x[pairs[-1]]
        x[routed.nonzero()[:1, 0]] = 0
    x[~routed] = float("nan")
    return Case(problem, weights or random_weights(problem), x, routing)


def case_of_counts(problem: MoEProblem, counts: Sequence[int]) -> Case:
    """Return a call of top-1 experts, of which each gets its number of tokens, in any order."""
    made = make_case(problem, sum(counts))
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(len(ids), generator=generator("order")), None]
    routing = Routing(made.routing.topk_weights, ids.to(made.routing.topk_ids))
    return replace(made, routing=routing)


def scaled(case: Case, factor: float) -> Case:
    """Return the same call with x times ``factor``, a power of two.

    Where activations would leave the range of float16 or of a static scale, w13 is divided by the
    factor, so that only x differs.
    """
    p, w = case.problem, case.weights
    static = p.quant.static
    if p.dtype == torch.float16 or static or factor < 1:
        name = "w13" if p.quant.weight is None else "w13_scale"
        changes = {name: getattr(w, name) / factor}
        if static and w.w13_input_scale is not None:
            changes["w13_input_scale"] = w.w13_input_scale * factor
        w = replace(w, **changes)
    return replace(case, x=case.x * factor, weights=w)


def beyond_float16(case: Case, factor: float | None = None) -> Case:
    """Return the same call with experts' outputs beyond 65504 and small router weights.

    Outputs have an RMS of about 32768: some of them exceed 65504 in every case, and none reaches
    16 times that. Router weights bring them back into range.

    Args:
        factor: multiplies w2; default: the `output_factor` of this case. Ranks share one.
    """
    w, r = case.weights, case.routing
    name = "w2" if case.problem.quant.weight is None else "w2_scale"
    changes = {name: getattr(w, name) * (factor or output_factor(case))}
    return replace(
        case, weights=replace(w, **changes), routing=Routing(r.topk_weights / 512, r.topk_ids)
    )


def output_factor(case: Case) -> float:
    """Return the power of two that gives experts' outputs an RMS of about 32768."""
    typical = float(case.reference().square().mean().sqrt())
    return float(2.0 ** round(math.log2(32768 / typical * _WEIGHT_RANGE[1])))


def strided_inputs(case: Case) -> Case:
    """Return the same call with x, ids and router weights that are not contiguous."""

    def stretch(t: Tensor) -> Tensor:
        wide = t.new_zeros(t.shape[0], 2 * t.shape[1] + 1)
        wide[:, 1::2] = t
        return wide[:, 1::2]

    r = case.routing
    routing = Routing(stretch(r.topk_weights), stretch(r.topk_ids))
    return replace(case, x=stretch(case.x), routing=routing)


def moved(case: Case) -> Case:
    """Return the same call with all its tensors 16 bytes behind their storage's begin."""
    r = case.routing
    routing = Routing(_behind(r.topk_weights), _behind(r.topk_ids))
    return replace(case, weights=case.weights._map(_behind), x=_behind(case.x), routing=routing)


def strided_weights(weights: ExpertWeights) -> ExpertWeights:
    """Return the same weights in strided tensors, as slices of a larger checkpoint are.

    They begin 16 bytes behind their storage's begin: a kernel copies others before it packs them.
    """

    def stretch(t: Tensor) -> Tensor:
        return _behind(torch.stack((t, torch.zeros_like(t)), dim=-1))[..., 0]

    return weights._map(lambda t: stretch(t) if t.dim() else t)


def _behind(t: Tensor) -> Tensor:
    before = ALIGNMENT // t.itemsize
    return torch.cat((t.new_zeros(before), t.flatten()))[before:].view(t.shape)


def tp_shard(weights: ExpertWeights, problem: MoEProblem) -> ExpertWeights:
    """Return a tensor-parallel rank's share of a layer's unquantized weights, in its scheme.

    Gate and up are cut alike. Zeros pad the share to `MoEProblem.local_intermediate_size`. Every
    rank gets w2's bias, and only the first rank's may count.
    """
    mine, room = problem.local_neurons, problem.local_intermediate_size

    def share(t: Tensor, dim: int) -> Tensor:
        shape = (*t.shape[:dim], room - len(mine), *t.shape[dim + 1 :])
        return torch.cat([t.narrow(dim, mine.start, len(mine)), t.new_zeros(shape)], dim)

    def rows(t: Tensor) -> Tensor:
        halves = t.chunk(2, dim=1) if problem.activation.gated else (t,)
        return torch.cat([share(half, 1) for half in halves], dim=1)

    bias: dict[str, Any] = {}
    if weights.w13_bias is not None and weights.w2_bias is not None:
        bias = {"w13_bias": rows(weights.w13_bias), "w2_bias": weights.w2_bias}
    shard = ExpertWeights(rows(weights.w13), share(weights.w2, 2), **bias)
    return quantized(shard, problem)
