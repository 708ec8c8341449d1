"""LayerNorm into FP8: the ops behind `out_dtype=torch.float8_e4m3fn`.

What is computed is in `norm_fp8.semantics`; every function here takes the op's arguments, in the
order of its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops import inline
from gristmill.ops.later import Later
from gristmill.ops.layer_norm import reference, semantics
from gristmill.ops.layer_norm.cuda import ForwardVariant
from gristmill.ops.norm_fp8 import semantics as fp8
from gristmill.ops.norm_fp8.cuda import plan_fp8, scaling_of
from gristmill.ops.norm_fp8.reference import quantised, quantised_by_row
from gristmill.ops.norms.problem import forward_problem
from gristmill.ops.norms.semantics import accumulator, check_row_tensor, check_x, sum_dtype
from gristmill.ops.op import Arguments, Case, Cost, Op
from gristmill.ops.plain import Reference
from gristmill.ops.rows.config import RowConfig
from gristmill.ops.rows.problem import like
from gristmill.ops.rows.variant import SCOPES
from gristmill.select.device import Device
from gristmill.select.problem import Problem

if TYPE_CHECKING:
    from gristmill.ops.layer_norm import cases
    from gristmill.ops.norm_fp8 import cases as fp8_cases
    from gristmill.ops.norms import space
else:
    cases = Later("gristmill.ops.layer_norm.cases")
    fp8_cases = Later("gristmill.ops.norm_fp8.cases")
    space = Later("gristmill.ops.norms.space")

Tensor = torch.Tensor


class Fp8Variant(ForwardVariant):
    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        norm = plan_fp8(self.launcher(problem, config), problem.layout)
        if problem.op == "add_layer_norm_fp8":
            return norm

        def plan(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
            y, _, row_scale, largest = norm(x, None, *others)
            return y, row_scale, largest

        return plan


def arguments(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype = fp8.FP8,
    scale: Tensor | None = None,
    return_amax: bool = False,
) -> Arguments:
    """A call of `gristmill.layer_norm` as that of the op."""
    return x, weight, bias, scale, eps, weight_offset, return_amax


def add_arguments(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Any,
) -> Arguments:
    """A call of `gristmill.add_layer_norm` as that of the op."""
    _, *others = arguments(x, weight, bias, eps, **options)
    return x, residual, *others


def check(
    x: Any, weight: Any, bias: Any, scale: Any, eps: Any, weight_offset: Any, amax: Any
) -> None:
    check_x("layer_norm_fp8", x)
    semantics.check_options("layer_norm_fp8", x, weight, bias, eps, weight_offset, None)
    fp8.check_quantisation("layer_norm_fp8", scale, amax, x)


def check_add(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    scale: Any,
    eps: Any,
    weight_offset: Any,
    amax: Any,
) -> None:
    op = "add_layer_norm_fp8"
    check_x(op, x)
    check_row_tensor(op, "residual", residual, x)
    semantics.check_options(op, x, weight, bias, eps, weight_offset, None)
    fp8.check_quantisation(op, scale, amax, x)


def outputs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fp8.outputs(x, scale, amax=options[-1])


def outputs_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, row_scale, largest = fp8.outputs(x, scale, amax=options[-1])
    return y, torch.empty_like(x, dtype=sum_dtype(x, residual)), row_scale, largest


def layer_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    weight_offset: float,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: the norm in the accumulator's dtype, quantised."""
    z = reference.layer_norm(x, weight, bias, eps, weight_offset, accumulator(x.dtype))
    return quantised(z, scale, amax)


def add_layer_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    weight_offset: float,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precise = accumulator(sum_dtype(x, residual))
    z, total = reference.add_layer_norm(x, residual, weight, bias, eps, weight_offset, precise)
    y, row_scale, largest = quantised(z, scale, amax)
    return y, total, row_scale, largest


