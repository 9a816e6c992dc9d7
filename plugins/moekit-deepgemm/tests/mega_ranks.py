"""DeepGEMM's layer in plain torch, and the fused kernel over it, for rank processes.

Like the library it keeps tokens in a buffer that all ranks map and that no call clears.
"""

from __future__ import annotations

from types import SimpleNamespace

import standin
import torch
import torch.nn.functional as F
import triton_interpreter  # noqa: F401 (patches triton before the kernels are imported)
from moekit_deepgemm import library
from moekit_deepgemm.mega import MegaKernel
from torch.utils._python_dispatch import _disable_current_modes
from vendor_stand_ins import exchange

from moekit.problem.quant import SCHEMES
from moekit.problem.quantize import dequantize, quantize

_BLOCK = SCHEMES["fp8_block"]
_TOKENS = 384  # the library rounds the capacity up to this


class _Buffer:
    def __init__(self, group, experts, capacity, top_k, hidden, inner) -> None:
        self.group, self.experts, rows = group, experts, -(-capacity // _TOKENS) * _TOKENS
        shapes = {
            "topk_idx": (top_k, torch.int64), "x_sf": (hidden // 128, torch.float32),
            "topk_weights": (top_k, torch.float32), "x": (hidden, torch.float8_e4m3fn),
        }  # fmt: skip
        nbytes = [rows * columns * dtype.itemsize for columns, dtype in shapes.values()]
        self.buffer = torch.full((sum(nbytes),), -1, dtype=torch.int8, device="cpu")  # NaN
        parts = self.buffer.split(nbytes)
        for (name, (columns, dtype)), part in zip(shapes.items(), parts, strict=True):
            setattr(self, name, part.view(dtype).view(rows, columns))
        self.capacity = rows

    def destroy(self) -> None:
        self.group = None


def get_symm_buffer_for_sm90_mega_moe(*sizes) -> _Buffer:
    return _Buffer(*sizes)


def fp8_mega_moe(y, l1_weights, l2_weights, sym_buffer, *, activation_clamp=None) -> None:
    b, T = sym_buffer, len(y)
    assert b.group is not None, "the buffer is destroyed"
    assert y.dtype == torch.bfloat16 and y.is_contiguous() and T <= b.capacity
    for w, scale in (l1_weights, l2_weights):
        assert w.dtype == torch.float8_e4m3fn and w.is_contiguous() and scale.is_contiguous()
        assert scale.shape == (len(w), w.shape[1] // 128, w.shape[2] // 128)
    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        mine = (b.x[:T].view(torch.uint8), b.x_sf[:T], b.topk_idx[:T], b.topk_weights[:T])
        sent = exchange(b.group, *mine)
        rank, E = b.group.rank(), b.experts // b.group.size()
        weights = _undone(*l1_weights), dequantize(*l2_weights, _BLOCK.weight)
        back = [_experts(*each, rank * E, E, *weights, activation_clamp) for each in sent]
        total = torch.zeros(y.shape, dtype=torch.float32, device="cpu")
        for rows in exchange(b.group, *back):
            total += rows[rank]
        y.copy_(total)


def _undone(w13, scale) -> torch.Tensor:
    """Undo the packing, in which 8 gate rows and 8 up rows alternate."""
    L, rows, columns = w13.shape
    turns = w13.view(torch.uint8).view(L, rows // 16, 2, 8, columns).transpose(1, 2)
    plain = turns.reshape(L, rows, columns).view(w13.dtype)
    return dequantize(plain, scale, _BLOCK.weight)


def _experts(x, x_sf, ids, topk_weights, first, E, w13, w2, clamp) -> torch.Tensor:
    x = dequantize(x.view(torch.float8_e4m3fn), x_sf, _BLOCK.activation)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = (ids == first + e).nonzero(as_tuple=True)
        if not len(t):
            continue
        gate, up = (x[t] @ w13[e].T).chunk(2, 1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        a = F.silu(gate) * up * topk_weights[t, k, None]
        a = dequantize(*quantize(a, _BLOCK.activation, None, None), _BLOCK.activation)
        out.index_add_(0, t, (a @ w2[e].T).bfloat16().float())
    return out


class Mega(MegaKernel):
    pass


if not torch.cuda.is_available():
    library.load = lambda: SimpleNamespace(**{**vars(standin), **globals()})
