"""When a slot of a ring may be given back: the emulation sees every arrival that comes too early.

docs/kernel-rules.md says why one lane may arrive for its warp.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from emulation.harness import EmulationError, emulator_for
from nvfp4_wgmma_cases import Kernel, problem_of
from sanitize_modules import ROOT
from test_emulated_nvfp4_wgmma import ORDERS, Lab

from gristmill.jit import Program

SOURCES = ROOT / "src" / "gristmill" / "kernels" / "cuda"

GIVE_BACK = "if (i == 0 && last < STAGES) give_back();"
LANE = "if (lane == 0) barrier_arrive(empty + last);"
WAIT = "wait_for_matrices<1>();"
READ = "const char* const slot_codes ="
DECODE = "decode_piece<X>(mine, codes, scales);"
ARRIVE = "barrier_arrive(empty + slot);"

Edits = tuple[tuple[str, str], ...]
EARLY: dict[str, Edits] = {
    "before anything is read": ((LANE, ""), (READ, f"if (lane == 0) {ARRIVE}\n{READ}")),
    "when the lane has read, and not the warp": (
        (LANE, ""),
        (DECODE, f"{DECODE} if (i == EACH - 1 && lane == 0) {ARRIVE}"),
    ),
    "before the products are waited for": ((GIVE_BACK, ""), (WAIT, f"{GIVE_BACK} {WAIT}")),
}


@dataclass(frozen=True)
class Edited(Kernel):
    """A kernel from another folder of sources."""

    root: Path = SOURCES

    @property
    def program(self) -> Program:
        return replace(super().program, root=self.root)


def _kernel(folder: Path, edits: Edits) -> Kernel:
    sources = folder / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / "nvfp4_wgmma.cu"
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return Edited(16, 1, depth=2, stages=2, root=sources)


def _seen(config: pytest.Config, kernel: Kernel) -> list[bool]:
    """By order of threads: whether the emulation stops, or else the result is right."""
    problem = problem_of(9, 64, 1024, kernel.x, whole=True)
    expected, found = problem.exact.float().to(kernel.out), []
    for order in ORDERS:
        try:
            y, _ = Lab(emulator_for(config)).run(kernel, problem, order=order)
        except EmulationError as error:
            assert "changed in shared memory between its issue and the wait" in str(error)
            found.append(True)
        else:
            assert torch.equal(y, expected)
            found.append(False)
    return found


def test_slots_are_given_back_when_all_lanes_have_read(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    assert not any(_seen(pytestconfig, _kernel(tmp_path, ())))


@pytest.mark.parametrize("name", EARLY)
def test_a_slot_given_back_too_early_is_seen(
    pytestconfig: pytest.Config, tmp_path: Path, name: str
) -> None:
    assert any(_seen(pytestconfig, _kernel(tmp_path, EARLY[name])))
