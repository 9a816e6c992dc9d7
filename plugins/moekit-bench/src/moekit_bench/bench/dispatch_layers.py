"""Times whole layers over ranks: prepare, experts, finalize, of a dispatcher and each of several
experts backends. What one rank does, and what the ranks' measurements come to.

Every rank has T tokens of its own. Its output is compared with the fp32 oracle of one rank that
holds all experts; each rank computes that oracle's sum over its own, and they are added.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import PackedWeights, Routing
from moekit.discovery.registry import Registry, registry
from moekit.discovery.specs import DispatcherSpec
from moekit.kernel import ModularKernel
from moekit.problem import MoEProblem, ParallelConfig
from moekit.problem.weights import ExpertWeights
from moekit.runtime.overlap import Beside
from moekit.runtime.workspace import Workspace
from moekit.selection import select
from moekit_bench.bench.cells import Case, relative_error, release, sampled_oracle, wrong_above
from moekit_bench.bench.dispatch import Clock, capture, current_device, first_fault
from moekit_bench.bench.limits import Work
from moekit_bench.bench.measure import first_line
from moekit_bench.bench.shapes import Inputs, inputs, random_weights

Json = dict[str, Any]

# Tokens of each rank that are compared with the oracle.
_CHECKED = 8
# Turns of one kind are cut short beyond so many seconds, but for two.
_SECONDS_A_KIND = 0.4


@dataclass(frozen=True)
class LayerCell:
    """A dispatcher, the experts to pair it with, the problem as rank 0 sees it, and how to measure.

    overlap: time calls in flight and shared experts too, see `_Overlap`.
    """

    spec: DispatcherSpec
    experts: tuple[str, ...]
    problem: MoEProblem
    tokens: int
    routing: str = "uniform"
    inputs: int = 2
    replays: int = 5
    graph: bool = True
    overlap: bool = False
    seed: int = 0


def measure_layers(rank: int, world_size: int, cell: LayerCell) -> list[Json]:
    """This rank's measurements, one for each of the experts. Collective."""
    parallel = replace(cell.problem.parallel, ep_rank=rank)
    problem = cell.problem.replace(parallel=parallel)
    kernels: list[ModularKernel] = []  # kept until the end: they share the dispatcher's buffers
    try:
        with torch.inference_mode():
            mine = _Rank(problem, cell)
            return [{"experts": e} | mine.pair(e, kernels) for e in cell.experts]
    finally:
        for kernel in kernels:
            kernel.destroy()
        if problem.device.type == "cuda":  # libraries take their buffers beside torch's cache
            torch.cuda.empty_cache()


def merge_layers(ranks: Sequence[Sequence[Json]]) -> list[Json]:
    """One result for each of the experts: medians of times, the worst error, the most bytes."""
    merged = []
    for each in zip(*ranks, strict=True):
        result = dict(each[0])
        if not result["reason"]:
            for name in result:
                values = [r[name] for r in each]
                if name.endswith("_us") and name != "spread_us":
                    result[name] = None if None in values else statistics.median(values)
                elif name.endswith("_bytes"):
                    result[name] = max(values)
            spreads = [r["spread_us"] for r in each]
            result["spread_us"] = [min(s[0] for s in spreads), max(s[1] for s in spreads)]
            errors = [r["error"] for r in each]
            result["error"] = None if None in errors else max(errors)
            result["right"] = all(r["right"] for r in each)
            result["us"] = result["eager_us" if result["graph_us"] is None else "graph_us"]
            if "overlap" in result:
                result["overlap"] = {
                    name: (max if name.startswith("error") else statistics.median)(
                        [r["overlap"][name] for r in each]
                    )
                    for name in result["overlap"]
                }
        merged.append(result)
    return merged


@dataclass
class _Held:
    """What a rank's cells have in common: weights, and what was made of them."""

    key: object = None
    weights: ExpertWeights | None = None
    packed: dict[str, tuple[PackedWeights, float]] = field(default_factory=dict)
    wants: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)


_held = _Held()


