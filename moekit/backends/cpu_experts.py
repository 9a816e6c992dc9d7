"""The `torch` experts on the CPU: several methods to run an expert, and the choice of one.

Shape suffixes beyond the kernel's: S expert-sorted assignments; N rows of gathered x, expert by
expert (S, or a capacity for each expert in the batched layout); n rows of one expert; W rows
of w13.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends import cpu_costs
from moekit.backends.cpu_costs import Costs, Points
from moekit.problem import MoEProblem
from moekit.problem.activation import Activation, apply_activation

# Methods that run one expert after another:
#   right           x @ W.T in the problem's dtype
#   left            W @ x.T, feature-major between the GEMMs. oneDNN repacks the right-hand matrix
#                   of each 16-bit product, so it repacks a small x and not the weights
#   onednn          fp32 products by oneDNN, where torch.mm calls MKL
#   native          right with oneDNN switched off: its 16-bit products of one row are slow
#   upcast, upcast_onednn   fp32 products of 16-bit weights, converted piece by piece in the cache
LOOPS = ("right", "left", "native", "onednn", "upcast", "upcast_onednn")
# Methods that run all experts at once: F.grouped_mm, and a padded bmm over the batched layout.
ALL_AT_ONCE = ("grouped", "batched")

_PIECE_BYTES = 4 << 20  # fp32 bytes of upcast weights that fit in second-level caches
_UPCAST_ROWS = 512  # rows that share one conversion, whose cost is small then
# Most rows of the batched layout per assignment, or per expert, that memory may hold.
BATCHED_ROWS_PER_ASSIGNMENT, BATCHED_ROWS_PER_EXPERT = 4, 8
# Approximate time of the small operations around `run_grouped` for one token.
_AROUND_GROUPED_SECONDS = 100e-6
# Calibration: the most weight elements of an expert (times of larger experts are scaled), and the
# bytes of experts to cycle through, which exceed the caches if the layer's experts do.
_MAX_ELEMENTS, _CYCLE_BYTES = 8 << 20, 64 << 20
_TABLE_ROWS = 1024


@dataclass(frozen=True)
class Experts:
    """The local experts on the CPU.

    w13 (L, W, H) and w2 (L, H, I) in the problem's dtype, None where they are quantized; bias13
    (L, W), bias2 (L, H). matrix: (name, expert, dtype) -> that matrix of a quantized expert.
    """

    problem: MoEProblem
    w13: Tensor | None
    w2: Tensor | None
    bias13: Tensor | None
    bias2: Tensor | None
    matrix: Callable[[str, int, torch.dtype], Tensor] | None = None

    def in_fp32(self) -> Experts:
        """Return the same experts for a problem in float32; matrices are converted when used."""

        def converted(name: str, expert: int, dtype: torch.dtype) -> Tensor:
            stored: Tensor | None = getattr(self, name)
            assert stored is not None
            return stored[expert].to(dtype)

        wide = self.problem.replace(dtype=torch.float32)
        return replace(self, problem=wide, w13=None, w2=None, matrix=self.matrix or converted)


class Arena:
    """Consecutive 64-byte aligned pieces of a byte buffer: new large tensors cause page faults."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.used = buffer, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start, nbytes = self.used, math.prod(shape) * dtype.itemsize
        assert start + nbytes <= self.buffer.nbytes, "workspace() reported too few bytes"
        self.used = (start + nbytes + 63) & -64
        return self.buffer[start : start + nbytes].view(dtype).view(tuple(shape))


def arena_bytes(problem: MoEProblem, assignments: int) -> int:
    """Return the bytes that a call of at most ``assignments`` assignments takes from its arena."""
    p, size = problem, problem.dtype.itemsize
    rows = assignments
    if "batched" in methods_for(p):
        fits = BATCHED_ROWS_PER_EXPERT * p.num_local_experts
        rows = max(BATCHED_ROWS_PER_ASSIGNMENT * assignments, fits)
    gathered = rows * p.hidden_size * (size + 4)
    return gathered + _scratch_bytes(p, rows) + 512


