"""Tables of measured choices: small, sorted JSON with one row per line, one file per GPU name.

A row says which row counts it covers. Between rows, and beyond the last of them, the heuristics
decide.

A row is believed only while it can still be true: its variant must exist and support the problem,
its config must be a launch of that variant for the problem, and its source hash must be that of
today's device code. Anything else is passed over, with the reason kept in `Table.ignored`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gristmill.errors import TableError
from gristmill.jit.file_lock import locked_folder
from gristmill.jit.folder import make_folders, read_plain, write_whole
from gristmill.log import one_line, shown
from gristmill.select.configs import config_from_json
from gristmill.select.problem import Span

if TYPE_CHECKING:
    from gristmill.select.device import Device
    from gristmill.select.problem import Problem
    from gristmill.select.variant import Variant

SCHEMA = 3
# A table is merged and written in milliseconds; whoever holds the lock longer is stuck.
_PATIENCE_S = 5.0

MOST_BYTES = 16 << 20  # the shipped table has 0.6 MB
# A parsed value takes up to 100 bytes of memory, so there may be at most one in 8 characters, and
# some more in a small table. The shipped table has 18 characters a value.
_VALUE_LENGTH, _FREE = 8, 1 << 20
_LONGEST = 4096  # characters of a string
_LARGEST = 10**18  # of a row's numbers
_KINDS = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
_PLAIN = frozenset((str, int, float, bool, type(None)))  # of a config's values

_ROWS = re.compile(r"\d{1,18}", re.ASCII)
_ROWS_WORD = re.compile(r" rows=(\d{1,18})\b", re.ASCII)
_DIGITS = re.compile(r"(\d+)", re.ASCII)


@dataclass(frozen=True)
class RunnerUp:
    """The second best in the measurement that made a row; `config` as in the row."""

    variant: str
    us: float
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Row:
    """One measured choice; `config` holds plain JSON values.

    `covers`: the row counts that it holds for; `key` names one of them. `rows`: the row count at
    which `us`, `second` and `times` were measured. `times`: the best time of each variant that
    took part, of `candidates` launches in all. `also`: times of this very launch at other row
    counts that it covers. `torch`: the version it was measured with.
    """

    key: str
    covers: Span
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
    also: Mapping[str, float] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """The row count in the key."""
        return stop_of(self.key)

    @property
    def family(self) -> str:
        return _split(self.key)[0]

    def launch(self) -> str:
        """What the row says to run, in words that compare."""
        return f"{self.variant} {json.dumps(self.config, sort_keys=True)}"


class _Family(NamedTuple):
    """Rows by the first row count that they cover; `apart`: no two of them cover the same one."""

    rows: tuple[Row, ...]
    apart: bool

    @classmethod
    def of(cls, rows: Iterable[Row]) -> _Family:
        found = tuple(sorted(rows, key=lambda row: (_least(row), -row.covers.end, row.key)))
        apart = all(one.covers.end < other.covers.least for one, other in pairwise(found))
        return cls(found, apart)


_NO_FAMILY = _Family((), True)


@dataclass
class Table:
    """The rows measured on one GPU."""

    gpu: str
    arch: str
    multiprocessors: int
    rows: dict[str, Row] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    _families: dict[str, _Family] = field(default_factory=dict, repr=False)

    @classmethod
    def for_device(cls, device: Device) -> Table:
        return cls(device.name, device.arch, device.multiprocessors)

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read a table; TableError, naming the file, for anything that is not one."""
        try:
            text = read_plain(path, MOST_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise TableError(f"table {path}: cannot be read: {error}") from error
        return parse(text, str(path))

    def put(self, row: Row) -> None:
        """Add a row. Others no longer cover what it covers; what is left of them stays as far as
        their launch was measured there.
        """
        known = self._families.get(row.family, _NO_FAMILY).rows
        left = [part for one in known for part in _without(one, row)]
        self.rows[row.key] = row
        self.rows.update({one.key: one for one in left})
        # In one step: other threads may be looking.
        self._families[row.family] = _Family.of([*left, row])
        for key in {one.key for one in known} - {row.key} - {one.key for one in left}:
            del self.rows[key]

    def put_all(self, rows: Iterable[Row]) -> None:
        """Add the rows of a file, in linear time; of this kind of problem there are none yet."""
        families: dict[str, list[Row]] = {}
        for row in rows:
            self.rows[row.key] = row
            families.setdefault(row.family, []).append(row)
        for family, found in families.items():
            self._families[family] = _Family.of(found)

    def save(self, path: Path) -> None:
        """Merge these rows into the file at `path` and write it in one atomic step.

        Each row is put into the file's table as by `put`, so tuning one op keeps what is known of
        the others, and several processes may save at once. A file that is no table of this GPU
        raises TableError and stays.
        """
        make_folders(path.parent)
        with locked_folder(path.parent, _PATIENCE_S):
            merged = self.rows
            if path.exists():
                known = Table.load(path)
                if known.gpu != self.gpu:
                    raise TableError(f"table {path}: is for {known.gpu!r}, not for {self.gpu!r}")
                before = dict(known.rows)
                for row in self.rows.values():
                    known.put(row)
                merged = known.rows
                if merged == before:
                    return
            text = self._text(merged.values())
            content = text.encode()
            # What cannot be read is not written.
            if len(content) > MOST_BYTES:
                raise TableError(
                    f"table {path}: {len(merged)} rows take {len(content)} bytes, and "
                    f"{MOST_BYTES} are the most"
                )
            parse(text, str(path))
            write_whole(path, content, mode=0o644)

    def family(self, problem: Problem) -> tuple[Row, ...]:
        """The rows of this kind of problem, by the first row count that they cover."""
        return self._families.get(problem.family(), _NO_FAMILY).rows

    def beside(self, key: str) -> tuple[Row, ...]:
        """The rows of the same kind of problem as `key`; none if it is not the key of a row."""
        found = _ROWS_WORD.search(key)
        return () if found is None else self._families.get(_split(key)[0], _NO_FAMILY).rows

    def row(self, problem: Problem) -> Row | None:
        """The row that covers `problem`. Rows of a file that was merged by hand may overlap: then
        the one that begins last, and of these the one that ends first.
        """
        rows, apart = self._families.get(problem.family(), _NO_FAMILY)
        at = bisect_right(rows, problem.rows, key=_least)
        before = rows[max(0, at - 1) : at] if apart else rows[:at]
        return next((row for row in reversed(before) if problem.rows in row.covers), None)

    def lookup(self, problem: Problem, variants: Sequence[Variant]) -> tuple[Variant, Any] | None:
        """The variant and config of the row that covers `problem`, if it is still believed."""
        row = self.row(problem)
        if row is None:
            return None
        found = revive(row, problem, variants)
        if isinstance(found, str):
            self.ignored[row.key] = one_line(found, 300)
            return None
        self.ignored.pop(row.key, None)
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
    # Before the hash, which is defined only for valid configs.
    reason = variant.rejects(problem, config)
    if reason is not None:
        return f"config of {row.variant} is rejected: {reason}"
    if variant.source_hash(problem, config) != row.source_hash:
        return f"stale: {row.variant} has changed since {row.date}"
    return variant, config


def _least(row: Row) -> int:
    return row.covers.least


def _without(row: Row, other: Row) -> Iterator[Row]:
    """What is left of `row` without what `other` covers.

    A part keeps the key if it has the row count in it, else it takes the largest row count at which
    the launch was measured there. Without one it is dropped.
    """
    (least, most), taken = row.covers, other.covers
    if taken.least > row.covers.end or least > taken.end:
        yield row
        return
    parts = [Span(least, taken.least - 1)] if least < taken.least else []
    if taken.end < row.covers.end:
        parts.append(Span(int(taken.end) + 1, most))
    for part in parts:
        measured = [count for count in (row.rows, *map(int, row.also)) if count in part]
        stop = row.stop if row.stop in part else max(measured, default=None)
        if stop is not None:
            also = {rows: us for rows, us in row.also.items() if int(rows) in part}
            key = _ROWS_WORD.sub(f" rows={stop}", row.key, count=1)
            yield dataclasses.replace(row, key=key, covers=part, also=also)


def _natural(row: Row) -> list[tuple[int, str]]:
    """Sort key in which rows=64 comes before rows=256: shorter numbers come first."""
    pieces = _DIGITS.split(row.key)
    return [(len(piece) if at % 2 else -1, piece) for at, piece in enumerate(pieces)]


def parse(text: str, where: str) -> Table:
    """A table from its text; TableError, naming `where`, for anything that is not one."""
    if sum(map(text.count, ",[{")) * _VALUE_LENGTH > len(text) + _FREE:
        raise TableError(f"table {where}: has too many values for its size")
    try:
        data = _json(text)
    except ValueError as error:
        raise TableError(f"table {where}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TableError(f"table {where}: must be a JSON object, got {shown(data)}")
    if data.get("schema") != SCHEMA:
        raise TableError(
            f"table {where}: has schema {shown(data.get('schema'))}, this version reads {SCHEMA}"
        )
    try:
        table = Table(
            gpu=_typed(data, "gpu", str),
            arch=_typed(data, "arch", str),
            multiprocessors=_typed(data, "multiprocessors", int),
        )
        rows = _typed(data, "rows", list)
    except ValueError as error:
        raise TableError(f"table {where}: {error}") from error
    found: dict[str, Row] = {}
    for number, entry in enumerate(rows, 1):
        try:
            row = _parse_row(entry)
            if row.key in found:
                raise ValueError(f"another row has the key {shown(row.key)}")
        except ValueError as error:
            raise TableError(f"table {where}: row {number}: {error}") from error
        found[row.key] = row
    table.put_all(found.values())
    return table


def _json(text: str) -> Any:
    """The value of a JSON text, whose numbers must be finite; ValueError for anything else."""
    try:
        return json.loads(text, parse_constant=_number, parse_float=_number)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def row_to_json(row: Row) -> str:
    """One line of a table file; also what ranks tell each other."""
    return json.dumps(dataclasses.asdict(row))


def row_from_json(text: str) -> Row:
    """The row of `row_to_json`; TableError for anything else."""
    try:
        return _parse_row(_json(text))
    except ValueError as error:
        raise TableError(f"row of a table: {error}") from error


def _parse_row(entry: object) -> Row:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {shown(entry)}")
    second, key = entry.get("second"), _typed(entry, "key", str)
    if not (second is None or isinstance(second, dict)):
        raise ValueError(f"'second' must be an object or null, got {shown(second)}")
    if not _ROWS_WORD.search(key):
        raise ValueError(f"'key' must have rows= and a number, got {shown(key)}")
    return Row(
        key=key,
        covers=_span(entry, key),
        variant=_typed(entry, "variant", str),
        config=_config(entry),
        us=_time(entry, "us"),
        spread_us=_time(entry, "spread_us"),
        second=None
        if second is None
        else RunnerUp(_typed(second, "variant", str), _time(second, "us"), _config(second)),
        date=_typed(entry, "date", str),
        source_hash=_typed(entry, "source_hash", str),
        rows=_typed(entry, "rows", int),
        times={name: _time(entry["times"], name) for name in _typed(entry, "times", dict)},
        candidates=_typed(entry, "candidates", int),
        torch=_typed(entry, "torch", str),
        also=_also(entry),
    )


def _span(entry: Mapping[str, Any], key: str) -> Span:
    """The row counts that a row covers: two integers, or one and null for no end."""
    value = _typed(entry, "covers", list)
    least, most = value if len(value) == 2 else (None, None)
    if type(least) is int and (most is None or type(most) is int):
        span = Span(least, most)
        if least >= 0 and _split(key)[1] in span:
            return span
    raise ValueError(
        f"'covers' must be the least and the most rows, those of the key among them, got "
        f"{shown(value)}"
    )


def _also(entry: Mapping[str, Any]) -> dict[str, float]:
    also = _typed(entry, "also", dict)
    if wrong := [rows for rows in also if not _ROWS.fullmatch(rows)]:
        raise ValueError(f"'also' must have numbers of rows as names, got {shown(wrong[0])}")
    return {rows: _time(also, rows) for rows in also}


def _config(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    config = entry.get("config")
    if not (config is None or isinstance(config, dict)):
        raise ValueError(f"'config' must be an object or null, got {shown(config)}")
    for name, value in (config or {}).items():
        if type(value) is dict or (type(value) is list and not _PLAIN.issuperset(map(type, value))):
            raise ValueError(f"'config' has {shown(value)} in {shown(name)}, not a plain value")
    return config


def _split(key: str) -> tuple[str, int]:
    """A key as its family and the row count in it."""
    found = _ROWS_WORD.search(key)
    if found is None:
        raise ValueError(f"{key!r} names no rows")
    return f"{key[: found.start()]} rows=*{key[found.end() :]}", int(found.group(1))


def stop_of(key: str) -> int:
    """The row count in a key."""
    return _split(key)[1]


def _typed(entry: Mapping[str, Any], name: str, kind: type) -> Any:
    value: Any = entry.get(name)
    found, wanted = type(value), None
    if found is not kind:
        wanted = _KINDS[kind]
    elif kind is str and not (len(value) <= _LONGEST and value.isprintable()):
        wanted = f"at most {_LONGEST} printable characters"
    elif kind is int and not 0 <= value <= _LARGEST:
        wanted = "from 0 to 10**18"
    if wanted is not None:
        raise ValueError(f"{shown(name)} must be {wanted}, got {shown(value)}")
    return value


def _time(entry: Mapping[str, Any], name: str) -> float:
    value: Any = entry.get(name)
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{shown(name)} must be a time in microseconds, got {shown(value)}")
    return float(value)
