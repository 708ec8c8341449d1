"""Charts of committed results, and of a made-up full run: what a reader needs of every one."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import pytest
from bench import drawn
from bench.committed import committed_files
from bench.made_up import full_run

from gristmill.bench.charts import CSS, Chart, draw, write_charts
from gristmill.bench.page import page
from gristmill.bench.results import Results, load

FILES = {f"{path.parent.name}-{path.stem}": path for path in committed_files()}
MADE_UP = "made up"


@lru_cache(maxsize=1)
def charts(name: str) -> dict[str, Chart]:
    return draw(full_run() if name == MADE_UP else load(FILES[name]))


def test_there_are_committed_results_to_draw() -> None:
    assert len(FILES) >= 18
    assert sum(bool(charts(name)) for name in FILES) >= 14


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", [*FILES, MADE_UP])
def test_text_is_inside_and_touches_no_other(name: str, narrow: bool) -> None:
    for stem, chart in charts(name).items():
        root = drawn.parsed(chart.svg(standalone=True, narrow=narrow))
        across, down = drawn.size(root)
        assert across == (400 if narrow else 760)
        found = drawn.texts(root)
        assert found, stem
        for text in found:
            assert 0 <= text.left <= text.right <= across, (stem, text)
            assert 0 <= text.top <= text.bottom <= down, (stem, text)
        # From the left to the right, so that only neighbours are compared.
        found.sort(key=lambda text: text.left)
        for index, text in enumerate(found):
            for other in found[index + 1 :]:
                if other.left > text.right:
                    break
                assert not text.touches(other), (stem, text, other)


@pytest.mark.parametrize("name", ["forward-results", "nvfp4_moe-results", MADE_UP])
def test_marks_are_inside(name: str) -> None:
    for stem, chart in charts(name).items():
        root = drawn.parsed(chart.svg(standalone=True))
        across, down = drawn.size(root)
        for kind in ("mk", "op", "st", "ln"):
            for x, y, _ in drawn.marks(root, kind):
                assert 0 <= x <= across, (stem, kind)
                assert 0 <= y <= down, (stem, kind)


@pytest.mark.parametrize("name", ["forward-results", "regret-quick-results", "cold_start-results"])
def test_a_file_has_both_themes_and_says_what_it_is(name: str) -> None:
    for stem, chart in charts(name).items():
        text = chart.svg(standalone=True)
        root = drawn.parsed(text)
        assert root.attrib["role"] == "img"
        assert root.findtext(drawn.SVG + "title") == chart.title
        assert root.findtext(drawn.SVG + "desc") == chart.note
        assert "prefers-color-scheme:dark" in text
        assert ":root{--gm-ink:#1f2937" in text
        assert ":root{--gm-ink:#e6edf3" in text
        assert "NVIDIA H200" in text, stem
        # Colours by name only, no picture and nothing from elsewhere.
        marked = text.partition("</style>")[2]
        assert "#" not in re.sub(r"<(title|desc)>.*?</\1>", "", marked)
        assert "http" not in marked


def test_an_inlined_chart_has_both_layouts_and_no_colours_of_its_own() -> None:
    chart = charts("forward-results")["rms_norm"]
    root = ET.fromstring(chart.svg(standalone=False))
    assert root.tag == "div"
    assert root.attrib == {"class": "gm-chart"}
    wide, narrow = root
    assert wide.attrib["class"] == "gm gm-wide"
    assert narrow.attrib["class"] == "gm gm-narrow"
    assert (drawn.size(wide)[0], drawn.size(narrow)[0]) == (760, 400)
    assert root.find(f".//{drawn.SVG}style") is None
    assert not any("id" in node.attrib for node in root.iter())
    assert ".gm-narrow{display:none}" in CSS
    assert "@media (max-width:640px)" in CSS
    # Where nothing hovers there are no tooltips; the title of the whole is for those who listen.
    assert len(list(wide.iter(drawn.SVG + "title"))) > 50
    assert [node.text for node in narrow.iter(drawn.SVG + "title")] == [chart.title]
    # Every class that is used has a rule.
    used = {
        kind
        for node in root.iter()
        if node is not root
        for kind in node.attrib.get("class", "").split()
    }
    for kind in used - {"gm", "gm-wide", "gm-narrow"}:
        assert f".gm .{kind}{{" in CSS, kind


def test_both_layouts_have_every_point() -> None:
    """The narrow one has more lines of panels, and not a mark less."""
    chart = charts("forward-results")["rms_norm"]
    counts = []
    for narrow in (False, True):
        root = drawn.parsed(chart.svg(standalone=True, narrow=narrow))
        counts.append(
            {kind: len(drawn.marks(root, f"f-{kind}")) for kind in ("gristmill", "quack")}
        )
    assert counts[0] == counts[1]
    # 14 problems and an entry of the legend; ours is a line where problems are small.
    assert counts[0] == {"gristmill": 11, "quack": 15}


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    results = load(FILES["regret-quick-results"])
    first, second = write_charts(results, tmp_path / "a"), write_charts(results, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    names = [str(path.relative_to(tmp_path / "a")) for path in first]
    assert names[:2] == ["regret_rms_norm.svg", "narrow/regret_rms_norm.svg"]
    assert "matrix_rms_norm_4096.svg" in names
    assert len(set(names)) == len(names) == 14


def test_stems() -> None:
    row = {"op": "rms_norm", "M": 8, "N": 64, "impl": "gristmill", "us": 2.0, "error": 0.0}
    rows = [row | {"dtype": dtype} for dtype in ("bfloat16", "float16")]
    rows += [one | {"impl": "eager"} for one in rows]
    assert list(draw(Results({}, rows))) == ["headline", "rms_norm", "rms_norm_float16"]
    assert draw(Results({}, [])) == {}


def test_a_full_run_is_small_enough_to_be_inlined() -> None:
    inlined = [chart.svg(standalone=False) for chart in charts(MADE_UP).values()]
    assert len(inlined) > 30
    assert sum(len(text.encode()) for text in inlined) < 900_000


def test_every_chart_of_a_run_has_its_own_title() -> None:
    titles = [chart.title for chart in charts(MADE_UP).values()]
    assert all(one != other for one, other in combinations(titles, 2))


def test_a_roof_that_could_not_be_measured_is_a_gap() -> None:
    """Where its copy finds no memory, rows have times and no roof: of one problem, or of all."""
    results = full_run()
    for number, row in enumerate(results.rows):
        if number % 2 or row["op"] == "rms_norm":
            row.pop("roof_us", None)
            row.pop("roof_share", None)
    charts = {name: chart.svg(standalone=True) for name, chart in draw(results).items()}
    assert 'class="roof"' in charts["layer_norm"]
    assert len(charts["rms_norm"]) > 2000
    assert page(results)
