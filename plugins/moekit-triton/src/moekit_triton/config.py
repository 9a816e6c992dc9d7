"""How a call is cut into tiles: from measured tables where there are some, else by a heuristic."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
from moekit_kernels.numerics import INTERPRETED, SCALE_GROUP

from moekit.plugin import MoEProblem

from .gemm import GemmConfig
from .gemv import GemvConfig
from .packed import CHUNK
from .tables import nearest_plan

BLOCKS_M = (8, 16, 32, 64, 128)  # 8: weights of 4 bits only
# Shared memory one program may use, in bytes, where it is not Hopper's.
_HOPPER = 227 << 10
_SHARED = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10,
}  # fmt: skip
_SMS = 132
# Rows per expert from which they are sorted, of 16 bits and of fp8 blocks.
_SORTED_FROM, _SORTED_FROM_FP8 = 128, 32
# The width from which x of 16 bits is copied into order first, which costs writing it once for each
# pair: without and with specialized tiles, whose loads want that.
_COPIED_WIDTH, _COPIED_WIDTH_SPECIALIZED = 1024, 768
# From so many rows per expert and that width, order has won wherever tiles can be specialized: of
# 16 bits and of fp8 blocks.
_IN_ORDER_FROM, _IN_ORDER_FROM_FP8 = 200, 56
# Rows per expert from which GEMM 1 hides the copying; and how many tiles of GEMM 2 a multiprocessor
# has where both products gain by one launch: with few, it is their end that counts.
_AHEAD_FROM, _JOINED_FROM = 700, 4
# Gluon still changes with Triton's versions: MOEKIT_TRITON_GLUON=0 in the environment does without.
_GLUON = os.environ.get("MOEKIT_TRITON_GLUON", "1") != "0"
# Dot products read an expert's weights for each of its pairs: at most so many times on average,
# for weights of more than 8 bits and for those of 8.
_MOST_SHARING, _MOST_SHARING_8_BITS = 1.3, 1.5
PACKED_BLOCK_M = 64
"""Most rows of a tile with weights of 4 bits: group sums take as many registers again."""
# Where programs share GEMM 2's K: how many at most, and rows of addends.
_MOST_SPLITS, _MOST_ADDENDS = 4, 16


Order = Literal["pairs", "sorted", "copied", "ahead", "joined"]
"""How rows come into the order of their experts: not at all, but as tokens name them; GEMM 1 sorts
its result; x is copied first; GEMM 1 copies x, ahead of its tiles; x is copied first, and both
GEMMs are one launch. The last two are for specialized tiles of 16 bits."""


@dataclass(frozen=True)
class Plan:
    """direct: no alignment, each (token, slot) is a block of its own. fused: GEMM 1 applies the
    activation (and quantizes its result where groups or one given scale allow it). dots: both GEMMs
    by dot products instead, see `gemv`."""

    first: GemmConfig
    second: GemmConfig
    fused: bool
    direct: bool = False
    dots: tuple[GemvConfig, GemvConfig] | None = None
    order: Order = "pairs"

    @property
    def block_m(self) -> int:
        return self.first.block_m

    @property
    def specialized(self) -> bool:
        """Whether a GEMM runs by specialized warps, which only rows in order have."""
        return self.order != "pairs" and (self.first.specialized or self.second.specialized)


def choose_plan(problem: MoEProblem, rows: int, slots: int, *, slabs: bool = False) -> Plan:
    """For calls of `rows` rows with `slots` ids each; slabs: of `rows` rows for each expert."""
    # Tokens spread over all physical experts, so a local one expects rows * slots / P.
    per_expert = rows * slots / problem.num_physical_experts
    pays = not slabs and sorting_pays(problem, rows, slots)
    plan = _measured(problem, per_expert)
    if pays and (plan is None or plan.order == "pairs" and order_wins(problem, per_expert)):
        plan = sorted_plan(problem, per_expert)
    elif plan is None:
        plan = heuristic(problem, per_expert)
    elif plan.order != "pairs" and not pays:
        # Tiles for 16 bits serve as well without order; those for fp8 blocks know nothing else.
        scaled = problem.quant.weight is not None
        plan = heuristic(problem, per_expert) if scaled else replace(plan, order="pairs")
    if not specializable(problem):
        order = "copied" if plan.order in ("ahead", "joined") else plan.order
        plan = replace(plan, first=_plain(plan.first), second=_plain(plan.second), order=order)
    pairs = rows * slots
    if slabs:
        return plan
    plan = replace(plan, second=replace(plan.second, splits=_splits(problem, pairs)))
    if dots_pay(problem, rows, slots):
        plan = replace(plan, dots=dot_configs(problem, rows, slots))
    # Few pairs hardly share experts, one token's pairs never do: then alignment gains nothing.
    direct = rows == 1 or 4 * pairs <= problem.num_local_experts
    return replace(plan, direct=direct) if direct and plan.block_m <= 16 else plan


def most_addends(problem: MoEProblem, pairs: int) -> int:
    """Rows of GEMM 2's output, for calls of up to so many pairs, where programs share K."""
    return min(pairs * _MOST_SPLITS, _MOST_ADDENDS) if operand_bits(problem)[1] == 4 else 0


