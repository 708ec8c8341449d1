"""`gristmill bench compare`: is the second run slower than the first?"""

from __future__ import annotations

from pathlib import Path

import typer

from gristmill.bench.compare.comparison import compare, parse_threshold
from gristmill.bench.compare.report import tables
from gristmill.bench.results import load
from gristmill.cli.common import console, write_json


def run(old: Path, new: Path, *, threshold: str, across: bool, every: bool, as_json: bool) -> None:
    found = compare(load(old), load(new), threshold=parse_threshold(threshold), across=across)
    if as_json:
        write_json(found.as_json())
        raise typer.Exit(found.exit_code)
    out = console()
    for table in tables(found, all_rows=every):
        out.print(table)
    for line in found.notes:
        out.print(line, markup=False)
    raise typer.Exit(found.exit_code)
