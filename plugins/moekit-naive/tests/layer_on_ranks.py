"""Run a layer spread over the ranks, and compare it with the whole layer, on each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import moekit
from moekit import (
    ActivationFormat,
    BufferSpec,
    ExpertsSpec,
    ExpertWeights,
    MoEProblem,
    PackedWeights,
    ParallelConfig,
    PermuteExpertsUnpermute,
    Routing,
)
from moekit.backends.reference import dequantized_input, expert_mlp, oracle
from moekit.errors import MoekitError
from moekit.testing.calls import QUANTIZED_WIRE, kit_registry

# Against the fp32 oracle, which sees unquantized activations.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2, "quantized": 8e-2}


@dataclass(frozen=True)
class Case:
    """tokens: of each rank, per call. tp: every expert sliced over so many ranks. dp: batches.

    ids: "random", "holes" (some -1, some tokens without any, holding NaN), "one" (all to one
    expert), "all" (K = E).
    """

    tokens: tuple[tuple[int, ...], ...]
    num_experts: int = 8
    top_k: int = 3
    hidden_size: int = 64
    intermediate_size: int = 32
    dtype: str = "float32"
    quant: str = "none"
    tp: int = 1
    dp: int = 0
    ids: str = "random"
    on_input: bool = False
    replicas: int = 0
    experts: str = "torch"
    in_flight: int = 1


def whole_problem(case: Case, device: str) -> MoEProblem:
    return MoEProblem(
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        dtype=getattr(torch, case.dtype),
        quant=case.quant,
        apply_router_weight_on_input=case.on_input,
        num_redundant_experts=case.replicas,
        device=device,
    )


def my_problem(case: Case, rank: int, world_size: int, device: str = "cpu") -> MoEProblem:
    parallel = ParallelConfig(
        ep_size=world_size // case.tp,
        ep_rank=rank // case.tp,
        tp_size=case.tp,
        tp_rank=rank % case.tp,
        dp_size=case.dp or world_size,
    )
    return whole_problem(case, device).replace(parallel=parallel)


def whole_weights(problem: MoEProblem) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    p, rows = problem, problem.num_physical_experts
    w13 = torch.randn(rows, p.w13_rows, p.hidden_size, generator=generator) / p.hidden_size**0.5
    w2 = torch.randn(rows, p.hidden_size, p.intermediate_size, generator=generator)
    w2 = w2 / p.intermediate_size**0.5
    weights = ExpertWeights(w13.to(p.dtype), w2.to(p.dtype)).quantize(p.quant)
    if p.quant.activation is not None and p.quant.activation.static:
        weights = replace(
            weights, w13_input_scale=torch.tensor(0.02), w2_input_scale=torch.tensor(0.05)
        )
    return weights.to("cuda" if p.device.type == "cuda" else "cpu")


def my_weights(whole: ExpertWeights, problem: MoEProblem) -> ExpertWeights:
    """This rank's experts, and its slice of each (unquantized weights only)."""
    mine = whole.select(list(problem.local_experts))
    if problem.parallel.tp_size == 1:
        return mine
    inner, at = problem.local_intermediate_size, problem.parallel.tp_rank
    inside = slice(at * inner, (at + 1) * inner)
    gate, up = mine.w13.chunk(2, dim=1)
    return ExpertWeights(torch.cat([gate[:, inside], up[:, inside]], 1), mine.w2[:, :, inside])


def tokens(case: Case, count: int, seed: int, device: str) -> tuple[torch.Tensor, Routing]:
    """x (T, H), not contiguous, and a routing whose weights do not sum to one."""
    generator = torch.Generator().manual_seed(seed)
    experts = case.num_experts + case.replicas
    x = torch.randn(case.hidden_size, count, generator=generator).to(getattr(torch, case.dtype)).T
    ids = torch.rand(count, experts, generator=generator).argsort(1)[:, : case.top_k]
    topk_weights = torch.rand(count, case.top_k, generator=generator) * 1.5 + 0.2
    if case.ids == "one":
        ids[:, 0] = experts - 1
        ids[:, 1:] = -1
    if case.ids == "holes":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
        ids[::4] = -1
        x[::4] = float("nan")
        topk_weights[ids < 0] = float("nan")
    return x.to(device), Routing(topk_weights.to(device), ids.int().to(device))


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    if not want.numel():
        return 0.0
    error = (got.float() - want.float()).square().mean().sqrt()
    return float(error / want.float().square().mean().sqrt().clamp(min=1e-20))


