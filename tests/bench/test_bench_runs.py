"""Runs that go on, and files that are merged."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gristmill.bench import runs
from gristmill.bench.experts.models import TINY
from gristmill.bench.page import page
from gristmill.bench.peers import PEERS, Peer
from gristmill.bench.report import notes, print_results, summary
from gristmill.bench.results import Results, Row, described, first_line, load
from gristmill.bench.runner import Runner
from gristmill.bench.suites import Task
from gristmill.errors import ArgumentError

CPU = torch.device("cpu")
META = {
    "gpu": "H200",
    "torch": "2.13",
    "gristmill": "0.2.0",
    "revision": "abc",
    "date": "2026-11-16",
    "peers": {"quack": "0.6"},
    "missing_peers": {"liger": "cannot be imported"},
    "suites": ["rms_norm"],
    "notes": ["one"],
    "commands": ["gristmill bench rms_norm"],
}


def meta(**other: Any) -> dict[str, Any]:
    return json.loads(json.dumps({**META, **other}))


def row(op: str, impl: str, us: float | None, shape: str = "8x64", **more: Any) -> Row:
    rows, columns = map(int, shape.split("x"))
    about = {"op": op, "dtype": "bfloat16", "M": rows, "N": columns, "shape": shape}
    time = {} if us is None else {"us": us}
    return {**about, "impl": impl, "error": 0.0, **time, **more}


def written(path: Path, rows: list[Row], **other: Any) -> Path:
    Results(meta(**other), rows, path).save()
    return path


# ------------------------------------------------------------------------------------- going on


def test_a_run_goes_on_with_what_it_has(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", [row("rms_norm", "gristmill", 1.0)])
    now = meta(
        suites=["rms_norm", "regret"],
        peers={"liger": "0.8"},
        missing_peers={"vllm": "no"},
        notes=["one", "two"],
        commands=["gristmill bench rms_norm regret --resume"],
    )
    results = runs.begin(now, path, resume=True)
    assert [one["us"] for one in results.rows] == [1.0]
    assert results.meta["commands"] == [*META["commands"], *now["commands"]]
    assert results.meta["suites"] == ["rms_norm", "regret"]
    assert results.meta["notes"] == ["one", "two"]
    assert results.meta["peers"] == {"quack": "0.6", "liger": "0.8"}
    assert results.meta["missing_peers"] == {"vllm": "no"}
    assert results.meta["finished"] is False
    results.add([row("rms_norm", "quack", 2.0)])
    assert [one["us"] for one in load(path).rows] == [1.0, 2.0]


def test_without_resume_a_run_begins_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", [row("rms_norm", "gristmill", 1.0)])
    assert runs.begin(meta(), path, resume=False).rows == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu", "H100"), ("torch", "2.11"), ("gristmill", "0.1.0"), ("revision", "abd")],
)
def test_numbers_of_something_else_do_not_go_on(tmp_path: Path, key: str, value: str) -> None:
    path = written(tmp_path / "r.json", [])
    says = f"was measured with {key} {META[key]}, and here is {value}; measure it anew"
    with pytest.raises(ArgumentError, match=says):
        runs.begin(meta(**{key: value}), path, resume=True)


def test_a_revision_may_not_be_known(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", [])
    assert runs.begin(meta(revision=None), path, resume=True).rows == []


def test_a_peer_of_another_version_does_not_go_on(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json", [])
    with pytest.raises(ArgumentError, match=r"quack 0\.6, and here is 0\.7"):
        runs.begin(meta(peers={"quack": "0.7"}), path, resume=True)


def test_what_cannot_go_on(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="say which by --json, --output or --report"):
        runs.begin(meta(), None, resume=True)
    with pytest.raises(ArgumentError, match=r"there is no .*r\.json to continue"):
        runs.begin(meta(), tmp_path / "r.json", resume=True)
    merged = written(tmp_path / "m.json", [], runs=[{}])
    with pytest.raises(ArgumentError, match="merged of several runs"):
        runs.begin(meta(), merged, resume=True)
    (tmp_path / "bad.json").write_text('{"meta": {}, "rows": [')
    (tmp_path / "deep.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "pipe.json")  # a read would wait for a writer
    for name in ("deep", "pipe"):
        with pytest.raises(ArgumentError, match="not a file of benchmark results"):
            runs.begin(meta(), tmp_path / f"{name}.json", resume=True)
    with pytest.raises(ArgumentError, match="not a file of benchmark results"):
        runs.begin(meta(), tmp_path / "bad.json", resume=True)


def test_problems_that_are_there_are_not_measured_again() -> None:
    tasks = [Task("rms_norm", (rows, 64), "float32") for rows in (2, 3, 4)]
    results = Results({})
    Runner(CPU, [], results, samples=1).run(tasks[:2], lambda text: None)
    before = [dict(one) for one in results.rows]
    again = Runner(CPU, [], results, samples=1)
    assert again.todo(tasks) == tasks[2:]
    # With a peer more all of them lack something, and are measured as a whole.
    more = Runner(CPU, [PEERS["eager"]], results, samples=1)
    assert more.todo(tasks) == tasks
    more.run(tasks[:1], lambda text: None)
    assert [(one["M"], one["impl"]) for one in results.rows] == [
        (3, "gristmill"),
        (2, "gristmill"),
        (2, "eager"),
    ]
    assert results.rows[0] == before[1]
    assert more.todo(tasks) == tasks[1:]


def test_peers_that_are_not_asked_for_now_stay_where_nothing_is_measured_again() -> None:
    tasks = [Task("rms_norm", (rows, 64), "float32") for rows in (2, 3)]
    results = Results({})
    Runner(CPU, [PEERS["eager"]], results, samples=1).run(tasks[:1], lambda text: None)
    told: list[str] = []
    assert Runner(CPU, [], results, samples=1).todo(tasks, told.append) == tasks[1:]
    assert told == [
        "1 of 2 problems are there already; what they have of eager, not asked for now, stays"
    ]


def test_no_row_of_before_stands_beside_a_problem_that_is_measured_again() -> None:
    """Its ratios would be of two runs; and without it, what was measured would be lost."""
    tasks = [Task("rms_norm", (rows, 64), "float32") for rows in (2, 3)]
    results = Results({})
    Runner(CPU, [PEERS["eager"]], results, samples=1).run(tasks[:1], lambda text: None)
    eager = PEERS["eager"].implementations("rms_norm")["eager"]
    other = Peer("other", "torch", "torch", {"rms_norm": eager}, cpu=True)
    says = (
        "--resume: rms_norm 2x64 float32 lacks other and would be measured again, without eager, "
        "which it has and which takes no part now: let all take part (--peers eager,other), or "
        "measure into another file"
    )
    with pytest.raises(ArgumentError, match=re.escape(says)):
        Runner(CPU, [other], results, samples=1).todo(tasks)
    told: list[str] = []
    both = Runner(CPU, [PEERS["eager"], other], results, samples=1)
    assert both.todo(tasks, told.append) == tasks
    assert told == ["1 of 2 lack other, and are measured again whole"]
    # What only new problems lack loses nobody anything.
    assert Runner(CPU, [other], results, samples=1).todo(tasks[1:]) == tasks[1:]


def test_rows_of_other_suites_are_no_kernel_time() -> None:
    results = Results({}, [{"suite": "cold_start", "op": "import", "shape": "", "impl": "x"}])
    task = Task("rms_norm", (2, 64), "float32")
    assert Runner(CPU, [], results, samples=1).todo([task]) == [task]


def test_what_one_command_leaves_undone_another_does_not_finish() -> None:
    """The run is finished when everything is there that any of its commands asked for."""
    asked = ["rms_norm 8x64 bfloat16", "softmax 8x64 bfloat16", "host_cost", "regret --quick"]
    results = Results(meta(finished=False, unmeasured=asked))
    results.add([row("rms_norm", "gristmill", 1.0)])
    runs.complete(results, "host_cost --op rms_norm")  # a part of it is not all of it
    runs.complete(results, "regret")  # and all of it is every part
    assert notes(results)[0] == (
        "This run was cut short. Not measured: softmax (1 problem), host_cost."
    )
    runs.finish(results)
    assert results.meta["finished"] is False
    assert results.meta["unmeasured"] == ["softmax 8x64 bfloat16", "host_cost"]
    runs.complete(results, "host_cost")
    results.add([row("softmax", "gristmill", 1.0)])
    runs.finish(results)
    assert (results.meta["finished"], results.meta["unmeasured"]) == (True, [])
    assert not any("cut short" in line for line in notes(results))


def test_rows_say_which_problems_are_there_as_tasks_do() -> None:
    tasks = [
        Task("rms_norm", (2, 3, 64), "float32"),
        Task("linear", (2, 64, 64), "float32"),
        Task("moe", TINY.shape(4), "bfloat16", "skewed"),
    ]
    rows = [{"op": one.name, "dtype": one.dtype, **one.sizes, "impl": "x"} for one in tasks]
    every = [str(one) for one in tasks]
    assert runs.unmeasured(Results({"unmeasured": every})) == every
    assert runs.unmeasured(Results({"unmeasured": every}, rows)) == []


def test_what_another_run_has_is_not_missing(tmp_path: Path) -> None:
    left = ["softmax 8x64 bfloat16"]
    paths = [
        written(tmp_path / "a.json", [], finished=False, unmeasured=left),
        written(tmp_path / "b.json", [row("softmax", "gristmill", 1.0)], finished=True),
    ]
    cut = "Cut short: a.json. Not measured: softmax (1 problem)."
    other = written(tmp_path / "c.json", [], finished=True)
    assert cut in notes(runs.read([paths[0], other]))
    assert not any("Cut short" in line for line in notes(runs.read(paths)))


def test_the_last_command_of_an_older_file_did_not_end() -> None:
    (line, *_) = notes(Results(meta(finished=False)))
    assert line == (
        "This run was cut short, and something may be missing: its last command did not end "
        "(gristmill bench rms_norm)."
    )


def test_notes_that_say_the_same_are_told_once() -> None:
    same = [f"rms_norm {size}x64: not compiled ahead" for size in range(5)]
    told = notes(Results({"notes": ["one: x", *same, "two: x", "no GPU", "no GPU"]}))
    assert told == [
        *("one: x", "two: x"),
        "rms_norm 0x64 and 4 others: not compiled ahead",
        *("no GPU", "no GPU"),
    ]


def test_a_run_that_was_cut_short_says_so() -> None:
    assert any("cut short" in line for line in notes(Results(meta(finished=False))))
    assert not any("cut short" in line for line in notes(Results(meta(finished=True))))
    assert not any("cut short" in line for line in notes(Results(meta())))  # of before there was


# -------------------------------------------------------------------------------------- merging


def test_of_runs_about_the_same_the_last_counts(tmp_path: Path) -> None:
    old = [row("rms_norm", "gristmill", 3.0), row("rms_norm", "quack", 4.0)]
    new = [row("rms_norm", "gristmill", 2.0), row("softmax", "gristmill", 5.0)]
    paths = [
        written(tmp_path / "a.json", old, copy_tb_per_s_by_mb={"1": 1.0, "9": 4.2}),
        written(
            tmp_path / "b.json",
            new,
            date="2026-11-17",
            torch="2.14",
            peers={"liger": "0.8"},
            missing_peers={"vllm": "no"},
            suites=["softmax"],
            notes=["two"],
            commands=["gristmill bench softmax"],
            copy_tb_per_s_by_mb={"1": 2.0, "20": 4.3},
        ),
    ]
    merged = runs.read(paths)
    assert [(one["op"], one["impl"], one["us"], one["run"]) for one in merged.rows] == [
        ("rms_norm", "gristmill", 2.0, 1),
        ("softmax", "gristmill", 5.0, 1),
    ]
    assert merged.meta["torch"] == "2.13"  # the first one's
    assert merged.meta["peers"] == {"liger": "0.8", "quack": "0.6"}
    assert merged.meta["missing_peers"] == {"vllm": "no"}
    assert merged.meta["suites"] == ["rms_norm", "softmax"]
    assert merged.meta["notes"] == [
        *("one", "two"),
        "rms_norm 8x64 bfloat16: quack left out, with a.json, which b.json replaces",
    ]
    assert len(merged.meta["commands"]) == 2
    assert merged.meta["copy_tb_per_s_by_mb"] == {"1": 1.0, "20": 4.3, "9": 4.2}
    assert merged.meta["copy_tb_per_s"] == 4.3
    told = [(one["file"], one["rows"], one["torch"], one["date"]) for one in merged.meta["runs"]]
    assert told == [("a.json", 0, "2.13", "2026-11-16"), ("b.json", 2, "2.14", "2026-11-17")]
    assert "Rows are from 2 runs: a.json (2026-11-16, 0 rows)" in " ".join(notes(merged))


def test_tables_compare_within_one_run(tmp_path: Path) -> None:
    """Ours of the second run was not timed beside the peer of the first."""
    paths = [
        written(
            tmp_path / "a.json", [row("softmax", "gristmill", 4.0), row("softmax", "quack", 2.0)]
        ),
        written(
            tmp_path / "b.json", [row("softmax", "gristmill", 8.0), row("softmax", "eager", 16.0)]
        ),
    ]
    merged = runs.read(paths)
    (line,) = summary(merged.kernels())
    assert line.startswith("softmax: 2.00x the fastest peer over 1 problem")
    # What that costs is told wherever results are.
    note = "softmax 8x64 bfloat16: quack left out, with a.json, which b.json replaces"
    shown = io.StringIO()
    print_results(merged, Console(file=shown, width=200))
    assert note in shown.getvalue()
    assert note in page(merged)
    # Who would rather have the other run says so by the order.
    other = runs.read(paths[::-1])
    assert {one["impl"]: one["us"] for one in other.rows} == {"gristmill": 4.0, "quack": 2.0}


@pytest.mark.parametrize(
    ("rows", "kept", "noted"),
    [
        # A failure of ours is not hidden by an older time.
        (
            [row("softmax", "gristmill", None, error="wrong"), row("softmax", "quack", 3.0)],
            {"gristmill", "quack"},
            ["gristmill"],
        ),
        # A run without ours has nothing to be held against.
        ([row("softmax", "eager", 9.0)], {"gristmill", "quack"}, ["eager"]),
        # The same peers: nothing is lost.
        ([row("softmax", "gristmill", 8.0), row("softmax", "quack", 9.0)], None, []),
        # A peer that failed before is not missed.
        ([row("softmax", "gristmill", 8.0), row("softmax", "liger", 9.0)], None, ["quack"]),
    ],
)
def test_the_last_run_that_has_ours_counts(
    tmp_path: Path, rows: list[Row], kept: set[str] | None, noted: list[str]
) -> None:
    before = [
        row("softmax", "gristmill", 4.0),
        row("softmax", "quack", 2.0),
        row("softmax", "flashinfer", None, error="no kernel"),
    ]
    paths = [written(tmp_path / "a.json", before), written(tmp_path / "b.json", rows)]
    merged = runs.read(paths)
    assert len({one["run"] for one in merged.rows}) == 1
    assert {one["impl"] for one in merged.rows} >= (kept or {one["impl"] for one in rows})
    told = [text for text in merged.meta["notes"] if "left out" in text]
    assert [text.partition(": ")[2].partition(" left")[0] for text in told] == noted


def test_whole_models_are_of_one_run_as_well(tmp_path: Path) -> None:
    def engine(impl: str, ms: float, *, ours: bool) -> Row:
        about = {"suite": "vllm", "op": "llama-8b", "dtype": "bfloat16", "shape": "batch 1"}
        return {**about, "batch": 1, "impl": impl, "ours": ours, "ms": ms, "error": None}

    old = [engine("bf16", 4.0, ours=False), engine("nvfp4_gristmill", 3.0, ours=True)]
    paths = [
        written(tmp_path / "a.json", old),
        written(tmp_path / "b.json", [engine("nvfp4_gristmill", 2.0, ours=True)]),
    ]
    merged = runs.read(paths)
    assert [(one["impl"], one["ms"]) for one in merged.rows] == [("nvfp4_gristmill", 2.0)]
    note = "vllm llama-8b batch 1 bfloat16: bf16 left out, with a.json, which b.json replaces"
    assert note in notes(merged)


def test_a_file_of_before_shapes_were_told_is_about_the_same_problems(tmp_path: Path) -> None:
    bare = [row("softmax", "gristmill", 4.0), row("softmax", "quack", 2.0)]
    for one in bare:
        del one["shape"]
    paths = [
        written(tmp_path / "a.json", bare),
        written(tmp_path / "b.json", [row("softmax", "gristmill", 8.0)]),
    ]
    assert [one["us"] for one in runs.read(paths).rows] == [8.0]


def test_a_file_that_was_merged_row_by_row_is_read_by_problem(tmp_path: Path) -> None:
    rows = [row("softmax", "gristmill", 8.0, run=1), row("softmax", "quack", 2.0, run=0)]
    path = written(tmp_path / "m.json", rows, runs=[meta(file="a.json"), meta(file="b.json")])
    once = runs.read([path])
    assert [(one["impl"], one["run"]) for one in once.rows] == [("gristmill", 1)]
    assert any("quack left out, with a.json, which b.json" in text for text in once.meta["notes"])
    once.path = tmp_path / "n.json"
    once.save()
    again = runs.read([once.path])
    assert (again.meta, again.rows) == (once.meta, once.rows)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [tmp_path / name / "results.json" for name in ("a", "b")]
    merged = runs.read([written(path, [row("softmax", "gristmill", 1.0)]) for path in paths])
    assert [one["file"] for one in merged.meta["runs"]] == [str(path) for path in paths]


def test_what_was_merged_can_be_merged_again(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / f"{name}.json", [row(op, "gristmill", 1.0)])
        for name, op in (("a", "rms_norm"), ("b", "softmax"), ("c", "linear"))
    ]
    both = runs.read(paths[:2])
    every = runs.merge([both, load(paths[2])], ["both.json", "c.json"])
    assert [one["file"] for one in every.meta["runs"]] == ["a.json", "b.json", "c.json"]
    assert [(one["op"], one["run"]) for one in every.rows] == [
        ("rms_norm", 0),
        ("softmax", 1),
        ("linear", 2),
    ]


def test_rows_of_suites_are_told_apart(tmp_path: Path) -> None:
    """Same op, same shape, other mode or cache or routing: other rows."""
    rows = [
        row("rms_norm", "gristmill", 1.0),
        row("rms_norm", "gristmill", 1.0, suite="regret"),
        *(
            row("rms_norm", "gristmill", 1.0, suite="matrix", hint=hint)
            for hint in (1, 256, "chosen")
        ),
        *(
            row("rms_norm", "gristmill", 1.0, suite="host_cost", mode=mode)
            for mode in ("forward", "backward")
        ),
        *(
            row("rms_norm", "gristmill", 1.0, suite="cold_start", cache=cache)
            for cache in ("empty", "warm")
        ),
        *(
            row("moe", "gristmill", 1.0, model="tiny", routing=routing)
            for routing in ("uniform", "skewed")
        ),
    ]
    paths = [written(tmp_path / name, rows) for name in ("a.json", "b.json")]
    merged = runs.read(paths)
    assert len(merged.rows) == len(rows)
    assert {one["run"] for one in merged.rows} == {1}


def test_one_file_is_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [row("rms_norm", "gristmill", 1.0)])
    only = runs.read([path])
    assert (only.meta, only.rows) == (load(path).meta, load(path).rows)


def test_different_devices_are_not_merged(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{gpu}.json", [], gpu=gpu) for gpu in ("H100", "H200")]
    with pytest.raises(ArgumentError, match="different devices are not merged: H100, H200"):
        runs.read(paths)


def test_adding_rows_about_the_same_replaces_them() -> None:
    results = Results({})
    results.add([row("rms_norm", "gristmill", 1.0), row("rms_norm", "quack", 2.0)])
    results.add([row("rms_norm", "gristmill", 3.0)])
    assert [(one["impl"], one["us"]) for one in results.rows] == [
        ("quack", 2.0),
        ("gristmill", 3.0),
    ]
    assert results.has(op="rms_norm", impl="quack")
    assert not results.has(op="rms_norm", impl="liger")
    results.note("text")
    results.note("text")
    assert results.meta["notes"] == ["text"]


def test_an_error_is_told_in_one_line_without_colours() -> None:
    error = RuntimeError("\n\x1b[91m\x1b[1merror[INTERNAL]:\x1b[0m no valid IR\n  more of it")
    assert first_line(error) == "error[INTERNAL]: no valid IR"
    assert first_line(RuntimeError()) == "no message"
    assert described(ValueError("no kernel. Reasons:\n - too old\n - more")) == (
        "ValueError: no kernel. Reasons: - too old"
    )
    assert described(KeyError()) == "KeyError: no message"
