"""Products with 4-bit weights, in the layout of `moekit_triton.packing`.

One mask turns a pair of columns into a pair of 16-bit floats. int4: v becomes the lowest mantissa
bits of `bias`, whose unit in the last place is 1, and adding the offset leaves v - zero. e2m1: the
bits move to their positions in the wider format, and a power of two corrects the exponent. Scales
multiply the sums of a group, not the weights, so no intermediate value is rounded.

Products are swap-AB (W @ A.T): tensor cores take the left operand from registers, where the weights
are made, and the right operand, tokens, may be narrow.
"""

import triton
import triton.language as tl
from moekit_kernels.numerics import INTERPRETED, convert, dot

from moekit.plugin import INT4_ZERO

from .tiles import CHUNK

_QUARTER = CHUNK // 4
_INTERPRETED = tl.constexpr(INTERPRETED)
_ZERO = tl.constexpr(INT4_ZERO)
_CHUNK, _PART = tl.constexpr(CHUNK), tl.constexpr(_QUARTER)


def _int4_asm(kind: str, bias: int, one: int) -> str:
    """Return PTX. $0-$3: two values of each quarter; $4: two int16 of one row; from $5: the offsets
    of both for each quarter, which are equal (every layout has neighbours along K in a register,
    where K is contiguous)."""
    lines = [f"mov.b32 one, {one:#x}{one:04x};", "mov.b32 s, $4;"]
    for quarter in range(4):
        if quarter:
            lines.append(f"shr.u32 s, $4, {4 * quarter};")
        lines.append(f"lop3.b32 ${quarter}, s, 0x000f000f, {bias:#x}{bias:04x}, 0xea;")  # & |
        lines.append(f"fma.rn.{kind} ${quarter}, ${quarter}, one, ${5 + 2 * quarter};")
    return "{ .reg .b32 s, one;\n" + "\n".join(lines) + "\n}"


def _e2m1_asm(kind: str, mantissa: int, power: int) -> str:
    """Return PTX. $0-$3: two values of each quarter; $4: two int16. mantissa: bits of the
    format."""
    low = 7 << (mantissa - 1)
    lines = [f"mov.b32 p, {power:#x}{power:04x};", "mov.b32 z, 0x80008000;"]
    for quarter in range(4):
        to_sign, to_value = 12 - 4 * quarter, mantissa - 1 - 4 * quarter
        lines.append(f"shl.b32 s, $4, {to_sign};")
        lines.append("and.b32 s, s, 0x80008000;")
        shift = "shl.b32" if to_value >= 0 else "shr.u32"
        lines.append(f"{shift} t, $4, {abs(to_value)};")
        lines.append(f"lop3.b32 t, t, {low << 16 | low:#x}, s, 0xea;")  # (t & low) | s
        lines.append(f"fma.rn.{kind} ${quarter}, t, p, z;")  # adding -0 keeps the sign of zero
    return "{ .reg .b32 s, t, p, z;\n" + "\n".join(lines) + "\n}"


# 128 and 1 in bf16, 1024 and 1 in fp16; 2**126 in bf16, 2**14 in fp16.
_INT4_BF16 = tl.constexpr(_int4_asm("bf16x2", 0x4300, 0x3F80))
_INT4_FP16 = tl.constexpr(_int4_asm("f16x2", 0x6400, 0x3C00))
_E2M1_BF16 = tl.constexpr(_e2m1_asm("bf16x2", 7, 0x7E80))
_E2M1_FP16 = tl.constexpr(_e2m1_asm("f16x2", 10, 0x7400))


