"""The `torch` experts on the CPU: several methods to run an expert, and the choice of one.

Shape suffixes beyond the kernel's: S expert-sorted assignments; N rows of gathered x, expert by
expert (S, or a capacity for each expert in the batched layout); n rows of one expert; W rows
of w13.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit.backends import cpu_costs
from moekit.backends.cpu_costs import Costs, Points
from moekit.contract import BufferSpec, PackedWeights
from moekit.problem import MoEProblem
from moekit.problem.activation import Activation, apply_activation
from moekit.problem.quantize import dequantize

# Methods that run one expert after another:
#   right     x @ W.T in the problem's dtype
#   left      W @ x.T, feature-major between the GEMMs. oneDNN repacks the right-hand matrix of each
#             16-bit product, so it repacks a small x and not the weights
#   native    right with oneDNN switched off: its 16-bit products of one row are slow
#   fp32      fp32 products by oneDNN: on AMD's AVX-512 twice as fast as MKL's, torch.mm's own.
#             16-bit weights are converted piece by piece in the cache
LOOPS = ("right", "left", "native", "fp32")
# Methods that run all experts at once: F.grouped_mm, and a padded bmm over the batched layout.
ALL_AT_ONCE = ("grouped", "batched")

_PIECE_BYTES = 4 << 20  # fp32 bytes of upcast weights that fit in second-level caches
_BATCHED_ROWS = 4  # of the batched layout, that memory may hold per assignment or half expert
# Calibration: the most weight elements of an expert (times of larger experts are scaled), and the
# bytes of experts to cycle through, which exceed the caches if the layer's experts do.
_MAX_ELEMENTS, _CYCLE_BYTES = 8 << 20, 64 << 20
_BURST = 3  # experts in a row, as a layer runs them


@dataclass(frozen=True)
class Experts:
    """The packed local experts: w13 (L, W, H), w2 (L, H, I), biases (L, W) and (L, H), scales."""

    problem: MoEProblem
    weights: PackedWeights

    def in_fp32(self) -> Experts:
        """Return the same experts for a problem in float32."""
        return replace(self, problem=self.problem.replace(dtype=torch.float32))

    def bias(self, name: str) -> Tensor | None:
        return self.weights.get(f"{name}_bias")

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.matrix("w13", expert, dtype), self.matrix("w2", expert, dtype)

    def matrix(self, name: str, expert: int, dtype: torch.dtype) -> Tensor:
        """Return w13 or w2 of an expert: quantized ones in ``dtype``, others in the problem's."""
        stored, operand = self.weights[name][expert], self.problem.quant.weight
        if operand is None:
            return stored.to(self.problem.dtype)
        extra = {what: self.weights.get(f"{name}_{what}") for what in ("zero_points", "g_idx")}
        mine = {what: None if t is None else t[expert] for what, t in extra.items()}
        scale = self.weights[f"{name}_scale"][expert]
        return dequantize(stored, scale, operand, dtype, **mine)


def workspace(problem: MoEProblem, assignments: int) -> BufferSpec:
    """Return the buffer of the gathered x and of z, which are large: new ones cause page faults.

    It has bytes: a view as floats that was made in inference mode is read-only outside it.
    """
    row = problem.hidden_size * (problem.dtype.itemsize + 4)
    return BufferSpec((_most_rows(problem, assignments) * row,), torch.uint8)


def _x_and_z(buffer: Tensor, x_RH: Tensor) -> tuple[Tensor, Tensor]:
    H, size = x_RH.shape[1], x_RH.dtype.itemsize
    rows = len(buffer) // (H * (size + 4))
    z, x = buffer[: rows * H * 4], buffer[rows * H * 4 : rows * H * (size + 4)]
    return x.view(x_RH.dtype).view(rows, H), z.view(torch.float32).view(rows, H)


def transient_bytes(problem: MoEProblem, assignments: int) -> int:
    """Return the bytes that `run` allocates in a call of at most ``assignments`` assignments."""
    p, H, W = problem, problem.hidden_size, problem.w13_rows
    activation = 0 if is_plain_silu(p.activation) else 14 * W
    loop = assignments * (4 * (3 * H + 2 * W) + activation) + _PIECE_BYTES
    at_once = _most_rows(p, assignments) * ((H + W) * p.dtype.itemsize + activation)
    index = 12 * 8 * (_most_rows(p, assignments) + p.num_local_experts)
    return max(loop, at_once) + index


