"""How the kernels of the norms are launched: one place for every threshold.

Where there is a figure, it was measured: NVIDIA H200, bf16, cold L2, 2026-11. What has none bounds
registers and shared memory, or was not tuned. Thresholds count vectors of 16 bytes, so that they
hold for fp32 too.
"""

from __future__ import annotations

from gristmill.ops.norms.problem import Details
from gristmill.ops.rows.config import (
    AHEAD,
    ANY_LENGTH,
    ASYNC,
    MAX_THREADS,
    STRAIGHT,
    TWICE,
    RowConfig,
    async_copies,
    block_config,
    bulk_copies,
    cluster_config,
    cluster_size,
    column_bytes,
    few_rows,
    most_blocks,
    power_of_two,
    warps,
    whole_vectors,
)
from gristmill.select.problem import Problem

# The longest row, in vectors, that a block keeps: beyond, a cluster of blocks does. From LONG on
# several blocks share a row where rows are few.
BLOCK_KEEPS = 8 * MAX_THREADS
LONG = 4 * MAX_THREADS
MOST_PARTIAL_ROWS = 512  # of a gradient; no device has more SMs
_LANE_WORDS = 16  # registers for a thread's part of a row, where few threads share it


def most_items(details: Details) -> int:
    """Vectors of a row that a thread of a full block (64 registers) can hold without spilling."""
    if whole_vectors(details):
        return 2 if details.wide else 3
    return 8


