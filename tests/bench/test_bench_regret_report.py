"""Tables and pictures of regret, from rows where every number is known; and the command."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.committed import committed_files
from rich.console import Console
from typer.testing import CliRunner

from gristmill.bench.charts import draw, write_charts
from gristmill.bench.commands import command_of
from gristmill.bench.page import write_page
from gristmill.bench.regret.report import failed_goals, gains, matrices, outcomes, summarised
from gristmill.bench.regret.sampling import Sampling
from gristmill.bench.regret.suite import Method, describe
from gristmill.bench.report import markdown, print_results
from gristmill.bench.results import OURS, Results, load
from gristmill.cli.app import app
from gristmill.select.tables import reset_tables
from gristmill.settings import reload_settings


def regret_row(op: str, shape: tuple[int, ...], regret: float, **more: Any) -> dict[str, Any]:
    return {
        "suite": "regret",
        "op": op,
        "dtype": "bfloat16",
        "M": shape[0],
        "N": shape[1],
        "K": shape[2] if len(shape) == 3 else None,
        "shape": "x".join(map(str, shape)),
        "impl": OURS,
        "error": None,
        "picked": "cuda_block threads=256 items=2",
        "best": "cuda_block threads=128 items=2",
        "picked_us": 10 * (1 + regret),
        "best_us": 10.0,
        "picked_spread_us": 0.12,
        "best_spread_us": 0.34,
        "regret": regret,
        "source": "shipped table",
        "candidates": 7,
        "variants": {},
        "failures": {},
        **more,
    }


def cell(size: int, hint: int | str, us: float | None) -> dict[str, Any]:
    row = {"suite": "matrix", "op": "linear_silu", "dtype": "bfloat16", "M": size, "N": 4096}
    row |= {"K": 4096, "shape": f"{size}x4096x4096", "impl": OURS, "error": None, "hint": hint}
    return row | ({"impossible": "too long"} if us is None else {"us": us, "spread_us": 0.1})


REGRETS = {(1, 4096): 0.0, (16, 4096): 0.07, (64, 4096): 0.02, (16, 8192): 0.13}
MATRIX = {64: (10.0, 36.0), 4096: (None, 18.0), "chosen": (10.0, 20.0)}


@pytest.fixture
def results() -> Results:
    rows = [regret_row("rms_norm", shape, regret) for shape, regret in REGRETS.items()]
    rows.append(regret_row("linear_silu", (64, 4096, 4096), 0.015, best="library"))
    rows[0]["failures"] = {"cuda_warp threads=32": "CompileError: no"}
    rows[1]["failures"] = {"cuda_warp threads=64": "CompileError: no"}
    for hint, times in MATRIX.items():
        rows += [cell(size, hint, us) for size, us in zip((64, 4096), times, strict=True)]
    rows += [
        {**choice_head, "op": "rms_norm", "what": "lookup", "limit": 1.5, "choice_us": 0.914},
        {**choice_head, "op": "softmax", "what": "lookup", "limit": 1.5, "choice_us": 1.7},
        {
            **choice_head,
            "op": "rms_norm",
            "what": "first-call tuning",
            "limit": 0.5,
            "choice_s": 0.2345,
            "candidates": 4,
            "compiles": 3,
        },
    ]
    return Results({"gpu": "NVIDIA H200", "device": "cuda", "date": "2026-01-02"}, rows)


choice_head = {"suite": "choice", "dtype": "bfloat16", "M": 1, "N": 64, "impl": OURS, "error": None}


def printed(results: Results) -> str:
    console = Console(file=io.StringIO(), width=250)
    print_results(results, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"│ {start}"))
    return [part.strip() for part in line.strip("│").split("│")]


def test_the_summary_of_an_op() -> None:
    rows = [regret_row("rms_norm", (m, 64), m / 1000) for m in range(1, 101)]
    summary = summarised(rows)
    assert summary.count == 100
    assert summary.mean == pytest.approx(0.0505)
    assert summary.p95 == pytest.approx(0.095)
    assert summary.worst["M"] == 100


def test_an_op_without_goals_of_its_own_has_the_usual_ones() -> None:
    rows = [regret_row("rms_norm", (m, 64), regret) for m, regret in ((4, 0.0), (24, 0.08))]
    mean, worst = outcomes(Results({}, rows))
    assert (mean.goal.limit, mean.reached, mean.met) == (0.03, pytest.approx(0.04), False)
    assert (worst.goal.limit, worst.reached, worst.met) == (0.10, 0.08, True)
    assert failed_goals(Results({}, rows)) == [
        "rms_norm: mean regret 4.0% over 2 problems, goal 3.0%: NOT met (worst 8.0% at 24x64)"
    ]
    assert failed_goals(Results({}, rows[:1])) == []


def left_out(op: str, shape: tuple[int, ...], at_least: float) -> dict[str, Any]:
    row = regret_row(op, shape, at_least, differing=["library"], regret_at_least=at_least)
    row["failures"] = {"library": "WrongResultError: output 0 is off by 0.5"}
    del row["regret"]
    return row


def test_what_is_not_judged_is_told_and_counts_for_nothing() -> None:
    good = [regret_row("rms_norm", (m, 64), 0.01) for m in (1, 4)]
    left = [left_out("rms_norm", (8, 64), 0.0), left_out("softmax", (8, 64), 0.25)]
    product = left_out("linear_silu", (8, 64, 32), 0.0)
    assert failed_goals(Results({}, [*good, *left])) == [
        "softmax: no goal has problems",
        "2 problems NOT judged, as a rival's result is not that of the pick: rms_norm 8x64 (at "
        "least 0.0%), softmax 8x64 (at least 25.0%)",
    ]
    _, told = failed_goals(Results({}, [*good, *left * 7]))
    assert told.endswith("softmax 8x64 (at least 25.0%) and 2 more")
    found = Results({"device": "cuda"}, [*good, *left, product])
    text = printed(found)
    assert "3 problems NOT judged, as a rival's" in text
    assert "goals of regret: 2 of 2 met" in text
    assert cells_of(text, "rms_norm ")[:5] == ["rms_norm", "2", "1.0%", "1.0%", "1.0%"]
    assert cells_of(text, "softmax ") == ["softmax", "0", *["–"] * 3, "NOT judged"]
    assert "picked by: shipped table 5" in text
    assert "softmax: 1 candidates of library took no part: WrongResultError" in text
    page = markdown(found)
    assert "| 64 bfloat16 | 1.0% | 1.0% | not judged |" in page
    assert "NOT judged" in markdown(Results({}, [product]))
    chart = draw(found)["regret_rms_norm"].svg(standalone=True)
    assert "8 rows: not judged, at least 0.0%" in chart


def test_the_tables(results: Results) -> None:
    text = printed(results)
    assert cells_of(text, "rms_norm ") == [
        "rms_norm", "4", "5.5%", "13.0%", "13.0%", "16x8192"
    ]  # fmt: skip
    assert cells_of(text, "linear_silu ")[:3] == ["linear_silu", "1", "1.5%"]
    assert cells_of(text, "rms_norm 16x8192") == [
        "rms_norm 16x8192",
        "13.0%",
        "11.3",
        "10.0",
        "0.12, 0.34",
        "shipped table",
        "cuda_block threads=256",
        "cuda_block threads=128",
    ]
    assert cells_of(text, "linear_silu 64x4096x4096")[-2:] == ["cuda_block", "library"]
    assert "│ rms_norm 1x4096 " not in text.split("hint by runtime")[0]  # it has no regret
    assert cells_of(text, "linear_silu: mean") == [
        "linear_silu: mean regret", "3.0%", "1.5%", "yes", "1", "64x4096x4096"
    ]  # fmt: skip
    assert cells_of(text, "rms_norm: worst")[1:4] == ["10.0%", "13.0%", "NO"]
    assert "goals of regret: 2 of 4 met" in text
    assert "gristmill bench regret --op rms_norm --shape 16x8192\n" in text
    assert "rule" not in text  # files of before 2026-11-20 have none
    assert "picked by: shipped table 5" in text
    assert "rms_norm: 2 candidates of cuda_warp took no part: CompileError: no" in text


def test_the_matrix_as_a_table(results: Results) -> None:
    text = printed(results)
    assert cells_of(text, "64 ") == ["64", "1.00", "2.00"]
    assert cells_of(text, "4096 ") == ["4096", "–", "1.00"]
    assert cells_of(text, "chosen ") == ["chosen", "1.00", "1.11"]
    assert cells_of(text, "chosen, µs") == ["chosen, µs", "10.0", "20.0"]
    (cells,) = matrices(results)
    first, second, both = gains(cells)
    # sqrt(1 * 1.8), and 0.9 where the other launch runs
    assert first.startswith("tuned at 64 only: 34.2% more time")
    assert "1.80 times as much, at 4096 rows" in first
    assert second.startswith("tuned at 4096 only: 10.0% less time")
    assert second.endswith("does not run at 1 of 2 sizes")
    assert "up to 1.80 times, the mean gain over all of them is 17.4%" in both


def test_the_costs_of_choosing_and_their_limits(results: Results) -> None:
    text = printed(results).partition("choice: what choosing costs")[2]
    rows = [
        [part.strip() for part in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["rms_norm 1x64", "lookup", "0.91 µs", "1.5 µs", "yes", "", ""],
        ["softmax 1x64", "lookup", "1.70 µs", "1.5 µs", "NO", "", ""],
        ["rms_norm 1x64", "first-call tuning", "0.23 s", "0.5 s", "yes", "4", "3"],
    ]


def sampled_row(
    shape: tuple[int, int, int],
    picked: float,
    rule: float,
    *,
    op: str = "nvfp4_linear",
    tabled: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """The best launch takes 10 us."""
    return regret_row(
        op,
        shape,
        round(picked / 10 - 1, 5),
        picked_us=picked,
        rule="cuda_wgmma tokens=64 split=2",
        picked="cuda_wgmma tokens=64 split=4",
        rule_us=rule,
        rule_spread_us=0.2,
        rule_regret=round(rule / 10 - 1, 5),
        over_rule=round(picked / rule - 1, 5),
        tabled=tabled,
        source="shipped table" if tabled else "preference",
        **more,
    )


@pytest.fixture
def drawn() -> Results:
    """Good picks in the table, fair ones outside of it."""
    rows = [sampled_row((m, 6144, 4096), 10.1, 10.5) for m in range(3, 23)]
    rows += [sampled_row((m, 576, 9536), 10.3, 10.3, tabled=False) for m in range(3, 23)]
    meta = {"gpu": "NVIDIA H200", "device": "cuda", "date": "2026-01-02"}
    describe(meta, Sampling(seed=7), Method())
    return Results(meta, rows)


def reached(results: Results) -> dict[str, tuple[float | None, bool]]:
    return {f"{one.op}: {one.goal}": (one.reached, one.met) for one in outcomes(results)}


def test_goals_are_told_apart_by_the_table(drawn: Results) -> None:
    close = {
        "nvfp4_linear: mean regret, in the table": (0.01, True),
        "nvfp4_linear: worst regret, in the table": (0.01, True),
        "nvfp4_linear: mean regret, not in the table": (0.03, True),
        "nvfp4_linear: worst regret, not in the table": (0.03, True),
        "nvfp4_linear: pick over rule": (0.0, True),
    }
    found = reached(drawn)
    assert list(found) == list(close)
    for name, (value, met) in close.items():
        assert found[name] == (pytest.approx(value), met)
    limits = [one.goal.limit for one in outcomes(drawn)]
    assert limits == [0.015, 0.08, 0.04, 0.15, 0.03]
    assert failed_goals(drawn) == []


def test_a_goal_without_problems_needs_another_of_its_op(drawn: Results) -> None:
    drawn.rows = [row for row in drawn.rows if row["tabled"]]
    name = "nvfp4_linear: mean regret, not in the table"
    assert cells_of(printed(drawn), name) == [name, "4.0%", "–", "no problems", "0", ""]
    assert reached(drawn)[name] == (None, True)
    assert failed_goals(drawn) == []
    drawn.rows.append(left_out("softmax", (8, 64), 0.25))
    first, *_ = failed_goals(drawn)
    assert first == "softmax: no goal has problems"


@pytest.mark.parametrize(
    ("bad", "missed"),
    [
        # 1.9% on average over 21 problems; 20% at worst.
        (
            sampled_row((99, 6144, 4096), 12.0, 12.0),
            ["mean regret, in the table", "worst regret, in the table"],
        ),
        (sampled_row((99, 6144, 4096), 10.9, 10.9), ["worst regret, in the table"]),
        # The same outside of the table is no failure, but this is.
        (sampled_row((99, 576, 9536), 10.9, 10.9, tabled=False), []),
        (
            sampled_row((99, 576, 9536), 11.6, 11.6, tabled=False),
            ["worst regret, not in the table"],
        ),
        (sampled_row((99, 6144, 4096), 10.5, 10.1), ["pick over rule"]),
    ],
)
def test_one_planted_bad_pick_fails_its_goals(
    drawn: Results, bad: dict[str, Any], missed: list[str]
) -> None:
    drawn.rows.append(bad)
    found = [name for name, (_, met) in reached(drawn).items() if not met]
    assert found == [f"nvfp4_linear: {name}" for name in missed]
    assert len(failed_goals(drawn)) == len(missed)
    assert all("99x" in reason for reason in failed_goals(drawn))


def test_many_picks_that_are_a_little_slow_fail_the_mean(drawn: Results) -> None:
    drawn.rows += [sampled_row((m, 6144, 4096), 10.3, 10.3) for m in range(100, 120)]
    assert reached(drawn)["nvfp4_linear: mean regret, in the table"] == (pytest.approx(0.02), False)


def test_each_kind_has_its_own_goals(drawn: Results) -> None:
    drawn.rows.append(
        sampled_row((99, 6144, 4096), 14.0, 14.0, op="nvfp4_linear_fp8", tabled=False)
    )
    missed = [name for name, (_, met) in reached(drawn).items() if not met]
    assert missed == [
        "nvfp4_linear_fp8: mean regret, not in the table",
        "nvfp4_linear_fp8: worst regret, not in the table",
    ]


def test_a_run_without_regret_does_not_pass(drawn: Results) -> None:
    drawn.rows = []
    assert failed_goals(drawn) == ["regret: nothing was measured"]


def test_the_summary_of_drawn_problems(drawn: Results) -> None:
    drawn.rows.append(sampled_row((99, 6144, 4096), 12.0, 11.0))
    text = printed(drawn)
    assert cells_of(text, "nvfp4_linear, in the table") == [
        *("nvfp4_linear, in the table", "21", "1.9%", "1.0%", "20.0%"),
        # The rule is 5% slower than the best, at worst 10%; the pick 4% faster than the rule.
        *("5.2%", "10.0%", "-3.2%", "9.1%", "99x6144x4096"),
    ]
    assert cells_of(text, "nvfp4_linear, not in the table")[1:5] == ["20", "3.0%", "3.0%", "3.0%"]
    assert "drawn with seed 7: 8 row counts for each weight, and 8 weights beside" in text
    assert "then the 8 fastest, the pick and the rule, 20 samples each" in text
    assert cells_of(text, "nvfp4_linear: pick over rule") == [
        *("nvfp4_linear: pick over rule", "3.0%", "9.1%", "NO", "41", "99x6144x4096"),
    ]
    assert "goals of regret: 2 of 5 met" in text
    slower = text.partition("picks slower than the rule: 1 problem")[2]
    assert cells_of(slower, "nvfp4_linear 99x6144x4096") == [
        *("nvfp4_linear 99x6144x4096", "9.1%", "12.0", "11.0", "shipped table"),
        *("cuda_wgmma split=4", "cuda_wgmma split=2"),
    ]
    assert "gristmill bench regret --op nvfp4_linear --shape 99x6144x4096\n" in slower
    for group in ("in the table", "not in the table"):
        largest = text.partition(f"the largest regrets: nvfp4_linear, {group}")[2]
        assert "gristmill bench regret --op nvfp4_linear --shape" in largest
    largest = text.partition("the largest regrets: nvfp4_linear, in the table")[2]
    assert cells_of(largest, "nvfp4_linear 99x6144x4096")[1:5] == ["20.0%", "12.0", "11.0", "10.0"]


def test_a_command_repeats_a_row_with_all_its_launches(drawn: Results) -> None:
    row = sampled_row((99, 6144, 4096), 12.0, 11.0, launches="all")
    assert command_of(row) == (
        "gristmill bench regret --op nvfp4_linear --shape 99x6144x4096 --all-launches"
    )


def test_pages_have_pick_rule_and_best_of_every_drawn_problem(
    drawn: Results, tmp_path: Path
) -> None:
    page = markdown(drawn)
    assert "## nvfp4_linear: pick, rule and best launch of every problem" in page
    assert (
        "| 3x6144x4096 bfloat16 | yes | 10.1 | 10.5 | 10.0 | 1.0% | 5.0% | -3.8% | shipped table |"
        in page
    )
    assert page.count(" | no | 10.3 | 10.3 | 10.0 | 3.0% | 3.0% | 0.0% | preference |") == 20
    assert "nvfp4_linear: regret by rows" not in page
    html = write_page(drawn, tmp_path).read_text()
    assert "pick, rule and best launch of every problem" in html
    assert "regret: goals" in html
    chart = draw(drawn)["regret_nvfp4_linear"].svg(standalone=True)
    assert "goals, in the table: 1.5% on average, 8% at worst" in chart
    assert "goals, not in the table: 4% on average, 15% at worst" in chart


def test_files_of_before_there_was_a_rule_are_shown_as_ever(tmp_path: Path) -> None:
    files = [path for path in committed_files() if '"suite": "regret"' in path.read_text()]
    assert len(files) > 1
    for number, path in enumerate(files):
        results = load(path)
        text = printed(results)
        assert "goals of regret: " in text
        assert "rule" not in text.partition("hint by runtime")[0]
        assert "the largest regrets" in markdown(results)
        assert "regret: goals" in write_page(results, tmp_path / str(number)).read_text()


def saved(results: Results, path: Path) -> Path:
    results.path = path
    results.save()
    return path


def test_check_fails_loudly(drawn: Results, tmp_path: Path) -> None:
    """Also of a file that was measured before."""
    good = saved(drawn, tmp_path / "good.json")
    assert "goals of regret: 5 of 5 met" in run(f"bench --read {good} --check")
    drawn.rows.append(sampled_row((99, 6144, 4096), 12.0, 11.0))
    bad = saved(drawn, tmp_path / "bad.json")
    run(f"bench --read {bad}")  # without --check it is told, and no more
    result = CliRunner().invoke(app, ["bench", "--read", str(bad), "--check"])
    assert result.exit_code == 1
    assert (
        "check: nvfp4_linear, in the table: worst regret 20.0% over 21 problems, goal 8.0%: NOT met"
        in result.stderr
    )
    assert "check: nvfp4_linear: pick over rule 9.1% over 41 problems, goal 3.0%" in result.stderr


def test_a_page_has_every_number(results: Results) -> None:
    page = markdown(results)
    assert "## rms_norm: regret by rows" in page
    assert "| N by M | 1 | 16 | 64 |" in page
    assert "| 4096 bfloat16 | 0.0% | 7.0% | 2.0% |" in page
    assert "| 8192 bfloat16 | – | 13.0% | – |" in page
    assert "| NxK by M | 64 |" in page
    assert "| 4096x4096 bfloat16 | 1.5% |" in page
    assert "| chosen | 1.00 | 1.11 |" in page


def test_rows_of_these_suites_are_no_kernel_times(results: Results) -> None:
    assert results.timed() == []
    assert "vs best peer" not in printed(results)
    kernel = {"op": "rms_norm", "dtype": "bfloat16", "M": 1, "N": 64, "impl": OURS, "us": 2.0}
    results.rows.append({**kernel, "error": 0.0})
    assert results.timed() == results.rows[-1:]
    assert "vs best peer" in printed(results)


def test_pictures_hold_the_numbers(results: Results) -> None:
    charts = draw(results)
    assert list(charts) == ["regret_rms_norm", "regret_linear_silu", "matrix_linear_silu_4096x4096"]
    lines, _, heat = (chart.svg(standalone=True) for chart in charts.values())
    for text in ("7.0% at 16", "13.0% at 16", "N = 4096", "N = 8192", "0%", "10%"):
        assert f">{text}</text>" in lines
    assert "goals: 3% on average, 10% at worst" in lines
    for text in ("1.00", "2.00", "1.11", "–", "tuned at 64", "tuned at 4096", "chosen", "4096"):
        assert f">{text}</text>" in heat
    assert "NVIDIA H200" in heat


def test_no_rows_no_pictures(tmp_path: Path) -> None:
    assert write_charts(Results({}), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


# The command


def run(line: str) -> str:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither what other tests have tuned in this process nor files take part."""
    with monkeypatch.context() as patch:
        patch.setenv("GRISTMILL_TABLE", "none")
        reload_settings()
        reset_tables()
        yield
    reload_settings()
    reset_tables()


