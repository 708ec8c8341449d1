"""RMSNorm: the ops, their gradients, and the functions that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from gristmill.ops import inline
from gristmill.ops.by_row import by_row
from gristmill.ops.later import Later
from gristmill.ops.norm_fp8.call import call_fp8
from gristmill.ops.norm_fp8.op import Fp8Norm
from gristmill.ops.norm_fp8.semantics import asked
from gristmill.ops.op import Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference
from gristmill.ops.rms_norm import problem, reference, semantics
from gristmill.ops.rms_norm.cuda import FORWARD_VARIANTS
from gristmill.ops.rms_norm.cuda_backward import BACKWARD_VARIANTS
from gristmill.ops.rms_norm.cuda_fp8 import FP8_VARIANTS
from gristmill.ops.rms_norm.cutedsl import CUTEDSL
from gristmill.ops.rms_norm.plain import Library, LibraryBackward

if TYPE_CHECKING:
    from gristmill.ops.norms import space
    from gristmill.ops.rms_norm import cases
else:
    cases = Later("gristmill.ops.rms_norm.cases")
    space = Later("gristmill.ops.norms.space")

_OPTIONS = (
    'Tensor? weight=None, float? eps=1e-6, float weight_offset=0.0, str casting="once", '
    "ScalarType? out_dtype=None"
)


# A dtype is no type: for FP8 without a further option a type checker sees a tensor.
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    weight_offset: float = ...,
    casting: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    weight_offset: float = ...,
    casting: str = ...,
    out_dtype: torch.dtype | None = ...,
    scale: torch.Tensor | None = ...,
    return_amax: bool = ...,
) -> Any: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    return_amax: bool = False,
) -> Any:
    r"""Root mean square norm over the last dim.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + eps}} \cdot (weight + weight\_offset)

    Args:
        x: ``(..., N)`` of fp32, bf16, fp16 or fp64. Rows may be strided; nothing is copied while
            the last dim is contiguous and the leading dims collapse to two.
        weight: ``(N,)`` of any of these dtypes, or None.
        eps: added to the mean of squares; None means what ``torch.nn.RMSNorm`` takes for None,
            the epsilon of the accumulator's dtype.
        weight_offset: added to the weight in fp32 (1.0 for Gemma's weights).
        casting: ``"once"`` rounds once, at the end. ``"llama"`` rounds as Hugging Face's Llama
            does: the normalised value to x's dtype, then its product with the weight.
        out_dtype: the dtype of the result; x's by default. With ``torch.float8_e4m3fn`` the norm is
            divided by a scale and rounded to FP8, which saturates; there is no gradient then.
        scale: for FP8, a tensor of one fp32 element; None: one for each row is computed,
            ``max(max |y of the row| / 448, 2**-126)``, and returned, fp32 of shape ``(..., 1)``.
        return_amax: for FP8, whether to return the largest ``|y|`` of the whole tensor before it
            is divided, an fp32 scalar tensor.

    Returns:
        A tensor of x's shape with the strides of ``torch.empty_like(x)``; for FP8 followed by the
        scales unless they were given, and by amax if it was asked for, as a tuple. Sums are taken
        in fp32 (fp64 for fp64). Under CUDA autocast it does what torch's own op does: from the
        torch version on that computes rms_norm in fp32 there, the result is fp32 unless
        ``out_dtype`` is given, whatever ``casting``. Differentiable once, in x and weight.
    """
    if (out_dtype is not None or scale is not None or return_amax) and asked(
        "rms_norm", out_dtype, scale, return_amax
    ):
        quantised = (x, weight, scale, eps, weight_offset, casting, return_amax)
        return call_fp8(RMS_NORM_FP8, "rms_norm", (x, weight, scale), quantised)
    args = (x, weight, eps, weight_offset, casting, out_dtype)
    if torch.compiler.is_compiling():
        if "rms_norm" in inline.NAMES:
            RMS_NORM.check(*args)
            return reference.rms_norm(*args)
        result: torch.Tensor = RMS_NORM.traced(*args)
    else:
        result = RMS_NORM.call((x, weight), args)
    return result


@overload
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    weight_offset: float = ...,
    casting: str = ...,
    out_dtype: torch.dtype | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = ...,
    eps: float | None = ...,
    *,
    weight_offset: float = ...,
    casting: str = ...,
    out_dtype: torch.dtype | None = ...,
    scale: torch.Tensor | None = ...,
    return_amax: bool = ...,
) -> Any: ...
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    return_amax: bool = False,
) -> Any:
    r"""The sum of x and a residual, and its RMSNorm.

    .. math:: s = x + residual, \qquad y = \mathrm{rms\_norm}(s)

    ``s`` is rounded to its dtype, that of ``x + residual``, before it is normalised, so ``y`` is
    exactly ``rms_norm(x + residual, ..., out_dtype=out_dtype or x.dtype)``.

    Args:
        x, residual: ``(..., N)``, one shape, any of fp32, bf16, fp16 or fp64 each.
        weight, eps, weight_offset, casting, out_dtype: as in :func:`rms_norm`.
        scale, return_amax: for FP8, as in :func:`rms_norm`.

    Returns:
        ``(y, s)``: the norm, in x's dtype unless ``out_dtype`` says otherwise, and the sum; for FP8
        followed by the scales unless they were given, and by amax if it was asked for.
        Differentiable once, in x, residual and weight, through both results.
    """
    if (out_dtype is not None or scale is not None or return_amax) and asked(
        "add_rms_norm", out_dtype, scale, return_amax
    ):
        quantised = (x, residual, weight, scale, eps, weight_offset, casting, return_amax)
        return call_fp8(ADD_RMS_NORM_FP8, "add_rms_norm", (x, residual, weight, scale), quantised)
    args = (x, residual, weight, eps, weight_offset, casting, out_dtype)
    if torch.compiler.is_compiling():
        if "add_rms_norm" in inline.NAMES:
            ADD_RMS_NORM.check(*args)
            return reference.add_rms_norm(*args)
        result: tuple[torch.Tensor, torch.Tensor] = ADD_RMS_NORM.traced(*args)
    else:
        result = ADD_RMS_NORM.call((x, residual, weight), args)
    return result


def fused_add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    r"""In place, for inference, as vLLM defines it: ``residual += x``, and x becomes its norm.

    .. math:: s = x + residual, \quad residual \leftarrow s, \quad
              x \leftarrow \frac{s}{\sqrt{\mathrm{mean}(s^2) + eps}} \cdot weight

    The norm is taken from the fp32 sum before it is rounded into ``residual``; the normalised
    value is rounded to the weight's dtype before the product.

    Args:
        x, residual: ``(..., N)``, one shape; both are overwritten, so they share no memory.
        weight: ``(N,)`` or None.
        eps: added to the mean of squares.

    It has no gradient: where an argument requires one, the call raises NoGradientError.
    """
    if torch.compiler.is_compiling():
        FUSED_ADD_RMS_NORM_.traced(x, residual, weight, eps)
    else:
        FUSED_ADD_RMS_NORM_.call((x, residual, weight), (x, residual, weight, eps))


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The gradient of :func:`rms_norm` (and, with ``dsum``, of :func:`add_rms_norm`).

    .. math:: r = (\mathrm{mean}(x^2) + eps)^{-1/2}, \quad g = dy \cdot (weight + weight\_offset)

    .. math:: dx = r (g - x r \, \mathrm{mean}(g x r)) + dsum, \quad dweight = \sum_{rows} dy \, x r

    Returns ``(dx, dweight)``: dx like x; dweight like weight, or without elements where
    ``weight_grad`` is False. The sum over rows is taken in fp32 in a fixed order.
    """
    args = (dy, x, weight, dsum, eps, weight_offset, weight_grad)
    tensors = (dy, x, weight, dsum)
    result: tuple[torch.Tensor, torch.Tensor] = RMS_NORM_BACKWARD.call_in_backward(tensors, args)
    return result


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, eps, weight_offset, _, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps, ctx.weight_offset = eps, weight_offset


def _backward_forward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    weight_grad = weight is not None and ctx.needs_input_grad[1]
    dx, dweight = rms_norm_backward(dy, x, weight, None, ctx.eps, ctx.weight_offset, weight_grad)
    return dx, dweight if weight_grad else None, None, None, None, None


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, eps, weight_offset, _, _ = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.eps, ctx.weight_offset = eps, weight_offset
    ctx.dtypes = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)


