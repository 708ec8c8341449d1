"""When an eager call may go past torch's dispatcher.

The dispatcher costs more than a small kernel: on an H200's host 26 us a call against 12 past it.
It may be skipped only when nobody is listening: no compiler, mode, transform or autocast is active
and every tensor is exactly what it seems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from gristmill.errors import ArgumentError

PLAIN = (torch.Tensor, Parameter)

TransformType = torch._C._functorch.TransformType

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_autocast = torch._C._is_any_autocast_enabled
_tracing = torch._C._is_tracing
# Bound once: the attribute lookup costs as much as the call.
is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether these arguments can be run at once, with nobody left to tell."""
    if is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return False
    return is_quiet()


def is_quiet() -> bool:
    """Whether nobody listens: the part of `is_direct` that is about no tensor in particular."""
    return not (
        _function_modes()  # torch.set_default_device, user modes
        or _dispatch_modes()  # fake tensors, make_fx, flop counters, selective checkpointing
        or _transform() is not None  # vmap, grad, jvp, functionalize
        or _autocast()
        or forward_ad._current_level >= 0  # dual tensors look like plain ones
        or _tracing()  # torch.jit.trace
    )


def is_transformed() -> bool:
    """Whether vmap, another functorch transform or forward-mode AD is active.

    torch's registered Python ops know none of them: `torch.func.grad` refuses them, and forward
    mode drops the tangent without a word. The references are made of ops that know them all.
    """
    return _transform() is not None or forward_ad._current_level >= 0


def constant_in_trace(function: Callable[[], bool]) -> Callable[[], bool]:
    """`torch.compiler.assume_constant_result`, which would import Dynamo, and that DTensor."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_differentiated_in_trace() -> bool:
    """`is_transformed` for what Dynamo traces, which guards its graphs by what this reads.

    Under vmap alone it can stay one op, which torch calls for each of the batch.
    """
    return forward_ad._current_level >= 0 or _func_differentiates()


@constant_in_trace
def _func_differentiates() -> bool:
    """Whether torch.func does: its transforms in force are guarded by Dynamo itself."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels)


def refuse_tangents(
    op: str,
    args: Iterable[Any],
    namespace: str = "gristmill",
    instead: str = "the function in gristmill",
) -> None:
    """For an op that was called as `torch.ops...`, with dual tensors."""
    if forward_ad._current_level < 0:
        return
    for arg in args:
        if isinstance(arg, (list, tuple)):
            refuse_tangents(op, arg, namespace, instead)
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise ArgumentError(
                f"{op}: an argument has a forward-mode tangent, which torch.ops.{namespace}.{op} "
                f"would lose; call {instead}, which passes it on"
            )


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must see this call."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
