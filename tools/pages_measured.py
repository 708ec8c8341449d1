"""What the committed run says: the headline, tables and plots of ops, and where it is behind."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from pages_coverage import how_much, lost, measured_of
from pages_text import Page, joined
from pages_text import table as written

from gristmill.bench import runs
from gristmill.bench.charts import draw
from gristmill.bench.page import headline
from gristmill.bench.page.headline import Family
from gristmill.bench.problems import Problem, problems_of
from gristmill.bench.product_report import TIE
from gristmill.bench.results import OURS, Results, microseconds
from gristmill.bench.suites import KINDS, tasks

ROOT = Path(__file__).resolve().parents[1]
RUN = "benchmarks/results/h200-2026-11-16/all/results.json"
WORST = 20
# Charts that the page of results has in places of their own.
ELSEWHERE = ("headline", "end_to_end")


def load(files: Sequence[Path]) -> Results | None:
    """The runs given, as one; else the committed one, or None where there is none yet."""
    if not files:
        return runs.read([ROOT / RUN]) if (ROOT / RUN).exists() else None
    return runs.read(files)


def drawn(results: Results) -> dict[str, str]:
    """Every chart of the run as a file that stands alone, and its layout for a phone."""
    charts = draw(results)
    wide = {stem: chart.svg(standalone=True) for stem, chart in charts.items()}
    narrow = {
        f"narrow/{stem}": chart.svg(standalone=True, narrow=True) for stem, chart in charts.items()
    }
    return wide | narrow


def measured(page: Page, results: Results) -> str:
    """On the page of an op what was measured of it; elsewhere the headline."""
    if page.name.startswith("docs/ops/"):
        return _of_ops(page, results)
    return _headline(page, results)


def _headline(page: Page, results: Results) -> str:
    """A table that fits a screen, with losses in columns of their own, and lines beneath it."""
    meta, told = results.meta, headline(results)
    dtypes = joined(list(dict.fromkeys(one.dtype for one, _ in compared(results))))
    what = (
        f"One {meta['gpu']}, {meta['date']}, {dtypes}: {how_much(results)}. Times of each peer "
        "over ours, geometric means: above 1 gristmill is faster. Behind: where the fastest peer "
        "is faster by more than 3%. Worst: the lowest ratio to the fastest peer. Roof: what a copy "
        "of the same bytes takes, or the operations at the rate of torch's fastest product, over "
        "what ours takes, above 250 MB."
    )
    worst: dict[str, float] = {}
    for one, ratio in compared(results):
        for name in (one.suite, "all"):
            worst[name] = min(ratio, worst.get(name, ratio))
    # One that took part in a single suite has no column of its own.
    often = [name for name in told.peers if sum(name in one.peers for one in told.families) > 1]
    rows = [
        _family_row(family, measured_of(family.name, results), worst, often)
        for family in (*told.families, told.overall)
    ]
    head = ("", "problems", "best peer", "behind", "worst", *often, "others", "roof")
    behind = f"Behind, by [set of shapes]({page.link('docs/benchmarks.md')}#shapes)"
    facts = [(behind, lost(results) or "none"), *told.facts()]
    lines = "\n".join(f"- {name}: {text}" for name, text in facts)
    return f"{_wrapped(what)}\n\n{written(head, rows, right=range(1, len(head)))}\n\n{lines}"


def _family_row(
    family: Family, problems: str, worst: Mapping[str, float], often: Sequence[str]
) -> tuple[str, ...]:
    best = family.best
    if best is None:
        return (family.name, problems, *[""] * (len(often) + 5))
    ratios = {name: f"{one.ratio:.2f}x" for name, one in family.peers.items()}
    others = [f"{name} {text}" for name, text in ratios.items() if name not in often]
    return (
        family.name,
        problems,
        f"{best.ratio:.2f}x",
        str(best.behind),
        f"{worst[family.name]:.2f}x",
        *(ratios.get(name, "") for name in often),
        "" if family.name == "all" else ", ".join(others),
        "" if family.roof is None else f"{family.roof.mean:.0%}",
    )


def machine(page: Page, results: Results) -> str:
    """What the run was made with."""
    meta = results.meta
    facts = {
        "GPU": meta.get("gpu"),
        "driver": meta.get("driver"),
        "CUDA": meta.get("cuda"),
        "torch": meta.get("torch"),
        "Triton": meta.get("triton"),
        "Python": meta.get("python"),
        "gristmill": " ".join(filter(None, (meta.get("gristmill"), meta.get("revision")))),
        "peers": ", ".join(f"{name} {version}" for name, version in meta.get("peers", {}).items()),
        "not there": ", ".join(meta.get("missing_peers", {})),
        "date": meta.get("date"),
        "rows": f"{len(results.rows):,}",
        "file": f"[results.json]({page.link(RUN)})" if (ROOT / RUN).exists() else None,
    }
    return written(("", ""), [(name, str(value)) for name, value in facts.items() if value])


def plots(page: Page, results: Results) -> str:
    """Every chart that stands for all of a suite; a note that several share stands once."""
    parts: list[str] = []
    told = ""
    for stem, chart in draw(results).items():
        if stem in ELSEWHERE or stem.endswith(("_float16", "_float32")):
            continue
        parts += [f"### {chart.title}", _image(page, stem, chart.title)]
        if chart.note and chart.note != told:
            parts.append(_wrapped(chart.note))
        told = chart.note
    return "\n\n".join(parts)


def losses(page: Page, results: Results) -> str:
    """The problems on which a peer is faster by more than 3%, the worst first."""
    everything = compared(results)
    behind = _behind(everything)
    told = (
        f"On {len(behind)} of {len(everything)} problems the fastest peer is ahead by more than 3%"
    )
    if not behind:
        return told + "."
    shown = f"; these {WORST} are the worst, and the report has all" if len(behind) > WORST else ""
    rows = [
        (
            f"`{one.op}`",
            one.label,
            one.dtype,
            microseconds(one.row_of[OURS]["us"]),
            microseconds(one.best["us"]),
            str(one.best["impl"]),
            f"{ratio:.2f}x",
        )
        for one, ratio in behind[:WORST]
        if one.best is not None
    ]
    head = ("what", "problem", "dtype", "µs", "peer's µs", "peer", "of its speed")
    return f"{told}{shown}.\n\n{written(head, rows, right=(3, 4, 6))}"


def compared(results: Results) -> list[tuple[Problem, float]]:
    """Problems that gristmill and a peer were timed on, with the best peer's time over ours."""
    return [(one, one.ratio) for one in problems_of(results) if one.ratio is not None]


