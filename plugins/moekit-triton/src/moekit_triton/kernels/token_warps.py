"""Code that the warps of swap-AB kernels share: see `specialized_tokens` (Gluon, Hopper).

Both operands are loaded in rows of 128 bytes: a step is 64 columns.

Tuples group what functions pass on, as in `warps`. ``tokens`` is (descriptor of boxes of BOX rows,
descriptor of the rest, memory of the boxes, memory of the rest).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .order import tile_at
from .token_tiles import MOST_PIECES, PIECE
from .warps import (
    STAGES,
    async_load,
    commit_message,
    next_slot,
    reinterpret,
    renamed,
    schedule,
)

BOX = gl.constexpr(64)  # tokens of a load
_ROW = gl.constexpr(128)  # bytes of a row in a step


@gluon.jit
def token_stages(a, rest, w, WEIGHTS: gl.constexpr, TOKENS: gl.constexpr):
    """Allocate the ring for steps of TOKENS tokens, a rest, and WEIGHTS weight rows.

    Returns:
        The memory of weights, as loaded and by halves as multiplied; of tokens; and ``tokens``.
    """
    STEP: gl.constexpr = a.block_shape[1]
    w_boxes = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    x_s = gl.allocate_shared_memory(a.dtype, [STAGES, TOKENS, STEP], a.layout)
    rest_s = gl.allocate_shared_memory(a.dtype, [STAGES] + rest.block_shape, rest.layout)
    w_s = reinterpret(w_boxes, w.dtype, [2 * STAGES, WEIGHTS // 2, STEP], a.layout)
    x_boxes = reinterpret(x_s, a.dtype, [TOKENS // BOX * STAGES, BOX, STEP], a.layout)
    return w_boxes, w_s, x_s, (a, rest, x_boxes, rest_s)


@gluon.constexpr_function
def _narrower(tokens, rest, most):
    """Return the next smaller size (tokens, rest) of a tile, down to a quarter of ``most``."""
    if rest > 0:
        return tokens, 16 if rest > 16 and tokens == most else 0
    return tokens // 2, most // 4 if tokens == most else 0


@gluon.jit
def on_least_tokens(
    COMPUTE: gl.constexpr, WHICH: gl.constexpr, GATED: gl.constexpr, pieces, given, state,
    TOKENS: gl.constexpr, REST: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """Return COMPUTE(WHICH, GATED, given, state, tokens, rest) with the smallest tokens + rest, at
    most TOKENS + REST, that hold ``pieces``."""
    LESS: gl.constexpr = _narrower(TOKENS, REST, MOST)
    if LESS[0] < MOST // 4:
        state = COMPUTE(WHICH, GATED, given, state, TOKENS, REST)
    elif pieces * PIECE > LESS[0] + LESS[1]:
        state = COMPUTE(WHICH, GATED, given, state, TOKENS, REST)
    else:
        state = on_least_tokens(COMPUTE, WHICH, GATED, pieces, given, state, LESS[0], LESS[1],
                                MOST)  # fmt: skip
    return state


@gluon.jit
def load_tokens(tokens, row, k, pieces, bar, slot, MORE_BYTES: gl.constexpr):
    """Load a tile's boxes of tokens, and let the barrier expect them and MORE_BYTES."""
    a, rest, x_boxes, rest_s = tokens
    REST: gl.constexpr = rest.block_shape[0]
    BOXES: gl.constexpr = x_boxes.shape[0] // STAGES
    boxes = gl.minimum(gl.cdiv(pieces * PIECE, BOX), BOXES)
    more = pieces > BOXES * BOX // PIECE  # the rest
    for box in gl.static_range(1, BOXES + 1):
        mbarrier.expect(bar, MORE_BYTES + box * BOX * _ROW, pred=(boxes == box) & (more == 0))
    mbarrier.expect(bar, MORE_BYTES + (BOXES * BOX + REST) * _ROW, pred=more)
    for box in gl.static_range(BOXES):
        x_box = x_boxes.index(BOXES * slot + box)
        async_load(a, [row + box * BOX, k], bar, x_box, pred=box < boxes)
    last = row + BOXES * BOX
    async_load(rest, [last, k], bar, rest_s.index(slot), pred=more)


@gluon.jit
def listed_tile(tiles_ptr, index, inside, row_tiles, col_tiles, group_m):
    """Return a tile's first row, column tile, expert and pieces; all 0 if it is not ``inside``."""
    row_tile, col_tile = tile_at(index, gl.maximum(row_tiles, 1), col_tiles, group_m)
    row = gl.where(inside, gl.load(tiles_ptr + 1 + 2 * row_tile), 0)
    word = gl.where(inside, gl.load(tiles_ptr + 2 + 2 * row_tile), 0)
    return row, col_tile, word // MOST_PIECES, word % MOST_PIECES


@gluon.jit
def _commit_tile(mail, count, list_of, tile, N, OUT: gl.constexpr, GATED: gl.constexpr):
    """Commit a tile's first row, column, expert and pieces (0 past the last tile). Return its row,
    weight row and pieces."""
    tiles_ptr, row_tiles, col_tiles, group_m = list_of
    inside = tile < row_tiles * col_tiles
    row, col_tile, expert, pieces = listed_tile(
        tiles_ptr, gl.where(inside, tile, 0), inside, row_tiles, col_tiles, group_m
    )
    commit_message(mail, count, (row, col_tile * OUT, expert, pieces))
    return row, expert * (2 * N if GATED else N) + col_tile * OUT, pieces


@gluon.jit
def load_weights(w, w_row, k, bar, box):
    """Load a box of weight rows. With a gate, the descriptor's first dimension is of 8 rows
    (`alternating`)."""
    if len(w.block_shape) == 2:
        async_load(w, [w_row, k], bar, box)
    else:
        async_load(w, [w_row // 8, 0, 0, k], bar, box)


@gluon.jit
def load_tiles(
    tokens, weights, list_of, counters_ptr, N, K, barriers, mail, WEIGHTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Load every tile's operands (the producer warp): its boxes of tokens, and WEIGHTS weight rows.

    The next tile is committed after this tile's first steps, so that no product waits for it.
    """
    a, _, _, _ = tokens
    w, w_boxes = weights
    tiles_ptr, group_m = list_of
    full, empty = barriers
    STEP: gl.constexpr = a.block_shape[1]
    OUT: gl.constexpr = WEIGHTS // 2 if GATED else WEIGHTS
    row_tiles = gl.load(tiles_ptr)
    col_tiles = gl.cdiv(N, OUT)
    tiles = row_tiles * col_tiles
    list_of = (tiles_ptr, row_tiles, col_tiles, group_m)
    steps = gl.cdiv(K, STEP)
    look_ahead = gl.minimum(steps, STAGES) - 1
    slot = 0
    phase = 1
    count = 0
    tile = gl.program_id(0)
    row, w_row, pieces = _commit_tile(mail, count, list_of, tile, N, OUT, GATED)
    while tile < tiles:
        count += 1
        following = renamed((tile, row, w_row, pieces))
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            k = step * STEP
            load_tokens(tokens, row, k, pieces, bar, slot, WEIGHTS * _ROW)
            load_weights(w, w_row, k, bar, w_boxes.index(slot))
            slot, phase = next_slot(slot, phase)
            if step == look_ahead:
                next_tile = schedule(tile, tiles, counters_ptr, True)
                following = (next_tile,) + _commit_tile(mail, count, list_of, next_tile, N, OUT,
                                                        GATED)  # fmt: skip
        tile, row, w_row, pieces = renamed(following)
