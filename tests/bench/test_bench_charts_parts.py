"""What charts are made of: widths of text, scales, themes, markers, and text as XML has it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from bench import drawn

from gristmill.bench.charts import DARK, LIGHT
from gristmill.bench.charts.canvas import Canvas, outlined
from gristmill.bench.charts.chart import NARROW, WIDE, Chart, Entry, legend
from gristmill.bench.charts.plot import section
from gristmill.bench.charts.scales import Linear, Log
from gristmill.bench.charts.text import apart, shortened, width, wrapped
from gristmill.bench.charts.theme import HEATS, KNOWN, VARIANT_TINTS, Style, Styles
from gristmill.bench.peers import PEERS
from gristmill.bench.results import OURS
from gristmill.bench.suites import KINDS

# Text


def test_widths_are_those_of_the_font() -> None:
    # Ten digits of 0.556 em each, and three parts in a hundred for wider fonts.
    assert width("0123456789", 10) == pytest.approx(55.6 * 1.03)
    assert width("iii", 10) < width("mmm", 10)
    assert width("4096", 10, bold=True) > width("4096", 10)
    assert width("漢", 10) >= 10  # what is not in the table is as wide as the widest


def test_text_is_cut_to_the_room_there_is() -> None:
    assert shortened("rms_norm", 11, 200) == "rms_norm"
    cut = shortened("a name that is far too long", 11, 60)
    assert cut.endswith("…")
    assert width(cut, 11) <= 60
    lines = wrapped("one two three four five", 11, 60)
    assert " ".join(lines) == "one two three four five"
    assert len(lines) == 3
    assert all(width(line, 11) <= 60 for line in lines)


def test_labels_that_would_touch_are_left_out() -> None:
    texts = [str(2**power) for power in range(13)]
    places = [20.0 * index for index in range(13)]
    shown = apart(places, texts, 11, 4)
    assert shown[0] == 0
    assert shown[-1] == 12
    ends = [
        (places[i] - width(texts[i], 11) / 2, places[i] + width(texts[i], 11) / 2) for i in shown
    ]
    assert all(right + 4 <= left for (_, right), (left, _) in pairwise(ends))
    assert len(shown) < 13
    assert apart([100.0 * index for index in range(13)], texts, 11, 4) == list(range(13))
    assert apart([5.0], ["4096"], 11, 4) == [0]
    assert apart([], [], 11, 4) == []


# Scales


def test_numbers_have_their_places() -> None:
    linear = Linear(0.0, 4.0, 200.0, 100.0)
    assert [linear(value) for value in (0.0, 1.0, 4.0)] == [200.0, 175.0, 100.0]
    log = Log(0.5, 8.0, 0.0, 400.0)
    assert [log(value) for value in (0.5, 1.0, 2.0, 8.0)] == pytest.approx([0, 100, 200, 400])


@pytest.mark.parametrize(
    ("scale", "most", "ticks"),
    [
        (Linear(0.0, 4.5, 0, 1), 6, [0, 1, 2, 3, 4]),
        (Linear(0.0, 0.125, 0, 1), 5, [0, 0.05, 0.1]),
        (Linear(0.0, 1.0, 0, 1), 6, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Log(0.75, 5.4, 0, 1), 7, [1, 1.5, 2, 3, 5]),
        (Log(0.4, 130.0, 0, 1), 7, [1, 3, 10, 30, 100]),
        (Log(0.7, 1.6, 0, 1), 7, [0.7, 0.8, 0.9, 1, 1.25, 1.5]),
    ],
)
def test_ticks_are_round_and_few(scale: Linear | Log, most: int, ticks: list[float]) -> None:
    assert scale.ticks(most) == pytest.approx(ticks)


# Themes


def luminance(colour: str) -> float:
    """Relative luminance, as the guidelines for accessible pages define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_everything_stands_out_from_its_paper(theme: dict[str, str]) -> None:
    paper = theme["--gm-paper"]
    marks = [name for name in theme if name.startswith(("--gm-c-", "--gm-p"))]
    for name in [name for name in marks if name != "--gm-paper"]:
        assert contrast(theme[name], paper) >= 3, name
        # Also where another is faster, and that is tinted.
        assert contrast(theme[name], theme["--gm-loss"]) >= 3, name
    for name in ("--gm-ink", "--gm-muted", "--gm-bad"):
        for ground in ("--gm-paper", "--gm-zone", "--gm-loss"):
            assert contrast(theme[name], theme[ground]) >= 4.5, (name, ground)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_on_tints_can_be_read(theme: dict[str, str]) -> None:
    for index in range(VARIANT_TINTS):
        assert contrast(theme["--gm-ink"], theme[f"--gm-v{index}"]) >= 4.5
    for index in range(HEATS):
        ink = theme["--gm-on-dark" if index >= HEATS - 2 else "--gm-ink"]
        assert contrast(ink, theme[f"--gm-h{index}"]) >= 4.5, index
    # Ever further from the paper: the order of heats is seen without their colours.
    shades = [luminance(theme[f"--gm-h{index}"]) for index in range(HEATS)]
    assert shades == sorted(shades, reverse=theme is LIGHT)


def test_both_themes_name_the_same_colours() -> None:
    assert set(LIGHT) == set(DARK)
    for name in ("ink", "muted", "faint", "paper", "c-gristmill", "c-quack_two_pass"):
        assert f"--gm-{name}" in LIGHT


# Markers


