"""The page of a run, and its headline, from rows made by hand and from those that are committed."""

from __future__ import annotations

import html
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench.committed import committed
from bench.made_up import full_run

from gristmill.bench.commands import command_of
from gristmill.bench.page import headline, page, write_page
from gristmill.bench.page.heatmap import class_of, maps
from gristmill.bench.problems import losses, peer_of, problems_of
from gristmill.bench.results import Results
from gristmill.bench.runs import merge

META = {"gpu": "NVIDIA H200", "device": "cuda", "date": "2026-01-02", "torch": "2.13.0"}


def row(op: str, shape: str, impl: str, us: float, **more: Any) -> dict[str, Any]:
    m, n = map(int, shape.split("x"))
    about = {"op": op, "dtype": "bfloat16", "M": m, "N": n, "shape": shape, "impl": impl}
    return {**about, "error": 0.001, "us": us, "spread_us": 0.25, **more}


@pytest.fixture
def results() -> Results:
    large = {"bytes": 300_000_000, "roof_us": 9.0, "roof_share": 0.9, "tb_per_s": 4.0}
    rows = [
        row("rms_norm", "64x128", "gristmill", 10.0, variant="cuda_block", source="user table"),
        row("rms_norm", "64x128", "eager", 40.0),
        row("rms_norm", "64x128", "quack", 20.0),
        row("rms_norm", "32x128", "gristmill", 10.0, **large),
        row("rms_norm", "32x128", "eager", 10.0),
        row("rms_norm", "32x128", "quack", 5.0),
        row("cross_entropy_fwd_bwd", "8x64", "gristmill", 9.0, **{**large, "roof_share": 0.7}),
        row("cross_entropy_fwd_bwd", "8x64", "quack_two_pass", 27.0, peer="quack"),
        row("cross_entropy_fwd_bwd", "8x64", "quack_one_pass", 18.0, peer="quack"),
        {**row("rms_norm", "64x128", "liger", 0.0), "error": "it fell <over>"},
    ]
    del rows[-1]["us"]
    return Results({**META, "missing_peers": {"flashinfer": "cannot be imported"}}, rows)


