"""`gristmill.MultiKernel`: the chooser for a user's own functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.log import warn_once
from gristmill.multikernel import checks, registered, sight, tuned
from gristmill.multikernel.attempts import remember_failures, run_first
from gristmill.multikernel.fingerprint import fingerprint
from gristmill.multikernel.gradients import Gradient
from gristmill.multikernel.live import enlist
from gristmill.multikernel.problem import (
    CallProblem,
    Details,
    Leaf,
    default_size,
    describe_call,
    leaves,
    mixed_layouts,
    tensors_of,
)
from gristmill.multikernel.routes import Route, kind_of, write_route
from gristmill.multikernel.variant import UserKernel
from gristmill.ops.autograd import version_incrementer
from gristmill.ops.direct import (
    PLAIN,
    is_differentiated_in_trace,
    is_grad_enabled,
    is_quiet,
    is_transformed,
    needs_grad,
)
from gristmill.ops.op import PLANS_KEPT
from gristmill.ops.plan_key import are_deterministic, may_be_lazy
from gristmill.select.explain import Explanation, explain_problem
from gristmill.select.overrides import is_batch_invariant, token, use
from gristmill.select.tuning import Outcome

Function = Callable[..., Any]

# What comes of looking for a plan that is not there, or for a call whose metadata cannot be read.
_NO_PLAN = (KeyError, AttributeError, RuntimeError, TypeError)

_is_traced = torch.compiler.is_dynamo_compiling


class MultiKernel:
    """Several functions that compute the same, and the right one run for every shape.

    An instance is called as its functions are. For each new kind of call it decides which of them
    runs, in this order: forced by name (`use`), measured (`tune`), else the first of `kernels` that
    runs this call. Nothing is timed unless asked for.

    Args:
        name: an identifier; `gristmill.use` and GRISTMILL_USE know it by this.
        kernels: the functions by name, in order of preference. They have one signature; arguments
            may be tensors, lists and dicts of tensors, and values. One that raises where another
            runs is not possible for that call.
        hints: the sizes at which they are tuned; a size belongs to the nearest, in log space.
        key: ``key(*args, **kwargs)`` gives the size: an int, or a tuple of it and of all else that
            a choice depends on besides dtypes, devices and layouts. By default the size is the
            first dim of the first tensor, and every other dim and value counts.
        mutates: names or positions of the arguments that are written to; `schema` must agree.
        schema, fake: with these it is also a torch op, ``torch.ops.gristmill_user.<name>``, and can
            be part of a compiled graph. `fake` gives empty tensors like the result.
        version: any string. What was measured with another one, or with functions that have changed
            since, is not believed.
        supports: predicates by kernel, called as the kernels are: None or True where it can run
            the call, else False or the reason why not.
        batch_invariant: the kernels whose rows do not depend on the batch: only these run under
            ``gristmill.batch_invariant()``.
    """

    def __init__(
        self,
        name: str,
        kernels: Mapping[str, Function],
        hints: Sequence[int] | None = None,
        key: Function | None = None,
        mutates: Iterable[str | int] | None = None,
        schema: str | None = None,
        fake: Function | None = None,
        version: str | None = None,
        *,
        supports: Mapping[str, Function] | None = None,
        batch_invariant: Iterable[str] = (),
    ) -> None:
        self.name = checks.checked_name(name)
        self.kernels = checks.checked_kernels(name, kernels)
        self.hints = checks.checked_hints(name, hints)
        checks.check_key(name, key)
        checks.check_version(name, version)
        self._user_key, self._version = key, version
        self._fingerprint: str | None = None
        self.signature = checks.signature_of(self.kernels)
        self._supports = checks.checked_supports(name, supports, self.kernels)
        invariant = checks.checked_names(name, "batch_invariant", batch_invariant, self.kernels)
        self.variants = tuple(
            UserKernel(one, function, self, batch_invariant=one in invariant)
            for one, function in self.kernels.items()
        )
        # A torch op is left behind for ever, so it is made last of all that can fail.
        self.mutates = tuple(checks.checked_mutates(name, mutates, self.signature))
        self.fake = fake
        self.gradient: Gradient | None = None
        self.op: Any = None
        positional: list[str] | None = None  # of the schema
        if schema is not None:
            given = None if mutates is None else self.mutates
            parsed = registered.checked_schema(name, schema, fake, given, self.kernels)
            self.mutates = tuple(registered.written_by(parsed))
            positional = [one.name for one in parsed.arguments if not one.kwarg_only]
            self.op = registered.define(name, parsed)
        elif fake is not None:
            raise ArgumentError(f"MultiKernel {name!r}: fake is given without schema; give both")
        # A kernel that is launched by address does not increment versions itself.
        self._increment = None
        if self.mutates:
            places = checks.places_of(self.mutates, positional, self.signature)
            self._increment = version_incrementer(*places)
        self._plans: dict[Hashable, Function] = {}
        # The route of the last call with so many positional arguments and these keywords.
        self._routes: dict[Hashable, Route] = {}
        self._routes_by_kind: dict[Hashable, Route] = {}
        enlist(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel that is chosen for these arguments."""
        if _is_traced():
            return self._traced(args, kwargs)
        if self.op is not None and self._is_op(args, kwargs):
            return self.op(*args, **kwargs)
        if kwargs:
            return self.run(*args, **kwargs)
        if self._increment is not None:
            self._increment(args, kwargs)
        try:
            function = self._plans[self._routes[len(args)](*args)]
        except _NO_PLAN:
            function = self.run  # below, so that no error of a kernel has this one for its context
        return function(*args)

    @property
    def table_name(self) -> str:
        """What rows of tables are named by: never what an op is called."""
        return f"multikernel/{self.name}"

    @property
    def fingerprint(self) -> str:
        """Of the functions and the version: a row with another one is stale."""
        # Not a cached_property: before Python 3.12 that has a lock, which a fork may copy held.
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.kernels, self._version)
        return self._fingerprint

    def use(self, kernel: str) -> AbstractContextManager[None]:
        """Run `kernel` and no other inside the ``with`` block, as ``gristmill.use``."""
        return use(self.name, kernel)

    def tune(self, *args: Any, **kwargs: Any) -> Outcome | None:
        """Time the kernels on these arguments, and keep the winner for all sizes of their hint.

        They run on copies: nothing is written to, no random number is drawn. Also where a row is
        there already. Gives what was measured; None where another rank has measured it.
        """
        return tuned.tune(self, args, kwargs)

    def tune_at_hints(self, make: Function, hints: Sequence[int] | None = None) -> list[Outcome]:
        """Tune at each hint (or at those of `hints`), on the arguments that `make(size)` gives.

        `make` gives a tuple of positional arguments, a dict of keywords, or one tensor.
        """
        return tuned.tune_at_hints(self, make, hints)

    def tune_recorded(
        self, path: str | Path, device: torch.device | str | None = None
    ) -> list[Outcome]:
        """Tune the calls of this MultiKernel that a run has written to `path` (GRISTMILL_RECORD).

        On random arguments of the same shapes, on `device` (default: the GPU if there is one).
        """
        return tuned.tune_recorded(self, Path(path), device)

    def save(self, path: str | Path, device: torch.device | str | None = None) -> int:
        """Write what was measured of this MultiKernel to a table of its own; gives how many rows.

        The user's table has it already. This is for taking it elsewhere.
        """
        return tuned.save(self, Path(path), device)

    def load(self, path: str | Path, device: torch.device | str | None = None) -> int:
        """Let the rows of a saved table take part in this process; gives how many there are."""
        return tuned.load(self, Path(path), device)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Which kernel a call with these arguments would run, and why; nothing runs."""
        problem = self.problem(*args, **kwargs)
        return explain_problem(
            self.name, self.variants, problem, tune_command="tune(*args) of this MultiKernel"
        )

    def register_autograd(
        self, backward: Function, *, setup_context: Function | None = None
    ) -> None:
        """Register the gradient of the torch op, as ``torch.library.register_autograd`` does.

        It is used in eager mode as well. Without it autograd differentiates the functions
        themselves in eager mode, and the torch op has no gradient.

        If the schema writes to arguments, the gradient is that of the functional form of the op,
        which takes the old values of the written arguments and returns the results, followed by
        the new values in the order of the schema.

        Args:
            backward: ``backward(ctx, *gradients)`` takes a gradient for each result and each new
                value. It returns a gradient or None for each argument; for a written argument, the
                gradient of its old value. Those of keyword-only arguments come last, and may be
                omitted if none of these is a tensor. The gradient of a list of tensors is a list.
            setup_context: ``setup_context(ctx, inputs, output)`` saves what ``backward`` needs.
                ``inputs`` are the positional arguments, with their old values. ``output`` is what
                the op returns or, if the schema writes, a tuple of the results and the new values.
                Call ``ctx.mark_non_differentiable`` for new values without a gradient, such as
                running statistics. Keyword-only arguments are passed as ``keyword_only_inputs``,
                a dict.
        """
        where = f"MultiKernel {self.name!r}: register_autograd"
        if self.op is None:
            raise ArgumentError(f"{where} needs a torch op; give MultiKernel a schema and a fake")
        given = {"backward": backward} | ({"setup_context": setup_context} if setup_context else {})
        for name, function in given.items():
            if not callable(function):
                raise DtypeError(f"{where}: {name} must be callable, got {type(function).__name__}")
        self.gradient = Gradient(backward, setup_context)

    def forget_plans(self) -> None:
        """Make every choice anew: after settings or tables have changed."""
        self._plans = {}

    def forget_failures(self) -> None:
        """Try again what has failed."""
        for kernel in self.variants:
            kernel.forget_failures()
        self.forget_plans()

    def problem(self, *args: Any, **kwargs: Any) -> CallProblem:
        """What the choice of a kernel for this call depends on."""
        return self._problem(leaves(self.named(args, kwargs)), args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Choose (or remember the choice) and run it, never as the torch op."""
        if self._increment is not None:
            self._increment(args, kwargs)
        function: Function | None
        try:
            function = self._plans[self._routes[_shape(args, kwargs)](*args, **kwargs)]
        except _NO_PLAN:
            function = None
        if function is None:
            key = self._key(args, kwargs)
            function = self._plans.get(key)
            if function is None:
                return self._first_call(key, args, kwargs)
        return function(*args, **kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In a graph a torch op stands for it, which chooses when it runs."""
        if self.op is not None:
            if is_differentiated_in_trace():  # torch.func differentiates the function, not the op
                return next(iter(self.kernels.values()))(*args, **kwargs)
            return self.op(*args, **kwargs)
        from gristmill.multikernel.outside import call

        return call(self, args, kwargs)

    def _is_op(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the torch op must run: a mode is active, a tensor is lazy or of a subclass, or
        an argument requires a gradient that was registered.

        One loop over the tensors, because every eager call pays for it.
        """
        if is_transformed():  # torch ops in Python know no transforms, functions of torch ops do
            return False
        values = (*args, *kwargs.values()) if kwargs else args
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for value in values:
            if isinstance(value, (list, tuple)):
                tensors += [item for item in value if isinstance(item, torch.Tensor)]
        may_grad, unusual = is_grad_enabled(), False
        for tensor in tensors:
            if may_grad and tensor.requires_grad:
                return self.gradient is not None
            # The dispatcher resolves lazy tensors, and writes go through the view.
            unusual = unusual or type(tensor) not in PLAIN or may_be_lazy(tensor)
        return unusual or not is_quiet()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What a plan is found by: metadata, or where that does not tell all, the problem."""
        kind = kind_of(args, kwargs)
        try:
            route = self._routes_by_kind.get(kind)
            if route is None:
                route = write_route(args, kwargs, self._user_key)
                for routes in (self._routes, self._routes_by_kind):
                    if len(routes) >= PLANS_KEPT:
                        routes.clear()
                self._routes_by_kind[kind] = route
            key = route(*args, **kwargs)
            hash(key)
        except _NO_PLAN:
            route = None
        if route is None:
            problem = self.problem(*args, **kwargs)
            return (token(), problem.layout.grad, problem)
        self._routes[_shape(args, kwargs)] = route
        return key

    def _first_call(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plans = self._plans  # those of now: what is forgotten meanwhile is not brought back
        found = leaves(self.named(args, kwargs))
        problem = self._problem(found, args, kwargs)
        sight.note(problem, self._bound(args, kwargs))
        self._warn_of_mixed_layouts(found)
        if sum(kernel.supports(problem) is None for kernel in self.variants) > 1:
            self.see(problem, found, args, kwargs)
        function, result = run_first(self.name, self.variants, problem, found, args, kwargs)
        if function is not None:
            if len(plans) >= PLANS_KEPT:
                plans.clear()
            plans[key] = function
        return result

    def see(
        self,
        problem: CallProblem,
        found: Sequence[Leaf],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Tune the problem if that is asked for, and learn from it what cannot run."""
        sight.see(self.name, self.variants, problem, found, args, kwargs)
        failed = problem.layout.failed
        if len(failed) < len(self.variants):
            remember_failures(self.variants, problem, failed)

    def _problem(
        self, found: Sequence[Leaf], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> CallProblem:
        size, words = self._size(found, args, kwargs)
        refusals = {}
        for name, predicate in self._supports.items():
            reason = checks.refusal(self.name, name, predicate(*args, **kwargs))
            if reason is not None:
                refusals[name] = reason
        problem = describe_call(
            self.table_name,
            found,
            size,
            self.hints,
            words=words,
            any_dim=self._user_key is not None,
            details=Details(refusals, grad=needs_grad(*(one for _, one in tensors_of(found)))),
        )
        deterministic, invariant = are_deterministic(), is_batch_invariant()
        if deterministic or invariant:
            problem = replace(problem, deterministic=deterministic, batch_invariant=invariant)
        return problem

    def _size(
        self, found: Sequence[Leaf], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, tuple[Any, ...] | None]:
        if self._user_key is not None:
            return checks.checked_size(self.name, self._user_key(*args, **kwargs))
        size = default_size(found)
        if size is None:
            checks.check_call(self.name, self.signature, args, kwargs)
            raise ArgumentError(
                f"MultiKernel {self.name!r}: the size is the first dim of the first tensor, but "
                f"there is no tensor among the arguments; give MultiKernel a key= that tells it"
            )
        return size, None

    def _bound(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments | None:
        """The arguments by name, with defaults; None where no signature tells."""
        if self.signature is None:
            return None
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:
            return None  # the kernels will say what is wrong
        bound.apply_defaults()
        return bound

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call by name, by position where no signature tells."""
        bound = self._bound(args, kwargs)
        if bound is not None:
            return bound.arguments
        return {**{str(at): value for at, value in enumerate(args)}, **kwargs}

    def _warn_of_mixed_layouts(self, found: Sequence[Leaf]) -> None:
        """Kernels that are equal on equal layouts seldom are on mixed ones, and copies may hide."""
        mixed = mixed_layouts(found) if len(self.variants) > 1 else None
        if mixed is not None:
            warn_once(
                f"multikernel {self.name} layouts {mixed}",
                f"MultiKernel {self.name!r}: tensors of one call lie in memory in different ways: "
                f"{mixed}. The kernels are chosen for this mixture alone; give all of them one "
                f"memory format if you can",
            )

    def __repr__(self) -> str:
        hints = ", ".join(map(str, self.hints))
        return f"<MultiKernel {self.name}: {', '.join(self.kernels)}; hints {hints}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiKernel:
        """Itself, as a function is: a copied model goes on with what is known."""
        return self


def _shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What tells apart the calls that one route can be asked about."""
    return (len(args), *kwargs) if kwargs else len(args)