class _Rank(Clock):
    """One rank's inputs and weights for a cell."""

    def __init__(self, problem: MoEProblem, cell: LayerCell) -> None:
        super().__init__(current_device(problem))
        self.problem, self.cell = problem, cell
        whole = problem.replace(parallel=ParallelConfig())
        seed = cell.seed * 1009 + problem.parallel.ep_rank
        self.pairs: Inputs = inputs(
            cell.routing, cell.tokens, cell.inputs, whole, self.device, seed
        )
        self.weights = self._weights()
        self.rows, self.want = self._oracle()

    def _weights(self) -> ExpertWeights:
        global _held
        key = (repr(self.problem.replace(max_num_tokens=None)), self.cell.seed)
        if _held.key != key:
            _held = _Held()
            release(self.device)
            seed = self.cell.seed * 1013 + self.problem.parallel.ep_rank
            _held.key, _held.weights = key, random_weights(self.problem, self.device, seed)
        assert _held.weights is not None
        return _held.weights

    def _oracle(self) -> tuple[Tensor, Tensor]:
        """(rows of the first input, their output (n, H) by the oracle). Collective."""
        key = (self.cell.tokens, self.cell.routing)
        if key in _held.wants:
            return _held.wants[key]
        x, routing = self.pairs[0]
        rows = torch.linspace(0, len(x) - 1, min(_CHECKED, len(x)), device=self.device).long()
        mine = (x[rows].float(), routing.topk_weights[rows], routing.topk_ids[rows])
        everyones = [_gathered(t) for t in mine]
        want = torch.zeros_like(mine[0])
        for rank, (x, weights, ids) in enumerate(zip(*everyones, strict=True)):
            nothing = Work(0.0, 0.0, 0.0, 0.0)
            case = Case(
                self.problem,
                self.weights,
                len(x),
                "",
                [(x.to(self.problem.dtype), Routing(weights, ids))],
                nothing,
            )
            partial = sampled_oracle(case)[1]
            dist.all_reduce(partial)
            if rank == self.problem.parallel.ep_rank:
                want = partial
        _held.wants[key] = rows, want
        return rows, want

    # -- one pair -----------------------------------------------------------------------------

    def pair(self, experts: str, kernels: list[ModularKernel]) -> Json:
        """The measurements of one pair, whose kernel is added to ``kernels``."""
        try:
            return self._measure(experts, kernels)
        finally:
            for kernel in kernels:  # the next pair wants the memory
                kernel.workspace = Workspace()

    def _measure(self, experts: str, kernels: list[ModularKernel]) -> Json:
        reason = ""
        try:
            kernel = select.compose(
                self.problem,
                self.cell.spec.name,
                experts,
                workspace=Workspace(),
                checked=False,
                backends=_backends(self.cell.spec),
            )
            kernels.append(kernel)
            packed, copied = self._packed(experts, kernel)
            stated = kernel.memory(self.cell.tokens)
            reason = self._too_large(stated.total)
        except Exception as failure:
            reason = first_line(failure)
        if reason := first_fault(reason):
            return {"reason": reason, "us": None, "right": False}

        def call(index: int) -> Tensor:
            x, routing = self.pairs[index]
            return kernel(x, packed, routing)

        outs: list[Tensor] = []

        def all_calls() -> None:
            outs[:] = [call(index) for index in range(len(self.pairs))]

        with kernel.experts.tuning():
            all_calls()
        once = self.eager_us(all_calls)
        replays = self._replays(once)
        error = relative_error(outs[0], self.rows, self.want)
        eager = [self.eager_us(all_calls) / len(self.pairs) for _ in range(replays)]
        note, graph, replayed = self._graph_us(kernel, all_calls, outs, replays)
        if graph:
            error = max(error, replayed, key=lambda e: math.inf if e != e else e)
        counted = graph or eager
        result: Json = {
            "reason": "",
            "graph_us": statistics.median(graph) if graph else None,
            "eager_us": statistics.median(eager),
            "spread_us": [min(counted), max(counted)],
            "error": error if math.isfinite(error) else None,
            "right": error <= wrong_above(self.problem),
            "buffer_bytes": kernel.dispatcher.buffer_bytes(),
            "stated_bytes": stated.total,
            "copied": copied,
            "note": note,
        }
        if self.cell.overlap:
            result["overlap"] = _Overlap(self, kernel, packed).measure(replays)
        return result

    def _graph_us(
        self,
        kernel: ModularKernel,
        all_calls: Callable[[], None],
        outs: list[Tensor],
        replays: int,
    ) -> tuple[str, list[float], float]:
        """Why there is no graph, or µs of a call in one of all calls, and its error."""
        if self.device.type != "cuda":
            return "", [], 0.0
        if not self.cell.graph:
            return "graphs not asked for", [], 0.0
        for spec in (kernel.dispatcher.spec, kernel.experts.spec):
            if not spec.graph_safe:
                return f"{spec.name}: declared not graph-safe", [], 0.0
        graph, fault = capture(all_calls)
        if graph is None:
            return fault, [], 0.0
        outs[0].fill_(float("nan"))  # what a replay does not write stays NaN
        times = [self.replay_us(graph) / len(self.pairs) for _ in range(replays)]
        return "", times, relative_error(outs[0], self.rows, self.want)

    def _packed(self, experts: str, kernel: ModularKernel) -> tuple[PackedWeights, float]:
        """Packed once for all dispatchers; bytes that are no views of the canonical tensors, as a
        share of those."""
        if experts not in _held.packed:
            packed = kernel.pack(self.weights)
            given = list(self.weights.tensors().values())
            known = {t.untyped_storage().data_ptr() for t in given}
            parts = (*packed.experts.values(), *packed.shared.values())
            own = sum(t.nbytes for t in parts if t.untyped_storage().data_ptr() not in known)
            _held.packed[experts] = packed, round(own / sum(t.nbytes for t in given), 4)
        return _held.packed[experts]

    def _too_large(self, nbytes: int) -> str:
        if self.device.type != "cuda":
            return ""
        free, _ = torch.cuda.mem_get_info(self.device)
        if nbytes > free:
            release(self.device)
            free, _ = torch.cuda.mem_get_info(self.device)
        if nbytes <= free:
            return ""
        return f"needs {nbytes / 1e9:.0f} GB, {free / 1e9:.0f} are free"

    def _replays(self, us: float) -> int:
        """Turns that fit the time, by the slowest rank. Collective."""
        everyone = [us] * dist.get_world_size()
        dist.all_gather_object(everyone, us)
        return max(2, min(self.cell.replays, int(_SECONDS_A_KIND * 1e6 / max(*everyone, 1.0))))


