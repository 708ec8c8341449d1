"""`gristmill tables`: the rows that choices are made from, and those that are passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as Grid
from rich.text import Text

from gristmill.cli.common import console, torch_device, write_json
from gristmill.names import counted
from gristmill.ops.registry import known_op
from gristmill.select.device import KNOWN, Device, device_of
from gristmill.select.table import Table
from gristmill.select.tables import TableSource, tables_for
from gristmill.tune.listing import ListedRow, listed


def run(
    ops: Sequence[str], path: Path | None, device: str | None, *, stale: bool, as_json: bool
) -> None:
    names = [known_op(name).name for name in ops]
    here = device_of(torch_device(device))
    if path is None:
        sources = tables_for(here)
    else:
        table = Table.load(path)
        here = _device_of_table(table, here)
        sources = (TableSource(str(path), table, f"measured on {table.gpu}"),)
    rows = [
        row
        for row in listed(sources, here)
        if (not names or row.row.key.split(" ")[0] in names) and (row.stale or not stale)
    ]
    if as_json:
        write_json(
            [
                {"source": row.source, "stale": row.stale, **dataclasses.asdict(row.row)}
                for row in rows
            ]
        )
        return
    _show(rows, here)


def _device_of_table(table: Table, here: Device) -> Device:
    """The device that a table's rows are judged for, which need not be here."""
    if table.gpu == here.name:
        return here
    known = KNOWN.get(table.arch)
    return here if known is None else dataclasses.replace(known, name=table.gpu)


def _show(rows: Sequence[ListedRow], device: Device) -> None:
    out = console()
    if rows:
        grid = Grid(header_style="bold")
        for title in ("problem", "runs"):
            grid.add_column(title, overflow="fold")
        for title in ("us", "spread"):
            grid.add_column(title, justify="right", overflow="fold")
        for title in ("second", "measured", "from"):
            grid.add_column(title, overflow="fold")
        for one in rows:
            row, second = one.row, one.row.second
            runs = Text(row.variant)
            if one.stale:
                runs.append(f"\nstale: {one.stale}", style="red")
            grid.add_row(
                f"{row.key}\n{row.covers}",
                runs,
                f"{row.us:.2f}",
                f"{row.spread_us:.2f}",
                "" if second is None else f"{second.variant} {second.us:.2f}",
                f"{row.date}, rows={row.rows}, {row.candidates} candidates",
                one.source,
            )
        out.print(grid)
    count = sum(bool(one.stale) for one in rows)
    out.print(f"{counted(len(rows), 'row')} for {device.name}, {count} of them stale")
