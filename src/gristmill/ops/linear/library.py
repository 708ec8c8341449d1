"""The variants that leave the product to torch, which leaves it to cuBLAS on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.ops.linear import reference, semantics
from gristmill.ops.linear.problem import Product
from gristmill.ops.plain import laid_out
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

_aten = torch.ops.aten
_IN_EPILOGUE = ("relu", "gelu_tanh")


class Library(Variant):
    """torch's own linear or matmul, then its activation, in place.

    In 16 bits torch rounds the sums before the activation, and cuBLAS may add up the parts of a
    split sum in 16 bits, as `torch.backends.cuda.matmul` lets it; fp32 follows its tf32 settings.
    """

    name = "library"
    summary = "torch's own product (cuBLAS on a GPU), then its activation"

    def supports(self, problem: Problem) -> str | None:
        return _unsupported(problem)

    def varies_with_batch(self, problem: Problem) -> str | None:
        return "torch's libraries take another kernel for another number of rows"

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        if problem.op == "matmul":
            return laid_out(torch.matmul, semantics.matmul_outputs)
        product: Product = problem.layout
        linear: Callable[..., torch.Tensor] = _linear
        if problem.device.kind == "cpu" and product.bias:
            linear = _linear_then_bias
        return partial(_with_pre, linear) if product.pre else linear


class LibraryFused(Variant):
    """cuBLASLt with the activation in its epilogue: on the unrounded sums, at no cost.

    It has relu and the approximate gelu, of a product with a bias.
    """

    name = "library_fused"
    summary = "cuBLASLt, with bias and activation in its epilogue"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.kind != "cuda":
            return f"takes a CUDA device, not {problem.device.kind}"
        product: Product = problem.layout
        if product.activation not in _IN_EPILOGUE:
            return f"cuBLASLt has relu and gelu_tanh, not {product.activation}"
        if not product.bias:
            return "cuBLASLt applies them with a bias only"
        if product.pre:
            return "keeps no sums for a gradient"
        if product.dtype.itemsize != 2:
            return f"takes bfloat16 and float16, not {problem.dtype('out')}"
        return _unsupported(problem)

    def varies_with_batch(self, problem: Problem) -> str | None:
        return "cuBLASLt takes another kernel for another number of rows"

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        product: Product = problem.layout
        gelu = product.activation == "gelu_tanh"

        def plan(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
        ) -> torch.Tensor:
            rows = rows_of(x)
            # On CUDA its gelu is the approximate one; on a CPU it would be the exact one.
            y = torch._addmm_activation(bias, rows, weight.t(), use_gelu=gelu)
            return y if rows is x else y.view(*x.shape[:-1], weight.shape[0])

        return plan


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix of rows: a view, where there is one."""
    if x.dim() == 2:
        return x
    # Not x.flatten(0, -2): a gradient of several (`is_grads_batched`) can only be reshaped.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def composed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """As one would write it with torch: what `inline` shows to a compiler."""
    return reference.activated(F.linear(x, weight, bias), activation)


def _unsupported(problem: Problem) -> str | None:
    product: Product = problem.layout
    if product.empty:
        return "nothing to compute"
    if problem.device.kind == "cpu" and product.dtype.itemsize == 2:
        return f"torch may round sums of {problem.dtype('out')} on the way on a CPU"
    return None


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    rows = rows_of(x)
    y = F.linear(rows, weight, bias)
    if activation is not None:
        _IN_PLACE[activation](y)
    return y if rows is x else y.view(*x.shape[:-1], weight.shape[0])


def _linear_then_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str | None
) -> torch.Tensor:
    """A matmul, then the bias.

    BLAS on CPUs may start each sum with the bias, so that all K additions round at its magnitude.
    Adding it last costs one rounding.
    """
    rows = rows_of(x)
    y = F.linear(rows, weight).add_(bias)
    if activation is not None:
        _IN_PLACE[activation](y)
    return y if rows is x else y.view(*x.shape[:-1], weight.shape[0])


def _with_pre(
    linear: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    h = linear(x, weight, bias, None)
    return reference.activated(h, activation), h


_IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": _aten.relu_.default,
    "silu": _aten.silu_.default,
    "gelu": _aten.gelu_.default,
    "gelu_tanh": lambda h: _aten.gelu_.default(h, approximate="tanh"),
}
