"""`gristmill explain`: the roof, times from tables, modes, and commands that can be run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN, Row, Table, reset_tables
from gristmill.select.configs import config_to_json
from gristmill.select.problem import Span
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings

Run = Callable[[str], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("gristmill.select.tables._shipped", list)  # the user's table alone
    reload_settings()
    reset_tables()

    def invoke(line: str) -> str:
        result = CliRunner().invoke(app, line.split())
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    yield invoke
    monkeypatch.undo()
    reload_settings()
    reset_tables()


def tuned(**changes: Any) -> Row:
    """A row of the user's for rms_norm on an H200, won by the second in the order of preference."""
    op = OPS["rms_norm"]
    problem = op.problem(*op.example((4096, 8192), torch.bfloat16, "meta"), device=KNOWN["sm_90a"])
    variant = next(one for one in op.variants if one.name == "cuda_cluster")
    config = variant.config(problem)
    row = Row(
        key=problem.key(4096),
        covers=problem.sizes.span(4096),
        variant=variant.name,
        config=config_to_json(config),
        us=40.0,
        spread_us=0.1,
        second=None,
        date="2026-11-15",
        source_hash=variant.source_hash(problem, config),
        rows=4096,
        times={"cuda_block": 41.0, "cuda_cluster": 40.0, "library": 60.0},
        candidates=3,
        torch="2.11.0",
    )
    return replace(row, **changes)


def keep(row: Row) -> None:
    table = Table.for_device(KNOWN["sm_90a"])
    table.put(row)
    table.save(user_table_path(KNOWN["sm_90a"]))
    reset_tables()


def test_the_roof_is_that_of_the_gpu_asked_about(run: Run) -> None:
    found = json.loads(run("explain rms_norm --shape 4096x8192 --arch sm_90a --json"))
    assert found["roof"]["bytes"] == 2 * 2 * 4096 * 8192 + 2 * 8192
    assert found["roof"]["us"] == pytest.approx(found["roof"]["bytes"] / 4.8e12 * 1e6)
    assert "roof: 134 MB at 4.8 TB/s = 28.0 us" in run(
        "explain rms_norm --shape 4096x8192 --arch sm_90a"
    )
    assert json.loads(run("explain rms_norm --json"))["roof"] is None


def test_a_tuned_row_is_shown_with_its_times_and_shares(run: Run) -> None:
    keep(tuned())
    found = json.loads(run("explain rms_norm --shape 4096x8192 --arch sm_90a --json"))
    assert (found["chosen"], found["source"]) == ("cuda_cluster", "user table")
    times = {one["variant"]: one["measured_us"] for one in found["variants"]}
    assert times["cuda_block"] == 41.0
    assert times["reference"] is None
    text = run("explain rms_norm --shape 4096x8192 --arch sm_90a")
    assert "40.00  70%" in text
    assert "torch 2.11.0: cuda_cluster 40.00 us (spread 0.10); 3 launches were timed" in text
    assert 'with gm.use("rms_norm", "cuda_block"): ...' in text


def test_what_the_row_covers_is_shown_and_beyond_it_its_neighbours(run: Run) -> None:
    keep(tuned(also={"8000": 77.0}))
    text = run("explain rms_norm --shape 5000x8192 --arch sm_90a")
    assert "; 2049 to 8192 rows share the choice measured at rows=4096\n" in text
    assert "this one also took 77.00 us at rows=8000" in text
    found = json.loads(run("explain rms_norm --shape 5000x8192 --arch sm_90a --json"))
    assert (found["rows"], found["measured_at"], found["covers"]) == (5000, 4096, [2049, 8192])
    keep(tuned(covers=Span(4000, 8192)))
    text = run("explain rms_norm --shape 3000x8192 --arch sm_90a")
    assert "user table: no row covers this number of rows\n  above, for 4000 to 8192 rows: " in text


def test_a_stale_row_is_told(run: Run) -> None:
    keep(tuned(source_hash="0" * 16))
    text = run("explain rms_norm --shape 4096x8192 --arch sm_90a")
    assert "runs cuda_block, by preference" in text
    assert (
        "its row for 2049 to 8192 rows is ignored: stale: cuda_cluster has changed since 2026"
        in text
    )


def test_the_command_it_names_asks_about_the_same_problem(run: Run) -> None:
    """The words behind `tune` are those that `explain` takes, too."""
    first = json.loads(run("explain linear --shape 64x512x256 --dtype fp16 --arch sm_90a --json"))
    (line,) = [line for line in first["changes"] if "gristmill tune" in line]
    again = json.loads(run(line.replace("gristmill tune", "explain") + " --arch sm_90a --json"))
    assert again == first


def test_modes_can_be_asked_about(run: Run) -> None:
    found = json.loads(run("explain rms_norm --arch sm_90a --deterministic --json"))
    assert found["modes"]["deterministic"] is True
    assert found["modes"]["batch_invariant"] is False
    found = json.loads(run("explain rms_norm --arch sm_90a --batch-invariant --json"))
    assert found["modes"]["batch_invariant"] is True
    assert found["measured_at"] in (None, 256)
    text = run("explain rms_norm --arch sm_90a --batch-invariant")
    assert "; whatever the number of rows, the choice is that for 256\n" in text
    for one in found["variants"]:
        assert one["status"] != "excluded" or "not batch-invariant" in one["reason"]


def test_a_row_of_the_users_does_not_decide_where_rows_know_no_batch(run: Run) -> None:
    keep(tuned(key=tuned().key.replace("rows=4096", "rows=256"), covers=Span(129, 512)))
    plain = json.loads(run("explain rms_norm --shape 256x8192 --arch sm_90a --json"))
    assert plain["source"] == "user table"
    found = json.loads(
        run("explain rms_norm --shape 256x8192 --arch sm_90a --batch-invariant --json")
    )
    assert found["source"] != "user table"
    assert found["evidence"] == []
