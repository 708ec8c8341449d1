"""The variants without kernels of ours: torch's own ops, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

from gristmill.ops.rms_norm import reference, semantics
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Reference(Variant):
    """The formula in plain PyTorch, wherever PyTorch runs."""

    name = "reference"
    summary = "the formula in plain PyTorch"

    def __init__(self, function: Callable[..., Any], outputs: Callable[..., Any]) -> None:
        self._function = function
        self._outputs = outputs

    def supports(self, problem: Problem) -> str | None:
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return lambda *args: _laid_out(self._function(*args), self._outputs, args)


class Library(Variant):
    """torch.nn.functional.rms_norm."""

    name = "library"
    summary = "torch's own rms_norm"

    def supports(self, problem: Problem) -> str | None:
        types = {dtype for name, dtype in problem.dtypes}
        if len(types) > 1:
            return "torch's rms_norm takes one dtype for all tensors"
        if "llama" in problem.flags:
            return "torch's rms_norm rounds once"
        if problem.rows == 0 or problem.dim("N") == 0:
            return "nothing to compute"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        if problem.op == "add_rms_norm":
            return _library_add
        return _library_forward


class LibraryBackward(Variant):
    """torch's fused forward, for the statistics, and backward."""

    name = "library"
    summary = "torch's own fused rms_norm backward"

    def supports(self, problem: Problem) -> str | None:
        if problem.device.kind != "cuda":
            return f"torch has no fused rms_norm backward on {problem.device.kind}"
        if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
            return f"torch {torch.__version__} has no fused rms_norm backward"
        if len({dtype for _, dtype in problem.dtypes}) > 1:
            return "torch's rms_norm takes one dtype for all tensors"
        if problem.rows == 0 or problem.dim("N") == 0:
            return "nothing to compute"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return _library_backward


def _library_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    args = (x, weight, eps, weight_offset, casting, out_dtype)
    if weight is not None and weight_offset:
        # torch's op would need the sum rounded to the weight's dtype: another function.
        y = reference.rms_norm(*args)
    else:
        y = F.rms_norm(x, x.shape[-1:], weight, semantics.epsilon(eps, x.dtype))
    return cast(torch.Tensor, _laid_out(y, semantics.outputs_forward, args))


def _library_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.add(x, residual, out=torch.empty_like(x))
    return _library_forward(total, weight, eps, weight_offset, casting, out_dtype), total


def _library_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    args = (dy, x, weight, dsum, eps, weight_offset, weight_grad)
    if weight is not None and weight_offset:
        result = reference.rms_norm_backward(*args)
    else:
        shape, want = list(x.shape[-1:]), weight_grad and weight is not None
        x, dy = x.contiguous(), dy.contiguous()
        _, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, semantics.epsilon(eps, x.dtype))
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            dy, x, shape, rstd, weight, [True, want]
        )
        result = dx if dsum is None else dx + dsum, dweight if want else x.new_empty(0)
    return cast(
        tuple[torch.Tensor, torch.Tensor], _laid_out(result, semantics.outputs_backward, args)
    )


def _laid_out(result: Any, outputs: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`result` with the strides that the op promises; a copy only where they differ."""
    if result is None:
        return None
    promised = outputs(*[_meta(arg) for arg in args])
    if isinstance(result, torch.Tensor):
        return _as(result, promised)
    return tuple(_as(one, other) for one, other in zip(result, promised, strict=True))


def _as(result: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    if result.stride() == promised.stride() and result.dtype == promised.dtype:
        return result
    out = torch.empty_strided(
        promised.shape, promised.stride(), dtype=promised.dtype, device=result.device
    )
    return out.copy_(result)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
