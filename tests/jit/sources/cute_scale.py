"""y = factor * x in the CuTe DSL, for the tests of the compiler."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .cute_scale_part import scaled


@cute.kernel
def scale_rows(
    x: cute.Pointer,
    count: Int32,
    factor: Float32,
    y: cute.Pointer,
    stride: Int64,
    threads: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * threads + thread
    if at < count:
        one = cute.make_layout(1)
        source = cute.make_tensor(x + Int64(at) * stride, one)
        cute.make_tensor(y + at, one)[0] = scaled(source[0], factor)


@cute.jit
def scale(
    x: cute.Pointer,
    count: Int32,
    factor: Float32,
    y: cute.Pointer,
    stride: Int64,
    absent: cute.Pointer,
    threads: cutlass.Constexpr,
):
    scale_rows(x, count, factor, y, stride, threads).launch(grid=(1, 1, 1), block=(threads, 1, 1))


@cute.jit
def wrong(x: cute.Pointer, threads: cutlass.Constexpr):
    scale_rows(x, no_such_name).launch(grid=(1, 1, 1), block=(threads, 1, 1))  # noqa: F821


@cute.jit
def nothing(x: cute.Pointer, threads: cutlass.Constexpr):
    """Launches no kernel."""
