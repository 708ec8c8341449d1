"""GRISTMILL_RECORD: what a run met, in lines from which its problems can be made again."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS
from gristmill.select import record as module
from gristmill.select.device import device_of
from gristmill.select.record import (
    Recorded,
    described,
    forget_recorded,
    read_recording,
    rebuilt,
    record,
)
from gristmill.settings import reload_settings


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "runs" / "met.jsonl"
    monkeypatch.setenv("GRISTMILL_RECORD", str(path))
    reload_settings()
    forget()
    yield path
    forget()


def forget() -> None:
    forget_recorded()
    for op in OPS.values():
        op.forget_plans()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def norm(rows: int = 4, columns: int = 8) -> None:
    gristmill.rms_norm(torch.ones(rows, columns), torch.ones(columns))


def test_nothing_is_written_unless_asked(tmp_path: Path) -> None:
    forget()
    norm()
    assert not (tmp_path / "runs").exists()


def test_every_problem_is_one_line_and_once(file: Path) -> None:
    for rows in (4, 4, 5, 4):
        norm(rows)
    forget_plans = OPS["rms_norm"].forget_plans
    forget_plans()
    norm(4)
    found = lines(file)
    assert [line["key"].split()[1] for line in found] == ["rows=4", "rows=5"]
    assert (found[0]["op"], found[0]["device"]) == ("rms_norm", "cpu")
    x, weight = found[0]["arguments"][:2]
    assert (x["shape"], x["stride"], x["dtype"]) == ([4, 8], [8, 1], "float32")
    assert weight["shape"] == [8]


def test_calls_of_one_key_that_differ_in_a_word_are_all_there(file: Path) -> None:
    logits, target = torch.randn(4, 8), torch.randint(0, 8, (4,))
    for reduction in ("none", "mean", "none", "sum"):
        OPS["cross_entropy"].forget_plans()
        gristmill.cross_entropy(logits, target, reduction=reduction)
    found = read_recording(file)
    assert len(lines(file)) == len(found) == 3
    assert len({one.key for one in found}) == 1
    assert [one.arguments[7] for one in found] == ["none", "mean", "sum"]


def test_gradients_are_recorded_too(file: Path) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    gristmill.rms_norm(x, torch.ones(8)).sum().backward()
    assert [line["op"] for line in lines(file)] == ["rms_norm", "rms_norm_backward"]


def test_several_processes_may_share_a_file(file: Path) -> None:
    norm()
    forget()
    norm()
    assert len(lines(file)) == 2
    assert len(read_recording(file)) == 1


def test_there_is_an_end_to_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    for rows in range(1, 9):
        norm(rows)
    assert len(lines(file)) == 3
    assert len(module._seen) == 3


def test_a_file_that_cannot_be_written_costs_one_warning(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.parent.write_text("not a folder")
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        norm(4)
        norm(5)
    (found,) = caplog.records
    assert str(file) in found.getMessage()
    assert "GRISTMILL_RECORD" in found.getMessage()


def inputs() -> dict[str, Callable[[], tuple[str, tuple[Any, ...]]]]:
    x = torch.randn(6, 64)
    wide = torch.randn(6, 100)
    return {
        "plain": lambda: ("rms_norm", (x, torch.ones(64))),
        "no weight": lambda: ("rms_norm", (x,)),
        "strided": lambda: ("rms_norm", (wide[:, :64], torch.ones(64))),
        "unaligned": lambda: ("rms_norm", (wide[:, 1:65], torch.ones(64))),
        "expanded": lambda: ("rms_norm", (x[:1].expand(6, 64), torch.ones(64))),
        "nested": lambda: ("rms_norm", (torch.randn(2, 5, 64)[:, :3], torch.ones(64))),
        "no rows": lambda: ("rms_norm", (x[:0], torch.ones(64))),
        "half": lambda: ("layer_norm", (x.half(), torch.ones(64), torch.zeros(64))),
        "the same twice": lambda: ("add_rms_norm", (x, x, torch.ones(64))),
        "a dtype": lambda: ("rms_norm", (x.bfloat16(), None, 1e-6, 0.0, "once", torch.float32)),
        "a mask": lambda: ("softmax", (x, 2, 0.5, torch.ones(6, 64) > 0)),
        "indices": lambda: ("cross_entropy", (x, torch.randint(0, 64, (6,)))),
    }


@pytest.mark.parametrize("name", list(inputs()))
def test_arguments_made_again_are_the_same_problem(name: str, file: Path) -> None:
    op_name, args = inputs()[name]()
    op = OPS[op_name]
    arguments = op.bind_arguments(*args)
    op.run(*arguments)
    (found,) = read_recording(file)
    assert found.op == op_name
    limits = {position: 64 for position, value in enumerate(arguments) if is_index(value)}
    again = rebuilt(found, "cpu", limits)
    op.check(*again)
    one, other = op.problem(*arguments), op.problem(*again)
    assert other == one
    assert other.key(other.rows) == found.key
    for before, after in zip(arguments, again, strict=True):
        if isinstance(before, torch.Tensor):
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
            assert after.stride() == before.stride()
            if before.numel():
                assert after.data_ptr() % 16 == before.data_ptr() % 16
        else:
            assert after == before
    if name == "the same twice":
        assert again[0] is again[1]
    op.run(*again)


def is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64


def test_values_suit_their_dtype() -> None:
    args = (
        torch.zeros(1000, dtype=torch.int64),
        torch.zeros(1000, dtype=torch.bool),
        torch.zeros(1000, dtype=torch.uint8),
        torch.zeros(1000, dtype=torch.float8_e4m3fn),
    )
    ids, mask, codes, small = rebuilt(
        Recorded("toy", "toy", "cpu", tuple(described(args))), "cpu", {0: 5}
    )
    assert set(ids.tolist()) == {0, 1, 2, 3, 4}
    assert 0 < mask.sum() < 1000
    assert codes.max() > 200
    assert small.float().isfinite().all()
    assert small.float().std() > 0.5


def test_written_by_hand_or_not_a_line_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "met.jsonl"
    with pytest.raises(ArgumentError, match=r"met\.jsonl: cannot be read"):
        read_recording(path)
    good = json.dumps({"op": "toy", "key": "toy rows=1", "device": "cpu", "arguments": []})
    for bad in ("{", "[]", '{"op": "toy"}', json.dumps({**json.loads(good), "arguments": 3})):
        path.write_text(f"{good}\n\n{bad}\n")
        with pytest.raises(ArgumentError, match=r"met\.jsonl: line 3"):
            read_recording(path)
    path.write_text(f"{good}\n{good}\n")
    assert read_recording(path) == [Recorded("toy", "toy rows=1", "cpu", ())]


TENSOR = {"shape": [2, 8], "stride": [8, 1], "dtype": "float32", "offset": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": math.inf},
        {"offset": [1]},
        {"offset": None},
        {"shape": [10**15, 8]},  # 32 PB, more than an address space
        {"shape": [2**63, 8]},
        {"shape": [2]},
        {"shape": ["a", 8]},
        {"shape": None},
        {"stride": [-8, 1]},
        {"dtype": "load"},
        {"dtype": "nn"},
        {"dtype": 5},
        {"same_as": 9},
        {"same_as": {}},
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_made_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "met.jsonl"
    arguments = [1.0, {**TENSOR, **change}]
    line = {"op": "toy", "key": "toy rows=1", "device": "cpu", "arguments": arguments}
    path.write_text(f"\n{json.dumps(line)}\n")
    (one,) = read_recording(path)
    with pytest.raises(ArgumentError, match=r"met\.jsonl: line 2: argument 1 cannot be made from"):
        rebuilt(one, "cpu", {})


def test_a_dtype_of_a_recording_is_a_dtype() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.load is not a dtype"):
        rebuilt(Recorded("toy", "toy", "cpu", ({"dtype": "load"},)), "cpu", {})


def test_folders_of_a_recording_are_the_owners_alone(file: Path) -> None:
    before = os.umask(0)
    try:
        norm()
    finally:
        os.umask(before)
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_record_needs_no_op(file: Path) -> None:
    op = OPS["rms_norm"]
    arguments = op.bind_arguments(torch.ones(2, 8))
    record("mine", op.problem(*arguments), arguments)
    assert [line["op"] for line in lines(file)] == ["mine"]
    assert lines(file)[0]["device"] == device_of("cpu").name
