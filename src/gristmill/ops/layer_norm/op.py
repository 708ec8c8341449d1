"""LayerNorm: the ops, their gradients, and the functions that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from gristmill.ops import inline
from gristmill.ops.by_row import by_row
from gristmill.ops.later import Later
from gristmill.ops.layer_norm import problem, reference, semantics
from gristmill.ops.layer_norm.cuda import BACKWARD_VARIANTS, FORWARD_VARIANTS, FP8_VARIANTS
from gristmill.ops.layer_norm.plain import Library, LibraryBackward
from gristmill.ops.norm_fp8.call import call_fp8
from gristmill.ops.norm_fp8.op import Fp8Norm
from gristmill.ops.norm_fp8.semantics import asked
from gristmill.ops.op import Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference

if TYPE_CHECKING:
    from gristmill.ops.layer_norm import cases
    from gristmill.ops.norms import space
else:
    cases = Later("gristmill.ops.layer_norm.cases")
    space = Later("gristmill.ops.norms.space")

_OPTIONS = (
    "Tensor? weight=None, Tensor? bias=None, float eps=1e-5, float weight_offset=0.0, "
    "ScalarType? out_dtype=None"
)


# A dtype is no type: for FP8 without a further option a type checker sees a tensor.
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
    scale: torch.Tensor | None = ...,
    return_amax: bool = ...,
) -> Any: ...
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    return_amax: bool = False,
) -> Any:
    r"""Layer norm over the last dim.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + eps}}
              \cdot (weight + weight\_offset) + bias

    Args:
        x: ``(..., N)`` of fp32, bf16, fp16 or fp64. Rows may be strided; nothing is copied while
            the last dim is contiguous and the leading dims collapse to two.
        weight, bias: ``(N,)`` of any of these dtypes each, or None.
        eps: added to the variance, which is the mean of the squared distances from the mean.
        weight_offset: added to the weight in fp32 (1.0 for weights that are stored around zero);
            without a weight it means nothing.
        out_dtype: the dtype of the result; x's by default. With ``torch.float8_e4m3fn`` the norm is
            divided by a scale and rounded to FP8, which saturates; there is no gradient then.
        scale: for FP8, a tensor of one fp32 element; None: one for each row is computed,
            ``max(max |y of the row| / 448, 2**-126)``, and returned, fp32 of shape ``(..., 1)``.
        return_amax: for FP8, whether to return the largest ``|y|`` of the whole tensor before it
            is divided, an fp32 scalar tensor.

    Returns:
        A tensor of x's shape with the strides of ``torch.empty_like(x)``; for FP8 followed by the
        scales unless they were given, and by amax if it was asked for, as a tuple. Sums are taken
        in fp32 (fp64 for fp64), of distances from a value near the mean: a row with mean 1e4 and
        standard deviation 1 is as exact as one around zero. Rounded once, at the end. Under CUDA
        autocast the result is fp32, as that of torch's own op, unless ``out_dtype`` is given.
        Differentiable once, in x, weight and bias.
    """
    if (out_dtype is not None or scale is not None or return_amax) and asked(
        "layer_norm", out_dtype, scale, return_amax
    ):
        quantised = (x, weight, bias, scale, eps, weight_offset, return_amax)
        return call_fp8(LAYER_NORM_FP8, "layer_norm", (x, weight, bias, scale), quantised)
    args = (x, weight, bias, eps, weight_offset, out_dtype)
    if torch.compiler.is_compiling():
        if "layer_norm" in inline.NAMES:
            LAYER_NORM.check(*args)
            return reference.layer_norm(*args)
        result: torch.Tensor = LAYER_NORM.traced(*args)
    else:
        result = LAYER_NORM.call((x, weight, bias), args)
    return result


@overload
def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
    scale: torch.Tensor | None = ...,
    return_amax: bool = ...,
) -> Any: ...
def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    return_amax: bool = False,
) -> Any:
    r"""The sum of x and a residual, and its layer norm.

    .. math:: s = x + residual, \qquad y = \mathrm{layer\_norm}(s)

    ``s`` is rounded to its dtype, that of ``x + residual``, before it is normalised, so ``y`` is
    exactly ``layer_norm(x + residual, ..., out_dtype=out_dtype or x.dtype)``.

    Args:
        x, residual: ``(..., N)``, one shape, any of fp32, bf16, fp16 or fp64 each.
        weight, bias, eps, weight_offset, out_dtype: as in :func:`layer_norm`.
        scale, return_amax: for FP8, as in :func:`layer_norm`.

    Returns:
        ``(y, s)``: the norm, in x's dtype unless ``out_dtype`` says otherwise, and the sum; for FP8
        followed by the scales unless they were given, and by amax if it was asked for.
        Differentiable once, in x, residual, weight and bias, through both results.
    """
    if (out_dtype is not None or scale is not None or return_amax) and asked(
        "add_layer_norm", out_dtype, scale, return_amax
    ):
        quantised = (x, residual, weight, bias, scale, eps, weight_offset, return_amax)
        tensors = (x, residual, weight, bias, scale)
        return call_fp8(ADD_LAYER_NORM_FP8, "add_layer_norm", tensors, quantised)
    args = (x, residual, weight, bias, eps, weight_offset, out_dtype)
    if torch.compiler.is_compiling():
        if "add_layer_norm" in inline.NAMES:
            ADD_LAYER_NORM.check(*args)
            return reference.add_layer_norm(*args)
        result: tuple[torch.Tensor, torch.Tensor] = ADD_LAYER_NORM.traced(*args)
    else:
        result = ADD_LAYER_NORM.call((x, residual, weight, bias), args)
    return result


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""The gradient of :func:`layer_norm` (and, with ``dsum``, of :func:`add_layer_norm`).

    .. math:: r = (\mathrm{var}(x) + eps)^{-1/2}, \quad h = (x - \mathrm{mean}(x)) r,
              \quad g = dy \cdot (weight + weight\_offset)

    .. math:: dx = r (g - \mathrm{mean}(g) - h \, \mathrm{mean}(g h)) + dsum,
              \quad dweight = \sum_{rows} dy \, h, \quad dbias = \sum_{rows} dy

    ``bias_dtype``: the dtype of dbias, None where it is not wanted.

    Returns ``(dx, dweight, dbias)``: dx like x; dweight like weight, dbias ``(N,)``; without
    elements where they are not wanted. Sums over rows are taken in fp32 in a fixed order.
    """
    args = (dy, x, weight, dsum, eps, weight_offset, weight_grad, bias_dtype)
    tensors = (dy, x, weight, dsum)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = LAYER_NORM_BACKWARD.call_in_backward(
        tensors, args
    )
    return result


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, eps, weight_offset, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps, ctx.weight_offset = eps, weight_offset
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward_forward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx, dweight, dbias = _gradients(ctx, dy, x, weight, None, 1)
    return dx, dweight, dbias, None, None, None


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, bias, eps, weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.eps, ctx.weight_offset = eps, weight_offset
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.dtypes = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)


