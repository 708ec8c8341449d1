"""Tables of measured choices: small, sorted JSON with one row per line, one file per GPU name.

A row is believed only while it can still be true: its variant must exist and support the problem,
its config must still fit the variant's config type, and its source hash must be that of today's
device code. Anything else is passed over, with the reason kept in `Table.ignored`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from gristmill.errors import TableError
from gristmill.log import warn_once
from gristmill.select.configs import config_from_json, config_to_json
from gristmill.select.problem import bucket
from gristmill.settings import settings

if TYPE_CHECKING:
    from gristmill.select.device import Device
    from gristmill.select.problem import Problem
    from gristmill.select.variant import Variant

SCHEMA = 1


@dataclass(frozen=True)
class RunnerUp:
    """The second best in the measurement that made a row."""

    variant: str
    us: float


@dataclass(frozen=True)
class Row:
    """One measured choice; `config` holds plain JSON values."""

    key: str
    variant: str
    config: Mapping[str, Any] | None
    us: float
    spread_us: float
    second: RunnerUp | None
    date: str
    source_hash: str


def row_for(
    problem: Problem,
    variant: Variant,
    config: Any,
    *,
    us: float,
    spread_us: float,
    second: RunnerUp | None,
    date: str,
) -> Row:
    """The row that says `variant` with `config` won at the bucket of `problem`."""
    return Row(
        key=problem.key(bucket(problem.rows)),
        variant=variant.name,
        config=config_to_json(config),
        us=us,
        spread_us=spread_us,
        second=second,
        date=date,
        source_hash=variant.source_hash(problem, config),
    )


@dataclass
class Table:
    """The rows measured on one GPU."""

    gpu: str
    arch: str
    multiprocessors: int
    rows: dict[str, Row] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    @classmethod
    def for_device(cls, device: Device) -> Table:
        return cls(device.name, device.arch, device.multiprocessors)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table; TableError, naming the file, for anything that is not one."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"table {path}: cannot be read: {error}") from error
        return _parse(text, str(path))

    def put(self, row: Row) -> None:
        """Add a row; one with the same key is replaced."""
        self.rows[row.key] = row

    def save(self, path: Path) -> None:
        """Merge these rows into the file at `path` and write it in one atomic step.

        Rows already in the file stay unless one here has the same key, so tuning one op keeps what
        is known of the others. A file that is no table of this GPU raises TableError and stays.
        """
        merged = dict(self.rows)
        if path.exists():
            known = Table.load(path)
            if known.gpu != self.gpu:
                raise TableError(f"table {path}: is for {known.gpu!r}, not for {self.gpu!r}")
            merged = {**known.rows, **merged}
        _write_atomically(path, self._text(merged.values()))

    def lookup(self, problem: Problem, variants: Sequence[Variant]) -> tuple[Variant, Any] | None:
        """The variant and config that won at this problem's bucket, if the row still holds."""
        key = problem.key(bucket(problem.rows))
        row = self.rows.get(key)
        if row is None:
            return None
        found = _revive(row, problem, variants)
        if isinstance(found, str):
            self.ignored[key] = found
            return None
        self.ignored.pop(key, None)
        return found

    def _text(self, rows: Iterable[Row]) -> str:
        head = {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "arch": self.arch,
            "multiprocessors": self.multiprocessors,
        }
        lines = [json.dumps(dataclasses.asdict(row)) for row in sorted(rows, key=_natural)]
        body = ",\n".join(f"    {line}" for line in lines)
        return f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{body}\n  ]\n}}\n'


@dataclass(frozen=True)
class TableSource:
    """A table that takes part in choices: which one it is, and how to say so."""

    label: str
    table: Table
    note: str


_LOADED: dict[tuple[str, str], tuple[TableSource, ...]] = {}
_LOCK = Lock()


def tables_for(device: Device) -> tuple[TableSource, ...]:
    """The tables that apply to `device`, the user's before the shipped one; read once."""
    key = (device.name, device.arch)
    found = _LOADED.get(key)
    if found is None:
        with _LOCK:
            found = _LOADED.get(key)
            if found is None:
                sources = (_user_table(device), _shipped_table(device))
                found = tuple(source for source in sources if source is not None)
                _LOADED[key] = found
    return found


