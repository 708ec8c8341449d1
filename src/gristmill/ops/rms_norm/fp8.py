"""RMSNorm into FP8: the ops behind `out_dtype=torch.float8_e4m3fn`.

What is computed is in `norm_fp8.semantics`; every function here takes the op's arguments, in the
order of its schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops import inline
from gristmill.ops.later import Later
from gristmill.ops.norm_fp8 import semantics as fp8
from gristmill.ops.norm_fp8.cuda import scaling_of
from gristmill.ops.norm_fp8.reference import quantised, quantised_by_row
from gristmill.ops.norms.problem import forward_problem
from gristmill.ops.op import Arguments, Case, Cost, Op
from gristmill.ops.plain import Reference
from gristmill.ops.rms_norm import reference, semantics
from gristmill.ops.rms_norm.cuda_fp8 import VARIANTS
from gristmill.ops.rows.problem import like
from gristmill.select.device import Device
from gristmill.select.problem import Problem

if TYPE_CHECKING:
    from gristmill.ops.norm_fp8 import cases as fp8_cases
    from gristmill.ops.norms import space
    from gristmill.ops.rms_norm import cases
else:
    cases = Later("gristmill.ops.rms_norm.cases")
    fp8_cases = Later("gristmill.ops.norm_fp8.cases")
    space = Later("gristmill.ops.norms.space")

Tensor = torch.Tensor


def arguments(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "once",
    out_dtype: torch.dtype = fp8.FP8,
    scale: Tensor | None = None,
    return_amax: bool = False,
) -> Arguments:
    """A call of `gristmill.rms_norm` as that of the op."""
    return x, weight, scale, eps, weight_offset, casting, return_amax


def add_arguments(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    **options: Any,
) -> Arguments:
    """A call of `gristmill.add_rms_norm` as that of the op."""
    _, *others = arguments(x, weight, eps, **options)
    return x, residual, *others


def check(
    x: Any, weight: Any, scale: Any, eps: Any, weight_offset: Any, casting: Any, amax: Any
) -> None:
    semantics.check_x("rms_norm_fp8", x)
    semantics.check_options("rms_norm_fp8", x, weight, eps, weight_offset, casting, None)
    fp8.check_quantisation("rms_norm_fp8", scale, amax, x)


def check_add(
    x: Any,
    residual: Any,
    weight: Any,
    scale: Any,
    eps: Any,
    weight_offset: Any,
    casting: Any,
    amax: Any,
) -> None:
    op = "add_rms_norm_fp8"
    semantics.check_x(op, x)
    semantics.check_row_tensor(op, "residual", residual, x)
    semantics.check_options(op, x, weight, eps, weight_offset, casting, None)
    fp8.check_quantisation(op, scale, amax, x)


def outputs(
    x: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fp8.outputs(x, scale, amax=options[-1])


def outputs_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, row_scale, largest = fp8.outputs(x, scale, amax=options[-1])
    total = torch.empty_like(x, dtype=semantics.sum_dtype(x, residual))
    return y, total, row_scale, largest


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: the norm in the accumulator's dtype, quantised."""
    precise = semantics.accumulator(x.dtype)
    z = reference.rms_norm(x, weight, eps, weight_offset, casting, precise)
    return quantised(z, scale, amax)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precise = semantics.accumulator(semantics.sum_dtype(x, residual))
    z, total = reference.add_rms_norm(x, residual, weight, eps, weight_offset, casting, precise)
    y, row_scale, largest = quantised(z, scale, amax)
    return y, total, row_scale, largest


def _problem(
    device: Device,
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    amax: bool,
) -> Problem:
    return forward_problem(
        "rms_norm_fp8",
        device,
        (x, None, like(x, fp8.FP8), None),
        weight,
        None,
        weight_offset,
        held=x.dtype,
        centered=False,
        casting=casting,
        scaling=scaling_of(scale),
        amax=amax,
    )


def _problem_add(
    device: Device,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    amax: bool,
) -> Problem:
    held = semantics.sum_dtype(x, residual)
    return forward_problem(
        "add_rms_norm_fp8",
        device,
        (x, residual, like(x, fp8.FP8), like(x, held)),
        weight,
        None,
        weight_offset,
        held=held,
        centered=False,
        casting=casting,
        scaling=scaling_of(scale),
        amax=amax,
    )


def _join(args: Arguments, scale: Tensor | None, amax: bool) -> Arguments:
    """Arguments of rms_norm as those of the op."""
    x, weight, *options, _ = args
    return x, weight, scale, *options, amax


def _join_add(args: Arguments, scale: Tensor | None, amax: bool) -> Arguments:
    x, residual, weight, *options, _ = args
    return x, residual, weight, scale, *options, amax


def _cost(x: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any) -> Cost:
    return fp8_cases.fp8_cost(cases.forward_cost(x, weight, fp8.FP8), x, scale, amax=options[-1])


def _cost_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, scale: Tensor | None, *options: Any
) -> Cost:
    return fp8_cases.fp8_cost(
        cases.add_cost(x, residual, weight, fp8.FP8), x, scale, amax=options[-1]
    )


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


def _autocast(*args: Any) -> Arguments:
    """As rms_norm: rounded nowhere before the end. The result is FP8, as was asked for."""
    *others, _, amax = args
    return *others, "once", amax


_OPTIONS = (
    "Tensor? weight=None, Tensor? scale=None, float? eps=1e-6, float weight_offset=0.0, "
    'str casting="once", bool amax=False'
)
_DEFAULTS = (None, None, 1e-6, 0.0, "once", False)

RMS_NORM_FP8 = Op(
    name="rms_norm_fp8",
    schema=f"(Tensor x, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    summary="root mean square norm over the last dim, into FP8",
    check=check,
    outputs=outputs,
    reference=rms_norm_fp8,
    problem_on=_problem,
    cost=_cost,
    cases=_cases,
    example=_example,
    space=space.RMS_FP8,
    variants=(
        *VARIANTS,
        Reference(rms_norm_fp8, outputs, quantised_by_row(rms_norm_fp8, rows=(0,), scale=2)),
    ),
    defaults=_DEFAULTS,
    gradient=fp8.no_gradient("rms_norm_fp8"),
    autocast=_autocast if semantics.TORCH_AUTOCASTS else None,
    adapt=arguments,
)

ADD_RMS_NORM_FP8 = Op(
    name="add_rms_norm_fp8",
    schema=f"(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    summary="the sum of x and a residual, and its RMSNorm into FP8",
    check=check_add,
    outputs=outputs_add,
    reference=add_rms_norm_fp8,
    problem_on=_problem_add,
    cost=_cost_add,
    cases=_cases_add,
    example=_example_add,
    space=space.RMS_ADD_FP8,
    variants=(
        *VARIANTS,
        Reference(
            add_rms_norm_fp8,
            outputs_add,
            quantised_by_row(add_rms_norm_fp8, rows=(0, 1), scale=3),
        ),
    ),
    defaults=_DEFAULTS,
    gradient=fp8.no_gradient("add_rms_norm_fp8"),
    autocast=_autocast if semantics.TORCH_AUTOCASTS else None,
    adapt=add_arguments,
)

inline.allow_inline("rms_norm_fp8")
inline.allow_inline("add_rms_norm_fp8")
