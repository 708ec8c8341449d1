"""The torch ops that run a runner: `nvfp4_linear_gemm` and `nvfp4_moe_gemm`.

Opaque: their fakes know the result from the arguments alone and never look for the runner.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError, NoGradientError
from gristmill.ops.checks import has_rows
from gristmill.ops.direct import refuse_tangents
from gristmill.ops.op import LIBRARY, NAMESPACE, teach_dtensor
from gristmill.runners.registry import REGISTRY


def _define(op: str, tensors: str, width: str, instead: str) -> None:
    """An op over `tensors`, the id of a runner, and the last dim of the result.

    The id is a SymInt: layers that hand over their ids as arguments then share one compiled graph,
    where an int would make one graph for each.
    """
    schema = f"{op}({tensors}, SymInt runner_id, SymInt {width}) -> Tensor"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def implementation(*args: Any) -> torch.Tensor:
        *inputs, runner_id, columns = args
        refuse_tangents(op, args)
        runner = REGISTRY.find(op, runner_id)
        try:
            result = _call(runner, inputs)
        except TypeError:
            _check_signature(op, runner_id, runner, inputs)
            raise
        return _checked(op, runner_id, result, inputs, columns)

    def fake(*args: Any) -> torch.Tensor:
        teach_dtensor()
        x: torch.Tensor = args[0]
        has_rows(op, "its first argument", x)
        return x.new_empty((*x.shape[:-1], args[-1]))

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shapes = [value.shape if isinstance(value, torch.Tensor) else None for value in inputs]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        refuse = getattr(torch.ops, NAMESPACE).runner_gradient
        message = f"{op}: a runner has no gradient; {instead} has one"
        return tuple(
            refuse(gradient, shape, message) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )

    LIBRARY.impl(op, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{op}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"{NAMESPACE}::{op}", backward, setup_context=save, lib=LIBRARY)


def _call(runner: Any, inputs: list[torch.Tensor]) -> Any:
    """The runner's result as the fake promises it: autocast changes no dtype, nothing is recorded.

    A bias that requires a gradient would otherwise be recorded in eager mode, and in no graph.
    """
    device = inputs[0].device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _call(runner, inputs)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _call(runner, inputs)
    return runner._run_impl(*inputs)


def _check_signature(op: str, runner_id: int, runner: Any, inputs: list[torch.Tensor]) -> None:
    """That the runner could be called at all; asked only when a call has failed."""
    try:
        # The callable's own: what a decorator names as wrapped is not what was called.
        signature = inspect.signature(runner._run_impl, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*inputs)
    except TypeError as problem:
        many = "1 tensor" if len(inputs) == 1 else f"{len(inputs)} tensors"
        raise DtypeError(
            f"{op}: {REGISTRY.describe(runner_id)} is no runner for this op, which calls _run_impl "
            f"with {many}; it takes {_parameters(signature)}"
        ) from problem


def _parameters(signature: inspect.Signature) -> str:
    """By their names, without annotations."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _checked(
    op: str, runner_id: int, result: Any, inputs: list[torch.Tensor], columns: int
) -> torch.Tensor:
    """The result, if it is what the fake promises: compiled code reads memory by that."""
    x = inputs[0]
    shape = (*x.shape[:-1], columns)
    error: type[Exception] = ArgumentError
    if not isinstance(result, torch.Tensor):
        error, wrong = DtypeError, f"{type(result).__name__}; it must return a tensor"
    elif result.dtype != x.dtype:
        error, wrong = DtypeError, f"{result.dtype}; it must be {x.dtype}, as its input is"
    elif result.shape != shape:
        wrong = f"shape {tuple(result.shape)}; the call promises {shape}"
    elif result.device != x.device:
        wrong = f"a tensor on {result.device}; its input is on {x.device}"
    elif not result.is_contiguous():
        wrong = f"strides {result.stride()} for shape {shape}; it must be contiguous"
    elif any(torch._C._is_alias_of(result, tensor) for tensor in inputs):  # type: ignore[attr-defined]
        wrong = "memory of its own input; it must return a tensor of its own"
    else:
        return result
    raise error(f"{op}: {REGISTRY.describe(runner_id)} returned {wrong}")


def _refuse_gradient(gradient: torch.Tensor, shape: list[int], message: str) -> torch.Tensor:
    raise NoGradientError(message)


# The refusal is an op: a compiler may trace a backward pass that nobody ever runs.
LIBRARY.define("runner_gradient(Tensor gradient, SymInt[] shape, str message) -> Tensor")
LIBRARY.impl("runner_gradient", _refuse_gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::runner_gradient",
    lambda gradient, shape, message: gradient.new_empty(shape),
    lib=LIBRARY,
)
_define("nvfp4_linear_gemm", "Tensor x", "out_features", "gristmill.nvfp4.linear")
_define(
    "nvfp4_moe_gemm",
    "Tensor hidden_states, Tensor topk_weights, Tensor topk_ids",
    "hidden_size",
    "gristmill.nvfp4.moe",
)
