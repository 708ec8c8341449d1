"""A small Triton kernel with an import of its own kind beside it."""

import triton
import triton.language as tl

from .scale_part import scaled


@triton.jit
def scale(x, count, factor, y, absent, stride, BLOCK: tl.constexpr):
    """y[i] = factor * x[i * stride]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at * stride, mask=at < count, other=0.0)
    if absent is not None:
        value += tl.load(absent)
    tl.store(y + at, scaled(value, factor), mask=at < count)


@triton.jit
def described(x, y, rows, columns, BLOCK: tl.constexpr):
    """y = x by tensor descriptors, which need global scratch memory."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, 64])
    target = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [BLOCK, 64])
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def wrong(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, no_such_name + at)  # noqa: F821 - this is what the test is about


def plain(x):
    return x
