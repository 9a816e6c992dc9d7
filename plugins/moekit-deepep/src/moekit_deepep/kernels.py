"""A kernel for rows that no token was sent to."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def clear_unused(ids_RK: Tensor, ends_G: Tensor) -> None:
    """Set the ids of row ``ends_G[-1]`` (int32, known on the device only) and later rows to -1."""
    total = ids_RK.numel()
    if total:
        _clear_unused[(triton.cdiv(total, _BLOCK),)](
            ids_RK, ends_G, ends_G.numel() - 1, total, ids_RK.shape[1], BLOCK=_BLOCK
        )


@triton.jit(do_not_specialize=["last", "total"])
def _clear_unused(ids_ptr, ends_ptr, last, total, slots, BLOCK: tl.constexpr):
    begin = tl.load(ends_ptr + last) * slots
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unused = (i >= begin) & (i < total)
    tl.store(ids_ptr + i, tl.full((BLOCK,), -1, ids_ptr.dtype.element_ty), mask=unused)
