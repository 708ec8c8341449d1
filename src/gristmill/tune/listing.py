"""What tables hold, and which of their rows are still believed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.configs import config_from_json
from gristmill.select.device import Device
from gristmill.select.problem import Problem
from gristmill.select.table import Row, revive
from gristmill.select.tables import TableSource

_DTYPE = torch.dtype
_WORD = re.compile(r"(\w+)=(\w+)")


@dataclass(frozen=True)
class ListedRow:
    """A row of a table; `stale` is the reason why it is passed over, "" if it is not.

    Rows are judged without the call: whether variant and config exist, and whether the sources are
    those that were measured. For rows without unusual flags also whether the variant can use the
    config. Rows of a user's MultiKernel are judged only when it is called.
    """

    source: str
    row: Row
    stale: str


def listed(sources: tuple[TableSource, ...], device: Device) -> Iterator[ListedRow]:
    """The rows of `sources`, in the order in which these are asked."""
    for source in sources:
        for row in source.table.rows.values():
            op = OPS.get(row.key.split(" ")[0])
            stale = "" if op is None else why_stale(op, row, device)
            yield ListedRow(source.label, row, stale)


def why_stale(op: Op, row: Row, device: Device) -> str:
    """Why `row` is not believed, as far as that can be told from the row alone."""
    variant = next((one for one in op.variants if one.name == row.variant), None)
    if variant is None:
        return f"names variant {row.variant!r}, which does not exist"
    try:
        config = config_from_json(variant.config_type, row.config)
    except ValueError as error:
        return f"config of {row.variant} is malformed: {error}"
    try:
        problem = _like(op, row, device)
        if variant.supports(problem) is not None:
            return ""  # the table may be of a GPU that is not here
        if problem.key(row.stop) == row.key:
            found = revive(row, problem, op.variants)
            return found.removeprefix("stale: ") if isinstance(found, str) else ""
        # A rejected config has no source hash. Whether a config suits the row's own flags is
        # checked at the call.
        if variant.rejects(problem, config) is not None:
            return ""
        today = variant.source_hash(problem, config)
    except Exception:
        return ""  # the key names sizes or dtypes that no call has
    return "" if today == row.source_hash else f"{row.variant} has changed since {row.date}"


def _like(op: Op, row: Row, device: Device) -> Problem:
    """A problem of the row's dims and first dtype; its flags need not be the row's.

    Enough for the hash of the sources: it is of texts, not of what is instantiated from them.
    """
    words = _WORD.findall(row.key)
    sizes = [int(value) for name, value in words if value.isdigit() and name != "rows"]
    dtypes = [found for _, value in words if isinstance(found := getattr(torch, value, 0), _DTYPE)]
    dtype = dtypes[0] if dtypes else torch.bfloat16
    args = op.example_for(device, (row.stop, *sizes), dtype)
    return op.problem(*args, device=device)
