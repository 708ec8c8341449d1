"""`gristmill cache`: ls, clear, export, import, verify."""

from __future__ import annotations

import datetime
import fnmatch
from pathlib import Path

import typer
from rich.table import Table

from gristmill.cli.common import check_file, console, write_json
from gristmill.errors import ArgumentError, BundleError, GristmillError
from gristmill.jit import bundle, cache, entry
from gristmill.jit.bundle import KERNELS, TABLES, Bundle
from gristmill.jit.folder import (
    make_private,
    names_in,
    read_file,
    stale_parts,
    why_untrusted,
    write_whole,
)
from gristmill.jit.layers import damaged_in, open_layer
from gristmill.names import counted
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
    with Bundle.open(path) if sha256 is None else Bundle.open_pinned(path, sha256) as source:
        # All of it is read and checked before any of it is kept.
        files = {name: _checked(source, name) for name in source.names}
    added = {KERNELS: 0, TABLES: 0}
    for name, content in files.items():
        place = top / name
        make_private(place.parent, top)
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
        found = _faults(place)
        wrong += len(found)
        for fault in found:
            typer.echo(f"{place}: {fault}")
        typer.echo(f"{place}: {_about(place)}, {counted(len(found), 'problem')}")
    if wrong:
        raise typer.Exit(1)


def _faults(place: Path) -> list[str]:
    if place.is_file():
        found = []
        try:
            found += bundle.damages(place)
            Bundle.open(place).close()
        except BundleError as error:
            found.append(str(error).removeprefix(f"bundle {place}: "))
        return found
    if not place.exists():
        # Nobody has compiled anything yet, which is no fault of the user's own folder.
        return [] if place == settings().cache_dir else ["is not there"]
    folder = place / "kernels"
    if reason := why_untrusted(folder, place):
        return [f"is not used: {reason}"]
    found = [f"{path.name}: was left by a writer that was killed" for path in stale_parts(folder)]
    return found + damaged_in(folder)


def _about(place: Path) -> str:
    if not place.is_file():
        return counted(len(names_in(place / "kernels", suffix=entry.SUFFIX)), "program")
    try:
        with Bundle.open_unchecked(place) as opened:
            count = sum(name.startswith(KERNELS) for name in opened.names)
            return f"{counted(count, 'program')}, sha256 {opened.sha256()}"
    except BundleError:
        return "no programs"


def _checked(source: Bundle, name: str) -> bytes:
    content = source.read(name)
    if content is None:
        raise BundleError(f"bundle {source.path}: {name} is not what the manifest says")
    if name.startswith(KERNELS) and not bundle.is_kernel(name.removeprefix(KERNELS), content):
        raise BundleError(f"bundle {source.path}: {name} holds no kernel, or another one")
    return content


def _tables() -> list[tuple[str, bytes]]:
    top = settings().cache_dir
    assert top is not None
    folder = top / "tables"
    if why_untrusted(folder, top) is not None:
        return []
    names = [name for name in names_in(folder) if bundle.is_name(TABLES + name)]
    return [(name, read_file(folder, name)) for name in names]


def _refuse_unusable() -> None:
    if reason := cache.why_unusable():
        raise GristmillError(f"cache: {reason}")


def _say_written(path: Path, kernels: int, tables: int, digest: str) -> None:
    size = path.stat().st_size / 1e6
    holds = f"{counted(kernels, 'program')} and {counted(tables, 'table')}"
    typer.echo(f"{holds}, {size:.1f} MB in {path}")
    typer.echo(f"sha256 {digest}")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
