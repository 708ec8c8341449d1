"""Cross entropy: the ops, their gradients, and the function that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops import checks, inline
from gristmill.ops.cross_entropy import by_row, one_pass, problem, reference, semantics
from gristmill.ops.cross_entropy.cuda import FORWARD_VARIANTS
from gristmill.ops.cross_entropy.cuda_backward import BACKWARD_VARIANTS, SCALE_VARIANTS
from gristmill.ops.cross_entropy.cuda_one_pass import ONE_PASS_VARIANTS
from gristmill.ops.direct import is_differentiated_in_trace, is_transformed, needs_grad
from gristmill.ops.later import Later
from gristmill.ops.op import Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference
from gristmill.ops.sharded import ShardedOp, any_dtensor

if TYPE_CHECKING:
    from gristmill.ops.cross_entropy import cases, space
else:
    cases = Later("gristmill.ops.cross_entropy.cases")
    space = Later("gristmill.ops.cross_entropy.space")

_OPTIONS = (
    "Tensor target, Tensor? weight=None, int ignore_index=-100, float label_smoothing=0.0, "
    'float z_loss=0.0, float? softcap=None, str reduction="mean", bool return_lse=False'
)
_DEFAULTS = (None, -100, 0.0, 0.0, None, "mean", False)
_INSTEAD = "torch.nn.functional.cross_entropy"


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    one_pass: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""The cross entropy of rows of logits and their target classes.

    .. math:: v = softcap \cdot \tanh(x / softcap) \text{ or } x, \qquad
              lse = \log \sum_j e^{v_j}

    .. math:: loss = (1 - e)\, w_t (lse - v_t) + \frac{e}{V} \sum_j w_j (lse - v_j) + z\, lse^2

    with e the label smoothing, w the class weights (1 without), z the z-loss.

    Args:
        logits: ``(..., V)`` of fp32, bf16, fp16 or fp64, a row for each target. Rows may be
            strided; nothing is copied while the last dim is contiguous and the leading dims
            collapse to two.
        target: ``logits.shape[:-1]``, class indices of int64 or int32. One that is neither a class
            nor ``ignore_index`` gives NaN, in its loss and in its row of the gradient.
        weight: ``(V,)``, one for each class, or None.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever they hold.
        label_smoothing: between 0 and 1.
        z_loss: at least 0; under "mean" its part is divided by the number of rows that count.
        softcap: None, or greater than 0.
        reduction: ``"mean"`` divides by the sum of the weights of all targets that count, as torch
            does (NaN if there are none), ``"sum"`` adds up, ``"none"`` gives a loss for each row.
        return_lse: also return lse of every row, ignored or not.
        one_pass: make the gradient of the logits in the forward pass, from the same read. It is
            kept until the backward pass, multiplied there by the gradient of the loss, and gone.
            lse is not differentiable then.
        inplace: with ``one_pass``, in eager mode: the gradient takes the place of the logits.

    Logits may be a DTensor whose rows or classes are sharded: each rank reads its own part. Target
    and weight are DTensors on the same mesh then, or plain tensors that are the same on every rank.
    The results are DTensors, a mean or sum is replicated; ``one_pass`` is taken in two passes, and
    ``inplace`` is refused.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), of no dims, or of target's shape for ``"none"``; with
        ``return_lse`` ``(loss, lse)``. Sums are taken in fp32 (fp64). Differentiable once, in the
        logits.
    """
    args = (
        logits,
        target,
        weight,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        reduction,
        return_lse,
    )
    if one_pass is not False or inplace is not False:
        loss, lse = _one_pass(args, one_pass, inplace)
    elif torch.compiler.is_compiling():
        if any_dtensor(logits, target, weight):
            loss, lse, *_ = CROSS_ENTROPY.dispatch(*args)
        elif "cross_entropy" in inline.NAMES:
            CROSS_ENTROPY.check(*args)
            loss, lse, *_ = reference.cross_entropy(*args)
        else:
            loss, lse, *_ = CROSS_ENTROPY.traced(*args)
    else:
        loss, lse, *_ = CROSS_ENTROPY.call((logits, target, weight), args)
    return (loss, lse) if return_lse else loss


