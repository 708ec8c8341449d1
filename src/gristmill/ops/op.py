"""One op is one object: everything known about it, and its life as a torch op.

An `Op` holds a schema, the argument checks, the outputs' metadata, a reference, the gradient, the
cost, test cases and the variants. The rest of the library walks over these objects; adding an op
adds no wiring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

from gristmill.errors import ArgumentError, DoubleBackwardError, VariantUnavailable
from gristmill.log import warn_once
from gristmill.ops import written_views
from gristmill.ops.autograd import Refusal, define_autograd, written_in
from gristmill.ops.direct import (
    PLAIN,
    constant_in_trace,
    is_differentiated_in_trace,
    is_direct,
    is_grad_enabled,
    is_quiet,
    is_transformed,
    needs_grad,
    refuse_tangents,
)
from gristmill.ops.memory import MEMORY_ERRORS, is_lack, lack
from gristmill.ops.overlap import writing_plan
from gristmill.ops.plan_key import are_deterministic, check_memory, is_lazy, key_function
from gristmill.select.chooser import failure_of, ranked, resolve
from gristmill.select.device import Device, device_of
from gristmill.select.overrides import is_batch_invariant, register_variants, restored, token
from gristmill.select.problem import Problem
from gristmill.select.record import record
from gristmill.select.sight import first_sight
from gristmill.select.variant import Variant

NAMESPACE = "gristmill"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Plans are small, but a growing sequence length makes one per length: forget them all at times.
PLANS_KEPT = 4096

Plan = Callable[..., Any]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Cost:
    """What a call cannot do without: bytes to and from memory, floating-point operations."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class Case:
    """A test input: `make(device, seed)` gives the op's positional arguments.

    A variant's error against fp64 may be `factor` times that of the reference in the working
    precision (and never less than one rounding of the output).
    """

    name: str
    make: Callable[[torch.device | str, int], Arguments]
    factor: float = 2.0


@dataclass(frozen=True)
class Gradient:
    """`save(ctx, arguments, outputs)` and `backward(ctx, *gradients)`, as autograd takes them."""

    save: Callable[[Any, Arguments, Any], None]
    backward: Callable[..., tuple[Any, ...]]


