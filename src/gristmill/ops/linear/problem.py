"""A call of `linear` or `matmul` as the chooser and the kernels see it: one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gristmill.ops.linear.semantics import leading_dims
from gristmill.ops.rows.layout import collapse, is_packed
from gristmill.ops.rows.problem import dtypes_of, packed
from gristmill.select.device import Device
from gristmill.select.overrides import is_batch_invariant
from gristmill.select.problem import Problem

_WIDEST = 16  # bytes of one access

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Product:
    """``C[batch, M, N] = act(A[batch, M, K] @ B[batch, K, N] + bias)``; C is contiguous.

    Strides are in elements, of batch, row and column: those of A are of (batch, M, K), those of B
    of (batch, K, N), so a linear layer's weight ``(N, K)`` has ``b_strides == (0, 1, K)``. A dim of
    one element has stride 0, but 1 where that makes the matrix contiguous.

    Plans take the op's positional arguments: `linear` and `linear_with_pre` ``(x, weight, bias,
    activation)``, `matmul` ``(a, b)``. `linear_with_pre` returns ``(y, h)``, with `pre` set here.
    `a_of` and `b_of` give the tensors in which the strides hold, without a view being made; a bias
    may have any stride.

    Where rows must not depend on the batch, A is always dense and aligned as its rows alone would
    be, so that a choice depends on neither the number of rows nor on where they lie.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    a_strides: Strides
    b_strides: Strides
    a_aligned: bool  # the pointer and all strides but the unit one are multiples of 16 bytes
    b_aligned: bool
    dtype: torch.dtype
    bias: bool
    activation: str  # "none", "relu", "silu", "gelu" (exact) or "gelu_tanh"
    pre: bool  # h = A @ B + bias is returned, too, in C's dtype
    copied: bool  # A cannot be addressed where it is: the strides are those of a copy
    b_copied: bool = False  # the same of B; only where batches are broadcast, never in `linear`

    def a_of(self, a: torch.Tensor, leading: Sequence[int] = ()) -> torch.Tensor:
        """A where `a_strides` hold; `leading`: the batch dims of the result of a `matmul`."""
        return _copy(a, leading) if self.copied else a

    def b_of(self, b: torch.Tensor, leading: Sequence[int] = ()) -> torch.Tensor:
        return _copy(b, leading) if self.b_copied else b

    @property
    def empty(self) -> bool:
        """Whether there is nothing to sum or nobody to sum it for."""
        return 0 in (self.batch, self.rows, self.columns, self.depth)


def linear_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> Problem:
    return _linear("linear", device, x, weight, bias, activation, pre=False)


def linear_with_pre_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> Problem:
    return _linear("linear_with_pre", device, x, weight, bias, activation, pre=True)


def matmul_problem(device: Device, a: torch.Tensor, b: torch.Tensor) -> Problem:
    leading = leading_dims(a, b)
    product = _folded(a, b) or _batched(a, b, leading)
    words = {
        **_order("a", product.a_strides[2], product.a_strides[1]),
        **_order("b", product.b_strides[2], product.b_strides[1]),
    }
    return _problem("matmul", device, product, dtypes_of(a=a, b=b), words)


def _linear(
    op: str,
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    pre: bool,
) -> Problem:
    columns, depth = weight.shape
    rows = x.shape[:-1].numel()
    step = _one_step(x.shape[:-1], x.stride()[:-1])
    copied = step is None or _must_be_packed(x)
    a_strides = (0, depth, 1) if step is None or copied else (0, step, x.stride(-1))
    a_strides = _a_strides((1, rows, depth), a_strides)
    b_strides = _strides((1, depth, columns), (0, weight.stride(1), weight.stride(0)), unit=1)
    product = Product(
        batch=1,
        rows=rows,
        columns=columns,
        depth=depth,
        a_strides=a_strides,
        b_strides=b_strides,
        a_aligned=_a_aligned(x, a_strides, copied),
        b_aligned=_aligned(weight, b_strides, False),
        dtype=x.dtype,
        bias=bias is not None,
        activation=activation or "none",
        pre=pre,
        copied=copied,
    )
    words = {
        **({} if activation is None else {activation: True}),
        "pre": pre,
        **_order("x", a_strides[2], a_strides[1]),
        **_order("weight", b_strides[1], b_strides[2]),
    }
    return _problem(op, device, product, dtypes_of(x=x, weight=weight, bias=bias), words)


def _folded(a: torch.Tensor, b: torch.Tensor) -> Product | None:
    """With one B for all: the batches of A as further rows, where they lie so."""
    if b.shape[:-2].numel() != 1 or b.dim() > a.dim():
        return None
    rows, b_strides = a.shape[:-1].numel(), (0, b.stride(-2), b.stride(-1))
    if _must_be_packed(a):
        return _matmul(a, b, 1, rows, (0, a.shape[-1], 1), b_strides, (True, False))
    step = _one_step(a.shape[:-1], a.stride()[:-1])
    if step is None:
        return None
    return _matmul(a, b, 1, rows, (0, step, a.stride(-1)), b_strides, (False, False))


