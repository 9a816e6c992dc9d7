"""Experts whose rows have the same bits in every call: products of fixed blocks of rows.

A library chooses the kernel of a product by the number of its rows, so a row's bits may depend on
the others. Here an expert's rows run in blocks of `_BLOCK` rows, the last one filled with zeros.
Blocks of other sizes are used only if a check on this machine, with the sizes of this problem,
gave every row the bits that it has in a block of `_BLOCK`: so sizes change the time, and no bits.

Shape suffixes beyond the kernel's: B rows of a block; W rows of w13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moekit.backends import cpu_costs
from moekit.backends.cpu_experts import Experts, activate, is_plain_silu
from moekit.backends.sorted_rows import SortedRows
from moekit.problem import Activation, MoEProblem

_BLOCK = 16
_OTHERS = (256, 64, 4, 1)
_MOST = max(_OTHERS)
# torch runs elementwise operations of fewer elements in one loop, row by row if rows are strided.
_GRAIN = 32768
_ALIGNED = 64  # bytes; libraries may choose kernels by the alignment of their operands

Sizes = tuple[int, ...]  # descending
_Product = Callable[[Tensor, Tensor], Tensor]  # (B, K), (N, K) -> (B, N)


def cover(rows: int, sizes: Sizes) -> Iterator[int]:
    """Yield sizes of blocks that hold ``rows`` rows together; the last may be too large."""
    while rows > 0:
        fits = next((size for size in sizes if size <= rows), 0)
        larger = min((size for size in sizes if size >= rows), default=0)
        size = larger if 0 < larger <= _BLOCK or not fits else fits
        yield size
        rows -= size


def run(experts: Experts, sizes: Sizes, y_RKH: Tensor, x_RH: Tensor, ids_RK: Tensor) -> None:
    """Write the unweighted output of each assignment with an expert to y.

    Args:
        experts: the local experts.
        sizes: of blocks, from `sizes_for`.
        y_RKH: in any float dtype.
        x_RH: in the problem's dtype.
        ids_RK: local ids, -1 for none.
    """
    rows, y_AH = SortedRows.of(ids_RK, experts.problem), y_RKH.view(-1, y_RKH.shape[2])
    for expert, run in rows.runs():
        left_S = rows.order_S[run]
        w13, w2 = (_aligned(w) for w in experts.matrices(expert, experts.problem.dtype))
        for size in cover(len(left_S), sizes):
            mine, left_S = left_S[:size], left_S[size:]
            x_BH = x_RH.new_zeros((size, x_RH.shape[1]))
            x_BH[: len(mine)] = x_RH[mine // rows.top_k]
            z_BH = _mlp(experts, expert, w13, w2, x_BH)[: len(mine)]
            y_AH[mine] = _in_range(experts, expert, x_BH, z_BH).to(y_AH.dtype)


def transient_bytes(problem: MoEProblem, rows: int) -> int:
    """Return the bytes that `run` allocates for calls of ``rows`` rows, without the weights."""
    p = problem
    block = min(_MOST, max(_BLOCK, rows))  # a token names an expert once
    wide = 4 * p.hidden_size + 2 * p.w13_rows + 2 * p.local_intermediate_size
    return 4 * block * wide + 8 * 8 * rows * p.top_k + 64 * p.num_local_experts


def _aligned(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy: an expert's alignment depends on its place on the rank."""
    return matrix.clone() if matrix.data_ptr() % _ALIGNED else matrix


def _mlp(experts: Experts, expert: int, w13: Tensor, w2: Tensor, x_BH: Tensor) -> Tensor:
    h_BW = _product(x_BH, w13)
    if (bias := experts.bias("w13")) is not None:
        h_BW += bias[expert]
    z_BH = _product(_activated(h_BW, experts.problem.activation), w2)
    return z_BH if (bias := experts.bias("w2")) is None else z_BH.float() + bias[expert]


def _product(x_BK: Tensor, w_NK: Tensor) -> Tensor:
    return torch.mm(x_BK, w_NK.T)


