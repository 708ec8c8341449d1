"""The op of a norm into FP8, made from the op of the norm itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gristmill.ops import inline
from gristmill.ops.later import Later
from gristmill.ops.norm_fp8 import semantics
from gristmill.ops.norm_fp8.cuda import scaling_of
from gristmill.ops.norm_fp8.reference import quantised, quantised_by_row
from gristmill.ops.norms.semantics import accumulator
from gristmill.ops.op import Arguments, Case, Cost, Op
from gristmill.ops.plain import Reference
from gristmill.select.device import Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

if TYPE_CHECKING:
    from gristmill.ops.norm_fp8 import cases
else:
    cases = Later("gristmill.ops.norm_fp8.cases")

Tensor = torch.Tensor


class Fp8Norm:
    """The functions of `norm` into FP8, each over the arguments of the FP8 op.

    These are the norm's, with the scale behind its tensors and amax in the place of out_dtype. The
    norm's own functions are called with its arguments; `check` and `problem_on` of it take the name
    of the op that they speak for, and the latter what FP8 adds, as keywords. `function` is what
    users call: its last arguments are out_dtype, scale and return_amax.
    """

    def __init__(self, norm: Op, function: Callable[..., Any]) -> None:
        self.name = f"{norm.name}_fp8"
        self._norm, self._function = norm, function
        self._schema = norm.schema[1 : norm.schema.index(")")].split(", ")
        self._rows = sum(one.startswith("Tensor ") for one in self._schema)
        self._at = sum(one.startswith("Tensor") for one in self._schema)

    def join(self, args: Iterable[Any], scale: Any, amax: Any) -> Arguments:
        """Arguments of the norm as those of the FP8 op."""
        *others, _ = args
        return *others[: self._at], scale, *others[self._at :], amax

    def _split(self, args: Arguments) -> tuple[Arguments, Tensor | None, bool]:
        """The norm's arguments but for out_dtype, the scale, and whether amax is wanted."""
        return (*args[: self._at], *args[self._at + 1 : -1]), args[self._at], args[-1]

    def adapt(self, *args: Any, **options: Any) -> Arguments:
        """A call of `function` as that of the op."""
        call = inspect.signature(self._function).bind(*args, **options)
        call.apply_defaults()
        *own, scale, amax = call.arguments.values()
        return self.join(own, scale, amax)

    def check(self, *args: Any) -> None:
        own, scale, amax = self._split(args)
        self._norm.check(*own, None, op=self.name)
        semantics.check_quantisation(self.name, scale, amax, args[0])

    def outputs(self, *args: Any) -> tuple[Tensor, ...]:
        own, scale, amax = self._split(args)
        norm = self._norm.outputs(*own, semantics.FP8)
        return *_several(norm), *semantics.outputs(args[0], scale, amax)

    def reference(self, *args: Any) -> tuple[Tensor, ...]:
        """The norm in the accumulator's dtype, quantised."""
        own, scale, amax = self._split(args)
        held = args[0].dtype
        if self._rows > 1:
            held = torch.promote_types(held, args[1].dtype)
        z, *total = _several(self._norm.reference(*own, accumulator(held)))
        y, row_scale, largest = quantised(z, scale, amax)
        return y, *total, row_scale, largest

    def problem(self, device: Device, *args: Any) -> Problem:
        own, scale, amax = self._split(args)
        added = {"scaling": scaling_of(scale), "amax": amax}
        return self._norm.problem_on(device, *own, semantics.FP8, op=self.name, **added)

    def cost(self, *args: Any) -> Cost:
        own, scale, amax = self._split(args)
        return cases.fp8_cost(self._norm.cost(*own, semantics.FP8), args[0], scale, amax)

    def cases(self) -> Iterator[Case]:
        return cases.fp8_cases(self._norm.cases(), self.join)

    def example(self, *args: Any) -> Arguments:
        return self.join(self._norm.example(*args), None, False)

    def op(self, variants: tuple[Variant, ...], **others: Any) -> Op:
        """The op, with `variants` before its reference; `others` are fields of it."""
        taken = self.join(self._schema, "Tensor? scale=None", "bool amax=False")
        results = ", ".join(["Tensor"] * (self._rows + 2))
        by_row = quantised_by_row(self.reference, rows=tuple(range(self._rows)), scale=self._at)
        required = [None] * self._rows  # have no default
        inline.allow_inline(self.name)
        return Op(
            name=self.name,
            schema=f"({', '.join(taken)}) -> ({results})",
            check=self.check,
            outputs=self.outputs,
            reference=self.reference,
            problem_on=self.problem,
            cost=self.cost,
            cases=self.cases,
            example=self.example,
            variants=(*variants, Reference(self.reference, self.outputs, by_row)),
            defaults=self.join((*required, *self._norm.defaults), None, False)[self._rows :],
            instead=f"gristmill.{self.name.removesuffix('_fp8')} and quantise its result",
            adapt=self.adapt,
            **others,
        )


def _several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
