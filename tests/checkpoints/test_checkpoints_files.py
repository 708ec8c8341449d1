"""Files of a checkpoint: replaced while they are read, large metadata, names in messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import Tensors, is_made_of, matrix, modelopt, write
from safetensors.torch import save_file

from gristmill.checkpoints import Checkpoint, files
from gristmill.errors import CheckpointError

PARTS = [matrix(64, 64, seed) for seed in range(3)]
MODULES = [f"l.{number}" for number in range(3)]
TENSORS: Tensors = {}
for name, parts in zip(MODULES, PARTS, strict=True):
    TENSORS |= modelopt(name, parts)

Change = Callable[[Tensors], Tensors]
CHANGES: dict[str, Change] = {
    "other values": lambda one: {name: part.clone() for name, part in one.items()},
    "one row": lambda one: {name: part[:1].clone() for name, part in one.items() if part.dim()},
    "floats": lambda one: {name: part.float() for name, part in one.items()},
    "nothing": lambda one: {"other": torch.ones(1)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_replaced_while_it_is_read(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its headers were checked; it is opened again for every 32 MB of data."""
    checkpoint = Checkpoint(write(tmp_path, TENSORS))
    new = tmp_path / "new"
    right, views = files.Reader.view, 0

    def view(reader: files.Reader, name: str) -> torch.Tensor:
        nonlocal views
        views += 1
        if views == 4:  # between two layers
            save_file(CHANGES[change](TENSORS), new)
            os.replace(new, tmp_path / "model.safetensors")
        return right(reader, name)

    monkeypatch.setattr(files.Reader, "view", view)
    monkeypatch.setattr(files, "_CLOSE_AFTER", 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was replaced while it was read"):
        checkpoint.fused(MODULES)


def test_a_file_that_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was replaced, if nothing of the old one was used."""
    checkpoint = Checkpoint(write(tmp_path, TENSORS))
    monkeypatch.setattr(files, "_CLOSE_AFTER", 1000)
    assert is_made_of(checkpoint.fused(MODULES), *PARTS)
    other = matrix(64, 64, 9)
    write(tmp_path, TENSORS | modelopt("l.0", other))
    assert is_made_of(checkpoint.fused(MODULES), other, *PARTS[1:])


def test_metadata_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have many entries, and a checkpoint many layers."""

    class Metadata(dict[str, str]):
        searched = 0

        def items(self) -> Any:
            Metadata.searched += 1
            return super().items()

    class Handle:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def metadata(self) -> Metadata:
            return Metadata(self.handle.metadata())

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def __exit__(self, *args: Any) -> None:
            self.handle.__exit__(*args)

    right = files._open
    monkeypatch.setattr(files, "_open", lambda path: Handle(right(path)))
    checkpoint = Checkpoint(write(tmp_path, TENSORS))
    for _ in range(2):
        checkpoint.fused(MODULES)
        checkpoint.linear("l.1")
    assert Metadata.searched == 1


def test_names_in_messages_are_one_line(tmp_path: Path) -> None:
    tensors = modelopt("a\nb", matrix(16, 32))
    tensors["a\nb.weight_scale_2"] = torch.ones(3)
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path).linear("a\nb")
    assert str(caught.value) == (
        f"{tmp_path / 'model.safetensors'}: 'a\\nb.weight_scale_2' must be one value, "
        f"got shape (3,)"
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path).tensor("a\nb.weigh")
    assert "did you mean 'a\\nb.weight', " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_compared_with_some_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a suggestion: with all of a large model it would take a minute."""
    write(tmp_path, {f"a.{number}": torch.ones(()) for number in range(5000)})
    compared = []
    right = difflib.get_close_matches

    def matches(name: str, names: Sequence[str], n: int) -> list[str]:
        compared.append(len(names))
        return right(name, names, n=n)

    monkeypatch.setattr(difflib, "get_close_matches", matches)
    with pytest.raises(CheckpointError, match=r"there is no tensor 'a\.b'"):
        Checkpoint(tmp_path).tensor("a.b")
    assert compared == [1000]
