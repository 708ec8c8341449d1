"""How the cross entropy kernels are launched: one place for every threshold.

Thresholds count vectors of 16 bytes. Forward and backward keep nothing of a row, so any number of
threads can take one of any length; what is chosen is how many bytes are under way. Where there is a
figure, it was measured: NVIDIA H200, bf16, cold L2, 2026-11.
"""

from __future__ import annotations

from gristmill.ops.cross_entropy.problem import Details
from gristmill.ops.rows.config import (
    ANY_LENGTH,
    ASYNC,
    MAX_THREADS,
    TWICE,
    RowConfig,
    async_copies,
    block_config,
    cluster_config,
    column_bytes,
    few_rows,
    most_blocks,
    power_of_two,
    warps,
    whole_vectors,
)
from gristmill.select.problem import Problem

# Rows pass by once; nothing of them is kept.
STREAM = TWICE
# Up to this length, in vectors, lanes of a warp share a row; forward, where rows are many, up to
# the second: 32768x4096 takes 64 us, 71 by blocks.
WARP_LONGEST = 128
WARP_LONGEST_FORWARD = 1024
# From this length on several blocks share a row where rows are few.
LONG = 1024
# The least that a block of a cluster takes of a row, and that a block of the backward does.
CLUSTER_SHARE = 512
BLOCK_SHARE = 1024

# One pass: the longest row, in vectors, that a block keeps where a cluster could, and what a block
# of a cluster keeps: so much that an SM has three blocks of 512 threads. 8192x32768: 271 us by
# blocks, 279 by clusters; 8192x128256: 1142 us, 1158 in halves.
BLOCK_KEEPS = 4096
KEPT_SHARE = 4096


def longest(scope: str) -> int:
    """The longest row of a scope, in vectors."""
    return WARP_LONGEST if scope == "WARP" else ANY_LENGTH


def unroll(details: Details, items: int) -> int:
    """Vectors of a thread under way at once: fewer where each needs many registers."""
    if details.capped or details.smooth or details.wide:
        return max(1, items // 2)
    return items


def warp_forward(problem: Problem, details: Details) -> RowConfig:
    lanes, items = _lanes(details)
    return RowConfig(
        threads=128, items=unroll(details, items), lanes=lanes, feed=STREAM, hold=False
    )


def block_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    items = unroll(details, 4 if whole_vectors(details) else 8)
    # 8192x32768: 128 us, 148 with 512 threads; 8192x128256: 463 and 473.
    threads = min(256, warps(-(-vectors // items)))
    if problem.rows <= problem.device.multiprocessors:
        # A row for each SM: its threads are all there is to keep bytes under way.
        threads = min(MAX_THREADS, warps(-(-vectors // items)))
    return RowConfig(threads=max(64, threads), items=items, feed=STREAM, hold=False)


def cluster_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    wanted = power_of_two(-(-vectors // CLUSTER_SHARE))
    if not few_rows(problem):
        # Only so many that the last rows do not leave most SMs idle.
        wanted = min(wanted, 4)
    cluster = max(2, min(most_blocks(problem), wanted))
    items = unroll(details, 4 if whole_vectors(details) else 8)
    threads = max(64, min(512, warps(-(-vectors // (cluster * items)))))
    return RowConfig(threads, items, cluster=cluster, feed=STREAM, hold=False)


def warp_backward(problem: Problem, details: Details) -> RowConfig:
    lanes, items = _lanes(details)
    return RowConfig(
        threads=128, items=unroll(details, items), lanes=lanes, feed=STREAM, hold=False
    )


def block_backward(problem: Problem, details: Details) -> RowConfig:
    """`cluster`: blocks that share a row; they need not know of each other."""
    vectors = details.layout.vectors
    # Small blocks: 8192x32768 takes 261 us, 272 with 256 threads of 4; 4096x262144 1026 and 1074.
    items = unroll(details, (2 if vectors > BLOCK_SHARE else 4) if whole_vectors(details) else 8)
    count = members(details)
    threads = max(64, min(128, warps(-(-vectors // (count * items)))))
    return RowConfig(threads, items, cluster=count, feed=STREAM, hold=False)


def members(details: Details) -> int:
    """Blocks that share a row in the backward."""
    return max(1, -(-details.layout.vectors // BLOCK_SHARE))


def longest_one_pass(scope: str, problem: Problem, details: Details) -> int:
    if scope != "CLUSTER":
        return longest(scope)
    if not (details.bulk(0) and whole_vectors(details)):
        return 0
    room = (problem.device.shared_per_block - 9 * 1024) // (
        details.layout.vector * column_bytes(details)
    )
    return most_blocks(problem) * min(8 * MAX_THREADS, room)


def warp_one_pass(problem: Problem, details: Details) -> RowConfig:
    lanes, items = _lanes(details)
    items = max(items, -(-details.layout.vectors // lanes))
    # What waits as floats takes twice the registers of what is packed.
    hold = not (details.capped or details.weights)
    return RowConfig(threads=128, items=items, lanes=lanes, hold=hold)


def block_one_pass(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    if not whole_vectors(details):
        if vectors > 8 * 512:
            return RowConfig(512, 8, feed=TWICE, hold=False)
        return block_config(vectors, 8)
    if vectors <= 8 * MAX_THREADS and async_copies(problem, details):
        # 32768x4096: 141 us with 4, 193 in registers; 8192x32768: 270 with 8, 280 with 4.
        return block_config(vectors, 4 if vectors <= 1024 else 8, ASYNC, hold=False)
    return RowConfig(512, 4, feed=TWICE, hold=False)


def cluster_one_pass(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    cluster = -(-vectors // KEPT_SHARE)
    if few_rows(problem):
        cluster = power_of_two(-(-vectors // CLUSTER_SHARE))
    cluster = max(2, min(most_blocks(problem), cluster))
    items = max(1, min(8, -(-vectors // (cluster * 64))))
    return cluster_config(vectors, cluster, items, ASYNC, hold=False)


def scale(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    return RowConfig(max(32, min(512, warps(-(-vectors // 4)))), 4, feed=STREAM, hold=False)


def total(problem: Problem) -> tuple[str, int, int]:
    """Scope, blocks and threads of the kernel that adds up the rows.

    One block reads 12 bytes a row at some 100 GB/s: with many rows several share the work.
    """
    rows = problem.rows
    threads = max(32, min(1024, warps(-(-rows // 8))))
    if rows <= 4096:
        return "BLOCK", 1, threads
    if problem.device.capability >= (9, 0):
        return "CLUSTER", 8, 1024
    if rows <= 65536:
        return "BLOCK", 1, threads
    return "GRID", 16, 1024


def _lanes(details: Details) -> tuple[int, int]:
    """Two vectors a lane where that fills a warp; a lane for each element at a ragged end."""
    vectors = details.layout.vectors
    least = 8 if details.layout.ragged else 1
    lanes = max(least, min(32, power_of_two(-(-vectors // 2))))
    return lanes, max(1, min(4, -(-vectors // lanes)))
