"""Timings for device_check.py: the whole block beside the bare operator, under CUDA graphs.

Weights are random bits (time does not depend on them); every graph runs the call with several
routings, so that the weights come from memory. Microseconds a call, median of 10 replays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from moekit_marlin import library, sizes
from torch import Tensor

import moekit
from moekit.contract import Dispatched, PackedWeights
from moekit.problem.quant import OperandQuant, QuantScheme
from moekit.runtime.workspace import Workspace

DEVICE = torch.device("cuda")
READ, FLOPS = 4.49e12, 791e12
SHAPES = {
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
}
TOKENS = (1, 16, 64, 256, 1024)
# ../shared/measured.md: Marlin w4a16 g128 with align, SiLU * mul and sum.
RECORDED = {
    "mixtral": (80, 241, 372, 877, 2795),
    "qwen3-30b": (35, 94, 130, 204, 475),
    "dsv3-ep8": (84, 253, 392, 910, 2724),
}
INT4 = QuantScheme(
    name="int4_w4a16_g128", weight=OperandQuant(dtype="int4", group=(1, 128), static=True)
)
SCHEMES: tuple[QuantScheme | str, ...] = (
    INT4,
    "fp8_w8a16_channel",
    "int8_w8a16",
    "fp8_w8a16_block",
)


def say(*words: object) -> None:
    print(*words, flush=True)


def listed(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's entries, experts and num_rows for ids (pairs,), by plain torch on the host."""
    flat = ids.flatten().cpu()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts)
    entries: list[int] = []
    owners: list[int] = []
    for expert, mine in enumerate(order.split(counts.tolist())):
        rows = mine.tolist()
        rows += [len(flat)] * (-len(rows) % block)
        entries += rows
        owners += [expert] * (len(rows) // block)

    def ints(v: list[int]) -> Tensor:
        return torch.tensor(v or [0], dtype=torch.int32, device=DEVICE)

    return ints(entries), ints(owners), ints([len(entries)])


def time_us(calls: list[Callable[[], object]]) -> float:
    """Of one call: all of them are captured in one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[5] / len(calls)


@dataclasses.dataclass
class Bench:
    """One shape and scheme: experts, random packed weights, scratch."""

    shape: str
    scheme: QuantScheme | str

    def __post_init__(self) -> None:
        from moekit_marlin.experts import MarlinExperts

        E, K, H, I = SHAPES[self.shape]
        # dsv3-ep8 is one rank of eight: 32 local experts, and all K slots go to them.
        self.problem = moekit.MoEProblem(
            num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, quant=self.scheme
        )
        spec = moekit.registry().expert("marlin")
        self.experts = MarlinExperts(spec, self.problem)
        self.packed = self._random_weights()
        self.workspace = Workspace()

    @property
    def name(self) -> str:
        return self.problem.quant.name

    def _random_weights(self) -> PackedWeights:
        p, weight = self.problem, self.problem.quant.weight
        assert weight is not None
        bits = 4 if weight.dtype == "int4" else 8
        tensors = {}
        for name, n, k in (
            ("w13", p.w13_rows, p.hidden_size),
            ("w2", p.hidden_size, p.intermediate_size),
        ):
            groups = k // weight.group[1] if weight.group[1] > 0 else 1
            shape = (p.num_experts, k // 16, n * bits // 2)
            words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)
            if weight.dtype.startswith("float8"):
                words &= 0x3F3F3F3F  # no NaN
            scale = 2.0**110 if weight.dtype.startswith("float8") else 0.01
            tensors[name] = words
            tensors[f"{name}_scale"] = torch.full(
                (p.num_experts, groups, n), scale, dtype=p.dtype, device=DEVICE
            )
        return PackedWeights("marlin", tensors)

    def active_bytes(self, ids: Tensor) -> float:
        used = len(torch.unique(ids))
        return self.packed.nbytes / self.problem.num_experts * used

    def routings(self, tokens: int) -> list[Tensor]:
        p = self.problem
        draw = torch.Generator(DEVICE).manual_seed(tokens)

        def one() -> Tensor:
            scores = torch.rand(tokens, p.num_experts, generator=draw, device=DEVICE)
            return scores.argsort(1)[:, : p.top_k].contiguous()

        found = [one() for _ in range(3)]
        while sum(self.active_bytes(ids) for ids in found) < 200e6 and len(found) < 16:
            found.append(one())
        return found

    def whole(self, tokens: int, routings: list[Tensor]) -> float:
        p = self.problem
        x = torch.randn(tokens, p.hidden_size, device=DEVICE).to(p.dtype)
        y = torch.empty_like(x)
        weights = torch.rand(tokens, p.top_k, device=DEVICE)
        scratch = self.workspace.take(self.experts.workspace(tokens), DEVICE)

        def call(ids: Tensor) -> Callable[[], object]:
            return lambda: self.experts.apply(
                y, Dispatched(x, None, ids, weights), self.packed, scratch
            )

        return time_us([call(ids) for ids in routings])

    def bare(self, tokens: int, routings: list[Tensor], block: int, tile=(-1, -1, -1)) -> float:
        """The two GEMMs alone, blocks listed beforehand."""
        p = self.problem
        pairs = tokens * p.top_k
        x = torch.randn(tokens, p.hidden_size, device=DEVICE).to(p.dtype)
        h = torch.empty(pairs, p.w13_rows, dtype=p.dtype, device=DEVICE)
        a = torch.randn(pairs, p.intermediate_size, device=DEVICE).to(p.dtype)
        z = torch.empty(pairs, p.hidden_size, dtype=p.dtype, device=DEVICE)
        locks = torch.zeros(sizes.LOCKS, dtype=torch.int32, device=DEVICE)
        unused = torch.ones(1, device=DEVICE)
        operator, w = library.operator(), self.packed

        def call(ids: Tensor) -> Callable[[], object]:
            lists = listed(ids, p.num_experts, block)

            def run() -> None:
                for source, out, name, slots in ((x, h, "w13", p.top_k), (a, z, "w2", 1)):
                    operator(
                        source, out, w[name], None, w[f"{name}_scale"], None, None, None, locks,
                        *lists, unused, block, slots, False, self.experts._type_id,
                        source.shape[0], out.shape[1], source.shape[1], False, True, False, *tile,
                    )  # fmt: skip

            return run

        return time_us([call(ids) for ids in routings])

    def glue(self, tokens: int, routings: list[Tensor]) -> dict[str, float]:
        """Each kernel around the GEMMs on its own."""
        from moekit_kernels.rows import weighted_sum
        from moekit_marlin.kernels import Blocks, activate_columns, list_pairs

        p, e = self.problem, self.experts
        pairs = tokens * p.top_k
        entries, owners, rows, locks, _, outputs, a, _, scratch = self.workspace.take(
            e.workspace(tokens), DEVICE
        )
        block = e._block(tokens, p.top_k)
        capacity = e._capacity(tokens, block)
        lists = Blocks(entries[:capacity], owners[: capacity // block], rows, locks, block)
        h = outputs[: pairs * p.w13_rows].view(pairs, -1).zero_()
        z = outputs[: pairs * p.hidden_size].view(pairs, -1)
        weights = torch.rand(tokens, p.top_k, device=DEVICE)
        y = torch.empty(tokens, p.hidden_size, dtype=p.dtype, device=DEVICE)
        ids = routings[0]
        return {
            "list": time_us([lambda: list_pairs(ids, p.num_experts, lists, scratch)] * 4),
            "activate": time_us([lambda: activate_columns(h, a, e._activation, ids=ids)] * 4),
            "sum": time_us([lambda: weighted_sum(z, weights, ids, y)] * 4),
        }


def blocks() -> None:
    """Which block size is fastest, and whether a tile other than the operator's own choice is."""
    for shape in SHAPES:
        for scheme in SCHEMES[:2]:
            bench = Bench(shape, scheme)
            for tokens in (*TOKENS, 4096):
                routings = bench.routings(tokens)
                mean = tokens * bench.problem.top_k / bench.problem.num_experts
                found = {b: bench.bare(tokens, routings, b) for b in (8, 16, 32, 48, 64)}
                ours, best = bench.experts._block(tokens, bench.problem.top_k), min(found.values())
                shown = "  ".join(f"{b}: {t:.1f}" for b, t in found.items())
                loss = found[ours] / best - 1
                say(
                    f"  {shape} {bench.name} T={tokens} rows/expert {mean:.2f} | {shown} | "
                    f"ours {ours}, loses {loss:.1%}"
                )
                if tokens in (64, 1024):
                    _tiles(bench, tokens, routings, ours, found[ours])
            del bench
            torch.cuda.empty_cache()


def _tiles(bench: Bench, tokens: int, routings: list[Tensor], block: int, auto: float) -> None:
    """One thread block an SM: with more than fit, the operator's locks would never open."""
    found = {}
    for k, n in ((128, 128), (64, 256), (64, 128), (128, 64)):
        try:
            found[k, n] = bench.bare(tokens, routings, block, (k, n, 1))
        except RuntimeError:  # no such kernel
            continue
    shown = "  ".join(f"{tile}: {t:.1f}" for tile, t in found.items())
    say(f"    tiles (K, N), 1 per SM: {shown} | auto {auto:.1f}")


def timing() -> None:
    say(
        "  limit: max(FLOP, active expert bytes / 4.49 TB/s); glue: its bytes / 4.49 TB/s; "
        "target: 1.03 x bare + glue; recorded: the operator with another glue (measured.md)"
    )
    for scheme in SCHEMES:
        for shape, (_, K, H, I) in SHAPES.items():
            bench = Bench(shape, scheme)
            p = bench.problem
            for index, tokens in enumerate(TOKENS):
                routings = bench.routings(tokens)
                active = sum(bench.active_bytes(ids) for ids in routings) / len(routings)
                flops = 2 * tokens * K * (p.w13_rows * H + H * I)
                limit = 1e6 * max(active / READ, flops / FLOPS)
                pairs = tokens * K
                glue_bytes = 2 * (pairs * (p.w13_rows + I) + pairs * H + tokens * H)
                glue = 1e6 * glue_bytes / READ
                block = bench.experts._block(tokens, K)
                bare = bench.bare(tokens, routings, block)
                whole = bench.whole(tokens, routings)
                parts = bench.glue(tokens, routings)
                shown = " ".join(f"{name} {t:.1f}" for name, t in parts.items())
                beside = f" recorded {RECORDED[shape][index]}" if scheme is INT4 else ""
                beside += _triton(p, tokens, routings) if scheme is not INT4 else ""
                say(
                    f"  {bench.name} {shape} T={tokens} x{len(routings)}: limit {limit:.1f} "
                    f"bare {bare:.1f} glue {glue:.1f} target {1.03 * bare + glue:.1f} | "
                    f"whole {whole:.1f} ({whole / (1.03 * bare + glue):.2f} of target, "
                    f"{limit / whole:.2f} of limit) | {shown} |{beside}"
                )
            del bench
            torch.cuda.empty_cache()


def _triton(problem: moekit.MoEProblem, tokens: int, routings: list[Tensor]) -> str:
    """moekit-triton's time for the same problem: which of the two should have priority?"""
    try:
        from moekit_triton.experts import TritonExperts

        experts = TritonExperts(moekit.registry().expert("triton"), problem)
        p, weight = problem, problem.quant.weight
        assert weight is not None
        tensors = {}
        for name, n, k in (("w13", p.w13_rows, p.hidden_size), ("w2", p.hidden_size, 0)):
            k = k or p.intermediate_size
            shape = (p.num_experts, n, k)
            raw = torch.randint(0, 64, shape, dtype=torch.uint8, device=DEVICE)
            tensors[name] = raw.view(weight.torch_dtype)
            scale = (p.num_experts, *weight.scale_shape(n, k))
            dims = 1 if weight.per_tensor else 2 if weight.group[1] < 0 else 3
            tensors[f"{name}_scale"] = torch.full(scale, 0.01, device=DEVICE).view(scale[:dims])
        packed = PackedWeights("triton", tensors)
        x = torch.randn(tokens, p.hidden_size, device=DEVICE).to(p.dtype)
        y, weights = torch.empty_like(x), torch.rand(tokens, p.top_k, device=DEVICE)
        scratch = Workspace().take(experts.workspace(tokens), DEVICE)
        calls = [
            lambda ids=ids: experts.apply(y, Dispatched(x, None, ids, weights), packed, scratch)
            for ids in routings
        ]
        return f" triton {time_us(calls):.1f}"
    except Exception as error:  # noqa: BLE001
        return f" triton failed: {type(error).__name__}"


def profile() -> None:
    """Kernels of one eager call, and the host's time for it."""
    import time

    for shape, tokens in (("qwen3-30b", 1), ("mixtral", 64), ("qwen3-30b", 1024)):
        bench = Bench(shape, INT4)
        p = bench.problem
        x = torch.randn(tokens, p.hidden_size, device=DEVICE).to(p.dtype)
        y, weights = torch.empty_like(x), torch.rand(tokens, p.top_k, device=DEVICE)
        ids = bench.routings(tokens)[0]
        scratch = bench.workspace.take(bench.experts.workspace(tokens), DEVICE)
        tokens_in = Dispatched(x, None, ids, weights)
        for _ in range(5):
            bench.experts.apply(y, tokens_in, bench.packed, scratch)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            bench.experts.apply(y, tokens_in, bench.packed, scratch)
        host = (time.perf_counter() - start) / 50 * 1e6
        torch.cuda.synchronize()
        with torch.profiler.profile() as profiler:
            for _ in range(5):
                bench.experts.apply(y, tokens_in, bench.packed, scratch)
            torch.cuda.synchronize()
        say(f"  {shape} T={tokens}: host {host:.0f} us an eager call; kernels, us each:")
        for event in profiler.key_averages():
            device_us = getattr(event, "self_device_time_total", 0.0)
            if device_us:
                each = device_us / event.count
                say(f"    {each:8.1f}  x{event.count / 5:.0f}  {event.key[:110]}")
        del bench
        torch.cuda.empty_cache()
