"""Whether tensors overlap in memory: exact for strided tensors, up to a limit on steps.

Two elements share memory if a bounded sum of strides equals the distance between the tensors.
Contiguous dims are merged first, which leaves one or two dims of a usual layout, and the sum over
the last two is solved by a congruence. Interleaved slices of one buffer do not overlap, although
their address ranges do. A layout that takes more steps counts as overlapping, which happens for
some with five or more dims of unrelated strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from gristmill.ops.autograd import increment_versions

# The number of valid distances that a plan remembers.
_SEEN = 256

# The number of partial sums that are tried, which takes some tenths of a second.
_STEPS = 100_000

# A stride, and how often it may be taken at least and at most.
Term = tuple[int, int, int]


class Extent(NamedTuple):
    """The layout of a tensor in bytes, without its address."""

    element: int
    dims: tuple[tuple[int, int], ...]  # (size, stride in bytes)
    span: int  # from the first byte to past the last; 0 for a tensor without elements


def extent_of(tensor: torch.Tensor) -> Extent:
    return _extent(tensor.element_size(), tensor.shape, tensor.stride())


def _extent(element: int, shape: Sequence[int], strides: Sequence[int]) -> Extent:
    if 0 in shape:
        return Extent(element, (), 0)
    dims = tuple(
        (size, stride * element) for size, stride in zip(shape, strides, strict=True) if size > 1
    )
    return Extent(element, dims, element + sum((size - 1) * stride for size, stride in dims))


@lru_cache(1024)
def overlaps_itself(extent: Extent) -> bool:
    """Whether two elements of one tensor share memory."""
    reach = 0
    for size, stride in sorted(extent.dims, key=lambda dim: dim[1]):
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False  # each stride is longer than all within it
    for at, (size, stride) in enumerate(extent.dims):
        others = [(step, 1 - count, count - 1) for count, step in extent.dims[at + 1 :]]
        if _is_sum(0, [(stride, 1, size - 1), *others]):
            return True
    return False


@lru_cache(1024)
def overlap(one: Extent, other: Extent, distance: int) -> bool:
    """Whether two tensors share memory if the second begins `distance` bytes after the first."""
    if not (one.span and other.span and -other.span < distance < one.span):
        return False
    terms = [(stride, 0, size - 1) for size, stride in one.dims]
    terms += [(stride, 1 - size, 0) for size, stride in other.dims]
    within = (1, 1 - other.element, one.element - 1)  # a byte of an element of each
    return _is_sum(distance, [*terms, within])


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory; False if its layout is not known."""
    layout = _layout(tensor)
    return layout is not None and overlaps_itself(layout[0])


def are_overlapping(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory; False if that is not known, as for some subclasses."""
    layout, its = _layout(one), _layout(other)
    if layout is None or its is None or layout[1] != its[1]:
        return False
    return overlap(layout[0], its[0], its[2] - layout[2])


def _layout(tensor: torch.Tensor) -> tuple[Extent, Any, int] | None:
    """The extent of a tensor and its location: a device and an address or, for tensors without an
    address, a storage and an offset. None if that is not known.

    Symbolic sizes count with their hints, without a guard: the op checks again when it runs.
    """
    shape, strides = [*map(_number, tensor.shape)], [*map(_number, tensor.stride())]
    if None in shape or None in strides:
        return None
    extent = _extent(tensor.element_size(), shape, strides)
    if _has_address(tensor):
        return extent, tensor.device, tensor.data_ptr()
    offset = _number(tensor.storage_offset())
    try:
        storage = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return None if offset is None else (extent, storage, offset * extent.element)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _has_address(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper
        return False


def _is_sum(total: int, terms: Sequence[Term]) -> bool:
    """Whether `total` is a sum of strides, each taken as often as its term allows."""
    counts: dict[int, int] = {}
    for stride, least, most in terms:
        total -= stride * least
        if stride:
            counts[stride] = counts.get(stride, 0) + most - least
    merged: list[tuple[int, int]] = []  # all multiples of a stride, up to so many
    for stride, count in sorted(counts.items()):
        if merged and stride % merged[-1][0] == 0 and stride // merged[-1][0] <= merged[-1][1] + 1:
            finer, many = merged[-1]
            merged[-1] = (finer, many + stride // finer * count)
        elif count:
            merged.append((stride, count))
    return _reaches(total, tuple(merged), iter(range(_STEPS)))


def _reaches(total: int, terms: tuple[tuple[int, int], ...], steps: Iterator[int]) -> bool:
    """`_is_sum` for terms that may be taken zero times, sorted by stride; True if steps run out."""
    if next(steps, None) is None:
        return True
    if not terms:
        return total == 0
    *finer, (stride, count) = terms
    reach = sum(step * many for step, many in finer)
    if not 0 <= total <= reach + stride * count:
        return False
    step = gcd(*(one for one, _ in finer))  # 0 where this is the last
    if not step:
        return total % stride == 0
    common = gcd(step, stride)
    if total % common:
        return False
    # total - n * stride must be a multiple of `step`, from 0 to `reach`.
    every = step // common
    first = total // common * pow(stride // common, -1, every) % every
    least, most = max(0, -((reach - total) // stride)), min(count, total // stride)
    first += max(0, -((first - least) // every)) * every
    numbers = range(first, most + 1, every)
    return any(_reaches(total - n * stride, tuple(finer), steps) for n in numbers)


def writing_plan(
    plan: Callable[..., Any],
    check: Callable[..., None],
    args: tuple[Any, ...],
    written: tuple[int, ...],
) -> Callable[..., Any]:
    """`plan` for an op that writes to the arguments `written`: each call checks them for overlap,
    then gives them new versions.

    The key of a plan has no addresses, so each call compares them, and runs `check` where address
    ranges intersect in a way that it has not yet seen. Generated code, because every call pays.
    """
    tensors = {at: extent_of(arg) for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    pairs = [(one, two) for two in tensors for one in tensors if one < two]
    pairs = [(one, two) for one, two in pairs if one in written or two in written]
    intersecting: list[str] = []
    known: set[int] = set()
    for one, two in pairs:
        intersecting.append(
            f"{-tensors[two].span} < {_address(two, known)} - {_address(one, known)} "
            f"< {tensors[one].span}"
        )
    seen: set[tuple[int, ...]] = set()

    def check_distances(*args: Any) -> None:
        places = [args[at].data_ptr() for at in tensors]
        distances = tuple(place - places[0] for place in places)
        if distances not in seen:
            check(*args)
            if all(_has_address(args[at]) for at in tensors):  # else addresses identify nothing
                if len(seen) >= _SEEN:
                    seen.clear()
                seen.add(distances)

    names = ", ".join(f"tensor_{at}" for at in range(len(args)))
    overwritten = ", ".join(f"tensor_{at}" for at in written)
    steps = [f"({' or '.join(intersecting)}) and check_distances({names})"] if intersecting else []
    steps += [f"increment(({overwritten},))", f"plan({names})"]
    names_here = {"check_distances": check_distances, "increment": increment_versions, "plan": plan}
    found: Callable[..., Any] = eval(f"lambda {names}: {' or '.join(steps)}", names_here)
    return found


def _address(at: int, known: set[int]) -> str:
    """Code for the address of an argument; later uses read a variable."""
    if at in known:
        return f"at_{at}"
    known.add(at)
    return f"(at_{at} := tensor_{at}.data_ptr())"
