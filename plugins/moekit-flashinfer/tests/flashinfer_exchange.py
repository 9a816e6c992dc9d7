"""What the ranks of flashinfer_device.py do: dispatch and combine, right and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from moekit_flashinfer import moekit_dispatchers
from torch import Tensor

import moekit
from moekit import ParallelConfig, Routing
from moekit.contract import Dispatched, PrepareAndFinalize
from moekit.problem import quant
from moekit.testing.distributed import RankPool

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
NAMES = ("flashinfer_alltoall", "flashinfer_alltoall_two_sided", "flashinfer_allgather")
PAIRS, REPLAYS = 10, 10

Times = dict[str, float]


def table(pool: RankPool, wire: str, tokens: list[int]) -> Iterator[str]:
    yield (
        f"\n### {pool.world_size} ranks, hidden {HIDDEN}, top-{TOP_K} of {EXPERTS}, {wire} wire: "
        "microseconds of dispatch + combine in a CUDA graph, slowest rank\n"
    )
    yield "| T | " + " | ".join(_COLUMNS) + " | worst error |"
    yield "|---" * (len(_COLUMNS) + 2) + "|"
    for T in tokens:
        results = pool.run(measure, wire, T)
        worst = {name: max(times[name] for times in results) for name in results[0]}
        worst["ratio"] = worst["flashinfer_alltoall"] / worst["library"]
        cells = [f"{worst[name]:.{3 if name == 'ratio' else 1}f}" for name in _COLUMNS]
        error = worst["error"]
        yield f"| {T} | {' | '.join(cells)} | {error:.1e} |"


_COLUMNS = ("library", *NAMES, "alltoall, experts' output copied", "ratio")


def measure(rank: int, ranks: int, wire: str, T: int) -> Times:
    problem = moekit.MoEProblem(
        num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=256, quant=wire,
        max_num_tokens=T, device="cuda", parallel=ParallelConfig(ep_size=ranks, ep_rank=rank),
    )  # fmt: skip
    specs = {spec.name: spec for spec in moekit_dispatchers()}
    x = torch.randn(T, HIDDEN, dtype=problem.dtype, device="cuda")
    ids = torch.rand(T, EXPERTS, device="cuda").argsort(dim=1)[:, :TOP_K].int().contiguous()
    routing = Routing(torch.rand(T, TOP_K, device="cuda"), ids)
    prepared = None
    if problem.quant.activation is not None:
        prepared = quant.quantize(x, problem.quant.activation)
    times: Times = {"error": 0.0}
    for name in NAMES:
        d = specs[name].load()(specs[name], problem, dist.group.WORLD)
        try:
            times["error"] = max(times["error"], error(d, x, routing))
            y = torch.zeros(d.max_rows(T), HIDDEN, dtype=problem.dtype, device="cuda")

            def pair(d: PrepareAndFinalize = d, y: Tensor = y, in_place: bool = True) -> None:
                quantizer = None if prepared is None else lambda *_: prepared
                tokens = d.prepare(x, routing, quantizer).result()
                # As a kernel does that is given no `out`.
                out = None if d.makes_output else torch.empty_like(x)
                d.finalize(_place(d, tokens, y) if in_place else y, tokens, out).result()

            times[name] = timed(pair)
            if name == "flashinfer_alltoall":
                times["alltoall, experts' output copied"] = timed(lambda: pair(in_place=False))
                times["library"] = timed(bare(d, x if prepared is None else prepared, routing))
                times[name] = min(times[name], timed(pair))  # the same clocks as the library's
        finally:
            d.destroy()
        torch.cuda.empty_cache()
    return times


def bare(d: PrepareAndFinalize, x: Tensor | tuple[Tensor, Tensor], routing: Routing):
    """The library's own calls, with sanitized ids and the output where the experts wrote it."""
    lib, peers, p = d._slots.library, d._slots.peers, d.problem
    slot, capacity = d._slots._slots[0], d._slots.capacity
    payloads = [*(x if isinstance(x, tuple) else (x,)), routing.topk_weights, routing.topk_ids]
    where = (slot.memory.tensor, slot.metainfo, capacity, peers.rank, peers.size, p.top_k)

    def pair() -> None:
        received, offset = lib.moe_a2a_dispatch(
            routing.topk_ids, payloads, *where, p.num_physical_experts
        )
        lib.moe_a2a_sanitize_expert_ids(
            received[-1], slot.memory.tensor, slot.metainfo, peers.rank, -1
        )
        nbytes = peers.size * capacity * p.hidden_size * p.dtype.itemsize
        y = slot.memory.tensor[peers.rank, offset : offset + nbytes].view(p.dtype)
        lib.moe_a2a_combine(
            y.view(peers.size, capacity, -1), len(routing.topk_ids), *where, offset, True
        )

    return pair


def error(d: PrepareAndFinalize, x: Tensor, routing: Routing) -> float:
    """Relative error of experts that return their input; some slots and tokens have no expert."""
    ids = routing.topk_ids.clone()
    ids[torch.rand(ids.shape, device=ids.device) < 0.25] = -1
    ids[::7] = -1
    used = ids >= 0
    weights = routing.topk_weights.masked_fill(~used, float("nan"))
    worst = 0.0
    for in_place in (False, True):
        tokens = d.prepare(x, Routing(weights, ids), None).result()
        y = torch.empty_like(tokens.x)
        y = (_place(d, tokens, y) if in_place else y).copy_(_identity(tokens))
        out = d.finalize(y, tokens, torch.full_like(x, float("nan"))).result().float()
        want = x.float() * weights.masked_fill(~used, 0.0).sum(dim=1, keepdim=True)
        difference = float((out - want).norm() / want.norm())
        worst = max(worst, difference if difference == difference else float("inf"))
    assert worst < 1e-2, f"{d.spec.name}: relative error {worst}"
    return worst


def _place(d: PrepareAndFinalize, tokens: Dispatched, y: Tensor) -> Tensor:
    """Where the dispatcher wants the experts' output, or ``y``."""
    place = d.output(tokens) if hasattr(d, "output") else None
    return y if place is None else place


def _identity(tokens: Dispatched) -> Tensor:
    assert tokens.topk_ids is not None and tokens.topk_weights is not None
    total = torch.where(tokens.topk_ids >= 0, tokens.topk_weights, 0.0).sum(dim=1, keepdim=True)
    return torch.where(total > 0, tokens.x.float() * total, 0.0).to(tokens.x.dtype)


def timed(pair: Callable[[], None]) -> float:
    """Microseconds of a pair; a graph of several, replayed in step on all ranks."""
    for _ in range(2):
        pair()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PAIRS):
            pair()
    times = []
    for _ in range(REPLAYS + 2):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / PAIRS)
    dist.barrier()
    del graph
    return statistics.median(times[2:])
