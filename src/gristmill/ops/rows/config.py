"""A launch of a row kernel as data, and what bounds it on a device.

No threshold that was tuned for an op stands here: those are in the op's own `configs.py`. Lengths
count vectors of 16 bytes, so that they hold for every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.ops.rows.problem import RowDetails
from gristmill.select.problem import Problem

# How rows come, as in feed.cuh; 2 and more are stages in shared memory. TWICE: they are not kept.
STRAIGHT, AHEAD, ASYNC, TWICE = 0, -1, -2, -3
ONE_ROW = (STRAIGHT, ASYNC, TWICE)  # a team does one row and is done
RINGS = (2, 3)
MAX_THREADS = 1024
MOST_ITEMS = 16  # of the vectors that a thread unrolls: more would only be longer code that spills
ANY_LENGTH = 2**31


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


def whole_vectors(details: RowDetails) -> bool:
    """Whether a vector is 16 bytes of the narrowest tensor: rows neither odd nor short."""
    return details.layout.vector * details.layout.narrowest == 16


def row_bytes(details: RowDetails) -> int:
    """Bytes of a row of the narrowest tensor."""
    return details.layout.columns * details.layout.narrowest


def bulk_copies(problem: Problem, details: RowDetails) -> bool:
    """Whether what the feed fetches can come by bulk copies.

    They pay by keeping whole rows in shared memory, so devices with little of it go without.
    """
    device = problem.device
    able = device.capability >= (9, 0) and device.shared_per_block >= 200 * 1024
    return able and details.bulk(0, 1) and whole_vectors(details) and not details.layout.ragged


def async_copies(problem: Problem, details: RowDetails) -> bool:
    """Whether what the feed fetches can wait in one block's shared memory."""
    row = details.layout.vectors * details.layout.vector * column_bytes(details)
    fits = row + 1024 <= problem.device.shared_per_block
    return fits and details.bulk(0, 1) and whole_vectors(details)


def column_bytes(details: RowDetails) -> int:
    """Bytes per column that a feed holds."""
    return sum(view.dtype.itemsize for view in details.layout.views[:2] if view is not None)


def few_rows(problem: Problem) -> bool:
    """Whether a block per row would leave half of the SMs idle."""
    return problem.rows * 2 <= problem.device.multiprocessors


def most_blocks(problem: Problem) -> int:
    """The largest cluster: 16 blocks on data centre GPUs, where it is not portable, else 8."""
    return 16 if problem.device.capability[0] in (9, 10) else 8


def block_config(
    vectors: int, items: int, feed: int = STRAIGHT, hold: bool = True, blocks_per_sm: int = 0
) -> RowConfig:
    """A block per row, with as many threads as `items` vectors for each of them leave."""
    items = max(1, items, -(-vectors // MAX_THREADS))
    threads = warps(-(-vectors // items))
    return RowConfig(threads, items, feed=feed, hold=hold, blocks_per_sm=blocks_per_sm)


def cluster_config(
    vectors: int, cluster: int, items: int, feed: int = STRAIGHT, hold: bool = True
) -> RowConfig:
    """A cluster per row, likewise."""
    items = max(1, items, -(-vectors // (cluster * MAX_THREADS)))
    threads = warps(-(-vectors // (cluster * items)))
    return RowConfig(threads=threads, items=items, cluster=cluster, feed=feed, hold=hold)


def cluster_size(problem: Problem, vectors: int, each: int) -> int:
    """Blocks for a row, `each` vectors in one, a power of two."""
    return max(2, min(most_blocks(problem), power_of_two(-(-vectors // each))))


def warps(threads: int) -> int:
    """`threads`, in whole warps."""
    return max(32, -(-threads // 32) * 32)


def power_of_two(value: int) -> int:
    """The least one that is no smaller."""
    return 1 << max(0, value - 1).bit_length()
