"""What was measured, and how long it is believed: tables, fingerprints, recordings, ranks."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from multikernel_helpers import (
    chosen,
    fake_timing,
    forget_choices,
    make_two,
    minus,
    pair,
    plus,
    ran,
    set_tuning,
)

import gristmill as gm
from gristmill.errors import TableError
from gristmill.multikernel import MultiKernel
from gristmill.multikernel.fingerprint import fingerprint
from gristmill.settings import reload_settings

ROOT = Path(__file__).resolve().parents[2]


USERS = """
import torch
from gristmill import MultiKernel

def plus(x, y):
    return x + y

def minus(x, y):
    return x - y

def make(version=None):
    return MultiKernel("shared", {"plus": plus, "minus": minus}, version=version)
"""

TUNES = """
from gristmill.select import tuning
from gristmill.select.timing import Timing

def fake(functions, sets, **options):
    return {name: Timing(1.0 if name == "minus" else 9.0, 0.0, 3, "wall") for name in functions}

tuning.time_interleaved = fake
x = torch.ones(64, 8)
make("1").tune(x, x)
"""

READS = """
x = torch.ones(64, 8)
one = make("1")
print(float(one(x, x)[0, 0]), one.explain(x, x).source)
print(make("2").explain(x, x))
"""


def run_in_a_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_rows_are_read_by_a_fresh_process_and_stale_by_version() -> None:
    run_in_a_process(USERS + TUNES)
    first, *others = run_in_a_process(USERS + READS).splitlines()
    assert first == "0.0 user table"
    (stale,) = [line for line in others if "stale" in line]
    assert "its row for 33 to 128 rows is ignored: stale: minus has changed" in stale


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (("x + y", "x + y"), True),
        (("def minus", "\n# a comment\ndef minus"), True),
        (("x + y", "x + y + 0"), False),  # also of the kernel that has lost
        (("x - y", "x - 1 * y"), False),
        (("def minus(x, y)", "def minus(x, y, z=1)"), False),
        (('"minus": minus', '"minus": minus, "third": plus'), False),
    ],
)
def test_row_holds_while_the_functions_are_the_same(
    change: tuple[str, str], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    before: dict[str, Any] = {}
    exec(USERS, before)
    before["make"]().tune(*pair(64))
    after: dict[str, Any] = {}
    exec(USERS.replace(*change), after)
    assert chosen(after["make"](), *pair(64)) == ("minus" if holds else "plus")


TRITON_USERS = """
import torch, triton
import triton.language as tl
from gristmill import MultiKernel

BLOCK = 128

@triton.jit
def inner(x):
    return x + 1

@triton.jit
def add_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, inner(tl.load(x + at, mask=at < n)), mask=at < n)

def launch(x):
    add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK)

def plain(x):
    x += 1

def make():
    return MultiKernel("launched", {"triton": launch, "plain": plain})
