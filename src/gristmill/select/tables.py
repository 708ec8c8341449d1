"""The tables that take part in choices: what this process measured, the user's own, the shipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from gristmill.errors import TableError
from gristmill.log import warn_once
from gristmill.select.table import Row, Table, parse
from gristmill.settings import settings

if TYPE_CHECKING:
    from gristmill.select.device import Device


@dataclass(frozen=True)
class TableSource:
    """A table that takes part in choices: which one it is, and how to say so."""

    label: str
    table: Table
    note: str
    shipped: bool = False


_LOADED: dict[tuple[str, str], tuple[TableSource, ...]] = {}
_LOCK = Lock()


def tables_for(device: Device) -> tuple[TableSource, ...]:
    """The tables that apply to `device`, in the order in which they are asked; files read once."""
    key = (device.name, device.arch)
    found = _LOADED.get(key)
    if found is None:
        with _LOCK:
            found = _LOADED.get(key)
            if found is None:
                measured = TableSource(
                    "tuning of this process", Table.for_device(device), f"measured on {device.name}"
                )
                sources = (measured, _user_table(device), _shipped_table(device))
                found = tuple(source for source in sources if source is not None)
                # From the last to the first: what one table has split, those before it must not
                # speak for as a whole.
                for later, earlier in pairwise(reversed(found)):
                    earlier.table.split_as(later.table)
                _LOADED[key] = found
    return found


def reset_tables() -> None:
    """Forget what was read and measured: the next choice reads the files again."""
    with _LOCK:
        _LOADED.clear()


def remember(
    device: Device, rows: Sequence[Row], *, path: Path | None = None, keep: bool = True
) -> None:
    """Let measured rows take part in this process's choices, and keep them in the user's table.

    In `path` instead, where that is given. Without `keep`, and with GRISTMILL_TABLE=off, they are
    held in memory only, as they are (with one warning) where the file cannot be written.
    """
    table = tables_for(device)[0].table
    with _LOCK:
        for row in rows:
            table.put(row)
        if not keep or (path is None and settings().table != "on"):
            return
        place = path or user_table_path(device)
        kept = Table.for_device(device)
        for row in rows:
            kept.put(row)
        try:
            kept.save(place)
        except (OSError, TableError) as error:
            if path is not None:
                raise TableError(f"table {place}: cannot be written: {error}") from error
            warn_once(f"table written {place}", f"{error}; what was tuned is kept in memory only")


def slug(gpu: str) -> str:
    """A GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


def user_table_path(device: Device) -> Path:
    return settings().cache_dir / "tables" / f"{slug(device.name)}.json"


def _user_table(device: Device) -> TableSource | None:
    if settings().table != "on":
        return None
    path = user_table_path(device)
    try:
        if not path.exists():
            return None
        table = Table.load(path)
        if table.gpu != device.name:
            raise TableError(f"table {path}: is for {table.gpu!r}, not for {device.name!r}")
    except (TableError, OSError) as error:
        warn_once(f"table {path}", f"{error}; it is ignored")
        return None
    return TableSource("user table", table, f"measured on this machine's {device.name}")


def _shipped_table(device: Device) -> TableSource | None:
    """The shipped table of this GPU, else of the same architecture's GPU nearest in size."""
    if settings().table == "none":
        return None
    tables = [table for table in _shipped() if table.arch == device.arch]
    for table in tables:
        if table.gpu == device.name:
            return TableSource("shipped table", table, f"measured on {table.gpu}", shipped=True)
    if not device.arch or not tables:
        return None
    nearest = min(
        tables, key=lambda table: (abs(table.multiprocessors - device.multiprocessors), table.gpu)
    )
    note = f"measured on {nearest.gpu}, the nearest {device.arch} GPU with a table"
    return TableSource("shipped table", nearest, note, shipped=True)


def _shipped() -> list[Table]:
    folder = resources.files("gristmill").joinpath("tables")
    if not folder.is_dir():
        return []
    tables = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            try:
                tables.append(parse(entry.read_text(encoding="utf-8"), str(entry)))
            except (TableError, OSError, UnicodeDecodeError) as error:
                warn_once(f"table {entry}", f"{error}; it is ignored")
    return tables
