"""MultiKernels that write, with formulas for their gradients, and the programs that call them.

Kernels are torch's own operators, so that autograd through one of them, called by itself, is the
truth for the torch op made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Function = Callable[..., Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Formula:
    """A MultiKernel and its gradient; `program(call, *tensors)` calls it, as all of a model.

    `tensors`: shapes of the leaves; those in `constant` need no gradient. A program gives what it
    computes from the op's results and from what the op has written.
    """

    name: str
    kernel: Function
    schema: str
    fake: Function
    program: Callable[..., tuple[torch.Tensor, ...]]
    tensors: tuple[tuple[int, ...], ...]
    gradient: Mapping[str, Function]
    constant: tuple[int, ...] = ()
    once: bool = False  # whether its formula has no gradient of its own
    kernels: Mapping[str, Function] = field(init=False)

    def __post_init__(self) -> None:
        def other(*args: Any, **kwargs: Any) -> Any:
            return self.kernel(*args, **kwargs)

        object.__setattr__(self, "kernels", {"a": self.kernel, "b": other})

    def make(self) -> list[torch.Tensor]:
        torch.manual_seed(3)
        found = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in self.tensors]
        return [one.requires_grad_(at not in self.constant) for at, one in enumerate(found)]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def like_first(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return torch.empty_like(x)


# --- y += x


def add_(x: torch.Tensor, y: torch.Tensor) -> None:
    y.add_(x)


def two_of_them(call: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = y * 2
    call(x * 3, y)
    return (y.square(),)


def into_a_constant(call: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = y * 2
    call(x * 3, y)
    call(x.sin(), y)
    return (y.square(), y.exp())


def into_a_view(call: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = y * 2
    call(x[0], y[1])
    call(x, y.t().t())
    return (y.square(),)


ADD = {"backward": lambda ctx, dy: (dy, dy)}


# --- y = x * y: needs what was there


def multiply_(x: torch.Tensor, y: torch.Tensor) -> None:
    y.mul_(x)


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def multiply_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, old = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return dy * old if wanted[0] else None, dy * x if wanted[1] else None


MULTIPLY = {"backward": multiply_backward, "setup_context": save_inputs}


def twice(call: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = y.sin()
    call(x * 3, y)
    z = y.exp()
    call(z, y)
    return (y, z)


# --- y = exp(y): needs what is there then; and a result


def exp_(y: torch.Tensor) -> torch.Tensor:
    total = y.sum(-1)
    y.exp_()
    return total


def save_new(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def exp_backward(ctx: Any, dtotal: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return dy * y + dtotal.unsqueeze(-1)


EXP = {"backward": exp_backward, "setup_context": save_new}


def exp_of_all(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 0.5
    total = call(y)
    return (y.square(), total.sin())


def exp_of_a_row(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A view, where there is another output."""
    y = x * 0.5
    total = call(y[1:])
    return (y.square(), total.sin())


# --- batch norm: running statistics have no history


def batch_norm(x: Any, mean: Any, var: Any, weight: Any) -> torch.Tensor:
    own, spread = x.mean(0), x.var(0, correction=0)
    mean.mul_(0.9).add_(own.detach(), alpha=0.1)
    var.mul_(0.9).add_(spread.detach(), alpha=0.1)
    return (x - own) * torch.rsqrt(spread + 1e-5) * weight


def save_batch_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[3])
    ctx.mark_non_differentiable(*output[1:])


def batch_norm_backward(ctx: Any, dy: torch.Tensor, dmean: Any, dvar: Any) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    factor = torch.rsqrt(x.var(0, correction=0) + 1e-5)
    hat = (x - x.mean(0)) * factor
    g = dy * weight
    dx = factor * (g - g.mean(0) - hat * (g * hat).mean(0))
    return dx, None, None, (dy * hat).sum(0)


def normalised(call: Call, x: Any, mean: Any, var: Any, weight: Any) -> tuple[torch.Tensor, ...]:
    y = call(x * 2, mean, var, weight)
    y = call(y.sin(), mean, var, weight)
    assert not mean.requires_grad
    assert not var.requires_grad
    return (y, mean * 1, var * 1)


# --- lists, what is optional, keywords


def add_lists_(xs: list[torch.Tensor], ys: list[torch.Tensor], scale: float) -> torch.Tensor:
    for x, y in zip(xs, ys, strict=True):
        y.add_(x * scale)
    return xs[0] * ys[0].shape[0]


