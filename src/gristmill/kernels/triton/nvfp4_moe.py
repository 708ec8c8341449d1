"""The two products of a mixture of experts: rows of tokens times NVFP4 matrices of their experts.

    The first, GATED:  h = act(g, u),  (g, u) = (x @ (E * S)^T) * row_scale + bias
    The second:        partial = (h @ (E * S)^T) * row_scale + bias

Both are the product of nvfp4.py, with the weight on the left, for a tile of tokens that have one
expert. A slot is one entry of the router's (M, k) choices, token * k + j. Many slots were sorted by
expert before, and come as a list of tiles that lies on the device; the grid has a program for each
that there could be, and those beyond the list's end do nothing. Few slots need no sorting: each
program looks at all of them and takes those that have its own expert.
"""

import triton
import triton.language as tl

from .epilogue import let_successor_begin, product, rounded, tile_of, wait_for_predecessor
from .nvfp4 import scale_pairs, value_pairs


@triton.jit
def nvfp4_experts(
    x,
    tiles,
    tile_count,
    slot_of,
    ids,
    mapped,
    codes,
    scales,
    row_scale,
    bias,
    y,
    most_tiles,
    topk,
    experts,
    map_size,
    map_step,
    ids_row,
    ids_column,
    rows,
    blocks,
    x_row,
    code_matrix,
    code_row,
    scale_matrix,
    scale_row,
    row_scale_matrix,
    row_scale_row,
    limit,
    slope,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BYTES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """BLOCK_M slots of one expert times BLOCK_N rows of its matrix, which has `rows` of them.

    SLOTS = 0: `tiles` has `tile_count` rows of (expert, first position, count, size), and `slot_of`
    gives the slot at a position. Else there are `most_tiles` slots, at most SLOTS, each of which is
    its own position, and their experts are in `ids`, or `mapped` at those, if they are below
    `experts`; others take no part.
    GATED: x has a row for each token, and y, of x's dtype, one for each position. Else x has a row
    for each position, and y, fp32, one for each slot. Offsets into y fit 32 bits.
    `blocks` is K / 16. TILES, EVEN_K, BYTES: as in nvfp4.py.
    """
    across = tl.cdiv(rows, BLOCK_N)
    tile, part = tile_of(tl.program_id(0), most_tiles, across, GROUP)
    m = tl.arange(0, BLOCK_M)
    wait_for_predecessor(DEPENDENT)
    if SLOTS == 0:
        if tile >= tl.load(tile_count):
            return
        expert = tl.load(tiles + 4 * tile)
        position = tl.load(tiles + 4 * tile + 1) + m
        present = m < tl.load(tiles + 4 * tile + 2)
        slot = tl.load(slot_of + position, mask=present, other=0)
    else:
        every = tl.arange(0, SLOTS)
        there = every < most_tiles
        chosen = _chosen(ids, mapped, every, there, topk, map_size, map_step, ids_row, ids_column)
        expert = tl.max(tl.where(every == tile, chosen, -1), 0)
        mine = there & (chosen == expert)
        before = tl.sum((mine & (every < tile)).to(tl.int32), 0)
        # Of slots with one expert every BLOCK_M-th speaks for itself and those that follow.
        if (expert < 0) | (expert >= experts) | (before % BLOCK_M != 0):
            return
        place = tl.cumsum(mine.to(tl.int32), 0) - 1 - before
        taken = mine[None, :] & (place[None, :] == m[:, None])
        slot = tl.max(tl.where(taken, every[None, :], -1), 1)
        present = slot >= 0
        slot = tl.maximum(slot, 0)
        position = slot

    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.minimum(n, rows - 1)
    if GATED:
        # Of 16 rows eight are of the gate and eight are those of up beside them: a thread of the
        # tensor cores' tile has both.
        half = rows // 2
        inner = tl.minimum(n // 16 * 8 + n % 8, half - 1)
        r = inner + (n // 8 % 2) * half
        line = slot // topk
    else:
        line = position
    steps = tl.cdiv(blocks, BLOCK_K // 16)
    block = tl.arange(0, BLOCK_K // 16)
    byte = tl.arange(0, BLOCK_K // 2)
    k = tl.arange(0, BLOCK_K)

    matrix = expert.to(tl.int64)
    code_places = codes + matrix * code_matrix
    code_places += r.to(tl.int64)[:, None] * code_row + byte[None, :]
    scale_places = scales + matrix * scale_matrix
    if TILES:
        inside_tile = (r % 32) * 16 + (r % 128) // 32 * 4
        above = (r // 128).to(tl.int64) * scale_row * 512 + inside_tile
        scale_places += above[:, None] + (block // 4 * 512 + block % 4)[None, :]
    else:
        scale_places += r.to(tl.int64)[:, None] * scale_row + block[None, :]
    x_places = x + line.to(tl.int64)[:, None] * x_row + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    for step in range(steps):
        if EVEN_K:
            x_tile = tl.load(x_places, mask=present[:, None], other=0.0)
            code_tile = tl.load(code_places)
            scale_tile = tl.load(scale_places)
        else:
            left = blocks - step * (BLOCK_K // 16)
            x_tile = tl.load(x_places, mask=present[:, None] & (k < left * 16)[None, :], other=0.0)
            code_tile = tl.load(code_places, mask=(byte < left * 8)[None, :], other=0)
            scale_tile = tl.load(scale_places, mask=(block < left)[None, :], other=0)
        factors = scale_pairs(scale_tile, x.dtype.element_ty, EMULATED)
        factors = tl.broadcast_to(factors[:, :, None], (BLOCK_N, BLOCK_K // 16, 8))
        factors = factors.reshape(BLOCK_N, BLOCK_K // 2)
        pairs = value_pairs(code_tile, factors, x.dtype.element_ty, BYTES, EMULATED)
        values = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
        values = values.reshape(BLOCK_N, BLOCK_K).to(x.dtype.element_ty, bitcast=True)
        sums = product(values, tl.trans(x_tile), sums, EMULATED)
        x_places += BLOCK_K
        code_places += BLOCK_K // 2
        scale_places += (BLOCK_K // 64) * 512 if TILES else BLOCK_K // 16
    let_successor_begin(DEPENDENT)

    # Values were smaller than they are; see `value_pairs`.
    restored: tl.constexpr = 128.0 if x.dtype.element_ty == tl.float16 else 512.0
    row_scales = tl.load(row_scale + matrix * row_scale_matrix + r.to(tl.int64) * row_scale_row)
    sums = sums * (row_scales * restored)[:, None]
    if bias is not None:
        sums += tl.load(bias + matrix * rows + r).to(tl.float32)[:, None]
    if GATED:
        paired = sums.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1)
        gate, up = tl.split(paired)
        h = activate(gate, up, limit, slope, ACTIVATION).reshape(BLOCK_N // 2, BLOCK_M)
        column = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        places = position[:, None] * half + column[None, :]
        stored = present[:, None] & (column < half)[None, :]
        tl.store(y + places, rounded(tl.trans(h), y, EMULATED), mask=stored)
    else:
        places = slot[:, None] * rows + n[None, :]
        stored = present[:, None] & (n < rows)[None, :]
        tl.store(y + places, tl.trans(sums), mask=stored)


@triton.jit
def _chosen(ids, mapped, slot, there, topk, map_size, map_step, ids_row, ids_column):
    """The expert of each slot as int32, and -1 where the map has none."""
    places = (slot // topk).to(tl.int64) * ids_row + (slot % topk) * ids_column
    wanted = tl.load(ids + places, mask=there, other=-1)
    if mapped is not None:
        known = (wanted >= 0) & (wanted < map_size)
        wanted = tl.load(mapped + tl.where(known, wanted, 0) * map_step, mask=known, other=-1)
    # Numbers that 32 bits do not hold are no experts.
    return tl.where((wanted >= 0) & (wanted < 2147483647), wanted, -1).to(tl.int32)


@triton.jit
def activate(gate, up, limit, slope, ACTIVATION: tl.constexpr):
    """The activation of fp32 values. An infinite `limit` cuts nothing; a NaN stays one."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    if ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "swiglu_oai":
        gate = gate / (1.0 + tl.exp(-slope * gate))
        up += 1.0
    else:
        tl.static_assert(ACTIVATION == "silu", "unknown activation")
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up
