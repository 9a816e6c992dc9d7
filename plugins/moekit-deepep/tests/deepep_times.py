"""What deepep_device.py times: dispatch and combine, by the adapter and by the bare library."""

from __future__ import annotations

import argparse
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moekit import DispatcherSpec, MoEProblem, Routing
from moekit.problem import quant

ROUNDS, CALLS = 7, 20
Call = Callable[[], object]


class Rank(ABC):
    """One process's place in the run, and what all parts need."""

    rank: int
    ranks: int
    args: argparse.Namespace
    gpu: bool
    device: torch.device
    specs: Mapping[str, DispatcherSpec]

    @abstractmethod
    def say(self, text: str = "") -> None:
        """Prints, once for all ranks."""

    @abstractmethod
    def worst(self, value: float) -> float:
        """The largest of all ranks' values."""

    @abstractmethod
    def synchronize(self) -> None:
        """Devices and ranks."""

    @abstractmethod
    def dispatcher(self, name: str, most: int | None, **changes: Any) -> Any: ...

    @abstractmethod
    def tokens(
        self, count: int, seed: int, top_k: int = 0, holes: bool = False
    ) -> tuple[torch.Tensor, Routing]: ...


def quantizer(problem: MoEProblem) -> Callable[..., Any] | None:
    """As experts quantize tokens before they travel; None where they do not."""
    activation = problem.quant.activation
    if activation is None:
        return None

    def quantize(x: torch.Tensor, valid: torch.Tensor | None) -> Any:
        static = torch.full((1, 1), 0.02, device=x.device) if activation.static else None
        return quant.quantize(x, activation, static, valid)

    return quantize


# -- clocks ---------------------------------------------------------------------------------------


def captured(r: Rank, call: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    r.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    r.synchronize()
    return graph


def once(r: Rank, call: Call) -> float:
    """Microseconds per call, the slowest rank's."""
    r.synchronize()
    if not r.gpu:
        begin = time.perf_counter()
        call()
        return r.worst((time.perf_counter() - begin) * 1e6)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return r.worst(start.elapsed_time(end) / CALLS * 1e3)


def times(r: Rank, calls: dict[str, Call]) -> dict[str, float]:
    """Medians over rounds in which the calls take turns."""
    for call in calls.values():
        for _ in range(3):
            call()
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS if r.gpu else 1):
        for name, call in calls.items():
            seen[name].append(once(r, call))
    return {name: statistics.median(values) for name, values in seen.items()}


def host_us(r: Rank, call: Call) -> float:
    """Microseconds until a call that starts on an idle device returns."""
    spent = []
    for _ in range(20 if r.gpu else 2):
        r.synchronize()
        begin = time.perf_counter()
        call()
        spent.append((time.perf_counter() - begin) * 1e6)
    return r.worst(statistics.median(spent))


# -- tables ---------------------------------------------------------------------------------------

HEAD = ["T", "bare", "adapter", "ratio", "host bare", "host adapter"]
HEAD += ["graph bare", "graph adapter", "ratio", "graph bare, hooks"]


def table(r: Rank, title: str) -> None:
    r.say(f"\n{title}\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")


def compare(r: Rank, what: str, pairs: dict[str, Call], graphs: bool) -> None:
    """A row: `bare` and `adapter` (and `hooks`), eagerly and as CUDA graphs."""
    found = times(r, pairs)
    hosts = [host_us(r, pairs[name]) for name in ("bare", "adapter")]
    cells = [found["bare"], found["adapter"], found["adapter"] / found["bare"], *hosts]
    if graphs and r.gpu:
        made = {name: captured(r, call) for name, call in pairs.items()}
        found = times(r, {name: graph.replay for name, graph in made.items()})
        cells += [found["bare"], found["adapter"], found["adapter"] / found["bare"]]
        cells += [found["hooks"]] if "hooks" in found else []
        del made
        r.synchronize()
    texts = [f"{c:.3f}" if i in (2, 7) else f"{c:.1f}" for i, c in enumerate(cells)]
    r.say(f"| {' | '.join([what, *texts, *['–'] * (len(HEAD) - 1 - len(cells))])} |")


# -- pairs ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """One shape's tensors. sent: x as the library is given it. y: what experts would return."""

    dispatcher: Any
    x: torch.Tensor
    routing: Routing
    y: torch.Tensor
    sent: Any = None
    quantize: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.buffer, self.out = self.dispatcher._lease.buffer, torch.empty_like(self.x)
        problem = self.dispatcher.problem
        self.experts, self.sent = problem.num_experts, self.x
        if (made := quantizer(problem)) is not None:
            # Done beforehand for both sides, so that it is not timed.
            self.sent = done = made(self.x, None)
            self.quantize = lambda x, valid: done

    def adapter(self) -> None:
        """As a kernel calls it that is given no `out`: the library's result is the result."""
        tokens = self.dispatcher.prepare(self.x, self.routing, self.quantize).result()
        y = self.y if self.y.dim() == 3 else self.y[: tokens.x.shape[0]]
        self.dispatcher.finalize(y, tokens, None).result()


def bare_ht(c: Case, configs: Any, rows: int, worst: int) -> None:
    per_rank, _, per_expert, in_rank, _ = c.buffer.get_dispatch_layout(
        c.routing.topk_ids, c.experts, async_finish=True
    )
    _, _, _, _, handle, event = c.buffer.dispatch(
        c.sent,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=c.routing.topk_ids,
        topk_weights=c.routing.topk_weights,
        num_worst_tokens=worst,
        config=configs[0],
        async_finish=True,
    )
    event.current_stream_wait()
    _, _, event = c.buffer.combine(c.y[:rows], handle, config=configs[1], async_finish=True)
    event.current_stream_wait()