def _backward_add(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    dtotal, dweight, dbias = dsum, None, None
    if dy is not None:
        dtotal, dweight, dbias = _gradients(ctx, dy, total, weight, dsum, 2)
    gradients = [
        dtotal.to(dtype) if dtotal is not None and needed else None
        for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
    ]
    return *gradients, dweight, dbias, None, None, None


def _gradients(
    ctx: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    position: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As autograd wants them: None where nothing is needed.

    `position`: of the weight among the arguments, before that of the bias. The dispatcher leaves
    out trailing arguments that are None, so only those that are there may be asked for.
    """
    weight_grad = weight is not None and ctx.needs_input_grad[position]
    bias_grad = ctx.bias_dtype is not None and ctx.needs_input_grad[position + 1]
    bias_dtype = ctx.bias_dtype if bias_grad else None
    dx, dweight, dbias = layer_norm_backward(
        dy, x, weight, dsum, ctx.eps, ctx.weight_offset, weight_grad, bias_dtype
    )
    return dx, dweight if weight_grad else None, dbias if bias_dtype is not None else None


def _autocast(*args: Any) -> tuple[Any, ...]:
    """torch computes layer_norm in fp32 under autocast: so an fp32 result. fp64 stays fp64."""
    *others, out_dtype = args
    return *others, out_dtype or torch.promote_types(args[0].dtype, torch.float32)


LAYER_NORM = Op(
    name="layer_norm",
    schema=f"(Tensor x, {_OPTIONS}) -> Tensor",
    summary="layer norm over the last dim",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.layer_norm,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.LAYER_FORWARD,
    variants=(
        *FORWARD_VARIANTS,
        Library(),
        Reference(
            reference.layer_norm, semantics.outputs_forward, by_row(reference.layer_norm, rows=(0,))
        ),
    ),
    defaults=(None, None, 1e-5, 0.0, None),
    gradient=Gradient(_save_forward, _backward_forward),
    autocast=_autocast,
)

ADD_LAYER_NORM = Op(
    name="add_layer_norm",
    schema=f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor)",
    summary="the sum of x and a residual, and its layer norm",
    check=semantics.check_add,
    outputs=semantics.outputs_add,
    reference=reference.add_layer_norm,
    problem_on=problem.add_problem,
    cost=cases.add_cost,
    cases=cases.add_cases,
    example=cases.add_example,
    space=space.LAYER_ADD,
    variants=(
        *FORWARD_VARIANTS,
        Library(),
        Reference(
            reference.add_layer_norm,
            semantics.outputs_add,
            by_row(reference.add_layer_norm, rows=(0, 1), results=("row", "row")),
        ),
    ),
    defaults=(None, None, 1e-5, 0.0, None),
    gradient=Gradient(_save_add, _backward_add),
    autocast=_autocast,
)

LAYER_NORM_FP8 = Fp8Norm(LAYER_NORM, layer_norm).op(
    FP8_VARIANTS, summary="layer norm over the last dim, into FP8", space=space.LAYER_FP8
)

ADD_LAYER_NORM_FP8 = Fp8Norm(ADD_LAYER_NORM, add_layer_norm).op(
    FP8_VARIANTS,
    summary="the sum of x and a residual, and its layer norm into FP8",
    space=space.LAYER_ADD_FP8,
)

LAYER_NORM_BACKWARD = Op(
    name="layer_norm_backward",
    schema=(
        "(Tensor dy, Tensor x, Tensor? weight, Tensor? dsum, float eps, float weight_offset, "
        "bool weight_grad, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)"
    ),
    summary="the gradient of layer_norm and of add_layer_norm",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.layer_norm_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.LAYER_BACKWARD,
    variants=(
        *BACKWARD_VARIANTS,
        LibraryBackward(),
        Reference(
            reference.layer_norm_backward,
            semantics.outputs_backward,
            by_row(
                reference.layer_norm_backward, rows=(1, 0, 3), results=("row", "whole", "whole")
            ),
        ),
    ),
    defaults=(),
    gradient=no_second_gradient("layer_norm_backward", "torch.nn.functional.layer_norm"),
)

inline.allow_inline("layer_norm")
inline.allow_inline("add_layer_norm")
