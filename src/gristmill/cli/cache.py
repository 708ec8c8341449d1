"""`gristmill cache`: ls, clear, export, import, verify."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.table import Table

from gristmill.cli.common import check_file, console, write_json
from gristmill.errors import ArgumentError, BundleError, GristmillError, TableError
from gristmill.jit import bundle, cache, entry
from gristmill.jit.bundle import KERNELS, TABLES, Bundle
from gristmill.jit.folder import (
    make_folders,
    names_in,
    read_file,
    stale_parts,
    why_untrusted,
    write_whole,
)
from gristmill.jit.layers import damaged_in, is_bundle, open_layer
from gristmill.names import counted
from gristmill.select.tables import check_table
from gristmill.settings import settings


def ls(*, as_json: bool) -> None:
    found, layers = cache.entries(), settings().cache_layers
    opened = [(path, open_layer(path)) for path in layers]
    if as_json:
        write_json(
            {
                "folder": str(cache.folder() or ""),
                "bytes": sum(kept.size for kept in found),
                "kernels": [
                    {
                        "file": kept.path.name,
                        "source": kept.entry.source,
                        "names": list(kept.entry.names),
                        "arch": kept.entry.arch,
                        "compiler": kept.entry.compiler,
                        "bytes": kept.size,
                        "modified": _time(kept.modified),
                    }
                    for kept in found
                ],
                "layers": [
                    {
                        "path": str(path),
                        "kernels": 0 if isinstance(layer, str) else layer.count(),
                        "problem": layer if isinstance(layer, str) else None,
                    }
                    for path, layer in opened
                ],
            }
        )
        return
    out = console()
    if found:
        table = Table(header_style="bold")
        for title in ("kernels", "arch", "compiler", "KB", "made"):
            # Folded and not cut: names of kernels differ in their last letters.
            table.add_column(title, justify="right" if title == "KB" else "left", overflow="fold")
        order = sorted(found, key=lambda kept: (kept.entry.source, kept.entry.arch, kept.path.name))
        for kept in order:
            names = f"{kept.entry.source}: {', '.join(kept.entry.names)}"
            size = f"{kept.size / 1000:.1f}"
            made = _time(kept.modified)
            table.add_row(names, kept.entry.arch, kept.entry.compiler, size, made)
        out.print(table)
    total = sum(kept.size for kept in found) / 1e6
    typer.echo(
        f"{counted(len(found), 'program')}, {total:.1f} MB in {cache.folder() or 'no folder'}"
    )
    for path, layer in opened:
        about = (
            layer
            if isinstance(layer, str)
            else f"{counted(layer.count(), 'program')} in layer {path}"
        )
        typer.echo(about)


def clear(*, ask: bool) -> None:
    count = len(cache.entries())
    if ask and count:
        typer.confirm(f"Delete {counted(count, 'program')} from {cache.folder()}?", abort=True)
    typer.echo(f"{counted(cache.clear(), 'program')} deleted from {cache.folder()}")


def export(path: Path, archs: list[str], sources: list[str], *, tables: bool) -> None:
    """Write the kernels of the user's folder, and its tables, into a bundle."""
    _refuse_unusable()
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"cache export: there is no folder {path.absolute().parent}")
    check_file(path)
    kernels = []
    for kept in cache.entries():
        about = kept.entry
        wanted = not sources or any(fnmatch.fnmatch(about.source, one) for one in sources)
        if wanted and (not archs or about.arch in archs):
            name, content = kept.path.name, read_file(kept.path.parent, kept.path.name)
            # A copy under a name of somebody's own is in no process's way, and in no bundle.
            if bundle.is_name(KERNELS + name) and bundle.is_kernel(name, content):
                kernels.append((name, content))
    if not kernels:
        raise GristmillError(
            f"cache export: {cache.folder()} holds no such kernel; gristmill cache ls shows what "
            f"there is, gristmill warmup makes some"
        )
    tuned = _tables() if tables else []
    digest = bundle.write(path, kernels, tuned)
    _say_written(path, len(kernels), len(tuned), digest)


