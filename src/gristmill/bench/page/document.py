"""The page as a whole: head, headline, then a section for each kind of measurement."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping, Sequence

from gristmill.bench import charts
from gristmill.bench.charts.text import FONT
from gristmill.bench.page import sections
from gristmill.bench.page.facts import facts, gpu_of, methods, runs
from gristmill.bench.page.front import cards, front_table
from gristmill.bench.page.headline import headline
from gristmill.bench.page.heatmap import heat_maps
from gristmill.bench.page.html import Html, element, join
from gristmill.bench.page.ops import losses_table, op_parts, stem_of
from gristmill.bench.problems import by_op, problems_of
from gristmill.bench.report import CPU_NOTE, cut_short
from gristmill.bench.results import Results

SUMMARY = (
    "What gristmill's kernels take, beside the best that other libraries offer on the same machine "
    "in the same run: wins, ties and losses alike, and the command that repeats each number."
)


def page(results: Results) -> str:
    """The whole document."""
    parts = _sections(results)
    title = f"gristmill on {gpu_of(results)}"
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title}, {results.meta.get('date', '')}"),
        element("style", Html(_style())),
        # Before anything is drawn, so that a remembered theme does not flash in.
        element("script", Html(_file("theme.js"))),
    ]
    body = [
        element("a", "To the numbers", href="#headline", class_="skip"),
        element("header", _banner(results, title), class_="top"),
        element("nav", _contents(parts, results), aria_label="Contents"),
        element("main", *(_section(*part) for part in parts)),
        element("footer", element("p", "Written by gristmill bench; nothing here is loaded.")),
        element("script", Html(_file("script.js"))),
    ]
    inner = join([element("head", *head), element("body", *body)], "\n")
    return f"<!doctype html>\n{element('html', inner, lang='en')}\n"


def _sections(results: Results) -> list[tuple[str, str, Html]]:
    """(anchor, title, content) of each part, in order."""
    problems = problems_of(results)
    told = headline(results)
    drawn = {stem: _figure(chart) for stem, chart in charts.draw(results).items()}
    device = str(results.meta.get("device") or "")
    op_stems = [stem_of(*key) for key in by_op(problems)]
    known = {*op_stems, *_OTHERS}
    rest = [
        chart
        for stem, chart in drawn.items()
        if stem not in known and not stem.startswith(("regret_", "matrix_"))
    ]
    first = [drawn["headline"]] if "headline" in drawn else []
    found = [
        ("headline", "Headline", join([cards(told, device), front_table(told), *first], "\n")),
        ("losses", "Losses", losses_table(problems)),
        ("heat", "Every ratio to the best peer", heat_maps(problems)),
        ("ops", "Op by op", join([*op_parts(problems, drawn, device), *rest], "\n")),
        ("models", "End to end", sections.end_to_end(results, drawn)),
        ("regret", "Regret", sections.regret(results, drawn)),
        ("starts", "Cold and warm start", sections.starts(results, drawn)),
        ("host", "Host cost", sections.host(results, drawn)),
        ("choice", "What choosing costs", sections.choice(results)),
        ("method", "Method and runs", join([methods(results), runs(results)], "\n")),
        ("notes", "Notes and failures", sections.failures(results)),
    ]
    if (chosen := sections.reasons(results)) is not None:
        found.insert(1, ("choices", "What is chosen, and why", chosen))
    return found


_OTHERS = ("headline", "end_to_end", "vllm", "transformers", "cold_start", "host_cost")


def _figure(chart: charts.Chart) -> Html:
    caption = element("figcaption", element("b", f"{chart.title}. "), chart.note)
    return element("figure", Html(chart.svg(standalone=False)), caption)


def _banner(results: Results, title: str) -> Html:
    meta = results.meta
    parts: list[object] = [
        element("button", "Dark", type="button", id="theme", hidden=True),
        element("h1", title),
        element("p", SUMMARY, class_="lead"),
        facts(results),
    ]
    if meta.get("device") == "cpu":
        parts.append(element("p", element("strong", CPU_NOTE), class_="loud", role="note"))
    if cut := cut_short(results):
        parts.append(element("p", element("strong", cut), class_="loud", role="note"))
    return join(parts, "\n")


def _contents(parts: Sequence[tuple[str, str, Html]], results: Results) -> Html:
    items = []
    for anchor, title, _ in parts:
        inner: list[object] = [element("a", title, href=f"#{anchor}")]
        if anchor == "ops":
            stems = [stem_of(*key) for key in by_op(problems_of(results))]
            links = (element("li", element("a", stem, href=f"#op-{stem}")) for stem in stems)
            inner.append(element("ul", *links))
        items.append(element("li", *inner))
    return element("ul", *items)


def _section(anchor: str, title: str, content: Html) -> Html:
    return element("section", element("h2", title, id=anchor), "\n", content, "\n")


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")


@functools.cache
def _style() -> str:
    """The rules, and the colours of both themes: those of the charts are those of the page."""
    light, dark = _properties(charts.LIGHT), _properties(charts.DARK)
    themes = (
        f":root{{{light};--sans:{FONT}}}\n"
        # Of screens alone: what is printed is dark on white.
        "@media screen and (prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}\n"
    )
    return themes + charts.CSS + _file("style.css")


def _properties(colours: Mapping[str, str]) -> str:
    return ";".join(f"{name}:{value}" for name, value in colours.items())
