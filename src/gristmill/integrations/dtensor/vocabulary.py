"""The words in which sharding rules are written: dims by name.

A rule names the dims of an op's tensors, says along which of these names tensors may be split over
a mesh, and what results are then. Everything else follows: a tensor that has the name is sharded
along that dim, one that has not is replicated, a result that was summed over it is partial. So

    Sharding({"x": "rows k", "weight": "n k"}, (Result("rows n", sums="k"),), along="rows n k")

is all there is to say about a matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# Any number of dims, counted from the last of them; "*rows" may lack some, or be of size 1 there,
# as torch broadcasts.
ROWS = "rows"
BROADCAST_ROWS = "*rows"

# A dim: its name and, for rows, how many of them follow.
Label = tuple[str, int]
# The placements of results and of arguments, None for an argument that is no tensor: what
# `register_sharding` takes, for one dim of a mesh.
Way = tuple[list[Placement | None], list[Placement | None]]

# The labels of each argument that is a tensor.
Named = Mapping[str, Sequence[Label | None] | None]


@dataclass(frozen=True)
class Split:
    """A dim over ranks: in one piece each, or in strides, of which each rank has a piece."""

    label: Label
    factor: Any

    def along(self, dim: int) -> Placement:
        return Shard(dim) if self.factor is None else _StridedShard(dim, split_factor=self.factor)


@dataclass(frozen=True)
class Result:
    """A result's dims, and what its elements were reduced over.

    Args:
        dims: the names of its dims; None for one that has no elements, which is the same on every
            rank, whatever is sharded.
        sums: names of dims, along which a sharded op gives every rank a part of the result.
        by: how parts become one: "sum" or "max".
    """

    dims: str | None
    sums: str = ""
    by: str = "sum"


NOTHING = Result(None)


@dataclass(frozen=True)
class Sharding:
    """How one call may be sharded.

    Args:
        inputs: the names of the dims of its tensors, by argument; one that is not here, or is here
            with "", has to be replicated.
        results: one for each result.
        along: the names along which tensors may be split; every result has to have each of them
            in its dims or in its sums.
        whole_rows: so many of the last dims of rows have to stay whole.
    """

    inputs: Mapping[str, str]
    results: tuple[Result, ...]
    along: str = ROWS
    whole_rows: int = 0

    def ways(self, call: Mapping[str, Any]) -> list[Way]:
        """What may lie where along one dim of a mesh; the first way has everything everywhere.

        `call` has the arguments by name, tensors as what DTensor knows of them.
        """
        sizes = _row_sizes(self.inputs, call)
        named = {
            name: _labels(self.inputs.get(name, ""), value.shape, sizes)
            if _is_tensor(value)
            else None
            for name, value in call.items()
        }
        splits = [
            Split(label, factor)
            for label in self._allowed(named)
            for factor in (None, *_split_factors(label, named, call))
        ]
        return [self._way(split, named, len(sizes)) for split in (None, *splits)]

    def _allowed(self, named: Named) -> list[Label]:
        """Every dim along which tensors may be split, in the order of the arguments."""
        words = self.along.split()
        found = dict.fromkeys(label for labels in named.values() if labels for label in labels)
        return [
            label
            for label in found
            if label is not None
            and label[0] in words
            and (label[0] != ROWS or label[1] >= self.whole_rows)
        ]

    def _way(self, split: Split | None, named: Named, rows: int) -> Way:
        inputs = [None if labels is None else _placed(split, labels) for labels in named.values()]
        return [_resulting(split, result, rows) for result in self.results], inputs


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "placements")


def _row_sizes(inputs: Mapping[str, str], call: Mapping[str, Any]) -> list[Any]:
    """The sizes of the row dims, the last one first; where one tensor has 1, those of another."""
    sizes: list[Any] = []
    for name, dims in inputs.items():
        words = dims.split()
        if not _is_tensor(call.get(name)) or not {ROWS, BROADCAST_ROWS} & set(words):
            continue
        shape = call[name].shape
        own = list(reversed(shape[: max(len(shape) - len(words) + 1, 0)]))
        for at, size in enumerate(own):
            if at == len(sizes):
                sizes.append(size)
            elif BROADCAST_ROWS in words and size != 1:
                sizes[at] = size
    return sizes


def _labels(dims: str, shape: Sequence[Any], sizes: Sequence[Any]) -> list[Label | None]:
    """The label of each dim of a tensor; None for a dim that is broadcast or has no name."""
    words = dims.split()
    if not words:
        return [None] * len(shape)
    labels: list[Label | None] = []
    for word in words:
        if word in (ROWS, BROADCAST_ROWS):
            many = max(len(shape) - len(words) + 1, 0)
            for at in reversed(range(many)):
                size = shape[many - 1 - at]
                broadcast = word == BROADCAST_ROWS and size == 1 and sizes[at] != 1
                labels.append(None if broadcast else (ROWS, at))
        else:
            labels.append((word, 0))
    return labels[-len(shape) :] if shape else []


def _split_factors(label: Label, named: Named, call: Mapping[str, Any]) -> list[Any]:
    """Those of the tensors that are sharded along this dim in strides.

    So lies what was sharded along the second of two dims once they are flattened, as they are for
    the gradient of a product. Strides are the same for all tensors only where their sizes are.
    """
    factors: dict[Any, None] = {}
    sizes = []
    for name, labels in named.items():
        if not labels or label not in labels:
            continue
        dim = labels.index(label)
        sizes.append(call[name].shape[dim])
        for placement in call[name].placements:
            if isinstance(placement, _StridedShard) and placement.dim == dim:
                factors[placement.split_factor] = None
    return list(factors) if factors and all(size == sizes[0] for size in sizes) else []


def _placed(split: Split | None, labels: Sequence[Label | None]) -> Placement:
    if split is None or split.label not in labels:
        return Replicate()
    return split.along(labels.index(split.label))


def _resulting(split: Split | None, result: Result, rows: int) -> Placement:
    if split is None or result.dims is None:
        return Replicate()
    labels: list[Label | None] = []
    for word in result.dims.split():
        many = [(ROWS, at) for at in reversed(range(rows))] if word == ROWS else [(word, 0)]
        labels.extend(many)
    if split.label in labels:
        return split.along(labels.index(split.label))
    if split.label[0] in result.sums.split():
        return Partial(result.by)
    raise ValueError(f"{result} says nothing about {split.label[0]!r}, which may be sharded")
