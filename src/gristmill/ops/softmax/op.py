"""Softmax and log-softmax: the ops, their gradients, and the functions that users call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops import inline
from gristmill.ops.later import Later
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference
from gristmill.ops.softmax import by_row, problem, reference, semantics
from gristmill.ops.softmax.cuda import FORWARD_VARIANTS
from gristmill.ops.softmax.cuda_backward import BACKWARD_VARIANTS
from gristmill.ops.softmax.plain import Library

if TYPE_CHECKING:
    from gristmill.ops.softmax import cases, space
else:
    cases = Later("gristmill.ops.softmax.cases")
    space = Later("gristmill.ops.softmax.space")

_FORWARD_SCHEMA = "(Tensor x, int causal=0, float scale=1.0, Tensor? mask=None) -> Tensor"
_BACKWARD_SCHEMA = "(Tensor dy, Tensor y, int causal, float scale) -> Tensor"


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: str | None = None,
) -> torch.Tensor:
    r"""Softmax over one dim, of what is scaled and masked on the way.

    .. math:: v = scale \cdot x \; [+ \; mask], \qquad
              y_j = \frac{\exp(v_j - \max v)}{\sum_k \exp(v_k - \max v)}

    Hidden columns have :math:`v = -\infty`: where a bool mask is False, beyond the causal limit,
    and where x or a mask of numbers is :math:`-\infty`. A fully hidden row gives zeros, with a
    gradient of zeros, never NaN. A visible NaN or +inf makes the whole row NaN, including its
    hidden columns; hidden values have no effect.

    Args:
        x: ``(..., N)`` of fp32, bf16, fp16 or fp64. Rows may be strided; nothing is copied while
            the last dim is contiguous and the leading dims collapse to two.
        dim: the dim to sum over. Another one than the last is moved there for the kernels.
        scale: a factor of x; it stays fp32, and costs nothing.
        mask: bool (True takes part, as in torch's ``scaled_dot_product_attention``) or numbers of
            any of x's dtypes, which are added. It is broadcast to x's shape where it lies, over
            any dims; only where its columns do not lie side by side is it copied, in its own shape.
        causal: ``"top_left"`` or ``"bottom_right"``: of the last two dims ``(sq, sk)``, column j
            takes part in row i if ``j <= i``, or if ``j <= i + sk - sq``. What does not is not
            read. May be combined with a mask.

    Returns:
        A tensor of x's shape and dtype with the strides of ``torch.empty_like(x)``. Exponents and
        sums are fp32 (fp64 for fp64). Under CUDA autocast the result is fp32, as torch's own is.
        Differentiable once, in x and in a mask of numbers.
    """
    if dim != -1:
        return _along("softmax", softmax, x, dim, scale, mask, causal)
    args = (x, semantics.causal_code("softmax", causal), scale, mask)
    if torch.compiler.is_compiling():
        if "softmax" in inline.NAMES:
            SOFTMAX.check(*args)
            return reference.softmax(*args)
        result: torch.Tensor = SOFTMAX.traced(*args)
    else:
        result = SOFTMAX.call((x, mask), args)
    return result


def log_softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: str | None = None,
) -> torch.Tensor:
    r"""The logarithm of :func:`softmax`, computed as such.

    .. math:: v = scale \cdot x \; [+ \; mask], \qquad
              y_j = v_j - \max v - \log \sum_k \exp(v_k - \max v)

    What does not take part gives :math:`-\infty`, in a row with nobody in it all do; there the
    gradient is zero, and what comes back for such places counts nowhere.

    Args:
        x, dim, scale, mask, causal: as in :func:`softmax`.

    Returns:
        As :func:`softmax`.
    """
    if dim != -1:
        return _along("log_softmax", log_softmax, x, dim, scale, mask, causal)
    args = (x, semantics.causal_code("log_softmax", causal), scale, mask)
    if torch.compiler.is_compiling():
        if "log_softmax" in inline.NAMES:
            LOG_SOFTMAX.check(*args)
            return reference.log_softmax(*args)
        result: torch.Tensor = LOG_SOFTMAX.traced(*args)
    else:
        result = LOG_SOFTMAX.call((x, mask), args)
    return result


def softmax_backward(
    dy: torch.Tensor, y: torch.Tensor, scale: float = 1.0, causal: str | None = None
) -> torch.Tensor:
    r"""The gradient of :func:`softmax` in x, from its result.

    .. math:: dx = scale \cdot y \, (dy - \textstyle\sum_k dy_k y_k)

    Args:
        dy, y: ``(..., N)``, one shape, any of fp32, bf16, fp16 or fp64 each.
        scale: as it was in the forward pass.
        causal: as it was in the forward pass; what it hides is not read. A mask is not needed: what
            it hides is zero in y.

    Returns:
        dx, like y.
    """
    args = (dy, y, semantics.causal_code("softmax_backward", causal), scale)
    result: torch.Tensor = SOFTMAX_BACKWARD.call_in_backward((dy, y), args)
    return result


def log_softmax_backward(
    dy: torch.Tensor, y: torch.Tensor, scale: float = 1.0, causal: str | None = None
) -> torch.Tensor:
    r"""The gradient of :func:`log_softmax` in x, from its result.

    .. math:: dx = scale \, (dy - e^y \textstyle\sum_k dy_k)

    where y is above minus infinity; elsewhere dx is zero, and dy is not in the sum.

    Args:
        dy, y, scale, causal: as in :func:`softmax_backward`.

    Returns:
        dx, like y.
    """
    args = (dy, y, semantics.causal_code("log_softmax_backward", causal), scale)
    result: torch.Tensor = LOG_SOFTMAX_BACKWARD.call_in_backward((dy, y), args)
    return result


def _along(
    op: str,
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: int,
    scale: float,
    mask: torch.Tensor | None,
    causal: str | None,
) -> torch.Tensor:
    """`function` over any dim: moved to the end and back."""
    x_moved, mask = _moved(op, x, dim, mask, causal)
    result = function(x_moved, scale=scale, mask=mask, causal=causal)
    return result if x_moved is x else result.movedim(-1, dim)


def _moved(
    op: str,
    x: torch.Tensor,
    dim: int,
    mask: torch.Tensor | None,
    causal: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and its mask, with `dim` where the ops have it: last."""
    place = semantics.normal_dim(op, x, dim)
    if place == x.dim() - 1:
        return x, mask
    semantics.last_dim_only(op, causal, dim, x)
    if mask is not None:
        semantics.check_mask(op, mask, x)
        missing = x.dim() - mask.dim()
        if place >= missing:
            mask = mask.reshape(*(1,) * missing, *mask.shape).movedim(place, -1)
        else:
            mask = mask.unsqueeze(-1)
    return x.movedim(place, -1), mask


def _arguments(
    op: str,
    x: torch.Tensor,
    dim: int,
    scale: float,
    mask: torch.Tensor | None,
    causal: str | None,
) -> Arguments:
    """A user's call as the op's arguments."""
    x, mask = _moved(op, x, dim, mask, causal)
    return x, semantics.causal_code(op, causal), scale, mask


def _softmax_arguments(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: str | None = None,
) -> Arguments:
    return _arguments("softmax", x, dim, scale, mask, causal)


def _log_softmax_arguments(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: str | None = None,
) -> Arguments:
    return _arguments("log_softmax", x, dim, scale, mask, causal)


def _save(ctx: Any, inputs: Arguments, output: Any) -> None:
    _, causal, scale, mask = inputs
    ctx.save_for_backward(output)
    ctx.causal, ctx.scale = causal, scale
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)


