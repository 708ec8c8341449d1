"""The eager way of the one-pass mode: the gradient is made in the forward pass and handed out once.

The forward op writes the gradient for a unit gradient of the loss, over the logits if asked to. The
backward pass multiplies it, in place and on the device, by the gradient that came; a factor of 1
costs nothing. The gradient is gone then, so a second backward pass has nothing to hand out.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DoubleBackwardError, GradientConsumed
from gristmill.ops.direct import PLAIN, is_transformed
from gristmill.ops.op import Op


def scaled(gradient: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    """The gradient for another gradient of the loss than 1, as a new tensor."""
    factor = dloss if dloss.dim() == 0 else dloss.unsqueeze(-1)
    return (gradient.to(factor.dtype) * factor).to(gradient.dtype)


def refuse_second_gradient() -> None:
    """The gradient that waits has forgotten what it was made of, so that nothing would flow back.

    Under create_graph autograd records what a backward pass does, and only then.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DoubleBackwardError(
            "cross_entropy: a gradient made in one_pass mode has no gradient of its own; use "
            "torch.nn.functional.cross_entropy where you need double backward (create_graph=True)"
        )


def refuse_weight_gradient(needed: bool) -> None:
    if needed:
        raise ArgumentError(
            "cross_entropy: weight must not require grad, there is no gradient in it; "
            "got one that does, use weight.detach()"
        )


def is_plain_eager(*tensors: torch.Tensor | None) -> bool:
    """Whether an autograd function of our own may run: nobody traces, transforms or fakes.

    Autocast may be active: the loss is computed in fp32 with or without it.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return False
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes or torch._C._get_tracing_state() is not None:
        return False
    return all(tensor is None or type(tensor) in PLAIN for tensor in tensors)


def check_in_place(logits: torch.Tensor) -> None:
    """Logits that autograd lets nobody overwrite."""
    if logits.is_leaf:
        raise ArgumentError(
            "cross_entropy: inplace overwrites logits with their gradient, so they must not be a "
            "leaf that requires grad; got one, use inplace=False"
        )
    base = logits._base
    if base is not None and base.is_leaf and base.requires_grad:
        raise ArgumentError(
            "cross_entropy: inplace overwrites logits with their gradient, and these are a view "
            "of a leaf that requires grad; use inplace=False"
        )


def function_of(functional: Op, in_place: Op, scale: Op) -> Any:
    """The autograd function over these ops: `apply(in_place, logits, target, options...)`."""

    class OnePass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inplace: bool, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            refuse_weight_gradient(ctx.needs_input_grad[3])
            if inplace:
                loss, lse = in_place.run(*args)
                gradient = args[0].detach()
            else:
                loss, lse, gradient = functional.run(*args)
            ctx.consumed = False
            ctx.arguments = len(args)
            ctx.save_for_backward(gradient)
            ctx.mark_non_differentiable(lse)
            return loss, lse

        @staticmethod
        def backward(ctx: Any, dloss: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
            if ctx.consumed:
                raise GradientConsumed(
                    "cross_entropy: one_pass hands out the gradient it made in the forward pass, "
                    "and this one is gone; use one_pass=False to go backward twice"
                )
            refuse_second_gradient()
            (gradient,) = ctx.saved_tensors
            ctx.consumed = True
            if torch.compiler.is_compiling():
                gradient = scaled(gradient, dloss)
            else:
                scale.run(gradient, dloss)
            return None, gradient, *[None] * (ctx.arguments - 1)

    OnePass.__name__ = OnePass.__qualname__ = "gristmill_cross_entropy_one_pass"
    return OnePass
