"""How the RMSNorm kernels are launched: one place for every threshold.

Where there is a figure, it was measured: NVIDIA H200, bf16, cold L2, 2026-11. What has none bounds
registers and shared memory, or was not tuned. Thresholds count vectors of 16 bytes, so that they
hold for fp32 too.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.ops.rms_norm.problem import Details
from gristmill.select.problem import Problem

# How rows come, as in feed.cuh; 2 and more are stages in shared memory. TWICE: they are not kept.
STRAIGHT, AHEAD, ASYNC, TWICE = 0, -1, -2, -3
ONE_ROW = (STRAIGHT, ASYNC, TWICE)  # a team does one row and is done
MAX_THREADS = 1024
ANY_LENGTH = 2**31
# The longest row, in vectors, that a block keeps: beyond, a cluster of blocks does. From LONG on
# several blocks share a row where rows are few.
BLOCK_KEEPS = 8 * MAX_THREADS
LONG = 4 * MAX_THREADS


@dataclass(frozen=True)
class RowConfig:
    """A launch of a row kernel: `lanes` or `threads` per row, `items` vectors for each of them.

    `cluster`: blocks per row; `feed`: how rows come (feed.cuh); `hold`: the row waits in registers
    between its two passes; `blocks_per_sm`: at most so many (0: as many as fit).
    """

    threads: int
    items: int
    lanes: int = 32
    cluster: int = 1
    feed: int = STRAIGHT
    hold: bool = True
    blocks_per_sm: int = 0


def whole_vectors(details: Details) -> bool:
    """Whether a vector is 16 bytes of the narrowest tensor: rows neither odd nor short."""
    views = [view for view in details.layout.views if view is not None]
    return details.layout.vector * min(view.dtype.itemsize for view in views) == 16


def bulk_copies(problem: Problem, details: Details) -> bool:
    """Whether x and its companion (residual, dy) can be fetched by bulk copies.

    They pay by keeping whole rows in shared memory, so devices with little of it go without.
    """
    device = problem.device
    able = device.capability >= (9, 0) and device.shared_per_block >= 200 * 1024
    return able and details.bulk(0, 1) and whole_vectors(details)


def few_rows(problem: Problem) -> bool:
    """Whether a block per row would leave half of the SMs idle."""
    return problem.rows * 2 <= problem.device.multiprocessors


def most_items(details: Details) -> int:
    """Vectors of a row that a thread of a full block (64 registers) can hold without spilling."""
    if whole_vectors(details):
        return 2 if details.wide else 3
    return 8


def longest_forward(scope: str, problem: Problem, details: Details) -> int:
    """The longest row of a scope, in vectors."""
    if scope == "WARP":
        return 128  # four vectors a lane: 32768x1024 is faster by warps, longer rows are not
    if scope == "GRID" or details.rereadable:
        return ANY_LENGTH
    if scope == "BLOCK":
        return LONG if async_copies(problem, details) else most_items(details) * MAX_THREADS
    items = 8 if bulk_copies(problem, details) else most_items(details)
    return most_blocks(problem) * MAX_THREADS * items


def longest_backward(scope: str, problem: Problem, details: Details) -> int:
    if scope == "WARP":
        return 32  # two vectors a lane: 32768x1024 is faster by blocks fed by bulk copies
    if scope == "GRID":
        return ANY_LENGTH
    staged = 1024 if details.wide else 2048
    each = staged if bulk_copies(problem, details) else _ahead_items(details) * 512
    return each if scope == "BLOCK" else each * most_blocks(problem)


def _ahead_items(details: Details) -> int:
    """Vectors per thread where the next row waits in registers beside this one, in 512 threads."""
    if whole_vectors(details):
        return 1 if details.wide else 2
    return 8 if details.layout.vector == 1 else 4


def async_copies(problem: Problem, details: Details) -> bool:
    """Whether rows of x and residual can wait in one block's shared memory."""
    row = details.layout.columns * column_bytes(details)
    fits = row + 1024 <= problem.device.shared_per_block
    return fits and details.bulk(0, 1) and whole_vectors(details)


def column_bytes(details: Details) -> int:
    """Bytes per column that a feed holds: of x and its companion."""
    return sum(view.dtype.itemsize for view in details.layout.views[:2] if view is not None)


