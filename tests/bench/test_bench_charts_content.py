"""Charts of rows made by hand: every number at its place, gaps as gaps, losses as losses."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from bench import drawn

from gristmill.bench.charts import Chart, draw, write_charts
from gristmill.bench.charts.headline import families
from gristmill.bench.problems import problems_of
from gristmill.bench.results import OURS, Results, Row

META = {"gpu": "NVIDIA H200", "device": "cuda", "date": "2026-01-02"}


def timed(m: int, n: int, impl: str, us: float, **more: Any) -> Row:
    """A row of rms_norm whose roof is 4 TB/s."""
    moved = 4 * m * n
    base = {"op": "rms_norm", "dtype": "bfloat16", "M": m, "N": n, "impl": impl, "error": 0.0}
    rates = {"us": us, "bytes": moved, "tb_per_s": moved / us / 1e6, "roof_us": moved / 4e6}
    return {**base, **rates, "roof_share": rates["roof_us"] / us, **more}


def failed(m: int, n: int, impl: str, error: str = "it broke") -> Row:
    return {"op": "rms_norm", "dtype": "bfloat16", "M": m, "N": n, "impl": impl, "error": error}


def product(m: int, n: int, impl: str, us: float, **more: Any) -> Row:
    flop = 2e-6 * m * n * 4096 / us
    more = {"op": "linear", "K": 4096, "shape": f"{m}x{n}x4096", "tflop_per_s": flop, **more}
    return timed(m, n, impl, us, roof_us=10.0, roof_share=10.0 / us, **more)


def charts(rows: list[Row], **meta: Any) -> dict[str, Chart]:
    return draw(Results({**META, **meta}, rows))


def root_of(
    rows: list[Row], stem: str = "rms_norm", *, narrow: bool = False, **meta: Any
) -> ET.Element:
    return drawn.parsed(charts(rows, **meta)[stem].svg(standalone=True, narrow=narrow))


def told(root: ET.Element) -> list[str]:
    return [text.text for text in drawn.texts(root)]


def height_of(root: ET.Element, tick: str) -> float:
    """Where the axis has this number: its baseline is 3.8 below the line."""
    (found,) = [text for text in drawn.texts(root) if text.text == tick and "mu" in text.kinds]
    return found.bottom - 0.21 * 11 - 3.8


BIG = [(32768, 1024), (32768, 4096), (32768, 8192)]  # 134 MB to 1 GB


def big(rates: dict[str, list[float | None]], **more: Any) -> list[Row]:
    """Rows at the three large shapes, by TB/s."""
    rows = []
    for name, values in rates.items():
        for (m, n), rate in zip(BIG, values, strict=True):
            if rate is not None:
                rows.append(timed(m, n, name, 4 * m * n / rate / 1e6, **more))
    return rows


# Bandwidth


def test_a_rate_is_drawn_at_its_height() -> None:
    root = root_of(big({OURS: [1.0, 2.0, 3.0], "eager": [0.5, 1.5, 4.0]}))
    zero, four = height_of(root, "0"), height_of(root, "4")
    for kind, rates in (("f-gristmill", [1, 2, 3]), ("f-eager", [0.5, 1.5, 4])):
        _, *marks = drawn.marks(root, kind)  # the first is that of the legend
        heights = [y for _, y, _ in sorted(marks)]
        assert heights == pytest.approx(
            [zero + rate / 4 * (four - zero) for rate in rates], abs=0.11
        )
    (roof,) = drawn.lines(root, "roof")
    assert [y for _, y in roof] == pytest.approx([four] * 5, abs=0.11)


def test_marks_stand_above_their_shapes_and_say_their_numbers() -> None:
    root = root_of(big({OURS: [1.0, 2.0, 3.0], "eager": [0.5, 1.5, 4.0]}))
    _, *marks = drawn.marks(root, "f-eager")
    labels = {text.text: text for text in drawn.texts(root)}
    for (x, _, tip), (m, n) in zip(sorted(marks), BIG, strict=True):
        assert labels[f"×{n}"].middle == pytest.approx(x, abs=0.11)
        rate = 4 * m * n / float(tip.split()[1].replace(",", "")) / 1e6
        assert float(tip.split()[-2]) == pytest.approx(rate, rel=0.01)


def test_a_gap_is_a_gap() -> None:
    rows = big({OURS: [1.0, 2.0, 3.0], "quack": [1.0, None, 2.0], "liger": [1.0, 1.0, None]})
    rows.append(failed(*BIG[2], "liger", "RuntimeError: N > 4096 & odd"))
    root = root_of(rows)
    lines = {name: drawn.lines(root, f"s-{name}") for name in (OURS, "quack", "liger")}
    # The first of each is the sample in the legend.
    assert [len(line) for line in lines[OURS]] == [2, 3]
    assert [len(line) for line in lines["quack"]] == [2]  # two points, and nothing between them
    assert [len(line) for line in lines["liger"]] == [2, 2]
    assert len(drawn.marks(root, "f-quack")) == 1 + 2
    tips = [tip for _, _, tip in drawn.marks(root, "s-liger") if tip]
    assert tips == ["liger, 32768x8192: RuntimeError: N > 4096 & odd"]


def test_a_loss_is_tinted_and_its_number_is_red() -> None:
    rows = big({OURS: [2.0, 3.0, 3.88], "eager": [1.0, 3.3, 3.96], "quack": [2.1, 3.0, 1.0]})
    root = root_of(rows)
    bands = drawn.boxes(root, "loss")
    ours = sorted(x for x, _, _ in drawn.marks(root, "f-gristmill"))[1:]
    # 2.1 over 2.0 and 3.3 over 3.0 are losses; 3.96 over 3.88 is within 3%.
    assert [(x < ours[index] < x + across) for index, (x, _, across, _) in enumerate(bands)] == [
        True,
        True,
    ]
    red = [text.text for text in drawn.texts(root) if "bad" in text.kinds]
    assert red == ["0.95×", "0.91×"]
    assert "0.98×" in told(root)


def test_our_variants_are_named_beneath() -> None:
    rows = big({"eager": [1.0, 1.0, 1.0]})
    for (m, n), variant in zip(BIG, ("cuda_warp", "cuda_block", "cuda_block"), strict=True):
        rows.append(timed(m, n, OURS, 4 * m * n / 2e6, variant=variant))
    root = root_of(rows)
    # A segment for each run of one variant, and a box of the legend.
    widths = {kind: [box[2] for box in drawn.boxes(root, kind)] for kind in ("v0", "v1")}
    assert widths["v0"][0] == pytest.approx(2 * widths["v1"][0] + 1, abs=0.2)
    assert [len(found) for found in widths.values()] == [2, 2]
    for text in ("block", "warp", "cuda_block", "cuda_warp"):
        assert told(root).count(text) == 1


# Small problems


def test_small_problems_are_ratios_to_ours() -> None:
    rows = [timed(1, 4096, impl, us) for impl, us in ((OURS, 2.0), ("eager", 4.0), ("quack", 1.5))]
    root = root_of(rows)
    one, two = height_of(root, "1×"), height_of(root, "2×")
    (_, (_, eager, tip)) = sorted(drawn.marks(root, "f-eager"), key=lambda mark: bool(mark[2]))
    assert eager == pytest.approx(two, abs=0.11)
    assert tip == "eager 4.00 µs, 2.00×"
    (_, (_, quack, _)) = sorted(drawn.marks(root, "f-quack"), key=lambda mark: bool(mark[2]))
    (zone,) = drawn.boxes(root, "zone")
    assert zone[1] == pytest.approx(one, abs=0.11)
    assert zone[1] < quack < zone[1] + zone[3]  # it is faster
    (last,) = [text for text in drawn.texts(root) if text.text == "2.00 µs"]
    assert "bad" in last.kinds
    assert not drawn.lines(root, "roof")


def test_a_cpu_has_ratios_alone() -> None:
    rows = big({OURS: [1.0, 2.0, 3.0], "eager": [0.5, 1.5, 4.0]})
    root = root_of(rows, device="cpu")
    assert "Times over ours" in told(root)
    assert not drawn.lines(root, "roof")
    assert any("on a CPU only ratios mean anything" in text for text in told(root))


def test_where_ours_failed_it_is_seen() -> None:
    rows = [timed(1, 4096, "eager", 4.0), failed(1, 4096, OURS, "CompileError: no")]
    rows += [timed(16, 4096, impl, 4.0) for impl in (OURS, "eager")]
    root = root_of(rows)
    assert "–" in told(root)
    tips = [tip for _, _, tip in drawn.marks(root, "s-gristmill")]
    assert "gristmill, 1x4096: CompileError: no" in tips
    only = root_of([failed(1, 4096, OURS)])
    assert "×4096" in told(only)


# Sets


def test_shapes_stand_under_their_sets() -> None:
    rows = big({OURS: [2.0, 2.0, 2.0], "eager": [1.0, 1.0, 1.0]}, sets=["quack"])
    rows += [
        timed(32768, 4096, name, 300.0, sets=["quack", "hidden4096"]) for name in (OURS, "eager")
    ]
    rows = [row for row in rows if row["N"] != 4096 or len(row["sets"]) == 2]
    rows += [timed(8192, 6144, name, 99.0) for name in (OURS, "eager")]
    found = {text.text: text for text in drawn.texts(root_of(rows))}
    assert found["quack"].top == found["hidden4096"].top == found["others"].top
    assert found["quack"].left < found["hidden4096"].left < found["others"].left
    # The problem of both sets is shown in both.
    assert told(root_of(rows)).count("×4096") == 2


@pytest.mark.parametrize("narrow", [False, True])
def test_a_set_of_many_shapes_goes_on_in_the_next_line(narrow: bool) -> None:
    sizes = [(1024 * index, 8192) for index in range(1, 36)]
    rows = [timed(m, n, OURS, m / 10, sets=["many"]) for m, n in sizes]
    root = root_of(rows, narrow=narrow)
    assert told(root).count("many") == 1
    assert told(root).count("many (continued)") == (4 if narrow else 2)
    shown = [text for text in told(root) if text.isdecimal() and int(text) >= 1024]
    assert shown == [str(m) for m, _ in sizes]


def test_old_rows_without_sets_or_peers_are_drawn() -> None:
    rows = big({OURS: [1.0, 2.0, 3.0], "quack_two_pass": [0.5, 1.5, 2.0]})
    assert not {"sets", "peer", "shape"} & set(rows[0])
    assert list(charts(rows)) == ["headline", "rms_norm"]
    assert "quack_two_pass" in told(root_of(rows))


def test_names_that_bite() -> None:
    nasty = '"><script>x</script>&'
    rows = big({OURS: [1.0, 2.0, 3.0], nasty: [0.5, 1.5, 2.0]}, sets=[nasty], variant=nasty)
    rows[0]["shape"] = nasty
    for narrow in (False, True):
        for name, chart in charts(rows, gpu=nasty).items():
            root = drawn.parsed(chart.svg(standalone=True, narrow=narrow))
            assert not any(node.tag.endswith("script") for node in root.iter()), name


def test_a_file_of_results_names_no_file_elsewhere(tmp_path: Path) -> None:
    rows = [
        row | {"op": "../../x"} for row in big({OURS: [1.0, 2.0, 3.0], "eager": [1.0, 1.0, 1.0]})
    ]
    paths = write_charts(Results(META, rows), tmp_path / "a" / "b")
    assert sorted(tmp_path.rglob("*.svg")) == sorted(paths)
    assert {path.name for path in paths} == {"headline.svg", "-x.svg"}


# Products


def test_products_are_shares_of_the_roof_weight_by_weight() -> None:
    rows = [
        product(m, n, impl, us)
        for n in (4096, 8192)
        for m in (1, 16, 256)
        for impl, us in ((OURS, 20.0), ("cublas_bf16", 40.0))
    ]
    root = root_of(rows, "linear")
    assert [text for text in told(root) if "N × K" in text] == [
        "N × K = 4096 × 4096",
        "N × K = 8192 × 4096",
    ]
    half = height_of(root, "50%")
    _, *ours = drawn.marks(root, "f-gristmill")
    assert [y for _, y, _ in ours] == pytest.approx([half] * 6, abs=0.11)
    assert {tip for _, _, tip in ours} == {"gristmill 20.0 µs, 50%"}


# The headline


def test_the_headline_has_means_counts_and_losses() -> None:
    rows = [
        *(timed(1, 4096, impl, us) for impl, us in ((OURS, 2.0), ("eager", 8.0), ("quack", 1.0))),
        *(timed(4, 4096, impl, us) for impl, us in ((OURS, 2.0), ("eager", 2.0))),
    ]
    root = root_of(rows, "headline")
    found = told(root)
    assert "2 problems" in found
    # Against eager 4 and 1; against quack 0.5 on one; against the fastest of them 0.5 and 1.
    for value, name in (("2.00×", "eager"), ("0.50×", "quack on 1"), ("0.71×", "fastest of them")):
        assert found[found.index(name) - 1] == value
    assert found.count("1 behind") == 2
    ((x, _, tip),) = drawn.marks(root, "f-eager")
    assert tip == "rms_norm against eager: 2.00 times over 2 problems, behind by more than 3% on 0"
    two = next(text for text in drawn.texts(root) if text.text == "2×")
    assert two.middle == pytest.approx(x, abs=0.2)
    assert len(drawn.marks(root, "tick-bad")) == 1


@pytest.mark.parametrize("narrow", [False, True])
def test_the_words_of_the_headline_fit_however_long_the_scale(narrow: bool) -> None:
    rows = [
        {**timed(8, 64, impl, us), "op": op}
        for op in ("rms_norm", "layer_norm", "softmax", "cross_entropy", "linear", "topk_router")
        for impl, us in ((OURS, 1.0), ("eager", 40.0), ("inductor", 9.0), ("liger", 0.98))
    ]
    root = root_of(rows, "headline", narrow=narrow)
    assert "ours faster" in told(root)
    assert max(text.right for text in drawn.texts(root)) <= drawn.size(root)[0]
    assert min(text.left for text in drawn.texts(root)) >= 0
    # Each column begins anew, on the same scale.
    assert told(root).count("1×") == (1 if narrow else 2)
    places = sorted({x for x, _, tip in drawn.marks(root, "f-eager") if tip})
    ones = sorted(text.middle for text in drawn.texts(root) if text.text == "1×")
    lengths = [x - one for x, one in zip(places, ones, strict=True)]
    assert lengths == pytest.approx([lengths[0]] * len(lengths), abs=0.2)


def test_the_ways_of_one_library_are_one_peer_in_the_headline() -> None:
    rows = [timed(1, 4096, OURS, 2.0)]
    rows += [
        timed(1, 4096, f"quack_{way}", us, peer="quack") for way, us in (("a", 3.0), ("b", 4.0))
    ]
    (family,) = families(problems_of(Results(META, rows)))
    assert family.peers == {"quack": [1.5]}
    assert [name for name, _ in family.lines] == ["quack"]  # the fastest of one is that one


def test_families_come_in_the_order_of_the_suites() -> None:
    rows = [
        {**timed(8, 64, impl, us), "op": op}
        for op in ("softmax", "layer_norm_bwd", "rms_norm", "new_op")
        for impl, us in ((OURS, 1.0), ("eager", 2.0))
    ]
    found = [family.name for family in families(problems_of(Results(META, rows)))]
    assert found == ["rms_norm", "layer_norm", "softmax", "new_op"]


# Starts, host time, whole blocks


def start(cache: str, beyond: float, **parts: float) -> Row:
    row = {"suite": "cold_start", "op": "rms_norm", "shape": "256x4096", "impl": OURS}
    return {**row, "cache": cache, "beyond_s": beyond, "least_s": beyond, "most_s": beyond, **parts}


def test_a_start_is_a_bar_of_its_parts() -> None:
    rows = [start("empty", 0.5, import_s=0.1, first_call_s=0.9), start("warm", 0.2, import_s=0.2)]
    rows[0]["goal_s"] = 1.0
    root = root_of(rows, "cold_start")
    (_, imported, warm), (_, called) = drawn.boxes(root, "p0"), drawn.boxes(root, "p3")
    # What the work itself takes is no part of a start: cut off at half a second.
    assert called[2] == pytest.approx(4 * imported[2], rel=0.01)
    assert called[0] == pytest.approx(imported[0] + imported[2], abs=0.2)
    (end,) = [x for x, y, _ in drawn.marks(root, "goal") if y > imported[1] - 20 and x > 100]
    assert end - imported[0] == pytest.approx(10 * imported[2], rel=0.01)
    assert warm[2] > called[2]  # full caches have a scale of their own
    for text in ("0.500 s", "0.200 s", "Empty cache", "Warm cache, or a bundle"):
        assert text in told(root)


def test_host_time_shows_who_is_slower() -> None:
    rows = [
        {"suite": "host_cost", "op": op, "dtype": "bfloat16", "M": 1, "N": 64, "shape": "1x64"}
        | {"impl": impl, "mode": "forward", "host_us": us}
        for op, times in (("rms_norm", (12.0, 10.0)), ("softmax", (8.0, 10.0)))
        for impl, us in zip((OURS, "eager"), times, strict=True)
    ]
    root = root_of(rows, "host_cost")
    found = {text.text: text for text in drawn.texts(root)}
    assert "bad" in found["12.0 µs, 1.20× eager"].kinds
    assert "bad" not in found["8.00 µs, 0.80× eager"].kinds
    eager = [x for x, _, tip in drawn.marks(root, "f-eager") if tip]
    assert eager[0] == eager[1]
    ours = [x for x, _, tip in drawn.marks(root, "f-gristmill") if tip]
    assert ours[1] < eager[0] < ours[0]
    # Rows of before the suite had a name.
    old = [{key: value for key, value in row.items() if key != "suite"} for row in rows]
    assert "host_cost" in charts(old)


def test_whole_blocks_in_whatever_unit_they_come() -> None:
    base = {"suite": "end_to_end", "op": "training", "batch": 2}
    rows = [
        base | {"impl": "eager", "ms": 30.0},
        base | {"impl": "inductor", "us": 15000.0},
        base | {"impl": "gristmill_compiled", "ours": True, "ms": 20.0},
        base | {"impl": "liger", "error": "it broke"},
    ]
    root = root_of(rows, "end_to_end")
    found = {text.text: text for text in drawn.texts(root)}
    for text in ("30.0 ms", "15.0 ms, 2.00× eager", "failed", "batch 2", "liger"):
        assert text in found
    assert "bad" in found["20.0 ms, 1.50× eager"].kinds  # Inductor is faster
    ((_, _, eager, _),) = drawn.boxes(root, "f-eager")
    ((_, _, ours, _),) = drawn.boxes(root, "f-gristmill")
    assert ours == pytest.approx(eager * 2 / 3, abs=0.2)


def test_a_run_where_everybody_failed_is_drawn() -> None:
    base = {"suite": "end_to_end", "op": "decoding", "error": "no"}
    rows = [base | {"impl": impl} for impl in ("eager", OURS)]
    assert told(root_of(rows, "end_to_end")).count("failed") == 2


def test_experts_on_a_cpu_have_no_columns_and_are_drawn() -> None:
    about = {"op": "nvfp4_moe", "model": "tiny", "routing": "uniform", "E": 8, "topk": 2}
    rows = [timed(16, 64, impl, us, **about) for impl, us in ((OURS, 2.0), ("torch", 3.0))]
    for row in rows:
        del row["N"]
    root = root_of(rows, "nvfp4_moe", device="cpu")
    assert {"tiny M=16 uniform", "2.00 µs", "1.5×"} <= set(told(root))
