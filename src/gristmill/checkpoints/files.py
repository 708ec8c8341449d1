"""The safetensors files of a checkpoint: which tensor is in which, and reading without a copy."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from gristmill.checkpoints.checks import check_regular, escaped, printable
from gristmill.checkpoints.config import read_json
from gristmill.errors import CheckpointError
from gristmill.log import shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_CHARACTERS = 1000  # of a tensor's name
_METADATA = "__metadata__"  # in the header of a file, what is not a tensor
_MAX_DIMS = 64  # torch's own limit
_MAX_ALIKE = 1000  # names that are compared for a suggestion
_MAX_MESSAGE = 300  # characters of a message of safetensors, which quotes values from the file

# What an index may list: files in its own folder, on every system.
_BESIDE = re.compile(r"[^/\\:\0]+\.safetensors")
_SHARD = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})\.safetensors", re.DOTALL)

# Opening a file costs milliseconds where it holds tens of thousands of tensors; but pages that were
# read stay in memory until it is closed. So it is closed now and then.
_CLOSE_AFTER = 32 << 20


class Files:
    """Which file has which tensor of a checkpoint.

    Args:
        path: a folder with ``model.safetensors.index.json`` and what it lists, or else with
            safetensors files of any name; or one such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        index = self.path / INDEX_FILE if self.path.is_dir() else self.path
        if index.name.endswith(".index.json") and os.path.lexists(index):
            self.where = _listed(index)
        else:
            self.where = _found(self.path)
        self.marks: dict[Path, bool] = {}  # see `Reader.is_marked`

    def __contains__(self, name: object) -> bool:
        return name in self.where

    def file_of(self, name: str) -> Path:
        try:
            return self.where[name]
        except KeyError:
            near = difflib.get_close_matches(name, _alike(name, self.where), n=3)
            hint = f"; did you mean {', '.join(map(printable, near))}?" if near else ""
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}{hint}") from None

    def at(self, name: str) -> str:
        """A tensor, for a message: its file and its name."""
        return f"{self.file_of(name)}: {printable(name)}"

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()


class Reader:
    """Tensors one after the other, from one open file at a time."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._path: Path | None = None
        self._handle: Any = None
        self._read = 0
        self._seen: dict[Path, tuple[int, ...]] = {}  # which file a path was when it was opened

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype, as safetensors writes it, and the shape of a tensor; its data is not read."""
        with _named(self.files.file_of(name), name):
            part = self._open(name).get_slice(name)
            dtype, shape = str(part.get_dtype()), tuple(part.get_shape())
        if len(shape) > _MAX_DIMS:
            raise CheckpointError(f"{self.files.at(name)} has {len(shape)} dims")
        return dtype, shape

    def view(self, name: str) -> torch.Tensor:
        """A tensor in the memory of the open file: to be copied before the next is asked for."""
        with _named(self.files.file_of(name), name):
            tensor: torch.Tensor = self._open(name).get_tensor(name)
        self._read += tensor.nbytes
        return tensor

    def is_marked(self, name: str) -> bool:
        """Whether the metadata of the file that has a tensor says that scales are swizzled."""
        path = self.files.file_of(name)
        if path not in self.files.marks:
            with _named(path, name):
                metadata = self._open(name).metadata() or {}
            self.files.marks[path] = any(
                "swizzle" in key.lower() and value.lower() not in ("", "0", "false", "no", "none")
                for key, value in metadata.items()
            )
        return self.files.marks[path]

    def close(self) -> None:
        handle, self._handle, self._path, self._read = self._handle, None, None, 0
        if handle is not None:
            handle.__exit__(None, None, None)

    def _open(self, name: str) -> Any:
        path = self.files.file_of(name)
        if self._path != path or self._read > _CLOSE_AFTER:
            self.close()
            found = check_regular(path)
            now = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            if self._seen.setdefault(path, now) != now:
                # What was read of its headers need not hold any more.
                raise CheckpointError(f"{path} was replaced while it was read")
            self._handle, self._path = _open(path), path
        return self._handle


