"""Linear cross entropy: the ops, the gradient, and the function that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.later import Later
from gristmill.ops.linear_cross_entropy import by_row, problem, reference, semantics
from gristmill.ops.linear_cross_entropy.chunked import Chunked, ChunkedBackward
from gristmill.ops.linear_cross_entropy.library import Library
from gristmill.ops.nvfp4_common import AUTOCAST_KEYS, as_it_is, lowered
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference
from gristmill.ops.sharded import ShardedOp, any_dtensor

if TYPE_CHECKING:
    from gristmill.ops.linear_cross_entropy import cases, space
else:
    cases = Later("gristmill.ops.linear_cross_entropy.cases")
    space = Later("gristmill.ops.linear_cross_entropy.space")


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    r"""The cross entropy of a linear layer, without ever holding all of its logits.

    .. math:: \mathrm{loss} = \mathrm{cross\_entropy}(x W^T + bias, target)

    The logits are made block by block, in the forward pass and again in the backward pass, where
    each block becomes its gradient and is used up at once. Gradients are exact for any reduction
    and any gradient of the loss.

    Args:
        x: ``(..., K)`` of fp32, bf16, fp16 or fp64.
        weight: ``(V, K)`` of x's dtype, as in ``torch.nn.Linear``.
        target: class numbers of shape ``x.shape[:-1]``, int64 or int32.
        bias: ``(V,)`` of x's dtype, or None.
        class_weight: ``(V,)``, what :func:`gristmill.cross_entropy` calls ``weight``.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in
            :func:`gristmill.cross_entropy`.
        chunk_rows: how many rows' logits may be held at once. None: so many that they take 256 MB,
            or a quarter of the weight if that is more; the backward pass holds their gradient in
            the same memory.

    x, weight and bias may be DTensors on one mesh: the rows of x sharded, or the classes of weight
    and bias, or both. Target and class_weight are DTensors on it then, or plain tensors that are
    the same on every rank; ``chunk_rows`` are rows of one rank. The loss is a DTensor, a mean or
    sum is replicated.

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or with ``reduction="none"`` one for each row.
        Logits and their gradient are rounded to x's dtype, as where torch's linear is followed by
        a cross entropy; the gradients of x, weight and bias are summed in fp32 and rounded once.
        Under autocast x, weight and bias become autocast's dtype, as with
        ``torch.nn.functional.linear``. Differentiable once, in x, weight and bias.
    """
    args = (
        x,
        weight,
        target,
        bias,
        class_weight,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        reduction,
        chunk_rows,
    )
    if torch.compiler.is_compiling():
        if any_dtensor(*args[:5]):
            loss: torch.Tensor = LINEAR_CROSS_ENTROPY.dispatch(*args)[0]
        else:
            loss = LINEAR_CROSS_ENTROPY.traced(*args)[0]
    else:
        loss = LINEAR_CROSS_ENTROPY.call(args[:5], args)[0]
    return loss


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, target, bias, class_weight, *options = inputs
    if class_weight is not None and ctx.needs_input_grad[4]:
        raise ArgumentError(
            "linear_cross_entropy: class_weight requires grad, and this op has no gradient for it; "
            "pass class_weight.detach()"
        )
    _, _, denominators, stats = output
    ctx.save_for_backward(x, weight, target, bias, class_weight, stats, denominators)
    ctx.options = tuple(options)
    ctx.mark_non_differentiable(denominators, stats)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dloss: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[Any, ...]:
    x, weight, target, bias, class_weight, stats, denominators = ctx.saved_tensors
    x_grad, weight_grad = ctx.needs_input_grad[:2]
    bias_grad = bias is not None and ctx.needs_input_grad[3]
    if dloss is None:
        dloss = stats.new_zeros(target.shape if ctx.options[4] == "none" else ())
    tensors = (x, weight, target, bias, class_weight, dloss, dlse, stats, denominators)
    dx, dweight, dbias = LINEAR_CROSS_ENTROPY_BACKWARD.call_in_backward(
        tensors, (*tensors, *ctx.options, x_grad, weight_grad, bias_grad)
    )
    dx, dweight = dx if x_grad else None, dweight if weight_grad else None
    return dx, dweight, None, dbias if bias_grad else None, *[None] * 7


def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: Any,
) -> Arguments:
    return lowered(x), lowered(weight), target, lowered(bias), *rest


_OPTIONS = (
    "int ignore_index{0}, float label_smoothing{1}, float z_loss{1}, float? softcap{2}, "
    "str reduction{3}, int? chunk_rows{2}"
)
_DEFAULTS = (None, None, -100, 0.0, 0.0, None, "mean", None)

LINEAR_CROSS_ENTROPY = ShardedOp(
    name="linear_cross_entropy",
    schema=(
        "(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, Tensor? class_weight=None, "
        + _OPTIONS.format("=-100", "=0.0", "=None", '="mean"')
        + ") -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    summary="the cross entropy of a linear layer, without holding its logits",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.linear_cross_entropy,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.forward,
    variants=(
        Chunked(),
        Library(),
        Reference(
            reference.linear_cross_entropy, semantics.outputs_forward, by_row.linear_cross_entropy
        ),
    ),
    defaults=_DEFAULTS,
    indices={"target": ("weight", 0)},
    gradient=Gradient(_save, _backward),
    autocast=_autocast,
    autocast_keys=AUTOCAST_KEYS,
)

LINEAR_CROSS_ENTROPY_BACKWARD = Op(
    name="linear_cross_entropy_backward",
    schema=(
        "(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
        "Tensor dloss, Tensor? dlse, Tensor stats, Tensor denominators, "
        + _OPTIONS.format("", "", "", "")
        + ", bool x_grad, bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)"
    ),
    summary="the gradient of linear_cross_entropy, its logits made again",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.linear_cross_entropy_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.backward,
    variants=(
        ChunkedBackward(),
        Library(),
        Reference(
            reference.linear_cross_entropy_backward,
            semantics.outputs_backward,
            by_row.linear_cross_entropy_backward,
        ),
    ),
    defaults=(),
    indices={"target": ("weight", 0)},
    gradient=no_second_gradient(
        "linear_cross_entropy_backward",
        "torch.nn.functional.linear and torch.nn.functional.cross_entropy",
    ),
    autocast=as_it_is,
    autocast_keys=AUTOCAST_KEYS,
)
