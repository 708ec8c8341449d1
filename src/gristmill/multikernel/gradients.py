"""The gradient of a MultiKernel's torch op, including schemas that write to arguments.

`torch.library.register_autograd` accepts no schema that writes. A differentiated call is therefore
recorded in its functional form, which takes the old values and returns the results and the new
values. torch's own `copy_` then writes the new values, so history, views, leaves and the mutations
that a compiler sees are those of `copy_`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from gristmill.errors import ArgumentError, NoGradientError
from gristmill.ops.autograd import below_autograd, tensors_in, written_in
from gristmill.ops.op import LIBRARY, NAMESPACE
from gristmill.ops.overlap import are_overlapping

Function = Callable[..., Any]
Arguments = tuple[Any, ...]
# For each value: its number of tensors if it is a list, else None.
Lengths = Sequence[int | None]


@dataclass(frozen=True)
class Gradient:
    """What `MultiKernel.register_autograd` was given."""

    backward: Function
    setup_context: Function | None = None


class Differentiable:
    """The differentiated calls of one torch op.

    `find()` returns the gradient that is registered at the time of a call, or None.
    """

    def __init__(self, name: str, overload: Any, find: Callable[[], Gradient | None]) -> None:
        self._where, self._overload, self._find = f"MultiKernel {name!r}", overload, find
        arguments = overload._schema.arguments
        self._names = [one.name for one in arguments]
        self._keywords = [one.name for one in arguments if one.kwarg_only]
        self._defaults = [_default(one) for one in arguments]
        self._positional = len(self._names) - len(self._keywords)
        self._written = written_in(overload._schema)
        self._returns = len(overload._schema.returns)
        self._lists = [_is_list(one) for one in arguments]
        self._output_lists = [
            *map(_is_list, overload._schema.returns),
            *(self._lists[at] for at in self._written),
        ]
        self._function = _function(name, self)

    def completed(
        self, args: Arguments, kwargs: Mapping[str, Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        """All arguments: the dispatcher omits those that equal their defaults."""
        at = self._positional
        if len(args) < at:
            args = (*args, *self._defaults[len(args) : at])
        if len(kwargs) == len(self._keywords):
            return args, dict(kwargs)
        return args, {**dict(zip(self._keywords, self._defaults[at:], strict=True)), **kwargs}

    def __call__(self, keys: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        """The call, recorded by autograd; `keys` are those of the dispatcher."""
        gradient = self._find()
        if gradient is None and self._written:
            raise self.no_gradient()
        if torch._C._are_functorch_transforms_active():
            raise NoGradientError(
                f"{self._where}: torch.func cannot differentiate it as a torch op; call the "
                f"MultiKernel itself"
            )
        args, named = self.completed(args, kwargs)
        values = [*args, *(named[name] for name in self._keywords)]
        if self._written and _is_in_decomposed_program(values):
            raise NoGradientError(
                f"{self._where}: in a decomposed exported program torch.compile loses its "
                f"gradient; compile the program before run_decompositions(), or use torch.no_grad()"
            )
        self._check_written(values)
        old = list(values)
        if gradient is not None and gradient.setup_context is not None:
            for at in self._written:  # setup_context may save the old values
                old[at] = _mapped(_copy, values[at])
        flat, lengths = _flattened(old, self._lists)
        call = _Call(gradient, keys, lengths)
        outputs = _restored(self._function.apply(call, *flat), call.output_lengths)
        for at, new in zip(self._written, outputs[self._returns :], strict=True):
            for tensor, value in zip(tensors_in(values[at]), tensors_in(new), strict=True):
                tensor.copy_(value)
        return self._as_returned(outputs[: self._returns])

    def forward(self, ctx: Any, call: _Call, flat: Sequence[Any]) -> list[Any]:
        """The functional form of the op, below autograd: results, then new values."""
        old = _restored(flat, call.lengths)
        values = list(old)
        for at in self._written:
            values[at] = _mapped(_copy, old[at])
        args, named = self._split(values)
        result = below_autograd(self._overload, call.keys, args, named)
        results = [] if self._returns == 0 else [result] if self._returns == 1 else list(result)
        outputs = [*results, *(values[at] for at in self._written)]
        if call.gradient is not None and call.gradient.setup_context is not None:
            args, named = self._split(old)
            output = tuple(outputs) if self._written else result
            more = {"keyword_only_inputs": named} if named else {}
            call.gradient.setup_context(ctx, args, output, **more)
        flat, call.output_lengths = _flattened(outputs, self._output_lists)
        return flat

    def backward(self, ctx: Any, call: _Call, flat: Sequence[Any]) -> list[Any]:
        """A gradient for each value among the arguments, including those in lists."""
        if call.gradient is None:
            raise self.no_gradient()
        needed = ctx.needs_input_grad
        try:
            ctx.needs_input_grad = tuple(_restored(needed[1:], call.lengths))
            found = call.gradient.backward(ctx, *_restored(flat, call.output_lengths))
        finally:
            ctx.needs_input_grad = needed
        found = found if isinstance(found, tuple) else (found,)
        if len(found) not in (self._positional, len(self._names)):
            raise ArgumentError(
                f"{self._where}: backward must return one gradient or None for each of "
                f"{', '.join(self._names)}: {len(self._names)} values, got {len(found)}"
            )
        missing = len(self._names) - len(found)
        found = (*found, *[None] * missing)
        gradients: list[Any] = []
        for at, (one, length) in enumerate(zip(found, call.lengths, strict=True)):
            if length is not None and one is None:
                gradients += [None] * length
            elif length is None:
                gradients.append(one)
            elif isinstance(one, (list, tuple)) and len(one) == length:
                gradients += one
            else:
                raise ArgumentError(
                    f"{self._where}: backward must return a list of {length} gradients or None for "
                    f"{self._names[at]}, got {type(one).__name__}"
                )
        if missing and any(needed[-missing:]):
            raise NoGradientError(
                f"{self._where}: backward gave no gradient for the keyword-only arguments "
                f"{', '.join(self._keywords)}, and one of them requires one"
            )
        return gradients

    def no_gradient(self) -> NoGradientError:
        return NoGradientError(
            f"{self._where}: as a torch op it has no gradient, and an argument requires one; "
            f"register one with register_autograd(backward, setup_context=...), or call it under "
            f"torch.no_grad()"
        )

    def _split(self, values: Sequence[Any]) -> tuple[Arguments, dict[str, Any]]:
        """Positional arguments, and those by keyword."""
        at = self._positional
        return tuple(values[:at]), dict(zip(self._keywords, values[at:], strict=True))

    def _as_returned(self, results: Sequence[Any]) -> Any:
        if self._returns == 0:
            return None
        return results[0] if self._returns == 1 else tuple(results)

    def _check_written(self, values: Sequence[Any]) -> None:
        """Reject written leaves and overlapping arguments before the kernel runs."""
        named = [
            (name, one, at in self._written)
            for at, (name, value) in enumerate(zip(self._names, values, strict=True))
            for one in tensors_in(value)
        ]
        for at, (name, tensor, is_written) in enumerate(named):
            base = tensor._base
            for one, what in ((tensor, "a leaf"), (base, "a view of a leaf")):
                if is_written and one is not None and one.is_leaf and one.requires_grad:
                    raise NoGradientError(  # PyTorch's wording
                        f"{self._where}: {what} Variable that requires grad is being used in an "
                        f"in-place operation: {name} is written to; pass a clone of it"
                    )
            for other_name, other, other_written in named[:at]:
                if (is_written or other_written) and are_overlapping(tensor, other):
                    raise NoGradientError(
                        f"{self._where}: {other_name} and {name} share memory that is written to, "
                        f"and an argument requires a gradient; pass a clone of one of them"
                    )


@dataclass
class _Call:
    """One recorded call."""

    gradient: Gradient | None
    keys: Any
    lengths: Lengths
    output_lengths: Lengths = ()


def _function(name: str, op: Differentiable) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: _Call, *flat: Any) -> Any:
            ctx.call = call
            return tuple(op.forward(ctx, call, flat))

        @staticmethod
        def backward(ctx: Any, *flat: Any) -> Any:
            return None, *op.backward(ctx, ctx.call, flat)

    # `grad_fn` and anomaly detection show the name of the second.
    Function.__name__ = Function.__qualname__ = f"gristmill_user_{name}"
    node: Any = Function._backward_cls
    node.__name__ = node.__qualname__ = f"gristmill_user_{name}Backward"
    return Function


def _flattened(values: Sequence[Any], lists: Sequence[bool]) -> tuple[list[Any], Lengths]:
    """The values, with lists of tensors expanded."""
    lengths = [
        len(value) if is_list and value is not None else None
        for value, is_list in zip(values, lists, strict=True)
    ]
    flat: list[Any] = []
    for value, length in zip(values, lengths, strict=True):
        flat += (value,) if length is None else value
    return flat, lengths


def _restored(flat: Sequence[Any], lengths: Lengths) -> list[Any]:
    rest = iter(flat)
    return [
        next(rest) if length is None else [next(rest) for _ in range(length)] for length in lengths
    ]


def _is_in_decomposed_program(values: Sequence[Any]) -> bool:
    """Whether a compiler traces this call as part of `auto_functionalized`.

    `run_decompositions` replaces ops that write by it. Compilers skip autograd for it, so the
    gradient would silently be lost. Without a compiler, and where it is exported again, it calls
    the op with the right gradient.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.compiler.is_exporting():
        return False
    if not any(isinstance(one, FakeTensor) for value in values for one in tensors_in(value)):
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._higher_order_ops.auto_functionalize":
            return True
        frame = frame.f_back
    return False


def _is_list(declared: Any) -> bool:
    """Whether an argument or a result of a schema is a list of tensors."""
    kind = str(declared.type)
    return "List" in kind and "Tensor" in kind


def _default(argument: Any) -> Any:
    """The default of an argument; schemas hold a dtype as its number."""
    value = argument.default_value
    if isinstance(value, int) and "ScalarType" in str(argument.real_type):
        return torch.ops.aten.empty.memory_format([0], dtype=value, device="meta").dtype
    return value


def _mapped(function: Function, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(function, one) for one in value]
    return function(value) if isinstance(value, torch.Tensor) else value


# Inductor removes a `clone` of a view, and torch 2.13 then overwrites other parts of its storage (a
# clone followed by an op that writes to it is enough). An opaque op makes the copy instead.
_COPY = "copy_to_write"
LIBRARY.define(f"{_COPY}(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl(_COPY, torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::{_COPY}", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd(f"{NAMESPACE}::{_COPY}", lambda ctx, dy: dy, lib=LIBRARY)
_copy: Function = getattr(torch.ops, NAMESPACE).copy_to_write.default
