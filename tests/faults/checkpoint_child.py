"""Writers of checkpoints that are killed, for test_faults_checkpoints.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from faulty_disk import CLOSE, CREATE, KILL, MKDIR, REMOVE, RENAME, WRITE, faults

from gristmill import nvfp4
from gristmill.checkpoints import Checkpoint, save_modelopt
from gristmill.errors import CheckpointError

CHANGES = CREATE | MKDIR | WRITE | RENAME | REMOVE | CLOSE
MOST_OPERATIONS = 500


def save(folder: Path, which: int, files: int) -> None:
    """One of two checkpoints, of three layers in one file or in two or three."""
    torch.manual_seed(which)
    weights = {f"l.{number}": nvfp4.quantize(torch.randn(16, 32)) for number in range(3)}
    size = {1: 1e9, 2: 800.0, 3: 1.0}[files]
    extra = {f"l.{number}.input_scale": torch.ones(()) for number in range(3)}
    save_modelopt(
        folder,
        {**weights, **(extra if which else {})},
        config={"model_type": f"model {which}"},
        activations=bool(which),
        ignore=[f"of {which}"],
        max_shard_bytes=size,
    )


def state(folder: Path) -> dict[str, Any] | None:
    """All that a checkpoint holds; None if it is visibly incomplete."""
    try:
        found = Checkpoint(folder)
        tensors = {
            name: found.tensor(name).reshape(-1).view(torch.uint8).tolist()
            for name in found.names()
        }
    except CheckpointError:
        return None
    config = json.loads((folder / "config.json").read_text())
    beside = json.loads((folder / "hf_quant_config.json").read_text())
    return {"tensors": tensors, "config": config, "beside": beside}


def killed_writers(top: str, before: int, after: int) -> dict[str, Any]:
    """Kill a writer before each operation on files, and read what it leaves.

    `before` and `after`: the numbers of files of the old and the new checkpoint.
    """
    torch.set_num_threads(1)
    old, new, place = (Path(top) / name for name in ("old", "new", "place"))
    save(old, 0, before)
    save(new, 1, after)
    states = {"old": state(old), "new": state(new)}
    assert None not in states.values()
    outcomes: list[str] = []
    for at in range(1, MOST_OPERATIONS):
        shutil.copytree(old, place)
        child = os.fork()
        if child == 0:
            with faults(place, at, KILL, kinds=CHANGES):
                save(place, 1, after)
            os._exit(0)
        how = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = state(place)
        names = [name for name, wanted in states.items() if found == wanted]
        outcomes.append("incomplete" if found is None else names[0] if names else "MIXED")
        if not (place / "config.json").exists():
            outcomes.append("NO CONFIG")
        save(place, 1, after)
        if state(place) != states["new"]:
            outcomes.append("CANNOT BE SAVED AGAIN")
        shutil.rmtree(place)
        if how != -signal.SIGKILL:
            return {"outcomes": outcomes, "how": how}
    return {"outcomes": outcomes, "how": "it never ends"}
