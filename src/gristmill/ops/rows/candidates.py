"""The launches of a row kernel that are worth timing, beside the one that its op would choose.

An op's `configs.py` has one launch for every problem, from what was measured on one GPU; tuning
asks whether its neighbours do better on this one. `RowVariant.rejects` leaves out those that do not
suit the rows or do not fit the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gristmill.ops.rows.config import (
    AHEAD,
    ASYNC,
    MAX_THREADS,
    RINGS,
    STRAIGHT,
    TWICE,
    RowConfig,
    block_config,
    cluster_config,
    few_rows,
    most_blocks,
    power_of_two,
    warps,
    whole_vectors,
)
from gristmill.ops.rows.problem import RowDetails
from gristmill.select.problem import Problem


def neighbours(
    scope: str, problem: Problem, config: RowConfig, feeds: set[int]
) -> Iterator[RowConfig]:
    """Launches like `config` for the same rows, which may come by `feeds`; some may equal it."""
    details: RowDetails = problem.layout
    if scope == "WARP":
        yield from _by_warps(details, config)
    elif feeds == {TWICE}:  # nothing of a row is kept
        yield from _streamed(scope, problem, config)
    elif scope == "BLOCK":
        yield from _by_blocks(details, feeds)
    elif scope == "CLUSTER":
        yield from _by_clusters(problem, details, config, feeds)


def _by_warps(details: RowDetails, config: RowConfig) -> Iterator[RowConfig]:
    for items in (1, 2, 4, 8):
        lanes = min(32, power_of_two(-(-details.layout.vectors // items)))
        for threads in (64, 128, 256):
            yield replace(config, threads=threads, items=items, lanes=lanes)


def _streamed(scope: str, problem: Problem, config: RowConfig) -> Iterator[RowConfig]:
    for threads in (64, 128, 256, 512, MAX_THREADS):
        for items in (2, 4, 8):
            if threads * items <= 8192:
                yield replace(config, threads=threads, items=items)
    if scope == "CLUSTER":
        for cluster in (2, 4, 8, 16):
            if cluster <= most_blocks(problem):
                yield replace(config, cluster=cluster)
    elif config.cluster > 1:  # blocks that share a row and need not know of each other
        for cluster in (config.cluster // 2, config.cluster * 2):
            yield replace(config, cluster=cluster)


def _by_blocks(details: RowDetails, feeds: set[int]) -> Iterator[RowConfig]:
    vectors, whole = details.layout.vectors, whole_vectors(details)
    if STRAIGHT in feeds and AHEAD not in feeds:
        for items in (1, 2, 3, 4) if whole else (4, 8):
            if vectors <= items * MAX_THREADS:
                yield block_config(vectors, items)
    if ASYNC in feeds and whole:
        for items in (2, 4, 8):
            if vectors <= items * MAX_THREADS:
                yield block_config(vectors, items, ASYNC, hold=False)
    for feed in RINGS:
        if feed in feeds:
            for items, blocks_per_sm in ((2, 0), (4, 0), (4, 1), (8, 0)):
                if vectors <= items * MAX_THREADS:
                    yield block_config(vectors, items, feed, False, blocks_per_sm)
    if TWICE in feeds:
        for threads, items in ((256, 4), (512, 4), (512, 8), (MAX_THREADS, 4)):
            if threads <= warps(vectors):
                yield RowConfig(threads, items, feed=TWICE, hold=False)


def _by_clusters(
    problem: Problem, details: RowDetails, config: RowConfig, feeds: set[int]
) -> Iterator[RowConfig]:
    vectors = details.layout.vectors
    if vectors < 2048 and not few_rows(problem):
        return  # a block takes such rows alone, and there are enough of them
    for cluster in (2, 4, 8, 16):
        share = -(-vectors // cluster)
        if cluster > most_blocks(problem) or share < 32:
            continue
        if config.feed == TWICE:
            yield replace(config, cluster=cluster)
            continue
        for items in (1, 2, 4, 8):
            if items > 4 and config.feed in (STRAIGHT, AHEAD):
                continue  # registers
            if share <= items * MAX_THREADS and share > 32 * (items - 1):
                yield cluster_config(vectors, cluster, items, config.feed, config.hold)
        if ASYNC in feeds and config.feed != ASYNC:
            yield cluster_config(vectors, cluster, 4, ASYNC, hold=False)
        for feed in RINGS:
            if feed in feeds:
                yield cluster_config(vectors, cluster, 4, feed, hold=False)
