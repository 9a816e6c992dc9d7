"""Kernels for expert ids, one launch each: what is sent where, and what that is here.

They stand between two library calls of 10 to 20 microseconds, so launches count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def local_ids(ids_RK: Tensor, first: int, num_local: int, counts_G: Tensor | None = None) -> Tensor:
    """Global ids (R, K) int32 -> local ids, -1 for experts of other ranks and for no expert.

    counts_G: int32, how many of the R / G rows from each source rank are real; the ids of the
    others may be anything.
    """
    out = torch.empty_like(ids_RK)
    total = ids_RK.numel()
    if total:
        per_source = total if counts_G is None else total // counts_G.numel()
        _local_ids[(triton.cdiv(total, _BLOCK),)](
            ids_RK, counts_G, out, total, per_source, ids_RK.shape[1], first, num_local,
            COUNTED=counts_G is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def reroute(ids_TK: Tensor, nowhere: int) -> Tensor:
    """Ids (T, K) int32 without -1: such a slot repeats an expert of its token.

    A token without any expert gets ``nowhere``.
    """
    out = torch.empty_like(ids_TK)
    tokens, slots = ids_TK.shape
    if tokens:
        padded = triton.next_power_of_2(slots)
        block = max(1, _BLOCK // padded)
        _reroute[(triton.cdiv(tokens, block),)](
            ids_TK, out, tokens, nowhere, SLOTS=slots, PADDED=padded, BLOCK=block
        )
    return out


@triton.jit(do_not_specialize=["total", "per_source", "first", "num_local"])
def _local_ids(
    ids_ptr, counts_ptr, out_ptr, total, per_source, slots, first, num_local,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    expert = tl.load(ids_ptr + i, mask=inside, other=-1) - first
    here = (expert >= 0) & (expert < num_local)
    if COUNTED:
        count = tl.load(counts_ptr + i // per_source, mask=inside, other=0)
        here = here & ((i % per_source) // slots < count)
    tl.store(out_ptr + i, tl.where(here, expert, -1), mask=inside)


@triton.jit(do_not_specialize=["tokens", "nowhere"])
def _reroute(
    ids_ptr, out_ptr, tokens, nowhere,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    slot = tl.arange(0, PADDED)[None, :]
    inside = (token < tokens) & (slot < SLOTS)
    ids = tl.load(ids_ptr + token * SLOTS + slot, mask=inside, other=-1)
    some = tl.max(ids, axis=1, keep_dims=True)
    some = tl.where(some < 0, nowhere, some)
    tl.store(out_ptr + token * SLOTS + slot, tl.where(ids < 0, some, ids), mask=inside)