def _activated(h_BW: Tensor, activation: Activation) -> Tensor:
    """Return the activation of contiguous rows, each computed in the same way.

    On the CPU, the last elements of a loop have other bits than those that fill a vector, and
    threads divide large loops anywhere. So a loop is a row, or at most `_GRAIN` elements of strided
    rows.
    """
    if h_BW.device.type != "cpu":
        return activate(h_BW, activation).contiguous()
    rows = max(1, _GRAIN // h_BW.shape[1]) if is_plain_silu(activation) else 1
    parts: Sequence[Tensor] = torch.split(h_BW, rows)
    return torch.cat([activate(part, activation) for part in parts])


def _in_range(experts: Experts, expert: int, x_BH: Tensor, z_BH: Tensor) -> Tensor:
    """Compute rows again in fp32, each by itself, if float16 made them infinite on the way."""
    finite_B = z_BH.isfinite().all(dim=1)
    if experts.problem.dtype != torch.float16 or bool(finite_B.all()):
        return z_BH
    wide = experts.in_fp32()
    w13, w2 = (_aligned(w) for w in wide.matrices(expert, torch.float32))
    z_BH = z_BH.float()
    for row in (~finite_B).nonzero()[:, 0].tolist():
        z_BH[row] = _mlp(wide, expert, w13, w2, x_BH[row : row + 1].float().clone())[0]
    return z_BH


# -- which sizes give the same bits -------------------------------------------------------------

_known: dict[tuple[object, ...], Sizes] = {}


def sizes_for(problem: MoEProblem, device: torch.device) -> Sizes:
    """Return the sizes of blocks that give a row the same bits; check them if they are unknown."""
    p = problem
    key = (
        p.dtype_name, p.hidden_size, p.w13_rows, p.local_intermediate_size, str(device),
        torch.get_num_threads(), cpu_costs.capability(), torch.get_float32_matmul_precision(),
    )  # fmt: skip
    if key not in _known:
        like = torch.empty(0, dtype=p.dtype, device=device)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            first = same_bits_sizes(_product, p.hidden_size, p.w13_rows, like)
            second = same_bits_sizes(_product, p.local_intermediate_size, p.hidden_size, like)
        both = {1} if {1} in (first, second) else first & second
        _known[key] = tuple(sorted(both, reverse=True))
    return _known[key]


def same_bits_sizes(product: _Product, inner: int, columns: int, like: Tensor) -> set[int]:
    """Return the sizes of blocks in which a row has the bits that it has in `_BLOCK` rows.

    If the place in a block of `_BLOCK` rows changes the bits, rows run one by one. The sums cancel
    exactly, so that a result is what its order rounds off, and orders differ in any dtype.

    Args:
        product: (B, inner) @ (columns, inner).T -> (B, columns), which is checked.
        like: has the dtype and the device.
    """
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(inner, generator=draw)
    w, x = (_cancelling(n, order, sign, draw).to(like) for n, sign in ((columns, -1), (_MOST, 1)))
    first = x[:_BLOCK]
    wanted = product(first.clone(), w)
    for shift in range(1, _BLOCK):
        if not torch.equal(product(first.roll(shift, 0), w).roll(-shift, 0), wanted):
            return {1}

    def in_blocks(size: int, count: int) -> Tensor:
        return torch.cat([product(x[at : at + size].clone(), w) for at in range(0, count, size)])

    # 64 rows are enough to put a row into every place of a small block.
    wanted = in_blocks(_BLOCK, _MOST)
    counts = {size: _MOST if size > _BLOCK else 4 * _BLOCK for size in _OTHERS}
    same = {size for size, n in counts.items() if torch.equal(in_blocks(size, n), wanted[:n])}
    return same | {_BLOCK}


def _cancelling(rows: int, order: Tensor, sign: int, draw: torch.Generator) -> Tensor:
    """Return rows whose second half of columns, in ``order``, is ``sign`` times the first."""
    half = len(order) // 2
    powers = torch.randint(-4, 5, (rows, half), generator=draw, device="cpu")
    values = torch.rand(rows, half, generator=draw, device="cpu").add_(1).sub_(
        3 * torch.randint(0, 2, (rows, half), generator=draw, device="cpu")
    ).mul_(torch.exp2(powers.float())).bfloat16().float()  # fmt: skip
    out = torch.zeros(rows, len(order), device="cpu")
    out[:, order[:half]], out[:, order[half : 2 * half]] = values, sign * values
    return out
