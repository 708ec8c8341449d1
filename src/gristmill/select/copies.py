"""Arguments copied for timing: enough of them that no call finds its own in the L2 cache.

What is timed may write to its arguments, so it is given copies, which alias each other exactly as
the originals do: an update in place, the same tensor passed twice, or two views of one buffer are
part of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Arguments = tuple[Any, ...]

# As many sets as tuning takes at most: a sample of 200 us seldom needs one twice.
_SETS_FOR_TUNING = 256


def rotation_count(bytes_per_set: int, l2_bytes: int, *, most: int = 1024) -> int:
    """How many copies of the arguments keep the calls from finding them in L2.

    Together at least five times L2 and 300 MB, and two copies or more unless one alone is larger
    than that. At most `most`: sets that small take so little time that a sample seldom needs one
    twice, and L2 is read over before the sample.
    """
    enough = max(5 * l2_bytes, 300_000_000)
    if bytes_per_set > enough:
        return 1
    return min(most, max(2, math.ceil(enough / max(1, bytes_per_set))))


def rotate(args: Sequence[Any], count: int) -> list[Arguments]:
    """`count` copies of `args`, each tensor with memory of its own.

    Strides, expanded dimensions, and the alignment of the first element stay as they are: kernels
    are chosen by them. The originals are not among the copies, so an op may write to them.
    """
    return [_copied(args) for _ in range(count)]


def sets_for_tuning(
    args: Sequence[Any], l2_bytes: int, *, written: Collection[int] | None = None
) -> list[Arguments]:
    """Sets of arguments to time candidates on; the originals are never written to.

    `written`: positions of the arguments that candidates write to; None: perhaps all. Where a
    single set is larger than any cache, or memory is short, what is only read is not copied.
    """
    tensors = {id(one): one for one in tensors_in(args)}
    size = sum(one.nbytes for one in tensors.values() if one.layout == torch.strided)
    count = rotation_count(size, l2_bytes, most=_SETS_FOR_TUNING) if l2_bytes else 1
    if count > 1:
        try:
            return rotate(args, count)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    if written is None:
        return rotate(args, 1)
    return [_partly_copied(args, written)]


def _partly_copied(args: Sequence[Any], written: Collection[int]) -> Arguments:
    """`args` with copies of those at `written`, and of all that overlap with them."""
    places = [_stretches(args[position]) for position in written]
    taken = [stretch for place in places for stretch in place]

    def touched(value: Any) -> bool:
        return any(a < d and c < b for a, b in _stretches(value) for c, d in taken)

    chosen = [at for at, value in enumerate(args) if at in written or touched(value)]
    copies = iter(_copied([args[position] for position in chosen]))
    return tuple(next(copies) if at in chosen else value for at, value in enumerate(args))


def _stretches(value: Any) -> list[tuple[int, int]]:
    return [_stretch(one) for one in tensors_in(value) if one.layout == torch.strided]


def _copied(args: Sequence[Any]) -> Arguments:
    """`args` with memory of their own, which they share among themselves as the originals do."""
    tensors = {id(one): one for one in tensors_in(args)}
    memories = _memories([one for one in tensors.values() if one.layout == torch.strided])
    copies = {key: _copied_tensor(one, memories) for key, one in tensors.items()}
    return tuple(_replaced(value, copies) for value in args)


def _replaced(value: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """`value` with the copies in the place of its tensors.

    No closure: one that calls itself would keep the copies until the next garbage collection.
    """
    if isinstance(value, torch.Tensor):
        return copies[id(value)]
    if isinstance(value, (tuple, list)):
        items = [_replaced(item, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments, also inside of lists, tuples and dicts; one passed twice, twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


# Finer than any allocator's own alignment, coarser than any vector load.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Memory:
    """A stretch of memory under one or more tensors, and a copy of it at the same alignment."""

    begin: int
    end: int
    copy: torch.Tensor


def _memories(tensors: Sequence[torch.Tensor]) -> list[_Memory]:
    """Copies of the memory under `tensors`: one where they overlap, so that the copies will too."""
    stretches: list[tuple[int, int, torch.Tensor]] = []
    for tensor in sorted(tensors, key=lambda one: one.data_ptr()):
        begin, end = _stretch(tensor)
        if begin == end:
            continue
        if stretches and begin < stretches[-1][1]:
            low, high, first = stretches[-1]
            stretches[-1] = (low, max(high, end), first)
        else:
            stretches.append((begin, end, tensor))
    return [_Memory(begin, end, _bytes(begin, end, first)) for begin, end, first in stretches]


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor spans."""
    if tensor.numel() == 0:
        return 0, 0
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * step for extent, step in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _bytes(begin: int, end: int, first: torch.Tensor) -> torch.Tensor:
    """A copy of [begin, end), which begins with the tensor `first`; one flat copy, gaps and all."""
    offset = begin % _ALIGNMENT
    memory = torch.empty(offset + end - begin, dtype=torch.uint8, device=first.device)
    whole = torch.empty(0, dtype=torch.uint8, device=first.device)
    start = first.storage_offset() * first.element_size()
    whole.set_(first.untyped_storage(), start, (end - begin,), (1,))
    memory[offset:].copy_(whole)
    return memory


def _copied_tensor(tensor: torch.Tensor, memories: Sequence[_Memory]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    address, size, stride = tensor.data_ptr(), tensor.size(), tensor.stride()
    memory = next(one for one in memories if one.begin <= address < one.end)
    offset = memory.begin % _ALIGNMENT + address - memory.begin
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(memory.copy.untyped_storage(), offset // tensor.element_size(), size, stride)
    return copy.requires_grad_(tensor.requires_grad)