def _splits(problem: MoEProblem, pairs: int) -> int:
    """How many programs share GEMM 2's K, which few pairs leave too long for each: up to sixteen
    warps for every multiprocessor, a warp for 16 columns, and eight steps at least for each."""
    if operand_bits(problem)[1] > 4 or pairs == 0:
        return 1
    chunks = triton.cdiv(problem.local_intermediate_size, CHUNK)
    warps = pairs * triton.cdiv(problem.hidden_size, 16)
    most = min(_MOST_SPLITS, _MOST_ADDENDS // pairs, chunks // 8, 16 * _SMS // warps)
    return 1 << most.bit_length() - 1 if most > 1 else 1


def dots_pay(problem: MoEProblem, rows: int, slots: int) -> bool:
    """Whether so few pairs share an expert that each can read its weights for itself.

    An expert is named by a token with probability K / P, so by rows * K / P of them on average, and
    by any at all with probability 1 - (1 - K / P) ** rows: the quotient is how often the weights of
    an expert that is named are read.
    """
    bits = operand_bits(problem)[1]
    if bits == 4:
        return False
    named = min(1.0, slots / problem.num_physical_experts)
    most = _MOST_SHARING_8_BITS if bits == 8 else _MOST_SHARING
    return rows * named <= most * (1 - (1 - named) ** rows)


def dot_configs(problem: MoEProblem, rows: int, slots: int) -> tuple[GemvConfig, GemvConfig]:
    """As many columns a program as leave four programs to each multiprocessor."""
    p, wanted = problem, 4 * _SMS
    if INTERPRETED:  # which takes its time for each program, not for its size
        return GemvConfig(64), GemvConfig(64)

    def columns(n: int, rows: int) -> int:
        return next((c for c in (8, 4, 2) if rows * n // c >= wanted), 1)

    first = columns(p.local_intermediate_size, rows * slots)
    return GemvConfig(first), GemvConfig(columns(p.hidden_size, rows))


def operand_bits(problem: MoEProblem) -> tuple[int, int]:
    """Of activations and weights, as they are stored."""
    scheme, bits = problem.quant, 8 * problem.dtype.itemsize
    activation = bits if scheme.activation is None else 8 * scheme.activation.torch_dtype.itemsize
    weight = bits if scheme.weight is None else 8 * scheme.weight.torch_dtype.itemsize
    if scheme.weight is not None and scheme.weight.packed:
        weight = 4
    return activation, weight


def fusable(problem: MoEProblem, block_n: int) -> bool:
    """Whether GEMM 1's tiles can hold what the quantization of its result needs."""
    operand = problem.quant.activation
    if operand is None or operand.static:
        return True
    return operand.group == (1, 128) and block_n == 128


def heuristic(problem: MoEProblem, per_expert: float) -> Plan:
    """Twice the expected rows while weights bound the time, then large tiles."""
    p = problem
    a_bits, w_bits = operand_bits(p)
    # Halves of 128 rows have won wherever many an expert has more than 64, but for scales by group.
    plain = a_bits == w_bits == 16
    grouped = p.quant.activation is not None and p.quant.activation.group == (1, 128)
    ungrouped_fp8 = swapping_pays(p) and not grouped
    most_64 = 48 if plain or ungrouped_fp8 else 64
    block_m = next((b for b, most in ((16, 8), (32, 24), (64, most_64)) if per_expert <= most), 128)
    if a_bits == 32:  # without tensor cores
        block_m = min(block_m, 64)
    if w_bits == 4:
        block_m = 8 if per_expert <= 4 else min(block_m, PACKED_BLOCK_M)
    busy = p.num_local_experts * max(1, math.ceil(per_expert / block_m))
    if w_bits == 4:  # experts without rows keep nothing busy
        busy = math.ceil(busy * min(1.0, per_expert))
    tma = tma_possible(p)
    # GEMM 1 with a gate holds two tiles of block_n columns.
    wide = 2 if p.activation.gated else 1
    shared, hopper = _shared(p), (p.device.capability or (9, 0)) == (9, 0)
    first = _tile(block_m, busy, p.local_intermediate_size, p.hidden_size, a_bits, w_bits, wide)
    if grouped and (block_m <= 64 or hopper) and p.local_intermediate_size >= 128:
        first = replace(first, block_n=128, num_warps=4 if block_m <= 32 else 8)
    fused = fusable(p, first.block_n)
    if not fused:
        first = _tile(block_m, busy, p.w13_rows, p.hidden_size, a_bits, w_bits, 1)
    second = _tile(block_m, busy, p.hidden_size, p.local_intermediate_size, a_bits, w_bits, 1)
    swapped = swapping_pays(p) and block_m < 64
    first, second = (
        replace(c, tma=tma, halves=block_m == 128, swapped=swapped and c.block_n >= 64)
        for c in (first, second)
    )
    if plain and block_m == 128 and hopper:
        # Pointers to GEMM 1's weights, while rows are few.
        first = replace(first, tma=tma and per_expert > _SORTED_FROM, num_stages=4)
        second = replace(second, num_stages=4)
    if ungrouped_fp8 and block_m == 128:
        second = _large_tile(second, p.hidden_size, per_expert)
        first = first if fused and wide == 2 else _large_tile(first, p.w13_rows, per_expert)
    if grouped and block_m == 128 and hopper:
        second = replace(second, tma=False, wide=True, num_stages=3)
    return Plan(
        _within(first, a_bits, w_bits, wide if fused else 1, shared),
        _within(second, a_bits, w_bits, 1, shared),
        fused,
    )


def swapping_pays(problem: MoEProblem) -> bool:
    """Whether tiles below 64 rows are faster by wgmma: e4m3 on Hopper, which mma.sync wants as
    fp16 there."""
    operand = problem.quant.activation
    hopper = (problem.device.capability or (9, 0)) == (9, 0)
    return hopper and operand is not None and operand.dtype.startswith("float8")


def _large_tile(tile: GemmConfig, n: int, per_expert: float) -> GemmConfig:
    """Of fp8 whose scales serve all of K, n columns: two programs to a multiprocessor, until
    there are rows for the largest tile."""
    if per_expert > _SORTED_FROM and n >= 256:
        return replace(tile, block_n=256, num_warps=8, num_stages=4)
    return replace(tile, num_warps=4, num_stages=3)


def sorting_pays(problem: MoEProblem, rows: int, slots: int) -> bool:
    """Whether GEMM 2 gains by rows in the order of their experts, which both operands' descriptors
    want: of 16 bits, and of fp8 blocks where they are specialized."""
    scaled = problem.quant.weight is not None
    if scaled and not specializable(problem) or problem.dtype.itemsize != 2:
        return False
    if _shared(problem) < _HOPPER:  # for four stages of such tiles
        return False
    per_expert = rows * slots / problem.num_physical_experts
    return per_expert >= (_SORTED_FROM_FP8 if scaled else _SORTED_FROM) and tma_possible(problem)


def specializable(problem: MoEProblem) -> bool:
    """Whether `specialized`, or of fp8 blocks `specialized_fp8`, can do both products."""
    plain = problem.activation.name == "silu" and problem.activation.gated
    blocks = problem.quant.name == "fp8_block"
    return (
        _GLUON and plain and not problem.activation.clamped and not problem.has_bias
        and (problem.quant.weight is None or blocks)
        and (not blocks or problem.local_intermediate_size % SCALE_GROUP == 0)
        and not INTERPRETED
        and problem.device.capability == (9, 0) and triton.__version__.startswith("3.6.")
    )  # fmt: skip


def order_wins(problem: MoEProblem, per_expert: float) -> bool:
    """Whether rows in order, where sorting pays, need no comparison with others."""
    wide = problem.local_intermediate_size >= _COPIED_WIDTH_SPECIALIZED
    least = _IN_ORDER_FROM if problem.quant.weight is None else _IN_ORDER_FROM_FP8
    return per_expert >= least and wide and specializable(problem)


def _plain(tile: GemmConfig) -> GemmConfig:
    """What comes near a specialized tile: with a gate, registers are too few for persistence."""
    if not tile.specialized:
        return tile
    wide = tile.block_n == 256
    return replace(tile, specialized=False, persistent=wide, halves=not wide)


def sorted_plan(problem: MoEProblem, per_expert: float) -> Plan:
    """The tiles that win wherever they were measured."""
    scaled = problem.quant.weight is not None
    block_k = SCALE_GROUP if scaled else 64
    first = GemmConfig(128, 128, block_k, 8, 8, 4, tma=True, halves=True, specialized=True)
    second = replace(first, block_n=256)
    if not problem.activation.gated:
        first = second
    return Plan(first, second, fused=True, order=_order(problem, per_expert))


def _order(problem: MoEProblem, per_expert: float) -> Order:
    p = problem
    if p.quant.weight is not None:
        return "copied"
    if not specializable(p):
        return "copied" if p.local_intermediate_size >= _COPIED_WIDTH else "sorted"
    if p.local_intermediate_size < _COPIED_WIDTH_SPECIALIZED:
        return "sorted"
    if per_expert >= _AHEAD_FROM:
        return "ahead"
    tiles = p.num_local_experts * math.ceil(per_expert / 128) * triton.cdiv(p.hidden_size, 256)
    return "joined" if tiles >= _JOINED_FROM * _SMS else "copied"


def _shared(problem: MoEProblem) -> int:
    return _SHARED.get(problem.device.capability or (9, 0), _HOPPER)


def num_sms(problem: MoEProblem) -> int:
    """Multiprocessors of the current device; Hopper's where a problem runs in the interpreter."""
    if problem.device.type != "cuda":
        return _SMS
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def tma_possible(problem: MoEProblem) -> bool:
    """Whether weights can come through tensor descriptors: Hopper, rows of whole 16 bytes. Those of
    4 bits never do: their tiles are contiguous anyway."""
    _, w_bits = operand_bits(problem)
    if w_bits == 4 or INTERPRETED:
        return False
    if problem.device.capability is None or problem.device.capability < (9, 0):
        return False
    widths = problem.hidden_size, problem.local_intermediate_size
    return all(n * w_bits // 8 % 16 == 0 for n in widths)


def _tile(
    block_m: int, busy: int, n: int, k: int, a_bits: int, w_bits: int, wide: int
) -> GemmConfig:
    """block_n counts output columns, of which each reads `wide` rows of weights."""
    if w_bits == 4:
        return _packed_tile(block_m, busy, n, wide)
    if a_bits == 32:
        block_n, block_k, warps, stages = 64, 32, 4, 3
    elif block_m <= 32:  # bound by reading weights: keep every SM streaming
        block_n = 128 if busy * triton.cdiv(n, 128) >= 2 * _SMS else 64
        block_k, warps, stages = 128, 4, 4
    elif block_m == 64:
        block_n, block_k, warps, stages = 128, 1024 // a_bits, 4, 4
    elif a_bits == w_bits == 16:
        block_n, block_k, warps, stages = 256, 64, 8, 3
    else:
        block_n, block_k, warps, stages = 128, 1024 // a_bits, 8, 4
    block_n = min(max(32, block_n // wide), max(32, triton.next_power_of_2(n)))
    block_k = min(block_k, max(32, triton.next_power_of_2(k)))
    return GemmConfig(block_m, block_n, block_k, num_warps=warps, num_stages=stages)


def _packed_tile(block_m: int, busy: int, n: int, wide: int) -> GemmConfig:
    """4 bits: a warp makes 16 rows of weights; four warps and 64 or more rows are warp groups."""
    most = 64 if block_m <= 32 or wide == 2 else 128
    sizes = [b for b in (most, 64, 32, 16) if b <= max(16, triton.next_power_of_2(n))]
    block_n = sizes[0]
    if block_m <= 32 and not INTERPRETED:  # bound by reading weights: keep every SM streaming
        block_n = next((b for b in sizes if busy * triton.cdiv(n, b) >= 3 * _SMS), sizes[-1])
    stages = 3 if block_n >= 64 else 5
    return GemmConfig(block_m, block_n, CHUNK, num_warps=block_n // 16, num_stages=stages)


def _within(config: GemmConfig, a_bits: int, w_bits: int, wide: int, shared: int) -> GemmConfig:
    """With as many stages as shared memory holds, two at least."""
    columns = config.block_n * wide * (2 if config.wide else 1)
    stage = (config.block_m * a_bits + columns * w_bits) * config.block_k // 8
    return replace(config, num_stages=max(2, min(config.num_stages, shared // stage)))


def _measured(problem: MoEProblem, per_expert: float) -> Plan | None:
    plan = None if INTERPRETED else nearest_plan(problem, per_expert)
    if plan is None:
        return None
    first, second = GemmConfig(**plan["first"]), GemmConfig(**plan["second"])
    if not tma_possible(problem):  # measured on sizes that only come near these
        first, second = replace(first, tma=False), replace(second, tma=False)
    fused = plan["fused"] and fusable(problem, first.block_n)
    return Plan(first, second, fused, order=plan.get("order", "pairs"))
