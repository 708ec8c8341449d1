"""Tables on the faulty disk, and for users who may not read or write them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from disk_child import MOST_OPERATIONS, open_files
from fault_helpers import fresh, heard_warnings
from faulty_disk import count, faults

from gristmill.select import KNOWN, Row, Table, tables
from gristmill.select.problem import Span
from gristmill.select.tables import remember, reset_tables, tables_for, user_table_path

H200 = KNOWN["sm_90a"]


def row(name: str, variant: str = "first") -> Row:
    return Row(
        key=f"{name} rows=64 cols=128",
        covers=Span(33, 128),
        variant=variant,
        config=None,
        us=1.5,
        spread_us=0.1,
        second=None,
        date="2026-01-01",
        source_hash="",
        rows=64,
        times={variant: 1.5},
        candidates=1,
        torch="2.11",
    )


def begin(home: Path) -> None:
    fresh(home)
    reset_tables()


def saved(home: Path, *names: str) -> Path:
    """A table of the user's with these rows, made as tuning makes it."""
    begin(home)
    remember(H200, [row(name) for name in names])
    begin(home)
    path = user_table_path(H200)
    assert path is not None
    return path


def known_rows() -> set[str]:
    """The keys of this process's and the user's rows."""
    found = [source for source in tables_for(H200) if not source.shipped]
    return {key.split()[0] for source in found for key in source.table.rows}


def every_fault_of_tables(folder: str, codes: list[int], lasting: bool) -> list[str]:
    """Read a table, tune, and write it back, with a fault at each operation."""
    top = Path(folder)
    tables._shipped = list  # large, and read from elsewhere
    wrong: list[str] = []
    for code in codes:
        for at in range(1, MOST_OPERATIONS):
            home = top / "place" / "cache"
            path = saved(home, "old", "older")
            files = open_files()
            what = None
            with heard_warnings() as heard, faults(top / "place", at, code, lasting=lasting):
                try:
                    before = known_rows()
                    remember(H200, [row("new")])
                    after = known_rows()
                    if before not in (set(), {"old", "older"}) or after != before | {"new"}:
                        what = f"rows {before}, then {after}"
                except BaseException as error:
                    what = f"{type(error).__name__}: {error}"
                reached = count() >= at
            if what is None and len(heard) > 2:  # one of reading, one of writing
                what = f"{len(heard)} warnings: {heard}"
            if what is None and (left := open_files() - files):
                what = f"files left open: {sorted(left)}"
            if what is None:
                what = _afterwards(home, path)
            if what is not None:
                wrong.append(f"{errno.errorcode[code]} at operation {at}: {what}")
            shutil.rmtree(top / "place", ignore_errors=True)
            if not reached:
                break
        else:
            wrong.append("it never ends")
        if at < 10:
            wrong.append("few operations were seen: is the library preloaded?")
    return wrong


def _afterwards(home: Path, path: Path) -> str | None:
    kept = {key.split()[0] for key in Table.load(path).rows}
    if kept not in ({"old", "older"}, {"old", "older", "new"}):
        return f"the file has {kept}"
    begin(home)
    remember(H200, [row("newest")])
    begin(home)
    with heard_warnings() as heard:
        if known_rows() != kept | {"newest"}:
            return f"afterwards {known_rows()}"
    return f"afterwards warned of {heard}" if heard else None


def tune_as(user: int, homes: list[str]) -> list[dict[str, Any]]:
    """Read and write tables as another user, in one home after another."""
    tables_for(H200)  # imports what that user may not read
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    results = []
    for home in homes:
        begin(Path(home))
        with heard_warnings() as heard:
            before = sorted(known_rows())
            for name in ("new", "newer"):
                remember(H200, [row(name)])
            after = sorted(known_rows())
        mine = [message for message in heard if home in message]
        results.append({"before": before, "after": after, "warnings": mine})
    return results