@triton.jit
def value_of_code(w, offset, QUARTER: tl.constexpr, E2M1: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of the 4 bits from bit 4 * QUARTER on.

    Compiled products use inline assembly instead, which the interpreter does not run.
    """
    code = (w.to(tl.int32) >> (4 * QUARTER)) & 15
    if E2M1:
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    else:
        value = (code - (offset & 15)).to(tl.float32)
    return convert(value, DTYPE)


@triton.jit
def _values(w, offsets, E2M1: tl.constexpr, DTYPE: tl.constexpr):
    """Return the four quarters' values, DTYPE (BLOCK_N, 32), of int16 (BLOCK_N, 32)."""
    values = ()
    if _INTERPRETED:
        for q in tl.static_range(4):
            values += (value_of_code(w, offsets[q], q, E2M1, DTYPE),)
    else:
        if E2M1:
            ASM: tl.constexpr = _E2M1_BF16 if DTYPE == tl.bfloat16 else _E2M1_FP16
            made = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r", [w],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            ASM: tl.constexpr = _INT4_BF16 if DTYPE == tl.bfloat16 else _INT4_FP16
            made = tl.inline_asm_elementwise(
                ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
                [w, offsets[0], offsets[1], offsets[2], offsets[3]],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        for q in tl.static_range(4):
            values += (made[q].to(DTYPE, bitcast=True),)
    return values


@triton.jit
def _terms(ptr, step, rows, ok, GROUP: tl.constexpr):
    """Return four vectors of a step's scales or offsets, one per quarter. ptr: (BLOCK_N,)."""
    EACH: tl.constexpr = GROUP if (GROUP == 32) or (GROUP == 64) else _CHUNK
    p = ptr + (_CHUNK // EACH * step) * rows
    terms = ()
    for q in tl.static_range(4):
        if q * _PART % EACH == 0:
            term = tl.load(p + q * _PART // EACH * rows, mask=ok, other=0.0)
        terms += (term,)
    return terms


@triton.jit
def _scaled(acc, sums, scale, E2M1: tl.constexpr):
    """Return acc + sums * scale; an e2m1 scale is the exponent field of an fp32."""
    if E2M1:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return acc + sums * scale.to(tl.float32)[:, None]


@triton.jit
def _chunk_product(acc, w, a, scales, offsets, GROUP: tl.constexpr, E2M1: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Return acc + w @ a of one chunk (BLOCK_N, BLOCK_M); a: its quarters (32, BLOCK_M)."""
    wide = ()
    for q in tl.static_range(4):
        wide += (tl.broadcast_to(offsets[q][:, None], (BLOCK_N, _PART)),)
    values = _values(w, wide, E2M1, a[0].dtype)
    if GROUP == 0:
        for q in tl.static_range(4):
            acc = dot(values[q], a[q], acc, "ieee")
    else:
        zeros = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        sums = zeros
        for q in tl.static_range(4):
            sums = dot(values[q], a[q], sums, "ieee")
            if (q + 1) * _PART % GROUP == 0:  # the group's last quarter
                acc = _scaled(acc, sums, scales[q], E2M1)
                sums = zeros
    return acc


@triton.jit
def _quarters(a_ptrs, row_ok, left, EVEN_K: tl.constexpr):
    """Load A's columns of a chunk as quarters, (32, BLOCK_M). left: columns from the chunk on."""
    found = ()
    for q in tl.static_range(4):
        mask = row_ok[:, None]
        if not EVEN_K:
            mask = mask & (tl.arange(0, _PART) < left - q * _PART)[None, :]
        found += (tl.trans(tl.load(a_ptrs + q * _PART, mask=mask, other=0.0)),)
    return found


@triton.jit
def _group_start(ptr, expert, rows, offs_n, K, GROUP: tl.constexpr):
    """Return pointers (BLOCK_N,) to an expert's first group."""
    groups = 1 if GROUP == 0 else tl.cdiv(K, _CHUNK) * (_CHUNK // GROUP)
    return ptr + expert * groups * rows + offs_n


@triton.jit
def packed_products(
    a_rows, row_ok, w_ptr, scale_ptr, offset_ptr, expert, row0, up_rows, rows, K, n_ok, split,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, OFFSETS: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a @ w.T over a split's share of K, fp32 (BLOCK_M, BLOCK_N), for the weight rows from
    row0 on and, if GATED, for those that start up_rows later.

    a_rows: pointers (BLOCK_M,). GROUP: columns that share a scale; 0: no scale is applied here.
    """
    DTYPE: tl.constexpr = a_rows.dtype.scalar.element_ty
    chunks = tl.cdiv(K, _CHUNK)
    share = tl.cdiv(chunks, SPLITS)
    begin, end = split * share, tl.minimum((split + 1) * share, chunks)
    offs_n = row0 + tl.arange(0, BLOCK_N)
    col = tl.arange(0, _PART)
    a_ptrs = a_rows[:, None] + (begin * _CHUNK + col)[None, :]
    w_ptrs = w_ptr + ((expert * chunks + begin) * rows + offs_n)[:, None] * _PART + col[None, :]
    HALF: tl.constexpr = (0xE400 if DTYPE == tl.float16 else 0xC300) + _ZERO
    same = tl.full((BLOCK_N,), HALF, tl.int32) * 0x10001
    offsets, up_offsets = (same, same, same, same), (same, same, same, same)
    if OFFSETS:
        offset_ptrs = _group_start(offset_ptr, expert, rows, offs_n, K, GROUP)
        if GROUP == 0:
            offsets = _terms(offset_ptrs, 0, rows, n_ok, GROUP)
            if GATED:
                up_offsets = _terms(offset_ptrs + up_rows, 0, rows, n_ok, GROUP)
    scales, up_scales = offsets, up_offsets
    if GROUP > 0:
        scale_ptrs = _group_start(scale_ptr, expert, rows, offs_n, K, GROUP)
        first = tl.minimum(begin, chunks - 1)
        scales = _terms(scale_ptrs, first, rows, n_ok, GROUP)
        if GATED:
            up_scales = _terms(scale_ptrs + up_rows, first, rows, n_ok, GROUP)

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(begin, end):
        a = _quarters(a_ptrs, row_ok, K - step * _CHUNK, EVEN_K)
        w = tl.load(w_ptrs, mask=n_ok[:, None], other=0)
        if OFFSETS and GROUP > 0:
            offsets = _terms(offset_ptrs, step, rows, n_ok, GROUP)
        acc = _chunk_product(acc, w, a, scales, offsets, GROUP, E2M1, BLOCK_M, BLOCK_N)
        if GATED:
            w = tl.load(w_ptrs + up_rows * _PART, mask=n_ok[:, None], other=0)
            if OFFSETS and GROUP > 0:
                up_offsets = _terms(offset_ptrs + up_rows, step, rows, n_ok, GROUP)
            up = _chunk_product(up, w, a, up_scales, up_offsets, GROUP, E2M1, BLOCK_M,
                                BLOCK_N)  # fmt: skip
        if GROUP > 0:  # a step ahead: the compiler loads early only what a product needs
            following = tl.minimum(step + 1, chunks - 1)
            scales = _terms(scale_ptrs, following, rows, n_ok, GROUP)
            if GATED:
                up_scales = _terms(scale_ptrs + up_rows, following, rows, n_ok, GROUP)
        a_ptrs += _CHUNK
        w_ptrs += rows * _PART
    return tl.trans(acc), tl.trans(up)