def _of_ops(page: Page, results: Results) -> str:
    """Plots, a line for each op that the suite of this page measures, and where it loses."""
    names = [name for name, kind in KINDS.items() if kind.suite == page.path.stem]
    found = [(one, ratio) for one, ratio in compared(results) if one.op in names]
    if not found:
        return "Nothing of this page was measured in the committed run."
    meta = results.meta
    parts = [
        f"One {meta['gpu']}, {meta['date']}, [all of it]({page.link('docs/results.md')}). "
        "Times of others over ours: above 1 gristmill is faster.",
        _summary(found),
    ]
    absent = [f"`{name}`" for name in names if all(one.op != name for one, _ in found)]
    if absent:
        parts.append(f"Of this page not in that run: {joined(absent)}.")
    behind = _behind(found)
    if behind:
        worst = [
            f"`{one.op}` {one.label} in {one.dtype}, {ratio:.2f}x ({one.best['impl']})"
            for one, ratio in behind[:5]
            if one.best is not None
        ]
        more = f"the worst of {len(behind)}: " if len(behind) > len(worst) else ""
        parts.append(_wrapped(f"More than 3% behind the fastest peer: {more}{joined(worst)}."))
    else:
        parts.append("On none of these problems is a peer faster by more than 3%.")
    titles = {stem: chart.title for stem, chart in draw(results).items()}
    parts += [_image(page, name, titles[name]) for name in names if name in titles]
    return "\n\n".join(parts)


def _behind(found: list[tuple[Problem, float]]) -> list[tuple[Problem, float]]:
    """The problems that are lost, the worst first."""
    return sorted((one for one in found if one[1] < TIE), key=lambda one: one[1])


def _summary(found: list[tuple[Problem, float]]) -> str:
    """A line for each op and dtype: means against each peer, and the share of the roof."""
    peers = list(dict.fromkeys(name for one, _ in found for name in one.peers))
    rows = []
    for op, dtype in dict.fromkeys((one.op, one.dtype) for one, _ in found):
        some = [(one, ratio) for one, ratio in found if (one.op, one.dtype) == (op, dtype)]
        whole = len(tasks("cuda", names=(op,))[0])
        count = str(whole) if len(some) >= whole else f"{len(some)} of {whole}"
        cells = [f"`{op}`", dtype, count, _mean([ratio for _, ratio in some])]
        for name in peers:
            met = [one for one, _ in some if name in one.peers]
            ratios = [one.peers[name]["us"] / one.row_of[OURS]["us"] for one in met]
            cells.append(_mean(ratios) if ratios else "")
        ours = [one.row_of[OURS] for one, _ in some]
        shares = [row["roof_share"] for row in ours if "roof_share" in row]
        rows.append((*cells, f"{statistics.median(shares):.0%}" if shares else ""))
    head = ("what", "dtype", "problems", "best peer", *peers, "of roof, median")
    return written(head, rows, right=range(2, len(head)))


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False))


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f}x"


def _image(page: Page, stem: str, title: str) -> str:
    return f"![{title}]({page.link(f'docs/plots/{stem}.svg')})"