def _problem(
    device: Device,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    weight_offset: float,
    amax: bool,
) -> Problem:
    return forward_problem(
        "layer_norm_fp8",
        device,
        (x, None, like(x, fp8.FP8), None),
        weight,
        bias,
        weight_offset,
        held=x.dtype,
        centered=True,
        scaling=scaling_of(scale),
        amax=amax,
    )


def _problem_add(
    device: Device,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    weight_offset: float,
    amax: bool,
) -> Problem:
    held = sum_dtype(x, residual)
    return forward_problem(
        "add_layer_norm_fp8",
        device,
        (x, residual, like(x, fp8.FP8), like(x, held)),
        weight,
        bias,
        weight_offset,
        held=held,
        centered=True,
        scaling=scaling_of(scale),
        amax=amax,
    )


def _join(args: Arguments, scale: Tensor | None, amax: bool) -> Arguments:
    """Arguments of layer_norm as those of the op."""
    x, weight, bias, *options, _ = args
    return x, weight, bias, scale, *options, amax


def _join_add(args: Arguments, scale: Tensor | None, amax: bool) -> Arguments:
    x, residual, weight, bias, *options, _ = args
    return x, residual, weight, bias, scale, *options, amax


def _cost(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, *options: Any
) -> Cost:
    return fp8_cases.fp8_cost(
        cases.forward_cost(x, weight, bias, fp8.FP8), x, scale, amax=options[-1]
    )


def _cost_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    *options: Any,
) -> Cost:
    norm = cases.add_cost(x, residual, weight, bias, fp8.FP8)
    return fp8_cases.fp8_cost(norm, x, scale, amax=options[-1])


def _cases() -> Iterator[Case]:
    return fp8_cases.fp8_cases(cases.forward_cases(), _join)


def _cases_add() -> Iterator[Case]:
    return fp8_cases.fp8_cases(cases.add_cases(), _join_add)


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Arguments:
    return _join(cases.forward_example(shape, dtype, device), None, False)


def _example_add(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    return _join_add(cases.add_example(shape, dtype, device), None, False)


_OPTIONS = (
    "Tensor? weight=None, Tensor? bias=None, Tensor? scale=None, float eps=1e-5, "
    "float weight_offset=0.0, bool amax=False"
)
_DEFAULTS = (None, None, None, 1e-5, 0.0, False)
_VARIANTS = tuple(Fp8Variant(name) for name in SCOPES)

LAYER_NORM_FP8 = Op(
    name="layer_norm_fp8",
    schema=f"(Tensor x, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    summary="layer norm over the last dim, into FP8",
    check=check,
    outputs=outputs,
    reference=layer_norm_fp8,
    problem_on=_problem,
    cost=_cost,
    cases=_cases,
    example=_example,
    space=space.LAYER_FP8,
    variants=(
        *_VARIANTS,
        Reference(layer_norm_fp8, outputs, quantised_by_row(layer_norm_fp8, rows=(0,), scale=3)),
    ),
    defaults=_DEFAULTS,
    gradient=fp8.no_gradient("layer_norm_fp8"),
    adapt=arguments,
)

ADD_LAYER_NORM_FP8 = Op(
    name="add_layer_norm_fp8",
    schema=f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    summary="the sum of x and a residual, and its layer norm into FP8",
    check=check_add,
    outputs=outputs_add,
    reference=add_layer_norm_fp8,
    problem_on=_problem_add,
    cost=_cost_add,
    cases=_cases_add,
    example=_example_add,
    space=space.LAYER_ADD_FP8,
    variants=(
        *_VARIANTS,
        Reference(
            add_layer_norm_fp8,
            outputs_add,
            quantised_by_row(add_layer_norm_fp8, rows=(0, 1), scale=4),
        ),
    ),
    defaults=_DEFAULTS,
    gradient=fp8.no_gradient("add_layer_norm_fp8"),
    adapt=add_arguments,
)

inline.allow_inline("layer_norm_fp8")
inline.allow_inline("add_layer_norm_fp8")
