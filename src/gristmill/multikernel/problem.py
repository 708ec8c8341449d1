"""A call of a user's kernels as the chooser sees it.

Nothing is known of the kernels, so everything about the call is in the problem: for each tensor its
dtype, shape, device and layout, for each other argument its value. One number stands apart, the
size, which the hints of the MultiKernel are for.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from gristmill.ops.direct import PLAIN
from gristmill.select.device import device_of
from gristmill.select.problem import Problem, Sizes
from gristmill.select.tables import tables_for

# What is a value like any other; of everything else only the type counts. (A model that is passed
# as an argument must neither be compared nor kept alive.)
PLAIN_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

# A longer name (a list of all parameters of a model) becomes a hash: a row is a line of a table.
_LONGEST_NAME = 400

# Where more places have the size, it is taken to be no accident.
_MOST_PLACES = 4

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass
class Details:
    """What a plan needs beyond the problem: why kernels cannot run this call, as far as is known.

    `refusals`: what the user's predicates say. `failed`: what kernels raised while they were timed.
    `grad`: autograd looks on, so that a kernel which writes in place may be refused.
    """

    refusals: Mapping[str, str] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    grad: bool = False


@dataclass(frozen=True)
class CallProblem(Problem):
    """A problem whose `sizes` are the hints of the MultiKernel."""

    def is_known(self) -> bool:
        """Whether any table has a row of this family."""
        return any(source.table.family(self) for source in tables_for(self.device))


Leaf = tuple[str, Any]
# A dim of a tensor, or (None) the value of an int.
Place = tuple[str, int | None]


def leaves(arguments: Mapping[str, Any]) -> list[Leaf]:
    """Tensors and values among named arguments, also those in lists, tuples and dicts."""
    return [leaf for name, value in arguments.items() for leaf in _flat(name, value)]


def _flat(name: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{_printable(key)}", item)
    elif isinstance(value, (list, tuple)) and value:
        for position, item in enumerate(value):
            yield from _flat(f"{name}.{position}", item)
    else:
        yield name, value


def tensors_of(found: Sequence[Leaf]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


def device_for(found: Sequence[Leaf]) -> torch.device:
    """Where the kernels run: the first accelerator among the tensors, else the CPU."""
    devices = [tensor.device for _, tensor in tensors_of(found)]
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def default_size(found: Sequence[Leaf]) -> int | None:
    """The first dim of the first tensor that has one; None where there is no tensor."""
    shapes = [tensor.shape for _, tensor in tensors_of(found)]
    if not shapes:
        return None
    return next((int(shape[0]) for shape in shapes if shape), 1)


def describe_call(
    op: str,
    found: Sequence[Leaf],
    size: int,
    hints: tuple[int, ...],
    *,
    words: tuple[Any, ...] | None,
    any_dim: bool,
    details: Details,
) -> CallProblem:
    """The problem of one call; of the families that it may belong to, one that a table knows.

    A dim may have the size by accident: nobody can tell whether at size 4096 the first dim of a
    (4096, 4096) weight is the size. A table that knows other sizes can.
    """

    def described(sized: Collection[Place]) -> CallProblem:
        return _described(op, found, size, hints, words=words, sized=sized, details=details)

    places = sized_places(found, size, any_dim)
    usual = described(places)
    if words is None and not usual.is_known():
        for closed in _accidents(places, any_dim):
            problem = described([place for place in places if place not in closed])
            if problem.is_known():
                return problem
    return usual


def _accidents(places: Sequence[Place], any_dim: bool) -> Iterator[tuple[Place, ...]]:
    """Which places may have the size by accident: one or two. What it is taken from does not."""
    if not any_dim:
        source = next((place for place in places if place[1] is not None), None)
        places = [place for place in places if place != source]
    if len(places) <= _MOST_PLACES:
        for count in (1, 2):
            yield from combinations(places, count)


def _described(
    op: str,
    found: Sequence[Leaf],
    size: int,
    hints: tuple[int, ...],
    *,
    words: tuple[Any, ...] | None,
    sized: Collection[Place],
    details: Details,
) -> CallProblem:
    """The problem of one call.

    `words`: what the user says that a choice depends on, in the place of dims and values; None:
    all of them, but for the places of `sized`, which are left open.
    """
    device = device_for(found)
    flags: list[str] = [] if words is None else [f"key={','.join(map(_text, words))}"]
    dtypes: list[tuple[str, str]] = []
    for name, value in found:
        if isinstance(value, torch.Tensor):
            dtypes.append((name, str(value.dtype).removeprefix("torch.")))
            flags += [f"{name}:{word}" for word in layout_words(value)]
            if words is None:
                flags.append(f"{name}[{_shape(name, value, sized)}]")
            if value.device.type != device.type and value.dim():
                flags.append(f"{name}:{value.device.type}")
        elif words is None:
            flags.append(f"{name}={'*' if (name, None) in sized else _text(value)}")
    if sum(map(len, flags)) + sum(len(name) for name, _ in dtypes) > _LONGEST_NAME:
        text = repr((sorted(flags), dtypes))
        flags, dtypes = [f"call={hashlib.sha256(text.encode()).hexdigest()[:16]}"], []
    return CallProblem(
        op=op,
        rows=size,
        dims=(),
        dtypes=tuple(dtypes),
        flags=tuple(flags),
        device=device_of(device),
        layout=details,
        sizes=Sizes(hints),
    )


def sized_places(found: Sequence[Leaf], size: int, any_dim: bool) -> list[Place]:
    """Where the size is: in first dims of tensors (with `any_dim` in any), and in ints."""
    places: list[Place] = []
    for name, value in found:
        if isinstance(value, torch.Tensor):
            extents = value.shape if any_dim else value.shape[:1]
            places += [(name, at) for at, extent in enumerate(extents) if extent == size]
        elif type(value) is int and value == size:
            places.append((name, None))
    return places


def _shape(name: str, tensor: torch.Tensor, sized: Collection[Place]) -> str:
    """The dims, with `*` for those that are the size."""
    extents = enumerate(tensor.shape)
    return ",".join("*" if (name, at) in sized else str(extent) for at, extent in extents)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (*PLAIN_VALUES, tuple, list, dict)):
        return _printable(value)
    return _printable(f"<{type(value).__qualname__}>")


def _printable(value: Any) -> str:
    """`str(value)`, escaped if it has unprintable characters, which keys of tables may not have."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def layout_words(tensor: torch.Tensor) -> list[str]:
    """How a tensor lies in memory, where that is not the usual way."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return [str(tensor.layout).removeprefix("torch.")]
    words = []
    if not tensor.is_contiguous():
        memory_format = _MEMORY_FORMATS.get(tensor.dim())
        if memory_format is not None and tensor.is_contiguous(memory_format=memory_format):
            words.append("channels_last")
        else:
            words += _strided_words(tensor)
    if not _is_aligned(tensor):
        words.append("unaligned")
    return words


def _strided_words(tensor: torch.Tensor) -> list[str]:
    order = order_of_dims(tensor)
    words = [] if list(order) == sorted(order) else ["order" + ".".join(map(str, order))]
    pairs = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    if any(step == 0 and size > 1 for size, step in pairs):
        words.append("expanded")
    elif 1 + sum((size - 1) * step for size, step in pairs) != tensor.numel():
        words.append("gaps")
    return words


def order_of_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dims longer than 1, from the largest stride to the least."""
    long = [at for at, size in enumerate(tensor.shape) if size > 1]
    steps = tensor.stride()
    return tuple(sorted(long, key=lambda at: (-steps[at], at)))


def _is_aligned(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN:
        return True  # a fake tensor has no address
    try:
        return tensor.data_ptr() % 16 == 0
    except RuntimeError:
        return True  # nor has one of a transform


def mixed_layouts(found: Sequence[Leaf]) -> str | None:
    """In words, which tensors of four or more dims lie in memory in different orders of dims."""
    large = [
        (name, tensor)
        for name, tensor in tensors_of(found)
        if tensor.dim() >= 4 and tensor.layout == torch.strided and not tensor.is_nested
    ]
    for at, (name, tensor) in enumerate(large):
        for other_name, other in large[:at]:
            if tensor.dim() == other.dim() and not _agree(tensor, other):
                return f"{other_name} is {_lies(other)}, {name} is {_lies(tensor)}"
    return None


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the dims that are long in both come in the same order."""
    first, second = order_of_dims(one), order_of_dims(other)
    return [at for at in first if at in second] == [at for at in second if at in first]


def _lies(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    words = [word for word in layout_words(tensor) if word != "unaligned"]
    return " ".join(words) or "strided"