def _backward_add(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    weight_grad = weight is not None and ctx.needs_input_grad[2] and dy is not None
    if dy is None:
        dtotal, dweight = dsum, None
    else:
        dtotal, dweight = rms_norm_backward(
            dy, total, weight, dsum, ctx.eps, ctx.weight_offset, weight_grad
        )
    gradients = [
        dtotal.to(dtype) if dtotal is not None and needed else None
        for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
    ]
    return *gradients, dweight if weight_grad else None, None, None, None, None


def _autocast_forward(*args: Any) -> tuple[Any, ...]:
    """torch computes rms_norm in fp32 under autocast: so an fp32 result, rounded nowhere before.

    fp64 stays fp64, there as here.
    """
    *tensors, eps, weight_offset, _, out_dtype = args
    own = torch.promote_types(args[0].dtype, torch.float32)
    return *tensors, eps, weight_offset, "once", out_dtype or own


def _autocast_fp8(*args: Any) -> tuple[Any, ...]:
    """As above; the result is FP8, as was asked for."""
    *others, _, amax = args
    return *others, "once", amax


RMS_NORM = Op(
    name="rms_norm",
    schema=f"(Tensor x, {_OPTIONS}) -> Tensor",
    summary="root mean square norm over the last dim",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.rms_norm,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.RMS_FORWARD,
    variants=(
        *FORWARD_VARIANTS,
        CUTEDSL,
        Library(),
        Reference(
            reference.rms_norm, semantics.outputs_forward, by_row(reference.rms_norm, rows=(0,))
        ),
    ),
    defaults=(None, 1e-6, 0.0, "once", None),
    gradient=Gradient(_save_forward, _backward_forward),
    autocast=_autocast_forward if semantics.TORCH_AUTOCASTS else None,
)

ADD_RMS_NORM = Op(
    name="add_rms_norm",
    schema=f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor)",
    summary="the sum of x and a residual, and its RMSNorm",
    check=semantics.check_add,
    outputs=semantics.outputs_add,
    reference=reference.add_rms_norm,
    problem_on=problem.add_problem,
    cost=cases.add_cost,
    cases=cases.add_cases,
    example=cases.add_example,
    space=space.RMS_ADD,
    variants=(
        *FORWARD_VARIANTS,
        Library(),
        Reference(
            reference.add_rms_norm,
            semantics.outputs_add,
            by_row(reference.add_rms_norm, rows=(0, 1), results=("row", "row")),
        ),
    ),
    defaults=(None, 1e-6, 0.0, "once", None),
    gradient=Gradient(_save_add, _backward_add),
    autocast=_autocast_forward if semantics.TORCH_AUTOCASTS else None,
)

