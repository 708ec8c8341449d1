"""Blocks of a page that are written by a tool, and tables in Markdown."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# `<!-- variants: rms_norm -->` has a subject in the place of "begin".
BLOCK = re.compile(
    r"^<!-- (?P<name>[a-z]+): (?P<subject>[\w ]+) -->\n(?P<body>.*?)^<!-- (?P=name): end -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Page:
    """The page that a block is on, and what the block is about, as its marker says."""

    path: Path
    root: Path
    subject: str = "begin"

    @property
    def name(self) -> str:
        """From the root, as `docs/ops/rms_norm.md`."""
        return self.path.relative_to(self.root).as_posix()

    def link(self, target: str) -> str:
        """A link from this page to a file of the repository."""
        return posixpath.relpath(target, posixpath.dirname(self.name) or ".")


def filled(
    text: str, page: Page, parts: Mapping[str, Callable[[Page], str]], known: Iterable[str]
) -> str | None:
    """`text` with its blocks as `parts` has them; None where it has no block."""
    names = set(known)

    def made(match: re.Match[str]) -> str:
        name, subject = match["name"], match["subject"]
        if name not in names:
            raise ValueError(f"{page.name}: no part {name!r}; there are {', '.join(sorted(names))}")
        if name not in parts:
            return match[0]
        body = parts[name](Page(page.path, page.root, subject)).strip("\n")
        return f"<!-- {name}: {subject} -->\n{body}\n<!-- {name}: end -->"

    return BLOCK.sub(made, text) if BLOCK.search(text) else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table in Markdown; columns named in `right` are flush on the right."""
    flush = set(right)
    rule = ["--:" if at in flush else "---" for at in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cell for cell in line) + " |" for line in lines)


def joined(words: Sequence[str], last: str = "and") -> str:
    """a; a and b; a, b and c."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
