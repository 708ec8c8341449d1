"""`linear` with an activation and `matmul`: the ops, their gradients, the functions users call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops import inline
from gristmill.ops.later import Later
from gristmill.ops.linear import by_row, problem, reference, semantics
from gristmill.ops.linear.library import Library, LibraryFused, composed, rows_of
from gristmill.ops.linear.row_products import define, has_sharded_rows, row_products
from gristmill.ops.linear.triton import TRITON
from gristmill.ops.op import Arguments, Gradient, Op
from gristmill.ops.plain import Reference

if TYPE_CHECKING:
    from gristmill.ops.linear import cases, space
else:
    cases = Later("gristmill.ops.linear.cases")
    space = Later("gristmill.ops.linear.space")

_aten = torch.ops.aten
_AUTOCAST_KEYS = ("AutocastCUDA", "AutocastCPU")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    r"""A linear layer with its activation.

    .. math:: y_{mn} = act \Big( \sum_k x_{mk} \, weight_{nk} + bias_n \Big)

    Args:
        x: ``(..., K)`` of fp32, bf16, fp16 or fp64, with any strides. Nothing is copied while the
            leading dims collapse to one.
        weight: ``(N, K)``, any strides, x's dtype.
        bias: ``(N,)`` of x's dtype, or None.
        activation: None, ``"relu"``, ``"silu"``, ``"gelu"`` (exact, as ``F.gelu``) or
            ``"gelu_tanh"`` (``F.gelu(..., approximate="tanh")``).

    Returns:
        ``(..., N)`` of x's dtype, contiguous. Sum, bias and activation are fp32 (fp64 for fp64) and
        rounded once; the variant ``library`` rounds to x's dtype before the activation, as torch
        does. Under autocast all tensors become autocast's dtype, as in
        ``torch.nn.functional.linear``. Differentiable, any number of times. With an activation
        other than relu a pass that needs gradients also keeps the sums, in x's dtype.
    """
    args = (x, weight, bias, activation)
    if torch.compiler.is_compiling():
        if "linear" in inline.NAMES:
            LINEAR.check(*args)
            return composed(*args)
        if activation in semantics.NEED_PRE and _trained(x, weight, bias):
            result: torch.Tensor = LINEAR_WITH_PRE.traced(*args)[0]
            return result
        result = LINEAR.traced(*args)
    elif activation is not None and activation in semantics.NEED_PRE and _trained(x, weight, bias):
        result = LINEAR_WITH_PRE.call((x, weight, bias), args)[0]
    else:
        result = LINEAR.call((x, weight, bias), args)
    return result


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    r"""The product of two matrices, or of stacks of them.

    .. math:: c_{mn} = \sum_k a_{mk} \, b_{kn}

    Args:
        a: ``(..., M, K)`` of fp32, bf16, fp16 or fp64, with any strides.
        b: ``(..., K, N)`` of a's dtype. The leading dims of both broadcast to each other; nothing
            is copied while those of each collapse to one.

    Returns:
        ``(..., M, N)`` of a's dtype, contiguous: ``torch.matmul(a, b)`` for two or more dims. Sums
        are fp32 (fp64 for fp64) and rounded once. Under autocast both become autocast's dtype, as
        in ``torch.matmul``. Differentiable, any number of times.
    """
    args = (a, b)
    if torch.compiler.is_compiling():
        if "matmul" in inline.NAMES:
            MATMUL.check(*args)
            return torch.matmul(a, b)
        result: torch.Tensor = MATMUL.traced(*args)
    else:
        result = MATMUL.call(args, args)
    return result


def _trained(*tensors: Any) -> bool:
    """Whether autograd will see this call; what is no tensor is left to the checks."""
    return torch.is_grad_enabled() and any(
        getattr(tensor, "requires_grad", False) for tensor in tensors
    )


Backward = Callable[..., tuple[Any, ...]]


def _as_it_was(backward: Backward) -> Backward:
    """A backward pass in the dtypes of its forward pass: there autocast has had its say."""

    @wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        given = next((one for one in gradients if one is not None), None)
        if given is None or not torch._C._is_any_autocast_enabled():
            return backward(ctx, *gradients)
        with torch.autocast(given.device.type, enabled=False):
            return backward(ctx, *gradients)

    return run


# The gradients are put together from products by `matmul` and from torch's own gradients of the
# activations, not made by ops of their own. Each product is chosen for its own shape; what is
# frozen costs nothing; a compiler sees one node for each product, and fuses the activation's
# gradient with the sum for the bias; and as all of these have gradients, so has this.


def _save_linear(ctx: Any, inputs: Arguments, output: Any) -> None:
    x, weight, bias, activation = inputs
    ctx.activation = activation
    ctx.set_materialize_grads(False)
    if activation in semantics.NEED_PRE:
        # Only when the torch op is called by its name: `linear` takes the other op, which keeps h.
        ctx.save_for_backward(x, weight, bias)
        return
    ctx.x_shape = x.shape
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None,
        weight if ctx.needs_input_grad[0] else None,
        output if activation == "relu" else None,
    )


@_as_it_was
def _backward_linear(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    if ctx.activation in semantics.NEED_PRE:
        x, weight, bias = ctx.saved_tensors
        h = LINEAR.call_in_backward((x, weight, bias), (x, weight, bias, None))
        return _gradients(ctx, _before(ctx.activation, dy, h), x, weight, x.shape)
    x, weight, y = ctx.saved_tensors
    return _gradients(ctx, _before(ctx.activation, dy, y), x, weight, ctx.x_shape)


def _save_linear_with_pre(ctx: Any, inputs: Arguments, output: Any) -> None:
    x, weight, _, activation = inputs
    ctx.activation, ctx.x_shape = activation, x.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] else None,
        weight if ctx.needs_input_grad[0] else None,
        output[1],
    )


@_as_it_was
def _backward_linear_with_pre(
    ctx: Any, dy: torch.Tensor | None, dpre: torch.Tensor | None
) -> tuple[Any, ...]:
    """`dpre` is what comes back for h itself: from a second derivative, which goes through it."""
    x, weight, h = ctx.saved_tensors
    dh = dpre
    if dy is not None:
        dh = _before(ctx.activation, dy, h)
        dh = dh if dpre is None else dh + dpre
    if dh is None:
        return None, None, None, None
    return _gradients(ctx, dh, x, weight, ctx.x_shape)


def _before(activation: str | None, dy: torch.Tensor, kept: Any) -> torch.Tensor:
    """dy times the slope of the activation; `kept`: its result for relu, else its argument."""
    if activation is None:
        return dy
    result: torch.Tensor
    if activation == "relu":
        result = _aten.threshold_backward(dy, kept, 0)
    elif activation == "silu":
        result = (_silu_twice if _trained(dy, kept) else _aten.silu_backward)(dy, kept)
    else:
        form = "tanh" if activation == "gelu_tanh" else "none"
        result = _aten.gelu_backward(dy, kept, approximate=form)
    return result


def _silu_twice(dy: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """torch's silu_backward, which has no gradient, by ops that have one."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    share = torch.sigmoid(wide)
    return (dy * share * (1 + wide * (1 - share))).to(dy.dtype)


