"""y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), in NVIDIA's CuTe DSL.

`lanes` threads share a row: up to 32 of a warp, so that a block has several rows, or a whole block.
Each holds `items` vectors of `vector` elements in registers, vector i of thread t being number
t + i * lanes of the row; a row has `columns` elements, at most lanes * items * vector. Row r begins
at (r // inner_rows) * outer + (r % inner_rows) * inner elements (`nested`), or at r * outer.

Sums and products are fp32. y is rounded once, at the end; where `normalised` and `product` are no
"fp32", the normalised value and its product with the weight are rounded to those types before.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute

WARP = 32
TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
# Elements of the weight that a thread has in registers beside its share of the row. More would
# spill: 1024 threads have 64 registers each, half of which may hold the row.
WEIGHTS = 16


@cute.jit
def rms_norm(
    x: cute.Pointer,
    weight: cute.Pointer,
    y: cute.Pointer,
    x_outer: Int64,
    x_inner: Int64,
    y_outer: Int64,
    y_inner: Int64,
    rows: Int32,
    inner_rows: Int32,
    columns: Int32,
    inverse_columns: Float32,
    eps: Float32,
    weight_offset: Float32,
    threads: cutlass.Constexpr,
    lanes: cutlass.Constexpr,
    items: cutlass.Constexpr,
    vector: cutlass.Constexpr,
    nested: cutlass.Constexpr,
    normalised: cutlass.Constexpr,
    product: cutlass.Constexpr,
):
    """What is compiled: a launch of the kernel, from which gristmill takes the kernel alone."""
    rms_norm_rows(
        x,
        weight,
        y,
        x_outer,
        x_inner,
        y_outer,
        y_inner,
        rows,
        inner_rows,
        columns,
        inverse_columns,
        eps,
        weight_offset,
        threads // lanes,
        lanes,
        items,
        vector,
        nested,
        TYPES[normalised],
        TYPES[product],
    ).launch(grid=(1, 1, 1), block=(threads, 1, 1))


@cute.kernel
def rms_norm_rows(
    x: cute.Pointer,
    weight: cute.Pointer,
    y: cute.Pointer,
    x_outer: Int64,
    x_inner: Int64,
    y_outer: Int64,
    y_inner: Int64,
    rows: Int32,
    inner_rows: Int32,
    columns: Int32,
    inverse_columns: Float32,
    eps: Float32,
    weight_offset: Float32,
    rows_per_block: cutlass.Constexpr,
    lanes: cutlass.Constexpr,
    items: cutlass.Constexpr,
    vector: cutlass.Constexpr,
    nested: cutlass.Constexpr,
    normalised: cutlass.Constexpr,
    product: cutlass.Constexpr,
):
    """Rows `rows_per_block` * block and on. `weight` may be None, and then is no parameter."""
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % lanes
    row = block * rows_per_block + thread // lanes
    # Teams beyond the last row take it again, and write nothing.
    end = columns if row < rows else Int32(0)
    row = row if row < rows else rows - 1
    x_row = row_of(x, row, inner_rows, x_outer, x_inner, nested)
    y_row = row_of(y, row, inner_rows, y_outer, y_inner, nested)
    held = cute.make_rmem_tensor((vector, items), x.dtype)
    # Nothing in memory, the weight included, is there before the kernel before this one has ended.
    cute.arch.griddepcontrol_wait()

    load(held, x_row, 0, lane, lanes, end)
    if cutlass.const_expr(weight is not None):
        batch = min(items, max(1, WEIGHTS // vector))
        factor = cute.make_rmem_tensor((vector, batch), weight.dtype)
        load(factor, weight, 0, lane, lanes, end)
    squares = Float32(0.0)
    for i in cutlass.range_constexpr(items):
        value = held[None, i].load().to(Float32)
        part = (value * value).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        squares += part if (lane + i * lanes) * vector < end else Float32(0.0)
    squares = cute.arch.warp_reduction_sum(squares, threads_in_group=min(lanes, WARP))
    if cutlass.const_expr(lanes > WARP):
        squares = block_sum(squares, thread, lanes // WARP)
    rstd = cute.math.rsqrt(squares * inverse_columns + eps)

    out = cute.make_rmem_tensor(vector, y.dtype)
    for i in cutlass.range_constexpr(items):
        column = (lane + i * lanes) * vector
        if cutlass.const_expr(weight is not None and i > 0 and i % batch == 0):
            load(factor, weight, i, lane, lanes, end)
        if column < end:
            value = rounded(held[None, i].load().to(Float32) * rstd, normalised)
            if cutlass.const_expr(weight is not None):
                scale = factor[None, i % batch].load().to(Float32) + weight_offset
                value = rounded(value * scale, product)
            out.store(value.to(y.dtype))
            cute.autovec_copy(out, vector_at(y_row, column, vector))


@cute.jit
def row_of(
    tensor: cute.Pointer,
    row: Int32,
    inner_rows: Int32,
    outer: Int64,
    inner: Int64,
    nested: cutlass.Constexpr,
):
    """Where a row begins: aligned as the tensor is, which the caller has seen to."""
    begin = Int64(row) * outer
    if cutlass.const_expr(nested):
        begin = Int64(row // inner_rows) * outer + Int64(row % inner_rows) * inner
    return tensor + cute.assume(begin, divby=tensor.alignment * 8 // tensor.dtype.width)


@cute.jit
def vector_at(row: cute.Pointer, column: Int32, vector: cutlass.Constexpr):
    """The vector at a column, to be read or written as wide as the row's alignment allows."""
    return cute.make_tensor(row + cute.assume(column, divby=vector), cute.make_layout(vector))


@cute.jit
def load(
    into: cute.Tensor,
    row: cute.Pointer,
    first: cutlass.Constexpr,
    lane: Int32,
    lanes: cutlass.Constexpr,
    end: Int32,
):
    """Vectors `first` and on of this thread, as many as `into` has.

    Beyond the end the first vector of the row is read instead. With a branch the compiler puts the
    conversion to fp32 into it, and a load begins only when the one before it has come.
    """
    vector = cute.size(into, mode=[0])
    for i in cutlass.range_constexpr(cute.size(into, mode=[1])):
        column = (lane + (first + i) * lanes) * vector
        column = column if column < end else Int32(0)
        cute.autovec_copy(vector_at(row, column, vector), into[None, i])


@cute.jit
def block_sum(part: Float32, thread: Int32, warps: cutlass.Constexpr):
    """The sum of `part` over the warps of a block, which is the same in all lanes of each."""
    shared = cute.make_tensor(cute.arch.alloc_smem(Float32, WARP), cute.make_layout(WARP))
    lane = thread % WARP
    if lane == 0:
        shared[thread // WARP] = part
    cute.arch.sync_threads()
    # What no warp has written may be anything, but is there.
    other = shared[lane]
    return cute.arch.warp_reduction_sum(other if lane < warps else Float32(0.0))


@cute.jit
def rounded(value: cute.TensorSSA, dtype: cutlass.Constexpr):
    """fp32 values as `dtype` holds them."""
    return value.to(dtype).to(Float32)