def _gradients(ctx: Any, dy: torch.Tensor, op: Op) -> tuple[Any, ...]:
    def backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        result: torch.Tensor = op.call_in_backward((dy, y), (dy, y, ctx.causal, scale))
        return result

    (y,) = ctx.saved_tensors
    if ctx.mask is None or not ctx.needs_input_grad[3]:
        return backward(dy, y, ctx.scale), None, None, None
    # The mask's gradient is that of what is scaled, summed over where the mask was broadcast.
    shape, dtype = ctx.mask
    precise = semantics.accumulator(y.dtype)
    values = backward(dy.to(precise), y.to(precise), 1.0)
    dx = (values * ctx.scale).to(y.dtype) if ctx.needs_input_grad[0] else None
    return dx, None, None, values.sum_to_size(shape).to(dtype)


def _backward_softmax(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, dy, SOFTMAX_BACKWARD)


def _backward_log_softmax(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, dy, LOG_SOFTMAX_BACKWARD)


def _autocast(x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None) -> Arguments:
    """torch computes softmax in fp32 under CUDA autocast, and gives fp32; fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)), causal, scale, mask


SOFTMAX = Op(
    name="softmax",
    schema=_FORWARD_SCHEMA,
    summary="softmax over the last dim, scaled and masked",
    check=semantics.check_softmax,
    outputs=semantics.outputs,
    reference=reference.softmax,
    problem_on=problem.softmax_problem,
    cost=cases.forward_cost,
    cases=cases.softmax_cases,
    example=cases.forward_example,
    space=space.FORWARD,
    variants=(
        *FORWARD_VARIANTS,
        Library(),
        Reference(reference.softmax, semantics.outputs, by_row.softmax),
    ),
    defaults=(semantics.EVERYTHING, 1.0, None),
    spelled={"causal": semantics.CAUSAL},
    gradient=Gradient(_save, _backward_softmax),
    autocast=_autocast,
    function=softmax,
    adapt=_softmax_arguments,
)

LOG_SOFTMAX = Op(
    name="log_softmax",
    schema=_FORWARD_SCHEMA,
    summary="the logarithm of a softmax over the last dim, scaled and masked",
    check=semantics.check_log_softmax,
    outputs=semantics.outputs,
    reference=reference.log_softmax,
    problem_on=problem.log_softmax_problem,
    cost=cases.forward_cost,
    cases=cases.log_softmax_cases,
    example=cases.forward_example,
    space=space.FORWARD,
    variants=(
        *FORWARD_VARIANTS,
        Library(),
        Reference(reference.log_softmax, semantics.outputs, by_row.log_softmax),
    ),
    defaults=(semantics.EVERYTHING, 1.0, None),
    spelled={"causal": semantics.CAUSAL},
    gradient=Gradient(_save, _backward_log_softmax),
    autocast=_autocast,
    function=log_softmax,
    adapt=_log_softmax_arguments,
)

SOFTMAX_BACKWARD = Op(
    name="softmax_backward",
    schema=_BACKWARD_SCHEMA,
    summary="the gradient of softmax",
    check=semantics.check_softmax_backward,
    outputs=semantics.outputs_backward,
    reference=reference.softmax_backward,
    problem_on=problem.softmax_backward_problem,
    cost=cases.backward_cost,
    cases=cases.softmax_backward_cases,
    example=cases.softmax_backward_example,
    space=space.BACKWARD,
    variants=(
        *BACKWARD_VARIANTS,
        Reference(reference.softmax_backward, semantics.outputs_backward, by_row.softmax_backward),
    ),
    defaults=(),
    spelled={"causal": semantics.CAUSAL},
    gradient=no_second_gradient("softmax_backward", "torch.softmax"),
)

LOG_SOFTMAX_BACKWARD = Op(
    name="log_softmax_backward",
    schema=_BACKWARD_SCHEMA,
    summary="the gradient of log_softmax",
    check=semantics.check_log_softmax_backward,
    outputs=semantics.outputs_backward,
    reference=reference.log_softmax_backward,
    problem_on=problem.log_softmax_backward_problem,
    cost=cases.backward_cost,
    cases=cases.log_softmax_backward_cases,
    example=cases.log_softmax_backward_example,
    space=space.BACKWARD,
    variants=(
        *BACKWARD_VARIANTS,
        Reference(
            reference.log_softmax_backward,
            semantics.outputs_backward,
            by_row.log_softmax_backward,
        ),
    ),
    defaults=(),
    spelled={"causal": semantics.CAUSAL},
    gradient=no_second_gradient("log_softmax_backward", "torch.log_softmax"),
)

inline.allow_inline("softmax")
inline.allow_inline("log_softmax")