def _gradients(
    ctx: Any,
    dh: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    x_shape: torch.Size,
) -> tuple[Any, ...]:
    """dx = dh @ weight, dweight = dh.T @ x, dbias = the sum of dh's rows; those that are wanted."""
    # Of trailing arguments that equal their defaults the dispatcher tells nothing.
    wanted = (*ctx.needs_input_grad, False, False)
    if has_sharded_rows(dh):
        return *_gradients_unflattened(dh, x, weight, wanted), None
    rows = rows_of(dh)
    dx = dweight = dbias = None
    if wanted[0]:
        assert weight is not None
        dx = _product(rows, weight).view(x_shape)
    if wanted[1]:
        assert x is not None
        dweight = _product(rows.t(), rows_of(x))
    if wanted[2]:
        dbias = rows.sum(0)
    return dx, dweight, dbias, None


def _gradients_unflattened(
    dh: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    wanted: tuple[bool, ...],
) -> tuple[Any, Any, Any]:
    """The same with dh's dims as they are: DTensor cannot flatten all that is sharded."""
    dx = dweight = dbias = None
    if wanted[0]:
        assert weight is not None
        dx = _product(dh, weight)
    if wanted[1]:
        assert x is not None
        dweight = row_products(dh, x)
    if wanted[2]:
        dbias = dh.sum(tuple(range(dh.dim() - 1)))
    return dx, dweight, dbias


