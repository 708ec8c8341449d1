"""Tables of measured choices: small, sorted JSON with one row per line, one file per GPU name.

A row is believed only while it can still be true: its variant must exist and support the problem,
its config must be a launch of that variant for the problem, and its source hash must be that of
today's device code. Anything else is passed over, with the reason kept in `Table.ignored`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.errors import TableError
from gristmill.jit.file_lock import locked_folder
from gristmill.jit.folder import make_folders, read_plain, write_whole
from gristmill.select.configs import config_from_json
from gristmill.select.problem import HINTS, bucket

if TYPE_CHECKING:
    from gristmill.select.device import Device
    from gristmill.select.problem import Problem
    from gristmill.select.variant import Variant

SCHEMA = 2
# A table is merged and written in milliseconds; whoever holds the lock longer is stuck.
_PATIENCE_S = 5.0

_ROWS_WORD = re.compile(r" rows=(\d+)\b")


@dataclass(frozen=True)
class RunnerUp:
    """The second best in the measurement that made a row; `config` as in the row."""

    variant: str
    us: float
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """One measured choice; `config` holds plain JSON values.

    `rows`: the row count at which it was measured. `times`: the best time of each variant that
    took part, of `candidates` launches in all. `torch`: the version it was measured with.
    """

    key: str
    variant: str
    config: Mapping[str, Any] | None
    us: float
    spread_us: float
    second: RunnerUp | None
    date: str
    source_hash: str
    rows: int
    times: Mapping[str, float]
    candidates: int
    torch: str

    @property
    def hint(self) -> int:
        return _split(self.key)[1]

    @property
    def family(self) -> str:
        return _split(self.key)[0]

    def launch(self) -> str:
        """What the row says to run, in words that compare."""
        return f"{self.variant} {json.dumps(self.config, sort_keys=True)}"


@dataclass
class Table:
    """The rows measured on one GPU."""

    gpu: str
    arch: str
    multiprocessors: int
    rows: dict[str, Row] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    # family -> its hints: the usual ones and those at which tuning has split a bucket.
    _hints: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def for_device(cls, device: Device) -> Table:
        return cls(device.name, device.arch, device.multiprocessors)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table; TableError, naming the file, for anything that is not one."""
        try:
            text = read_plain(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"table {path}: cannot be read: {error}") from error
        return parse(text, str(path))

    def put(self, row: Row) -> None:
        """Add a row; one with the same key is replaced."""
        # First the row, then the hint that leads to it: other threads may be looking.
        self.rows[row.key] = row
        self._split(row.family, (row.hint,))

    def split_as(self, other: Table) -> None:
        """Know the hints of `other`, so that a row here speaks for no bucket that it has split."""
        for family, hints in other._hints.items():
            self._split(family, hints)

    def _split(self, family: str, hints: Sequence[int]) -> None:
        known = self._hints.get(family, HINTS)
        self._hints[family] = tuple(sorted({*known, *hints}))

    def save(self, path: Path) -> None:
        """Merge these rows into the file at `path` and write it in one atomic step.

        Rows already in the file stay unless one here has the same key, so tuning one op keeps what
        is known of the others, and several processes may save at once. A file that is no table of
        this GPU raises TableError and stays.
        """
        make_folders(path.parent)
        with locked_folder(path.parent, _PATIENCE_S):
            merged = dict(self.rows)
            if path.exists():
                known = Table.load(path)
                if known.gpu != self.gpu:
                    raise TableError(f"table {path}: is for {known.gpu!r}, not for {self.gpu!r}")
                merged = {**known.rows, **merged}
                if merged == known.rows:
                    return
            write_whole(path, self._text(merged.values()).encode(), mode=0o644)

    def hints(self, problem: Problem) -> tuple[int, ...]:
        """The sizes at which problems of this family are measured, ascending."""
        return self._hints.get(problem.family(), HINTS)

    def hint(self, problem: Problem) -> int:
        """The size at which this problem's choice is measured: the nearest, in log space."""
        return bucket(problem.rows, self.hints(problem))

    def key(self, problem: Problem) -> str:
        """The key of the row that speaks for `problem`, whether or not it is there."""
        return problem.key(self.hint(problem))

    def row(self, problem: Problem) -> Row | None:
        return self.rows.get(self.key(problem))

    def lookup(self, problem: Problem, variants: Sequence[Variant]) -> tuple[Variant, Any] | None:
        """The variant and config that won at this problem's bucket, if the row still holds."""
        key = self.key(problem)
        row = self.rows.get(key)
        if row is None:
            return None
        found = revive(row, problem, variants)
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
        lines = [row_to_json(row) for row in sorted(rows, key=_natural)]
        body = ",\n".join(f"    {line}" for line in lines)
        return f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{body}\n  ]\n}}\n'


def revive(row: Row, problem: Problem, variants: Sequence[Variant]) -> tuple[Variant, Any] | str:
    """The row as something to run, or the reason why it does not hold."""
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
    # Before the hash: what a config would compile can only be asked of one that is a launch.
    reason = variant.rejects(problem, config)
    if reason is not None:
        return f"config of {row.variant} is rejected: {reason}"
    if variant.source_hash(problem, config) != row.source_hash:
        return f"stale: {row.variant} has changed since {row.date}"
    return variant, config


def _natural(row: Row) -> list[tuple[int, str]]:
    """Sort key in which rows=64 comes before rows=256."""
    pieces = re.split(r"(\d+)", row.key)
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]


def parse(text: str, where: str) -> Table:
    """A table from its text; TableError, naming `where`, for anything that is not one."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
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


def row_to_json(row: Row) -> str:
    """One line of a table file; also what ranks tell each other."""
    return json.dumps(dataclasses.asdict(row))


def row_from_json(text: str) -> Row:
    return _parse_row(json.loads(text))


def _parse_row(entry: object) -> Row:
    if not isinstance(entry, dict):
        raise ValueError(f"a row must be an object, got {entry!r}")
    second, key = entry.get("second"), _typed(entry, "key", str)
    if not (second is None or isinstance(second, dict)):
        raise ValueError(f"'second' must be an object or null, got {second!r}")
    if not _ROWS_WORD.search(key):
        raise ValueError(f"'key' must name rows=..., got {key!r}")
    return Row(
        key=key,
        variant=_typed(entry, "variant", str),
        config=_config(entry),
        us=_typed(entry, "us", float),
        spread_us=_typed(entry, "spread_us", float),
        second=None
        if second is None
        else RunnerUp(_typed(second, "variant", str), _typed(second, "us", float), _config(second)),
        date=_typed(entry, "date", str),
        source_hash=_typed(entry, "source_hash", str),
        rows=_typed(entry, "rows", int),
        times={name: _typed(entry["times"], name, float) for name in _typed(entry, "times", dict)},
        candidates=_typed(entry, "candidates", int),
        torch=_typed(entry, "torch", str),
    )


def _config(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    config = entry.get("config")
    if not (config is None or isinstance(config, dict)):
        raise ValueError(f"'config' must be an object or null, got {config!r}")
    return config


def _split(key: str) -> tuple[str, int]:
    """A key as its family and its hint."""
    found = _ROWS_WORD.search(key)
    if found is None:
        raise ValueError(f"{key!r} names no rows")
    return f"{key[: found.start()]} rows=*{key[found.end() :]}", int(found.group(1))


def _typed(entry: Mapping[str, Any], name: str, kind: type) -> Any:
    value = entry.get(name)
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{name!r} must be a {kind.__name__}, got {value!r}")
    return value