@dataclass(eq=False)
class Op:
    """An operator. All callables take the op's positional arguments, in the schema's order."""

    name: str
    schema: str
    summary: str
    check: Callable[..., None]
    outputs: Callable[..., Any]
    reference: Callable[..., Any]
    problem_on: Callable[..., Problem]
    cost: Callable[..., Cost]
    cases: Callable[[], Iterable[Case]]
    example: Callable[..., Arguments]  # of a shape, a dtype and a device
    variants: tuple[Variant, ...]
    defaults: Arguments
    gradient: Gradient | None = None
    # For an op without a gradient: the alternative that NoGradientError names.
    instead: str | None = None
    autocast: Callable[..., Arguments] | None = None
    autocast_keys: tuple[str, ...] = ("AutocastCUDA",)
    # Arguments that hold indices: what they index, as (argument, dim). Random values stay below it.
    indices: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # Arguments that are words to users and ints in the schema: the int of each word.
    spelled: Mapping[str, Mapping[str | None, int]] = field(default_factory=dict)
    # The public function and how its arguments become the op's, where the two are not the same.
    function: Callable[..., Any] | None = None
    adapt: Callable[..., Arguments] | None = None
    # Whether `example` takes, as a fourth argument, the architecture whose kernels are to read it.
    laid_out: bool = False
    # Makes arguments of random numbers such as calls have them, where not every number is one.
    sound: Callable[..., Arguments] | None = None
    # Calls like one, itself among them, that read other parts of the same tensors: what is timed
    # again and again must not find them in a cache.
    elsewhere: Callable[..., list[Arguments]] | None = None
    # All kernels of the op on a device, for rows of a dtype: see `space.py`.
    space: Callable[[Op, Device, torch.dtype], Iterator[Any]] | None = None
    _plans: dict[Hashable, Plan] = field(default_factory=dict, init=False, repr=False)
    _key: Callable[..., Hashable] = field(init=False, repr=False)
    _function: Any = field(init=False, repr=False)
    _argument_count: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        register_variants(self.name, [variant.name for variant in self.variants])
        self._define()

    @property
    def overload(self) -> Any:
        """The torch op, e.g. `torch.ops.gristmill.rms_norm.default`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.overload._schema.arguments)

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the arguments that the op writes to."""
        return written_in(self.overload._schema)

    def problem(self, *args: Any, device: Device | None = None) -> Problem:
        """What the choice of a kernel depends on; with `device` given, meta tensors will do."""
        problem = self.problem_on(device or device_of(args[0].device), *args)
        deterministic, invariant = are_deterministic(), is_batch_invariant()
        if deterministic or invariant:
            problem = replace(problem, deterministic=deterministic, batch_invariant=invariant)
        return problem

    def example_with(
        self,
        options: Mapping[str, Any],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        target: Device | None = None,
    ) -> Arguments:
        """`example` with other values for the arguments named in `options`."""
        kinds = {one.name: str(one.type) for one in self.overload._schema.arguments}
        names = list(kinds)
        for name in options:
            if name not in names:
                raise ArgumentError(
                    f"{self.name} has no argument {name!r}; there are: {', '.join(names)}"
                )
        example = self.example_for(target, shape, dtype, device)
        given = {
            # A word that a shell gave, where it cannot mean None.
            name: "none" if value is None and kinds[name] == "str" else self._coded(name, value)
            for name, value in options.items()
        }
        return tuple(given.get(name, it) for name, it in zip(names, example, strict=True))

    def example_for(
        self,
        target: Device | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "meta",
    ) -> Arguments:
        """`example` as it would be made on `target`, which need not be there; None: on `device`."""
        if target is None or not self.laid_out:
            return self.example(shape, dtype, device)
        return self.example(shape, dtype, device, target.arch or "cpu")

    def bind_arguments(self, *args: Any, **kwargs: Any) -> Arguments:
        """A user's call as the op's positional arguments, checked."""
        names = [argument.name for argument in self.overload._schema.arguments]
        if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
            raise TypeError(f"{self.name} takes ({', '.join(names)}); got {args!r} {kwargs!r}")
        required = len(names) - len(self.defaults)
        values = list(args)
        for position in range(len(args), len(names)):
            name = names[position]
            if name not in kwargs and position < required:
                raise TypeError(f"{self.name} needs the argument {name!r}")
            values.append(kwargs[name] if name in kwargs else self.defaults[position - required])
        values = [self._coded(name, value) for name, value in zip(names, values, strict=True)]
        self.check(*values)
        return tuple(values)

    def _coded(self, name: str, value: Any) -> Any:
        """A user's word as the op's int; what is no such word stays, for `check` to judge."""
        if name in self.spelled and (value is None or isinstance(value, str)):
            return self.spelled[name].get(value, value)
        return value

    def call(self, tensors: tuple[torch.Tensor | None, ...], args: Arguments) -> Any:
        """Run by the shortest safe way; `tensors` are the tensors among `args`.

        `is_direct`, `needs_grad` and `run` in one: this is what every eager call pays for.
        """
        may_grad, grad = is_grad_enabled(), False
        for tensor in tensors:
            if tensor is not None:
                if type(tensor) not in PLAIN:
                    return self.dispatch(*args)
                if may_grad and not grad:
                    grad = tensor.requires_grad
        if not is_quiet():
            return self.dispatch(*args)
        if grad:
            return self._function.apply(*args)
        try:
            plan = self._plans.get(self._key(*args))
        except (AttributeError, RuntimeError, TypeError):
            plan = None  # run() says what is wrong
        if plan is None:
            return self.run(*args)
        try:
            return plan(*args)
        except MEMORY_ERRORS as error:
            if not is_lack(error):
                raise
            raise self._lack(error, args) from error

    def call_in_backward(self, tensors: tuple[torch.Tensor | None, ...], args: Arguments) -> Any:
        """As `call`, for what autograd calls: a compiler may be tracing that."""
        if is_direct(*tensors) and not needs_grad(*tensors):
            return self.run(*args)
        return self.dispatch(*args)

    def dispatch(self, *args: Any) -> Any:
        """Run as the torch op, or where that cannot be, as the reference."""
        if torch.compiler.is_compiling():
            return self.traced(*args)
        if is_transformed():
            self.check(*args)
            return self._transformed(args)
        try:
            return self.overload(*args)
        except RuntimeError:
            self.check(*args)  # what the schema refuses, in our words
            raise

    def traced(self, *args: Any) -> Any:
        """One node of a compiler's graph; where torch.func differentiates, the reference."""
        if not is_differentiated_in_trace():
            return self.overload(*args)
        self.check(*args)
        return self._transformed(args)

    def _transformed(self, args: Arguments) -> Any:
        """The reference, which transforms can look into, under autocast as the op would run."""
        if _asked_to_be_invariant():
            raise VariantUnavailable(
                f"{self.name}: under a torch.func transform all rows are computed at once by plain "
                f"PyTorch, which is not batch-invariant as asked for; call it outside of one"
            )
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return self.reference(*args)
        if self.autocast is not None and f"Autocast{device.upper()}" in self.autocast_keys:
            args = self.autocast(*args)
        with torch.autocast(device, enabled=False):
            return self.reference(*args)

    def run(self, *args: Any) -> Any:
        """Choose a variant (or remember the choice) and run it: real tensors, no autograd."""
        try:
            key = self._key(*args)
            plan = self._plans.get(key)
        except (AttributeError, RuntimeError, TypeError):
            self.check(*args)  # not a tensor, no dense one, or not hashable: says which argument
            if _any_lazy(args):
                return self.overload(*args)  # a wrapper, which torch unwraps
            raise
        try:
            if plan is None:
                plan = self._plan(key, args)
            return plan(*args)
        except MEMORY_ERRORS as error:
            if not is_lack(error):
                raise
            raise self._lack(error, args) from error

    def _lack(self, error: Exception, args: Arguments) -> Exception:
        """The error for a call that lacked memory: which, and by which variant."""
        who = self.name
        with suppress(Exception):  # nothing here may hide the error itself
            problem = self.problem(*args)
            choices = ranked(self.name, self.variants, problem)
            built = (one.variant for one in choices if failure_of(problem, one.variant) is None)
            who = f"{who}: variant {next(built).name} for {problem.key(problem.rows)}"
        return lack(who, error)

    def forget_plans(self) -> None:
        """Make every choice anew: after settings or tables have changed."""
        self._plans = {}

    def _plan(self, key: Hashable, args: Arguments) -> Plan:
        plans = self._plans  # those of now: what is forgotten meanwhile is not brought back
        self.check(*args)
        if _any_lazy(args):
            plan: Plan = self.dispatch  # resolves the tensors, then calls `run` again
        else:
            check_memory(self.name, self._names, args)
            problem = self.problem(*args)
            record(self.name, problem, args)
            first_sight(self.name, self.variants, problem, args, self.written)
            _, plan = resolve(self.name, self.variants, problem)
        if self.written:
            plan = writing_plan(plan, self.check, args, self.written)
        if len(plans) >= PLANS_KEPT:
            plans.clear()
        plans[key] = plan
        return plan

    def _define(self) -> None:
        LIBRARY.define(f"{self.name}{self.schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self._argument_count = len(self.overload._schema.arguments)

        refuse = partial(refuse_tangents, self.name)

        def implementation(*args: Any) -> Any:
            refuse(args)
            return self.run(*self._completed(args))

        def fake(*args: Any) -> Any:
            teach_dtensor()
            values = self._completed(args)
            self.check(*values)
            return self.outputs(*values)

        LIBRARY.impl(self.name, implementation, "CompositeExplicitAutograd")

        written_views.define(LIBRARY, self.name, self.overload)
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", fake, lib=LIBRARY)
        if self.gradient is not None:
            gradient = _remembering_use(self.gradient)
            torch.library.register_autograd(
                f"{NAMESPACE}::{self.name}",
                gradient.backward,
                setup_context=lambda ctx, inputs, output: gradient.save(ctx, inputs, output),
                lib=LIBRARY,
            )
            self._function = _function(self.name, self.run, gradient)
        else:
            self._function = refusal = Refusal(self.name, self.instead)
            differentiated = refusal.differentiated
            define_autograd(LIBRARY, self.overload, implementation, differentiated, refuse)
        self._key = key_function(self.overload._schema)
        if self.autocast is not None:
            for key in self.autocast_keys:
                self._define_autocast(self.autocast, key)

    def _define_autocast(self, adapt: Callable[..., Arguments], key: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def autocast(*args: Any) -> Any:
            values = adapt(*self._completed(args))
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return self.overload(*values)

        LIBRARY.impl(self.name, autocast, key)

    def _completed(self, args: Arguments) -> Arguments:
        """The dispatcher leaves out trailing arguments that equal their defaults."""
        missing = self._argument_count - len(args)
        return args + self.defaults[len(self.defaults) - missing :] if missing else args


@constant_in_trace
def _asked_to_be_invariant() -> bool:
    """As it is when a compiler traces this: it cannot read a context variable, nor guard by it."""
    return is_batch_invariant()


def teach_dtensor() -> None:
    """Give DTensor the rules by which our ops are sharded, once there is a DTensor to see them.

    For fakes: DTensor asks an op's fake for the shapes of the results before it looks for the op's
    rule, in eager mode and under a compiler alike. Neither our import has to import it then, which
    takes 0.7 s, nor does any call on plain tensors pay for it.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    try:
        import_module("gristmill.integrations.dtensor")
    except (ImportError, AttributeError) as error:
        # A torch whose DTensor is another: plain tensors, for which fakes run too, go on without.
        warn_once(
            "dtensor rules",
            f"this torch ({torch.__version__}) has a DTensor that gristmill does not know, and its "
            f"ops have no sharding rules: {type(error).__name__}: {error}",
        )


def _any_lazy(args: Arguments) -> bool:
    return any(isinstance(arg, torch.Tensor) and is_lazy(arg) for arg in args)


def _remembering_use(gradient: Gradient) -> Gradient:
    """`gradient` under the overrides (`gristmill.use`) that were in force in its forward pass."""

    def save(ctx: Any, inputs: Arguments, output: Any) -> None:
        ctx.overrides = token()
        gradient.save(ctx, inputs, output)

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if ctx.overrides is None:
            return gradient.backward(ctx, *gradients)
        with restored(ctx.overrides):
            return gradient.backward(ctx, *gradients)

    return Gradient(save, backward)


def _function(name: str, run: Plan, gradient: Gradient) -> Any:
    """The thin autograd function of the direct way: it calls the op's plan, not the dispatcher.

    Single-level, because no functorch transform is active there: `torch.autograd.Function` would
    look for one at every call, for 2 us.
    """

    class Function(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = run(*args)
            gradient.save(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradient.backward(ctx, *gradients)

        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
            return (ctx._autograd_function_id,)  # as torch.autograd.Function has it

    # The name of the second is what `grad_fn` shows and what anomaly detection finds fault with.
    Function.__name__ = Function.__qualname__ = f"gristmill_{name}"
    node = Function._backward_cls
    node.__name__ = node.__qualname__ = f"gristmill_{name}Backward"
    return Function


def no_second_gradient(name: str, instead: str) -> Gradient:
    """For a backward op: saves nothing, and says so when it is differentiated."""

    def save(ctx: Any, inputs: Arguments, output: Any) -> None:
        del ctx, inputs, output

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        del ctx, gradients
        raise DoubleBackwardError(
            f"{name}: this gradient has no gradient of its own; use {instead} where you need "
            f"double backward (create_graph=True)"
        )

    return Gradient(save, backward)
