"""The tables that take part in choices: what this process measured, the user's own, the shipped."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.errors import TableError
from gristmill.jit.folder import open_file, read_file, why_untrusted
from gristmill.jit.layers import layers
from gristmill.locks import Lock
from gristmill.log import one_line, warn_once
from gristmill.select.table import MOST_BYTES, Row, Table, parse
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
                layered = _layer_tables(device)
                sources = (measured, _user_table(device), *layered, _shipped_table(device))
                found = tuple(source for source in sources if source is not None)
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
        if place is None:
            nowhere = "there is no folder for tables; what was tuned is kept in memory only"
            warn_once("table nowhere", nowhere)
            return
        kept = Table.for_device(device)
        for row in rows:
            kept.put(row)
        try:
            check_own(place, device)
            kept.save(place)
        except (OSError, TableError) as error:
            if path is not None:
                raise TableError(f"table {place}: cannot be written: {error}") from error
            warn_once(f"table written {place}", f"{error}; what was tuned is kept in memory only")


def check_own(path: Path, device: Device) -> None:
    """Refuse the user's own table, if it is that, where others could have written it.

    What they may have planted must not be merged into the user's rows and written as such.
    TableError or OSError says why.
    """
    top = settings().cache_dir
    if top is None or path != user_table_path(device):
        return
    if reason := why_untrusted(path.parent, top):
        raise TableError(f"table {path}: {reason}")
    if path.exists():
        os.close(open_file(path))


def slug(gpu: str) -> str:
    """A GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


def user_table_path(device: Device) -> Path | None:
    """The file of the user's own table; None where the user has no folder."""
    top = settings().cache_dir
    return None if top is None else top / "tables" / table_name(device)


def table_name(device: Device) -> str:
    """The file name of a table of this GPU, in the user's folder and in layers."""
    return f"{slug(device.name)}.json"


def user_table(device: Device) -> bytes | None:
    """The user's own table as it is on disk, if it may be used; else the reason is logged once."""
    found = _own_table(device)
    return None if found is None else found[0]


def check_table(name: str, content: bytes) -> Table:
    """The table in a file of this name; TableError if it holds none or one of another GPU."""
    table = parse(_decoded(content, name), name)
    if name != f"{slug(table.gpu)}.json":
        raise TableError(f"table {name}: is for {table.gpu!r}, which has {slug(table.gpu)}.json")
    return table


def _own_table(device: Device) -> tuple[bytes, Table] | None:
    path, top = user_table_path(device), settings().cache_dir
    if path is None or top is None or not _may_exist(path):
        return None
    if reason := why_untrusted(path.parent, top):
        warn_once(f"table {path}", f"table {path}: {reason}; it is ignored")
        return None
    try:
        content = read_file(path.parent, path.name, MOST_BYTES)
    except OSError as error:
        warn_once(f"table {path}", f"table {path}: {error.strerror or error}; it is ignored")
        return None
    table = _table_of(content, str(path), device)
    return None if table is None else (content, table)


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # whoever reads it is told what is wrong


def _user_table(device: Device) -> TableSource | None:
    if settings().table != "on" or (found := _own_table(device)) is None:
        return None
    return TableSource("user table", found[1], f"measured on this machine's {device.name}")


def _layer_tables(device: Device) -> list[TableSource]:
    """Tables that came with bundles, or stand in folders that are layers of the cache."""
    if settings().table != "on":
        return []
    found = []
    for layer in layers():
        content = layer.table(table_name(device))
        if content is not None:
            table = _table_of(content, str(layer.path), device)
            note = f"measured on {device.name}, in {layer.path}"
            found += [] if table is None else [TableSource("table of a layer", table, note)]
    return found


def _table_of(content: bytes, path: str, device: Device) -> Table | None:
    """The table of this GPU in the content of a file; None, with one warning, if it holds none."""
    try:
        table = parse(_decoded(content, path), path)
        if table.gpu != device.name:
            raise TableError(f"table {path}: is for {table.gpu!r}, not for {device.name!r}")
    except TableError as error:
        warn_once(f"table {path}", f"{one_line(error)}; it is ignored")
        return None
    return table


def _decoded(content: bytes, path: str) -> str:
    if len(content) > MOST_BYTES:
        raise TableError(f"table {path}: has {len(content)} bytes, more than {MOST_BYTES}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TableError(f"table {path}: cannot be read: {error}") from error


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
