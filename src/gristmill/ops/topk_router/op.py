"""The router: the ops, the gradient, and the functions that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops.by_row import by_row
from gristmill.ops.later import Later
from gristmill.ops.op import Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference
from gristmill.ops.topk_router import problem, reference, semantics
from gristmill.ops.topk_router.cuda import Backward, Forward
from gristmill.ops.topk_router.library import Library

if TYPE_CHECKING:
    from gristmill.ops.topk_router import cases, space
else:
    cases = Later("gristmill.ops.topk_router.cases")
    space = Later("gristmill.ops.topk_router.space")


def topk_router(
    logits: torch.Tensor,
    topk: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
    ids_dtype: torch.dtype | None = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The experts of each token of a mixture, and their weights, from the router's logits.

    .. math:: s = \mathrm{softmax}(l) \;\text{or}\; \sigma(l), \qquad
              e_1 \dots e_k = \text{the largest of } s \; [+ \; bias], \qquad
              w_j = scale \cdot \frac{s_{e_j}}{\sum_i s_{e_i}}

    for each row l of `logits`; to a sum of sigmoids 1e-20 is added. Without `renormalize`
    :math:`w_j = scale \cdot s_{e_j}`.

    The experts come in falling order of what they were chosen by, of equal ones the lower id first:
    of their logits, or with a bias of scores plus bias. NaN counts as larger than all numbers, so
    that a row that has one gets a weight of NaN. Ids are from 0 to E - 1 and all different,
    whatever the logits are. Under ``"softmax"`` a row of nothing but -inf has weights of zero.

    Args:
        logits: ``(M, E)`` of fp32, bf16, fp16 or fp64, with any strides.
        topk: k, the experts of a token, from 1 to E.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: whether the weights of a token are made to add up to `scale`. With
            ``"softmax"`` that is a softmax over the chosen logits alone.
        bias: ``(E,)`` of any float dtype, or None. Added to the scores for the choice; it is not in
            the weights, and has no gradient.
        groups: the experts are in so many groups of neighbours, a divisor of E.
        topk_groups: experts are chosen from so many groups only, those that count most. A group
            counts as its largest score, with a bias as the sum of its two largest biased ones; of
            equal ones the first group is taken.
        scale: a factor of all weights.
        ids_dtype: ``torch.int32`` (as None) or ``torch.int64``.

    Returns:
        ``(topk_weights, topk_ids)``, both ``(M, topk)`` and contiguous: weights of fp32 (fp64 for
        fp64), ids of `ids_dtype`. Scores and sums are fp32 (fp64 for fp64), whatever autocast
        says. The weights are differentiable once, in logits. Nothing waits for the device, and a
        row does not depend on the others.
    """
    # int32 goes by None: torch 2.11's AOTInductor takes a dtype for another.
    ids = None if ids_dtype == torch.int32 else ids_dtype
    options = (scoring, renormalize, bias, groups, topk_groups, scale, ids)
    result: tuple[torch.Tensor, torch.Tensor]
    if torch.compiler.is_compiling():
        result = TOPK_ROUTER.traced(logits, topk, *options)
    else:
        result = TOPK_ROUTER.call((logits, bias), (logits, topk, *options))
    return result


def topk_router_backward(
    dweights: torch.Tensor,
    logits: torch.Tensor,
    topk_ids: torch.Tensor,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> torch.Tensor:
    r"""The gradient of :func:`topk_router` in logits, from that of the weights.

    With the scores s of the chosen experts and :math:`d = scale \cdot dweights`, renormalised

    .. math:: ds = (d - \textstyle\sum d \cdot s / S) / S, \qquad S = \textstyle\sum s

    and ds = d otherwise. A sigmoid has :math:`dl = ds \cdot s (1 - s)`, a softmax
    :math:`dl = s (ds - \sum ds \cdot s)`, where that sum is 0 if it is renormalised; ds = 0 where
    an expert was not chosen.

    Args:
        dweights: ``(M, topk)`` of any float dtype.
        logits, scoring, renormalize, scale: as in the forward pass.
        topk_ids: int32 or int64 ``(M, topk)``, as they came from it: all different in a row.

    Returns:
        ``(M, E)`` of the dtype of `logits`, contiguous.
    """
    args = (dweights, logits, topk_ids, scoring, renormalize, scale)
    result: torch.Tensor = TOPK_ROUTER_BACKWARD.call_in_backward(args[:3], args)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, _, scoring, renormalize, _, _, _, scale, _ = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.options = scoring, renormalize, scale


def _backward(ctx: Any, dweights: torch.Tensor, dids: Any) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    dlogits = None
    if ctx.needs_input_grad[0]:
        dlogits = topk_router_backward(dweights, logits, ids, *ctx.options)
    return dlogits, *[None] * 8


# No dtype but None can be a default: AOTInductor writes down what a call leaves out as the schema
# has it, where a dtype is an int, and cannot read that back.
TOPK_ROUTER = Op(
    name="topk_router",
    schema=(
        '(Tensor logits, int topk, str scoring="softmax", bool renormalize=True, '
        "Tensor? bias=None, int groups=1, int topk_groups=1, float scale=1.0, "
        "ScalarType? ids_dtype=None) -> (Tensor, Tensor)"
    ),
    summary="the experts of each token and their weights, from routing scores",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.topk_router,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.forward,
    variants=(
        Forward(),
        Library(),
        Reference(
            reference.topk_router,
            semantics.outputs_forward,
            by_row(reference.topk_router, rows=(0,), results=("row", "row")),
        ),
    ),
    defaults=("softmax", True, None, 1, 1, 1.0, None),
    gradient=Gradient(_save, _backward),
)

TOPK_ROUTER_BACKWARD = Op(
    name="topk_router_backward",
    schema=(
        "(Tensor dweights, Tensor logits, Tensor topk_ids, str scoring, bool renormalize, "
        "float scale) -> Tensor"
    ),
    summary="the gradient of topk_router",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.topk_router_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    space=space.backward,
    variants=(
        Backward(),
        Reference(
            reference.topk_router_backward,
            semantics.outputs_backward,
            by_row(reference.topk_router_backward, rows=(1, 0, 2)),
        ),
    ),
    defaults=(),
    indices={"topk_ids": ("logits", 1)},
    gradient=no_second_gradient("topk_router_backward", "torch.softmax and torch.topk"),
)
