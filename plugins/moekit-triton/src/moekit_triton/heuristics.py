"""Choose a call's launch plan: from a tuned table if a near shape was measured, else by rules.

`RULES` is the table of rules for tiles. `dot_products` is for a few tokens. Batch-invariant
problems use the plans of `heuristic` that give a row the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from moekit_kernels.numerics import INTERPRETED, SCALE_GROUP

from moekit.plugin import BufferSpec, MoEProblem

from .calls import GEMM_OUT, Layer
from .capabilities import (
    BLOCKS_M,
    HOPPER_SHARED,
    PACKED_BLOCK_M,
    fusable,
    hopper,
    num_sms,
    operand_bits,
    shared_memory,
    specializable,
    streams_slowly,
    swap_ab_pays,
    tma_possible,
)
from .kernels.tiles import CHUNK, DotTile, GemmTile, SortedTile, SpecializedTile, TokenTile
from .pins import PLAN_VARIABLE, misfits, pinned_plan
from .plans import (
    Batched,
    Copied,
    CopiedAhead,
    Direct,
    DotProducts,
    Gathered,
    Sorted,
    StandardPlan,
    TilePlan,
)
from .tables import Measured, has_shape, measured_plans

# Where one plan becomes faster than another. Each number was measured on the GPUs that its comment
# names, and serves where no shape near the problem's was measured; docs/measured.md has the tables.

# Rows per expert from which expert-sorted rows pay, 16 bits and fp8 blocks (H200): then both
# operands of GEMM 2 come through descriptors.
_SORTED_FROM, _SORTED_FROM_FP8 = 128, 32
# Intermediate size from which copying 16-bit x first pays, one write for each assignment that does
# not grow with I: without specialized tiles, and with them, whose loads need the copy (H200).
_COPIED_WIDTH, _COPIED_WIDTH_SPECIALIZED = 1024, 768
# Rows per expert from which they won in every shape with that width (H200), so that tables, which
# may be older than specialized tiles, do not count.
_SORTED_ALWAYS_FROM, _SORTED_ALWAYS_FROM_FP8 = 200, 56
# Rows per expert below which fp8 blocks have groups of 4 tiles, not 8: the tuner chose 4 for GEMM 1
# in 13 of 14 cells (benchmarks/results/2026-11-26-h100.md).
_GROUPS_OF_8_FROM = 96
# Rows per expert where token tiles win in 16 bits: with 256 weight rows from the first number on,
# with 128 from the second, until padding to tiles of 128 rows is small (H100 and H200).
_TOKENS_FROM, _TOKENS_NARROW_FROM, _TOKENS_BELOW = 96, 192, 640
# Between these rows per expert, reading weights bounds an H100's time in 16 bits.
_STREAMED_FROM, _STREAMED_BELOW = 24, 120
# Rows per expert from which GEMM 1 copies x itself: below, the copy's traffic delays its tiles by
# more than a separate launch takes (H200).
_AHEAD_FROM = 700
# Dot products read an expert's weights once for each of its assignments, tiles once. The most times
# that pay on average; the second number serves calls of few assignments: up to 64 on an H100,
# elsewhere up to 16 in 8 bits.
_MOST_SHARING, _MORE_SHARING = 1.3, 1.5
_FEW_ON_H100, _FEW_IN_8_BITS = 64, 16
# Elements of GEMM 1's result up to which a program of dot products has 2 columns, not 8 (H200).
_SMALL_PROGRAMS_TO = 32768
# Rows per expert that stand for all calls of batch-invariant problems which cannot use tiles of
# fewer rows: they get tiles of 64 rows (for a few tokens the weights decide the time), or of 128.
_INVARIANT_FEW, _INVARIANT_MANY = 48.0, 256.0
# Where programs share GEMM 2's K: the most programs, and the most addends, which a kernel adds.
_MOST_SPLITS, _MOST_ADDENDS = 4, 16
# Tokens up to which `describe` lists plans if the problem does not say.
_MOST_TOKENS = 16384


class Planner:
    """Chooses the plans of one layer. Tuned tables are read once, when it is made.

    measured: plans to use in place of the variable's and the tables', of another shape unless
        ``own``.

    Raises InvalidInput if MOEKIT_TRITON_PLAN names no plan that fits.
    """

    def __init__(
        self,
        problem: MoEProblem,
        *,
        batched: bool = False,
        measured: Sequence[Measured] | None = None,
        own: bool = False,
    ) -> None:
        self._problem = problem
        self._batched = batched
        self.pinned = pinned_plan(problem, batched=batched) if measured is None else None
        if measured is None:
            measured = () if INTERPRETED else measured_plans(problem)
            own = bool(measured) and has_shape(problem)
        self._measured = measured
        self._own = own

    def plan(self, rows: int, top_k: int) -> StandardPlan | Batched:
        """Return the plan for ``rows`` rows of ``top_k`` ids; BATCHED: of a capacity ``rows``."""
        p = self._problem
        if self.pinned is not None:
            return self.pinned
        # Tokens spread over all physical experts, so a local one expects rows * top_k / P.
        per_expert = rows * top_k / p.num_physical_experts
        plan: TilePlan
        if p.batch_invariant:
            plan = invariant_plan(p, per_expert)
        elif not self._batched and dots_pay(p, rows, top_k):
            return dot_products(p, rows, top_k)
        else:
            plan = self.tiles(per_expert, sort=not self._batched and sorting_pays(p, rows, top_k))
        if self._batched:
            assert isinstance(plan, Gathered)
            return Batched(plan.first, plan.second, plan.fused)
        if p.batch_invariant or not isinstance(plan, Gathered):
            return plan
        return _for_few(p, plan, rows, top_k)

    def tiles(self, per_expert: float, *, sort: bool) -> TilePlan:
        """Return the plan by tiles for ``per_expert`` rows. sort: expert-sorted if faster."""
        p = self._problem
        rule = next(rule for rule in RULES if rule.holds(p, per_expert, sort))
        if self._measured:
            rows = max(per_expert, 1e-3)
            near, plan = min(self._measured, key=lambda m: max(m[0] / rows, rows / m[0]))
            runs = (sort or isinstance(plan, Gathered)) and not any(misfits(plan, p))
            if runs and rule.yields(p, per_expert, near, plan, self._own):
                return plan
        return rule.plan(p, per_expert)

    @property
    def source(self) -> str:
        """Return where the plans come from."""
        if self.pinned is not None:
            return f"plan of {PLAN_VARIABLE}"
        if self._problem.batch_invariant:
            return "batch-invariant plans"
        if self._measured:
            return f"rules, and plans measured for {'this' if self._own else 'a near'} shape"
        return "rules"


def describe(problem: MoEProblem, *, batched: bool = False) -> str:
    """Return the plans of calls of 1, 2, 4, ... tokens (BATCHED: capacities) as text."""
    planner, most = Planner(problem, batched=batched), problem.max_num_tokens or _MOST_TOKENS
    batches = 1 if batched else problem.parallel.dp_size
    found = [
        (size, planner.plan(size * batches, problem.top_k))
        for size in (1 << n for n in range(most.bit_length()))
    ]
    plans = [next(same) for _, same in itertools.groupby(found, lambda pair: pair[1])]
    name = "C" if batched else "T"
    return f"{planner.source}: " + "; ".join(
        f"from {name} = {size} {plan.describe()}" for size, plan in plans
    )


class Rule(NamedTuple):
    """A plan for problems and rows per expert without a measurement.

    holds: whether the rule serves a problem, rows per expert and a permission to sort.
    yields: whether a measured plan that fits counts instead, for a problem and rows per expert;
    near: the rows per expert that were measured; own: on this device, for this very shape.
    """

    holds: Callable[[MoEProblem, float, bool], bool]
    plan: Callable[[MoEProblem, float], TilePlan]
    yields: Callable[[MoEProblem, float, float, TilePlan, bool], bool]


def invariant_plan(problem: MoEProblem, per_expert: float) -> Gathered:
    """Return the plan of a batch-invariant problem for ``per_expert`` rows.

    All plans of a problem give a row the same bits, in both formats: a tile sums over K in order,
    and other rows do not matter. Tiles were compared on Hopper (docs/measured.md). All tiles of
    bf16 sum in the same order. So do the tiles of fp8 blocks on wgmma (64 and more rows, or
    swap-AB) whose steps are one group of columns with one scale of the weights. Only tiles of 64
    and 128 rows were compared in fp16, with fp8 scales for all of K, with sizes that are not whole
    steps, and in fp8 blocks with a bias or an activation other than silu. Elsewhere there is one
    plan.
    """
    p, case, fp8 = problem, _Case(problem, _INVARIANT_FEW), swap_ab_pays(problem)
    whole = not (p.hidden_size % SCALE_GROUP or p.local_intermediate_size % SCALE_GROUP)
    usual = p.activation.name == "silu" and not p.has_bias
    if p.device.capability != (9, 0) or INTERPRETED or not (case.plain or fp8):
        per_expert = _INVARIANT_FEW
    elif not whole or p.dtype != torch.bfloat16 or not (case.plain or case.grouped and usual):
        per_expert = _INVARIANT_FEW if per_expert <= _INVARIANT_FEW else _INVARIANT_MANY
    plan = heuristic(p, per_expert)
    assert case.plain or all(t.block_m >= 64 or t.swapped for t in (plan.first, plan.second))
    return plan


def workspace(layer: Layer, rows: int) -> tuple[BufferSpec, ...]:
    """Return `calls.Buffers` that serve every plan for calls of at most ``rows`` rows."""
    p, count = layer.problem, rows * layer.problem.top_k
    # The extremes: large blocks need more entries, small ones more blocks.
    extremes = (GemmTile(b, 128, 128) for b in (max(BLOCKS_M), min(BLOCKS_M)))
    fused = p.batch_invariant and invariant_plan(p, 1.0).fused
    plans: list[TilePlan] = [Gathered(tile, tile, fused) for tile in extremes]
    if not p.batch_invariant and sorting_pays(p, rows, p.top_k):
        plans.append(Copied(SpecializedTile(), SpecializedTile()))
    each = zip(*(plan.workspace(layer, rows, p.top_k) for plan in plans), strict=True)
    specs = [max(same, key=lambda spec: spec.shape[0]) for same in each]
    addends = BufferSpec((_most_addends(p, count) * p.hidden_size,), p.dtype)
    specs[GEMM_OUT] = max(specs[GEMM_OUT], addends, key=lambda spec: spec.shape[0])
    return tuple(specs)


# -- a few tokens -------------------------------------------------------------------------------


def _for_few(problem: MoEProblem, plan: Gathered, rows: int, top_k: int) -> Gathered:
    count = rows * top_k
    # Few assignments hardly share experts, one token's never do: then sorting gains nothing.
    direct = rows == 1 or 4 * count <= problem.num_local_experts
    kind = Direct if direct and plan.block_m <= 16 else Gathered
    return kind(plan.first, plan.second, plan.fused, _splits(problem, count))


def _most_addends(problem: MoEProblem, count: int) -> int:
    """Return the most rows of GEMM 2's output for up to ``count`` assignments, where programs share
    K."""
    return min(count * _MOST_SPLITS, _MOST_ADDENDS) if operand_bits(problem)[1] == 4 else 0


def _splits(problem: MoEProblem, count: int) -> int:
    """Return how many programs share GEMM 2's K, which is long for the programs of a few
    assignments: up to sixteen warps per multiprocessor, a warp for 16 columns, and at least eight
    steps for each."""
    if operand_bits(problem)[1] > 4 or count == 0:
        return 1
    chunks = triton.cdiv(problem.local_intermediate_size, CHUNK)
    warps = count * triton.cdiv(problem.hidden_size, 16)
    most = min(_MOST_SPLITS, _MOST_ADDENDS // count, chunks // 8, 16 * num_sms(problem) // warps)
    return 1 << most.bit_length() - 1 if most > 1 else 1


def dots_pay(problem: MoEProblem, rows: int, top_k: int) -> bool:
    """Return whether so few assignments share an expert that each may read its weights.

    A token names an expert with probability K / P, so rows * K / P tokens name it on average, and
    at least one does with probability 1 - (1 - K / P) ** rows: the quotient is how often the
    weights of a named expert are read.
    """
    bits = operand_bits(problem)[1]
    if bits == 4:
        return False
    named = min(1.0, top_k / problem.num_physical_experts)
    few = _FEW_ON_H100 if streams_slowly(problem) else _FEW_IN_8_BITS if bits == 8 else 0
    most = _MORE_SHARING if rows * top_k <= few else _MOST_SHARING
    return rows * named <= most * (1 - (1 - named) ** rows)


def dot_products(problem: MoEProblem, rows: int, top_k: int) -> DotProducts:
    """Return the plan: small programs of GEMM 1 unless there are too many, or each has to wait for
    adapters; and programs of GEMM 2 as large as leave 2.5 to a multiprocessor."""
    if INTERPRETED:  # the number of programs decides its time, not their size
        return DotProducts(DotTile(64), DotTile(64))
    elements = rows * top_k * problem.local_intermediate_size
    small = problem.adapters is None and elements <= _SMALL_PROGRAMS_TO
    wanted = 5 * num_sms(problem) // 2
    down = next((n for n in (8, 4, 2) if rows * problem.hidden_size // n >= wanted), 1)
    return DotProducts(DotTile(2 if small else 8), DotTile(down, num_warps=8))


# -- expert-sorted rows -------------------------------------------------------------------------


def sorting_pays(problem: MoEProblem, rows: int, top_k: int) -> bool:
    """Return whether GEMM 2 gains by expert-sorted rows, which let both operands come through
    descriptors: 16 bits, and fp8 blocks where their tiles are specialized."""
    scaled = problem.quant.weight is not None
    if scaled and not specializable(problem) or problem.dtype.itemsize != 2:
        return False
    if problem.adapters is not None:  # these kernels do not add deltas
        return False
    if shared_memory(problem) < HOPPER_SHARED:  # four stages of such tiles need it
        return False
    per_expert = rows * top_k / problem.num_physical_experts
    least = _SORTED_FROM_FP8 if scaled else _SORTED_FROM
    return (per_expert >= least or tokens_win(problem, per_expert)) and tma_possible(problem)


def sorted_wins(problem: MoEProblem, per_expert: float) -> bool:
    """Return whether expert-sorted rows, where they pay, need no comparison with gathered ones."""
    least = _SORTED_ALWAYS_FROM if problem.quant.weight is None else _SORTED_ALWAYS_FROM_FP8
    return per_expert >= least and _wide(problem) and specializable(problem)


def tokens_win(problem: MoEProblem, per_expert: float) -> bool:
    """Return whether token tiles have won for ``per_expert`` rows, where expert-sorted rows are
    possible: 16 bits, where x is copied for specialized tiles."""
    if problem.quant.weight is not None or not _TOKENS_FROM <= per_expert < _TOKENS_BELOW:
        return False
    return _wide(problem) and problem.dtype.itemsize == 2 and specializable(problem)


def _wide(problem: MoEProblem) -> bool:
    return problem.local_intermediate_size >= _COPIED_WIDTH_SPECIALIZED


def streams_weights(problem: MoEProblem, per_expert: float) -> bool:
    """Return whether an H100's tiles of 128 rows and few columns win: an expert has one, and
    reading its weights takes all of its time."""
    few = _STREAMED_FROM < per_expert < _STREAMED_BELOW and not problem.batch_invariant
    return few and streams_slowly(problem) and operand_bits(problem) == (16, 16)


def token_plan(problem: MoEProblem, per_expert: float) -> Copied:
    """Return the plan by token tiles of 256 weight rows, of 128 for more rows."""
    weights = 256 if per_expert < _TOKENS_NARROW_FROM else 128
    return Copied(TokenTile(weights), TokenTile(weights))


def sorted_plan(problem: MoEProblem, per_expert: float) -> Sorted:
    """Return the plan whose tiles have won wherever they were measured."""
    p, scaled, gated = problem, problem.quant.weight is not None, problem.activation.gated
    least = _COPIED_WIDTH_SPECIALIZED if specializable(p) else _COPIED_WIDTH
    copied, columns = scaled or p.local_intermediate_size >= least, 128 if gated else 256
    first = GemmTile(128, columns, 64, 8, 8, 4, tma=True, halves=gated)
    if not specializable(p):
        # With a gate registers are too few for persistence.
        tiles = (
            SortedTile(128, n, 64, persistent=n == 256, halves=n < 256) for n in (columns, 256)
        )
        return Copied(*tiles) if copied else Sorted(first, *list(tiles)[1:])
    group_m = 4 if scaled and per_expert < _GROUPS_OF_8_FROM else 8
    tile = SpecializedTile(group_m, halves=True)
    if not copied:
        return Sorted(first, tile)
    return (Copied if scaled or per_expert < _AHEAD_FROM else CopiedAhead)(tile, tile)


# -- gathered rows ------------------------------------------------------------------------------


class _Case:
    """A problem and its rows per expert, as the rules for tiles distinguish them.

    plain: 16-bit operands; grouped: activations with scales by groups of 128 columns, which
    divide I; whole_k_fp8: e4m3 on Hopper whose scales serve all of K; wide: weight rows behind an
    output column of GEMM 1; busy: row blocks that programs share.
    """

    def __init__(self, p: MoEProblem, per_expert: float) -> None:
        self.problem, self.per_expert, self.sms = p, per_expert, num_sms(p)
        self.a_bits, self.w_bits = operand_bits(p)
        self.plain = self.a_bits == self.w_bits == 16
        self.grouped = p.quant.activation is not None and p.quant.activation.group == (1, 128)
        assert not self.grouped or p.local_intermediate_size % SCALE_GROUP == 0
        self.whole_k_fp8 = swap_ab_pays(p) and not self.grouped
        self.wide = 2 if p.activation.gated else 1  # GEMM 1 with a gate holds two tiles of block_n
        self.block_m: int = next(rows for holds, rows in _ROWS if holds(self))
        self.busy = p.num_local_experts * max(1, math.ceil(per_expert / self.block_m))
        if self.w_bits == 4 or p.batch_invariant:  # experts without rows keep nothing busy
            self.busy = math.ceil(self.busy * min(1.0, per_expert))

    def fills(self, n: int, columns: int, programs: float) -> bool:
        """Return whether tiles of so many columns keep so many programs a multiprocessor busy."""
        return bool(self.busy * math.ceil(n / columns) >= programs * self.sms)

    def tile(self, n: int, k: int, wide: int) -> GemmTile:
        """Return the tile for n output columns, each of ``wide`` weight rows of k columns."""
        if self.w_bits == 4:
            return self._packed_tile(n, wide)
        rows, warps, stages = next(sizes for holds, sizes in _TILES if holds(self))
        block_k = 1024 // self.a_bits  # 128 bytes, the widest row that swizzled memory has
        least = 32
        if streaming := self.block_m <= 32 and self.a_bits < 32:
            block_k, rows = 128, 128 if self.fills(n, 128, 2) else 64
            least = 64 if self.problem.batch_invariant else 32  # for one token (H200)
        block_n = min(max(least, rows // wide), max(least, triton.next_power_of_2(n)))
        if streaming and hopper(self.problem) and (self.plain or self.grouped):
            # Wider tiles, where Hopper has enough of them to read weights by.
            wider = [(256 // wide, 3), (128 // wide, 4)]
            if self.problem.batch_invariant and self.grouped:
                del wider[0]  # its steps have two scales
            block_n, stages = next(
                (each for each in wider if self.fills(n, each[0], 1.5)), (block_n, stages)
            )
        block_k = min(block_k, max(32, triton.next_power_of_2(k)))
        return GemmTile(self.block_m, block_n, block_k, num_warps=warps, num_stages=stages)

    def _packed_tile(self, n: int, wide: int) -> GemmTile:
        """Return a tile for 4-bit weights: a warp makes 16 weight rows, or 32; four warps and 64 or
        more rows form warp groups."""
        block_m, scheme = self.block_m, self.problem.quant.weight
        fp4 = scheme is not None and scheme.dtype == "float4_e2m1"
        most = 64 if block_m <= 32 or wide == 2 or fp4 else 128
        sizes = [b for b in (most, 64, 32, 16) if b <= max(16, triton.next_power_of_2(n))]
        block_n = sizes[0]
        if block_m <= 32 and not INTERPRETED:  # keep every multiprocessor streaming
            block_n = next((b for b in sizes if self.fills(n, b, 3)), sizes[-1])
        if block_m == 8 and block_n == 64 and (wide == 1 or fp4):
            return GemmTile(block_m, block_n, CHUNK, num_warps=2, num_stages=2)
        stages = 3 if block_n >= 64 else 5
        return GemmTile(block_m, block_n, CHUNK, num_warps=block_n // 16, num_stages=stages)

    def within(self, tile: GemmTile, wide: int) -> GemmTile:
        """Limit the stages to what shared memory holds, at least two."""
        columns = tile.block_n * wide * (2 if tile.wide else 1)
        stage = (tile.block_m * self.a_bits + columns * self.w_bits) * tile.block_k // 8
        stages = min(tile.num_stages, shared_memory(self.problem) // stage)
        return replace(tile, num_stages=max(2, stages))


_Table = Sequence[tuple[Callable[[_Case], bool], Any]]

# Rows of a tile; in all tables the first condition that holds counts. Twice the expected rows while
# weights bound the time, then large tiles: half tiles of 128 rows win where many experts have more
# than 64. Without tensor cores, and with 4-bit weights, 64 at most.
_ROWS: _Table = (
    (lambda c: c.w_bits == 4 and c.per_expert <= 4, 8),
    (lambda c: streams_weights(c.problem, c.per_expert), 128),
    (lambda c: c.per_expert <= 8, 16),
    (lambda c: c.per_expert <= 24, 32),
    (lambda c: c.a_bits == 32 or c.w_bits == 4, PACKED_BLOCK_M),
    (lambda c: c.per_expert <= (48 if c.plain or swap_ab_pays(c.problem) else 64), 64),
    (lambda c: True, 128),
)
# Weight rows, warps and stages of a tile.
_TILES: _Table = (
    (lambda c: c.a_bits == 32, (64, 4, 3)),  # no tensor cores
    (lambda c: c.block_m <= 64, (128, 4, 4)),
    (lambda c: c.plain, (256, 8, 3)),
    (lambda c: True, (128, 8, 4)),
)


def heuristic(problem: MoEProblem, per_expert: float) -> Gathered:
    """Return a plan for gathered rows without any measurement."""
    p, case = problem, _Case(problem, per_expert)
    hidden, inner, block_m = p.hidden_size, p.local_intermediate_size, case.block_m
    first = case.tile(inner, hidden, case.wide)
    if case.grouped and (block_m <= 64 or hopper(p)) and inner >= 128:
        first = replace(first, block_n=128, num_warps=4 if block_m <= 32 else 8)
        if block_m <= 32 and hopper(p):  # three stages let two programs share a multiprocessor
            alone = p.batch_invariant and not case.fills(inner, 128, 1)
            first = replace(first, num_stages=5 if alone else 3)
    fused = fusable(p, first.block_n)
    if not fused:
        first = case.tile(p.w13_rows, hidden, 1)
    second = case.tile(hidden, inner, 1)
    swapped = swap_ab_pays(p) and block_m < 64
    first, second = (
        replace(c, tma=tma_possible(p), halves=block_m == 128, swapped=swapped and c.block_n >= 64)
        for c in (first, second)
    )
    if block_m == 128:
        first, second = _large_tiles(case, first, second, fused)
    return Gathered(case.within(first, case.wide if fused else 1), case.within(second, 1), fused)


def _large_tiles(
    case: _Case, first: GemmTile, second: GemmTile, fused: bool
) -> tuple[GemmTile, GemmTile]:
    """Adjust tiles of 128 rows."""
    p, many = case.problem, case.per_expert > _SORTED_FROM
    if streams_weights(p, case.per_expert):
        first, second = (
            replace(t, block_n=min(t.block_n, 128 // wide), group_m=1, num_warps=4, num_stages=3)
            for t, wide in ((first, case.wide), (second, 1))
        )
        return replace(first, block_k=min(128, 2 * first.block_k), tma=False), second
    if case.plain and hopper(p):  # GEMM 1's weights by pointers, while rows are few
        return replace(first, tma=first.tma and many, num_stages=4), replace(second, num_stages=4)
    if case.whole_k_fp8:
        # Two programs per multiprocessor, until there are rows for the largest tile.
        changes: list[dict[str, Any]] = [
            {"block_n": 256, "num_warps": 8, "num_stages": 4} if many and n >= 256
            else {"num_warps": 4, "num_stages": 3} for n in (p.w13_rows, p.hidden_size)
        ]  # fmt: skip
        second = replace(second, **changes[1])
        if not fused or case.wide == 1:
            first = replace(first, **changes[0])
    if case.grouped and hopper(p):
        second = replace(second, tma=False, wide=True, num_stages=3)
    return first, second


# -- the rules ----------------------------------------------------------------------------------


def _ordered(p: MoEProblem, rows: float, plan: TilePlan) -> bool:
    return isinstance(plan, Sorted) or not sorted_wins(p, rows)


# The first rule that holds counts. Measured plans count instead: while weights are streamed, those
# that were too; and where token tiles win, plans with them or timed against them.
RULES = (
    Rule(
        lambda p, rows, sort: streams_weights(p, rows),
        heuristic,
        lambda p, rows, near, plan, own: own and streams_weights(p, near),
    ),
    Rule(
        lambda p, rows, sort: sort and tokens_win(p, rows),
        token_plan,
        lambda p, rows, near, plan, own: (
            TokenTile in (type(plan.first), type(plan.second))
            or own
            and tokens_win(p, near)
            and _ordered(p, rows, plan)
        ),
    ),
    Rule(
        lambda p, rows, sort: sort,
        sorted_plan,
        lambda p, rows, near, plan, own: _ordered(p, rows, plan),
    ),
    Rule(
        lambda p, rows, sort: True,
        heuristic,
        lambda p, rows, near, plan, own: True,
    ),
)
