"""The `torch` experts: fast everywhere torch runs, with nothing else installed.

Shape suffixes beyond the kernel's: S sorted (row, slot) pairs, ordered by expert; N experts' rows
in a slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moekit import quant
from moekit.activation import Activation, apply_activation
from moekit.kernel import BufferSpec, Dispatched, PackedWeights, PermuteExpertsUnpermute
from moekit.problem import MoEProblem
from moekit.weights import ExpertWeights

# The cost model that chooses between one GEMM per expert and one padded batched GEMM on the CPU,
# fitted on a 2-core AMX machine: what one more GEMM call costs, in bytes of weights that could be
# read meanwhile; rows of a 16-bit GEMM that cost as much as reading its weights; rows per expert
# that come for free; and the most slab rows per routed row, or per expert, that memory may hold.
CALL_BYTES = 600_000
ROWS_PER_READ = 64
FREE_ROWS = 32
SLAB_ROWS_PER_PAIR, SLAB_ROWS_PER_EXPERT = 4, 8
# Experts this small are worth a call per row up to that many (row, slot) pairs.
SMALL_EXPERT, FEW_PAIRS = 3 * CALL_BYTES, 4
# fp32 rows per expert between which the weights-left GEMM is the faster one.
WEIGHTS_LEFT_FP32 = range(10, 49)


class TorchExperts(PermuteExpertsUnpermute):
    """STANDARD, reducing: rows sorted by expert, one pair of matrix products per expert.

    Quantized weights are dequantized one expert at a time, and activations stay unquantized: the
    arithmetic is that of the problem's dtype. In float16 an intermediate value above 65504 is
    infinite, although its router weight or the sum over K may bring it back into range: rows whose
    result is not finite are computed again in float32.
    """

    def pack(self, weights: ExpertWeights) -> PackedWeights:
        return PackedWeights(self.spec.name, *weights.by_expert())

    def workspace(self, rows: int) -> Sequence[BufferSpec]:
        p = self.problem
        if p.device.type != "cpu":
            return ()
        pairs = rows * p.top_k
        if p.dtype != torch.float32:
            slab = SLAB_ROWS_PER_EXPERT * p.num_local_experts
            pairs = max(SLAB_ROWS_PER_PAIR * pairs, slab)
        per_pair = (2 * p.hidden_size + p.w13_rows) * p.dtype.itemsize + 4 * p.hidden_size
        return (BufferSpec((pairs * per_pair + 256,), torch.uint8),)

    def transient_bytes(self, rows: int) -> int:
        p = self.problem
        half = p.dtype == torch.float16  # perhaps all rows are computed again in fp32
        size = 4 if half else p.dtype.itemsize
        pairs = rows * p.top_k
        activations = pairs * (p.hidden_size * (3 * size + 4) + p.w13_rows * (size + 8))
        weights = p.hidden_size * max(p.w13_rows, p.local_intermediate_size)
        dequantized = 4 * weights if half else 0
        if p.quant.weight is not None:
            dequantized = weights * (12 + 2 * size)
        if p.quant.weight is not None and p.quant.weight.packed:
            dequantized += weights * 14  # unpacked, zero points, g_idx's indices
        index = 12 * 8 * (pairs + p.num_local_experts * (1 + SLAB_ROWS_PER_EXPERT))
        return activations + index + 2 * 4 * rows * p.hidden_size + dequantized

    def apply(
        self,
        y: Tensor,
        tokens: Dispatched,
        weights: PackedWeights,
        workspace: Sequence[Tensor],
    ) -> None:
        assert tokens.topk_ids is not None and tokens.topk_weights is not None
        x = tokens.x
        if tokens.x_scale is not None:
            assert self.problem.quant.activation is not None
            x = quant.dequantize(
                x, tokens.x_scale, self.problem.quant.activation, self.problem.dtype
            )
        ids, topk_weights = tokens.topk_ids, tokens.topk_weights
        if x.device.type == "cpu":
            _CpuCall(self.problem, weights, _Arena(workspace[0])).run(y, x, ids, topk_weights)
        else:
            _on_any_device(self.problem, weights, y, x, ids, topk_weights)
        if y.dtype == torch.float16 and not math.isfinite(y.sum(dtype=torch.float32).item()):
            row = (~y.isfinite().all(dim=1)).nonzero()[:, 0]
            wide, again = self.problem.replace(dtype=torch.float32), y[row]
            _on_any_device(wide, weights, again, x[row].float(), ids[row], topk_weights[row])
            y[row] = again


def _matrix(problem: MoEProblem, weights: PackedWeights, name: str, expert: int) -> Tensor:
    matrix, operand = weights[name][expert], problem.quant.weight
    if operand is None:
        return matrix if matrix.dtype == problem.dtype else matrix.to(problem.dtype)
    zero_points, g_idx = (weights.get(f"{name}_{what}") for what in ("zero_points", "g_idx"))
    return quant.dequantize(
        matrix,
        weights[f"{name}_scale"][expert],
        operand,
        problem.dtype,
        zero_points=None if zero_points is None else zero_points[expert],
        g_idx=None if g_idx is None else g_idx[expert],
    )


def _on_any_device(
    problem: MoEProblem,
    weights: PackedWeights,
    y_RH: Tensor,
    x_RH: Tensor,
    ids_RK: Tensor,
    topk_weights_RK: Tensor,
) -> None:
    """argsort, two grouped GEMMs (no host synchronization), inverse permutation, fp32 sum."""
    (R, H), K, L = x_RH.shape, ids_RK.shape[1], problem.num_local_experts
    ids_S, order_S = torch.sort(torch.where(ids_RK < 0, L, ids_RK).view(-1), stable=True)
    ends_L = torch.searchsorted(
        ids_S, torch.arange(L, device=ids_S.device, dtype=ids_S.dtype), right=True
    ).int()
    x_SH = x_RH[order_S // K]
    if _has_grouped_mm(problem):
        bias_row = ids_S.clamp(max=L - 1)
        h = F.grouped_mm(x_SH, weights["w13"].mT, offs=ends_L)
        if (bias := weights.get("w13_bias")) is not None:
            h = h + bias[bias_row]
        act = _activate(h, problem.activation)
        z_SH = F.grouped_mm(act, weights["w2"].mT, offs=ends_L)
        if (bias := weights.get("w2_bias")) is not None:
            z_SH = z_SH + bias[bias_row]
    else:
        z_SH = _expert_loop(problem, weights, x_SH, ends_L.tolist())
    # Rows past ends_L[-1] were never written: select, never multiply by zero.
    weighted = torch.where(
        ids_S[:, None] < L, z_SH.float() * topk_weights_RK.reshape(-1)[order_S, None], 0.0
    )
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(R * K, device=order_S.device)
    y_RH.copy_(weighted[back_S].view(R, K, H).sum(dim=1))


def _has_grouped_mm(problem: MoEProblem) -> bool:
    """torch's grouped GEMM: bf16, 16-byte rows, compute capability 8.0 or later."""
    sizes = (problem.hidden_size, problem.local_intermediate_size)
    return (
        problem.device.type == "cuda"
        and (problem.device.capability or (0, 0)) >= (8, 0)
        and problem.dtype == torch.bfloat16
        and problem.quant.weight is None
        and all(size % 8 == 0 for size in sizes)
    )