def _scratch_bytes(problem: MoEProblem, rows: int) -> int:
    """Return the bytes that a method takes in addition to x and z, for ``rows`` rows in all."""
    p, wide = problem, problem.w13_rows + problem.hidden_size
    matrix = 4 * p.hidden_size * max(p.w13_rows, p.local_intermediate_size)
    piece = min(matrix, max(_PIECE_BYTES, 4 * wide))
    upcast = min(rows, _UPCAST_ROWS) * wide * 4 + piece + 256
    return max(rows * wide * p.dtype.itemsize, 0 if p.dtype == torch.float32 else upcast) + 512


# -- the choice ---------------------------------------------------------------------------------


def methods_for(problem: MoEProblem) -> tuple[str, ...]:
    """Return the methods that can run this problem's experts on this machine."""
    p = problem
    onednn = cpu_costs.onednn_enabled() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    methods = ["right", "left"]
    if p.dtype == torch.float32:
        methods += ["onednn"] if onednn else []
    else:
        methods += ["upcast", "upcast_onednn", "native"] if onednn else ["upcast"]
    if p.quant.weight is None:
        methods.append("batched")
        sizes = (p.hidden_size, p.local_intermediate_size)
        if not p.has_bias and all(n * p.dtype.itemsize % 16 == 0 for n in sizes):
            methods.append("grouped")
    return tuple(methods)


class Choice:
    """The fastest method for each number of rows of an expert."""

    def __init__(self, costs: Costs, methods: Sequence[str]) -> None:
        rows = range(1, _TABLE_ROWS + 1)
        loops = [method for method in LOOPS if method in methods]
        best = [min((costs.of(method, n), method) for method in loops) for n in rows]
        self._seconds, self._methods = [t for t, _ in best], [method for _, method in best]
        self._at_once = {w: [costs.of(w, n) for n in rows] for w in ALL_AT_ONCE if w in methods}
        self._source = costs.source

    def loop(self, rows: int, alone: bool) -> str:
        """Return the fastest method for one expert of ``rows`` rows.

        alone: no other thread runs experts. Otherwise no method may switch oneDNN off.
        """
        method = self._methods[min(rows, _TABLE_ROWS) - 1]
        return method if alone or method != "native" else "right"

    def one_token_at_once(self, top_k: int) -> bool:
        """Return whether `run_grouped` is faster for one token, with what is around it."""
        grouped = self._at_once.get("grouped", (math.inf,))[0]
        return top_k * grouped + _AROUND_GROUPED_SECONDS < top_k * self._seconds[0]

    def at_once(self, counts: Sequence[int], batched_fits: bool) -> str | None:
        """Return the method that runs all experts at once, or None if a loop is faster.

        counts: rows of every local expert. batched_fits: there is memory for the batched layout.
        """
        hit = [n for n in counts if n]
        found, least = None, _total(self._seconds, hit)
        if grouped := self._at_once.get("grouped"):
            seconds = _total(grouped, hit)
            if seconds < least:
                found, least = "grouped", seconds
        if batched_fits and (batched := self._at_once.get("batched")):
            widest = max(hit)
            if widest <= _TABLE_ROWS and len(counts) * batched[widest - 1] < least:
                found = "batched"
        return found

    def __str__(self) -> str:
        parts, start = [], 1
        for n in range(2, _TABLE_ROWS + 2):
            if n > _TABLE_ROWS or self._methods[n - 1] != self._methods[start - 1]:
                rows = f"{start}" if start == n - 1 else f"{start} to {n - 1}"
                rows = f"{start} and more" if n > _TABLE_ROWS else rows
                parts.append(f"'{self._methods[start - 1]}' for {rows}")
                start = n
        return f"method by rows per expert: {', '.join(parts)} ({self._source})"