def longest_forward(scope: str, problem: Problem, details: Details) -> int:
    """The longest row of a scope, in vectors."""
    if scope == "WARP":
        # Four vectors a lane: 32768x1024 is faster by warps, longer rows are not. Rows of short
        # vectors take as many registers: not timed, but a block is half idle at 257 columns.
        return 32 * (4 if whole_vectors(details) else _LANE_WORDS // _words(details))
    if scope == "GRID" or details.rereadable:
        return ANY_LENGTH
    if scope == "BLOCK":
        return LONG if async_copies(problem, details) else most_items(details) * MAX_THREADS
    items = 8 if bulk_copies(problem, details) else most_items(details)
    return most_blocks(problem) * MAX_THREADS * items


def _words(details: Details) -> int:
    """Registers that a vector of the widest tensor takes."""
    return max(1, details.vector_bytes // 4)


def longest_backward(scope: str, problem: Problem, details: Details) -> int:
    if scope == "WARP":
        # Two vectors in each of 16 lanes: 32768x1024 is faster by blocks fed by bulk copies.
        # Short vectors: what leaves both gradients in registers; not timed.
        return 32 if whole_vectors(details) else 32 * (10 // details.layout.vector)
    if scope == "GRID":
        return ANY_LENGTH
    # Beside the sums of two gradients dsum finds no registers in 512 threads of one block.
    crowded = scope == "BLOCK" and details.centered and details.layout.views[2] is not None
    staged = 1024 if details.wide or crowded else 2048
    each = staged if bulk_copies(problem, details) else _ahead_items(details) * 512
    return each if scope == "BLOCK" else each * most_blocks(problem)


def _ahead_items(details: Details) -> int:
    """Vectors per thread where the next row waits in registers beside this one, in 512 threads."""
    if whole_vectors(details):
        return 1 if details.wide else 2
    return 8 if details.layout.vector == 1 else 4


def warp_forward(problem: Problem, details: Details) -> RowConfig:
    """Two vectors a lane where that fills a warp: 32768x256 takes 9.5 us, with one 9.6."""
    # LayerNorm, 32768x1024: 34.9 us with eight vectors in each of 16 lanes, 38.3 with four in 32.
    alone = problem.dtype("residual") is None and not details.wide
    eight = details.centered and alone and details.layout.vectors > 64 and whole_vectors(details)
    lanes, items = _lanes(details, 8 if eight else 2)
    # 32768x1024: 35.0 us in blocks of 64 threads, 35.6 in blocks of 256; 32768x256: 9.8 and 9.5.
    threads = 64 if items > 2 else 256
    teams = -(-problem.rows // max(1, problem.device.multiprocessors))
    while threads > 64 and threads // lanes > teams:
        threads //= 2
    # Kernels number their teams in 32 bits: beyond, a team takes several rows.
    feed = STRAIGHT if problem.rows < 2**31 else AHEAD
    return RowConfig(threads=threads, items=items, lanes=lanes, feed=feed)


def _lanes(details: Details, items: int) -> tuple[int, int]:
    """Lanes for a row, `items` vectors in each if 32 of them suffice, and vectors in each."""
    vectors = details.layout.vectors
    lanes = min(32, power_of_two(-(-vectors // items)))
    each = max(1, -(-vectors // lanes))
    return lanes, each if whole_vectors(details) else _few_sizes(each)


def _few_sizes(items: int) -> int:
    """Of short vectors beyond four the next even number: half as many kernels."""
    return items + items % 2 if items > 4 else max(1, items)


def block_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    whole, twice = whole_vectors(details), details.rereadable
    if vectors > BLOCK_KEEPS:
        return _twice(details, MAX_THREADS, 4)
    items = -(-vectors // MAX_THREADS)
    if problem.rows <= 2 * problem.device.multiprocessors and items <= most_items(details):
        # Up to two rows per SM: latency is all. RMSNorm, 256x7168: 3.5 us at one vector a thread,
        # 3.7 at 2. LayerNorm, which has more to agree on: 3.5 at 2, 4.2 at 1.
        return block_config(vectors, max(items, 2 if details.centered and whole else 1))
    if not whole:
        return _short_vectors(details)
    if details.centered:
        return _layer_block(problem, details)
    plain, staged = problem.dtype("residual") is None, async_copies(problem, details)
    hold = details.rereadable and not details.wide  # else h or weights take twice the registers
    if vectors <= 640:
        if plain or not twice or problem.rows < 32 * problem.device.multiprocessors:
            return block_config(vectors, 3)  # 32768x4096: 129 us, with 2 or 4 133
        # With residual: 258 us, 262 with rows kept; but 2048x4096 18.4 us and 16.9.
        return _twice(details, warps(-(-vectors // 8)), 8)
    if vectors <= 1536:
        if plain:
            return _twice(details, warps(-(-vectors // 2)), 2)  # 32768x8192: 256 us, 259 staged
        return block_config(
            vectors, 8, ASYNC if staged else STRAIGHT, hold
        )  # 516 us, 523 read twice
    if vectors <= 2560 and (staged or vectors <= most_items(details) * MAX_THREADS):
        # 16384x16384: 257 us staged, 259 straight; with residual 515 and 521.
        return block_config(vectors, 4 if plain else 2, ASYNC if staged else STRAIGHT, hold)
    if staged and (vectors <= LONG or (plain and not details.wide)):
        # 8192x32768: 263 us, 284 straight; 4096x65536: 263 and 319. With residual 518 and 521.
        return block_config(vectors, 8 if plain else 4, ASYNC, hold and not plain)
    if twice:
        # With residual, 4096x65536: 537 us, 541 by a cluster that keeps rows.
        return _twice(details, 512, 8)
    return block_config(vectors, most_items(details))


def _short_vectors(details: Details) -> RowConfig:
    """Odd rows, many of them: few threads, each with as much of the row as a lane may have.

    RMSNorm in the CuTe DSL, 32768x4095: 204 us with 16 elements a thread, 277 with four. Here 299
    with eight; 16 are not timed.
    """
    vectors = details.layout.vectors
    threads = min(MAX_THREADS, warps(-(-vectors // (_LANE_WORDS // _words(details)))))
    return RowConfig(threads, _few_sizes(-(-vectors // threads)))


def _layer_block(problem: Problem, details: Details) -> RowConfig:
    """LayerNorm, many rows: few threads, since each warp has four numbers to tell the others."""
    vectors = details.layout.vectors
    narrow, staged = not details.wide, async_copies(problem, details)
    if vectors <= 640:
        return block_config(vectors, 4 if narrow else 2)  # 32768x4096: 132 us, 141 with 3
    if staged and vectors <= 1536:
        return block_config(vectors, 8, ASYNC, hold=False)  # 32768x8192: 261 us
    if narrow and bulk_copies(problem, details) and problem.dtype("residual") is None:
        # 16384x16384: 267 us, 271 one row at a time; 8192x32768: 277 us.
        if vectors <= 2048:
            return block_config(vectors, 8, feed=3)
        if 2560 < vectors <= LONG:
            return block_config(vectors, 8, feed=2, hold=False)
    if staged and vectors <= LONG:
        return block_config(vectors, 4 if vectors <= 2560 else 8, ASYNC, hold=False)
    if details.rereadable:
        return _twice(details, 512, 8)
    return block_config(vectors, most_items(details))


def cluster_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    plain = problem.dtype("residual") is None
    if few_rows(problem) or not bulk_copies(problem, details):
        items = 2 if whole_vectors(details) else 8
        cluster = cluster_size(problem, vectors, items * MAX_THREADS)
        items = -(-vectors // (cluster * MAX_THREADS))
        if items > most_items(details) and details.rereadable:
            return _twice(details, MAX_THREADS, 4, cluster)
        return cluster_config(vectors, cluster, items)
    if not plain and details.rereadable:
        # 4096x131072: 1076 us, 1098 with rows kept; 2048x262144: 1083 and 1092.
        return _twice(details, MAX_THREADS, 4, cluster_size(problem, vectors, BLOCK_KEEPS))
    if details.centered and not details.wide:
        # 4096x65536: 276 us; 4096x131072: 543 with a ring of three rows and 64 KB of each in a
        # block, 556 before blocks agreed with themselves first; 2048x262144: 551.
        if vectors <= 8192:
            return cluster_config(vectors, 8, 8, feed=2)
        cluster = cluster_size(problem, vectors, 4096)
        if vectors <= cluster * 4096:
            return cluster_config(vectors, cluster, 8, feed=3, hold=False)
    # A ring of two rows, where the share of a block fits twice; RMSNorm, 4096x131072: 532 us, 551
    # one row at a time; 2048x262144: 539 and 560. Rows drawn from a counter in place of rows dealt
    # in turn were slower (4096x131072: 556 us).
    row = details.layout.vector * column_bytes(details)
    stage = (problem.device.shared_per_block - 8192) // row
    # A weight and a bias of twice the width leave room for half of the row.
    crowded = details.centered and details.wide
    most = 4096 if vectors > 16384 and not crowded else 2048
    cluster = cluster_size(problem, vectors, min(most, stage // 2))
    if (crowded and vectors > cluster * most) or (details.rereadable and vectors > cluster * stage):
        return _twice(details, MAX_THREADS, 4, cluster)
    feed = 2 if 2 * -(-vectors // cluster) <= stage else ASYNC
    items = 4 if crowded else 6 if vectors <= 16384 else 8
    hold = details.rereadable and not details.wide and not details.centered
    return cluster_config(vectors, cluster, items, feed, hold)


def cooperative_forward(problem: Problem, details: Details) -> RowConfig:
    # With weight and bias beside them two vectors a thread would spill.
    few = details.centered and whole_vectors(details)
    return _cooperative(details, 1 if few else _ahead_items(details))


def cooperative_backward(problem: Problem, details: Details) -> RowConfig:
    return _cooperative(details, _ahead_items(details))


def _cooperative(details: Details, items: int) -> RowConfig:
    vectors = details.layout.vectors
    members = max(1, -(-vectors // (items * 512)))
    threads = warps(-(-vectors // (items * members)))
    return RowConfig(threads=threads, items=items, cluster=members, feed=AHEAD)


def warp_backward(problem: Problem, details: Details) -> RowConfig:
    lanes, items = _lanes(details, 2)
    # One large block per SM leaves the fewest partial rows: 32768x256 18.4 us, 19.0 in small ones.
    threads = 256 if details.wide or items > 2 else 512
    return RowConfig(threads, items, lanes=lanes, feed=AHEAD, blocks_per_sm=512 // threads)


def block_backward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    sms = max(1, problem.device.multiprocessors)
    if few_partial_rows(problem, sms):
        # RMSNorm, 1x4096: 1.7 us; 64x8192: 5.9 us with two vectors a thread, 6.3 with one.
        # LayerNorm, 64x8192: 8.7 us with three, 10.5 with two.
        few = 3 if details.centered and vectors > 512 and not details.wide else 1
        return block_config(vectors, max(few, -(-vectors // 512)))
    if not bulk_copies(problem, details):
        return block_config(vectors, min(_ahead_items(details), -(-vectors // 128)), feed=AHEAD)
    if vectors <= 512:
        # RMSNorm, 32768x4096: 202 us, 32768x1024: 57 us. LayerNorm has more to agree on, hence
        # fewer warps that do: 210 us with 4, 254 with 2; 32768x1024: 71 with 2.
        items = 1
        if details.centered and details.layout.vector >= 8:
            items = 4 if vectors > 256 and problem.rows > 32 * sms and not details.wide else 2
        return block_config(vectors, items, feed=2)
    if problem.rows <= 8 * sms and vectors <= 1024:
        # 256x7168: 9.7 us, 11.2 with 4.
        return block_config(vectors, 2, feed=2, hold=not details.centered, blocks_per_sm=1)
    if details.centered and not details.wide:
        return block_config(vectors, 4, feed=3, hold=False)  # 32768x8192: 412 us; 16384x16384: 400
    # One block per SM with several rows under way: 32768x8192 384 us, 391 with rows held.
    feed = 3 if vectors <= 1024 else 2
    return block_config(vectors, 4, feed=feed, hold=False, blocks_per_sm=1)


def few_partial_rows(problem: Problem, most: int) -> bool:
    """Whether one team per row is allowed: at most `most` partial rows, and not batch-invariant.

    A batch-invariant launch is the same for any number of rows.
    """
    return problem.rows <= most and not problem.batch_invariant


def weight_gradient(columns: int, parts: int) -> tuple[int, int]:
    """Columns per block and threads per block of the kernel that adds up the partial rows.

    Narrow blocks where columns are few, so that there are more of them; more threads where partial
    rows are many.
    """
    return 32 if columns >= 4096 else 8, 512 if parts > 128 else 256


def cluster_backward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    if bulk_copies(problem, details) and details.centered and not details.wide:
        # 8192x32768: 440 us; 4096x65536: 537; 4096x131072: 1059; 2048x262144: 1182.
        return cluster_config(vectors, cluster_size(problem, vectors, 2048), 4, feed=3, hold=False)
    if bulk_copies(problem, details):
        # 4096x131072: 792 us, 2048x262144: 957 us.
        cluster = cluster_size(problem, vectors, 512 if details.wide else 1024)
        feed = 3 if vectors <= 16384 else 2
        return cluster_config(vectors, cluster, 2 if details.wide else 4, feed, not details.wide)
    items = _ahead_items(details)
    return cluster_config(vectors, cluster_size(problem, vectors, items * 512), items, feed=AHEAD)


def _twice(details: Details, threads: int, items: int, cluster: int = 1) -> RowConfig:
    items = max(1, items // 2) if details.wide else items
    return RowConfig(threads=threads, items=items, cluster=cluster, feed=TWICE, hold=False)
