"""Y = (X @ (E * S)^T) * row_scale + bias: X in 16 bits, the weight NVFP4 in a checkpoint's order.

    X (M, K) by rows; E, two E2M1 codes to a byte, (N, K / 2), the even column in the low half;
    S, E4M3, one to a block of 16 columns: (N, K / 16), or swizzled in tiles of 128 rows by 4.

The weight is the left operand, so that the narrow side of the tensor core's tile (8 or 16) is M.
Its values are made in registers and exact in X's dtype: E has two significant bits, S has four.
Sums, row scale and bias are fp32; Y is rounded once.
"""

import triton
import triton.language as tl

from .epilogue import let_successor_begin, prefetch, product, rounded, wait_for_predecessor


def _decoding(count: int, shift: int, multiply: str) -> tl.constexpr:
    """PTX: `count` bytes of codes in a register, and a pair of factors for each, to as many pairs.

    First comes a register with the low half of a byte at its bit 12 and the high half at its bit
    28; other bits are whatever they are.
    """
    lines = [".reg .b32 moved, raw, bits, zero;", "mov.b32 zero, 0x80008000;"]
    if count > 1:
        lines.append(f"shl.b32 moved, ${count}, 4;")
    for at in range(count):
        if count > 1:
            lines.append(f"prmt.b32 raw, ${count}, moved, {at << 12 | (4 + at) << 4:#06x};")
        else:
            lines.append("mul.lo.u32 raw, $1, 0x01001000;")
        lines.append("and.b32 bits, raw, 0x70007000;")
        lines.append(f"shr.b32 bits, bits, {shift};")
        lines.append("lop3.b32 bits, raw, 0x80008000, bits, 0xEA;")  # (raw & signs) | bits
        lines.append(f"{multiply} ${at}, bits, ${count + 1 + at}, zero;")
    return tl.constexpr("{ " + " ".join(lines) + " }")


# No product of two bf16 numbers before sm_90; the sum with -0 is none.
_FOUR_BF16 = _decoding(4, 6, "fma.rn.bf16x2")
_ONE_BF16 = _decoding(1, 6, "fma.rn.bf16x2")
_FOUR_FP16 = _decoding(4, 3, "fma.rn.f16x2")
_ONE_FP16 = _decoding(1, 3, "fma.rn.f16x2")
_FOUR = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")
_ONE = tl.constexpr("=r,r,r")

_SCALE_BF16 = tl.constexpr(
    """{ .reg .b16 half; .reg .b32 bits; .reg .f32 number;
    shl.b32 bits, $1, 7; and.b32 bits, bits, 0xBF80; cvt.u16.u32 half, bits;
    cvt.f32.f16 number, half; mul.rn.f32 number, number, 0f7E000000;
    cvt.rn.bf16x2.f32 $0, number, number; }"""
)
_SCALE_FP16 = tl.constexpr(
    """{ .reg .b32 bits, power; mov.b32 power, 0x78007800;
    shl.b32 bits, $1, 7; and.b32 bits, bits, 0xBF80; prmt.b32 bits, bits, bits, 0x1010;
    mul.rn.f16x2 $0, bits, power; }"""
)


