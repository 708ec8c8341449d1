"""When a slot of a ring may be given back: the emulation sees every arrival that comes too early.

docs/kernel-rules.md says why one lane may arrive for its warp.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost
from emulation.harness import EmulationError, Emulator, emulator_for, maps_of_rows
from nvfp4_moe_cases import SMALL, Mixture
from nvfp4_wgmma_cases import ORDERS, Kernel, Lab, problem_of
from sanitize_modules import ROOT

from gristmill.jit import Program
from gristmill.ops.nvfp4_moe import wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import MoeConfig

SOURCES = ROOT / "src" / "gristmill" / "kernels" / "cuda"

Edits = tuple[tuple[str, str], ...]
UNTIL_READ = "before anything is read"
UNTIL_ALL_READ = "when the lane has read, and not the warp"
UNTIL_MULTIPLIED = "before the GEMM is waited for"
UNTIL_END = "at the end of a tile, before its last GEMM is waited for"

GIVE_BACK = "if (i == 0 && last < STAGES) give_back();"
LANE = "if (lane == 0) barrier_arrive(empty + last);"
WAIT = "wait_for_matrices<1>();"
ARRIVE = "if (lane == 0) barrier_arrive(empty + slot);"
WAIT_FOR_ALL = "wait_for_matrices<0>();\n        hold(sums);\n        "
END = (f"{WAIT_FOR_ALL}give_back();", f"give_back();\n        {WAIT_FOR_ALL}")

LINEAR_READ = "const char* const slot_codes ="
LINEAR_DECODE = "decode_piece<X>(mine, codes, scales);"
EARLY_IN_LINEAR: dict[str, Edits] = {
    UNTIL_READ: ((LANE, ""), (LINEAR_READ, f"{ARRIVE}\n{LINEAR_READ}")),
    UNTIL_ALL_READ: (
        (LANE, ""),
        (LINEAR_DECODE, f"{LINEAR_DECODE} if (i == EACH - 1) {{ {ARRIVE} }}"),
    ),
    UNTIL_MULTIPLIED: ((GIVE_BACK, ""), (WAIT, f"{GIVE_BACK} {WAIT}")),
    UNTIL_END: (END,),
}

MOE_READ = "const char* const tokens ="
MOE_WORK = "const auto work ="
MOE_DECODED = "codes += K_GROUPS * PIECE_CODES,"
# How many pieces of the slot have been decoded.
COUNTED = (MOE_WORK, f"unsigned decoded = 0;\n{MOE_WORK}")
EARLY_IN_MOE: dict[str, Edits] = {
    UNTIL_READ: ((LANE, ""), (MOE_READ, f"{ARRIVE}\n{MOE_READ}")),
    UNTIL_ALL_READ: (
        COUNTED,
        (LANE, ""),
        (MOE_DECODED, f"if (++decoded == count) {{ {ARRIVE} }}\n{MOE_DECODED}"),
    ),
    UNTIL_MULTIPLIED: (
        COUNTED,
        (GIVE_BACK, ""),
        (WAIT, f"if (!decoded++ && last < STAGES) give_back(); {WAIT}"),
    ),
    UNTIL_END: (END,),
}


def _edited(folder: Path, file: str, edits: Edits) -> Path:
    """A copy of the sources, with `edits` in one file."""
    sources = folder / "cuda"
    shutil.copytree(SOURCES, sources)
    path = sources / file
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return sources


def _stops(run: Callable[[int], None]) -> list[bool]:
    """By order of threads: whether the emulation stops because a copy came too early."""
    found = []
    for order in ORDERS:
        try:
            run(order)
        except EmulationError as error:
            if "changed in shared memory between its issue and the wait" not in str(error):
                raise
            found.append(True)
        else:
            found.append(False)
    return found


@dataclass(frozen=True)
class Edited(Kernel):
    """A kernel from another folder of sources."""

    root: Path = SOURCES

    @property
    def program(self) -> Program:
        return replace(super().program, root=self.root)


def _linear(config: pytest.Config, sources: Path) -> list[bool]:
    kernel = Edited(16, 1, depth=2, stages=2, root=sources)
    problem = problem_of(9, 192, 1024, kernel.x, whole=True)
    expected = problem.exact.float().to(kernel.out)

    def run(order: int) -> None:
        y, _ = Lab(emulator_for(config)).run(kernel, problem, clusters=1, order=order)
        assert torch.equal(y, expected)

    return _stops(run)


def test_linear_gives_slots_back_when_all_lanes_have_read(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    assert not any(_linear(pytestconfig, _edited(tmp_path, "nvfp4_wgmma.cu", ())))


@pytest.mark.parametrize("name", EARLY_IN_LINEAR)
def test_a_slot_of_linear_given_back_too_early_is_seen(
    pytestconfig: pytest.Config, tmp_path: Path, name: str
) -> None:
    sources = _edited(tmp_path, "nvfp4_wgmma.cu", EARLY_IN_LINEAR[name])
    assert any(_linear(pytestconfig, sources))


class _FromFolder:
    """An emulator of programs whose sources are in another folder."""

    def __init__(self, emulator: Emulator, root: Path) -> None:
        self._emulator, self._root = emulator, root

    def launch(self, program: Program, *args: Any, **options: Any) -> Any:
        return self._emulator.launch(replace(program, root=self._root), *args, **options)


def _moe(host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, sources: Path) -> list[bool]:
    monkeypatch.setattr(wgmma, "maps_of_rows", maps_of_rows)
    monkeypatch.setattr(host, "emulator", _FromFolder(host.emulator, sources))
    config = MoeConfig(SMALL, SMALL, 16)
    call = Mixture(tokens=3, experts=2, topk=1, hidden=528, inner=528).call()
    return _stops(lambda order: call.check(call.run(host, config, order).outputs, config))


def test_moe_gives_slots_back_when_all_lanes_have_read(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not any(_moe(host, monkeypatch, _edited(tmp_path, "nvfp4_moe.cu", ())))


@pytest.mark.parametrize("name", EARLY_IN_MOE)
def test_a_slot_of_moe_given_back_too_early_is_seen(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    sources = _edited(tmp_path, "nvfp4_moe.cu", EARLY_IN_MOE[name])
    assert any(_moe(host, monkeypatch, sources))