def bare_ll(c: Case, capacity: int) -> None:
    _, _, handle, event, _ = c.buffer.low_latency_dispatch(
        c.x,
        c.routing.topk_ids,
        capacity,
        c.experts,
        use_fp8=c.quantize is not None,
        async_finish=True,
    )
    event.current_stream_wait()
    ids, weights = c.routing.topk_ids, c.routing.topk_weights
    _, event, _ = c.buffer.low_latency_combine(
        c.y, ids, weights, handle, async_finish=True, out=c.out
    )
    event.current_stream_wait()


def hooked_ll(c: Case, capacity: int) -> None:
    _, _, handle, _, receive = c.buffer.low_latency_dispatch(
        c.x,
        c.routing.topk_ids,
        capacity,
        c.experts,
        use_fp8=c.quantize is not None,
        return_recv_hook=True,
    )
    receive()
    ids, weights = c.routing.topk_ids, c.routing.topk_weights
    _, _, receive = c.buffer.low_latency_combine(
        c.y, ids, weights, handle, return_recv_hook=True, out=c.out
    )
    receive()


def bare_elastic(c: Case, capacity: int, num_sms: int) -> None:
    _, _, _, handle, event = c.buffer.dispatch(
        c.sent,
        topk_idx=c.routing.topk_ids,
        topk_weights=c.routing.topk_weights,
        num_experts=c.experts,
        num_max_tokens_per_rank=capacity,
        num_sms=num_sms,
        do_cpu_sync=False,
        async_with_compute_stream=True,
    )
    event.current_stream_wait()
    _, _, event = c.buffer.combine(c.y, handle, async_with_compute_stream=True)
    event.current_stream_wait()


# -- parts ----------------------------------------------------------------------------------------


def zeros(r: Rank, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, r.args.hidden, dtype=torch.bfloat16, device=r.device)


def steps(r: Rank, c: Case, rows: int) -> None:
    """Dispatch and combine by themselves, with DeepEP's count of bytes: all rows received."""
    tokens = c.dispatcher.prepare(c.x, c.routing, c.quantize).result()
    y = c.y[: tokens.x.shape[0]]
    found = times(
        r,
        {
            "dispatch": lambda: c.dispatcher.prepare(c.x, c.routing, c.quantize).result(),
            "combine": lambda: c.dispatcher.finalize(y, tokens, None).result(),
        },
    )
    moved = {"dispatch": rows * tokens.x[0].nbytes, "combine": rows * y[0].nbytes}
    said = [f"{n} {us:.0f} µs ({moved[n] / us / 1e3:.0f} GB/s)" for n, us in found.items()]
    r.say(f"\nT={c.x.shape[0]}: {', '.join(said)}, {rows} rows received\n")


def ht(r: Rank) -> None:
    from moekit_deepep import buffers

    configs = buffers.normal_configs(r.ranks)
    for scheme in ("none", "fp8_block"):
        table(r, f"deepep_ht, {scheme}, {r.ranks} ranks")
        for count in r.args.tokens:
            exact = r.dispatcher("deepep_ht", None, quant=scheme)
            x, routing = r.tokens(count, 1)
            most = r.ranks * count
            case = Case(exact, x, routing, zeros(r, most))
            rows = exact.prepare(x, routing, case.quantize).result().x.shape[0]
            pairs: dict[str, Call] = {
                "bare": partial(bare_ht, case, configs, rows, 0),
                "adapter": case.adapter,
            }
            compare(r, f"{count}, as many rows as arrive", pairs, graphs=False)
            if most <= 4096:
                fixed = r.dispatcher("deepep_ht", count, quant=scheme)
                roomy = Case(fixed, x, routing, case.y)
                pairs = {
                    "bare": partial(bare_ht, roomy, configs, most, most),
                    "adapter": roomy.adapter,
                }
                compare(r, f"{count}, room for all", pairs, graphs=True)
                fixed.destroy()
            if count == r.args.tokens[-1]:
                steps(r, case, rows)
            exact.destroy()


def ll(r: Rank) -> None:
    for scheme in ("none", "fp8_block"):
        table(r, f"deepep_ll, {scheme}, {r.ranks} ranks, max_num_tokens 128")
        dispatcher = r.dispatcher("deepep_ll", 128, quant=scheme)
        y = zeros(r, r.args.experts // r.ranks, dispatcher.max_rows(1))
        for count in [t for t in r.args.tokens if t <= 128]:
            case = Case(dispatcher, *r.tokens(count, 1), y)
            pairs: dict[str, Call] = {"bare": partial(bare_ll, case, 128), "adapter": case.adapter}
            if r.gpu:
                pairs["hooks"] = partial(hooked_ll, case, 128)
            compare(r, str(count), pairs, graphs=True)
        dispatcher.destroy()


def elastic(r: Rank) -> None:
    from moekit_deepep import buffers

    for scheme in ("none", "fp8_block"):
        table(r, f"deepep_elastic, {scheme}, {r.ranks} ranks (T / max_num_tokens)")
        for most in sorted({128, r.args.tokens[-1]}):
            dispatcher = r.dispatcher("deepep_elastic", most, quant=scheme)
            y = zeros(r, dispatcher.max_rows(most))
            for count in [t for t in r.args.tokens if t <= most and (most == 128 or t > 128)]:
                case = Case(dispatcher, *r.tokens(count, 1), y)
                pairs: dict[str, Call] = {
                    "bare": partial(bare_elastic, case, most, buffers.NUM_SMS),
                    "adapter": case.adapter,
                }
                compare(r, f"{count} / {most}", pairs, graphs=True)
                if count == most:
                    tokens = dispatcher.prepare(case.x, case.routing, case.quantize).result()
                    steps(r, case, int((tokens.topk_ids >= 0).any(dim=1).sum()))
            dispatcher.destroy()