def _open(path: Path) -> Any:
    from safetensors import safe_open

    handle: Any = safe_open(path, framework="pt", device="cpu")
    return handle.__enter__()


@contextmanager
def _named(path: Path, name: str = "") -> Iterator[None]:
    """Re-raise errors of safetensors, and of torch about a header's values, as CheckpointError with
    the names of the file and the tensor.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as problem:
        tensor = f"{printable(name)}: " if name else ""
        # The first line: torch adds a stack trace.
        said = (str(problem).splitlines() or [type(problem).__name__])[0][:_MAX_MESSAGE]
        raise CheckpointError(f"{path} cannot be read: {tensor}{escaped(said)}") from problem


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """Some of the names that differ from `name` in one part only. Comparing all names of a large
    model by letters would take a minute.
    """
    parts = name.split(".")
    split = ((other, other.split(".")) for other in names)
    alike = (
        other
        for other, others in split
        if len(others) == len(parts)
        and sum(one != two for one, two in zip(others, parts, strict=True)) < 2
    )
    return list(islice(alike, _MAX_ALIKE))


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors in one file."""
    check_regular(path)
    with _named(path):
        handle = _open(path)
        names = list(handle.keys())
        handle.__exit__(None, None, None)
    check_tensor_names(path, names)
    return names


def check_tensor_names(where: str | Path, names: Iterable[str]) -> None:
    for name in names:
        if name == _METADATA:
            raise CheckpointError(f"{where}: no tensor can have the name {name!r}")
        if len(name) > MAX_CHARACTERS:
            raise CheckpointError(
                f"{where}: the name of a tensor may have {MAX_CHARACTERS} characters, "
                f"{shown(name)} has {len(name)}"
            )


def _listed(index: Path) -> dict[str, Path]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{index}: there is no weight_map in it")
    paths: dict[str, Path] = {}
    for name, file in weights.items():
        if not isinstance(file, str) or _BESIDE.fullmatch(file) is None:
            raise CheckpointError(
                f"{index}: weight_map must name safetensors files in the same folder, got "
                f"{shown(file)} for {shown(name)}"
            )
        paths.setdefault(file, index.parent / file)
    check_tensor_names(index, weights)
    missing = sorted(file for file, path in paths.items() if not os.path.lexists(path))
    if missing:
        raise CheckpointError(f"{index} lists files that are not there: {shown(missing)}")
    for path in paths.values():
        check_regular(path)
    return {name: paths[file] for name, file in weights.items()}


def _found(path: Path) -> dict[str, Path]:
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    # A single file under the usual name is the whole model, whatever lies beside it.
    paths = [one for one in paths if one.name == SINGLE_FILE] or paths
    if not paths or not os.path.lexists(paths[0]):
        there = sorted(one.name for one in path.glob("*"))[:10] if path.is_dir() else "no such file"
        raise CheckpointError(f"{path}: there are no safetensors files; found {there}")
    if path.is_dir():
        _check_whole(path, paths)
    files: dict[str, Path] = {}
    for one in paths:
        for name in tensor_names(one):
            if name in files:
                raise CheckpointError(f"{printable(name)} is both in {files[name]} and in {one}")
            files[name] = one
    return files


def _check_whole(folder: Path, paths: list[Path]) -> None:
    """Check that numbered files without an index are complete: a writer may have been killed."""
    shards = (_SHARD.fullmatch(path.name) for path in paths)
    there = Counter(shard.groups() for shard in shards if shard is not None)
    for (stem, wanted), count in there.items():
        if count != int(wanted):
            raise CheckpointError(
                f"{folder}: there are {count} of the {int(wanted)} files {stem}-...-of-{wanted}"
                f".safetensors, and no {INDEX_FILE}"
            )
