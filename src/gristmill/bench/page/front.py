"""The headline as HTML: a card for each number, and the table of every peer."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.bench.page.headline import (
    NOT_MEASURED,
    ROOF_BYTES,
    Against,
    Family,
    Headline,
    Start,
    times,
)
from gristmill.bench.page.html import Html, cell, element, join, row, table

_MEGABYTES = ROOF_BYTES // 10**6


def cards(told: Headline, device: str) -> Html:
    """One for each number of the headline, measured or not."""
    return element(
        "ul",
        _best(told.overall.best),
        _roof(told.overall, device),
        _regret(told),
        _start("Cold start", "empty cache", told.started("empty")),
        _start("Warm start", "warm cache", told.started("warm")),
        _host(told),
        class_="cards",
    )


def _card(name: str, value: str | None, *lines: str) -> Html:
    number = element("strong", value or NOT_MEASURED, class_=None if value else "none")
    return element("li", element("h3", name), number, *(element("span", line) for line in lines))


def _best(best: Against | None) -> Html:
    if best is None:
        return _card("Against the best peer", None)
    return _card(
        "Against the best peer",
        times(best.ratio),
        f"geometric mean over {best.problems} problems",
        f"behind by more than 3% on {best.behind}",
    )


def _roof(family: Family, device: str) -> Html:
    name = "Share of the roof"
    if device == "cpu":
        return _card(name, None, "a CPU's copy is no roof")
    if family.roof is None:
        return _card(name, None)
    roof = family.roof
    return _card(
        name,
        f"{roof.mean:.0%}",
        f"mean of {roof.problems} problems that move more than {_MEGABYTES} MB",
        f"least {roof.least:.0%}",
    )


def _regret(told: Headline) -> Html:
    if told.regret is None:
        return _card("Regret of choices", None)
    one = told.regret
    return _card(
        "Regret of choices",
        f"{one.mean:.1%}",
        f"mean of {one.problems} problems; 95th percentile {one.p95:.1%}",
        f"worst {one.worst:.1%}: {one.worst_at}",
    )


def _start(name: str, cache: str, starts: Sequence[Start]) -> Html:
    if not starts:
        return _card(name, None)
    longest = max(starts, key=lambda start: start.seconds)
    others = [one for one in starts if one is not longest]
    lines = [f"{longest.name}, {cache}, beyond torch's own"]
    if others and longest.goal is not None:  # of whole models all are told
        lines.append(", ".join(f"{one.name} {one.seconds:.2f} s" for one in others))
    elif others:
        lines.append(f"the longest of {len(starts)}")
    if longest.goal is not None:
        lines.append(f"goal {longest.goal:g} s")
    return _card(name, f"{longest.seconds:.2f} s", *lines)


def _host(told: Headline) -> Html:
    if told.host is None:
        return _card("Host cost", None)
    mean = told.host.mean
    modes = (f"{mode} {times(1 / one.ratio)}" for mode, one in told.host.by_mode.items())
    return _card(
        "Host cost",
        times(1 / mean.ratio),
        f"of torch's own eager call, geometric mean over {mean.problems}; lower is better",
        ", ".join(modes),
    )


def front_table(told: Headline) -> Html:
    """A line for each family of ops, a column for each peer."""
    header = ["ops", "of roof", "best peer", *told.peers]
    lines = [_line(family, told.peers) for family in told.families]
    lines.append(_line(told.overall, told.peers, "all"))
    caption = join(
        [
            element("b", "Times of others over ours. "),
            "Geometric means: above 1 gristmill is faster. Beneath each, the number of problems, "
            "and of those on which gristmill is behind by more than 3%. Of the roof: mean share "
            f"over problems that move more than {_MEGABYTES} MB.",
        ]
    )
    return table(caption, header, lines, class_="front", label="Headline")


def _line(family: Family, peers: Sequence[str], class_: str = "") -> Html:
    head = cell(family.name, name="th scope=row")
    if family.best is None and not family.peers:
        told = "no peer was timed" if family.roof is not None else NOT_MEASURED
        cells = [cell(told, "l none", span=len(peers) + 1)]
    else:
        cells = [_cell(one) for one in (family.best, *(family.peers.get(peer) for peer in peers))]
    roof = family.roof
    share = cell("–", "none") if roof is None else _two(f"{roof.mean:.0%}", str(roof.problems), "")
    return row([head, share, *cells], class_)


def _cell(one: Against | None) -> Html:
    if one is None:
        return cell("–", "none")
    return _two(times(one.ratio), str(one.problems), f"{one.behind} behind" if one.behind else "")


def _two(number: str, count: str, behind: str) -> Html:
    small = join([count, element("i", behind)] if behind else [count], " · ")
    return cell(join([element("b", number), element("small", small)]))