def most_blocks(problem: Problem) -> int:
    """The largest cluster: 16 blocks on data centre GPUs, where it is not portable, else 8."""
    return 16 if problem.device.capability[0] in (9, 10) else 8


def warp_forward(problem: Problem, details: Details) -> RowConfig:
    """Two vectors a lane where that fills a warp: 32768x256 takes 9.5 us, with one 9.6."""
    lanes = min(32, _power_of_two(-(-details.layout.vectors // 2)))
    items = max(1, -(-details.layout.vectors // lanes))
    # 32768x1024: 35.0 us in blocks of 64 threads, 35.6 in blocks of 256; 32768x256: 9.8 and 9.5.
    threads = 64 if items > 2 else 256
    teams = -(-problem.rows // max(1, problem.device.multiprocessors))
    while threads > 64 and threads // lanes > teams:
        threads //= 2
    # Kernels number their teams in 32 bits: beyond, a team takes several rows.
    feed = STRAIGHT if problem.rows < 2**31 else AHEAD
    return RowConfig(threads=threads, items=items, lanes=lanes, feed=feed)


def block_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    whole, twice = whole_vectors(details), details.rereadable
    if vectors > BLOCK_KEEPS:
        return _twice(details, MAX_THREADS, 4)
    items = -(-vectors // MAX_THREADS)
    if problem.rows <= 2 * problem.device.multiprocessors and items <= most_items(details):
        # Up to two rows per SM: latency is all. 256x7168: 3.5 us at one vector a thread, 3.7 at 2.
        return _block(vectors, items)
    if not whole:
        return _block(vectors, 8)
    plain, staged = problem.dtype("residual") is None, async_copies(problem, details)
    hold = details.rereadable and not details.wide  # else h or weights take twice the registers
    if vectors <= 640:
        if plain or not twice or problem.rows < 32 * problem.device.multiprocessors:
            return _block(vectors, 3)  # 32768x4096: 129 us, with 2 or 4 133
        # With residual: 258 us, 262 with rows kept; but 2048x4096 18.4 us and 16.9.
        return _twice(details, _warps(-(-vectors // 8)), 8)
    if vectors <= 1536:
        if plain:
            return _twice(details, _warps(-(-vectors // 2)), 2)  # 32768x8192: 256 us, 259 staged
        return _block(vectors, 8, ASYNC if staged else STRAIGHT, hold)  # 516 us, 523 read twice
    if vectors <= 2560 and (staged or vectors <= most_items(details) * MAX_THREADS):
        # 16384x16384: 257 us staged, 259 straight; with residual 515 and 521.
        return _block(vectors, 4 if plain else 2, ASYNC if staged else STRAIGHT, hold)
    if staged and (vectors <= LONG or (plain and not details.wide)):
        # 8192x32768: 263 us, 284 straight; 4096x65536: 263 and 319. With residual 518 and 521.
        return _block(vectors, 8 if plain else 4, ASYNC, hold and not plain)
    if twice:
        # With residual, 4096x65536: 537 us, 541 by a cluster that keeps rows.
        return _twice(details, 512, 8)
    return _block(vectors, most_items(details))


def cluster_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    plain = problem.dtype("residual") is None
    if few_rows(problem) or not bulk_copies(problem, details):
        items = 2 if whole_vectors(details) else 8
        cluster = _cluster(problem, vectors, items * MAX_THREADS)
        items = -(-vectors // (cluster * MAX_THREADS))
        if items > most_items(details) and details.rereadable:
            return _twice(details, MAX_THREADS, 4, cluster)
        return _cluster_config(vectors, cluster, items)
    if not plain and details.rereadable:
        # 4096x131072: 1076 us, 1098 with rows kept; 2048x262144: 1083 and 1092.
        return _twice(details, MAX_THREADS, 4, _cluster(problem, vectors, BLOCK_KEEPS))
    # A ring of two rows, where the share of a block fits twice; 4096x131072: 540 us, 551 one row at
    # a time; 2048x262144: 539 and 560.
    row = details.layout.vector * column_bytes(details)
    stage = (problem.device.shared_per_block - 8192) // row
    cluster = _cluster(problem, vectors, min(4096 if vectors > 16384 else 2048, stage // 2))
    feed = 2 if 2 * -(-vectors // cluster) <= stage else ASYNC
    items = 6 if vectors <= 16384 else 8
    hold = details.rereadable and not details.wide
    return _cluster_config(vectors, cluster, items, feed, hold)


def cooperative(problem: Problem, details: Details) -> RowConfig:
    items = _ahead_items(details)
    vectors = details.layout.vectors
    members = max(1, -(-vectors // (items * 512)))
    threads = _warps(-(-vectors // (items * members)))
    return RowConfig(threads=threads, items=items, cluster=members, feed=AHEAD)


def warp_backward(problem: Problem, details: Details) -> RowConfig:
    lanes = min(32, _power_of_two(-(-details.layout.vectors // 2)))
    items = max(1, -(-details.layout.vectors // lanes))
    # One large block per SM leaves the fewest partial rows: 32768x256 18.4 us, 19.0 in small ones.
    threads = 256 if details.wide else 512
    return RowConfig(threads, items, lanes=lanes, feed=AHEAD, blocks_per_sm=512 // threads)


def block_backward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    sms = max(1, problem.device.multiprocessors)
    if problem.rows <= sms:
        # 1x4096: 1.7 us; 64x8192: 5.9 us with two vectors a thread, 6.3 with one.
        return _block(vectors, -(-vectors // 512))
    if not bulk_copies(problem, details):
        return _block(vectors, min(_ahead_items(details), -(-vectors // 128)), feed=AHEAD)
    if vectors <= 512:
        return _block(vectors, 1, feed=2)  # 32768x4096: 202 us, 32768x1024: 57 us
    if problem.rows <= 8 * sms and vectors <= 1024:
        return _block(vectors, 2, feed=2, blocks_per_sm=1)  # 256x7168: 9.7 us, 11.2 with 4
    # One block per SM with several rows under way: 32768x8192 384 us, 391 with rows held.
    feed = 3 if vectors <= 1024 else 2
    return _block(vectors, 4, feed=feed, hold=False, blocks_per_sm=1)


def weight_gradient(columns: int, parts: int) -> tuple[int, int]:
    """Columns per block and threads per block of the kernel that adds up the partial rows.

    Narrow blocks where columns are few, so that there are more of them; more threads where partial
    rows are many.
    """
    return 32 if columns >= 4096 else 8, 512 if parts > 128 else 256


def cluster_backward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    if bulk_copies(problem, details):
        # 4096x131072: 792 us, 2048x262144: 957 us.
        cluster = _cluster(problem, vectors, 512 if details.wide else 1024)
        feed = 3 if vectors <= 16384 else 2
        return _cluster_config(vectors, cluster, 2 if details.wide else 4, feed, not details.wide)
    items = _ahead_items(details)
    return _cluster_config(vectors, _cluster(problem, vectors, items * 512), items, feed=AHEAD)


def _block(
    vectors: int, items: int, feed: int = STRAIGHT, hold: bool = True, blocks_per_sm: int = 0
) -> RowConfig:
    items = max(1, items, -(-vectors // MAX_THREADS))
    threads = _warps(-(-vectors // items))
    return RowConfig(threads, items, feed=feed, hold=hold, blocks_per_sm=blocks_per_sm)


def _twice(details: Details, threads: int, items: int, cluster: int = 1) -> RowConfig:
    items = max(1, items // 2) if details.wide else items
    return RowConfig(threads=threads, items=items, cluster=cluster, feed=TWICE, hold=False)


def _cluster_config(
    vectors: int, cluster: int, items: int, feed: int = STRAIGHT, hold: bool = True
) -> RowConfig:
    items = max(1, items, -(-vectors // (cluster * MAX_THREADS)))
    threads = _warps(-(-vectors // (cluster * items)))
    return RowConfig(threads=threads, items=items, cluster=cluster, feed=feed, hold=hold)


def _cluster(problem: Problem, vectors: int, each: int) -> int:
    """Blocks for a row, `each` vectors in one, a power of two."""
    return max(2, min(most_blocks(problem), _power_of_two(-(-vectors // each))))


def _warps(threads: int) -> int:
    return max(32, -(-threads // 32) * 32)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
