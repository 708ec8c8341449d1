"""The safetensors files of a checkpoint: which tensor lies where, and reading without a copy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gristmill.checkpoints.config import read_json
from gristmill.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Opening a file costs milliseconds where it holds tens of thousands of tensors; but pages that were
# read stay in memory until it is closed. So it is closed now and then.
_CLOSE_AFTER = 32 << 20


class Files:
    """Where each tensor of a checkpoint lies.

    Args:
        path: a folder with ``model.safetensors.index.json`` and what it lists, or else with
            safetensors files of any name; or one such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        index = self.path / INDEX_FILE if self.path.is_dir() else self.path
        if index.name.endswith(".index.json") and index.is_file():
            self.where = _listed(index)
        else:
            self.where = _found(self.path)

    def __contains__(self, name: object) -> bool:
        return name in self.where

    def file_of(self, name: str) -> Path:
        try:
            return self.where[name]
        except KeyError:
            near = difflib.get_close_matches(name, self.where, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}{hint}") from None

    def at(self, name: str) -> str:
        """A tensor, for a message: its file and its name."""
        return f"{self.file_of(name)}: {name}"

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

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype, as safetensors writes it, and the shape of a tensor; its data is not read."""
        with _named(self.files.file_of(name)):
            part = self._open(name).get_slice(name)
            return str(part.get_dtype()), tuple(part.get_shape())

    def view(self, name: str) -> torch.Tensor:
        """A tensor in the memory of the open file: to be copied before the next is asked for."""
        with _named(self.files.file_of(name)):
            tensor: torch.Tensor = self._open(name).get_tensor(name)
        self._read += tensor.nbytes
        return tensor

    def metadata(self, name: str) -> dict[str, str]:
        """What the file of a tensor says of itself."""
        with _named(self.files.file_of(name)):
            return dict(self._open(name).metadata() or {})

    def close(self) -> None:
        handle, self._handle, self._path, self._read = self._handle, None, None, 0
        if handle is not None:
            handle.__exit__(None, None, None)

    def _open(self, name: str) -> Any:
        path = self.files.file_of(name)
        if self._path != path or self._read > _CLOSE_AFTER:
            self.close()
            self._handle, self._path = _open(path), path
        return self._handle


def _open(path: Path) -> Any:
    from safetensors import safe_open

    handle: Any = safe_open(path, framework="pt", device="cpu")
    return handle.__enter__()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of safetensors, as ours and with the file's name."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem


def _listed(index: Path) -> dict[str, Path]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{index}: there is no weight_map in it")
    missing = sorted({file for file in weights.values() if not (index.parent / file).is_file()})
    if missing:
        raise CheckpointError(f"{index} lists files that are not there: {', '.join(missing)}")
    return {name: index.parent / file for name, file in weights.items()}


def _found(path: Path) -> dict[str, Path]:
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    # A single file under the usual name is the whole model, whatever lies beside it.
    paths = [one for one in paths if one.name == SINGLE_FILE] or paths
    if not paths or not paths[0].is_file():
        there = sorted(one.name for one in path.glob("*"))[:10] if path.is_dir() else "no such file"
        raise CheckpointError(f"{path}: there are no safetensors files; found {there}")
    files: dict[str, Path] = {}
    for one in paths:
        with _named(one):
            handle = _open(one)
            names = handle.keys()
            handle.__exit__(None, None, None)
        for name in names:
            if name in files:
                raise CheckpointError(f"{name} is both in {files[name]} and in {one}")
            files[name] = one
    return files
