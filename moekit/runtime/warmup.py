"""Calls that compile and allocate what later calls need."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch

from moekit.contract import PackedWeights, Routing
from moekit.runtime.checks import device_of

logger = logging.getLogger("moekit")


def warm_up(
    kernel: Any,
    weights: PackedWeights,
    num_tokens: int,
    ids_dtype: torch.dtype | None = None,
    above: int = 0,
) -> None:
    """Do as `ModularKernel.warmup` says."""
    powers = (1 << n for n in range(num_tokens.bit_length()))
    sizes = {*powers, *kernel.experts.largest_calls(num_tokens)}
    if (group := kernel.dispatcher.group) is not None:
        from moekit.runtime.agreement import exchange

        # Ranks with one expert more may name other sizes, and all must make the same calls.
        mine = " ".join(map(str, sizes))
        for said in exchange(f"warm up with {num_tokens} tokens", mine, group):
            sizes.update(map(int, said.split()))
    members = getattr(kernel.experts, "members", (kernel.experts,))
    # Otherwise a library times its kernels in these calls alone.
    if all(isinstance(member.tuning(), nullcontext) for member in members):
        sizes = {size for size in sizes if size > above} | {num_tokens}
    taken = kernel.dispatcher.spec.ids_dtype
    dtypes = [torch.int64, torch.int32] if taken == "any" else [getattr(torch, taken)]
    dtypes = [dtype for dtype in dtypes if dtype == ids_dtype] or dtypes
    with kernel.experts.tuning():
        # The largest first: the workspace grows once, and too little memory fails at once.
        for step, tokens in enumerate(sorted(sizes, reverse=True)):
            begin = time.perf_counter()
            for dtype in dtypes:  # kernels compile for each dtype
                _random_call(kernel, weights, dtype, tokens)
            if (seconds := time.perf_counter() - begin) > 1:
                logger.info("moekit: warm-up %d of %d (%d tokens) took %.1f s",
                            step + 1, len(sizes), tokens, seconds)  # fmt: skip


def _random_call(kernel: Any, weights: PackedWeights, dtype: torch.dtype, tokens: int) -> None:
    p, device = kernel.problem, device_of(weights)
    draw = torch.Generator(device).manual_seed(0)  # the caller's random state stays as it is
    x = torch.randn(tokens, p.hidden_size, dtype=p.dtype, device=device, generator=draw)
    ids = torch.arange(tokens * p.top_k, device=device) % p.num_physical_experts
    ids = ids.to(dtype).view(tokens, p.top_k)
    ones = torch.ones_like(ids, dtype=torch.float32)
    adapter_ids = None
    if weights.adapters is not None:
        adapter_ids = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    kernel(x, weights, Routing(ones, ids, max_tokens=tokens, adapter_ids=adapter_ids))
