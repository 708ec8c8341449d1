"""Text to HTML: everything is escaped unless it is HTML already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from gristmill.bench.product_report import Grid

_VOID = {"meta", "br", "hr", "link"}
# Colours of a terminal, which compilers put into their messages, and what HTML must not hold.
_UNSEEN = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f]")
# Columns of words in the tables of other reports; those of numbers are flush on the right.
_WORDS = {
    *("variant", "cache", "problem", "worst problem", "source", "picked", "best", "what"),
    *("variants of gristmill's", "held", "call", "op", "start", "what runs", "choice", "command"),
    *("why", "could run, µs", "could not"),
    *("implementation", "peer", "reason"),
}


class Html(str):
    """Text that needs no escaping."""

    __slots__ = ()


def escaped(value: object) -> Html:
    if isinstance(value, Html):
        return value
    return Html(html.escape(_UNSEEN.sub("", str(value)), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(escaped(part) for part in parts))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element: `class_` and `aria_label` are written class and aria-label; None leaves out."""
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{told}>")
    return Html(f"<{name}{told}>{join(children)}</{name}>")


def cell(content: object, class_: str = "", *, name: str = "td", span: int = 1) -> Html:
    """A cell of a table; its end tag is left out, as HTML lets it, for pages of many thousand."""
    quoted = f'"{class_}"' if " " in class_ else class_
    told = (f" class={quoted}" if class_ else "") + (f" colspan={span}" if span > 1 else "")
    return Html(f"<{name}{told}>{escaped(content)}")


def row(cells: Iterable[Html], class_: str = "") -> Html:
    return Html(f"<tr{f' class={class_}' if class_ else ''}>{join(cells)}")


def table(
    caption: object,
    header: Sequence[object],
    lines: Iterable[str],
    *,
    class_: str = "",
    words: Iterable[int] = (0,),
    label: str | None = None,
    shown: bool = True,
) -> Html:
    """A table beneath its caption, in a box that scrolls by itself; `lines` are rows of HTML.

    `words`: the columns that are flush on the left. `label`: names the table to those who do not
    see it, where the caption is more than plain text. `shown`: whether the caption is seen.
    """
    left = set(words)
    heads = join(
        Html(f"<th scope=col{' class=l' if index in left else ''}>{escaped(name)}")
        for index, name in enumerate(header)
    )
    head = Html(f"<thead><tr>{heads}</thead>")
    body = Html("<tbody>\n" + "\n".join(lines) + "\n</tbody>")
    name = label or caption
    inner = element("table", head, body, class_=class_ or None, aria_label=name)
    # In reach of the Tab key, so that it can be scrolled without a mouse. The caption is not in the
    # table: there it would be as wide as that, and scroll out of sight.
    box = element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=name)
    told = element("figcaption", caption) if shown else ""
    return element("figure", told, box, class_="table")


def grid_table(caption: str, grid: Grid, class_: str = "") -> Html:
    """A table of another report: its first column heads the rows."""
    header, body = grid
    left = {index for index, name in enumerate(header) if index == 0 or name in _WORDS}
    lines = [
        row(
            cell(
                text,
                "l" if index in left and index else "",
                name="th scope=row" if index == 0 else "td",
            )
            for index, text in enumerate(line)
        )
        for line in body
    ]
    return table(caption, header, lines, class_=class_, words=left)


def command(line: str) -> Html:
    """A command with what a script hangs a copy button on."""
    return element("code", line, class_="cmd") if line else Html("")