class _Overlap:
    """What running things beside each other saves, in µs; eager, on inputs of T tokens.

    one_after_the_other, in_flight, run_ahead: two micro-batches of T tokens; the second is started
    before the first one's experts run; and its experts run before the first one's result is waited
    for. after, meanwhile, beside: a call and shared experts (an MLP of the experts' own size) after
    it; within it on its stream (``shared=``); on a stream of their own.
    error_*: of those that overlap, against the same work one after the other.
    """

    def __init__(self, rank: _Rank, kernel: ModularKernel, packed: PackedWeights) -> None:
        self.rank, self.kernel, self.packed = rank, kernel, packed
        p = rank.problem
        generator = torch.Generator(rank.device).manual_seed(7)

        def normal(rows: int, columns: int) -> Tensor:
            made = torch.randn(rows, columns, device=rank.device, generator=generator)
            return made.mul_(columns**-0.5).to(p.dtype)

        self.up = normal(p.local_intermediate_size, p.hidden_size)
        self.down = normal(p.hidden_size, p.local_intermediate_size)
        self.batches = [rank.pairs[0], rank.pairs[-1]]

    def shared(self, x: Tensor) -> Tensor:
        out: Tensor = torch.nn.functional.silu(x @ self.up.T) @ self.down.T
        return out

    def one_after_the_other(self) -> list[Tensor]:
        return [self.kernel(x, self.packed, routing) for x, routing in self.batches]

    def in_flight(self) -> list[Tensor]:
        started = [self.kernel.start(x, self.packed, routing) for x, routing in self.batches]
        return [call.result() for call in started]

    def run_ahead(self) -> list[Tensor]:
        started = [self.kernel.start(x, self.packed, routing) for x, routing in self.batches]
        for call in started:
            call.run()
        return [call.result() for call in started]

    def after(self) -> list[Tensor]:
        x, routing = self.batches[0]
        return [self.kernel(x, self.packed, routing).add_(self.shared(x))]

    def meanwhile(self) -> list[Tensor]:
        x, routing = self.batches[0]
        return [self.kernel(x, self.packed, routing, shared=self.shared)]

    def beside(self) -> list[Tensor]:
        x, routing = self.batches[0]
        shared = Beside(self.shared, x)
        out = self.kernel.start(x, self.packed, routing, meanwhile=shared.run).result()
        return [out.add_(shared.join())]

    def measure(self, replays: int) -> Json:
        micro_batches = [self.one_after_the_other, self.in_flight, self.run_ahead]
        ways = [*micro_batches, self.after, self.meanwhile, self.beside]
        outs = {}
        for way in ways:
            way()
            outs[way.__name__] = way()
        times: dict[str, list[float]] = {way.__name__: [] for way in ways}
        for turn in range(2 * replays):  # in turns, beginning with another one each time
            start = turn % len(ways)
            for way in (*ways[start:], *ways[:start]):
                times[way.__name__].append(self._us(way))
        result: Json = {f"{name}_us": statistics.median(us) for name, us in times.items()}
        for name, other in (
            ("in_flight", "one_after_the_other"),
            ("run_ahead", "one_after_the_other"),
            ("meanwhile", "after"),
            ("beside", "after"),
        ):
            both = zip(outs[name], outs[other], strict=True)
            off = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both]
            result[f"error_{name}"] = max(off)
        return result

    def _us(self, way: Callable[[], object]) -> float:
        """µs on the device, whose queue is full when it starts."""
        clock = self.rank
        clock.meet()
        clock.sleep(3000.0)
        start = clock.mark()
        way()
        end = clock.mark()
        clock.meet()
        return clock.between(start, end)


def _backends(spec: DispatcherSpec) -> Registry:
    """This process's, with ``spec`` if another one registered it."""
    known = registry()
    if spec.name in known.dispatchers:
        return known
    copy = Registry(known.plugins, list(known._added))
    copy.register(spec)
    return copy


def _gathered(mine: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine.contiguous())
    return everyone
