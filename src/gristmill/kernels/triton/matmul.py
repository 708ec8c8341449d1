"""C = act(A @ B + bias) by tiles of C, one per program, also with K split over several programs.

    A (batch, M, K) and B (batch, K, N) by strides in elements, C (batch, M, N) contiguous.

Sums, bias and activation are fp32; C is rounded once. PRE, if it is there, gets the value before
the activation, rounded to its dtype; the activation is of the value that was not rounded.
"""

import triton
import triton.language as tl

from .epilogue import (
    activate,
    let_successor_begin,
    prefetch,
    product,
    rounded,
    tile_of,
    wait_for_predecessor,
)


@triton.jit
def tiles(
    a,
    b,
    bias,
    c,
    pre,
    rows,
    columns,
    depth,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BATCHED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    EARLY: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """One tile of C, (BLOCK_M, BLOCK_N), or with SPLIT > 1 the sum over a SPLIT-th of K.

    With SPLIT > 1 `c` is the fp32 buffer (SPLIT, batch, M, N) of partial sums, and `add_partials`
    does the rest. SWAP multiplies B^T by A^T, so that the narrow side of the tensor core's tile
    (8 or 16) is M and the wide one (64) is N: for few rows. EARLY: the next kernel may begin when
    this one does, not when its sums are done. LINES: so many cache lines of each column of B, which
    must be contiguous along K, are asked for before the kernel before this one has ended.
    WIDE: offsets need 64 bits.
    EVEN_N, EVEN_K: N, K are multiples of their blocks (K of BLOCK_K * SPLIT).
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    number = tl.program_id(0)
    part = 0
    if SPLIT > 1:
        part = number % SPLIT
        number = number // SPLIT
    member = 0
    if BATCHED:
        member = number // (tiles_m * tiles_n)
        number = number % (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(number, tiles_m, tiles_n, GROUP)

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(depth, BLOCK_K * SPLIT)
    k = part * steps * BLOCK_K + tl.arange(0, BLOCK_K)
    # Of int64 where strides are, and without them (a stride that is the constant 1) by WIDE.
    m_offset, n_offset, k_offset, member_offset = m, n, k, member
    if WIDE:
        m_offset, n_offset, k_offset = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
        member_offset = tl.cast(member, tl.int64)
    a += member_offset * a_batch
    b += member_offset * b_batch
    present = m < rows
    a_places = a + m_offset[:, None] * a_row + k_offset[None, :] * a_column
    if SWAP:
        b_places = b + n_offset[:, None] * b_column + k_offset[None, :] * b_row
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        b_places = b + k_offset[:, None] * b_row + n_offset[None, :] * b_column
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    if LINES > 0 and DEPENDENT:
        # 128 bytes each. Beyond the end: the first element again.
        ahead = part * steps * BLOCK_K + tl.arange(0, LINES) * (128 // b.dtype.element_ty.itemsize)
        ahead_offset = ahead
        if WIDE:
            ahead_offset = ahead.to(tl.int64)
        lines = n_offset[:, None] * b_column + ahead_offset[None, :]
        prefetch(b + tl.where((n < columns)[:, None] & (ahead < depth)[None, :], lines, 0))
    wait_for_predecessor(DEPENDENT)
    if EARLY:
        let_successor_begin(DEPENDENT)

    for step in range(steps):
        inside = tl.arange(0, BLOCK_K) < depth - (part * steps + step) * BLOCK_K
        if EVEN_K:
            a_tile = tl.load(a_places, mask=present[:, None], other=0.0)
        else:
            a_tile = tl.load(a_places, mask=present[:, None] & inside[None, :], other=0.0)
        if EVEN_N and EVEN_K:
            b_tile = tl.load(b_places)
        elif SWAP:
            b_tile = tl.load(b_places, mask=(n < columns)[:, None] & inside[None, :], other=0.0)
        else:
            b_tile = tl.load(b_places, mask=inside[:, None] & (n < columns)[None, :], other=0.0)
        if SWAP:
            sums = product(b_tile, tl.trans(a_tile), sums, EMULATED)
        else:
            sums = product(a_tile, b_tile, sums, EMULATED)
        a_places += BLOCK_K * a_column
        b_places += BLOCK_K * b_row
    if not EARLY:
        let_successor_begin(DEPENDENT)
    if SWAP:
        sums = tl.trans(sums)

    inside_c = present[:, None]
    if not EVEN_N:
        inside_c = inside_c & (n < columns)[None, :]
    if SPLIT > 1:
        batches = tl.num_programs(0) // (SPLIT * tiles_m * tiles_n)
        plane = part * batches + member
        places = _places(plane, m, n, rows, columns, WIDE)
        tl.store(c + places, sums, mask=inside_c)
    else:
        if bias is not None:
            sums += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        places = _places(member, m, n, rows, columns, WIDE)
        if pre is not None:
            tl.store(pre + places, rounded(sums, pre, EMULATED), mask=inside_c)
        tl.store(c + places, rounded(activate(sums, ACTIVATION), c, EMULATED), mask=inside_c)


@triton.jit
def add_partials(
    partials,
    bias,
    c,
    pre,
    count,
    columns,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """C = act(sum over SPLIT of partials (SPLIT, count) + bias), added in order: the same each run.

    `count` is batch * M * N. BLOCK elements of C per program.
    """
    wait_for_predecessor(DEPENDENT)
    let_successor_begin(DEPENDENT)
    start = tl.program_id(0)
    size = count
    if WIDE:
        start = start.to(tl.int64)
        size = tl.cast(count, tl.int64)
    places = start * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    sums = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        sums += tl.load(partials + part * size + places, mask=inside, other=0.0)
    if bias is not None:
        sums += tl.load(bias + places % columns, mask=inside, other=0.0).to(tl.float32)
    if pre is not None:
        tl.store(pre + places, rounded(sums, pre, EMULATED), mask=inside)
    tl.store(c + places, rounded(activate(sums, ACTIVATION), c, EMULATED), mask=inside)


@triton.jit
def _places(plane, m, n, rows, columns, WIDE: tl.constexpr):
    """Where the elements (plane, m, n) of a contiguous (planes, rows, columns) lie."""
    if WIDE:
        first = (tl.cast(plane, tl.int64) * rows + m) * columns
    else:
        first = (plane * rows + m) * columns
    return first[:, None] + n[None, :]