def test_nobody_is_told_by_colour_alone() -> None:
    """Whoever stands in one chart has a marker or a dash that no other there has."""
    styles = Styles()
    for task in KINDS:
        names = [OURS, *(name for peer in PEERS.values() for name in peer.implementations(task))]
        for one, other in combinations(names, 2):
            first, second = styles[one], styles[other]
            assert (first.marker, first.dash) != (second.marker, second.dash), (task, one, other)
    for peer in PEERS:
        assert peer in KNOWN


def test_ours_has_a_marker_of_its_own() -> None:
    styles = Styles()
    assert [name for name in KNOWN if styles[name].marker == styles[OURS].marker] == [OURS]


def test_names_that_are_not_known_have_styles_too() -> None:
    styles = Styles(["zeta", "eager", "alpha"])
    assert styles["alpha"] != styles["zeta"]
    assert styles["eager"] == Styles()["eager"]
    # The same in every chart, in whatever order the names came.
    assert Styles(["alpha", "zeta"])["zeta"] == styles["zeta"]
    for name in ("alpha", "zeta", "<&> odd"):
        assert f"--gm-c-{styles[name].colour}" in LIGHT


def test_an_outline_is_closed_and_about_its_size() -> None:
    assert outlined("square", 5.0) == "m-4.4-4.4l8.8 0 0 8.8-8.8 0z"
    assert outlined("circle", 5.0) == "m0-5a5 5 0 1 1-.1 0z"
    assert outlined("plus", 4.0) == "m-4 0l8 0m-4-4l0 8"


# The canvas


def made(canvas: Canvas) -> str:
    canvas.height = 100
    return canvas.svg(kind="gm-wide", title="t", note="n", standalone=True)


def test_text_is_escaped_and_what_xml_cannot_hold_is_left_out() -> None:
    canvas = Canvas(200)
    nasty = '</text><script>alert("1")</script>&\x1b[31m\x00\ud800'
    canvas.text(1, 20, nasty, title=nasty)
    canvas.marker((5, 5), Style("eager", "square", ""), title=nasty)
    root = drawn.parsed(made(canvas))
    assert [text.text for text in drawn.texts(root)] == ['</text><script>alert("1")</script>&[31m']
    assert not any(node.tag.endswith("script") for node in root.iter())


def test_what_neighbours_share_is_written_once() -> None:
    canvas = Canvas(200)
    for x in (10, 50, 90):
        canvas.text(x, 20, str(x), anchor="middle", kind="mu")
    canvas.text(130, 20, "b", kind="b")
    text = made(canvas)
    assert text.count('class="mu"') == 1
    found = drawn.texts(drawn.parsed(text))
    assert [(one.text, one.kinds) for one in found] == [
        *((name, ("mu",)) for name in ("10", "50", "90")),
        ("b", ("b",)),
    ]
    assert [one.middle for one in found[:3]] == pytest.approx([10, 50, 90])


@pytest.mark.parametrize("tips", [True, False])
def test_marks_are_where_they_were_put(tips: bool) -> None:
    canvas = Canvas(200, tips=tips)
    places = [(10.0, 20.0), (30.0, 40.0), (50.0, 60.0)]
    for place in places:
        canvas.marker(place, Style("quack", "diamond", ""), title=f"at {place}")
    found = drawn.marks(drawn.parsed(made(canvas)), "f-quack")
    assert [(x, y) for x, y, _ in found] == places
    assert [tip for _, _, tip in found] == [f"at {place}" if tips else "" for place in places]


def test_a_legend_takes_as_many_lines_as_it_needs() -> None:
    entries = [Entry(f"implementation_{index}", Styles()["eager"]) for index in range(9)]
    for across, lines in ((WIDE, 2), (NARROW, 4)):
        canvas = Canvas(across)
        bottom = legend(canvas, 10, entries)
        canvas.height = bottom
        root = drawn.parsed(canvas.svg(kind="", title="", note="", standalone=True))
        found = drawn.texts(root)
        assert len({text.top for text in found}) >= lines
        assert max(text.right for text in found) <= across
        assert max(text.bottom for text in found) <= bottom


def test_a_title_that_is_too_long_goes_on_in_the_next_line() -> None:
    chart = Chart("word " * 30, "note", "made", lambda canvas, top: top + 10)
    for narrow, lines in ((False, 2), (True, 5)):
        root = drawn.parsed(chart.svg(standalone=True, narrow=narrow))
        title = [text for text in drawn.texts(root) if "b" in text.kinds]
        assert len(title) == lines
        assert " ".join(text.text for text in title).split() == ["word"] * 30
        assert max(in_dejavu(text) for text in title) <= drawn.size(root)[0]


@pytest.mark.parametrize("across", [NARROW, WIDE])
def test_how_to_read_panels_fits_in_a_wider_font(across: float) -> None:
    how = "higher is better; tinted: a peer is faster by more than 3%; beneath: best peer / ours"
    canvas = Canvas(across)
    canvas.height = section(canvas, 0, "TB/s", how)
    found = drawn.texts(drawn.parsed(canvas.svg(kind="", title="", note="", standalone=True)))
    assert " ".join(text.text for text in found) == f"TB/s {how}"
    assert max(in_dejavu(text) for text in found) <= across


def in_dejavu(text: drawn.Text) -> float:
    """Where a text ends in DejaVu Sans, whose letters are 1.21 times as wide as Arial's in bold."""
    return text.left + 1.21 / 1.03 * (text.right - text.left)