def reset_tables() -> None:
    """Forget what was read, so that the next choice reads the files again."""
    with _LOCK:
        _LOADED.clear()


def slug(gpu: str) -> str:
    """A GPU's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


def user_table_path(device: Device) -> Path:
    return settings().cache_dir / "tables" / f"{slug(device.name)}.json"


def _user_table(device: Device) -> TableSource | None:
    if not settings().table:
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
    tables = [table for table in _shipped() if table.arch == device.arch]
    for table in tables:
        if table.gpu == device.name:
            return TableSource("shipped table", table, f"measured on {table.gpu}")
    if not device.arch or not tables:
        return None
    nearest = min(
        tables, key=lambda table: (abs(table.multiprocessors - device.multiprocessors), table.gpu)
    )
    note = f"measured on {nearest.gpu}, the nearest {device.arch} GPU with a table"
    return TableSource("shipped table", nearest, note)


def _shipped() -> list[Table]:
    folder = resources.files("gristmill").joinpath("tables")
    if not folder.is_dir():
        return []
    tables = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            try:
                tables.append(_parse(entry.read_text(encoding="utf-8"), str(entry)))
            except (TableError, OSError, UnicodeDecodeError) as error:
                warn_once(f"table {entry}", f"{error}; it is ignored")
    return tables


def _revive(row: Row, problem: Problem, variants: Sequence[Variant]) -> tuple[Variant, Any] | str:
    """The row as something to run, or the reason why it no longer holds."""
    variant = next((one for one in variants if one.name == row.variant), None)
    if variant is None:
        return f"names variant {row.variant!r}, which does not exist"
    reason = variant.supports(problem)
    if reason is not None:
        return f"{row.variant} does not support this problem: {reason}"
    try:
        config = config_from_json(variant.config_type, row.config)
    except ValueError as error:
        return f"config of {row.variant} is malformed: {error}"
    if variant.source_hash(problem, config) != row.source_hash:
        return f"stale: {row.variant} has changed since {row.date}"
    return variant, config


def _natural(row: Row) -> list[tuple[int, str]]:
    """Sort key in which rows=64 comes before rows=256."""
    pieces = re.split(r"(\d+)", row.key)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def _parse(text: str, where: str) -> Table:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TableError(f"table {where}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TableError(f"table {where}: must be a JSON object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise TableError(
            f"table {where}: has schema {data.get('schema')!r}, this version reads {SCHEMA}"
        )
    try:
        table = Table(
            gpu=_typed(data, "gpu", str),
            arch=_typed(data, "arch", str),
            multiprocessors=_typed(data, "multiprocessors", int),
        )
        for entry in _typed(data, "rows", list):
            table.put(_parse_row(entry))
    except ValueError as error:
        raise TableError(f"table {where}: {error}") from error
    return table


def _parse_row(entry: object) -> Row:
    if not isinstance(entry, dict):
        raise ValueError(f"a row must be an object, got {entry!r}")
    config, second = entry.get("config"), entry.get("second")
    if not (config is None or isinstance(config, dict)):
        raise ValueError(f"'config' must be an object or null, got {config!r}")
    if not (second is None or isinstance(second, dict)):
        raise ValueError(f"'second' must be an object or null, got {second!r}")
    return Row(
        key=_typed(entry, "key", str),
        variant=_typed(entry, "variant", str),
        config=config,
        us=_typed(entry, "us", float),
        spread_us=_typed(entry, "spread_us", float),
        second=None
        if second is None
        else RunnerUp(_typed(second, "variant", str), _typed(second, "us", float)),
        date=_typed(entry, "date", str),
        source_hash=_typed(entry, "source_hash", str),
    )


def _typed(entry: Mapping[str, Any], name: str, kind: type) -> Any:
    value = entry.get(name)
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{name!r} must be a {kind.__name__}, got {value!r}")
    return value


def _write_atomically(path: Path, text: str) -> None:
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        # Owner only, whatever the umask: the cache trusts no folder that others can write to.
        folder.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