def on_one_rank(problem, experts):
    """The layer without ranks, tokens quantized before they would travel, as naive does."""
    return moekit.compose(problem, QUANTIZED_WIRE, experts, backends=kit_registry())


def run_case(rank: int, world_size: int, case: Case, device: str = "cpu") -> str:
    """Runs ``case``; returns what is wrong, or nothing."""
    problem, whole = my_problem(case, rank, world_size, device), whole_problem(case, device)
    weights = whole_weights(whole)
    kernel = moekit.compose(problem, "naive", case.experts)
    packed = kernel.pack(my_weights(weights, problem))
    alone = on_one_rank(whole, case.experts)
    packed_alone = alone.pack(weights)
    batch = rank * problem.parallel.dp_size // world_size
    kind = case.dtype if whole.quant.activation is None else "quantized"
    wrong = []
    flying = []
    for call, counts in enumerate(case.tokens):
        x, routing = tokens(case, counts[batch], 1000 * call + batch, device)
        before = [t.clone() for t in (x, routing.topk_weights, routing.topk_ids)]
        flying.append((call, x, routing, before, kernel.start(x, packed, routing)))
        if len(flying) < case.in_flight and call + 1 < len(case.tokens):
            continue
        for number, x, routing, before, pending in flying:
            out = pending.result()
            for was, now in zip(before, (x, routing.topk_weights, routing.topk_ids), strict=True):
                if not torch.equal(was.nan_to_num(), now.nan_to_num()):
                    wrong.append(f"call {number}: an input changed")
            error = relative_rms(out, oracle(x, weights, routing, whole))
            if not error < TOLERANCE[kind]:
                wrong.append(f"call {number}: {error:.2g} from the oracle")
            close = max(TOLERANCE[case.dtype], 1e-2 if kind == "quantized" else 0)
            error = relative_rms(out, alone(x, packed_alone, routing))
            if not error < close:
                wrong.append(f"call {number}: {error:.2g} from the same layer on one rank")
        flying = []
    return "; ".join(wrong)


class BatchedMLP(PermuteExpertsUnpermute):
    """BATCHED experts in fp32, to meet the dispatcher through a bridge. Padding becomes NaN."""

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, weights.tensors())

    def workspace(self, rows: int) -> list[BufferSpec]:
        return []

    def apply(self, y, tokens, weights, workspace) -> None:
        fp32 = ExpertWeights(**weights.experts).dequantize(self.problem.quant)
        x_LCH = dequantized_input(tokens, self.problem)
        y.fill_(float("nan"))
        for expert, count in enumerate(tokens.expert_num_tokens.tolist()):
            y[expert, :count] = expert_mlp(x_LCH[expert, :count], fp32, expert, self.problem)


def run_batched_case(rank: int, world_size: int, case: Case) -> str:
    """`run_case` with batched experts of this process's own."""
    spec = ExpertsSpec(
        name="batched_mlp",
        target=f"{__name__}:BatchedMLP",
        format=ActivationFormat.BATCHED,
        schemes=frozenset(moekit.SCHEMES),
        reduces=False,
    )
    moekit.registry().register(spec)
    try:
        return run_case(rank, world_size, replace(case, experts=spec.name))
    finally:
        moekit.registry().unregister(spec)


def outcome(call) -> str:
    """ "ok", or the kind and text of the moekit error that ``call`` raises."""
    try:
        call()
    except MoekitError as error:
        return f"{type(error).__name__}: {error}"
    return "ok"