def save_lists(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale, ctx.rows = inputs[2], inputs[1][0].shape[0]


def lists_backward(ctx: Any, dresult: Any, dys: list[Any]) -> tuple[Any, ...]:
    assert ctx.needs_input_grad[0] == [True, True]
    dxs = [dy * ctx.scale for dy in dys]
    dxs[0] = dxs[0] + dresult * ctx.rows
    return dxs, list(dys), None


def lists(call: Call, a: Any, b: Any, c: Any, d: Any) -> tuple[torch.Tensor, ...]:
    ys = [c * 2, d.sin()]
    result = call([a * 3, b.exp()], ys, 1.5)
    return (result, ys[0].square(), ys[1].exp())


def scaled(x: torch.Tensor, y: torch.Tensor | None, *, factor: torch.Tensor) -> torch.Tensor:
    if y is not None:
        y.add_(x)
    return x * factor


def save_scaled(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any) -> None:
    ctx.save_for_backward(inputs[0], keyword_only_inputs["factor"])


def scaled_backward(ctx: Any, dresult: Any, dy: Any) -> tuple[Any, ...]:
    x, factor = ctx.saved_tensors
    dx = dresult * factor + (0 if dy is None else dy)
    return dx, dy, (dresult * x).sum(0)


SCALED = {"backward": scaled_backward, "setup_context": save_scaled}


def with_it(call: Call, x: Any, y: Any, factor: Any) -> tuple[torch.Tensor, ...]:
    y = y * 2
    result = call(x.sin(), y, factor=factor * 2)
    return (result, y.square())


def without_it(call: Call, x: Any, factor: Any) -> tuple[torch.Tensor, ...]:
    return (call(x.sin(), None, factor=factor * 2),)


# --- nothing is written


def sine_and_parts(x: torch.Tensor, *, factor: torch.Tensor) -> tuple[Any, Any]:
    return x.sin() * factor, [x[:1] * 2, x[1:].exp()]


def save_parts(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any) -> None:
    ctx.save_for_backward(inputs[0], keyword_only_inputs["factor"])


def parts_backward(ctx: Any, dsine: torch.Tensor, dparts: list[Any]) -> tuple[Any, ...]:
    x, factor = ctx.saved_tensors
    dparts = torch.cat([dparts[0] * 2, dparts[1] * x[1:].exp()])
    return dsine * x.cos() * factor + dparts, (dsine * x.sin()).sum(0)


def parts(call: Call, x: Any, factor: Any) -> tuple[torch.Tensor, ...]:
    sine, (first, rest) = call(x * 2, factor=factor)
    return (sine, first.square(), rest)


# --- an RMSNorm in place, which writes to both


def add_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    s = residual + x
    residual.copy_(s)
    x.copy_(s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * weight)


def save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], inputs[2])


def norm_backward(ctx: Any, dy: torch.Tensor, dsum: torch.Tensor) -> tuple[Any, ...]:
    s, weight = ctx.saved_tensors
    r = torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6)
    g = dy * weight
    ds = r * (g - s * r * (g * s * r).mean(-1, keepdim=True)) + dsum
    return ds, ds.clone(), (dy * s * r).sum(0)


def normed(call: Call, x: Any, residual: Any, weight: Any) -> tuple[torch.Tensor, ...]:
    h, total = x * 2, residual.sin()
    call(h, total, weight)
    return (h.square(), total.exp())


def normed_views(call: Call, x: Any, residual: Any, weight: Any) -> tuple[torch.Tensor, ...]:
    both = torch.cat([x * 2, residual.sin()])
    call(both[: len(x)], both[len(x) :], weight)
    return (both.square(),)


NORM = {"backward": norm_backward, "setup_context": save_norm}
NORM_SCHEMA = "(Tensor(a!) x, Tensor(b!) residual, Tensor weight) -> ()"
WRITES_Y = "(Tensor x, Tensor(a!) y) -> ()"
EXP_SCHEMA = "(Tensor(a!) y) -> Tensor"
SCALED_SCHEMA = "(Tensor x, Tensor(a!)? y=None, *, Tensor factor) -> Tensor"
SQUARE = (4, 4)


def like_row(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(y.shape[:-1])


def like_list(xs: list[torch.Tensor], *others: Any) -> torch.Tensor:
    return torch.empty_like(xs[0])


def like_parts(x: torch.Tensor, **named: Any) -> tuple[Any, Any]:
    return torch.empty_like(x), [torch.empty_like(x[:1]), torch.empty_like(x[1:])]


FORMULAS = [
    Formula("add", add_, WRITES_Y, nothing, two_of_them, (SQUARE, SQUARE), ADD),
    Formula(
        "add_to_constant", add_, WRITES_Y, nothing, into_a_constant, (SQUARE, SQUARE), ADD, (1,)
    ),
    Formula("add_a_constant", add_, WRITES_Y, nothing, two_of_them, (SQUARE, SQUARE), ADD, (0,)),
    Formula("add_to_view", add_, WRITES_Y, nothing, into_a_view, (SQUARE, SQUARE), ADD),
    Formula("multiply", multiply_, WRITES_Y, nothing, twice, (SQUARE, SQUARE), MULTIPLY),
    Formula(
        "multiply_frozen", multiply_, WRITES_Y, nothing, twice, (SQUARE, SQUARE), MULTIPLY, (1,)
    ),
    Formula("exp", exp_, EXP_SCHEMA, like_row, exp_of_all, (SQUARE,), EXP),
    Formula("exp_of_view", exp_, EXP_SCHEMA, like_row, exp_of_a_row, (SQUARE,), EXP),
    Formula(
        "batch_norm",
        batch_norm,
        "(Tensor x, Tensor(a!) mean, Tensor(b!) var, Tensor weight) -> Tensor",
        like_first,
        normalised,
        ((6, 3), (3,), (3,), (3,)),
        {"backward": batch_norm_backward, "setup_context": save_batch_norm},
        constant=(1, 2),
    ),
    Formula(
        "lists",
        add_lists_,
        "(Tensor[] xs, Tensor(a!)[] ys, float scale) -> Tensor",
        like_list,
        lists,
        (SQUARE,) * 4,
        {"backward": lists_backward, "setup_context": save_lists},
    ),
    Formula("optional", scaled, SCALED_SCHEMA, like_first, with_it, (SQUARE, SQUARE, (4,)), SCALED),
    Formula("left_out", scaled, SCALED_SCHEMA, like_first, without_it, (SQUARE, (4,)), SCALED),
    Formula(
        "parts",
        sine_and_parts,
        "(Tensor x, *, Tensor factor) -> (Tensor, Tensor[])",
        like_parts,
        parts,
        (SQUARE, (4,)),
        {"backward": parts_backward, "setup_context": save_parts},
    ),
    Formula("norm", add_norm_, NORM_SCHEMA, nothing, normed, (SQUARE, SQUARE, (4,)), NORM),
    Formula(
        "norm_views", add_norm_, NORM_SCHEMA, nothing, normed_views, (SQUARE, SQUARE, (4,)), NORM
    ),
]