@triton.jit
def nvfp4_linear(
    x,
    codes,
    scales,
    row_scale,
    bias,
    y,
    rows,
    columns,
    blocks,
    x_row,
    code_row,
    scale_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BYTES: tl.constexpr,
    EARLY: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """One tile of Y, (BLOCK_M, BLOCK_N), or with SPLIT > 1 the sum over a SPLIT-th of K.

    With SPLIT > 1 `y` is the fp32 buffer (SPLIT, M, N) of partial sums, times their row's scale,
    and `add_partials` does the rest. `blocks` is K / 16. TILES: scales are swizzled, and
    `scale_row` is the number of tiles side by side. EVEN_K: K is a multiple of BLOCK_K * SPLIT.
    BYTES: how many bytes of codes are decoded at a time, as many as lie together in a register.
    EARLY, LINES: as in matmul.py, of the weight, which nothing writes.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    number = tl.program_id(0)
    part = number % SPLIT
    number = number // SPLIT
    # Programs that share rows of the weight, which are most of what is read, run side by side.
    m = (number % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (number // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    present = m < rows
    # Rows beyond the weight's last are the last, and are not stored.
    r = tl.minimum(n, columns - 1)
    steps = tl.cdiv(blocks, (BLOCK_K // 16) * SPLIT)
    block = tl.arange(0, BLOCK_K // 16)
    byte = tl.arange(0, BLOCK_K // 2)
    k = tl.arange(0, BLOCK_K)
    first = part * steps * (BLOCK_K // 16)

    code_places = codes + r.to(tl.int64)[:, None] * code_row + (first * 8 + byte)[None, :]
    if TILES:
        inside_tile = (r % 32) * 16 + (r % 128) // 32 * 4
        above = (r // 128).to(tl.int64) * scale_row * 512 + inside_tile
        across = (first // 4 + block // 4) * 512 + block % 4
        scale_places = scales + above[:, None] + across[None, :]
    else:
        scale_places = scales + r.to(tl.int64)[:, None] * scale_row + (first + block)[None, :]
    x_places = x + m.to(tl.int64)[:, None] * x_row + (first * 16 + k)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    if LINES > 0 and DEPENDENT:
        # 128 bytes each. Beyond the end: the first of the row again.
        ahead = first * 8 + tl.arange(0, LINES) * 128
        ahead = tl.where(ahead < blocks * 8, ahead, 0)
        prefetch(codes + r.to(tl.int64)[:, None] * code_row + ahead[None, :])
    wait_for_predecessor(DEPENDENT)
    if EARLY:
        let_successor_begin(DEPENDENT)

    for step in range(steps):
        if EVEN_K:
            x_tile = tl.load(x_places, mask=present[:, None], other=0.0)
            code_tile = tl.load(code_places)
            scale_tile = tl.load(scale_places)
        else:
            left = blocks - first - step * (BLOCK_K // 16)
            x_tile = tl.load(x_places, mask=present[:, None] & (k < left * 16)[None, :], other=0.0)
            code_tile = tl.load(code_places, mask=(byte < left * 8)[None, :], other=0)
            scale_tile = tl.load(scale_places, mask=(block < left)[None, :], other=0)
        factors = scale_pairs(scale_tile, x.dtype.element_ty, EMULATED)
        factors = tl.broadcast_to(factors[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
        factors = factors.reshape(BLOCK_N, BLOCK_K // 2)
        pairs = value_pairs(code_tile, factors, x.dtype.element_ty, BYTES, EMULATED)
        # Which register holds what does not change by this: a pair is two neighbours of a row.
        values = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
        values = values.reshape(BLOCK_N, BLOCK_K).to(x.dtype.element_ty, bitcast=True)
        sums = product(values, tl.trans(x_tile), sums, EMULATED)
        x_places += BLOCK_K
        code_places += BLOCK_K // 2
        scale_places += (BLOCK_K // 64) * 512 if TILES else BLOCK_K // 16
    if not EARLY:
        let_successor_begin(DEPENDENT)

    # Values were smaller than they are; see `value_pairs`.
    restored: tl.constexpr = 128.0 if x.dtype.element_ty == tl.float16 else 512.0
    sums = sums * (tl.load(row_scale + r) * restored)[:, None]
    if bias is not None:
        sums += tl.load(bias + r).to(tl.float32)[:, None]
    sums = tl.trans(sums)
    places = (part * rows.to(tl.int64) + m)[:, None] * columns + n[None, :]
    stored = present[:, None] & (n < columns)[None, :]
    tl.store(y + places, rounded(sums, y, EMULATED), mask=stored)


@triton.jit
def scale_pairs(scales, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """E4M3 bytes (int8) as pairs of twice the same number: times 2^7 in fp16, 2^117 in bf16.

    An E4M3 number's bits, moved to where fp16 has its own, are the number times 2^-8, subnormal
    ones too; a product does the rest. NaN, which no scale is, counts as 480.
    """
    if EMULATED:
        bits = (scales.to(tl.int32) << 7) & 0xBF80
        half = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if dtype == tl.float16:
            number = (half * 32768.0).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            number = (half * 42535295865117307932921825928971026432.0).to(tl.uint32, bitcast=True)
            number = number >> 16
        return number | (number << 16)
    wide = scales.to(tl.int32)
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _SCALE_FP16, "=r,r", [wide], dtype=tl.uint32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        _SCALE_BF16, "=r,r", [wide], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def value_pairs(codes, factors, dtype: tl.constexpr, BYTES: tl.constexpr, EMULATED: tl.constexpr):
    """The two values of each byte times their scale: the low half of a byte in the low half.

    The three lower bits of a code, moved to the low end of a number's exponent, are its magnitude
    times 2^-14 in fp16 and 2^-126 in bf16 (a half is subnormal there, which products keep). With
    `factors` of `scale_pairs` that makes the value times 2^-7 and 2^-9.
    """
    if EMULATED:
        whole = codes.to(tl.uint32)
        raw = (whole << 24) | ((whole & 15) << 12)
        shift: tl.constexpr = 3 if dtype == tl.float16 else 6
        bits = ((raw & 0x70007000) >> shift) | (raw & 0x80008000)
        low = _widened(bits & 0xFFFF, dtype) * _widened(factors & 0xFFFF, dtype)
        high = _widened(bits >> 16, dtype) * _widened(factors >> 16, dtype)
        return _narrowed(low, dtype) | (_narrowed(high, dtype) << 16)
    if BYTES == 4:
        four: tl.constexpr = _FOUR_FP16 if dtype == tl.float16 else _FOUR_BF16
        return tl.inline_asm_elementwise(
            four, _FOUR, [codes, factors], dtype=tl.uint32, is_pure=True, pack=4
        )
    one: tl.constexpr = _ONE_FP16 if dtype == tl.float16 else _ONE_BF16
    return tl.inline_asm_elementwise(
        one, _ONE, [codes.to(tl.uint32), factors], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _widened(bits, dtype: tl.constexpr):
    """The fp32 number of 16 bits."""
    if dtype == tl.float16:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(number, dtype: tl.constexpr):
    """The 16 bits of a number that has no more."""
    if dtype == tl.float16:
        return number.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return number.to(tl.uint32, bitcast=True) >> 16