class Reader(HTMLParser):
    """What is on a page: ids, links, headings, its text, and what would be loaded."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[int] = []
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in ("link", "img", "iframe", "object", "embed") or "src" in found:
            self.loaded.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def told(results: Results) -> str:
    """The text of a page, blanks as one."""
    return " ".join(" ".join(Reader(page(results)).text).split())


def test_headline_holds_every_peer_against_ours(results: Results) -> None:
    found = headline(results)
    norm = next(family for family in found.families if family.name == "rms_norm")
    assert norm.best is not None
    # Best peers are quack at 20 and 5, so ratios 2 and 0.5.
    assert norm.best.ratio == pytest.approx(1.0)
    assert (norm.best.problems, norm.best.behind) == (2, 1)
    assert norm.peers["eager"].ratio == pytest.approx(2.0)
    assert (norm.peers["eager"].problems, norm.peers["eager"].behind) == (2, 0)
    assert found.overall.best is not None
    assert found.overall.best.ratio == pytest.approx(2.0 ** (1 / 3))
    assert found.overall.best.problems == 3
    assert found.peers == ("eager", "quack")


def test_headline_takes_the_fastest_way_of_a_peer(results: Results) -> None:
    family = next(one for one in headline(results).families if one.name == "cross_entropy")
    assert family.peers["quack"].ratio == pytest.approx(2.0)
    assert family.peers["quack"].problems == 1


def test_the_roof_is_told_of_large_problems_alone(results: Results) -> None:
    found = headline(results)
    assert found.overall.roof is not None
    assert found.overall.roof.mean == pytest.approx(0.8)
    assert (found.overall.roof.least, found.overall.roof.problems) == (0.7, 2)
    assert "more than 250 MB" in told(results)
    results.meta["device"] = "cpu"
    assert headline(results).overall.roof is None


def test_headline_of_starts_host_and_regret() -> None:
    start = {"suite": "cold_start", "op": "llama", "shape": "", "impl": "gristmill", "goal_s": 3.0}
    host = {"op": "rms_norm", "dtype": "bfloat16", "M": 1, "N": 64, "mode": "forward"}
    regret = {"suite": "regret", "op": "softmax", "dtype": "bfloat16", "N": 64, "K": None}
    regret |= {"impl": "gristmill", "error": None, "source": "table", "picked": "a", "best": "b"}
    regret |= {"picked_us": 1.0, "best_us": 1.0, "picked_spread_us": 0, "best_spread_us": 0}
    rows = [
        {**start, "cache": "empty", "beyond_s": 2.5, "import_s": 0.1},
        {**start, "cache": "warm", "beyond_s": 0.25, "import_s": 0.1},
        # Of whole models there are some: the first call of one op is not the headline.
        {"suite": "cold_start", "op": "softmax", "impl": "gristmill", "cache": "warm"}
        | {"beyond_s": 9.0, "import_s": 0.1, "M": 1, "N": 2},
        {**host, "impl": "gristmill", "host_us": 12.0},
        {**host, "impl": "eager", "host_us": 8.0},
        *({**regret, "M": m, "shape": f"{m}x64", "regret": m / 100} for m in range(1, 21)),
    ]
    found = headline(Results(dict(META), rows))
    assert [one.seconds for one in found.started("empty")] == [2.5]
    assert [(one.name, one.goal) for one in found.started("warm")] == [("llama", 3.0)]
    assert found.host is not None
    assert 1 / found.host.mean.ratio == pytest.approx(1.5)
    assert found.regret is not None
    assert found.regret.mean == pytest.approx(0.105)
    assert (found.regret.p95, found.regret.worst) == (0.19, 0.2)
    assert found.regret.worst_at == "softmax 20x64"
    facts = dict(found.facts())
    assert facts["Start, empty cache"] == "llama 2.50 s, beyond torch's own"
    assert facts["Start, bundle cache"] == "not measured"
    assert "worst 20.0% (softmax 20x64), over 20 problems" in facts["Regret"]
    assert facts["Host time of an eager call"].startswith("1.50x")


def test_what_was_not_measured_is_said_and_not_hidden(results: Results) -> None:
    text = told(results)
    for suite in ("end_to_end", "vllm", "transformers", "regret", "cold_start", "host_cost"):
        assert f"{suite} : not measured." in text
    assert text.count("not measured") >= 6 + 5  # and cards, and lines of the table


def test_ratios_are_those_of_one_run() -> None:
    rows = [
        row("rms_norm", "8x64", "gristmill", 10.0, run=0),
        row("rms_norm", "8x64", "eager", 5.0, run=0),
        row("rms_norm", "8x64", "gristmill", 30.0, run=1),
        row("rms_norm", "8x64", "quack", 60.0, run=1),
        # A run without ours does not take the place of one that has it.
        row("rms_norm", "8x64", "liger", 1.0, run=2),
    ]
    meta = {**META, "runs": [{"file": name} for name in ("a.json", "b.json", "c.json")]}
    (problem,) = problems_of(merge([Results(meta, rows)], ["abc.json"]))
    assert problem.ratio == pytest.approx(2.0)
    assert list(problem.peers) == ["quack"]


def test_peers_of_old_files_go_by_their_implementation() -> None:
    assert peer_of({"impl": "vllm_marlin"}) == "vllm"
    assert peer_of({"impl": "quack_one_pass", "peer": "quack"}) == "quack"
    assert peer_of({"impl": "eager"}) == "eager"


def test_losses_come_worst_first_with_numbers_and_the_peer(results: Results) -> None:
    results.rows += [
        row("softmax", "4x64", "gristmill", 100.0),
        row("softmax", "4x64", "quack", 90.0),
        row("softmax", "2x64", "gristmill", 100.0),
        row("softmax", "2x64", "quack", 98.0),  # a tie
    ]
    behind = losses(problems_of(results))
    assert [(one.op, one.label) for one in behind] == [("rms_norm", "32x128"), ("softmax", "4x64")]
    text = told(results)
    assert "Behind the best peer by more than 3% on 2 of 5 problems" in text
    first = text.index("0.50x 10.0 5.00 quack")
    assert first < text.index("0.90x 100 90.0 quack")


def test_very_many_losses_are_all_there() -> None:
    rows = [
        one
        for m in range(1, 100)
        for one in (
            row("softmax", f"{m}x64", "gristmill", 1000.0),
            row("softmax", f"{m}x64", "quack", 5.0 * m),
        )
    ]
    text = page(Results(dict(META), rows))
    part = text[text.index('id="losses"') : text.index('id="heat"')]
    assert part.count("<tr><th scope=row>softmax") == 99
    assert "The other 59" in part
    assert part.index(">1x64<") < part.index(">40x64<") < part.index("<details>")


@pytest.mark.parametrize(
    ("ratio", "name"),
    [
        *((0.5, "l3"), (0.85, "l2"), (0.95, "l1"), (0.97, "t"), (1.0, "t"), (1.029, "t")),
        *((1.03, "w1"), (1.5, "w2"), (18.0, "w3")),
    ],
)
def test_colours_of_ratios(ratio: float, name: str) -> None:
    assert class_of(ratio) == name


def test_a_small_ratio_is_not_written_as_none() -> None:
    rows = [row("moe", "8x64", "gristmill", 1000.0), row("moe", "8x64", "torch", 1.5)]
    text = told(Results(dict(META), rows))
    assert "0.0015x 1,000 1.50 torch" in text
    assert "0.00x" not in text


def test_every_ratio_is_a_cell(results: Results) -> None:
    _, _, text = page(results).partition('<div class="maps">')  # after the legend
    cells = re.findall(r"<(?:td|li) class=['\"]h (\w+)['\"]>(?:<b>)?([\d.]+)", text)
    assert sorted(cells) == [("l3", "0.50"), ("w3", "2.00"), ("w3", "2.00")]


def test_a_map_is_a_table_only_where_most_of_it_is_filled() -> None:
    rows = [
        one
        for m in (1, 2)
        for n in (64, 128)
        for one in (
            row("rms_norm", f"{m}x{n}", "gristmill", 1.0),
            row("rms_norm", f"{m}x{n}", "eager", 2.0),
        )
    ]
    (full,) = maps(problems_of(Results(dict(META), rows)))
    assert (full.is_dense, full.columns, list(full.cells)) == (True, [1, 2], ["64", "128"])
    (sparse,) = maps(problems_of(Results(dict(META), [rows[0], rows[1], rows[6], rows[7]])))
    assert not sparse.is_dense


def test_shapes_of_as_many_rows_do_not_hide_each_other() -> None:
    about = {"dtype": "bfloat16", "M": 8, "N": 64, "error": 0.0}
    rows = [
        {"op": "softmax", **about, "shape": shape, "impl": impl, "us": us}
        for shape, ours in (("8x64", 2.0), ("2x4x64", 4.0))
        for impl, us in (("gristmill", ours), ("eager", 8.0))
    ]
    (found,) = maps(problems_of(Results(dict(META), rows)))
    assert sorted(problem.ratio or 0.0 for problem in found.problems) == [2.0, 4.0]


def test_who_was_wrong_or_absent_is_told_with_the_reason(results: Results) -> None:
    text = told(results)
    assert "liger was not timed on rms_norm 64x128: it fell <over>" in text
    assert "not timed: it fell <over>" in text  # in its place among the rows
    assert "flashinfer (cannot be imported)" in text


def test_a_cpu_run_says_loudly_that_no_kernel_ran(results: Results) -> None:
    assert "role=" not in page(results).split("<main>")[0].split("<header")[1]
    results.meta |= {"device": "cpu", "gpu": "CPU (some)"}
    results.rows[0] |= {"reason": "only these", "variants": {"library": 3.0}}
    results.rows[0]["declined"] = {"cuda_block": "needs a GPU"}
    banner = page(results).split("</header>")[0]
    assert 'class="loud"' in banner
    assert "no kernel of gristmill ran" in banner
    text = told(results)
    assert "which variant ran, and why" in text
    assert "cuda_block: needs a GPU" in text
    assert "--device cpu" in text


def test_a_run_that_was_cut_short_says_so(results: Results) -> None:
    assert "Cut short" not in told(results)
    results.meta["finished"] = True
    assert "Cut short" not in told(results)
    results.meta["finished"] = False
    banner = page(results).split("</header>")[0]
    assert "This run was cut short, and something may be missing" in banner
    results.meta["unmeasured"] = ["softmax_bwd 8x64 bfloat16", "regret --quick"]
    banner = page(results).split("</header>")[0]
    assert "This run was cut short. Not measured: softmax (1 problem), regret --quick." in banner
    del results.meta["unmeasured"]
    results.meta["runs"] = [{"file": name, "rows": 1} for name in ("a.json", "b.json")]
    assert "Cut short" not in told(results)
    results.meta["runs"][1]["finished"] = False
    assert "Cut short: b.json, and something may be missing." in told(results)


def test_a_cpus_copy_is_no_roof_in_any_table(results: Results) -> None:
    results.rows[0] |= {"roof_share": 3.77, "bytes": 1, "roof_us": 1.0, "tb_per_s": 0.001}
    assert "377%" in told(results)
    results.meta["device"] = "cpu"
    assert "377%" not in told(results)


def test_blocks_of_transformers_are_told_with_their_commands(results: Results) -> None:
    block = {"suite": "end_to_end", "op": "decoding", "model": "llama-8b", "dtype": "bfloat16"}
    block |= {"M": 16, "batch": 16, "length": 1024, "shape": "batch 16, 1024 cached"}
    results.rows += [
        {**block, "impl": "eager", "ours": False, "ms": 0.5, "spread_ms": 0.01, "error": None},
        {**block, "impl": "gristmill", "ours": True, "ms": 0.25, "spread_ms": 0.01, "error": None},
    ]
    text = told(results)
    assert "end_to_end : not measured" not in text
    assert "gristmill 250 2.00x" in text
    line = "gristmill bench end_to_end --op decoding --batches 16 --impls eager,gristmill"
    assert line in text


HOSTILE = """<script>alert('x')</script>"'&</style></title>"""


