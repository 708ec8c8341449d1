"""NVFP4 linear: the ops, the gradient, and the functions that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops.later import Later
from gristmill.ops.nvfp4_common import AUTOCAST_KEYS, as_it_is, frozen, lowered, parts_of
from gristmill.ops.nvfp4_linear import problem, reference, semantics
from gristmill.ops.nvfp4_linear.dequantized import Dequantized
from gristmill.ops.nvfp4_linear.fp8 import ScaledMMFp8
from gristmill.ops.nvfp4_linear.library import Library
from gristmill.ops.nvfp4_linear.mma import Mma
from gristmill.ops.nvfp4_linear.scaled_mm import ScaledMM
from gristmill.ops.nvfp4_linear.triton import TritonLinear
from gristmill.ops.nvfp4_linear.wgmma import Wgmma
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference

if TYPE_CHECKING:
    from gristmill.ops.nvfp4_linear import cases, space
else:
    cases = Later("gristmill.ops.nvfp4_linear.cases")
    space = Later("gristmill.ops.nvfp4_linear.space")


def linear(
    x: torch.Tensor,
    w4: NVFP4Tensor | PackedNVFP4,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    act: str | None = None,
) -> torch.Tensor:
    r"""A linear layer over an NVFP4 weight.

    .. math:: y_n = g_n \sum_k x_k \, e_{nk} s_{n, k / 16} + bias_n

    Args:
        x: ``(..., K)`` of fp32, bf16, fp16 or fp64, with any strides.
        w4: a weight ``(N, K)``; K is a multiple of 16, N is any.
        bias: ``(N,)`` of any of these dtypes, or None.
        out_dtype: the dtype of the result; x's by default.
        act: what activations may be rounded to on their way into the products, where that is
            faster: None, nothing; ``"fp8"``, E4M3 with one scale for each row of x, and the
            weight's values E4M3, too; ``"nvfp4"``, NVFP4 with one global scale for each row of x.
            A permission, not a demand: kernels that keep activations as they are take such calls as
            well, and few rows are always theirs. For activations like normal numbers a row of the
            result is off by 3.4% to 3.6% of its norm with ``"fp8"``, as the weight's values are
            more or less exact in E4M3, and by 9.5% with ``"nvfp4"``; one rounding to bf16, all that
            a result loses without `act`, is 0.17%. Gradients do without.

    Returns:
        ``(..., N)``, contiguous. The weight's values are exact (those of
        :func:`gristmill.nvfp4.dequantize` in fp64), sums are taken in fp32 (fp64 for fp64) and
        rounded once, after the bias. Under autocast x and bias become autocast's dtype and so does
        the result, as with ``torch.nn.functional.linear``. Differentiable once, in x and bias; the
        weight is frozen.
    """
    return linear_of(*_arguments(x, w4, bias, out_dtype=out_dtype, act=act))


def linear_of(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    layout: str = "rows",
    out_dtype: torch.dtype | None = None,
    act: str | None = None,
) -> torch.Tensor:
    """:func:`linear` over the parts of a weight: what modules call, as graphs take tensors.

    Args:
        codes: uint8 ``(N, K / 2)``; in layout ``"fragments"`` ``(N / 64, K / 64, 2048)``, rounded
            up.
        scales: E4M3 ``(N, K / 16)``; in layout ``"tiles"`` as :func:`gristmill.nvfp4.swizzle`
            gives them; in ``"fragments"`` uint8 ``(N / 64, K / 64, 256)``, rounded up.
        row_scale: fp32 ``(N,)``, the global scale of each row.
        x, bias, out_dtype, act: as in :func:`linear`. In layout ``"fragments"`` K is that of x:
            of its last 64 columns the weight does not tell how many it has.
    """
    args = (x, codes, scales, row_scale, bias, layout, out_dtype, act)
    if torch.compiler.is_compiling():
        result: torch.Tensor = NVFP4_LINEAR.traced(*args)
    else:
        result = NVFP4_LINEAR.call((x, codes, scales, row_scale, bias), args)
    return result


def linear_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    r"""The gradient of :func:`linear_of` for x.

    .. math:: dx_k = \sum_n dy_n \, g_n \, e_{nk} s_{n, k / 16}

    Args:
        dy: ``(..., N)`` of any float dtype.
        columns: K.
        dtype: that of x, and of the result.
        codes, scales, row_scale, layout: the weight, as in :func:`linear_of`.

    Returns ``(..., K)``, contiguous.
    """
    tensors = (dy, codes, scales, row_scale)
    result: torch.Tensor = NVFP4_LINEAR_BACKWARD.call_in_backward(
        tensors, (*tensors, layout, columns, dtype)
    )
    return result


def _arguments(
    x: torch.Tensor,
    w4: NVFP4Tensor | PackedNVFP4,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    act: str | None = None,
) -> Arguments:
    if not isinstance(w4, PackedNVFP4):
        codes, scales, row_scale, layout, _ = parts_of("nvfp4_linear", "w4", w4)
        return x, codes, scales, row_scale, bias, layout, out_dtype, act
    # What every call of a prepared layer pays for: no more is made here than it takes.
    row_scale, columns = w4.row_scale, w4.columns
    if columns is not None:
        semantics.check_columns("nvfp4_linear", x, row_scale, columns)
    return x, w4.codes, w4.scales, row_scale, bias, w4.layout, out_dtype, act


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, codes, scales, row_scale, bias, layout, _, _ = inputs
    frozen("nvfp4_linear", ctx, {2: "scales", 3: "row_scale"})
    ctx.save_for_backward(codes, scales, row_scale)
    ctx.layout, ctx.columns, ctx.x_dtype = layout, x.shape[-1], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        codes, scales, row_scale = ctx.saved_tensors
        weight = (codes, scales, row_scale, ctx.layout)
        dx = linear_backward(dy, *weight, ctx.columns, ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        precise = torch.promote_types(ctx.bias_dtype, torch.float32)
        # All dims but the last, one more among them: a vector is one row. No flattening, for rows
        # that are sharded unevenly over ranks.
        dbias = dy.unsqueeze(0).sum(tuple(range(dy.dim())), dtype=precise).to(ctx.bias_dtype)
    return dx, None, None, None, dbias, None, None, None


def _autocast(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> Arguments:
    return lowered(x), codes, scales, row_scale, lowered(bias), layout, out_dtype, act


NVFP4_LINEAR = Op(
    name="nvfp4_linear",
    schema=(
        "(Tensor x, Tensor codes, Tensor scales, Tensor row_scale, Tensor? bias=None, "
        'str layout="rows", ScalarType? out_dtype=None, str? act=None) -> Tensor'
    ),
    summary="a linear layer over an NVFP4 weight",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.nvfp4_linear,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.forward,
    variants=(
        # These two take part only where rounding activations is allowed, and then come first.
        ScaledMM(),
        ScaledMMFp8(),
        Wgmma(),
        Mma(),
        TritonLinear(),
        Dequantized(),
        Library(),
        Reference(reference.nvfp4_linear, semantics.outputs_forward, reference.nvfp4_linear_by_row),
    ),
    defaults=(None, "rows", None, None),
    gradient=Gradient(_save, _backward),
    autocast=_autocast,
    autocast_keys=AUTOCAST_KEYS,
    laid_out=True,
    sound=cases.sound_forward,
    function=linear,
    adapt=_arguments,
)

NVFP4_LINEAR_BACKWARD = Op(
    name="nvfp4_linear_backward",
    schema=(
        "(Tensor dy, Tensor codes, Tensor scales, Tensor row_scale, str layout, "
        "SymInt columns, ScalarType dtype) -> Tensor"
    ),
    summary="the gradient of nvfp4_linear for x",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.nvfp4_linear_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.backward,
    variants=(
        Dequantized(),
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
    laid_out=True,
    sound=cases.sound_backward,
    autocast=as_it_is,
    autocast_keys=AUTOCAST_KEYS,
)
