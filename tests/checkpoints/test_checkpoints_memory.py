"""Loading holds the weights once: the peak of a process that does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hand_made import MODELOPT, modelopt, write_shards

SRC = Path(__file__).resolve().parents[2] / "src"

LOAD = """
import json, sys
import torch
from gristmill.checkpoints import Checkpoint

def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

folder, how = sys.argv[1:]
checkpoint = Checkpoint(folder)
checkpoint.linear("small")
before = memory("VmRSS")
if how == "linear":
    kept = [checkpoint.linear(name) for name in checkpoint.modules()]
elif how == "fused":
    kept = [checkpoint.fused([f"l.{n}.{part}_proj" for part in "qkv"]) for n in range(4)]
elif how == "experts":
    kept = list(checkpoint.experts("m.experts"))
print(json.dumps([sum(weight.nbytes for weight in kept), memory("VmHWM") - before]))
"""


def blank(module: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    return modelopt(
        module,
        {
            "codes": torch.zeros(rows, columns // 2, dtype=torch.uint8),
            "scales": torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
            "global_scale": torch.tensor(0.5),
        },
    )


def growth(folder: Path, how: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), how],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    weights, grown = json.loads(done.stdout)
    return weights, grown


@pytest.mark.long
def test_layers_are_held_once(tmp_path: Path) -> None:
    """Layers of 9 MB, 12 of them in one file: all of that file mapped would be twice as much."""
    small = blank("small", 16, 32)
    shards = []
    for half in range(2):
        tensors = dict(small) if half == 0 else {}
        for number in (2 * half, 2 * half + 1):
            for part in "qkv":
                tensors |= blank(f"l.{number}.{part}_proj", 4096, 4096)
        shards.append(tensors)
    write_shards(tmp_path, *shards, config=MODELOPT)
    for how in ("linear", "fused"):
        weights, grown = growth(tmp_path, how)
        assert weights > 100e6
        assert grown < 1.3 * weights
        assert grown > 0.9 * weights  # or the measure is wrong


def test_experts_are_held_once(tmp_path: Path) -> None:
    """One stack in one file, of which only a part may be left open."""
    tensors = blank("small", 16, 32)
    for e in range(60):
        for part, shape in (("gate", (768, 2048)), ("up", (768, 2048)), ("down", (2048, 768))):
            tensors |= blank(f"m.experts.{e}.{part}_proj", *shape)
    write_shards(tmp_path, tensors, config=MODELOPT)
    weights, grown = growth(tmp_path, "experts")
    assert weights > 150e6
    assert 0.9 * weights < grown < 1.3 * weights