def test_names_cannot_break_out(results: Results) -> None:
    for key in ("gpu", "date", "torch", "gristmill", "revision", "driver", "method"):
        results.meta[key] = HOSTILE
    results.meta |= {"peers": {HOSTILE: HOSTILE}, "missing_peers": {HOSTILE: HOSTILE}}
    results.meta |= {"notes": [HOSTILE], "commands": [HOSTILE], "methods": {HOSTILE: HOSTILE}}
    evil = {"op": HOSTILE, "shape": HOSTILE, "impl": HOSTILE, "peer": HOSTILE, "sets": [HOSTILE]}
    results.rows += [
        {**row("rms_norm", "8x64", "gristmill", 1.0), **evil, "variant": HOSTILE},
        {**row("rms_norm", "8x64", "gristmill", 2.0), "sets": [HOSTILE], "shape": HOSTILE},
        {**row("rms_norm", "8x64", "eager", 1.0), "shape": HOSTILE, "config": {HOSTILE: HOSTILE}},
        {**row("rms_norm", "9x64", "gristmill", 2.0), "error": HOSTILE, "source": HOSTILE},
        {"suite": "choice", **row("rms_norm", "8x64", HOSTILE, 1.0)}
        | {"what": HOSTILE, "limit": None, "choice_us": 1.0},
    ]
    text = page(results)
    reader = Reader(text)
    assert reader.tags["script"] == 2
    assert reader.tags["style"] == 1
    assert "<script>alert" not in text
    assert "</style></title>" not in text
    assert HOSTILE in " ".join(reader.text)