"""


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (("BLOCK = 128", "# as before\nBLOCK = 128"), True),
        (("BLOCK = 128", "BLOCK = 256"), False),
        (("return x + 1", "return x + 2"), False),
        (("tl.program_id(0) * BLOCK", "BLOCK * tl.program_id(0)"), False),
    ],
)
def test_what_a_function_launches_is_part_of_its_fingerprint(
    change: tuple[str, str], holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for text in (TRITON_USERS, TRITON_USERS.replace(*change)):
        name = f"users_{len(found)}"
        (tmp_path / f"{name}.py").write_text(text)
        module = importlib.import_module(name)
        found.append(fingerprint(module.make().kernels, None))
        del sys.modules[name]
    assert (found[0] == found[1]) == holds


def test_fingerprint_ends_for_functions_that_call_each_other() -> None:
    kernels = {"even": is_even, "odd": is_odd, "builtin": torch.add, "object": Doubler()}
    assert fingerprint(kernels, None) == fingerprint(dict(kernels), None)
    assert fingerprint(kernels, None) != fingerprint(kernels, "2")
    assert fingerprint({"a": torch.add}, None) != fingerprint({"a": torch.sub}, None)


def is_even(x: Any) -> Any:
    return x == 0 or is_odd(x - 1)


def is_odd(x: Any) -> Any:
    return x != 0 and is_even(x - 1)


class Doubler:
    def __call__(self, x: Any) -> Any:
        return 2 * x


def test_row_is_stale_when_a_constant_of_a_closure_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, {"small": 9.0, "large": 1.0})

    def blocked(block: int) -> Any:
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return torch.cat(x.split(block))

        return kernel

    def make(large: int) -> MultiKernel:
        kernels = {"small": blocked(4), "large": functools.partial(blocked(large))}
        return MultiKernel("blocks", kernels)

    make(16).tune(torch.zeros(64, 2))
    assert chosen(make(16), torch.zeros(64, 2)) == "large"
    assert chosen(make(32), torch.zeros(64, 2)) == "small"


def test_rows_of_a_saved_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    one = make_two()
    other = MultiKernel("two_more", {"plus": plus, "minus": minus})
    other.tune(*pair(64))
    one.tune_at_hints(pair, [16, 64])
    path = tmp_path / "saved" / "two.json"
    assert one.save(path, "cpu") == 2
    rows = json.loads(path.read_text())["rows"]
    assert all(row["key"].startswith("multikernel/two rows=") for row in rows)
    forget_choices()
    assert ran(one, *pair(64)) == "plus"
    assert one.load(path, "cpu") == 2
    assert ran(one, *pair(64)) == "minus"
    assert other.load(path, "cpu") == 0
    path.write_text(path.read_text().replace('"gpu": "cpu"', '"gpu": "NVIDIA H200"'))
    with pytest.raises(TableError, match="is for 'NVIDIA H200', not for 'cpu'"):
        one.load(path, "cpu")


class Mode(enum.Enum):
    FAST = 1

    def __str__(self) -> str:
        return "fast\n\x1b[31m"


class Plain:
    __qualname__ = "Plain\u202e"


@pytest.mark.parametrize(
    "args",
    [
        ({"a\nb\xa0": torch.ones(64, 8)},),
        ({"a": torch.ones(64, 8)}, Mode.FAST),
        ({"a": torch.ones(64, 8)}, Plain()),
    ],
    ids=["key", "value", "type"],
)
def test_names_that_are_not_printable_are_kept_and_agreed_on(
    monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...]
) -> None:
    """The keys of a dict, values and types are in the keys of a table's rows."""
    fake_timing(monkeypatch, {"once": 9.0, "twice": 1.0})
    one = MultiKernel(
        "of_a_dict",
        {
            "once": lambda x, mode=None: sum(x.values()),
            "twice": lambda x, mode=None: 2 * sum(x.values()),
        },
    )
    assert one.tune(*args) is not None
    forget_choices()
    assert one.explain(*args).source == "user table"
    assert float(one(*args)[0, 0]) == 2.0
    # Ranks send each other rows.
    set_tuning(monkeypatch)
    forget_choices()
    monkeypatch.setattr("gristmill.select.sight.agreement", FakeAgreement(None))
    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    assert float(one(*args)[0, 0]) == 2.0


def test_recorded_calls_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Any, y: Any, scale: float = 1.0, *, flag: bool = False) -> torch.Tensor:
        return y * scale

    one = MultiKernel("noted", {"plus": scaled, "minus": lambda *a, **k: scaled(*a, **k)})
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv("GRISTMILL_RECORD", str(path))
    reload_settings()
    one(*pair(64), 2.0)
    one(*pair(64), scale=2.0)
    one(*pair(70), flag=True)
    one([torch.ones(1)], torch.ones(1))  # not of the kind that a line can hold
    gm.rms_norm(torch.ones(4, 8))
    monkeypatch.delenv("GRISTMILL_RECORD")
    reload_settings()
    lines = [json.loads(line)["op"] for line in path.read_text().splitlines()]
    assert lines == ["multikernel/noted", "multikernel/noted", "rms_norm"]
    fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    outcomes = one.tune_recorded(path, "cpu")
    assert [outcome.row.rows for outcome in outcomes] == [64, 70]
    assert chosen(one, *pair(64), 2.0) == "minus"
    assert chosen(one, *pair(64), flag=True) == "minus"
    assert chosen(one, *pair(64)) == "plus"


class FakeAgreement:
    """The store of a group of ranks in which another rank has been first."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def alone(self) -> bool:
        return False

    def store(self) -> object:
        return self

    def agree(self, key: str, decide: Any, **options: Any) -> str | None:
        self.asked.append(key)
        if self.answer is None:
            self.answer = decide()
        return self.answer


def test_ranks_take_the_word_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"plus": 9.0, "minus": 1.0})
    group = FakeAgreement(None)
    monkeypatch.setattr("gristmill.select.sight.agreement", group)
    one = make_two()
    assert ran(one, *pair(64)) == "minus"
    assert len(clock.runs) == 2
    (key,) = group.asked
    assert key == "tune cpu multikernel/two rows=64 x=float32 y=float32 x[*,8] y[*,8]"

    monkeypatch.setenv("GRISTMILL_TABLE", "off")
    reload_settings()
    forget_choices()
    fake_timing(monkeypatch, {"plus": 1.0, "minus": 9.0})
    assert ran(one, *pair(64)) == "minus"  # as the other rank says, and against this one's clock
    forget_choices()
    assert one.tune(*pair(64)) is None
    assert chosen(one, *pair(64)) == "minus"