def _expert_loop(
    problem: MoEProblem, weights: PackedWeights, x_SH: Tensor, ends: Sequence[int]
) -> Tensor:
    z_SH, start = torch.empty_like(x_SH), 0
    for expert, end in enumerate(ends):
        if end > start:
            h = x_SH[start:end] @ _matrix(problem, weights, "w13", expert).T
            if (bias := weights.get("w13_bias")) is not None:
                h += bias[expert]
            act = _activate(h, problem.activation)
            torch.mm(act, _matrix(problem, weights, "w2", expert).T, out=z_SH[start:end])
            if (bias := weights.get("w2_bias")) is not None:
                z_SH[start:end] += bias[expert]
            start = end
    return z_SH


def _activate(h: Tensor, activation: Activation, dim: int = -1) -> Tensor:
    """Activation along ``dim``; may overwrite h. The plain silu gate stays in h's dtype."""
    if activation.name == "silu" and activation.limit is None:
        gate, up = h.chunk(2, dim=dim)
        return F.silu(gate, inplace=True).mul_(up)
    return apply_activation(h, activation, dim=dim)


class _Arena:
    """Consecutive 64-byte aligned pieces of one byte buffer: fresh big tensors page-fault anew."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.used = buffer, 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start, nbytes = self.used, math.prod(shape) * dtype.itemsize
        assert start + nbytes <= self.buffer.nbytes, "workspace() promised too little"
        self.used = (start + nbytes + 63) & -64
        return self.buffer[start : start + nbytes].view(dtype).view(tuple(shape))


class _CpuCall:
    """One call on the CPU.

    oneDNN repacks the right-hand matrix of every product. So 16-bit products (and fp32 ones of a
    few rows) put the weights left, and everything between the two GEMMs is feature-major. Where
    nearly all experts are hit, one padded batched GEMM over a slab replaces a call per expert.
    """

    def __init__(self, problem: MoEProblem, weights: PackedWeights, arena: _Arena) -> None:
        self.problem, self.weights, self.arena = problem, weights, arena
        self.expert_bytes = problem.hidden_size * problem.dtype.itemsize
        self.expert_bytes *= problem.w13_rows + problem.local_intermediate_size

    def run(self, y_RH: Tensor, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> None:
        (R, H), K, L = x_RH.shape, ids_RK.shape[1], self.problem.num_local_experts
        if R == 1 or (R * K <= FEW_PAIRS and self.expert_bytes < SMALL_EXPERT):
            for row in range(R):
                one = slice(row, row + 1)
                self._one_row(y_RH[one], x_RH[one], ids_RK[one], weights_RK[one])
            return
        ids_S, order_S = torch.sort(ids_RK.reshape(-1), stable=True)
        skipped, *counts = torch.bincount(ids_S + 1, minlength=L + 1).tolist()
        ids_S, order_S = ids_S[skipped:], order_S[skipped:]
        if len(ids_S) == 0:
            y_RH.zero_()
            return
        widest = max(counts)
        slab = self._slab_pays(counts, widest)

        # Pair s of the sorted pairs lives in row slot_S[s] of x and z.
        slot_S = torch.arange(len(ids_S))
        row_N = order_S // K
        if slab:
            first_L = torch.tensor([0, *counts[:-1]]).cumsum(0)
            slot_S += (torch.arange(L) * widest - first_L)[ids_S]
            padded = row_N.new_full((L * widest,), int(row_N[0]))
            row_N = padded.index_copy_(0, slot_S, row_N)
        x_NH = torch.index_select(x_RH, 0, row_N, out=self.arena.take((len(row_N), H), x_RH.dtype))
        if not slab and self._grouped_pays(counts):
            z_NH = self._grouped(x_NH, counts)
        else:
            z_NH = self.arena.take(x_NH.shape, torch.float32)
            if slab:
                self._experts(slice(None), x_NH.view(L, -1, H), z_NH.view(L, -1, H))
            else:
                end = 0
                for expert, rows in enumerate(counts):
                    if rows:
                        start, end = end, end + rows
                        self._experts(expert, x_NH[start:end], z_NH[start:end])

        # embedding_bag: gather, weight and sum over K in one threaded, ordered fp32 pass.
        slot_RK = torch.empty(R * K, dtype=torch.int64).index_copy_(0, order_S, slot_S)
        weight_RK, bag_R = weights_RK.reshape(-1), torch.arange(0, R * K, K)
        if skipped:
            used_RK = ids_RK >= 0
            per_row = used_RK.sum(1)
            bag_R = per_row.cumsum(0) - per_row
            slot_RK, weight_RK = slot_RK[used_RK.view(-1)], weight_RK[used_RK.view(-1)]
        y_RH.copy_(torch.embedding_bag(z_NH, slot_RK, bag_R, False, 0, False, weight_RK)[0])

    def _one_row(self, y_1H: Tensor, x_1H: Tensor, ids_1K: Tensor, weights_1K: Tensor) -> None:
        """Nothing to sort or gather."""
        used = [(slot, expert) for slot, expert in enumerate(ids_1K[0].tolist()) if expert >= 0]
        used_bytes = self.arena.used
        z_KH = self.arena.take((len(used), x_1H.shape[1]), torch.float32)
        for row, (_, expert) in enumerate(used):
            self._experts(expert, x_1H, z_KH[row : row + 1])
        if len(used) < ids_1K.shape[1]:
            weights_1K = weights_1K[:, [slot for slot, _ in used]]
        y_1H.copy_(torch.mm(weights_1K, z_KH))
        self.arena.used = used_bytes

    def _slab_pays(self, counts: Sequence[int], widest: int) -> bool:
        if self.problem.dtype == torch.float32 or self.problem.quant.weight is not None:
            return False  # bound by arithmetic, or dequantized expert by expert
        L, pairs, rows = len(counts), sum(counts), len(counts) * widest
        if rows > max(SLAB_ROWS_PER_PAIR * pairs, SLAB_ROWS_PER_EXPERT * L):
            return False
        hit = L - counts.count(0)
        padding = max(rows, FREE_ROWS * L) - max(pairs, FREE_ROWS * L)
        slab_cost = self.expert_bytes * (L + padding / ROWS_PER_READ)
        return slab_cost < hit * (self.expert_bytes + 2 * CALL_BYTES)

    def _grouped_pays(self, counts: Sequence[int]) -> bool:
        """The loop's own GEMMs, looped over in C++."""
        p = self.problem
        mean = sum(counts) / (len(counts) - counts.count(0))
        small = self.expert_bytes < SMALL_EXPERT
        weights_left = WEIGHTS_LEFT_FP32.start <= mean < WEIGHTS_LEFT_FP32.stop and not small
        return (
            p.dtype == torch.float32
            and p.quant.weight is None
            and not p.has_bias
            and p.hidden_size % 4 == 0
            and p.local_intermediate_size % 4 == 0
            and not weights_left
        )

    def _grouped(self, x_SH: Tensor, counts: Sequence[int]) -> Tensor:
        ends_L = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        h = F.grouped_mm(x_SH, self.weights["w13"].mT, offs=ends_L)
        act = _activate(h, self.problem.activation)
        return F.grouped_mm(act, self.weights["w2"].mT, offs=ends_L)

    def _experts(self, which: int | slice, x: Tensor, z: Tensor) -> None:
        """z (..., n, H) fp32 from x (..., n, H), for one expert (2-D) or all of them (3-D)."""
        p, used = self.problem, self.arena.used
        if isinstance(which, int):
            w13, w2 = (_matrix(p, self.weights, name, which) for name in ("w13", "w2"))
        else:
            w13, w2 = self.weights["w13"], self.weights["w2"]
        biases = (self.weights.get("w13_bias"), self.weights.get("w2_bias"))
        b13, b2 = (None if b is None else b[which] for b in biases)
        *lead, n, _ = x.shape
        if x.dtype != torch.float32 or n in WEIGHTS_LEFT_FP32:
            h = _product(w13, x.mT, self.arena.take((*lead, w13.shape[-2], n), x.dtype))
            if b13 is not None:
                h += b13[..., None]
            act = _activate(h, p.activation, dim=-2)
            out = _product(w2, act, self.arena.take((*lead, w2.shape[-2], n), x.dtype))
            z[None].copy_(out.mT[None])  # as 3-D: a 2-D transposing copy is single-threaded
        else:
            h = _product(x, w13.mT, self.arena.take((*lead, n, w13.shape[-2]), x.dtype))
            if b13 is not None:
                h += b13
            _product(_activate(h, p.activation), w2.mT, z)
        if b2 is not None:
            z += b2[..., None, :]
        self.arena.used = used  # the next expert reuses it, still warm in the cache


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    if a.dim() == 3:
        return torch.bmm(a, b, out=out)
    # The transposed form: only so does torch see a one-column matrix as contiguous already.
    torch.mm(b.mT, a.mT, out=out.mT)
    return out