def _save_matmul(ctx: Any, inputs: Arguments, output: Any) -> None:
    a, b = inputs
    ctx.a_shape, ctx.b_shape = a.shape, b.shape
    ctx.save_for_backward(
        a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None
    )


@_as_it_was
def _backward_matmul(ctx: Any, dc: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    da = db = None
    if ctx.needs_input_grad[0]:
        if len(ctx.a_shape) == 2 and b.dim() > 2:
            da = _over_batches(b.mT, dc.mT).t()
        else:
            da = _product(dc, b.mT).sum_to_size(ctx.a_shape)
    if ctx.needs_input_grad[1]:
        if len(ctx.b_shape) == 2 and a.dim() > 2:
            db = _over_batches(a, dc)
        else:
            db = _product(a.mT, dc).sum_to_size(ctx.b_shape)
    return da, db


def _over_batches(a: torch.Tensor, dc: torch.Tensor) -> torch.Tensor:
    """The gradient for the one B of all batches: one product, with the batches in its sum."""
    if has_sharded_rows(a):
        return row_products(a, dc)
    return _product(rows_of(a).t(), rows_of(dc))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = MATMUL.call_in_backward((a, b), (a, b))
    return result


def _lowered(tensor: Any) -> Any:
    """As torch's own products take their arguments under autocast; fp64 stays, there as here."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        return tensor
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _autocast(*args: Any) -> Arguments:
    return tuple(_lowered(arg) for arg in args)


_FORWARD = "(Tensor x, Tensor weight, Tensor? bias=None, str? activation=None)"

LINEAR = Op(
    name="linear",
    schema=f"{_FORWARD} -> Tensor",
    summary="a linear layer with its activation",
    check=semantics.check_linear,
    outputs=semantics.linear_outputs,
    reference=reference.linear,
    problem_on=problem.linear_problem,
    cost=cases.linear_cost,
    cases=cases.linear_cases,
    example=cases.linear_example,
    space=space.linear,
    variants=(
        *TRITON,
        LibraryFused(),
        Library(),
        Reference(reference.linear, semantics.linear_outputs, by_row.linear),
    ),
    defaults=(None, None),
    gradient=Gradient(_save_linear, _backward_linear),
    autocast=_autocast,
    autocast_keys=_AUTOCAST_KEYS,
    function=linear,
)

LINEAR_WITH_PRE = Op(
    name="linear_with_pre",
    schema="(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
    summary="a linear layer with its activation, and what that was applied to",
    check=semantics.check_linear_with_pre,
    outputs=semantics.linear_with_pre_outputs,
    reference=reference.linear_with_pre,
    problem_on=problem.linear_with_pre_problem,
    cost=cases.linear_with_pre_cost,
    cases=cases.linear_with_pre_cases,
    example=cases.linear_with_pre_example,
    space=space.linear_with_pre,
    variants=(
        *TRITON,
        Library(),
        Reference(
            reference.linear_with_pre, semantics.linear_with_pre_outputs, by_row.linear_with_pre
        ),
    ),
    defaults=(),
    gradient=Gradient(_save_linear_with_pre, _backward_linear_with_pre),
    autocast=_autocast,
    autocast_keys=_AUTOCAST_KEYS,
)

MATMUL = Op(
    name="matmul",
    schema="(Tensor a, Tensor b) -> Tensor",
    summary="the product of matrices, or of stacks of them",
    check=semantics.check_matmul,
    outputs=semantics.matmul_outputs,
    reference=reference.matmul,
    problem_on=problem.matmul_problem,
    cost=cases.matmul_cost,
    cases=cases.matmul_cases,
    example=cases.matmul_example,
    space=space.matmul,
    variants=(
        *TRITON,
        Library(),
        Reference(reference.matmul, semantics.matmul_outputs, by_row.matmul),
    ),
    defaults=(),
    gradient=Gradient(_save_matmul, _backward_matmul),
    autocast=_autocast,
    autocast_keys=_AUTOCAST_KEYS,
    function=matmul,
)

define(MATMUL)

for _name in ("linear", "matmul"):
    inline.allow_inline(_name)