def test_control_characters_and_colours_of_terminals_are_left_out(results: Results) -> None:
    results.rows[-1]["error"] = "\x1b[91mred\x1b[0m and\x00 \x08more"
    text = page(results)
    assert "red and more" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


@pytest.fixture(scope="module")
def everything() -> Results:
    return committed()


@pytest.fixture(scope="module")
def committed_page(everything: Results) -> str:
    return page(everything)


def test_the_page_stands_alone(committed_page: str) -> None:
    reader = Reader(committed_page)
    assert reader.loaded == []
    addresses = re.findall(r"(?:https?:)?//[\w.]+", html.unescape(committed_page))
    # The name of SVG's language, which nobody asks for.
    assert set(addresses) <= {"http://www.w3.org"}, set(addresses)
    assert "url(" not in committed_page
    assert "@import" not in committed_page


def test_ids_are_unique_links_lead_somewhere_headings_are_in_order(committed_page: str) -> None:
    reader = Reader(committed_page)
    assert [name for name, count in Counter(reader.ids).items() if count > 1] == []
    assert len(reader.links) > 20
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    assert reader.headings[0] == 1
    assert reader.headings.count(1) == 1
    steps = zip(reader.headings, reader.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps)


def test_every_problem_is_there_with_its_command(everything: Results, committed_page: str) -> None:
    problems = problems_of(everything)
    assert len(problems) > 300
    for problem in problems:
        assert html.escape(command_of(problem.any)) in committed_page
    rows = sum(len(problem.row_of) for problem in problems)
    assert committed_page.count("<th scope=row") > rows


def test_rows_of_other_suites_have_their_commands(everything: Results, committed_page: str) -> None:
    for one in everything.rows:
        line = command_of(one)
        assert line
        assert html.escape(line) in committed_page, line


def test_the_runs_that_were_merged_are_named(everything: Results, committed_page: str) -> None:
    count = len(everything.meta["runs"])
    assert count > 5
    assert f"Merged from {count} runs" in committed_page
    for run in everything.meta["runs"]:
        assert html.escape(run["file"]) in committed_page


def test_the_same_results_give_the_same_bytes(
    everything: Results, committed_page: str, tmp_path: Path
) -> None:
    path = write_page(everything, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "index.html"
    assert path.read_text(encoding="utf-8") == committed_page


def test_a_full_run_is_small() -> None:
    made = full_run()
    assert len(made.rows) > 2500
    assert len(page(made).encode()) < 1_750_000


def test_nothing_at_all_is_a_page_too() -> None:
    text = told(Results({}, []))
    assert "an unknown device" in text
    assert text.count("not measured") > 10
    assert "Nothing was measured beside a peer." in text