def _most_rows(problem: MoEProblem, assignments: int) -> int:
    """Return the most rows of the gathered x, in the batched layout where weights allow it."""
    if problem.quant.weight is not None:
        return assignments
    return _BATCHED_ROWS * max(assignments, 2 * problem.num_local_experts)


# -- the choice ---------------------------------------------------------------------------------


def methods_for(problem: MoEProblem) -> tuple[str, ...]:
    """Return the methods that can run this problem's experts on this machine."""
    p, narrow = problem, problem.dtype != torch.float32
    methods = ["right", "left"] + ["native"] * (narrow and cpu_costs.onednn_enabled())
    if narrow or _has_onednn_fp32():
        methods.append("fp32")
    if p.quant.weight is None:
        methods.append("batched")
        sizes = (p.hidden_size, p.local_intermediate_size)
        if not p.has_bias and all(n * p.dtype.itemsize % 16 == 0 for n in sizes):
            methods.append("grouped")
    return tuple(methods)


class Choice:
    """The fastest method for each number of rows of an expert."""

    def __init__(self, costs: Costs, methods: Sequence[str]) -> None:
        seconds = {method: costs.by_rows(method) for method in methods}
        loops = [method for method in LOOPS if method in methods]
        best = [min((seconds[m][n], m) for m in loops) for n in range(cpu_costs.MOST_ROWS)]
        self._seconds, self._methods = [t for t, _ in best], [method for _, method in best]
        self._at_once = {method: seconds[method] for method in ALL_AT_ONCE if method in methods}
        self._source = costs.source

    def loop(self, rows: int, alone: bool) -> str:
        """Return the fastest method for one expert of ``rows`` rows.

        alone: no other thread runs experts. Otherwise no method may switch oneDNN off.
        """
        method = self._methods[min(rows, cpu_costs.MOST_ROWS) - 1]
        return method if alone or method != "native" else "right"

    def at_once(self, counts: Sequence[int], batched_fits: bool) -> str | None:
        """Return the method that runs all experts at once, or None if a loop is faster.

        counts: rows of every local expert. batched_fits: there is memory for the batched layout.
        """
        hit = [n for n in counts if n]
        seconds: dict[str | None, float] = {None: _total(self._seconds, hit)}
        if grouped := self._at_once.get("grouped"):
            seconds["grouped"] = _total(grouped, hit)
        if batched_fits and (batched := self._at_once.get("batched")):
            seconds["batched"] = len(counts) * _total(batched, [max(hit)])
        return min(seconds, key=lambda method: seconds[method])

    def __str__(self) -> str:
        m = self._methods
        starts = [n for n in range(1, len(m) + 1) if n == 1 or m[n - 1] != m[n - 2]]
        parts = ", ".join(f"'{m[n - 1]}' from {n}" for n in starts)
        return f"method by rows per expert: {parts} ({self._source})"