def _total(seconds: Sequence[float], counts: Sequence[int]) -> float:
    try:
        return sum([seconds[n - 1] for n in counts])
    except IndexError:  # beyond the table, time grows with the rows
        last = seconds[-1] / _TABLE_ROWS
        return sum(seconds[n - 1] if n <= _TABLE_ROWS else last * n for n in counts)


_lock = threading.Lock()
_choices: dict[tuple[object, ...], Choice] = {}


def choice(problem: MoEProblem) -> Choice:
    """Return the choice for a problem and the current number of threads; time it if unknown."""
    found = _find(problem, lambda: _timed(problem, methods_for(problem)))
    assert found is not None
    return found


def describe(problem: MoEProblem) -> str:
    """Return the choice as text for `explain`; an unknown machine is not timed."""
    if problem.device.type != "cpu":
        return ""
    found = _find(problem, None)
    return str(found) if found else "its methods are timed when weights are first packed"


def _find(problem: MoEProblem, timed: Callable[[], Mapping[str, Points]] | None) -> Choice | None:
    cpu_costs.settle_onednn(problem.dtype)
    p, methods = problem, methods_for(problem)
    key = (
        p.dtype_name, p.hidden_size, p.local_intermediate_size, p.activation.name, p.has_bias,
        methods,
    )  # fmt: skip
    full = (*key, torch.get_num_threads(), cpu_costs.calibrates())
    found = _choices.get(full)
    if found is None:
        with _lock:
            found = _choices.get(full)
            if found is None:
                elements = p.hidden_size * (p.w13_rows + p.local_intermediate_size)
                costs = cpu_costs.find(key, p.dtype_name, elements, timed)
                if costs is not None:
                    found = _choices[full] = Choice(costs, methods)
    return found


