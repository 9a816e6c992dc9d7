"""Which plans can compute a problem, and MOEKIT_TRITON_PLAN, which pins one for every call."""

from __future__ import annotations

import os
from collections.abc import Iterator

from moekit_kernels.numerics import SCALE_GROUP

from moekit.errors import InvalidInput
from moekit.plugin import MoEProblem

from .capabilities import (
    BLOCKS_M,
    PACKED_BLOCK_M,
    fusable,
    operand_bits,
    specializable,
    tma_possible,
)
from .kernels.tiles import CHUNK, GemmTile, SortedTile, SpecializedTile
from .plans import KINDS, Batched, Direct, DotProducts, Gathered, LaunchPlan, Sorted, plan_from_text

PLAN_VARIABLE = "MOEKIT_TRITON_PLAN"
_EXAMPLES = (
    "'dot_products: 2 rows w4 | 4 rows w8' or 'gathered: 64x64x64 w4 s4 | 64x128x64 w4 s4, fused'"
)


def pinned_plan(problem: MoEProblem, *, batched: bool) -> LaunchPlan | None:
    """Return the plan that the variable pins, None if it is unset.

    Raises InvalidInput for a text that is not a plan, or a plan that cannot compute ``problem``.
    """
    text = os.environ.get(PLAN_VARIABLE, "").strip()
    if not text:
        return None
    try:
        plan = plan_from_text(text)
    except ValueError as error:
        raise InvalidInput(
            f"{PLAN_VARIABLE}={text!r}: {error}; expected one of {', '.join(KINDS)} with its two "
            f"tiles, as explain and the debug log print them, such as {_EXAMPLES}"
        ) from error
    if reasons := list(misfits(plan, problem, batched)):
        raise InvalidInput(
            f"{PLAN_VARIABLE}={text!r} does not fit this problem: {'; '.join(reasons)}; choose a "
            "plan that explain prints for it, or unset the variable"
        )
    return plan


def misfits(plan: LaunchPlan, p: MoEProblem, batched: bool = False) -> Iterator[str]:
    """Yield why ``plan`` cannot compute ``p``."""
    packed = operand_bits(p)[1] == 4
    if batched != isinstance(plan, Batched):
        yield "triton_batched takes plans of kind batched, triton takes the other kinds"
    if p.batch_invariant and type(plan) not in (Gathered, Batched):
        yield "batch-invariant problems take plans of kind gathered or batched"
    if p.adapters is not None and not isinstance(plan, (DotProducts, Gathered)):
        yield "adapters (LoRA) take plans of kind dot_products, direct or gathered"
    if isinstance(plan, DotProducts):
        if packed:
            yield "dot products do not read 4-bit weights"
        return
    for tile in (plan.first, plan.second):
        if isinstance(tile, (GemmTile, SortedTile)):
            yield from _misfits_of_tile(tile, p)
        elif not specializable(p):
            yield "specialized tiles need Hopper, Gluon, gated silu, no bias, 16 bits or fp8_block"
    if isinstance(plan, Sorted):
        if p.dtype.itemsize != 2 or not tma_possible(p):
            yield f"{plan.kind} needs 16-bit activations and weights that can come through tma"
        tiles = {type(plan.first), type(plan.second)}
        if p.quant.weight is not None and (plan.kind, tiles) != ("copied", {SpecializedTile}):
            yield f"{p.quant.name} takes expert-sorted rows as copied with specialized tiles alone"
        return
    if plan.fused and not fusable(p, plan.first.block_n):
        yield f"{p.quant.name} cannot be quantized in tiles of {plan.first.block_n} columns (fused)"
    if plan.splits > 1 and (p.batch_invariant or isinstance(plan, Batched) or not packed):
        yield "programs share K (k2, k4) in GEMM 2 with 4-bit weights alone, in the default mode"
    if isinstance(plan, Direct) and plan.block_m > 16:
        yield "direct plans have tiles of 8 or 16 rows"


def _misfits_of_tile(tile: GemmTile | SortedTile, p: MoEProblem) -> Iterator[str]:
    packed = operand_bits(p)[1] == 4
    per_step = p.quant.name.endswith("_block") or (
        p.quant.activation is not None and p.quant.activation.group == (1, SCALE_GROUP)
    )
    if tile.block_m not in BLOCKS_M or tile.block_m < 16 and not packed:
        yield f"tiles have {', '.join(map(str, BLOCKS_M))} rows (8 with 4-bit weights alone)"
    if packed and (tile.block_m > PACKED_BLOCK_M or tile.block_k != CHUNK):
        yield f"4-bit weights take tiles of at most {PACKED_BLOCK_M} rows and {CHUNK} columns of K"
    if per_step and SCALE_GROUP % tile.block_k:
        yield f"a step of K ({tile.block_k}) must lie within a group of {SCALE_GROUP} columns"
    if tile.halves and tile.block_m < 128:
        yield "halves need tiles of 128 rows"
    if isinstance(tile, SortedTile):
        if tile.halves and tile.persistent:
            yield "persistent tiles have no halves"
    elif tile.tma and not tma_possible(p):
        yield "tma needs Hopper or later, weights of 8 bits or more, and rows of whole 16 bytes"