RMS_NORM_FP8 = Fp8Norm(RMS_NORM, rms_norm).op(
    FP8_VARIANTS,
    summary="root mean square norm over the last dim, into FP8",
    space=space.RMS_FP8,
    autocast=_autocast_fp8 if semantics.TORCH_AUTOCASTS else None,
)

ADD_RMS_NORM_FP8 = Fp8Norm(ADD_RMS_NORM, add_rms_norm).op(
    FP8_VARIANTS,
    summary="the sum of x and a residual, and its RMSNorm into FP8",
    space=space.RMS_ADD_FP8,
    autocast=_autocast_fp8 if semantics.TORCH_AUTOCASTS else None,
)

FUSED_ADD_RMS_NORM_ = Op(
    name="fused_add_rms_norm_",
    schema="(Tensor(a!) x, Tensor(b!) residual, Tensor? weight=None, float eps=1e-6) -> ()",
    summary="residual += x and x = its RMSNorm, in place, for inference",
    check=semantics.check_fused_add,
    outputs=semantics.outputs_fused_add,
    reference=reference.fused_add_rms_norm_,
    problem_on=problem.fused_add_problem,
    cost=cases.fused_add_cost,
    cases=cases.fused_add_cases,
    example=cases.fused_add_example,
    space=space.RMS_FUSED_ADD,
    variants=(
        *FORWARD_VARIANTS,
        Reference(
            reference.fused_add_rms_norm_,
            semantics.outputs_fused_add,
            by_row(reference.fused_add_rms_norm_, rows=(0, 1), written=(0, 1)),
        ),
    ),
    defaults=(None, 1e-6),
    instead="gristmill.add_rms_norm",
)

RMS_NORM_BACKWARD = Op(
    name="rms_norm_backward",
    schema=(
        "(Tensor dy, Tensor x, Tensor? weight, Tensor? dsum, float? eps, float weight_offset, "
        "bool weight_grad) -> (Tensor, Tensor)"
    ),
    summary="the gradient of rms_norm and of add_rms_norm",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.rms_norm_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.RMS_BACKWARD,
    variants=(
        *BACKWARD_VARIANTS,
        LibraryBackward(),
        Reference(
            reference.rms_norm_backward,
            semantics.outputs_backward,
            by_row(reference.rms_norm_backward, rows=(1, 0, 3), results=("row", "whole")),
        ),
    ),
    defaults=(),
    gradient=no_second_gradient("rms_norm_backward", "torch.nn.functional.rms_norm"),
)

inline.allow_inline("rms_norm")
inline.allow_inline("add_rms_norm")