def _timed(problem: MoEProblem, methods: Sequence[str]) -> Mapping[str, Points]:
    """Time the methods on random experts of the problem's sizes, or of a share of them."""
    p, H = problem, problem.hidden_size
    halves = p.w13_rows // p.local_intermediate_size
    most = max(32, _MAX_ELEMENTS // (H * (halves + 1)) // 32 * 32)
    inner = min(p.local_intermediate_size, most)
    nbytes = H * inner * (halves + 1) * p.dtype.itemsize
    count = max(2, min(256, _CYCLE_BYTES // nbytes))
    draw = torch.Generator().manual_seed(0)

    def random(lead: int, *shape: int) -> Tensor:
        one = torch.rand(shape, generator=draw, dtype=torch.float32, device="cpu")
        one = one.sub_(0.5).to(p.dtype)
        return one.expand(lead, *shape).clone()

    biases = (random(count, halves * inner), random(count, H)) if p.has_bias else (None, None)
    experts = Experts(p, random(count, halves * inner, H), random(count, H, inner), *biases)
    turn = 0

    def call_of(method: str, rows: int) -> Callable[[], object]:
        number = count if method in ALL_AT_ONCE else 1
        x = random(number, rows, H).flatten(0, 1)
        z = torch.empty(number * rows, H, dtype=torch.float32, device="cpu")
        scratch = torch.empty(_scratch_bytes(p, number * rows), dtype=torch.uint8, device="cpu")

        def one_expert() -> None:
            nonlocal turn
            turn = (turn + 1) % count
            run_expert(method, experts, turn, x, z, Arena(scratch))

        calls: dict[str, Callable[[], object]] = {
            "grouped": lambda: run_grouped(experts, x, torch.full((count,), rows, device="cpu")),
            "batched": lambda: run_batched(experts, x, z, Arena(scratch)),
        }
        return calls.get(method, one_expert)

    def makers(kind: Sequence[str]) -> dict[str, Callable[[int], Callable[[], object]]]:
        return {w: lambda rows, w=w: call_of(w, rows) for w in kind if w in methods}  # type: ignore[misc]

    with torch.inference_mode():
        loops = cpu_costs.measure(makers(LOOPS))
        fastest = [min(dict(found).get(n, math.inf) for found in loops.values())
                   for n in cpu_costs.ROWS]  # fmt: skip
        at_once = cpu_costs.measure(makers(ALL_AT_ONCE), count, fastest)
    scale = p.local_intermediate_size / inner
    return {
        method: [(n, t * scale) for n, t in found] for method, found in (loops | at_once).items()
    }


# -- methods -----------------------------------------------------------------------------------


def activate(h: Tensor, activation: Activation, dim: int = -1) -> Tensor:
    """Apply the activation along ``dim``; may overwrite h. A plain silu stays in h's dtype."""
    if activation.name == "silu" and activation.limit is None:
        gate, up = h.chunk(2, dim=dim)
        return F.silu(gate, inplace=True).mul_(up)
    return apply_activation(h, activation, dim=dim)


def run_expert(
    method: str, experts: Experts, expert: int, x_nH: Tensor, z_nH: Tensor, arena: Arena
) -> None:
    """Run one expert on its rows and write z, fp32 and unweighted."""
    used = arena.used
    if method == "left":
        _left(experts, expert, x_nH, z_nH, arena)
    elif method in ("upcast", "upcast_onednn"):
        for start in range(0, len(x_nH), _UPCAST_ROWS):
            rows = slice(start, start + _UPCAST_ROWS)
            _upcast(method == "upcast_onednn", experts, expert, x_nH[rows], z_nH[rows], arena)
            arena.used = used
    elif method == "native":
        _native(experts, expert, x_nH, z_nH, arena)
    else:
        _right(method == "onednn", experts, expert, x_nH, z_nH, arena)
    if experts.bias2 is not None:
        z_nH += experts.bias2[expert]
    arena.used = used  # the next expert reuses it while it is in the cache


def _native(experts: Experts, expert: int, x: Tensor, z: Tensor, arena: Arena) -> None:
    """Run `_right` with oneDNN switched off, under a lock: the switch is the whole process's."""
    if not _switch.acquire(blocking=False):
        return _right(False, experts, expert, x, z, arena)
    try:
        torch._C._set_mkldnn_enabled(False)
        _right(False, experts, expert, x, z, arena)
    finally:
        torch._C._set_mkldnn_enabled(True)
        _switch.release()


_switch = threading.Lock()
_last_thread = 0


def _alone() -> bool:
    """Return whether this thread made the last call, too.

    A method that switches oneDNN off slows down the calls of all other threads.
    """
    global _last_thread
    before, _last_thread = _last_thread, threading.get_ident()
    return before == _last_thread


def matrices(experts: Experts, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return w13 and w2 of an expert. dtype: of quantized experts' matrices."""
    if experts.matrix is None:
        assert experts.w13 is not None and experts.w2 is not None
        return experts.w13[expert], experts.w2[expert]
    return experts.matrix("w13", expert, dtype), experts.matrix("w2", expert, dtype)


def _right(onednn: bool, experts: Experts, expert: int, x: Tensor, z: Tensor, arena: Arena) -> None:
    w13, w2 = matrices(experts, expert, x.dtype)
    if onednn:
        h = _linear(x, w13)
    else:
        h = _mm(x, w13.T, arena.take((len(x), len(w13)), x.dtype))
    if experts.bias13 is not None:
        h += experts.bias13[expert]
    act = activate(h, experts.problem.activation)
    if onednn:
        z.copy_(_linear(act, w2))
    elif z.dtype == x.dtype:
        _mm(act, w2.T, z)
    else:
        z.copy_(_mm(act, w2.T, arena.take((len(x), len(w2)), x.dtype)))


def _left(experts: Experts, expert: int, x: Tensor, z: Tensor, arena: Arena) -> None:
    w13, w2 = matrices(experts, expert, x.dtype)
    h = _mm(w13, x.T, arena.take((len(w13), len(x)), x.dtype))
    if experts.bias13 is not None:
        h += experts.bias13[expert, :, None]
    act = activate(h, experts.problem.activation, dim=0)
    out = _mm(w2, act, arena.take((len(w2), len(x)), x.dtype))
    z[None].copy_(out.T[None])  # as 3-D: a 2-D transposing copy is single-threaded


def _upcast(
    onednn: bool, experts: Experts, expert: int, x: Tensor, z: Tensor, arena: Arena
) -> None:
    w13, w2 = matrices(experts, expert, torch.float32)
    x32 = arena.take(x.shape, torch.float32).copy_(x)
    h = arena.take((len(x), len(w13)), torch.float32)
    _upcast_product(onednn, x32, w13, h, arena)
    if experts.bias13 is not None:
        h += experts.bias13[expert]
    _upcast_product(onednn, activate(h, experts.problem.activation), w2, z, arena)


def _upcast_product(onednn: bool, x: Tensor, w: Tensor, out: Tensor, arena: Arena) -> None:
    """Compute out = x @ w.T in fp32, with w converted a few rows at a time."""
    used, (rows, inner) = arena.used, w.shape
    converts = w.dtype != torch.float32
    step = min(rows, max(1, _PIECE_BYTES // (4 * inner))) if converts else rows
    buffer = arena.take((step, inner), torch.float32) if converts else None
    for start in range(0, rows, step):
        part = w[start : start + step]
        if buffer is not None:
            part = buffer[: len(part)].copy_(part)
        columns = out[:, start : start + step]
        if onednn:
            columns.copy_(_linear(x, part))
        else:
            torch.mm(x, part.T, out=columns)
    arena.used = used


def run_batched(experts: Experts, x_NH: Tensor, z_NH: Tensor, arena: Arena) -> None:
    """Run all experts on the same number of rows each, in expert order."""
    w13, w2 = experts.w13, experts.w2
    assert w13 is not None and w2 is not None
    L, used = len(w13), arena.used
    x, z = x_NH.view(L, -1, x_NH.shape[1]), z_NH.view(L, -1, z_NH.shape[1])
    rows = x.shape[1]
    h = torch.bmm(w13, x.mT, out=arena.take((L, w13.shape[1], rows), x.dtype))
    if experts.bias13 is not None:
        h += experts.bias13[:, :, None]
    act = activate(h, experts.problem.activation, dim=1)
    out = torch.bmm(w2, act, out=arena.take((L, w2.shape[1], rows), x.dtype))
    z.copy_(out.mT)
    if experts.bias2 is not None:
        z += experts.bias2[:, None]
    arena.used = used


def run_grouped(experts: Experts, x_SH: Tensor, count_L: Tensor) -> Tensor:
    """Run all experts on expert-sorted rows, count_L of each, in a C++ loop: (S, H) fp32."""
    assert experts.w13 is not None and experts.w2 is not None
    ends_L = count_L.cumsum(0, dtype=torch.int32)
    h = F.grouped_mm(x_SH, experts.w13.mT, offs=ends_L)
    act = activate(h, experts.problem.activation)
    return F.grouped_mm(act, experts.w2.mT, offs=ends_L).float()


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    # torch recognizes a one-column matrix as contiguous only in the transposed form.
    torch.mm(b.T, a.T, out=out.T)
    return out


def _linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w.T by oneDNN's fp32 kernels: on AMD's AVX-512 twice as fast as MKL's."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return product


# -- a call -------------------------------------------------------------------------------------


def run(
    experts: Experts,
    chosen: Choice,
    y_RH: Tensor,
    x_RH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    arena: Arena,
) -> None:
    """Write the weighted sum of each token's experts to y.

    ids: local, -1 for none. weights: fp32.
    """
    (R, H), K, L = x_RH.shape, ids_RK.shape[1], experts.problem.num_local_experts
    alone = _alone()
    if R == 1:
        method = "grouped" if chosen.one_token_at_once(K) else chosen.loop(1, alone)
        _one_token(method, experts, y_RH, x_RH, ids_RK, weights_RK, arena)
        return
    ids_S, order_S = torch.sort(ids_RK.reshape(-1), stable=True)
    count_L = torch.bincount(ids_S + 1, minlength=L + 1)
    skipped, *counts = count_L.tolist()
    count_L = count_L[1:]
    ids_S, order_S = ids_S[skipped:], order_S[skipped:]
    if len(ids_S) == 0:
        y_RH.zero_()
        return
    widest = max(counts)
    most = max(BATCHED_ROWS_PER_ASSIGNMENT * len(ids_S), BATCHED_ROWS_PER_EXPERT * L)
    at_once = chosen.at_once(counts, batched_fits=L * widest <= most)

    # Assignment s of the sorted ones is in row place_S[s] of x and z.
    place_S = torch.arange(len(ids_S), device="cpu")
    row_N = order_S // K
    if at_once == "batched":
        first_L = count_L.cumsum(0) - count_L
        place_S += (torch.arange(L, device="cpu") * widest - first_L)[ids_S]
        padded = row_N.new_full((L * widest,), int(row_N[0]))
        row_N = padded.index_copy_(0, place_S, row_N)
    x_NH = torch.index_select(x_RH, 0, row_N, out=arena.take((len(row_N), H), x_RH.dtype))
    if at_once == "grouped":
        z_NH = run_grouped(experts, x_NH, count_L)
    else:
        z_NH = arena.take(x_NH.shape, torch.float32)
        if at_once == "batched":
            run_batched(experts, x_NH, z_NH, arena)
        else:
            end = 0
            for expert, rows in enumerate(counts):
                if rows:
                    start, end = end, end + rows
                    method = chosen.loop(rows, alone)
                    run_expert(method, experts, expert, x_NH[start:end], z_NH[start:end], arena)

    # embedding_bag: gather, weight and sum over K in one threaded, ordered fp32 pass.
    place_RK = torch.empty(R * K, dtype=torch.int64, device="cpu").index_copy_(0, order_S, place_S)
    weight_RK, bag_R = weights_RK.reshape(-1), torch.arange(0, R * K, K, device="cpu")
    if skipped:
        used_RK = ids_RK >= 0
        per_row = used_RK.sum(1)
        bag_R = per_row.cumsum(0) - per_row
        place_RK, weight_RK = place_RK[used_RK.view(-1)], weight_RK[used_RK.view(-1)]
    y_RH.copy_(torch.embedding_bag(z_NH, place_RK, bag_R, False, 0, False, weight_RK)[0])


def _one_token(
    method: str,
    experts: Experts,
    y_1H: Tensor,
    x_1H: Tensor,
    ids_1K: Tensor,
    weights_1K: Tensor,
    arena: Arena,
) -> None:
    """Run the experts of a single token, without operators that sort, gather and scatter."""
    used = [(expert, k) for k, expert in enumerate(ids_1K[0].tolist()) if expert >= 0]
    used_bytes = arena.used
    if method == "grouped" and used:
        used.sort()
        ids_S = torch.tensor([expert for expert, _ in used], device="cpu")
        count_L = torch.bincount(ids_S, minlength=experts.problem.num_local_experts)
        x_SH = arena.take((len(used), x_1H.shape[1]), x_1H.dtype).copy_(x_1H)
        z_SH = run_grouped(experts, x_SH, count_L)
    else:
        z_SH = arena.take((len(used), x_1H.shape[1]), torch.float32)
        for row, (expert, _) in enumerate(used):
            run_expert(method, experts, expert, x_1H, z_SH[row : row + 1], arena)
    if (order := [k for _, k in used]) != list(range(ids_1K.shape[1])):
        weights_1K = weights_1K[:, order]
    y_1H.copy_(weights_1K @ z_SH)
    arena.used = used_bytes
