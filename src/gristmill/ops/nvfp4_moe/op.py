"""NVFP4 mixture of experts: the ops, the gradient, and the functions that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.formats.nvfp4.tensor import FRAGMENTS, PAIRS
from gristmill.ops.by_row import by_row
from gristmill.ops.later import Later
from gristmill.ops.nvfp4_common import (
    AUTOCAST_KEYS,
    Weight,
    as_it_is,
    frozen,
    lowered,
    parts_of,
)
from gristmill.ops.nvfp4_moe import problem, reference, semantics
from gristmill.ops.nvfp4_moe.library import Library
from gristmill.ops.nvfp4_moe.triton import TritonExperts
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.op import Arguments, Gradient, Op, no_second_gradient
from gristmill.ops.plain import Reference

if TYPE_CHECKING:
    from gristmill.ops.nvfp4_moe import cases, space
else:
    cases = Later("gristmill.ops.nvfp4_moe.cases")
    space = Later("gristmill.ops.nvfp4_moe.space")

_STACKS = (
    "Tensor w13_codes, Tensor w13_scales, Tensor w13_row_scale, "
    "Tensor w2_codes, Tensor w2_scales, Tensor w2_row_scale"
)


def moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: NVFP4Tensor | PackedNVFP4,
    w2: NVFP4Tensor | PackedNVFP4,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    alpha: float | None = None,
) -> torch.Tensor:
    r"""The experts of a mixture, with NVFP4 weights.

    .. math:: y = \sum_j t_j \, (W2_{e_j} h_j + b2_{e_j}), \qquad
              (g_j, u_j) = W13_{e_j} x + b13_{e_j}, \quad h_j = \mathrm{act}(g_j, u_j)

    for each row x of `hidden_states`, with the experts e of its row of `topk_ids` and their weights
    t. ``"silu"`` is :math:`g \, \sigma(g) \, u`, ``"gelu"`` is :math:`g \, \Phi(g) \, u` (with erf)
    and ``"swiglu_oai"`` is :math:`g \, \sigma(\alpha g) (u + 1)`.

    Args:
        hidden_states: ``(M, H)`` of fp32, bf16, fp16 or fp64, with any strides.
        topk_weights: ``(M, k)`` of any of these dtypes.
        topk_ids: int32 or int64 ``(M, k)``. An id of -1, or of no expert here, takes no part.
        w13: weights ``(E, 2 * I, H)``, the rows of the gate before those of up; H and I are
            multiples of 16.
        w2: weights ``(E, H, I)``, in the same layout; beside w2 in layout ``"fragments"`` w13 has
            ``"pairs"``, which ``w13.prepare(pairs=True)`` gives.
        w13_bias, w2_bias: ``(E, 2 * I)`` and ``(E, H)`` of any float dtype, or None.
        activation: ``"silu"``, ``"gelu"`` or ``"swiglu_oai"``.
        limit: before the activation, gate is cut at `limit` from above and up at plus and minus
            `limit`; None cuts nothing.
        expert_map: int32 or int64 ``(experts of the model,)``: where the weights of each expert
            lie in w13 and w2, or -1 where they are not here. None: ids are places.
        alpha: the slope in ``"swiglu_oai"``, for that activation alone; None: 1.702.

    Returns:
        ``(M, H)`` of the dtype of `hidden_states`, contiguous. Sums are taken in fp32 (fp64 for
        fp64); h is rounded to that dtype, and y at its end, in a fixed order of sums. With so many
        bf16 tokens that what experts give would not stay in a GPU's cache in fp32, that is kept in
        bf16 until it is weighed and added. Under
        autocast `hidden_states` become autocast's dtype. Differentiable once, in `hidden_states`
        and `topk_weights`; weights and biases are frozen.
    """
    return moe_of(
        *_arguments(
            hidden_states,
            topk_weights,
            topk_ids,
            w13,
            w2,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            limit=limit,
            expert_map=expert_map,
            alpha=alpha,
        )
    )


def moe_of(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_codes: torch.Tensor,
    w13_scales: torch.Tensor,
    w13_row_scale: torch.Tensor,
    w2_codes: torch.Tensor,
    w2_scales: torch.Tensor,
    w2_row_scale: torch.Tensor,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    layout: str = "rows",
    alpha: float | None = None,
) -> torch.Tensor:
    """:func:`moe` over the parts of the weights: what modules call, as graphs take tensors.

    Args:
        w13_codes, w2_codes: uint8 ``(E, N, K / 2)``; in layout ``"fragments"``
            ``(E, N / 64, K / 64, 2048)``, rounded up, those of w13 in pairs of gate and up, as
            ``prepare(pairs=True)`` gives them.
        w13_scales, w2_scales: E4M3 ``(E, N, K / 16)``; in layout ``"tiles"`` as
            :func:`gristmill.nvfp4.swizzle` gives them; in ``"fragments"`` uint8
            ``(E, N / 64, K / 64, 256)``, rounded up.
        w13_row_scale, w2_row_scale: fp32 ``(E, N)``, the global scale of each row.
        others: as in :func:`moe`.
    """
    routing = (hidden_states, topk_weights, topk_ids)
    w13 = (w13_codes, w13_scales, w13_row_scale)
    w2 = (w2_codes, w2_scales, w2_row_scale)
    biases = (w13_bias, w2_bias)
    args = (*routing, *w13, *w2, *biases, activation, limit, expert_map, layout, alpha)
    if torch.compiler.is_compiling():
        result: torch.Tensor = NVFP4_MOE.traced(*args)
    else:
        result = NVFP4_MOE.call((*routing, *w13, *w2, *biases, expert_map), args)
    return result


def moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    r"""The gradients of :func:`moe_of` for `hidden_states` and `topk_weights`.

    `args` are those of the forward call, all of them; what it made on the way is made again. With
    :math:`d_j = W2_{e_j}^T dy`,

    .. math:: dt_j = d_j \cdot h_j + dy \cdot b2_{e_j}, \qquad
              dx = \sum_j W13_{e_j}^T \, \mathrm{act}'(g_j, u_j; t_j d_j)

    The gradient of a gate or an up that is cut at the limit is zero.

    Returns ``(dhidden_states, dtopk_weights)``, like those, contiguous. Sums are taken in fp32
    (fp64 for fp64) and rounded at their end; h is rounded to the dtype of `hidden_states`, as in
    the forward pass. On a GPU the variant ``library`` takes products in that dtype: it rounds
    what goes into the last one, act', and in bf16, save for few tokens, what each gives (g and u
    before their bias, d, and what each expert adds to dx). So a gate or an up within a rounding of
    the limit may count as cut or not.
    """
    tensors = tuple(arg for arg in (dy, *args) if isinstance(arg, torch.Tensor))
    result: tuple[torch.Tensor, torch.Tensor] = NVFP4_MOE_BACKWARD.call_in_backward(
        tensors, (dy, *args)
    )
    return result


def _arguments(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: NVFP4Tensor | PackedNVFP4,
    w2: NVFP4Tensor | PackedNVFP4,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    alpha: float | None = None,
) -> Arguments:
    wide, back = parts_of("nvfp4_moe", "w13", w13), parts_of("nvfp4_moe", "w2", w2)
    _check_layouts(wide.layout, back.layout)
    _check_widths(hidden_states, wide, back)
    routing = (hidden_states, topk_weights, topk_ids)
    options = (w13_bias, w2_bias, activation, limit, expert_map, back.layout, alpha)
    return (*routing, *wide[:3], *back[:3], *options)


def _check_layouts(w13: str, w2: str) -> None:
    if w13 == (PAIRS if w2 == FRAGMENTS else w2) and w2 != PAIRS:
        return
    if {w13, w2} <= {FRAGMENTS, PAIRS}:
        raise ArgumentError(
            f"nvfp4_moe: w13 must have layout {PAIRS!r} beside w2 in layout {FRAGMENTS!r}, got "
            f"{w13!r} and {w2!r}; call prepare(pairs=True) on w13 and prepare() on w2"
        )
    raise ArgumentError(
        f"nvfp4_moe: w13 and w2 must have one layout, got {w13!r} and {w2!r}; call "
        f"prepare(pairs=True) on w13 and prepare() on w2, or neither"
    )


def _check_widths(hidden_states: Any, w13: Weight, w2: Weight) -> None:
    """What the op cannot see: the columns of weights in fragments, of which some are padding."""
    has_columns = isinstance(hidden_states, torch.Tensor) and hidden_states.dim()
    hidden = hidden_states.shape[-1] if has_columns else w13.width
    for name, weight, columns in (("w13", w13, hidden), ("w2", w2, w13.rows // 2)):
        if weight.width is not None and weight.width != columns:
            shape = "(E, 2 * I, H)" if name == "w13" else "(E, H, I)"
            raise ArgumentError(
                f"nvfp4_moe: {name} must have shape {shape} with {shape[-2]} = {columns}, got "
                f"{(*weight.row_scale.shape, weight.width)}"
            )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    names = ("w13_scales", "w13_row_scale", "w2_codes", "w2_scales", "w2_row_scale")
    positions = dict(enumerate((*names, "w13_bias", "w2_bias"), start=4))
    frozen("nvfp4_moe", ctx, positions)
    *tensors, activation, limit, expert_map, layout, alpha = inputs
    ctx.save_for_backward(*tensors, expert_map)
    ctx.options = activation, limit, layout, alpha


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    *tensors, expert_map = ctx.saved_tensors
    activation, limit, layout, alpha = ctx.options
    dx, dweights = moe_backward(dy, *tensors, activation, limit, expert_map, layout, alpha)
    found = [
        gradient if needed else None
        for gradient, needed in zip((dx, dweights), ctx.needs_input_grad, strict=False)
    ]
    return *found, *[None] * 14


def _autocast(hidden_states: torch.Tensor, *others: Any) -> Arguments:
    return lowered(hidden_states), *others


_INDICES = {"topk_ids": ("w13_codes", 0), "expert_map": ("w13_codes", 0)}

NVFP4_MOE = Op(
    name="nvfp4_moe",
    schema=(
        f"(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, {_STACKS}, "
        'Tensor? w13_bias=None, Tensor? w2_bias=None, str activation="silu", float? limit=None, '
        'Tensor? expert_map=None, str layout="rows", float? alpha=None) -> Tensor'
    ),
    summary="the experts of a mixture, with NVFP4 weights",
    check=semantics.check_forward,
    outputs=semantics.outputs_forward,
    reference=reference.nvfp4_moe,
    problem_on=problem.forward_problem,
    cost=cases.forward_cost,
    cases=cases.forward_cases,
    example=cases.forward_example,
    space=space.forward,
    variants=(
        Wgmma(),
        TritonExperts(),
        Library(),
        Reference(
            reference.nvfp4_moe,
            semantics.outputs_forward,
            by_row(reference.nvfp4_moe, rows=(0, 1, 2)),
        ),
    ),
    defaults=(None, None, "silu", None, None, "rows", None),
    indices=_INDICES,
    gradient=Gradient(_save, _backward),
    autocast=_autocast,
    autocast_keys=AUTOCAST_KEYS,
    laid_out=True,
    sound=cases.sound,
    elsewhere=cases.elsewhere,
    function=moe,
    adapt=_arguments,
)

NVFP4_MOE_BACKWARD = Op(
    name="nvfp4_moe_backward",
    schema=(
        "(Tensor dy, Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, "
        f"{_STACKS}, Tensor? w13_bias, Tensor? w2_bias, str activation, float? limit, "
        "Tensor? expert_map, str layout, float? alpha) -> (Tensor, Tensor)"
    ),
    summary="the gradients of nvfp4_moe for hidden_states and topk_weights",
    check=semantics.check_backward,
    outputs=semantics.outputs_backward,
    reference=reference.nvfp4_moe_backward,
    problem_on=problem.backward_problem,
    cost=cases.backward_cost,
    cases=cases.backward_cases,
    example=cases.backward_example,
    variants=(
        Library(),
        Reference(
            reference.nvfp4_moe_backward,
            semantics.outputs_backward,
            by_row(reference.nvfp4_moe_backward, rows=(0, 1, 2, 3), results=("row", "row")),
        ),
    ),
    defaults=(),
    indices=_INDICES,
    gradient=no_second_gradient(
        "nvfp4_moe_backward", "torch.nn.functional.linear over nvfp4.dequantize"
    ),
    laid_out=True,
    sound=cases.sound,
    autocast=as_it_is,
    autocast_keys=AUTOCAST_KEYS,
)
