"""A day's worth of distinct shapes, streams and words in bounded memory."""

from __future__ import annotations

import gc
import json
import os
import pkgutil
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch
from process_census import limits, sizes
from process_driver import run_with_fake_driver
from process_shapes import SHAPES, Day

import gristmill
from gristmill import log
from gristmill.multikernel import MultiKernel, multikernel
from gristmill.ops import op as op_module
from gristmill.ops.registry import OPS
from gristmill.select import chooser, history
from gristmill.select.record import forget_recorded

# What may remember all its results: each has as many as there are devices, installed compilers,
# files of ours, or kernels; never as many as there are shapes.
FINITE = {
    "gristmill.jit.cutedsl._dsl",
    "gristmill.jit.driver.architecture",
    "gristmill.jit.driver.bindings",
    "gristmill.jit.driver.launch_function",
    "gristmill.jit.entry._tag",
    "gristmill.jit.nvrtc._headers_in",
    "gristmill.jit.nvrtc._loaded",
    "gristmill.jit.nvrtc.include_dir",
    "gristmill.jit.program._digest",
    "gristmill.jit.program._key",
    "gristmill.jit.program._source_digest",
    "gristmill.jit.program._texts",
    "gristmill.jit.python_sources._digest",
    "gristmill.jit.python_sources._source_digest",
    "gristmill.jit.python_sources._texts",
    "gristmill.jit.tensor_map._encode",
    "gristmill.jit.triton._triton",
    "gristmill.ops.linear_cross_entropy.products._adds_wide",
}
# Left out of the census: only the command and benchmarks import these, for as long as they run.
TOOLS = ("gristmill.bench", "gristmill.cli", "gristmill.integrations", "gristmill.kernels")


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Day:
    """All limits are low, so that a short day reaches them."""
    for module, name in (
        (op_module, "PLANS_KEPT"),
        (log, "_GIVEN_KEPT"),
        (chooser, "_FAILURES_KEPT"),
        (multikernel, "PLANS_KEPT"),
        (history, "_KEPT"),
    ):
        monkeypatch.setattr(module, name, 32)
    forget_recorded()
    history.forget_history()
    for op in OPS.values():
        op.forget_plans()
    torch.set_num_threads(1)
    return Day(monkeypatch)


def grown(before: Counter[str], after: Counter[str], allowed: int) -> dict[str, tuple[int, int]]:
    return {
        place: (before[place], size)
        for place, size in after.items()
        if size - before[place] > allowed
    }


def test_every_function_that_remembers_has_a_limit_or_a_reason() -> None:
    for module in pkgutil.walk_packages(gristmill.__path__, "gristmill."):
        if not module.name.startswith(TOOLS) and not module.name.endswith("__main__"):
            import_module(module.name)
    found = {path: most for path, most in limits().items() if not path.startswith(TOOLS)}
    endless = {path for path, most in found.items() if most is None}
    assert endless - FINITE == set(), "give it a maxsize, or say above why its results are finite"
    assert FINITE - endless == set(), "no more: take it off the list"
    assert max((most for most in found.values() if most is not None), default=0) <= 4096


def test_nothing_grows_with_the_number_of_shapes(day: Day) -> None:
    rounds = 5000 // len(SHAPES) // 2
    day.pass_by(rounds)
    before = sizes()
    count = day.pass_by(rounds)
    assert count > 2000
    assert grown(before, sizes(), allowed=rounds // 4) == {}
    assert max(len(op._plans) for op in OPS.values()) <= 32


def test_the_census_would_notice(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "PLANS_KEPT", 10**9)
    monkeypatch.setattr(history, "_KEPT", 10**9)
    day.pass_by(5)
    before = sizes()
    day.pass_by(60)
    places = " ".join(grown(before, sizes(), allowed=15))
    assert "RMS_NORM._plans" in places
    assert "history" in places


@pytest.mark.long
def test_two_hundred_thousand_shapes(day: Day) -> None:
    """The census again, and the memory of the process itself."""
    rounds = 200_000 // len(SHAPES)
    day.pass_by(rounds // 4)
    gc.collect()
    before, start = sizes(), resident()
    day.pass_by(rounds - rounds // 4)
    gc.collect()
    assert grown(before, sizes(), allowed=100) == {}
    assert resident() - start < 48 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_multikernels_that_meet_ever_new_sizes_and_come_and_go(day: Day) -> None:
    lasting = MultiKernel("lasting", {"one": lambda x: x + 1, "two": lambda x: 1 + x})

    def some(numbers: range) -> None:
        for number in numbers:
            lasting(torch.ones(1 + number))
            passing = MultiKernel(
                f"passing_{number % 20}", {"one": torch.neg, "two": torch.negative}
            )
            passing(torch.ones(2))

    some(range(80))
    gc.collect()
    before = sizes()
    some(range(80, 280))
    gc.collect()
    assert grown(before, sizes(), allowed=50) == {}
    assert len(lasting._plans) <= 32


STREAMS = """
import json, os, pathlib, struct, sys
from gristmill.jit.kernel import kernel
from gristmill.jit.program import Program

program = Program("probe.cu", ("fill<2>",), root=pathlib.Path(sys.argv[1]))
params = struct.Struct("QQqf")
fill = kernel(program, "fill<2>", 0)

def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")

def held(launch):
    cells = [cell.cell_contents for cell in launch.__closure__]
    return max(len(one) for one in cells if isinstance(one, (dict, list)))

launch = fill.prepare(grid=1, block=32, params=params)
for stream in range(1000):
    launch(0x1000 + 64 * stream, 1, 2, 3, 4.0)
before = resident()
most = 0
for stream in range(10_000):
    launch(0x900000 + 64 * stream, 1, 2, 3, 4.0)
    most = max(most, held(launch))
streams = resident() - before
plans = []
for grid in range(1, 201):
    plans.append(fill.prepare(grid=grid, block=32, dependent=True, params=params))
    plans[-1](0, 1, 2, 3, 4.0)
before = resident()
for grid in range(1, 2001):
    plans.append(fill.prepare(grid=grid, block=32, dependent=True, params=params))
    plans[-1](0, 1, 2, 3, 4.0)
print(json.dumps([most, streams, (resident() - before) / 2000]))
"""


def test_streams_that_come_and_go_and_the_weight_of_a_launch(tmp_path: Path) -> None:
    out = run_with_fake_driver(tmp_path, STREAMS)
    most, streams, each = json.loads(out)
    assert most <= 256
    assert streams < 2 << 20
    # 3.9 KB were measured: PLANS_KEPT of them are 16 MB for an op of one launch.
    assert each < 8 << 10