@pytest.mark.usefixtures("no_tables")
def test_the_command_measures_and_shows_again(tmp_path: Path) -> None:
    words = "--op rms_norm --op softmax --dtype float32 --device cpu"
    output = run(f"bench regret {words} --output {tmp_path}")
    data = json.loads((tmp_path / "results.json").read_text())
    found = [(row["op"], row["M"], row["N"]) for row in data["rows"] if row["suite"] == "regret"]
    assert found == [(op, m, 256) for op in ("rms_norm", "softmax") for m in (4, 64)]
    for row in data["rows"]:
        assert row["error"] is None
        if row["suite"] == "regret":
            assert set(row["variants"]) == {"library", "reference"}
            assert row["regret"] == pytest.approx(row["picked_us"] / row["best_us"] - 1, abs=1e-3)
            assert row["best_us"] <= row["picked_us"]
            assert row["rule"] == row["picked"]  # no table has entries for a CPU
            assert (row["over_rule"], row["tabled"]) == (0.0, False)
    hints = [row["hint"] for row in data["rows"] if row["suite"] == "matrix"]
    assert hints == [4, 64, "chosen"] * 3
    assert "[4/4] regret softmax 64x256 float32" in output
    assert "goals of regret: " in output
    for name in ("results.md", "regret_rms_norm_float32.svg", "matrix_rms_norm_256_float32.svg"):
        assert (tmp_path / name).stat().st_size > 500
    again = run(f"bench --read {tmp_path / 'results.json'}")
    (line,) = [line for line in output.splitlines() if line.startswith("goals of regret")]
    assert line in again
    assert len(load(tmp_path / "results.json").rows) == len(data["rows"])


