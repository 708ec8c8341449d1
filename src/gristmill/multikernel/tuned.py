"""What a MultiKernel measures on request, and how that is taken elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError, TableError, VariantUnavailable
from gristmill.multikernel.problem import leaves, sized_places
from gristmill.multikernel.sight import may_tune, recorded_call
from gristmill.select.device import Device, device_of
from gristmill.select.overrides import active, is_batch_invariant, tuning
from gristmill.select.problem import Sizes
from gristmill.select.record import read_recording, rebuilt
from gristmill.select.sight import Region, close_region, is_capturing, open_region, spoken_for
from gristmill.select.table import Row, Table
from gristmill.select.tables import remember, tables_for
from gristmill.select.tuning import Outcome

if TYPE_CHECKING:
    from gristmill.multikernel.multikernel import MultiKernel


def tune(one: MultiKernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome | None:
    """See `MultiKernel.tune`. The error of the first choice is raised if no kernel runs."""
    problem = one.problem(*args, **kwargs)
    found = leaves(one.named(args, kwargs))
    _check(one, problem.device, may_tune(found))
    region = Region(again=True)
    number = open_region(region)
    try:
        with tuning(number):
            one.see(problem, found, args, kwargs)
    finally:
        close_region(number)
        one.forget_plans()
    if region.outcomes:
        return region.outcomes[0]
    if not spoken_for(problem, one.variants):
        for error in problem.layout.failed.values():
            raise error
        raise VariantUnavailable(
            f"MultiKernel {one.name!r}: {problem.key(problem.rows)} could not be tuned"
        )
    return None


def _check(one: MultiKernel, device: Device, possible: bool) -> None:
    where = f"MultiKernel {one.name!r}: tune"
    forced = active().get(one.name)
    if forced is not None:
        raise VariantUnavailable(f"{where}: {forced!r} is asked for by name, so there is no choice")
    if is_batch_invariant():
        raise VariantUnavailable(
            f"{where}: under batch_invariant() a choice asks no row that is measured; tune outside"
        )
    if is_capturing(device):
        raise VariantUnavailable(f"{where}: nothing can be timed while a CUDA graph is captured")
    if not possible:
        raise ArgumentError(
            f"{where} needs tensors that hold numbers, and no mode or transform around it"
        )


def tune_at_hints(
    one: MultiKernel, make: Callable[[int], Any], hints: Sequence[int] | None
) -> list[Outcome]:
    sizes = one.hints if hints is None else tuple(hints)
    outcomes: dict[int, Outcome | None] = {}
    # Where the fewest dims equal the size none does so by accident: these name the family.
    for hint in sorted(sizes, key=lambda hint: _places(one, make, hint)):
        args, kwargs = _arguments(one, make(hint), hint)
        outcomes[hint] = tune(one, args, kwargs)
    return [outcome for hint in sizes if (outcome := outcomes[hint]) is not None]


def _places(one: MultiKernel, make: Callable[[int], Any], hint: int) -> int:
    args, kwargs = _arguments(one, make(hint), hint)
    size = one.problem(*args, **kwargs).rows
    sizes = Sizes(one.hints)
    if sizes.stop(size) != sizes.stop(hint):
        raise ArgumentError(
            f"MultiKernel {one.name!r}: make({hint}) must give arguments of size {hint}, "
            f"got some of size {int(size)}"
        )
    return len(sized_places(leaves(one.named(args, kwargs)), size, any_dim=True))


def _arguments(one: MultiKernel, made: Any, hint: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(made, torch.Tensor):
        return (made,), {}
    if isinstance(made, dict):
        return (), made
    if isinstance(made, (tuple, list)):
        return tuple(made), {}
    raise ArgumentError(
        f"MultiKernel {one.name!r}: make({hint}) must give a tuple of arguments, a dict of them or "
        f"a tensor, got {type(made).__name__}"
    )


def tune_recorded(one: MultiKernel, path: Path, device: torch.device | str | None) -> list[Outcome]:
    where = _place(device)
    outcomes = []
    for recorded in read_recording(path):
        if recorded.op != one.table_name or one.signature is None:
            continue
        args, kwargs = recorded_call(one.name, rebuilt(recorded, where, {}), one.signature)
        outcome = tune(one, args, kwargs)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def save(one: MultiKernel, path: Path, device: torch.device | str | None) -> int:
    found = device_of(_place(device))
    table = Table.for_device(found)
    # From the last to the first: of two rows with one key, that of the first table counts.
    for source in reversed(tables_for(found)):
        for row in _own(one, source.table):
            table.put(row)
    table.save(path)
    return len(table.rows)


def load(one: MultiKernel, path: Path, device: torch.device | str | None) -> int:
    found, table = device_of(_place(device)), Table.load(path)
    if table.gpu != found.name:
        raise TableError(f"table {path}: is for {table.gpu!r}, not for {found.name!r}")
    rows = _own(one, table)
    remember(found, rows, keep=False)
    one.forget_plans()
    return len(rows)


def _own(one: MultiKernel, table: Table) -> list[Row]:
    return [row for row in list(table.rows.values()) if row.key.startswith(f"{one.table_name} ")]


def _place(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
