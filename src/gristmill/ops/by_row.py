"""Rows computed one at a time, so that no row's bits depend on its batch: slow, and exact.

torch promises no such thing of its own kernels: how a sum is split, or which loop does the last
columns, may change with the number of rows and with where they lie. But the same op on the same
values in a tensor of the same shape at an aligned address gives the same bits, so that is what
every row gets: a tensor of its own, contiguous and aligned, of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What a result is: "row" has the rows' leading dims and is put together from the rows' own results;
# "max" is the largest of theirs; "whole" mixes rows, so it comes from all of them at once.
Kinds = tuple[str, ...]


def each_alone(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    leading: Sequence[int],
) -> list[torch.Tensor]:
    """`function(index, *rows)` for each row, its results put together.

    `tensors` start with the dims `leading`, of which there is at least one row; a row of them has
    one dim of size 1 in the place of those, and so must each result of `function`.
    """
    count = torch.Size(leading).numel()
    lines = [
        None if tensor is None else tensor.reshape(count, *tensor.shape[len(leading) :])
        for tensor in tensors
    ]
    # The same memory for every row: aligned, as new tensors are.
    alone = [None if line is None else line.new_empty((1, *line.shape[1:])) for line in lines]
    results: list[torch.Tensor] = []
    for index in range(count):
        for row, line in zip(alone, lines, strict=True):
            if row is not None and line is not None:
                row.copy_(line[index : index + 1])
        found = function(index, *alone)
        if not results:
            results = [one.new_empty((count, *one.shape[1:])) for one in found]
        for result, one in zip(results, found, strict=True):
            result[index : index + 1].copy_(one)
    return [result.view((*leading, *result.shape[1:])) for result in results]


def by_row(
    function: Callable[..., Any],
    *,
    rows: Sequence[int],
    results: Kinds | Callable[..., Kinds] = ("row",),
    written: Sequence[int] = (),
) -> Callable[..., Any]:
    """`function`, with every row computed alone.

    `rows`: the positions of the arguments that hold rows, None where one may be absent. The first
    is ``(..., N)``; the others start with the same leading dims. `results`: the kind of each
    result, or a function of the arguments that tells. `written`: positions that an op that works in
    place writes to, in the place of results.
    """

    def run(*args: Any) -> Any:
        leading = args[rows[0]].shape[:-1]
        if not torch.Size(leading).numel():
            return function(*args)
        if written:
            return _in_place(function, args, rows, written, leading)
        kinds = results(*args) if callable(results) else results
        whole = _sequence(function(*args)) if "whole" in kinds else ()
        made = iter(
            each_alone(
                lambda _, *alone: [
                    one.view(1) if kind == "max" else one
                    for kind, one in zip(kinds, _call(function, args, rows, alone), strict=True)
                    if kind != "whole"
                ],
                [args[position] for position in rows],
                leading,
            )
        )
        found = [
            whole[place] if kind == "whole" else next(made) for place, kind in enumerate(kinds)
        ]
        found = [
            one.amax() if kind == "max" else one for kind, one in zip(kinds, found, strict=True)
        ]
        return found[0] if len(found) == 1 else tuple(found)

    return run


def _in_place(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rows: Sequence[int],
    written: Sequence[int],
    leading: Sequence[int],
) -> None:
    def alone(_: int, *own: torch.Tensor | None) -> list[Any]:
        _call(function, args, rows, own)
        return [own[list(rows).index(position)] for position in written]

    found = each_alone(alone, [args[position] for position in rows], leading)
    for position, result in zip(written, found, strict=True):
        args[position].copy_(result)


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rows: Sequence[int],
    alone: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The results of one row: `alone` are its tensors, in the order of `rows`."""
    own = dict(zip(rows, alone, strict=True))
    return _sequence(function(*(own.get(place, arg) for place, arg in enumerate(args))))


def _sequence(result: Any) -> tuple[torch.Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
