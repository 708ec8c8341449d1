"""What mkdocs does not do by itself: pages from outside docs/, and the benchmark report.

Links are written as a code host follows them: `../CHANGELOG.md`, `../benchmarks/results/README.md`.
The site has the files that are linked so, and the links are rewritten to where they are on it.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/h200-2026-11-16/all/results.json"
REPORT = "report/index.html"
# Where this stands in a page the site has a link to the report, which a code host cannot show.
REPORT_MARK = "<!-- site: report -->"
# Files of the repository that have a name of their own on the site; others keep their path.
NAMED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\(|src=\")([^)\s\"#]+)")

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, what these link to in turn, and the report."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += [name for name in NAMED if name != "README.md"]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        file = ROOT / path
        if not file.is_file():
            log.warning("a page links to %s, which is no file of the repository", path)
            continue
        if files.get_file_from_path(place(path)) is None:
            files.append(added(config, path))
        if file.suffix == ".md":
            text = file.read_text(encoding="utf-8")
            waiting += [found for found in linked(text, path) if not found.startswith("docs/")]
    report = report_page()
    if report is not None:
        files.append(File.generated(config, REPORT, content=report))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/, or come from outside, to where the site has the file."""
    here = page.file.src_uri
    origin = next(
        (path for path, name in NAMED.items() if name == here and here != "index.md"), None
    )
    origin = origin or here.removeprefix("repository/")
    if origin == here:
        origin = f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        target = resolved(match[2], origin)
        if target is None or (target.startswith("docs/") and origin.startswith("docs/")):
            return match[0]
        return match[1] + posixpath.relpath(place(target), posixpath.dirname(here) or ".")

    has_report = files.get_file_from_path(REPORT) is not None
    link = f"[The full report, every problem and every peer]({REPORT})" if has_report else ""
    parts = FENCE.split(markdown.replace(REPORT_MARK, link))
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def added(config: MkDocsConfig, path: str) -> File:
    name = place(path)
    level = InclusionLevel.INCLUDED if path in NAMED else InclusionLevel.NOT_IN_NAV
    return File.generated(config, name, abs_src_path=str(ROOT / path), inclusion=level)


def place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return NAMED.get(path, f"repository/{path}")


def linked(text: str, origin: str) -> list[str]:
    """The files of the repository that a page links to."""
    targets = (match[2] for match in LINK.finditer(FENCE.sub("", text)))
    return [path for path in (resolved(target, origin) for target in targets) if path is not None]


def resolved(target: str, origin: str) -> str | None:
    """The path from the root that a link of the page `origin` means; None for an address."""
    if re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def report_page() -> str | None:
    """The report on the committed run; None where there is none. One that is there must do."""
    if not RESULTS.exists():
        return None
    sys.path.insert(0, str(ROOT / "src"))
    from gristmill.bench.page import write_page
    from gristmill.bench.results import load

    results = load(RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        return write_page(results, Path(folder)).read_text(encoding="utf-8")
