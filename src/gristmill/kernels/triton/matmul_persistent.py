"""C = act(A @ B + bias) by programs that stay: each makes tile after tile of C, fed by TMA.

    A (M, K), K contiguous; B (K, N) with N contiguous, or as a linear layer's weight (N, K) with K
    contiguous; C (M, N) contiguous. Pointers and rows at multiples of 16 bytes.

The descriptors that TMA needs are made by each program in the global scratch memory of its launch.
Sums, bias and activation are fp32; C is rounded once. PRE as in matmul.py.
"""

import triton
import triton.language as tl

from .epilogue import (
    activate,
    let_successor_begin,
    product,
    rounded,
    tile_of,
    wait_for_predecessor,
)


@triton.jit
def persistent(
    a,
    b,
    bias,
    c,
    pre,
    rows,
    columns,
    depth,
    a_row,
    b_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """`a_row` and `b_row`: elements from one row of the matrix as it lies to the next.

    B_TRANSPOSED: b is (N, K). A tile of C is stored in PARTS pieces of BLOCK_N // PARTS columns:
    less shared memory, so more stages of A and B. The loops over tiles and over K are made one, so
    that the next tile is loaded while one is stored. TMA reads zeros beyond the end and stores
    nothing there: ragged sizes need no mask.
    """
    wait_for_predecessor(DEPENDENT)
    let_successor_begin(DEPENDENT)
    part_n: tl.constexpr = BLOCK_N // PARTS
    a_rows = tl.make_tensor_descriptor(a, [rows, depth], [a_row, 1], [BLOCK_M, BLOCK_K])
    if B_TRANSPOSED:
        b_rows = tl.make_tensor_descriptor(b, [columns, depth], [b_row, 1], [BLOCK_N, BLOCK_K])
    else:
        b_rows = tl.make_tensor_descriptor(b, [depth, columns], [b_row, 1], [BLOCK_K, BLOCK_N])
    c_rows = tl.make_tensor_descriptor(c, [rows, columns], [columns, 1], [BLOCK_M, part_n])
    if pre is not None:
        pre_rows = tl.make_tensor_descriptor(pre, [rows, columns], [columns, 1], [BLOCK_M, part_n])

    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    steps = tl.cdiv(depth, BLOCK_K)
    # Warps that only load beside others that multiply (warp_specialize) were no faster on an H200.
    for number in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(number, tiles_m, tiles_n, GROUP)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            a_tile = a_rows.load([m, step * BLOCK_K])
            if B_TRANSPOSED:
                b_tile = b_rows.load([n, step * BLOCK_K]).T
            else:
                b_tile = b_rows.load([step * BLOCK_K, n])
            sums = product(a_tile, b_tile, sums, EMULATED)

        if PARTS == 1:
            values = (sums,)
        elif PARTS == 2:
            values = _halves(sums, BLOCK_M, BLOCK_N)
        else:
            low, high = _halves(sums, BLOCK_M, BLOCK_N)
            values = _halves(low, BLOCK_M, BLOCK_N // 2) + _halves(high, BLOCK_M, BLOCK_N // 2)
        for part in tl.static_range(PARTS):
            value = values[part]
            at = n + part * part_n
            if bias is not None:
                place = at + tl.arange(0, part_n)
                value += tl.load(bias + place, mask=place < columns, other=0.0).to(tl.float32)[None]
            if pre is not None:
                pre_rows.store([m, at], rounded(value, pre, EMULATED))
            c_rows.store([m, at], rounded(activate(value, ACTIVATION), c, EMULATED))


@triton.jit
def _halves(x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of a tile."""
    pairs = tl.permute(tl.reshape(x, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1))
    left, right = tl.split(pairs)
    return left, right
