"""`gristmill tune` and `gristmill tables`, on a machine without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_helpers import fake_times, planted_on_rms_norm, table_rows, user_table
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN, reset_tables
from gristmill.select.configs import config_to_json
from gristmill.select.device import device_of
from gristmill.select.problem import BUCKETS, Span
from gristmill.select.table import Row, Table
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command line as in a process of its own; more environment can be given by name."""

    def invoke(line: str, **environment: str) -> Any:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            reload_settings()
            reset_tables()
            result = CliRunner().invoke(app, line.split())
        reload_settings()
        return result

    return invoke


@pytest.fixture
def reference_wins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    return fake_times(monkeypatch, lambda name, rows: 5.0 if name == "reference" else 10.0)


def test_by_op_and_shape(run: Run, reference_wins: list[Any]) -> None:
    result = run("tune rms_norm softmax --shape 64x32 --shape 256x32")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cpu, table ")
    assert lines[1].startswith(
        "4 problems, and up to 2 more where the choice changes between them; "
        "0 programs to compile; about 1 s"
    )
    assert lines[2].startswith("[1/6] rms_norm rows=64 N=32 x=bfloat16")
    assert lines[3] == "  library -> reference  10.00 -> 5.00 us  -50.0%"
    assert (
        "4 problems tuned, 4 with another choice than before; "
        "2.000 times as fast (geometric mean)" in lines
    )
    assert "2 rows of the table made from them" in lines
    assert lines[-1] == f"table: {user_table_path(device_of('cpu'))}"
    assert set(table_rows().values()) == {"reference"}
    again = run("tune rms_norm softmax --shape 64x32 --shape 256x32")
    assert again.exit_code == 0
    assert (
        "4 problems passed over: covered by a row already (--again measures them anew)"
        in again.stdout
    )
    assert "[1/" not in again.stdout
    assert "about" not in again.stdout
    anew = run("tune rms_norm --shape 64x32 --again --no-split")
    assert "reference stays  5.00 us" in anew.stdout