def _one_pass(
    args: tuple[Any, ...], wanted: Any, inplace: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.boolean("cross_entropy", "one_pass", wanted)
    checks.boolean("cross_entropy", "inplace", inplace)
    if not wanted:
        raise ArgumentError("cross_entropy: inplace needs one_pass=True, got one_pass=False")
    logits, target, weight = args[:3]
    if one_pass.is_plain_eager(logits, target, weight):
        if not needs_grad(logits, weight):
            loss, lse, *_ = CROSS_ENTROPY.run(*args)
            return loss, lse
        if inplace:
            one_pass.check_in_place(logits)
        pair: tuple[torch.Tensor, torch.Tensor] = _ONE_PASS.apply(inplace, *args)
        return pair
    if not torch.compiler.is_compiling():
        CROSS_ENTROPY.check(*args)
    if any_dtensor(logits, target, weight):
        return _one_pass_of_dtensors(args, inplace)
    if inplace:
        raise ArgumentError(
            "cross_entropy: inplace works in plain eager mode alone, and something is tracing, "
            "transforming or watching this call; use inplace=False"
        )
    compiling = torch.compiler.is_compiling()
    transformed = is_differentiated_in_trace() if compiling else is_transformed()
    if transformed or not needs_grad(logits, weight):
        loss, lse, *_ = CROSS_ENTROPY.dispatch(*args)
        return loss, lse
    loss, lse, _ = CROSS_ENTROPY_ONE_PASS.dispatch(*args)
    return loss, lse


def _one_pass_of_dtensors(
    args: tuple[Any, ...], inplace: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In two passes: the first knows no denominator of a mean over all ranks, and no sum over all
    classes. What a user sees of one pass holds: lse is a constant."""
    if inplace:
        raise ArgumentError(
            "cross_entropy: inplace must be False where logits are a DTensor, got True: their "
            "gradient is made from what all ranks have found"
        )
    loss, lse, *_ = CROSS_ENTROPY.dispatch(*args)
    return loss, lse.detach()


def cross_entropy_backward(
    dloss: torch.Tensor, dlse: torch.Tensor | None, logits: torch.Tensor, *rest: Any
) -> torch.Tensor:
    r"""The gradient of :func:`cross_entropy` in the logits.

    .. math:: dv_j = p_j A - [j = t] B - w_j C, \qquad dx_j = dv_j (1 - (v_j / softcap)^2)

    with :math:`p_j = e^{v_j - m} / s`, where ``stats`` are m, the largest v of the row, and s, its
    sum of :math:`e^{v_j - m}`; g the gradient of the row's loss over its denominator,
    :math:`B = g (1 - e) w_t`, :math:`C = g e / V`,
    :math:`A = B + C \sum_j w_j + 2 z\, g_z\, lse + dlse`. Takes the arguments of the torch op.
    """
    tensors = (dloss, dlse, logits, *rest[:4])
    result: torch.Tensor = CROSS_ENTROPY_BACKWARD.call_in_backward(
        tensors, (dloss, dlse, logits, *rest)
    )
    return result


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, weight, *options, return_lse = inputs
    one_pass.refuse_weight_gradient(weight is not None and ctx.needs_input_grad[2])
    _, _, denominators, stats = output
    ctx.save_for_backward(logits, target, stats, denominators, weight)
    ctx.options, ctx.return_lse = options, return_lse
    ctx.mark_non_differentiable(denominators, stats)
    ctx.set_materialize_grads(False)


def _backward_forward(
    ctx: Any, dloss: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[Any, ...]:
    logits, target, stats, denominators, weight = ctx.saved_tensors
    nothing = (None,) * (len(ctx.options) + 3)
    if dloss is None and dlse is None:
        return None, *nothing
    ignore_index, *_, reduction = ctx.options
    if dloss is None:
        dloss = stats.new_zeros(target.shape if reduction == "none" else ())
    if dlse is not None and not ctx.return_lse:
        # lse of an ignored row was not computed: it is a constant.
        dlse = dlse.masked_fill(target == ignore_index, 0.0)
    rest = (logits, target, stats, denominators, weight, *ctx.options, 0, 0)
    return cross_entropy_backward(dloss, dlse, *rest), *nothing


def _save_one_pass(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    one_pass.refuse_weight_gradient(inputs[2] is not None and ctx.needs_input_grad[2])
    _, lse, gradient = output
    ctx.save_for_backward(gradient)
    ctx.arguments = len(inputs)
    ctx.mark_non_differentiable(lse, gradient)


def _backward_one_pass(ctx: Any, dloss: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    one_pass.refuse_second_gradient()
    (gradient,) = ctx.saved_tensors
    return one_pass.scaled(gradient, dloss), *[None] * (ctx.arguments - 1)


CROSS_ENTROPY = ShardedOp(
    name="cross_entropy",
    schema=f"(Tensor logits, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    summary="the cross entropy of rows of logits and their target classes",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.cross_entropy,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.FORWARD,
    variants=(
        *FORWARD_VARIANTS,
        Reference(reference.cross_entropy, semantics.outputs_forward, by_row.cross_entropy),
    ),
    defaults=_DEFAULTS,
    indices={"target": ("logits", -1)},
    gradient=Gradient(_save_forward, _backward_forward),
)

CROSS_ENTROPY_ONE_PASS = Op(
    name="cross_entropy_one_pass",
    schema=f"(Tensor logits, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    summary="cross entropy and the gradient of its logits, from one read",
    check=semantics.check_forward,
    outputs=semantics.outputs_one_pass,
    reference=reference.cross_entropy_one_pass,
    problem_on=problem.one_pass_problem,
    cost=cases.one_pass_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.FORWARD,
    variants=(
        *ONE_PASS_VARIANTS,
        Reference(
            reference.cross_entropy_one_pass,
            semantics.outputs_one_pass,
            by_row.cross_entropy_one_pass,
        ),
    ),
    defaults=_DEFAULTS,
    indices={"target": ("logits", -1)},
    gradient=Gradient(_save_one_pass, _backward_one_pass),
)

CROSS_ENTROPY_ONE_PASS_ = Op(
    name="cross_entropy_one_pass_",
    schema=f"(Tensor(a!) logits, {_OPTIONS}) -> (Tensor, Tensor)",
    summary="cross entropy; the gradient of the logits takes their place",
    check=semantics.check_one_pass_,
    outputs=semantics.outputs_one_pass_,
    reference=reference.cross_entropy_one_pass_,
    problem_on=problem.one_pass_problem_,
    cost=cases.one_pass_cost,
    cases=cases.one_pass_cases_,
    example=cases.forward_example,
    space=space.FORWARD,
    variants=(
        *ONE_PASS_VARIANTS,
        Reference(
            reference.cross_entropy_one_pass_,
            semantics.outputs_one_pass_,
            by_row.cross_entropy_one_pass_,
        ),
    ),
    defaults=_DEFAULTS,
    indices={"target": ("logits", -1)},
    instead="gristmill.cross_entropy(..., one_pass=True, inplace=True)",
)

SCALE_GRADIENT_ = Op(
    name="scale_gradient_",
    schema="(Tensor(a!) gradient, Tensor factor) -> ()",
    summary="rows times a factor, in place; those whose factor is 1 are left alone",
    check=semantics.check_scale,
    outputs=semantics.outputs_scale,
    reference=reference.scale_gradient_,
    problem_on=problem.scale_problem,
    cost=cases.scale_cost,
    cases=cases.scale_cases,
    example=cases.scale_example,
    space=space.SCALE,
    variants=(
        *SCALE_VARIANTS,
        # One product for each element: nothing of it depends on a batch.
        Reference(
            reference.scale_gradient_, semantics.outputs_scale, by_row=reference.scale_gradient_
        ),
    ),
    defaults=(),
    instead="torch.mul",
)

CROSS_ENTROPY_BACKWARD = Op(
    name="cross_entropy_backward",
    schema=(
        "(Tensor dloss, Tensor? dlse, Tensor logits, Tensor target, Tensor stats, "
        "Tensor denominators, Tensor? weight, int ignore_index, float label_smoothing, "
        "float z_loss, float? softcap, str reduction, int first_class, int classes) -> Tensor"
    ),
    summary="the gradient of cross_entropy in the logits, or in a shard of them",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.cross_entropy_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.BACKWARD,
    variants=(
        *BACKWARD_VARIANTS,
        Reference(
            reference.cross_entropy_backward,
            semantics.outputs_backward,
            by_row.cross_entropy_backward,
        ),
    ),
    defaults=(),
    indices={"target": ("logits", -1)},
    gradient=no_second_gradient("cross_entropy_backward", _INSTEAD),
)

CROSS_ENTROPY_SHARD = Op(
    name="cross_entropy_shard",
    schema=(
        "(Tensor logits, Tensor target, int first_class, int classes, int ignore_index, "
        "float? softcap, bool sums) -> Tensor"
    ),
    summary="what a shard of the classes adds to a cross entropy",
    check=semantics.check_shard,
    outputs=semantics.outputs_shard,
    reference=reference.cross_entropy_shard,
    problem_on=problem.shard_problem,
    cost=cases.shard_cost,
    cases=cases.shard_cases,
    example=cases.shard_example,
    space=space.SHARD,
    variants=(
        *FORWARD_VARIANTS,
        Reference(
            reference.cross_entropy_shard, semantics.outputs_shard, by_row.cross_entropy_shard
        ),
    ),
    defaults=(),
    indices={"target": ("logits", -1)},
    instead="gristmill.vocab_parallel_cross_entropy",
)

_ONE_PASS = one_pass.function_of(CROSS_ENTROPY_ONE_PASS, CROSS_ENTROPY_ONE_PASS_, SCALE_GRADIENT_)

inline.allow_inline("cross_entropy")