def import_(path: Path, sha256: str | None) -> None:
    """Copy what a bundle holds into the user's folder, each file checked against its hash."""
    _refuse_unusable()
    top = settings().cache_dir
    assert top is not None
    added = {KERNELS: 0, TABLES: 0}
    with Bundle.open(path) if sha256 is None else Bundle.open_pinned(path, sha256) as source:
        # All members are checked before any is written. One is in memory at a time.
        for name in source.names:
            if fault := _fault(source, name):
                raise BundleError(f"bundle {path}: {name}: {fault}")
            if (top / name).is_dir():
                raise BundleError(f"bundle {path}: {name}: {top / name} is a folder")
        for name in source.names:
            content = source.read(name)
            if content is None:
                raise BundleError(f"bundle {path}: {name}: has changed since it was checked")
            place = top / name
            make_folders(place.parent)
            if name.startswith(TABLES) and place.exists():
                typer.echo(f"{place} is there already, and stays as it is")
                continue
            write_whole(place, content)
            added[KERNELS if name.startswith(KERNELS) else TABLES] += 1
    programs, tables = counted(added[KERNELS], "program"), counted(added[TABLES], "table")
    typer.echo(f"{programs} and {tables} imported into {top}")


def verify(path: Path | None) -> None:
    """Check every file of the cache, of its layers, or of one bundle or folder."""
    places = [path] if path is not None else [settings().cache_dir, *settings().cache_layers]
    wrong = 0
    for place in places:
        if place is None:
            continue
        count = 0
        for fault in _faults(place):
            typer.echo(f"{place}: {fault}")
            count += 1
        typer.echo(f"{place}: {_about(place)}, {counted(count, 'problem')}")
        wrong += count
    if wrong:
        raise typer.Exit(1)


def _faults(place: Path) -> Iterator[str]:
    try:
        if is_bundle(place):
            yield from _faults_of_bundle(place)
        elif place.exists():
            yield from _faults_of_folder(place)
        elif place != settings().cache_dir:
            # The user's own folder is made by the first compile.
            yield "is not there"
    except OSError as error:
        yield f"cannot be read ({error.strerror or error})"


def _faults_of_bundle(path: Path) -> Iterator[str]:
    try:
        with Bundle.open_unchecked(path) as source:
            for name in source.names:
                if fault := _fault(source, name):
                    yield f"{name}: {fault}"
        Bundle.open(path).close()
    except BundleError as error:
        yield str(error).removeprefix(f"bundle {path}: ")


def _faults_of_folder(place: Path) -> Iterator[str]:
    kernels, tables = place / "kernels", place / "tables"
    if reason := why_untrusted(kernels, place):
        yield f"is not used: {reason}"
        return
    for path in stale_parts(kernels):
        yield f"{path.name}: was left by a writer that was killed"
    yield from damaged_in(kernels)
    if reason := why_untrusted(tables, place):
        yield f"its tables are not used: {reason}"
        return
    for name in names_in(tables, suffix=".json"):
        try:
            _table(tables, name)
        except TableError as error:
            yield str(error)


def _about(place: Path) -> str:
    if not is_bundle(place):
        return counted(len(names_in(place / "kernels", suffix=entry.SUFFIX)), "program")
    try:
        with Bundle.open_unchecked(place) as opened:
            count = sum(name.startswith(KERNELS) for name in opened.names)
            return f"{counted(count, 'program')}, sha256 {opened.sha256()}"
    except (BundleError, OSError):
        return "no programs"


def _fault(source: Bundle, name: str) -> str | None:
    """What is wrong with a member of a bundle, or None."""
    fault = source.fault(name)
    if fault is None and name.startswith(TABLES):
        try:
            check_table(name.removeprefix(TABLES), source.read(name) or b"")
        except TableError as error:
            return str(error)
    return fault


def _tables() -> list[tuple[str, bytes]]:
    top = settings().cache_dir
    assert top is not None
    folder = top / "tables"
    if why_untrusted(folder, top) is not None:
        return []
    found = []
    for name in names_in(folder):
        if bundle.is_name(TABLES + name):
            try:
                found.append((name, _table(folder, name)))
            except TableError as error:
                typer.echo(f"left out: {error}", err=True)
    return found


def _table(folder: Path, name: str) -> bytes:
    """The content of a table; TableError if it cannot be read or is not one."""
    try:
        content = read_file(folder, name)
    except OSError as error:
        reason = error.strerror or error
        raise TableError(f"table {name}: cannot be read ({reason})") from error
    check_table(name, content)
    return content


def _refuse_unusable() -> None:
    top = settings().cache_dir
    if reason := cache.why_unusable() or (top and why_untrusted(top / "tables", top)):
        raise GristmillError(f"cache: {reason}")


def _say_written(path: Path, kernels: int, tables: int, digest: str) -> None:
    size = path.stat().st_size / 1e6
    holds = f"{counted(kernels, 'program')} and {counted(tables, 'table')}"
    typer.echo(f"{holds}, {size:.1f} MB in {path}")
    typer.echo(f"sha256 {digest}")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
