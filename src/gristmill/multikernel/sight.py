"""The first sight of a call: it is recorded if asked, and tuned if asked and possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.multikernel.problem import CallProblem, Leaf, tensors_of
from gristmill.multikernel.variant import UserKernel
from gristmill.ops.direct import PLAIN, is_transformed
from gristmill.select.record import record
from gristmill.select.sight import first_sight, region_here
from gristmill.settings import settings

# What a line of JSON can hold, besides tensors.
_RECORDED = (bool, int, float, str, type(None), torch.dtype)


def note(problem: CallProblem, bound: inspect.BoundArguments | None) -> None:
    """For GRISTMILL_RECORD: calls whose arguments are plain tensors and values."""
    if settings().record is None or bound is None:
        return
    values = tuple(bound.arguments.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    others = [value for value in values if not isinstance(value, torch.Tensor)]
    strided = all(type(one) in PLAIN and one.layout == torch.strided for one in tensors)
    if strided and all(isinstance(value, _RECORDED) for value in others):
        record(problem.op, problem, values)


def recorded_call(
    name: str, values: Sequence[Any], signature: inspect.Signature
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call from the values that `note` has written down."""
    if len(values) != len(signature.parameters):
        raise ArgumentError(
            f"MultiKernel {name!r}: a call was recorded with {len(values)} arguments, but the "
            f"kernels take {signature}; record it anew"
        )
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter, value in zip(signature.parameters.values(), values, strict=True):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def may_tune(found: Sequence[Leaf]) -> bool:
    """Whether what would be timed is what would run: real tensors, and nobody looks on."""
    if is_transformed() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(one) in PLAIN and one.device.type != "meta" for _, one in tensors_of(found))


def see(
    name: str,
    kernels: Sequence[UserKernel],
    problem: CallProblem,
    found: Sequence[Leaf],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Tune the problem if that is asked for; the arguments are copied, whoever writes to them."""
    if not may_tune(found):
        return
    tensors = tuple(tensor for _, tensor in tensors_of(found))
    given = (tensors, args, dict(kwargs))
    if settings().tune == "off" and region_here() is None:
        first_sight(name, kernels, problem, given)
        return
    modules = _modules([kernel.function for kernel in kernels], found)
    with kept_buffers(modules), _kept_generators(found):
        first_sight(name, kernels, problem, given, written=range(len(given)))


def _modules(
    functions: Iterable[Callable[..., Any]], found: Sequence[Leaf]
) -> list[torch.nn.Module]:
    """Modules among the kernels and their arguments: their buffers are nobody's arguments."""
    owners = [getattr(function, "__self__", function) for function in functions]
    values = [*owners, *(value for _, value in found)]
    return [value for value in values if isinstance(value, torch.nn.Module)]


@contextmanager
def kept_buffers(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Buffers (running statistics) are afterwards as they were before, also where a module has put
    another tensor in the place of one.
    """
    owners = {id(owner): owner for module in modules for owner in module.modules()}
    held = [(owner, dict(owner._buffers)) for owner in owners.values()]
    buffers = {id(one): one for _, those in held for one in those.values() if one is not None}
    saved = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        yield
    finally:
        for owner, those in held:
            owner._buffers.update(those)
        for buffer, values in saved:
            # Through `data`, which counts no write: for autograd nothing has changed.
            buffer.data.copy_(values)


@contextmanager
def _kept_generators(found: Sequence[Leaf]) -> Iterator[None]:
    """Generators among the arguments go on as if nothing had drawn from them."""
    generators = [value for _, value in found if isinstance(value, torch.Generator)]
    saved = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in saved:
            generator.set_state(state)