def _total(seconds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the seconds of all ``counts``; beyond the table, time grows with the rows."""
    most, last = len(seconds), seconds[-1]
    return sum([seconds[n - 1] if n <= most else last * n / most for n in counts])


_choices: dict[tuple[object, ...], Choice] = {}


def choice(problem: MoEProblem, may_time: bool = True) -> Choice | None:
    """Return the choice for a problem and the current number of threads.

    Returns None if it is not known and the methods must not be timed.
    """
    p, methods = problem, methods_for(problem)
    sizes = p.hidden_size, p.local_intermediate_size
    key = (p.dtype_name, *sizes, p.activation.name, p.has_bias, methods)
    full = (*key, torch.get_num_threads())
    if full not in _choices:
        costs = cpu_costs.find(key, partial(_timed, p, methods) if may_time else None)
        if costs is None:
            return None
        _choices[full] = Choice(costs, methods)
    return _choices[full]


def describe(problem: MoEProblem) -> str:
    """Return the choice as text for `explain`; an unknown machine is not timed."""
    if problem.device.type != "cpu":
        return ""
    found = choice(problem, may_time=False)
    return str(found) if found else "its methods are timed when weights are first packed"


def _timed(problem: MoEProblem, methods: Sequence[str]) -> tuple[Mapping[str, Points], bool]:
    """Time the methods on experts of the problem's sizes, or of a share of them; see `measure`."""
    p, H = problem, problem.hidden_size
    halves = p.w13_rows // p.local_intermediate_size
    most = max(32, _MAX_ELEMENTS // (H * (halves + 1)) // 32 * 32)
    inner = min(p.local_intermediate_size, most)
    nbytes = H * inner * (halves + 1) * p.dtype.itemsize
    count = max(2, min(256, _CYCLE_BYTES // nbytes))

    def made(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.full(shape, 0.01, dtype=dtype, device="cpu")

    named = {"w13": made(count, halves * inner, H), "w2": made(count, H, inner)}
    if p.has_bias:
        named |= {"w13_bias": made(count, halves * inner), "w2_bias": made(count, H)}
    experts, turn = Experts(p.replace(quant="none"), PackedWeights("", named)), 0

    def call_of(method: str, rows: int) -> tuple[Callable[[], object], int]:
        number = count if method in ALL_AT_ONCE else 1
        x, z = made(number * rows, H), made(number * rows, H, dtype=torch.float32)

        def some_experts() -> None:
            nonlocal turn
            for _ in range(_BURST):
                turn = (turn + 1) % count
                run_expert(method, experts, turn, x, z)

        if method == "grouped":
            count_L = torch.full((count,), rows, device="cpu")
            return partial(run_grouped, experts, x, count_L), count
        if method == "batched":
            return partial(run_batched, experts, x, z), count
        return some_experts, _BURST

    with torch.inference_mode():
        found, keep = cpu_costs.measure(methods, call_of)
    scale = p.local_intermediate_size / inner
    return {m: [(n, t * scale) for n, t in points] for m, points in found.items()}, keep


# -- methods -----------------------------------------------------------------------------------


def is_plain_silu(activation: Activation) -> bool:
    return activation.name == "silu" and activation.limit is None


def activate(h: Tensor, activation: Activation, dim: int = -1) -> Tensor:
    """Apply the activation along ``dim``; may overwrite h. A plain silu stays in h's dtype."""
    if is_plain_silu(activation):
        gate, up = h.chunk(2, dim=dim)
        return F.silu(gate, inplace=True).mul_(up)
    return apply_activation(h, activation, dim=dim)


def run_expert(method: str, experts: Experts, expert: int, x_nH: Tensor, z_nH: Tensor) -> None:
    """Run one expert on its rows and write z, fp32 and unweighted."""
    if method == "native":
        cpu_costs.without_onednn(partial(_right, _mm, experts, expert, x_nH, z_nH))
    elif method == "fp32":
        _right(_fp32, experts, expert, x_nH.float(), z_nH)
    elif method == "left":
        _left(experts, expert, x_nH, z_nH)
    else:
        _right(_mm, experts, expert, x_nH, z_nH)
    if (bias := experts.bias("w2")) is not None:
        z_nH += bias[expert]


def _right(
    product: Callable[[Tensor, Tensor], Tensor],
    experts: Experts,
    expert: int,
    x: Tensor,
    z: Tensor,
) -> None:
    """Compute x @ W.T by ``product`` of x and W.T, in x's dtype."""
    w13, w2 = experts.matrices(expert, x.dtype)
    h = product(x, w13.T)
    if (bias := experts.bias("w13")) is not None:
        h += bias[expert]
    z.copy_(product(activate(h, experts.problem.activation), w2.T))


def _left(experts: Experts, expert: int, x: Tensor, z: Tensor) -> None:
    w13, w2 = experts.matrices(expert, x.dtype)
    h = _mm(w13, x.T)
    if (bias := experts.bias("w13")) is not None:
        h += bias[expert, :, None]
    out = _mm(w2, activate(h, experts.problem.activation, dim=0))
    z[None].copy_(out.T[None])  # as 3-D: a 2-D transposing copy is single-threaded


_last_thread = 0


def _alone() -> bool:
    """Return whether the last call was in this thread. Without oneDNN, other threads are slow."""
    global _last_thread
    before, _last_thread = _last_thread, threading.get_ident()
    return before == _last_thread


def run_batched(experts: Experts, x_NH: Tensor, z_NH: Tensor) -> None:
    """Run all experts on the same number of rows each, in expert order."""
    w13, w2 = experts.weights["w13"], experts.weights["w2"]
    x, z = x_NH.view(len(w13), -1, x_NH.shape[1]), z_NH.view(len(w13), -1, z_NH.shape[1])
    h = torch.bmm(w13, x.mT)
    if (bias := experts.bias("w13")) is not None:
        h += bias[:, :, None]
    z.copy_(torch.bmm(w2, activate(h, experts.problem.activation, dim=1)).mT)
    if (bias := experts.bias("w2")) is not None:
        z += bias[:, None]


def run_grouped(experts: Experts, x_SH: Tensor, count_L: Tensor) -> Tensor:
    """Run all experts on expert-sorted rows, count_L of each, in a C++ loop: (S, H) fp32."""
    ends_L = count_L.cumsum(0, dtype=torch.int32)
    h = F.grouped_mm(x_SH, experts.weights["w13"].mT, offs=ends_L)
    act = activate(h, experts.problem.activation)
    return F.grouped_mm(act, experts.weights["w2"].mT, offs=ends_L).float()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    # torch recognizes a one-column matrix as contiguous only in the transposed form.
    out = a.new_empty(len(a), b.shape[1])
    torch.mm(b.T, a.T, out=out.T)
    return out


def _has_onednn_fp32() -> bool:
    return cpu_costs.onednn_enabled() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fp32(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w in fp32; a w of 16 bits is converted a few columns at a time."""
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear
    if _has_onednn_fp32():
        linear = _onednn_linear
    if w.dtype == torch.float32:
        return linear(x, w.T)
    out = x.new_empty(len(x), w.shape[1])
    step = max(1, _PIECE_BYTES // (4 * len(w)))
    piece = x.new_empty(min(step, w.shape[1]), len(w))
    for rows, columns in zip(torch.split(w.T, step), torch.split(out, step, dim=1), strict=True):
        columns.copy_(linear(x, piece[: len(rows)].copy_(rows)))
    return out


def _onednn_linear(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return y


# -- a call -------------------------------------------------------------------------------------


def run(
    experts: Experts,
    chosen: Choice,
    y_RH: Tensor,
    x_RH: Tensor,
    ids_RK: Tensor,
    weights_RK: Tensor,
    buffer: Tensor,
) -> None:
    """Write the weighted sum of each token's experts to y.

    ids: local, -1 for none. weights: fp32. buffer: as `workspace` describes it.
    """
    (R, K), L, alone = ids_RK.shape, experts.problem.num_local_experts, _alone()
    x_NH, z_NH = _x_and_z(buffer, x_RH)
    if R == 1:
        return _one_token(chosen.loop(1, alone), experts, y_RH, x_RH, ids_RK, weights_RK, z_NH)
    ids_S, order_S = torch.sort(ids_RK.reshape(-1), stable=True)
    count_L = torch.bincount(ids_S + 1, minlength=L + 1)
    skipped, *counts = count_L.tolist()
    count_L, ids_S, order_S = count_L[1:], ids_S[skipped:], order_S[skipped:]
    if len(ids_S) == 0:
        y_RH.zero_()
        return
    widest = max(counts)
    fits = L * widest <= _most_rows(experts.problem, len(ids_S))
    at_once = chosen.at_once(counts, batched_fits=fits)

    # Assignment s of the sorted ones is in row place_S[s] of x and z.
    place_S = torch.arange(len(ids_S), device="cpu")
    row_N = order_S // K
    if at_once == "batched":
        first_L = count_L.cumsum(0) - count_L
        place_S += (torch.arange(L, device="cpu") * widest - first_L)[ids_S]
        padded = row_N.new_full((L * widest,), int(row_N[0]))
        row_N = padded.index_copy_(0, place_S, row_N)
    x_NH = torch.index_select(x_RH, 0, row_N, out=x_NH[: len(row_N)])
    z_NH = z_NH[: len(row_N)]
    if at_once == "grouped":
        z_NH = run_grouped(experts, x_NH, count_L)
    elif at_once == "batched":
        run_batched(experts, x_NH, z_NH)
    else:
        end = 0
        for expert, rows in enumerate(counts):
            if rows:
                mine, end = slice(end, end + rows), end + rows
                run_expert(chosen.loop(rows, alone), experts, expert, x_NH[mine], z_NH[mine])

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
    z_NH: Tensor,
) -> None:
    """Run the experts of a single token, without operators that sort, gather and scatter."""
    used = [(k, expert) for k, expert in enumerate(ids_1K[0].tolist()) if expert >= 0]
    z_SH = z_NH[: len(used)]
    for row, (_, expert) in enumerate(used):
        run_expert(method, experts, expert, x_1H, z_SH[row : row + 1])
    if len(used) < ids_1K.shape[1]:
        weights_1K = weights_1K[:, [k for k, _ in used]]
    y_1H.copy_(weights_1K @ z_SH)
