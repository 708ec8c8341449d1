"""How the softmax kernels are launched: one place for every threshold.

Thresholds count vectors of 16 bytes, so that they hold for every dtype. They keep several blocks on
each SM, with enough bytes of rows under way, and bound registers and shared memory. Where there is
a figure, it was measured: NVIDIA H200, bf16, cold L2, 2026-11.
"""

from __future__ import annotations

from gristmill.ops.rows.config import (
    AHEAD,
    ANY_LENGTH,
    ASYNC,
    MAX_THREADS,
    STRAIGHT,
    TWICE,
    RowConfig,
    block_config,
    cluster_config,
    cluster_size,
    column_bytes,
    few_rows,
    power_of_two,
    warps,
    whole_vectors,
)
from gristmill.ops.softmax.problem import Details
from gristmill.select.problem import Problem

# The longest row, in vectors, that one block does where a cluster could: longer rows leave too few
# blocks on an SM. 8192x32768: 259 us by blocks, 271 by clusters; 4096x65536: 277 and 265.
BLOCK_KEEPS = 4096
BLOCK_KEEPS_BACKWARD = 4096
# Vectors of a row per block of a cluster (64 KB of what is read), and per thread of it. Forward,
# 4096x131072: 554 us, 557 in halves of that; backward 747 us, 776 in halves.
CLUSTER_SHARE = 4096
CLUSTER_SHARE_BACKWARD = 2048
STAGED_ITEMS = 8
# Shared memory that a team keeps for itself, at most.
_TEAM_BYTES = 9 * 1024


def longest(scope: str) -> int:
    """The longest row of a scope, in vectors."""
    return 128 if scope == "WARP" else ANY_LENGTH  # four vectors a lane


def most_items(details: Details) -> int:
    """Vectors of a row that a thread of a full block (64 registers) can hold without spilling."""
    if not whole_vectors(details):
        return 8
    return 3 if details.layout.ragged or details.masked else 4


def warp_forward(problem: Problem, details: Details) -> RowConfig:
    # 32768x1024: 34.1 us with eight vectors in each of 16 lanes, 36.9 with four in each of 32.
    return _warp(problem, details, each=2 if details.masked or details.layout.vectors <= 64 else 8)


def warp_backward(problem: Problem, details: Details) -> RowConfig:
    return _warp(problem, details, each=2)


def _warp(problem: Problem, details: Details, each: int) -> RowConfig:
    """`each` vectors a lane, where that leaves no more lanes than a warp has."""
    lanes = min(32, power_of_two(-(-details.layout.vectors // each)))
    items = max(1, -(-details.layout.vectors // lanes))
    threads = 128 if items > 2 else 256
    teams = -(-problem.rows // max(1, problem.device.multiprocessors))
    while threads > 64 and threads // lanes > teams:
        threads //= 2
    # Kernels number their teams in 32 bits: beyond, a team takes several rows.
    feed = STRAIGHT if problem.rows < 2**31 else AHEAD
    return RowConfig(threads=threads, items=items, lanes=lanes, feed=feed)


def block_forward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    items = -(-vectors // MAX_THREADS)
    if problem.rows <= 2 * problem.device.multiprocessors and items <= most_items(details):
        return block_config(vectors, items)  # up to two rows per SM: latency is all
    if not whole_vectors(details):
        return block_config(vectors, 8) if items <= 8 else _twice(details)
    if _staged(problem, details, 1) and items <= STAGED_ITEMS:
        # 32768x4096: 129 us with 2, 173 in registers; 32768x8192: 255 with 2; 16384x16384: 257 with
        # 4, 261 with 8. Causal, 16x4096x4096: 205 with 4, 211 with 3.
        few = 4 if "causal" in problem.flags or vectors > 1024 else 2
        most = STAGED_ITEMS if vectors > 2560 else few
        return block_config(vectors, min(most, _staged_items(details)), ASYNC, hold=False)
    return _twice(details)


def cluster_forward(problem: Problem, details: Details) -> RowConfig:
    return _cluster(problem, details, CLUSTER_SHARE)


def cluster_backward(problem: Problem, details: Details) -> RowConfig:
    return _cluster(problem, details, CLUSTER_SHARE_BACKWARD)


def _cluster(problem: Problem, details: Details, share: int) -> RowConfig:
    """Small blocks, several of them on an SM; few rows are spread over all SMs instead."""
    vectors = details.layout.vectors
    if few_rows(problem):
        items = 1 if details.wide else 2
        cluster = cluster_size(problem, vectors, items * MAX_THREADS)
        if -(-vectors // (cluster * MAX_THREADS)) <= items:
            return cluster_config(vectors, cluster, 1)
    cluster = cluster_size(problem, vectors, share)
    if _staged(problem, details, cluster):
        items = min(_staged_items(details), max(1, share // 512))
        if vectors <= cluster * items * MAX_THREADS:
            return cluster_config(vectors, cluster, items, ASYNC, hold=False)
    return _twice(details, cluster)


def block_backward(problem: Problem, details: Details) -> RowConfig:
    vectors = details.layout.vectors
    wide = details.wide
    items = -(-vectors // MAX_THREADS)
    few = problem.rows <= 2 * problem.device.multiprocessors
    if few and items <= (1 if wide else 2):
        return block_config(vectors, items)
    if not whole_vectors(details):
        return block_config(vectors, 4) if items <= 4 else _twice(details)
    if vectors <= 640 and "causal" not in problem.flags:
        return block_config(vectors, 1)  # 32768x4096: 183 us, 186 with 2
    if _staged(problem, details, 1) and items <= 4:
        # 32768x8192: 370 us, 16384x16384: 370, 8192x32768: 371; causal 16x4096x4096: 264.
        return block_config(vectors, 4, ASYNC, hold=False)
    return _twice(details)


def cooperative(problem: Problem, details: Details) -> RowConfig:
    """The next row waits in registers beside this one, in 512 threads."""
    items = 8 if details.layout.vector == 1 else 4
    if whole_vectors(details):
        items = 1 if details.wide else 2
    vectors = details.layout.vectors
    members = max(1, -(-vectors // (items * 512)))
    threads = warps(-(-vectors // (items * members)))
    return RowConfig(threads=threads, items=items, cluster=members, feed=AHEAD)


def _staged_items(details: Details) -> int:
    """Fewer where vectors take twice the registers, or those of a mask lie beside them."""
    return STAGED_ITEMS // 2 if details.wide or details.masked else STAGED_ITEMS


def _staged(problem: Problem, details: Details, cluster: int) -> bool:
    """Whether a block's share of a row can wait in its shared memory."""
    share = -(-details.layout.vectors // cluster) * details.layout.vector
    fits = share * column_bytes(details) + _TEAM_BYTES <= problem.device.shared_per_block
    return fits and details.bulk(0, 1) and whole_vectors(details)


def _twice(details: Details, cluster: int = 1) -> RowConfig:
    """Rows that cannot be kept are read twice, the second time from the cache."""
    items = 2 if details.wide or details.layout.ragged else 4
    return RowConfig(threads=MAX_THREADS, items=items, cluster=cluster, feed=TWICE, hold=False)
