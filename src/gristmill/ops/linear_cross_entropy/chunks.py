"""How much of the logits is made at a time.

Logits of M rows and V classes are made block by block, each block within a bound. The forward needs
whole rows. The backward has every row's stats and takes any block; which shape is best follows from
what has to be summed up over blocks, in fp32 for 16-bit tensors:

- a block of whole rows gives its rows of dx at once, and a summand for all of dweight;
- a block of whole columns gives its rows of dweight at once, and a summand for all of dx.

A model has more classes than a step has rows, so dx is the smaller one to sum up: 128 MB for
8192 x 4096, where dweight of 128256 x 4096 takes 2 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.ops.linear_cross_entropy.problem import Sizes

# What a block of logits may take, with its gradient in the backward pass: enough for 1024 rows of
# 128256 classes in bf16. A matmul of fewer rows waits for the weight to be read.
BLOCK_BYTES = 256 << 20
# Or this part of the weight, where that is more: 1024 rows of any number of classes at K = 4096.
WEIGHT_PART = 4
# Fewer columns in a block, and reading and writing the sums of dx takes longer than its products:
# 8 bytes at 4 TB/s take as long as 1600 operations at 800 TFLOP/s, so 800 columns.
LEAST_COLUMNS = 1024
# Blocks are whole tiles of a matmul where they are larger than one.
TILE = 128
# Without our kernels the formula runs in plain torch, with up to six fp32 tensors per block and
# some masks: measured, 17 bytes per logit in the forward and 25 in the backward pass.
PLAIN_BYTES = 28


@dataclass(frozen=True)
class Blocks:
    """The most rows and classes that a block of logits has."""

    rows: int
    classes: int


def forward_blocks(sizes: Sizes) -> Blocks:
    """Blocks of whole rows."""
    rows = _elements(sizes, 1) // max(1, sizes.classes)
    return Blocks(_tiled(rows, sizes.rows), max(1, sizes.classes))


def backward_blocks(sizes: Sizes, *, whole_rows: bool) -> Blocks:
    """Blocks of whole columns as far as the bound allows, or of whole rows."""
    elements = _elements(sizes, 2)
    if whole_rows:
        rows = elements // max(1, sizes.classes)
        return Blocks(_tiled(rows, sizes.rows), max(1, sizes.classes))
    rows = _tiled(elements // min(LEAST_COLUMNS, max(1, sizes.classes)), sizes.rows)
    return Blocks(rows, _tiled(elements // rows, sizes.classes))


def ranges(total: int, size: int) -> Iterator[slice]:
    """`range(total)` in slices of `size`, the last of what is left."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def _elements(sizes: Sizes, tensors: int) -> int:
    """How many logits a block may have, `tensors` of them being held at once."""
    if sizes.chunk_rows is not None:
        return sizes.chunk_rows * max(1, sizes.classes)
    size = sizes.dtype.itemsize
    bound = max(BLOCK_BYTES, sizes.classes * sizes.columns * size // WEIGHT_PART)
    return bound // (tensors * size if sizes.device == "cuda" else PLAIN_BYTES)


def _tiled(count: int, total: int) -> int:
    """`count` as a number of rows or columns of a block: whole tiles, at most all, at least one."""
    if count >= total:
        return max(1, total)
    return count - count % TILE if count > TILE else max(1, count)
