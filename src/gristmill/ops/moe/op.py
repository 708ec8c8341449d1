"""A mixture of experts: the ops over dense weights, the gradient, and the function for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops import nvfp4_moe
from gristmill.ops.by_row import by_row
from gristmill.ops.later import Later
from gristmill.ops.moe import problem, reference, semantics
from gristmill.ops.moe.grouped import GroupedMm
from gristmill.ops.moe.library import Library
from gristmill.ops.nvfp4_common import AUTOCAST_KEYS, as_it_is, lowered
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference

if TYPE_CHECKING:
    from gristmill.ops.moe import cases, space
else:
    cases = Later("gristmill.ops.moe.cases")
    space = Later("gristmill.ops.moe.space")

_PACKED = (NVFP4Tensor, PackedNVFP4)


def moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor | NVFP4Tensor | PackedNVFP4,
    w2: torch.Tensor | NVFP4Tensor | PackedNVFP4,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    r"""The experts of a mixture, with dense weights or with NVFP4 ones.

    .. math:: y = \sum_j t_j \, (W2_{e_j} h_j + b2_{e_j}), \qquad
              (g_j, u_j) = W13_{e_j} x + b13_{e_j}, \quad h_j = \mathrm{act}(g_j, u_j)

    for each row x of `hidden_states`, with the experts e of its row of `topk_ids` and their weights
    t. ``"silu"`` is :math:`g \, \sigma(g) \, u`, ``"gelu"`` is :math:`g \, \Phi(g) \, u` (with erf)
    and ``"swiglu_oai"`` is :math:`g \, \sigma(\alpha g) (u + 1)`.

    Args:
        hidden_states: ``(M, H)`` of fp32, bf16, fp16 or fp64, with any strides.
        topk_weights: ``(M, k)`` of any of these dtypes.
        topk_ids: int32 or int64 ``(M, k)``. An id of -1, or of no expert here, takes no part.
        w13: ``(E, 2 * I, H)``, the rows of the gate before those of up: a tensor of the dtype of
            `hidden_states`, with any strides, or an NVFP4 weight as :func:`gristmill.nvfp4.moe`
            takes it.
        w2: ``(E, H, I)``, of the same kind.
        w13_bias, w2_bias: ``(E, 2 * I)`` and ``(E, H)`` of any float dtype, or None.
        activation: ``"silu"``, ``"gelu"`` or ``"swiglu_oai"``.
        limit: before the activation, gate is cut at `limit` from above and up at plus and minus
            `limit`; None cuts nothing.
        expert_map: int32 or int64 ``(experts of the model,)``: where the weights of each expert
            lie in w13 and w2, or -1 where they are not here. None: ids are places.
        alpha: the slope in ``"swiglu_oai"``, for that activation alone; None: 1.702.

    Returns:
        ``(M, H)`` of the dtype of `hidden_states`, contiguous. Sums are taken in fp32 (fp64 for
        fp64); h is rounded to that dtype, and y at its end, in a fixed order of sums; the variants
        ``grouped_mm`` and ``library`` round what each product gives, too, as torch does. Under
        autocast `hidden_states` and dense weights become autocast's dtype. Differentiable once, in
        `hidden_states`, `topk_weights` and dense weights with their biases; NVFP4 weights and
        their biases are frozen.
    """
    if isinstance(w13, _PACKED) or isinstance(w2, _PACKED):
        packed: Any = (w13, w2)
        return nvfp4_moe.moe(
            hidden_states,
            topk_weights,
            topk_ids,
            *packed,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            limit=limit,
            expert_map=expert_map,
            alpha=alpha,
        )
    routing, weights = (hidden_states, topk_weights, topk_ids), (w13, w2, w13_bias, w2_bias)
    args = (*routing, *weights, activation, limit, expert_map, alpha)
    if torch.compiler.is_compiling():
        result: torch.Tensor = MOE.traced(*args)
    else:
        result = MOE.call((*routing, *weights, expert_map), args)
    return result


def moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    r"""The gradients of :func:`moe` over dense weights.

    `args` are the positional arguments of the forward op, all of them, and `weight_grad`: whether
    the gradients of weights and biases are wanted. What the forward pass made on the way is made
    again. With :math:`d_j = W2_{e_j}^T dy` and :math:`p_j = \mathrm{act}'(g_j, u_j; t_j d_j)`,

    .. math:: dt_j = d_j \cdot h_j + dy \cdot b2_{e_j}, \qquad dx = \sum_j W13_{e_j}^T \, p_j, \\
              dW13_e = \sum_{e_j = e} p_j x^T, \quad dW2_e = \sum_{e_j = e} t_j \, dy \, h_j^T

    The gradient of a gate or an up that is cut at the limit is zero.

    Returns ``(dhidden_states, dtopk_weights, dw13, dw2, dw13_bias, dw2_bias)``, like those and
    contiguous; the last four are empty where they are not wanted or there is no such bias. Sums
    are taken in fp32 (fp64 for fp64) and rounded at their end; h is rounded to the dtype of
    `hidden_states`, as in the forward pass. On a GPU the variant ``library`` takes all products in
    that dtype: it rounds what goes into them (p for dx and dW13, t h for dW2), and where torch's
    grouped mm does them, in bf16, what they give (g and u before their bias, d, and what each
    expert adds to dx). So a gate or an up within a rounding of the limit may count as cut or not.
    The gradients of biases are sums in fp32, of p and t dy unrounded.
    """
    tensors = tuple(arg for arg in (dy, *args) if isinstance(arg, torch.Tensor))
    result: tuple[torch.Tensor, ...] = MOE_BACKWARD.call_in_backward(tensors, (dy, *args))
    return result


def _save(ctx: Any, inputs: Arguments, output: Any) -> None:
    *tensors, activation, limit, expert_map, alpha = inputs
    ctx.save_for_backward(*tensors, expert_map)
    ctx.options = activation, limit, alpha


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    *tensors, expert_map = ctx.saved_tensors
    activation, limit, alpha = ctx.options
    # Of trailing arguments that equal their defaults the dispatcher tells nothing.
    needed = (*ctx.needs_input_grad, *[False] * 7)[:7]
    gradients = moe_backward(dy, *tensors, activation, limit, expert_map, alpha, any(needed[3:]))
    dx, dweights, *trained = gradients
    found = (dx, dweights, None, *trained)
    wanted = [one if need else None for one, need in zip(found, needed, strict=True)]
    return *wanted, None, None, None, None


def _autocast(
    hidden_states: Any, topk_weights: Any, topk_ids: Any, w13: Any, w2: Any, *others: Any
) -> Arguments:
    return lowered(hidden_states), topk_weights, topk_ids, lowered(w13), lowered(w2), *others


_TENSORS = "Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w2"
_INDICES = {"topk_ids": ("w13", 0), "expert_map": ("w13", 0)}

MOE = Op(
    name="moe",
    schema=(
        f"({_TENSORS}, Tensor? w13_bias=None, Tensor? w2_bias=None, "
        'str activation="silu", float? limit=None, Tensor? expert_map=None, '
        "float? alpha=None) -> Tensor"
    ),
    summary="the experts of a mixture, with dense weights",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.moe,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.forward,
    variants=(
        GroupedMm(),
        Library(),
        Reference(reference.moe, semantics.outputs_forward, by_row(reference.moe, rows=(0, 1, 2))),
    ),
    defaults=(None, None, "silu", None, None, None),
    indices=_INDICES,
    gradient=Gradient(_save, _backward),
    autocast=_autocast,
    autocast_keys=AUTOCAST_KEYS,
    function=moe,
)

MOE_BACKWARD = Op(
    name="moe_backward",
    schema=(
        f"(Tensor dy, {_TENSORS}, Tensor? w13_bias, Tensor? w2_bias, str activation, "
        "float? limit, Tensor? expert_map, float? alpha, bool weight_grad) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    summary="the gradients of moe, for weights and biases if wanted",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.moe_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    variants=(
        Library(),
        Reference(
            reference.moe_backward,
            semantics.outputs_backward,
            reference.moe_backward_by_row,
        ),
    ),
    defaults=(),
    indices=_INDICES,
    gradient=no_second_gradient("moe_backward", "torch.nn.functional.linear for each expert"),
    autocast=as_it_is,
    autocast_keys=AUTOCAST_KEYS,
)
