"""Block scales that lie in tiles in a file: read when told so, refused when it looks like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import PRODUCERS, Namer, is_made_of, matrix, modelopt, write

from gristmill.checkpoints import Checkpoint
from gristmill.errors import CheckpointError
from gristmill.formats.nvfp4 import swizzle


@pytest.mark.parametrize("shape", [(40, 96), (128, 64), (130, 16)])
@pytest.mark.parametrize("flat", [False, True])
@PRODUCERS
def test_swizzled_scales(
    tmp_path: Path, shape: tuple[int, int], flat: bool, name: Namer, config: Any
) -> None:
    parts = matrix(*shape)
    tiled = swizzle(parts["scales"])
    tall = -(-shape[0] // 128) * 128
    stored = {**parts, "scales": tiled if flat else tiled.view(tall, -1)}
    checkpoint = write(tmp_path, name("a", stored), config)
    if stored["scales"].shape != parts["scales"].shape:
        with pytest.raises(CheckpointError, match=r"looks swizzled, .* with swizzled=True"):
            Checkpoint(checkpoint).linear("a")
    else:  # nothing tells, so the files are believed
        assert not is_made_of(Checkpoint(checkpoint).linear("a"), parts)
    assert is_made_of(Checkpoint(checkpoint, swizzled=True).linear("a"), parts)
    assert is_made_of(Checkpoint(checkpoint, swizzled=True).fused(["a", "a"]), parts, parts)


def test_scales_that_are_not_swizzled_after_all(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, modelopt("a", matrix(40, 96))), swizzled=True)
    with pytest.raises(
        CheckpointError, match=r"shape \(40, 6\); in tiles .* 128 x 8.* without swi"
    ):
        checkpoint.linear("a")


def test_scales_that_are_marked_as_swizzled(tmp_path: Path) -> None:
    parts = matrix(128, 64)
    tensors = modelopt("a", {**parts, "scales": swizzle(parts["scales"]).view(128, 4)})
    write(tmp_path, tensors, scales_swizzled="true")
    with pytest.raises(CheckpointError, match=r"looks swizzled, .* is marked so in its file"):
        Checkpoint(tmp_path).linear("a")
    assert is_made_of(Checkpoint(tmp_path, swizzled=True).linear("a"), parts)
    write(tmp_path, tensors, scales_swizzled="false")
    assert Checkpoint(tmp_path).linear("a").shape == (128, 64)
    write(tmp_path, tensors | {"a.comfy_quant": torch.zeros(4, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="looks swizzled"):
        Checkpoint(tmp_path).linear("a")
