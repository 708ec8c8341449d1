"""What can be wrong with a `gristmill bench`: its files, its environment, its terminal."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gristmill.bench.report import print_results
from gristmill.bench.results import Results, load

# What typer's runner returns has no public name.
Result = Any
Run = Callable[[str], Result]
SMALL = "--shape 8x64 --peers none --samples 1 --device cpu"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"us": "12"}, "'12' for its us, which is no time"),
        ({"us": 0}, "0 for its us, which is no time"),
        ({"us": float("nan")}, "nan for its us, which is no time"),
        ({"dtype": None}, "no dtype or no M"),
    ],
)
def test_damaged_rows_are_refused(
    run: Run, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    row = {"op": "softmax", "impl": "gristmill", "dtype": "float16", "M": 8, "N": 64, "us": 1.0}
    damaged = {key: value for key, value in (row | changes).items() if value is not None}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"meta": {}, "rows": [row, damaged]}))
    for line in (f"bench compare {path} {path}", f"bench --read {path}"):
        result = run(line)
        assert result.exit_code == 2, result.output
        assert says in result.stderr


# ---------------------------------------------------------------------- before anything is measured


@pytest.mark.parametrize(
    ("option", "is_file"),
    [("json", True), ("markdown", True), ("plots", False), ("output", False), ("report", False)],
)
def test_what_cannot_be_written_is_said_first(
    run: Run, tmp_path: Path, option: str, is_file: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")  # as a device, it would be replaced by a file
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    wrong = ["", "file/sub", "loop", "loop/sub"] if is_file else ["file", "file/sub", "loop"]
    wrong += ["pipe"] if option == "json" else []
    for name in wrong:
        result = run(f"bench --op softmax {SMALL} --{option} {tmp_path / name}")
        assert result.exit_code == 2, result.output
        assert "cannot write" in result.stderr
        assert not result.stdout
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "pipe"]
    assert run(f"bench --op softmax {SMALL} --json /dev/stdout").exit_code == 2


def test_links_are_followed_to_what_is_not_there_yet(run: Run, tmp_path: Path) -> None:
    words = ["bench", "--op", "softmax", *SMALL.split()]
    for option in ("json", "markdown", "plots"):
        (tmp_path / option).symlink_to(tmp_path / "new" / option)
        words += [f"--{option}", str(tmp_path / option)]
    assert run(" ".join(words)).exit_code == 0
    assert load(tmp_path / "new" / "json").rows
    assert (tmp_path / "new" / "markdown").read_text()
    assert list((tmp_path / "new" / "plots").iterdir())
    assert run(f"bench --read {tmp_path / 'json'} --markdown /dev/null").exit_code == 0


def test_a_disk_that_is_full_keeps_the_rows_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "rows.json")
    results = Results({"gpu": "größer"}, path=tmp_path / "link.json")
    results.save()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            results.save()
    assert load(tmp_path / "rows.json").meta == {"gpu": "größer"}
    assert (tmp_path / "link.json").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_mistake_in_the_environment_is_said_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_JIT", "maybe")
    monkeypatch.setattr("gristmill.settings._current", None)
    result = run(f"bench --op softmax {SMALL}")
    assert result.exit_code == 1, result.output
    assert "GRISTMILL_JIT='maybe' is not allowed" in result.stderr
    assert not result.stdout


def test_help_is_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is too long for its column would be cut."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, "80")
    for line in ("bench -h", "explain -h", "tune -h", "warmup -h"):
        assert "…" not in run(line).stdout, line


def test_who_interrupts_a_run_is_told_how_to_go_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gristmill.bench.runner.Runner._measure", interrupted)
    result = run(f"bench --op softmax {SMALL} --json {tmp_path / 'r.json'}")
    assert result.exit_code == 130
    assert f"{tmp_path / 'r.json'} has what was measured: --resume goes on" in result.stderr


def test_a_narrow_terminal_cuts_no_number(run: Run, tmp_path: Path) -> None:
    head = {"op": "softmax", "dtype": "float16", "M": 8, "N": 64}
    times = {"gristmill": 1234567.0, "eager": 7654321.0, "inductor": 3456789.0}
    rows = [{**head, "impl": name, "us": us} for name, us in times.items()]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    results = load(path)
    for width in (40, 60, 100):
        narrow = Console(width=width, file=io.StringIO())
        print_results(results, narrow)
        text = narrow.file.getvalue()  # type: ignore[attr-defined]
        assert "…" not in text
    assert "1,234,567" in text
    assert "…" not in run(f"bench compare {path} {path}").stdout
