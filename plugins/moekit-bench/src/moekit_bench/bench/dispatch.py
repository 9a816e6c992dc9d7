"""Times a dispatcher alone: what one rank does, and what the ranks' measurements come to.

Every rank has T tokens of its own. *Dispatch* is ``prepare(...).result()`` on tokens quantized
before, *combine* is ``finalize(...).result()`` on output that is there already; a *pair* is one
after the other. docs/bench.md says how times are taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moekit.contract import Dispatched, PrepareAndFinalize, Quantizer, Routing
from moekit.discovery.specs import DispatcherSpec
from moekit.problem import MoEProblem, ParallelConfig, partition, quant
from moekit_bench.bench.cells import relative_error
from moekit_bench.bench.limits import synchronize
from moekit_bench.bench.measure import first_line
from moekit_bench.bench.shapes import inputs

Json = dict[str, Any]

# Each rank adds one rounding of its part, and the sum is rounded; quantization is not counted.
_BOUND = 2e-2
# For sleeping: at least what any GPU's clock does in a microsecond.
_CYCLES_PER_US = 2000


@dataclass(frozen=True)
class DispatchCell:
    """A dispatcher, the problem as rank 0 sees it (all ranks' experts), and how to measure."""

    spec: DispatcherSpec
    problem: MoEProblem
    tokens: int
    routing: str = "uniform"
    inputs: int = 3
    replays: int = 10
    graph: bool = True
    seed: int = 0


def measure_rank(rank: int, world_size: int, cell: DispatchCell) -> Json:
    """This rank's measurements: the keys of docs/bench.md, and what `merge` needs. Collective."""
    parallel = replace(cell.problem.parallel, ep_rank=rank)
    dispatcher = cell.spec.load()(cell.spec, cell.problem.replace(parallel=parallel))
    try:
        with torch.inference_mode():
            return _Rank(dispatcher, cell, rank).measure()
    finally:
        dispatcher.destroy()


def merge(ranks: Sequence[Json]) -> Json:
    """One result from all ranks': medians of times, means of counts, the worst error."""
    first, result = ranks[0], dict(ranks[0])
    for name in first:
        values = [r[name] for r in ranks]
        if name.endswith("_us") and name != "spread_us":
            result[name] = None if None in values else statistics.median(values)
        elif name in ("link_rows", "rows"):
            result[name] = statistics.fmean(values)
    result["spread_us"] = [f(r["spread_us"][i] for r in ranks) for i, f in enumerate((min, max))]
    errors = [r["error"] for r in ranks]
    result["error"] = None if None in errors else max(errors)
    result["right"] = all(r["right"] for r in ranks)
    result["buffer_bytes"] = max(r["buffer_bytes"] for r in ranks)
    result["us"] = result["eager_us"] if result["graph_us"] is None else result["graph_us"]
    for phase in ("dispatch", "combine"):
        per_row, us = result.pop(f"{phase}_row_bytes"), result[f"{phase}_us"]
        for count, name in (("link_rows", "link"), ("rows", "deepep")):
            result[f"{phase}_{name}_gbs"] = result[count] * per_row / us / 1e3
    return result


class Clock:
    """Times what ranks do together on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def meet(self) -> None:
        """All ranks are here, and their devices have nothing left to do."""
        synchronize(self.device)
        dist.barrier()
        synchronize(self.device)

    def sleep(self, us: float) -> None:
        """Keeps a GPU busy, while what it shall do next is enqueued."""
        if self.device.type == "cuda":
            sleep: Any = torch.cuda._sleep
            sleep(int(us * _CYCLES_PER_US))

    def mark(self) -> Any:
        if self.device.type != "cuda":
            synchronize(self.device)
            return time.perf_counter()
        event: Any = torch.cuda.Event
        mark = event(enable_timing=True)
        mark.record()
        return mark

    def between(self, start: Any, end: Any) -> float:
        """µs between two marks."""
        if self.device.type != "cuda":
            return float(end - start) * 1e6
        return float(start.elapsed_time(end)) * 1e3

    def replay_us(self, graph: Any) -> float:
        self.meet()
        self.sleep(200.0)
        start = self.mark()
        graph.replay()
        end = self.mark()
        synchronize(self.device)
        return self.between(start, end)

    def eager_us(self, call: Callable[[], object]) -> float:
        """From a drained queue to a drained queue."""
        self.meet()
        start = time.perf_counter()
        call()
        synchronize(self.device)
        return (time.perf_counter() - start) * 1e6


def current_device(problem: MoEProblem) -> torch.device:
    """This process's device of the problem's kind."""
    kind = problem.device.type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def capture(call: Callable[[], object]) -> tuple[Any, str]:
    """A CUDA graph of ``call``, or None and why; the same on all ranks. Collective."""
    graph, fault = torch.cuda.CUDAGraph(), ""
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        fault = f"capture failed: {first_line(error)}"
    fault = first_fault(fault)
    return (None if fault else graph), fault


def first_fault(fault: str) -> str:
    """Of all ranks' faults the first, or an empty string. Collective."""
    faults = [fault] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    return next(filter(None, faults), "")


class _Rank(Clock):
    """One rank's dispatcher and inputs."""

    def __init__(self, dispatcher: PrepareAndFinalize, cell: DispatchCell, rank: int) -> None:
        self.dispatcher, self.cell, self.problem = dispatcher, cell, dispatcher.problem
        super().__init__(current_device(self.problem))
        seed = cell.seed * 1009 + rank
        whole = self.problem.replace(parallel=ParallelConfig())
        made = inputs(cell.routing, cell.tokens, cell.inputs, whole, self.device, seed)
        dtype = torch.int32 if cell.spec.ids_dtype == "int32" else torch.int64
        self.pairs = [(x, Routing(r.topk_weights, r.topk_ids.to(dtype))) for x, r in made]
        self.sent = [self._quantized(x) for x, _ in made]
        self.outs = [torch.empty_like(x) for x, _ in made]
        self.blank: dict[torch.Size, Tensor] = {}

    def measure(self) -> Json:
        error = max(self._error(index) for index in range(len(self.pairs)))
        for _ in range(2):
            self._all_pairs()
        host = self._host_us()
        dispatch, combine = self._phases(host or 0.0)
        note, graph = self._graph_us()
        eager = [self.eager_us(self._all_pairs) / len(self.pairs) for _ in range(self.cell.replays)]
        counted = graph or eager
        link_rows, rows = self._rows()
        q, scale = self.sent[0]
        scales = 0 if scale is None else scale.shape[1] * scale.itemsize
        out = self.outs[0]
        return {
            "dispatch_us": statistics.median(dispatch),
            "combine_us": statistics.median(combine),
            "graph_us": statistics.median(graph) if graph else None,
            "eager_us": statistics.median(eager),
            "host_us": host,
            "spread_us": [min(counted), max(counted)],
            "error": error if math.isfinite(error) else None,
            "right": error <= _BOUND,
            "link_rows": link_rows,
            "rows": rows,
            "dispatch_row_bytes": q.shape[1] * q.itemsize + scales,
            "combine_row_bytes": out.shape[1] * out.itemsize,
            "num_sms": getattr(self.dispatcher, "num_sms", None),
            "buffer_bytes": self.dispatcher.buffer_bytes(),
            "note": note,
        }

    # -- the two phases -----------------------------------------------------------------------

    def _dispatch(self, index: int) -> Dispatched:
        x, routing = self.pairs[index]
        return self.dispatcher.prepare(x, routing, self._quantizer(index)).result()

    def _combine(self, index: int, tokens: Dispatched, y: Tensor | None = None) -> Tensor:
        y = self._output(tokens) if y is None else y
        return self.dispatcher.finalize(y, tokens, self.outs[index]).result()

    def _all_pairs(self) -> None:
        for index in range(len(self.pairs)):
            self._combine(index, self._dispatch(index))

    def _output(self, tokens: Dispatched) -> Tensor:
        """Where experts would have written: the dispatcher's own place, if it has one."""
        wanted = getattr(self.dispatcher, "output", None)
        place: Tensor | None = None if wanted is None else wanted(tokens)
        if place is not None:
            return place
        shape = tokens.x.shape
        if shape not in self.blank:
            self.blank[shape] = torch.zeros(shape, dtype=self.problem.dtype, device=self.device)
        return self.blank[shape]

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        activation = self.problem.quant.activation
        if activation is None or self.problem.quant.name not in self.cell.spec.wire_schemes:
            return x, None
        static = None
        if activation.static:
            static = torch.full((1, 1), 6.0 / activation.qmax, device=x.device)
        return quant.quantize(x, activation, static)

    def _quantizer(self, index: int) -> Quantizer | None:
        q, scale = self.sent[index]
        return None if scale is None else lambda *_: (q, scale)

    # -- right? -------------------------------------------------------------------------------

    def _error(self, index: int) -> float:
        """Relative error of a call whose experts return their input."""
        tokens = self._dispatch(index)
        x = self._dequantized(tokens.x, tokens.x_scale)
        if tokens.expert_num_tokens is not None:
            real = torch.arange(x.shape[1], device=x.device) < tokens.expert_num_tokens[:, None]
            y = torch.where(real[..., None], x, float("nan"))
        else:
            assert tokens.topk_ids is not None and tokens.topk_weights is not None
            used = tokens.topk_ids >= 0
            weights = torch.where(used, tokens.topk_weights, 0.0).sum(dim=1, keepdim=True)
            y = torch.where(used.any(dim=1, keepdim=True), x * weights, 0.0)
        self.outs[index].fill_(float("nan"))
        out = self._combine(index, tokens, y.to(self.problem.dtype))
        _, routing = self.pairs[index]
        want = self._dequantized(*self.sent[index]) * routing.topk_weights.sum(1, keepdim=True)
        error = relative_error(out, torch.arange(out.shape[0], device=out.device), want)
        return error if error == error else float("inf")

    def _dequantized(self, x: Tensor, scale: Tensor | None) -> Tensor:
        activation = self.problem.quant.activation
        if scale is None or activation is None:
            return x.float()
        return quant.dequantize(x, scale, activation)

    # -- how much, how long -------------------------------------------------------------------

    def _rows(self) -> tuple[float, float]:
        """(token, rank) rows that this rank sends to others, and to all: means over the inputs."""
        p, ranks = self.problem, self.problem.parallel.ep_size
        remote, every = [], []
        for _, routing in self.pairs:
            hit = [
                ((routing.topk_ids >= held.start) & (routing.topk_ids < held.stop)).any(dim=1)
                for held in (partition(p.num_physical_experts, ranks, r) for r in range(ranks))
            ]
            counts = [int(h.sum()) for h in hit]
            every.append(sum(counts))
            remote.append(sum(counts) - counts[p.parallel.ep_rank])
        return statistics.fmean(remote), statistics.fmean(every)

    def _phases(self, host_us: float) -> tuple[list[float], list[float]]:
        """µs of each dispatch and combine; a GPU starts when all of a turn has been enqueued."""
        dispatch, combine = [], []
        for _ in range(self.cell.replays):
            self.meet()
            self.sleep(1.5 * host_us * len(self.pairs) + 200.0)
            marks = []
            for index in range(len(self.pairs)):
                start = self.mark()
                tokens = self._dispatch(index)
                middle = self.mark()
                self._combine(index, tokens)
                marks.append((start, middle, self.mark()))
            synchronize(self.device)
            dispatch += [self.between(start, middle) for start, middle, _ in marks]
            combine += [self.between(middle, end) for _, middle, end in marks]
        return dispatch, combine

    def _graph_us(self) -> tuple[str, list[float]]:
        """Why there are none, or µs of a pair within a graph of all pairs."""
        if self.device.type != "cuda":
            return "", []
        if not self.cell.graph:
            return "graphs not asked for", []
        if not self.cell.spec.graph_safe:
            return "declared not graph-safe", []
        graph, fault = capture(self._all_pairs)
        if graph is None:
            return fault, []
        count = len(self.pairs)
        return "", [self.replay_us(graph) / count for _ in range(self.cell.replays)]

    def _host_us(self) -> float | None:
        """Until a pair's calls return; None on the CPU, where that is all of it."""
        if self.device.type == "cpu":
            return None
        times = []
        for index in range(len(self.pairs) * 3):
            self.meet()
            start = time.perf_counter()
            self._combine(index % len(self.pairs), self._dispatch(index % len(self.pairs)))
            times.append((time.perf_counter() - start) * 1e6)
        synchronize(self.device)
        return statistics.median(times)
