"""NVFP4 linear: the ops, the gradient, and the functions that users call."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops.nvfp4_common import AUTOCAST_KEYS, as_it_is, frozen, lowered, parts_of
from gristmill.ops.nvfp4_linear import cases, problem, reference, semantics
from gristmill.ops.nvfp4_linear.library import Library
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference


def linear(
    x: torch.Tensor,
    w4: NVFP4Tensor | PackedNVFP4,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""A linear layer over an NVFP4 weight.

    .. math:: y_n = g_n \sum_k x_k \, e_{nk} s_{n, k / 16} + bias_n

    Args:
        x: ``(..., K)`` of fp32, bf16, fp16 or fp64, with any strides.
        w4: a weight ``(N, K)``; K is a multiple of 16, N is any.
        bias: ``(N,)`` of any of these dtypes, or None.
        out_dtype: the dtype of the result; x's by default.

    Returns:
        ``(..., N)``, contiguous. The weight's values are exact (those of
        :func:`gristmill.nvfp4.dequantize` in fp64), sums are taken in fp32 (fp64 for fp64) and
        rounded once, after the bias. Under autocast x and bias become autocast's dtype and so does
        the result, as with ``torch.nn.functional.linear``. Differentiable once, in x and bias; the
        weight is frozen.
    """
    return linear_of(*_arguments(x, w4, bias, out_dtype=out_dtype))


def linear_of(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    layout: str = "rows",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`linear` over the parts of a weight: what modules call, as graphs take tensors.

    Args:
        codes: uint8 ``(N, K / 2)``.
        scales: E4M3 ``(N, K / 16)``, or in layout ``"tiles"`` as
            :func:`gristmill.nvfp4.swizzle` gives them.
        row_scale: fp32 ``(N,)``, the global scale of each row.
        x, bias, out_dtype: as in :func:`linear`.
    """
    args = (x, codes, scales, row_scale, bias, layout, out_dtype)
    if torch.compiler.is_compiling():
        result: torch.Tensor = NVFP4_LINEAR.overload(*args)
    else:
        result = NVFP4_LINEAR.call((x, codes, scales, row_scale, bias), args)
    return result


def linear_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    r"""The gradient of :func:`linear_of` for x.

    .. math:: dx_k = \sum_n dy_n \, g_n \, e_{nk} s_{n, k / 16}

    Args:
        dy: ``(..., N)`` of any float dtype.
        dtype: that of x, and of the result.
        codes, scales, row_scale, layout: the weight, as in :func:`linear_of`.

    Returns ``(..., K)``, contiguous.
    """
    tensors = (dy, codes, scales, row_scale)
    result: torch.Tensor = NVFP4_LINEAR_BACKWARD.call_in_backward(
        tensors, (*tensors, layout, dtype)
    )
    return result


def _arguments(
    x: torch.Tensor,
    w4: NVFP4Tensor | PackedNVFP4,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Arguments:
    weight = parts_of("nvfp4_linear", "w4", w4)
    return x, weight.codes, weight.scales, weight.row_scale, bias, weight.layout, out_dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, codes, scales, row_scale, bias, layout, _ = inputs
    frozen("nvfp4_linear", ctx, {2: "scales", 3: "row_scale"})
    ctx.save_for_backward(codes, scales, row_scale)
    ctx.layout, ctx.x_dtype = layout, x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        codes, scales, row_scale = ctx.saved_tensors
        dx = linear_backward(dy, codes, scales, row_scale, ctx.layout, ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        precise = torch.promote_types(ctx.bias_dtype, torch.float32)
        rows = dy.reshape(-1, dy.shape[-1])
        dbias = rows.sum(0, dtype=precise).to(ctx.bias_dtype)
    return dx, None, None, None, dbias, None, None


def _autocast(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
) -> Arguments:
    return lowered(x), codes, scales, row_scale, lowered(bias), layout, out_dtype


NVFP4_LINEAR = Op(
    name="nvfp4_linear",
    schema=(
        "(Tensor x, Tensor codes, Tensor scales, Tensor row_scale, Tensor? bias=None, "
        'str layout="rows", ScalarType? out_dtype=None) -> Tensor'
    ),
    summary="a linear layer over an NVFP4 weight",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.nvfp4_linear,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    variants=(
        Library(),
        Reference(reference.nvfp4_linear, semantics.outputs_forward, reference.nvfp4_linear_by_row),
    ),
    defaults=(None, "rows", None),
    gradient=Gradient(_save, _backward),
    autocast=_autocast,
    autocast_keys=AUTOCAST_KEYS,
    function=linear,
    adapt=_arguments,
)

NVFP4_LINEAR_BACKWARD = Op(
    name="nvfp4_linear_backward",
    schema=(
        "(Tensor dy, Tensor codes, Tensor scales, Tensor row_scale, str layout, "
        "ScalarType dtype) -> Tensor"
    ),
    summary="the gradient of nvfp4_linear for x",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.nvfp4_linear_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    variants=(
        Library(),
        Reference(
            reference.nvfp4_linear_backward,
            semantics.outputs_backward,
            reference.nvfp4_linear_backward_by_row,
        ),
    ),
    defaults=(),
    gradient=no_second_gradient(
        "nvfp4_linear_backward", "torch.nn.functional.linear over nvfp4.dequantize"
    ),
    autocast=as_it_is,
    autocast_keys=AUTOCAST_KEYS,
)
