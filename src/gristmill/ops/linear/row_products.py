"""The product of a weight's gradient, with all dims of rows in its sum, for DTensors.

A product of matrices would have the rows flattened first, which DTensor refuses for many a tensor
whose rows are sharded: unevenly, over several dims, and with torch 2.11 along any but the first
one. As an op of its own it is flattened on each rank, where nothing is sharded.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.direct import PLAIN, refuse_tangents
from gristmill.ops.linear.library import rows_of
from gristmill.ops.op import LIBRARY, NAMESPACE, Op, teach_dtensor
from gristmill.ops.sharded import any_dtensor

NAME = "row_products"


def has_sharded_rows(x: torch.Tensor) -> bool:
    """Whether it is a DTensor whose rows would have to be flattened; quick to say no."""
    return type(x) not in PLAIN and x.dim() > 2 and any_dtensor(x)


def row_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum over all rows of a's row times b's: ``(..., M)`` and ``(..., N)`` give ``(M, N)``."""
    result: torch.Tensor = getattr(torch.ops, NAMESPACE).row_products(a, b)
    return result


def define(matmul: Op) -> None:
    """Define the op by that of the product. It has a gradient of its own, as that has."""

    def implementation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        refuse_tangents(NAME, (a, b))
        _check(a, b)
        result: torch.Tensor = matmul.run(rows_of(a).t(), rows_of(b))
        return result

    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        teach_dtensor()
        _check(a, b)
        return a.new_empty((a.shape[-1], b.shape[-1]))

    def save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        a, b = inputs
        ctx.save_for_backward(
            a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None
        )

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        found: list[Any] = [None, None]
        for at, (rows, matrix) in enumerate(((b, gradient.mT), (a, gradient))):
            if ctx.needs_input_grad[at]:
                found[at] = matmul.call_in_backward((rows, matrix), (rows, matrix))
        return tuple(found)

    LIBRARY.define(f"{NAME}(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(NAME, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{NAME}", fake, lib=LIBRARY)
    torch.library.register_autograd(
        f"{NAMESPACE}::{NAME}", backward, setup_context=save, lib=LIBRARY
    )


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() < 2 or a.shape[:-1] != b.shape[:-1]:
        raise ArgumentError(
            f"{NAME}: a and b must have two dims or more, and the same but for the last, got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
