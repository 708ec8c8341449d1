"""Read-only layers of the cache: bundles, and folders like its own (GRISTMILL_CACHE_LAYERS).

A layer is looked at once, at the first kernel that is not in the user's folder. One that is not
there, is damaged or could have been written by others is one warning, and is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from gristmill.errors import BundleError
from gristmill.jit import counters, entry
from gristmill.jit.bundle import TABLES, Bundle, is_kernel
from gristmill.jit.folder import UntrustedError, names_in, read_file, why_untrusted
from gristmill.jit.once import Once
from gristmill.log import warn_once
from gristmill.settings import settings


class Layer(Protocol):
    """Something that kernels and tables are read from."""

    @property
    def path(self) -> Path: ...

    def kernels(self, key: str) -> Iterator[bytes]:
        """The contents of the files that are named for this key."""

    def table(self, name: str) -> bytes | None:
        """The content of the tuned table of this file name."""

    def count(self) -> int:
        """How many kernels there are."""


class FolderLayer:
    """A folder with `kernels/` and `tables/` in it. What is in it is listed once."""

    def __init__(self, path: Path) -> None:
        """OSError if the folder cannot be listed, with the reason where it is not trusted."""
        self.path = path
        self._kernels = path / "kernels"
        self._by_key: dict[str, list[str]] = {}
        if not path.is_dir():
            raise OSError("is no folder and no bundle" if path.exists() else "is not there")
        if reason := why_untrusted(self._kernels, path):
            raise OSError(reason)
        if not self._kernels.exists():
            raise OSError("has no folder named kernels in it")
        for file in sorted(self._kernels.iterdir()):
            if file.suffix == entry.SUFFIX:
                self._by_key.setdefault(entry.key_in(file.name), []).append(file.name)

    def kernels(self, key: str) -> Iterator[bytes]:
        for name in self._by_key.get(key, ()):
            try:
                yield read_file(self._kernels, name)
            except OSError as error:
                if isinstance(error, UntrustedError):
                    counters.add("rejected")
                warn_once(f"layer {self.path} {name}", f"layer {self.path}: {name} ({error})")

    def table(self, name: str) -> bytes | None:
        folder = self.path / "tables"
        try:
            if reason := why_untrusted(folder, self.path):
                raise UntrustedError(reason)
            return read_file(folder, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(
                f"layer {self.path} {name}",
                f"layer {self.path}: table {name} is ignored ({error.strerror or error})",
            )
            return None

    def count(self) -> int:
        return sum(map(len, self._by_key.values()))


class BundleLayer:
    """A bundle, kept open: a file that takes its place is not looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bundle = Bundle.open(path)

    def kernels(self, key: str) -> Iterator[bytes]:
        for name in self._bundle.named(key):
            content = self._bundle.read(name)
            if content is None:
                counters.add("rejected")
                warn_once(f"layer {self.path} {name}", f"layer {self.path}: {name} is damaged")
            else:
                yield content

    def table(self, name: str) -> bytes | None:
        return self._bundle.read(TABLES + name)

    def count(self) -> int:
        return sum(not name.startswith(TABLES) for name in self._bundle.names)


def is_bundle(path: Path) -> bool:
    """Whether the layer at `path` is a bundle and not a folder; False if it cannot be looked at."""
    try:
        return path.is_file()
    except OSError:
        return False


def damaged_in(folder: Path) -> list[str]:
    """What is wrong with the kernels in a folder, file by file."""
    found = []
    for name in names_in(folder, suffix=entry.SUFFIX):
        try:
            content = read_file(folder, name)
        except OSError as error:
            found.append(f"{name}: cannot be read ({error.strerror or error})")
            continue
        if not is_kernel(name, content):
            found.append(f"{name}: is damaged, or holds another kernel than its name says")
    return found


_opened: Once[Path, Layer | str] = Once()


def layers() -> list[Layer]:
    """The layers that can be used, in the order in which they are asked."""
    found = []
    for path in settings().cache_layers:
        layer = open_layer(path)
        if isinstance(layer, str):
            warn_once(f"layer {path}", f"layer {path} is passed over: {layer}")
        else:
            found.append(layer)
    return found


def open_layer(path: Path) -> Layer | str:
    """The layer at `path`, or why there is none."""
    return _opened.get(path, lambda: _open(path))


def forget_layers() -> None:
    """Look at all layers again (tests)."""
    _opened.clear()


def _open(path: Path) -> Layer | str:
    try:
        return BundleLayer(path) if is_bundle(path) else FolderLayer(path)
    except BundleError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
