"""Dispatch and combine between the GPUs of this host, in CUDA graphs: one rank for each GPU.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python benchmarks/device/nvlink_pairs.py
    python benchmarks/device/nvlink_pairs.py ways tiles --tokens 4096      # some parts alone

pairs    every installed dispatcher that moves tokens, bf16 and fp8 blocks: both parts in a graph,
         and each part between events in a graph
ways     nvlink_ht and nvlink_ll with 16, 32 and 64 programs
dedup    nvlink_ht with a row for each token and rank, and with a row for each assignment (as many
         tokens of one expert each)
tiles    nvlink_ht with its own tiles, then others, one part changed at a time
kraken   4096 tokens of 4096 columns, one expert each: 33.5 MB of a rank, as in kraken's figures
stress   1000 eager calls with changing T, delays of random ranks and poisoned memory; 200 replays
sums     nvlink_ht with eight rows for each row that arrived: summed by `triton`'s kernel before the
         combine, and summed in the combine, with several tiles and numbers of chunks
edges    calls whose numbers exceed 2**31, on two streams in turn, and one that a rank refuses
layers   whole layers (`python -m moekit bench --layers`): Qwen3-30B, DeepSeek-V3
profile  whole layers with `triton`: replays of one input, and the kernels that a profiler sees

Hidden size 7168, top 8 of 256 experts. Experts return what they get; each dispatcher's output is
compared with the sum that it must be in 20 replays with delays. Each group of lines has its own
processes and a time limit, so that a failure or a hang does not lose the rest; lines are printed
as they are measured. Results: benchmarks/results/2026-11-23-h200x2-nvlink-pairs.md; kraken is
the example 32 of meta-pytorch/kraken.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moekit
from moekit.plugin import (
    ActivationFormat,
    DispatcherSpec,
    Routing,
    Unreduced,
    Workspace,
    quantize,
    registry,
)

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
DEVICE = "cuda"
REPEATS, PAIRS = 7, 8
PROGRAMS = "NVLINK_PAIRS_PROGRAMS"  # for the ranks' processes
HEAD = "| dispatcher | scheme | T | pair | dispatch | combine | error | buffers MB | SMs |"
# Of nvlink_ht, by tokens and hidden size: part, then programs, tokens, columns, warps, stages.
TILES = {
    (16, 7168): [("combine", (128, 1, 2048, 8, 1)), ("combine", (16, 1, 8192, 16, 1))],
    **{(tokens, 7168): [
        *(("dispatch", (programs, 1, columns, warps, 1)) for programs, columns, warps in (
            (128, 4096, 8), (128, 2048, 8), (128, 1024, 4), (256, 2048, 8), (256, 2048, 4),
            (512, 1024, 4),
        )),
        *(("combine", tile) for tile in (
            (128, 1, 2048, 8, 1), (128, 4, 1024, 8, 1), (264, 2, 1024, 8, 1),
        )),
    ] for tokens in (128, 512, 1024, 2048)},
    **{(tokens, 2048): [
        *(("dispatch", (programs, each, 1024, warps, 1)) for programs, each, warps in (
            (128, 1, 8), (128, 1, 4), (128, 4, 8), (256, 1, 4), (256, 2, 4), (512, 1, 4),
            (512, 2, 4),
        )),
        *(("combine", tile) for tile in (
            (128, 1, 1024, 8, 1), (128, 4, 1024, 8, 1), (264, 2, 1024, 8, 1),
        )),
    ] for tokens in (128, 512, 1024, 2048)},
    (4096, 7168): [
        *(("dispatch", (programs, 8, 1024, 16, 3)) for programs in (32, 64)),
        *(("dispatch", (programs, tokens, 4096, 16, 1)) for programs in (32, 64)
          for tokens in (2, 4, 8)),
        ("dispatch", (128, 1, 4096, 8, 1)), ("dispatch", (128, 2, 4096, 8, 1)),
        *(("combine", (programs, 8, 1024, 16, stages)) for programs in (32, 64)
          for stages in (1, 2, 3, 4)),
        ("combine", (32, 4, 1024, 8, 4)), ("combine", (32, 4, 2048, 16, 3)),
    ],
    (8192, 2048): [("dispatch", (128, 4, 1024, 8, 1)), ("dispatch", (128, 8, 1024, 8, 1))],
}  # fmt: skip
# Chunks; programs of a multiprocessor, most registers, and the share of programs that sum for other
# ranks (None: the plugin's); tokens, columns and warps of a step. Experts, hidden size, and tokens
# of each rank.
SUMS = (
    (8, 8, 64, None, 1, 1024, 4), (8, 8, 64, 0.5, 1, 1024, 4), (8, 6, 80, None, 1, 1024, 4),
    (4, 8, 64, None, 1, 1024, 4), (2, 8, 64, None, 1, 1024, 4),
)  # fmt: skip
SUMMED = ((128, 2048, 8192), (256, 7168, 4096), (128, 2048, 1024))
LAYERS = (
    ("qwen3-30b", "1,128,8192", "none"),
    ("256:8:7168:2048", "128,4096", "none,fp8_block"),
)
# Experts, top_k, hidden size, intermediate size, tokens of each rank, scheme.
PROFILED = (
    (128, 8, 2048, 768, 1, "none"),
    (128, 8, 2048, 768, 128, "none"),
    (128, 8, 2048, 768, 8192, "none"),
    (256, 8, 7168, 2048, 128, "fp8_block"),
    (256, 8, 7168, 2048, 4096, "fp8_block"),
)


def problem_of(
    tokens: int, scheme: str, experts: int, top_k: int, hidden: int, inner: int = 256
) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return moekit.MoEProblem(
        num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner,
        max_num_tokens=tokens, quant=scheme, device=DEVICE,
        parallel=moekit.ParallelConfig(ep_size=ranks, ep_rank=rank),
    )  # fmt: skip


class Pair:
    """Dispatch and combine of random tokens, whose experts return what they get."""

    def __init__(
        self, name: str, tokens: int, scheme: str = "none", experts: int = EXPERTS,
        top_k: int = TOP_K, hidden: int = HIDDEN,
    ) -> None:  # fmt: skip
        problem = problem_of(tokens, scheme, experts, top_k, hidden)
        spec = registry().dispatcher(name)
        if reasons := spec.unsupported(problem):
            raise moekit.errors.Unsupported("; ".join(reasons))
        self.dispatcher = spec.load()(spec, problem)
        self.batched = spec.format is ActivationFormat.BATCHED
        self.x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty_like(self.x)
        found = moekit.route(torch.randn(tokens, experts, device=DEVICE), top_k)
        dtype = torch.int64 if spec.ids_dtype == "int64" else torch.int32
        self.routing = Routing(found.topk_weights, found.topk_ids.to(dtype).contiguous())
        owner = torch.div(found.topk_ids, experts // dist.get_world_size(), rounding_mode="floor")
        copies = [(owner == r).any(1) for r in range(dist.get_world_size())]
        # Batched rows are weighted by the combine; others arrive once on each rank.
        factor = found.topk_weights.sum(1) if self.batched else torch.stack(copies).sum(0)
        self.factor = factor[:, None].float()
        self.quantize: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.y = None
        if scheme != "none" and scheme in spec.wire_schemes:
            assert problem.quant.activation is not None
            sent = quantize(self.x, problem.quant.activation, None, None)
            self.quantize = lambda x, valid: sent

    def dispatch(self) -> Any:
        return self.dispatcher.prepare(self.x, self.routing, self.quantize).result()

    def combine(self, tokens: Any, copy: bool = False) -> None:
        y = self.dispatcher.output(tokens)
        if y is None:
            if self.y is None or self.y.shape != tokens.x.shape:
                self.y = torch.zeros_like(tokens.x, dtype=self.x.dtype)
            y = self.y
        if copy and self.batched:
            y.copy_(tokens.x)
        elif copy:  # rows without an expert may hold anything
            y.copy_(torch.where((tokens.topk_ids >= 0).any(1, keepdim=True), tokens.x, 0))
        self.dispatcher.finalize(y, tokens, self.out).result()

    def microseconds(self) -> tuple[float, float, float]:
        """Return the time of a pair, and of its dispatch and its combine between events."""
        graph = captured(lambda: [self.combine(self.dispatch()) for _ in range(PAIRS)])
        both = replayed_us(graph)
        del graph
        try:
            return both, *self._parts()
        except Exception as error:  # the pair is known
            say(f"  (no times of the parts: {first_line(error)})")
            return both, float("nan"), float("nan")

    def _parts(self) -> tuple[float, float]:
        marks = [
            [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]
            for _ in range(PAIRS)
        ]

        def work() -> None:
            for start, middle, end in marks:
                start.record()
                tokens = self.dispatch()
                middle.record()
                self.combine(tokens)
                end.record()

        graph, dispatch, combine = captured(work), [], []
        for _ in range(REPEATS):
            together()
            graph.replay()
            torch.cuda.synchronize()
            for start, middle, end in marks[1:]:  # ranks meet in the first
                dispatch.append(1e3 * start.elapsed_time(middle))
                combine.append(1e3 * middle.elapsed_time(end))
        return statistics.median(dispatch), statistics.median(combine)

    def error(self) -> float:
        """Return the largest relative RMS error of 20 replays with delays of some ranks."""
        graph, errors = captured(lambda: self.combine(self.dispatch(), copy=True)), []
        for turn in range(20):
            self.x.copy_(torch.randn_like(self.x))
            self.out.fill_(float("nan"))
            if (turn + dist.get_rank()) % 3 == 0:
                torch.cuda._sleep(200_000)
            graph.replay()
            want = self.x.float() * self.factor
            errors.append(float((self.out.float() - want).norm() / want.norm()))
        return max(errors, key=lambda each: (each != each, each))

    def line(self, label: str, scheme: str) -> None:
        if scheme != "none" and self.quantize is None:
            scheme += " (sent in bf16)"
        error = f"{self.error():.1e}" if self.quantize is None and scheme == "none" else ""
        both, dispatch, combine = self.microseconds()
        say(
            f"| {label} | {scheme} | {len(self.x)} | {both:.1f} | {dispatch:.1f} | {combine:.1f} | "
            f"{error} | {self.dispatcher.buffer_bytes() / 1e6:.0f} | {self.dispatcher.num_sms} |"
        )


class SummedPair(Pair):
    """Experts return what they get for each assignment, expert by expert."""

    def __init__(self, *args: Any, **sizes: Any) -> None:
        super().__init__(*args, **sizes)
        tokens = self.dispatch()
        ids = tokens.topk_ids
        count, order = ids.numel(), ids.flatten().sort(stable=True).indices
        self.places = torch.empty_like(ids)
        self.places.view(-1)[order] = torch.arange(count, dtype=torch.int32, device=DEVICE)
        self.rows = torch.empty(count, self.x.shape[1], dtype=self.x.dtype, device=DEVICE)
        self.of_row = order // ids.shape[1]
        self.apart = True
        self.combine(tokens)
        self.factor = self.routing.topk_weights.sum(1, keepdim=True)

    def combine(self, tokens: Any, copy: bool = False) -> None:
        from moekit_kernels.rows import weighted_sum

        if copy:
            torch.index_select(tokens.x, 0, self.of_row, out=self.rows)
        y: Any = Unreduced(self.rows, self.places)
        if self.apart:
            y = self.dispatcher.output(tokens)
            weighted_sum(self.rows, tokens.topk_weights, tokens.topk_ids, y, self.places)
        self.dispatcher.finalize(y, tokens, self.out).result()


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the shortest time of the graph behind another replay, for each of its PAIRS."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        together()
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / PAIRS)
    return min(times)


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@contextmanager
def made(label: str, *args: Any, kind: type[Pair] = Pair, **sizes: Any) -> Iterator[Pair | None]:
    """Yield a pair, or None with a line that says why there is none, and destroy it."""
    pair = None
    try:
        pair = kind(*args, **sizes)
        yield pair
    except moekit.errors.Unsupported as error:
        say(f"| {label} | {args[2:]} | {args[1]} | not supported: {error} |")
        yield None
    except Exception as error:
        print(f"rank {dist.get_rank()}: {label} {args[1:]} failed: {first_line(error)}", flush=True)
        traceback.print_exc()
        if pair is None:
            yield None
    finally:
        if pair is not None:
            pair.dispatcher.destroy()
        torch.cuda.empty_cache()


# -- what the ranks of a group of lines do ---------------------------------------------------------


def pairs(name: str, tokens: Sequence[int]) -> None:
    for scheme in ("none", "fp8_block"):
        for each in tokens:
            with made(name, name, each, scheme) as pair:
                if pair is not None:
                    pair.line(name, scheme)


def ways(name: str, tokens: Sequence[int]) -> None:
    for programs in os.environ[PROGRAMS].split(","):
        label = f"{name} {programs}"
        for each in tokens:
            for scheme in ("none", "fp8_block"):
                way = mock.patch.dict(os.environ, {"MOEKIT_NVLINK_SMS": programs})
                with way, made(label, name, each, scheme) as pair:
                    if pair is not None:
                        pair.line(label, scheme)


def tiles(name: str, tokens: Sequence[int]) -> None:
    from moekit_nvlink.transfer import Tile

    for (count, hidden), changes in TILES.items():
        if count not in tokens:
            continue
        for part, tile in (("", ()), *changes):
            label = f"{name} {hidden} {part} {tile}" if part else f"{name} {hidden}"
            with ExitStack() as stack:
                if part:
                    found = {f"of_{part}": staticmethod(lambda *_, t=tile: Tile(*t))}
                    stack.enter_context(mock.patch.multiple(Tile, **found))
                pair = stack.enter_context(made(label, name, count, hidden=hidden))
                if pair is not None:
                    pair.line(label, "none")


def sums(name: str, tokens: Sequence[int]) -> None:
    from moekit_nvlink import transfer
    from moekit_nvlink.transfer import Layout, Tile

    layout = sys.modules[Layout.__module__]

    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for apart, way in ((True, SUMS[0]), *((False, way) for way in SUMS)):
        chunks, each, registers, summing, *tile = way
        found = Tile(multiprocessors * each, *tile)
        changed = {
            "reduce_registers": registers,
            "of_reduce": staticmethod(lambda *_, t=found: t),
        }  # fmt: skip
        for experts, hidden, count in SUMMED:
            label = f"{name} {experts}:{hidden}, {'apart' if apart else way}"
            with ExitStack() as stack:
                stack.enter_context(mock.patch.multiple(layout, _CHUNKS=chunks, REDUCED_FROM=1))
                stack.enter_context(mock.patch.multiple(Tile, **changed))
                if summing is not None:
                    share = {"summing_share": lambda *_, s=summing: s}
                    stack.enter_context(mock.patch.multiple(transfer, **share))
                pair = stack.enter_context(
                    made(label, name, count, experts=experts, hidden=hidden, kind=SummedPair)
                )
                if pair is not None:
                    pair.apart = apart  # type: ignore[attr-defined]
                    pair.line(label, "none")


def dedup(name: str, tokens: Sequence[int]) -> None:
    for each in tokens:
        for label, count, top_k in (("rank", each, TOP_K), ("assignment", each * TOP_K, 1)):
            what = f"{name}, a row for each {label}"
            with made(what, name, count, "none", top_k=top_k) as pair:
                if pair is not None:
                    pair.line(what, "none")


def kraken(name: str, tokens: Sequence[int]) -> None:
    sizes = {"experts": 2 * dist.get_world_size(), "top_k": 1, "hidden": 4096}
    with made(name, name, 4096, "none", **sizes) as pair:
        if pair is not None:
            pair.line(f"{name}, 33.5 MB", "none")


def stress(name: str, tokens: Sequence[int]) -> None:
    """Compare the output of every call; what is wrong is counted, not raised."""
    most, rank = 512, dist.get_rank()
    draw, shared, wrong = random.Random(rank), random.Random(-1), 0
    with made(name, name, most) as pair:
        if pair is None:
            return
        x, ids, weights = pair.x, pair.routing.topk_ids, pair.routing.topk_weights
        factor = pair.factor
        for call in range(1000):
            count = draw.choice((0, 1, 7, 64, 128, 511, 512, draw.randint(0, most)))
            late = shared.randrange(dist.get_world_size())
            if call % 10 == 0:  # nobody writes or reads rows between two calls of all ranks
                together()
                held = pair.dispatcher.lease.value
                for buffer in held.calls.all:
                    layout = held.layout
                    buffer.bytes[: layout.ids].fill_(0xFF)
                    buffer.bytes[layout.weights : layout.flags].fill_(0xFF)
                together()
            if rank == late:
                torch.cuda._sleep(draw.randrange(200_000))
            pair.x, pair.out = x[:count], torch.full_like(x[:count], float("nan"))
            pair.routing = Routing(weights[:count], ids[:count])
            pair.combine(pair.dispatch(), copy=True)
            want = pair.x.float() * factor[:count]
            error = (pair.out.float() - want).norm()
            wrong += not bool(error <= 2e-2 * want.norm() + 1e-6)
        pair.x, pair.out, pair.routing = x, torch.empty_like(x), Routing(weights, ids)
        graph = captured(lambda: pair.combine(pair.dispatch(), copy=True))
        for _ in range(200):
            pair.out.fill_(float("nan"))
            if draw.random() < 0.3:
                torch.cuda._sleep(draw.randrange(200_000))
            graph.replay()
            want = x.float() * factor
            wrong += not bool((pair.out.float() - want).norm() <= 2e-2 * want.norm())
        print(f"{name}: rank {rank}: {wrong} of 1200 calls wrong", flush=True)


def edges(name: str, tokens: Sequence[int]) -> None:
    ranks, rank, last, refused = dist.get_world_size(), dist.get_rank(), 2**31 - 5, 6
    with made(name, name, 128) as pair:
        if pair is None:
            return
        held, wrong, kept = pair.dispatcher.lease.value, 0, []
        streams = [torch.cuda.Stream() for _ in range(2)]
        for buffer in held.calls.all:
            flags = buffer.region(held.layout.flags, (2 + held.layout.chunks, ranks), torch.int64)
            flags.fill_(last << 32)
            buffer.epoch.fill_(last)
        together()
        for call in range(12):
            with torch.cuda.stream(streams[call % 2]):
                pair.x, pair.out = torch.randn_like(pair.x), torch.zeros_like(pair.x)
                kept.append((pair.x, pair.out))  # the other stream may still use them
                if call == refused and rank == ranks - 1:
                    pair.dispatcher.abort("refused on purpose")
                    continue
                pair.combine(pair.dispatch(), copy=True)
                want = pair.x.float() * pair.factor
                error = (pair.out.float() - want).norm() / want.norm()
                wrong += not bool(error.isnan() if call == refused else error <= 2e-2)
        print(f"{name}: rank {rank}: {wrong} of 12 calls at the edges wrong", flush=True)


def profile(name: str, tokens: Sequence[int]) -> None:
    from moekit_bench.shapes import random_weights

    for experts, top_k, hidden, inner, count, scheme in PROFILED:
        problem = problem_of(count, scheme, experts, top_k, hidden, inner)
        kernel = moekit.compose(problem, name, "triton", workspace=Workspace(), checked=False)
        packed = kernel.pack(random_weights(problem, torch.device(DEVICE), dist.get_rank()))
        x = torch.randn(count, hidden, dtype=torch.bfloat16, device=DEVICE)
        routing = moekit.route(torch.randn(count, experts, device=DEVICE), top_k)
        call = partial(kernel, x, packed, routing)
        graph = captured(lambda call=call: [call() for _ in range(PAIRS)])
        both = replayed_us(graph)
        del graph
        together()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPEATS):
                call()
            torch.cuda.synchronize()
        plan = kernel.experts.plan(count * dist.get_world_size(), top_k).describe()
        layer = f"{experts}:{top_k}:{hidden}:{inner}, {scheme}, T = {count}"
        say(f"\n{name} + triton, {layer}: {both:.1f} us in a graph, {plan}")
        times: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times.setdefault(event.name, []).append(event.device_time)
        for kind, each in times.items():
            say(f"{statistics.median(each):10.1f} us x {len(each) / REPEATS:.1f}  {kind[:80]}")
        kernel.destroy()
        torch.cuda.empty_cache()


# -- processes -------------------------------------------------------------------------------------


def on_rank(rank: int, ranks: int, port: int, part: str, name: str, tokens: Sequence[int]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks, device_id=device)
    torch.manual_seed(rank)
    with torch.inference_mode():
        globals()[part](name, tokens)
    dist.barrier()
    dist.destroy_process_group()


def in_ranks(part: str, name: str, tokens: Sequence[int], port: int, seconds: float) -> None:
    """Run a group of lines; end its processes after so many seconds."""
    ranks, start = torch.cuda.device_count(), time.monotonic()
    context = mp.spawn(on_rank, (ranks, port, part, name, tokens), ranks, join=False)
    try:
        while not context.join(timeout=1):
            if time.monotonic() - start > seconds:
                print(f"{part} {name}: stopped after {seconds:.0f} s", flush=True)
                break
    except Exception as error:
        print(f"{part} {name} failed: {first_line(error)}", flush=True)
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()


def layers(seconds: float) -> None:
    for layer, tokens, schemes in LAYERS:
        command = [
            sys.executable, "-m", "moekit", "bench", "--layers", "--layer", layer, "--tokens",
            tokens, "--quant", schemes, "--seconds", str(int(seconds)),
        ]  # fmt: skip
        print("\n" + " ".join(command[1:]), flush=True)
        try:
            subprocess.run(command, timeout=seconds + 60)
        except Exception as error:
            print(f"layers of {layer} failed: {first_line(error)}", flush=True)


def movers() -> list[DispatcherSpec]:
    return [spec for spec in registry().dispatchers.values() if spec.moves_tokens]


def main() -> None:
    names = ("pairs", "ways", "dedup", "tiles", "sums", "kraken", "stress", "edges", "profile",
             "layers")  # fmt: skip
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of: {', '.join(names)}; default: all")
    parser.add_argument("--dispatchers", help="default: all that are installed")
    parser.add_argument("--programs", default="16,32,64", help="of `ways`")
    parser.add_argument("--tokens", default="16,128,4096")
    parser.add_argument("--seconds", type=int, default=75, help="for each group of lines")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(names)):
        parser.error(f"unknown parts {unknown}; choose from {', '.join(names)}")
    if torch.cuda.device_count() < 2:
        parser.error(f"needs two GPUs or more (torch sees {torch.cuda.device_count()})")
    parts, tokens = args.parts or names, [int(each) for each in args.tokens.split(",")]
    installed = [spec.name for spec in movers() if not spec.missing()]
    chosen = args.dispatchers.split(",") if args.dispatchers else installed
    own = [name for name in ("nvlink_ht", "nvlink_ll") if name in installed and name in chosen]
    os.environ[PROGRAMS] = args.programs
    jobs = [(part, name) for part in ("edges", "stress") for name in own]
    jobs += [("pairs", name) for name in chosen] + [("ways", name) for name in own]
    jobs += [("profile", name) for name in chosen]
    jobs += [(part, "nvlink_ht") for part in ("dedup", "kraken", "tiles", "sums")]
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} x "
          f"{torch.cuda.get_device_name()}, dispatchers {', '.join(installed)}\n")  # fmt: skip
    print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|", flush=True)
    for port, (part, name) in enumerate(jobs, 29650):
        if part in parts:
            in_ranks(part, name, tokens, port, args.seconds)
    if "layers" in parts:
        layers(args.seconds * 2)


if __name__ == "__main__":
    main()