def test_as_json(run: Run, reference_wins: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    result = run(f"tune rms_norm --shape 64x32 --rows 64,16 --dtype fp32 --table {path} --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"] == "cpu"
    assert found["table"] == str(path)
    assert (found["held"], found["alone"], found["changed"]) == (0, 0, 2)
    assert found["speedup"] == pytest.approx(2.0)
    assert [one["rows"] for one in found["problems"]] == [16, 64]
    assert all("x=float32" in one["key"] for one in found["problems"])
    one = found["problems"][0]
    assert (one["before"], one["before_us"], one["variant"]) == ("library", 10.0, "reference")
    assert one["second"]["variant"] == "library"
    assert one["covers"] == [16, 16]
    (row,) = found["rows"]
    assert (row["covers"], row["rows"], row["also"]) == ([5, 128], 64, {"16": 5.0})
    assert "[1/3] rms_norm rows=16" in result.stderr
    assert set(table_rows(path)) == {"rms_norm rows=64"}


def test_only_where_the_choice_changes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_times(
        monkeypatch, lambda name, rows: 5.0 if (name == "reference") == (rows < 100) else 10.0
    )
    result = run("tune rms_norm --shape 1x32 --capture-sizes vllm")
    assert result.exit_code == 0, result.output
    assert [rows for rows, _ in asked] == [1, 512, 184, 88, 136, 112, 104, 96]
    assert "2 problems, and up to 6 more where the choice changes between them" in result.stdout
    covers = [row.covers for row in user_table().rows.values()]
    assert sorted(covers) == [Span(0, 99), Span(100, 724)]
    result = run("tune softmax --shape 1x32 --capture-sizes 4,2,1")
    assert result.exit_code == 0, result.output
    assert [rows for rows, _ in asked[8:]] == [1, 4]


def test_more_changes_than_were_announced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of problems is an estimate where the choice changes to and fro."""
    planted_on_rms_norm(monkeypatch, rule=lambda rows: 0, launches=10)
    fake_times(monkeypatch, lambda name, rows: 5.0 if name.endswith(f"={rows % 10}") else 10.0)
    sizes = ",".join(map(str, range(8, 18)))
    result = run(f"tune rms_norm --shape 1x32 --capture-sizes {sizes}")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    numbers = [f"[{number}/6]" for number in range(1, 7)]
    assert [line.split(" ")[0] for line in lines] == [*numbers, "[7]", "[8]", "[9]", "[10]"]
    assert all(line.split(" ")[1] == "rms_norm" for line in lines)


def test_real_times(run: Run) -> None:
    """Nothing faked: whatever wins, there is a row that says by how much."""
    result = run("tune softmax --shape 16x64 --quick --json")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["problems"]
    assert one["us"] > 0
    assert one["candidates"] == 2
    assert one["won"] < 1
    assert json.loads(run("tables --json").stdout)[0]["us"] == one["us"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tune no_such_op", "gristmill: unknown op 'no_such_op': there are rms_norm"),
        ("tables no_such_op", "gristmill: unknown op 'no_such_op': there are rms_norm"),
        ("tune rms_norm --shape 4xx", "is not a shape"),
        ("tune rms_norm --rows 1,x", "--rows '1,x': write numbers of rows, as in 1,16,64"),
        ("tune rms_norm --hints 1,x", "--rows '1,x': write numbers of rows"),
        ("tune rms_norm --rows 0", "--rows '0': write numbers of rows"),
        ("tune rms_norm --rows a", "--rows 'a': write numbers of rows"),
        ("tune rms_norm --rows=-1", "--rows '-1': write numbers of rows"),
        ("tune rms_norm --rows 1,,2", "--rows '1,,2': write numbers of rows"),
        ("tune rms_norm --rows \u00b2", "write numbers of rows"),
        ("tune rms_norm --rows " + 20 * "9", "write numbers of rows"),
        (
            "tune rms_norm --capture-sizes 3,x",
            "--capture-sizes '3,x': write vllm or numbers of rows",
        ),
        (
            "tune rms_norm --rows 1 --capture-sizes vllm",
            "--rows and --capture-sizes both name numbers of rows: give one",
        ),
        (
            "tune rms_norm --capture-sizes vllm --no-split",
            "which --no-split turns off; name the sizes by --rows",
        ),
        ("tune --recorded /no/such/file", "/no/such/file: cannot be read"),
        ("tune --recorded a --shape 1x1", "--recorded has arguments of its own"),
        ("tune --recorded a --rows 1", "--recorded has arguments of its own"),
        ("tune --recorded a --capture-sizes 1", "--recorded has arguments of its own"),
        ("tune rms_norm --device cuda:7x", "is not a device"),
        ("tune rms_norm --device meta", "'meta' is not a device for this: write cuda, cuda:1 or"),
    ],
)
def test_a_wrong_command_line_is_one_line(run: Run, line: str, message: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_without_a_table_there_is_nothing_to_do(run: Run) -> None:
    result = run("tune rms_norm --shape 4x32", GRISTMILL_TABLE="off")
    assert result.exit_code == 2
    assert "GRISTMILL_TABLE=off keeps no table" in result.stderr


def test_nothing_tuned_is_a_failure(run: Run, reference_wins: list[Any]) -> None:
    result = run("tune rms_norm --shape 64x32", GRISTMILL_USE="rms_norm:library")
    assert result.exit_code == 1
    assert "not tuned: rms_norm rows=* N=32" in result.stdout
    assert "forced by GRISTMILL_USE" in result.stdout
    assert run("tune nvfp4_linear --shape 4x31").exit_code == 1


def test_help_names_every_option(run: Run) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", run("tune --help").stdout)
    for option in (
        *("--recorded", "--rows", "--capture-sizes", "--no-split", "--probes"),
        *("--again", "--quick", "--table"),
    ):
        assert option in shown


# tables


def row(key: str, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "key": key,
        "variant": "library",
        "config": None,
        "us": 12.5,
        "spread_us": 0.25,
        "second": None,
        "date": "2026-01-02",
        "source_hash": "",
        "rows": 64,
        "times": {"library": 12.5},
        "candidates": 2,
        "torch": "2.13",
    }
    values["covers"] = BUCKETS.span(int(key.split("rows=")[1].split(" ")[0]))
    return Row(**{**values, **changes})


def save(*rows: Row, path: Path | None = None, device: Any = None) -> None:
    table = Table.for_device(device or device_of("cpu"))
    for one in rows:
        table.put(one)
    table.save(path or user_table_path(device_of("cpu")))


KEY = "rms_norm rows=64 N=32 x=bfloat16 weight=bfloat16 out=bfloat16"


def test_tables_lists_rows_and_says_which_are_stale(run: Run) -> None:
    save(
        row(KEY),
        row(KEY.replace("64", "256"), variant="gone"),
        row("softmax rows=64 N=32 x=bfloat16", source_hash="abc"),
        row("multikernel/mine rows=64 x=float32"),
    )
    result = run("tables --json")
    assert result.exit_code == 0, result.output
    found = {one["key"]: one for one in json.loads(result.stdout)}
    assert len(found) == 4
    assert found[KEY]["stale"] == ""
    assert found[KEY]["source"] == "user table"
    assert found[KEY]["us"] == 12.5
    stale = {key: one["stale"] for key, one in found.items() if one["stale"]}
    assert stale == {
        KEY.replace("64", "256"): "names variant 'gone', which does not exist",
        "softmax rows=64 N=32 x=bfloat16": "library has changed since 2026-01-02",
    }
    only = json.loads(run("tables --stale --json").stdout)
    assert {one["key"] for one in only} == set(stale)
    assert [one["key"] for one in json.loads(run("tables rms_norm --stale --json").stdout)] == [
        KEY.replace("64", "256")
    ]
    text = run("tables").stdout
    assert "4 rows for cpu, 2 of them stale" in text
    assert "2026-01-02, rows=64, 2 candidates" in text


def test_tables_judges_a_table_of_a_gpu_that_is_not_here(run: Run, tmp_path: Path) -> None:
    h200 = KNOWN["sm_90a"]
    op = OPS["rms_norm"]
    problem = op.problem(*op.example((64, 4096), torch.bfloat16, "meta"), device=h200)
    variant = next(one for one in op.variants if one.name == "cuda_block")
    config = variant.config(problem)
    good = row(
        problem.key(64),
        variant="cuda_block",
        config=config_to_json(config),
        source_hash=variant.source_hash(problem, config),
    )
    path = tmp_path / "h200.json"
    bad = {**dict(good.config or {}), "no_such_field": 1}
    save(
        good,
        row(problem.key(256), variant="cuda_block", config=bad),
        row(problem.key(16), variant="cuda_block", config=good.config, source_hash="old"),
        path=path,
        device=h200,
    )
    found = {
        one["key"]: one["stale"] for one in json.loads(run(f"tables --table {path} --json").stdout)
    }
    assert found[problem.key(64)] == ""
    assert "malformed" in found[problem.key(256)]
    assert found[problem.key(16)] == "cuda_block has changed since 2026-01-02"
    assert "3 rows for NVIDIA H200, 2 of them stale" in run(f"tables --table {path}").stdout


def test_tables_of_an_architecture_that_is_not_known(run: Run, tmp_path: Path) -> None:
    """That this machine cannot run a row does not make it stale."""
    path, device = tmp_path / "t4.json", replace(KNOWN["sm_90a"], name="T4", arch="sm_75")
    op = OPS["rms_norm"]
    problem = op.problem(*op.example((64, 32), torch.bfloat16, "meta"), device=device)
    variant = next(one for one in op.variants if one.name == "cuda_block")
    config = config_to_json(variant.config(problem))
    save(row(KEY, variant=variant.name, config=config), path=path, device=device)
    assert json.loads(run(f"tables --table {path} --stale --json").stdout) == []


def test_tables_of_a_file_whose_name_looks_like_markup(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "[" / "red].json"
    path.parent.mkdir()
    save(row("rms_norm rows=64 N=4096 x=bfloat16"), path=path, device=KNOWN["sm_90a"])
    result = run(f"tables --table {path}")
    assert result.exit_code == 0, result.output
    assert "1 row for NVIDIA H200" in result.stdout


def test_tables_of_a_file_that_is_none(run: Run, tmp_path: Path) -> None:
    result = run(f"tables --table {tmp_path / 'none.json'}")
    assert result.exit_code == 1
    assert "cannot be read" in result.stderr
