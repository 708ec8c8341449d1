"""What happens when a real op meets a problem for the first time, on the CPU."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from select_sight import CPU, KEY, in_file, norm

import gristmill
from gristmill.ops.rms_norm import RMS_NORM
from gristmill.select import batch_invariant, sight, use
from gristmill.select.overrides import tuning as tuning_region
from gristmill.select.tables import user_table_path


def test_off_by_default(tuned: list[str]) -> None:
    norm()
    assert tuned == []
    assert not user_table_path(CPU).exists()


def test_the_first_call_makes_a_row_in_the_users_table(first_call: Any, tuned: list[str]) -> None:
    first_call()
    assert torch.allclose(norm(), torch.ones(20, 64))
    assert tuned == [KEY]
    (row,) = in_file().rows.values()
    assert (row.key, row.rows) == (KEY, 20)
    assert set(row.times) == {"library", "reference"}
    assert row.variant in row.times
    assert row.us > 0


def test_one_row_serves_what_it_covers_and_later_plans(first_call: Any, tuned: list[str]) -> None:
    first_call()
    for rows in (20, 20, 17, 32, 5):
        norm(rows)
    assert tuned == [KEY]
    norm(33)
    assert tuned == [KEY, KEY.replace("rows=16", "rows=64")]
    RMS_NORM.forget_plans()
    norm(20)
    assert len(tuned) == 2


def test_no_rows_are_no_measure_of_one(first_call: Any, tuned: list[str]) -> None:
    """One row covers both, as where an expert gets no tokens."""
    first_call()
    assert norm(0).shape == (0, 64)
    with gristmill.tune() as report:
        norm(0)
    assert (tuned, report.outcomes) == ([], [])
    norm(1)
    assert in_file().rows[KEY.replace("rows=16", "rows=1")].rows == 1


def test_another_process_uses_the_row(first_call: Any) -> None:
    """The slower of the two, so that it is not what would have run anyway."""
    first_call()
    norm()
    usual = next(one.name for one in RMS_NORM.variants if one.supports(problem_of()) is None)
    other = "reference" if usual == "library" else "library"
    path = user_table_path(CPU)
    content = json.loads(path.read_text())
    content["rows"][0]["variant"] = other
    path.write_text(json.dumps(content))
    script = (
        "import torch, gristmill as gm\n"
        "x = torch.ones(20, 64)\n"
        "gm.rms_norm(x, x[0])\n"
        "found = gm.explain('rms_norm', x, x[0])\n"
        "print(found.chosen, found.source, gm.counters()['choices'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRISTMILL_TUNE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{other} user table {{'rms_norm:{other}': 1}}"


def problem_of(rows: int = 20) -> Any:
    return RMS_NORM.problem(*RMS_NORM.bind_arguments(torch.ones(rows, 64), torch.ones(64)))


def test_no_tuning_where_a_variant_is_asked_for(first_call: Any, tuned: list[str]) -> None:
    first_call()
    with use("rms_norm", "reference"):
        norm()
    assert tuned == []
    norm()
    assert tuned == [KEY]


def test_no_tuning_where_results_must_be_the_same_on_every_run(
    first_call: Any, tuned: list[str]
) -> None:
    first_call()
    torch.use_deterministic_algorithms(True)
    try:
        norm()
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuned == []


def test_no_tuning_where_rows_must_not_depend_on_the_batch(
    first_call: Any, tuned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call()
    for variant in RMS_NORM.variants:
        monkeypatch.setattr(type(variant), "varies_with_batch", lambda self, problem: None)
    with batch_invariant():
        norm()
    assert tuned == []


def test_no_tuning_in_a_capture(
    first_call: Any, tuned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sight, "is_capturing", lambda device: True)
        norm()
    assert tuned == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert sight.is_capturing(gristmill.select.KNOWN["sm_90a"])
    assert not sight.is_capturing(CPU)


@pytest.mark.parametrize("table", ["off", "none"])
def test_without_the_users_table_rows_are_kept_in_memory(
    first_call: Any, tuned: list[str], table: str
) -> None:
    first_call(GRISTMILL_TABLE=table)
    norm()
    RMS_NORM.forget_plans()
    norm(30)
    assert tuned == [KEY]
    assert not user_table_path(CPU).exists()
    found = gristmill.explain("rms_norm", torch.ones(20, 64), torch.ones(64))
    assert found.source == "tuning of this process"


def test_a_folder_that_cannot_be_written_costs_one_warning(
    first_call: Any, tuned: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    first_call(GRISTMILL_CACHE_DIR=str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        norm(20)
        norm(500)
    assert len(tuned) == 2
    (record,) = [one for one in caplog.records if "kept in memory only" in one.getMessage()]
    assert "cache" in record.getMessage()
    RMS_NORM.forget_plans()
    norm(20)
    assert len(tuned) == 2


def test_a_table_that_is_none_is_told_of_when_read_and_when_written(
    first_call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = user_table_path(CPU)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 2}')
    first_call()
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        norm(20)
        norm(500)
    read, written = (one.getMessage() for one in caplog.records)
    assert read.endswith("has schema 2, this version reads 3; it is ignored")
    assert written.endswith("what was tuned is kept in memory only")
    assert path.read_text() == '{"schema": 2}'


def test_threads_that_meet_one_problem_tune_it_once(first_call: Any, tuned: list[str]) -> None:
    first_call()
    barrier = threading.Barrier(8)
    results: list[torch.Tensor] = []

    def call(rows: int) -> None:
        barrier.wait(30)
        results.append(norm(rows))

    threads = [threading.Thread(target=call, args=(17 + number % 4,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert tuned == [KEY]


def test_an_error_in_tuning_falls_back_with_one_warning(
    first_call: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first_call()

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: no time")

    monkeypatch.setattr(sight, "tune", fail)
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        for rows in (20, 500):
            assert torch.allclose(norm(rows), torch.ones(rows, 64))
    (record,) = caplog.records
    assert "rms_norm" in record.getMessage()
    assert "CUDA error: no time" in record.getMessage()


def test_arguments_come_out_as_they_went_in(first_call: Any, tuned: list[str]) -> None:
    """An op in place: it runs once on the arguments, however often it was timed."""
    x, residual = torch.randn(20, 64), torch.randn(20, 64)
    weight = torch.randn(64)
    first_call()
    expected_x, expected_residual = x.clone(), residual.clone()
    with use("fused_add_rms_norm_", "reference"):
        gristmill.fused_add_rms_norm_(expected_x, expected_residual, weight)
    assert tuned == []
    gristmill.fused_add_rms_norm_(x, residual, weight)
    assert len(tuned) == 1
    assert torch.allclose(x, expected_x, atol=1e-6)
    assert torch.equal(residual, expected_residual)


def test_random_numbers_go_on_as_if_nothing_had_been_timed(first_call: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    first_call()
    torch.manual_seed(3)
    norm()
    assert torch.equal(torch.rand(4), expected)


def test_there_is_an_end_to_tuning(
    first_call: Any,
    tuned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sight, "MOST_ROWS", 2)
    first_call()
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        for columns in (16, 24, 32, 40):
            norm(20, columns)
    assert len(tuned) == 2
    (record,) = caplog.records
    assert "2 problems have been tuned" in record.getMessage()


# regions


def test_a_region_tunes_what_is_met_inside_and_says_so(tuned: list[str]) -> None:
    said: list[str] = []
    region = sight.Region(progress=said.append)
    number = sight.open_region(region)
    try:
        with tuning_region(number):
            norm()
            norm(30)
        norm(500)
    finally:
        sight.close_region(number)
    assert tuned == said == [KEY]
    assert [outcome.row.key for outcome in region.outcomes] == [KEY]


@pytest.mark.parametrize("again", [False, True])
def test_a_region_measures_again_only_if_asked_and_then_once(
    first_call: Any, tuned: list[str], again: bool
) -> None:
    first_call()
    norm()
    number = sight.open_region(sight.Region(again=again))
    try:
        with tuning_region(number):
            norm()
            norm(30)
    finally:
        sight.close_region(number)
    assert tuned == [KEY] * (2 if again else 1)


def test_a_region_that_is_closed_tunes_no_more(tuned: list[str]) -> None:
    number = sight.open_region(sight.Region())
    sight.close_region(number)
    with tuning_region(number):
        norm()
    assert tuned == []
