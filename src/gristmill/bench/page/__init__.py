"""The report: one HTML page that holds everything, from the headline to the last row.

No network, no script that it could not do without; see `docs/benchmarks.md`.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.bench.page.document import page
from gristmill.bench.page.headline import Headline, headline
from gristmill.bench.results import Results

__all__ = ["Headline", "headline", "page", "write_page"]


def write_page(results: Results, folder: Path) -> Path:
    """Write `folder`/index.html; the same results give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(page(results), encoding="utf-8")
    return path
