from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from select_fakes import H200, Fake, problem

import gristmill as gm
from gristmill.errors import DriverError
from gristmill.select import Device, history, resolve
from gristmill.select.history import forget_history, report


@pytest.fixture(autouse=True)
def no_history() -> Iterator[None]:
    forget_history()
    yield
    forget_history()


def test_problems_that_run_alike_are_one_row_with_the_rows_seen() -> None:
    variants = [Fake("first", configured=True), Fake("second")]
    for rows in (64, 1, 4096, 256):
        resolve("toy", variants, problem(rows))
    resolve("toy", variants, problem(dims=(("N", 7),)))
    small, large = sorted(report().rows, key=lambda row: row.plans)
    assert (large.op, large.variant, large.source, large.plans) == (
        "toy",
        "first",
        "preference",
        4,
    )
    assert (large.rows_least, large.rows_most, large.rows) == (1, 4096, "1..4096")
    assert large.problem == "N=4096 x=bfloat16 weight=float32 llama strided"
    assert large.config is not None
    assert large.config["threads"] == 128
    assert (small.rows, small.problem.split()[0]) == ("1000", "N=7")


def test_what_runs_otherwise_is_a_row_of_its_own() -> None:
    first = Fake("first")
    resolve("toy", [first, Fake("second")], problem())
    resolve("toy", [Fake("first", refusal="no"), Fake("second")], problem())
    resolve("toy", [first], problem(deterministic=True))
    resolve("toy", [first], problem(device=replace(H200, name="NVIDIA H100")))
    rows = report().rows
    assert [row.variant for row in rows].count("first") == 3
    assert len(rows) == 4
    assert [row.problem.split()[-1] for row in rows].count("deterministic") == 1


def test_the_table() -> None:
    assert str(report()).startswith("no op has run yet\nkernels: 0 programs compiled in 0.00 s")
    broken = Fake("first", failure=DriverError("no"))
    resolve("toy", [broken, Fake("second")], problem())
    head, row, device, fallback, kernels = str(report()).splitlines()
    assert head.split() == ["op", "rows", "problem", "runs", "by", "plans"]
    assert row.split() == [
        *("toy", "1000", "N=4096", "x=bfloat16", "weight=float32", "llama", "strided"),
        *("second", "preference", "1"),
    ]
    assert row.index("second") == head.index("runs")
    assert device == "on NVIDIA H200 (sm_90a, 132 SMs)"
    assert fallback == "fallback: toy:first, 1 times"
    assert kernels.startswith("kernels: 0 programs compiled")


def test_several_devices_have_a_column() -> None:
    for device in (H200, Device("cpu", "cpu")):
        resolve("toy", [Fake("first")], problem(device=device))
    head, *rows = str(report()).splitlines()[:3]
    assert head.endswith("device")
    assert sorted(row.split()[-1] for row in rows) == ["SMs)", "cpu"]


def test_as_data() -> None:
    resolve("toy", [Fake("first")], problem())
    found = report().as_dict()
    assert found["rows"][0]["variant"] == "first"
    assert found["counters"]["plans"] == 1
    assert found["forgotten"] == 0


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_KEPT", 10)
    for size in range(25):
        resolve("toy", [Fake("first")], problem(dims=(("N", size),)))
    found = report()
    assert (len(found.rows), found.forgotten) == (10, 15)
    assert "and 15 older rows that are not kept" in str(found)


def test_meta_tensors_run_nothing() -> None:
    gm.rms_norm(torch.ones(2, 8, device="meta"))
    assert report().rows == ()


def test_real_calls_are_planned_once() -> None:
    x = torch.ones(3, 8, requires_grad=True)
    for _ in range(3):
        gm.rms_norm(x).sum().backward()
    found = {row.op: row for row in report().rows}
    assert set(found) == {"rms_norm", "rms_norm_backward"}
    assert (found["rms_norm"].plans, found["rms_norm"].rows) == (1, "3")


def test_a_users_kernel_that_raised_does_not_run() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not this one")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    both = gm.MultiKernel("history_toy", {"picky": picky, "plain": plain})
    both(torch.ones(3))
    assert [(row.op, row.variant, row.plans) for row in report().rows] == [
        ("history_toy", "plain", 1)
    ]
    assert report().counters["fallbacks"] == {"history_toy:picky": 1}
