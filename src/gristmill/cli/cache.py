"""`gristmill cache ls` and `gristmill cache clear`."""

from __future__ import annotations

import datetime

import typer
from rich.table import Table

from gristmill.cli.common import console, write_json
from gristmill.jit import cache


def ls(*, as_json: bool) -> None:
    found = cache.entries()
    if as_json:
        write_json(
            {
                "folder": str(cache.folder()),
                "bytes": sum(entry.size for entry in found),
                "kernels": [
                    {
                        "file": entry.path.name,
                        "source": entry.source,
                        "names": list(entry.names),
                        "arch": entry.arch,
                        "compiler": entry.compiler,
                        "bytes": entry.size,
                        "modified": _time(entry.modified),
                    }
                    for entry in found
                ],
            }
        )
        return
    out = console()
    if found:
        table = Table("kernels", "arch", "compiler", header_style="bold")
        table.add_column("KB", justify="right")
        table.add_column("made")
        for entry in sorted(found, key=lambda entry: (entry.source, entry.arch, entry.names)):
            names = f"{entry.source}: {', '.join(entry.names)}"
            size = f"{entry.size / 1000:.1f}"
            table.add_row(names, entry.arch, entry.compiler, size, _time(entry.modified))
        out.print(table)
    total = sum(entry.size for entry in found) / 1e6
    typer.echo(f"{len(found)} programs, {total:.1f} MB in {cache.folder()}")


def clear(*, ask: bool) -> None:
    count = len(cache.entries())
    if ask and count:
        typer.confirm(f"Delete {count} programs from {cache.folder()}?", abort=True)
    typer.echo(f"{cache.clear()} programs deleted from {cache.folder()}")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