def _batched(a: torch.Tensor, b: torch.Tensor, leading: Sequence[int]) -> Product:
    strides: list[Strides] = []
    copied = []
    for tensor in (a, b):
        steps = [0] * (len(leading) + 2 - tensor.dim()) + [
            step if size > 1 else 0
            for size, step in zip(tensor.shape[:-2], tensor.stride()[:-2], strict=True)
        ]
        step = None if tensor is a and _must_be_packed(a) else _one_step(leading, steps)
        copied.append(step is None)
        rows, columns = tensor.shape[-2:]
        last = (tensor.stride(-2), tensor.stride(-1))
        strides.append((rows * columns, columns, 1) if step is None else (step, *last))
    batch = torch.Size(leading).numel()
    return _matmul(a, b, batch, a.shape[-2], strides[0], strides[1], (copied[0], copied[1]))


def _matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    batch: int,
    rows: int,
    a_strides: Strides,
    b_strides: Strides,
    copied: tuple[bool, bool],
) -> Product:
    depth, columns = b.shape[-2:]
    a_strides = _a_strides((batch, rows, depth), a_strides)
    b_strides = _strides((batch, depth, columns), b_strides)
    return Product(
        batch=batch,
        rows=rows,
        columns=columns,
        depth=depth,
        a_strides=a_strides,
        b_strides=b_strides,
        a_aligned=_a_aligned(a, a_strides, copied[0]),
        b_aligned=_aligned(b, b_strides, copied[1]),
        dtype=a.dtype,
        bias=False,
        activation="none",
        pre=False,
        copied=copied[0],
        b_copied=copied[1],
    )


def _problem(
    op: str,
    device: Device,
    product: Product,
    dtypes: tuple[tuple[str, str], ...],
    words: dict[str, bool],
) -> Problem:
    dims = [("N", product.columns), ("K", product.depth)]
    invariant = is_batch_invariant()
    if product.batch != 1 and not invariant:
        dims.append(("batch", product.batch))
    words |= {
        "unaligned": not (product.a_aligned and product.b_aligned),
        "copied": (product.copied or product.b_copied) and not invariant,
    }
    return Problem(
        op=op,
        rows=product.rows,
        dims=tuple(dims),
        dtypes=(*dtypes, ("out", str(product.dtype).removeprefix("torch."))),
        flags=tuple(word for word, present in words.items() if present),
        device=device,
        layout=product,
    )


def _order(name: str, usual: int, other: int) -> dict[str, bool]:
    """How a matrix lies: nothing to say where its usual stride is 1."""
    return {
        f"{name}_transposed": usual != 1 and other == 1,
        f"{name}_strided": usual != 1 and other != 1,
    }


def _one_step(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The one stride by which dims can be walked as a single one, or None."""
    if 0 in sizes:
        return 0
    levels = collapse(sizes, [strides])
    if len(levels) > 1:
        return None
    return levels[0][1][0] if levels else 0


def _strides(sizes: Strides, strides: Strides, unit: int = 2) -> Strides:
    """Strides that say nothing where there is one element; `unit`: the dim that is then dense."""
    kept = [step if size > 1 else 0 for size, step in zip(sizes, strides, strict=True)]
    other = 3 - unit
    if sizes[unit] <= 1:
        kept[unit] = 1
    elif sizes[other] <= 1 and kept[unit] != 1:
        kept[other] = 1
    return kept[0], kept[1], kept[2]


def _a_strides(sizes: Strides, strides: Strides) -> Strides:
    if is_batch_invariant():
        # It is packed, and a single row gets the strides of several.
        return (strides[0] if sizes[0] > 1 else 0), sizes[2], 1
    return _strides(sizes, strides)


def _aligned(tensor: torch.Tensor, strides: Strides, copied: bool) -> bool:
    """Whether every run along the unit stride starts at a multiple of 16 bytes."""
    steps = list(strides)
    if 1 in steps[1:]:
        steps.remove(1)
    start = 0 if copied else tensor.data_ptr()
    return start % _WIDEST == 0 and not any(
        step * tensor.element_size() % _WIDEST for step in steps
    )


def _a_aligned(a: torch.Tensor, strides: Strides, copied: bool) -> bool:
    if is_batch_invariant():
        # As more than one row would be, also where there is one.
        return a.shape[-1] * a.element_size() % _WIDEST == 0
    return _aligned(a, strides, copied)


def _must_be_packed(a: torch.Tensor) -> bool:
    return is_batch_invariant() and not is_packed(a)


def _copy(tensor: torch.Tensor, leading: Sequence[int]) -> torch.Tensor:
    """A dense copy; where batches are broadcast, of each of them."""
    if leading:
        tensor = tensor.expand(*leading, *tensor.shape[-2:])
    copy: torch.Tensor = packed(tensor)
    return copy
