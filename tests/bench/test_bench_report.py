"""Tables and pictures of results made by hand, where every number is known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gristmill.bench.report import markdown, microseconds, notes, print_results, summary
from gristmill.bench.results import Results, load
from gristmill.errors import ArgumentError


def row(op: str, m: int, n: int, impl: str, us: float, **more: Any) -> dict[str, Any]:
    moved = 4 * m * n
    timed = {"us": us, "bytes": moved, "tb_per_s": moved / us / 1e6, "roof_us": 90.0}
    timed["roof_share"] = 90.0 / us
    base = {"op": op, "dtype": "bfloat16", "M": m, "N": n, "impl": impl, "error": 0.001}
    return {**base, **timed, **more}


def failed(op: str, m: int, n: int, impl: str, error: str) -> dict[str, Any]:
    return {"op": op, "dtype": "bfloat16", "M": m, "N": n, "impl": impl, "error": error}


@pytest.fixture
def results() -> Results:
    rows = [
        row("rms_norm", 4096, 8192, "gristmill", 100.0, variant="cuda_block"),
        row("rms_norm", 4096, 8192, "eager", 250.0),
        row("rms_norm", 4096, 8192, "quack", 120.0),
        row("rms_norm", 1, 4096, "gristmill", 2.0, variant="cuda_warp"),
        row("rms_norm", 1, 4096, "eager", 1.5),
        failed("rms_norm", 1, 4096, "quack", "output 0 is off by 0.5"),
        {
            **failed("rms_norm", 1, 4096, "gristmill", ""),
            "error": None,
            "mode": "forward",
            "host_us": 12.0,
        },
        {
            **failed("rms_norm", 1, 4096, "eager", ""),
            "error": None,
            "mode": "forward",
            "host_us": 10.0,
        },
        {
            **failed("rms_norm", 1, 4096, "gristmill", ""),
            "error": None,
            "cache": "warm",
            "first_call_s": 0.0312,
            "import_s": 0.2,
            "variant": "cuda_warp",
            "compiles": 0,
        },
    ]
    meta = {
        "gpu": "NVIDIA H200",
        "device": "cuda",
        "date": "2026-01-02",
        "torch": "2.11.0",
        "peers": {"eager": "2.11.0", "quack": "0.6.5"},
        "missing_peers": {"liger": "cannot be imported: No module named 'liger_kernel'"},
        "copy_tb_per_s": 4.2,
        "method": "by hand",
    }
    return Results(meta, rows)


def printed(results: Results) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_results(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_wins_and_losses(results: Results) -> None:
    lines = printed(results).splitlines()
    (win,) = [line for line in lines if line.startswith("│ 4096x8192")]
    assert [cell.strip() for cell in win.strip("│").split("│")] == [
        "4096x8192",
        "100",
        "250",
        "120",
        "1.20x",
        "90%",
        "cuda_block",
    ]
    loss = next(line for line in lines if line.startswith("│ 1x4096"))
    assert "0.75x" in loss
    assert "failed" in loss


def test_a_loss_is_red_and_a_win_green(results: Results) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    print_results(results, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[31m       0.75x" in text
    assert "\x1b[32m       1.20x" in text


def test_the_summary_counts_what_is_behind(results: Results) -> None:
    (line,) = summary(results.timed())
    # sqrt(1.2 * 0.75) = 0.949
    assert line.startswith("rms_norm: 0.95x the fastest peer over 2 problems")
    assert line.endswith("behind by more than 3% on 1")


def test_the_summary_has_first_calls_and_host_times() -> None:
    rows = [
        row("rms_norm", 1, 64, "gristmill", 2.0, first_call_s=0.01, host_us=12.0),
        row("rms_norm", 2, 64, "gristmill", 2.0, first_call_s=0.03, host_us=None),
        row("rms_norm", 1, 64, "eager", 2.0, first_call_s=0.001, host_us=9.5),
    ]
    assert summary(rows)[1:] == [
        "first call (median): gristmill 0.020 s, eager 0.001 s",
        "host time of a small call (median): gristmill 12.0 µs, eager 9.50 µs",
    ]


def test_notes_tell_who_is_missing_and_who_was_wrong(results: Results) -> None:
    assert notes(results) == [
        "liger took no part: cannot be imported: No module named 'liger_kernel'",
        "quack was not timed on rms_norm 1x4096: output 0 is off by 0.5",
    ]


def test_host_and_cold_start_have_tables(results: Results) -> None:
    text = printed(results)
    host = next(line for line in text.splitlines() if line.startswith("│ rms_norm forward"))
    assert "12.0" in host
    assert "1.20x" in host
    start = next(line for line in text.splitlines() if "│ warm " in line)
    assert "0.031" in start


def test_a_cpu_has_a_note_and_no_roof(results: Results) -> None:
    results.meta["device"] = "cpu"
    text = printed(results)
    assert "no kernel of gristmill ran" in text
    assert "of roof" not in text
    assert "90%" not in text


def test_markdown_holds_the_same_numbers(results: Results) -> None:
    page = markdown(results)
    assert page.startswith("# NVIDIA H200, 2026-01-02\n")
    assert "| 4096x8192 | 100 | 250 | 120 | 1.20x | 90% | cuda_block |" in page
    assert "4.20 TB/s" in page
    assert "- quack was not timed" in page
    widths = {line.count("|") for line in page.split("\n\n")[5].splitlines()}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("us", "text"), [(1.654, "1.65"), (15.13, "15.1"), (260.2, "260"), (1234.5, "1,234")]
)
def test_microseconds(us: float, text: str) -> None:
    assert microseconds(us) == text


def test_shapes_of_more_than_two_numbers() -> None:
    """Two problems of as many rows and columns, each under its own name."""
    rows = [
        row("softmax_causal", 8192, 4096, impl, us, shape=shape)
        for shape, scale in (("2x4096x4096", 1.0), ("4x2048x4096", 2.0))
        for impl, us in (("gristmill", 100.0 * scale), ("eager", 150.0 * scale))
    ]
    results = Results({"device": "cuda"}, rows)
    lines = printed(results).splitlines()
    for shape, ours in (("2x4096x4096", "100"), ("4x2048x4096", "200")):
        (line,) = [line for line in lines if line.startswith(f"│ {shape}")]
        assert line.split("│")[2].strip() == ours


def test_the_summary_tells_what_a_causal_limit_saves() -> None:
    rows = [
        row(op, 8192, 4096, "gristmill", us, shape="2x4096x4096")
        for op, us in (("softmax", 100.0), ("softmax_causal", 80.0), ("softmax_bwd", 90.0))
    ]
    rows.append(row("softmax_causal_bwd", 8192, 4096, "gristmill", 60.0, shape="4x2048x4096"))
    lines = summary(rows)
    assert lines == ["softmax_causal 2x4096x4096: 1.25x as fast as without the mask"]
    assert markdown(Results({}, rows)).count(lines[0]) == 1


def test_host_times_of_several_ops_are_kept_apart() -> None:
    base = {"dtype": "bfloat16", "M": 1, "N": 64, "mode": "forward"}
    rows = [
        {**base, "op": op, "impl": impl, "host_us": us}
        for op, times in (("rms_norm", (12.0, 10.0)), ("softmax", (8.0, 10.0)))
        for impl, us in zip(("gristmill", "eager"), times, strict=True)
    ]
    text = printed(Results({"device": "cuda"}, rows))
    ratios = {
        line.split("│")[1].strip(): line.split("│")[5].strip()
        for line in text.splitlines()
        if line.startswith(("│ rms_norm", "│ softmax"))
    }
    assert ratios == {"rms_norm forward": "1.20x", "softmax forward": "0.80x"}


def test_a_file_that_is_no_result_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ArgumentError, match=r"x\.json is not a file of benchmark results"):
        load(path)
    path.write_text('{"meta": {}, "rows": [{"op": "rms_norm", "us": 1.0}]}')
    with pytest.raises(ArgumentError, match="each row names its op and its impl"):
        load(path)


def test_a_failure_that_is_about_no_problem_is_told() -> None:
    start = {"suite": "cold_start", "op": "import", "cache": "empty", "impl": "gristmill"}
    (line,) = notes(Results({}, [{**start, "error": "it died"}]))
    assert line == "gristmill was not timed on import empty: it died"


def test_products_are_shown_by_operations() -> None:
    rows = [
        row(
            "linear_silu",
            m,
            4096,
            impl,
            us,
            K=4096,
            shape=f"{m}x4096x4096",
            tflop_per_s=2 * m * 4096 * 4096 / us / 1e6,
        )
        for m, impl, us in (
            (1, "gristmill", 9.0),
            (1, "eager", 12.0),
            (4096, "gristmill", 200.0),
            (4096, "eager", 240.0),
        )
    ]
    results = Results({"gpu": "H200", "mm_tflop_per_s": {"bfloat16": 712.3}}, rows)
    text = markdown(results)
    assert "Fastest product of torch's in this run, bfloat16: 712 TFLOP/s." in text
    assert "| vs best peer | TFLOP/s | of roof |" in text
    assert "| 4096x4096x4096 | 200 | 240 | 1.20x | 687 |" in text