def test_shapes_by_hand_leave_the_matrices_out(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run(f"bench regret --op linear_silu --shape 3x8x16 --dtype fp32 --device cpu --json {path}")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["M"], row["N"], row["K"]) == (3, 8, 16)


def test_beside_other_suites_regret_takes_the_ops_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("gristmill.bench.runner.Runner.run", lambda *_: None)
    monkeypatch.setattr("gristmill.bench.regret.suite.run", lambda points, *_: seen.append(points))
    words = "--shape 4x8 --peers none --device cpu"
    run(f"bench layer_norm regret --op add_layer_norm {words}")
    assert seen == []
    run(f"bench layer_norm regret --op add_layer_norm --op layer_norm {words}")
    assert [[str(point) for point in points] for points in seen] == [["layer_norm 4x8 bfloat16"]]


def test_options_of_the_draw_reach_the_plan_and_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "gristmill.bench.regret.suite.run", lambda points, *more: seen.append((points, more[-1]))
    )
    words = "--seed 7 --sizes 4 --weights 2 --grid --all-launches --samples 5 --device cpu"
    path = tmp_path / "r.json"
    run(f"bench regret --op nvfp4_linear {words} --json {path}")
    ((points, method),) = seen
    assert [point.rows for point in points] == [4, 64]  # a CPU has its own few
    assert (method.samples, method.all_launches) == (5, True)
    meta = json.loads(path.read_text())["meta"]
    assert (meta["regret"]["samples"], meta["regret"]["all_launches"]) == (5, True)


def test_options_of_the_draw_are_those_of_regret() -> None:
    for words in ("--seed 0", "--weights 0", "--grid"):
        result = CliRunner().invoke(app, ["bench", "rms_norm", *words.split(), "--device", "cpu"])
        assert result.exit_code == 2
        assert "choose what the suite regret measures" in result.output


def test_an_op_without_regret_is_told() -> None:
    result = CliRunner().invoke(app, ["bench", "regret", "--op", "add_layer_norm"])
    assert result.exit_code == 2
    assert "unknown op 'add_layer_norm'" in result.output
