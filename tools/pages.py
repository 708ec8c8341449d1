"""Write again what documents derive from the code and from the committed benchmark run.

    PYTHONPATH=src python tools/pages.py            # settings, support, variants, figures, plots
    PYTHONPATH=src python tools/pages.py --check    # say what is out of step, and exit with 1

Derived text stands between two comments of a page, `<!-- settings: begin -->` and `<!-- settings:
end -->`; plots are files of docs/plots. Each part is a function from what is known to text: see
PARTS. `--results FILE` takes other runs than the committed one, to try things.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pages_coverage
import pages_measured
import pages_settings
import pages_support
from pages_text import Page, filled

from gristmill.bench.results import Results

ROOT = Path(__file__).resolve().parents[1]
PLOTS = "docs/plots"

# The name of a block -> what stands in it, on that page.
PARTS: dict[str, Callable[[Page], str]] = {
    "settings": pages_settings.table,
    "variants": pages_support.variants,
    "gpus": pages_support.gpus,
    "kernels": pages_support.kernels,
    "versions": pages_support.versions,
}
# The same of what was measured.
MEASURED: dict[str, Callable[..., str]] = {
    "measured": pages_measured.measured,
    "machine": pages_measured.machine,
    "plots": pages_measured.plots,
    "losses": pages_measured.losses,
    "coverage": pages_coverage.coverage,
    "sets": pages_coverage.by_set,
    "blocks": pages_coverage.blocks,
}
# Blocks that are filled from runs of their own, by hand.
BY_HAND = ("cutedsl",)


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    options = _options(words)
    files, missing = derived(pages_measured.load(options.results), root)
    plotted = any(path.suffix == ".svg" for path in files)
    stale = [path for path, text in files.items() if not path.exists() or _read(path) != text]
    left = [path for path in (root / PLOTS).glob("**/*.svg") if plotted and path not in files]
    for path in stale + left:
        sys.stdout.write(f"{path.relative_to(root)}\n")
    for name in missing:
        sys.stdout.write(f"a page shows plots/{name}.svg, and the run has no such plot\n")
    if options.check:
        if stale or left:
            sys.stdout.write("out of step: run `make pages`\n")
        return int(bool(stale or left or missing))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    for path in left:
        path.unlink()
    return int(bool(missing))


def derived(results: Results | None, root: Path) -> tuple[dict[Path, str], list[str]]:
    """Every file that holds something derived, as it should be; and plots that cannot be drawn.

    Without a run what was measured stays as it is. Only plots that a page shows are files.
    """
    parts = dict(PARTS)
    for name, make in MEASURED.items():
        if results is not None:
            parts[name] = partial(make, results=results)
    files: dict[Path, str] = {}
    shown: set[str] = set()
    for path in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md")]):
        made = filled(_read(path), Page(path, root), parts, known={*PARTS, *MEASURED, *BY_HAND})
        shown |= set(re.findall(r"plots/((?:narrow/)?\w+)\.svg", made or _read(path)))
        if made is not None:
            files[path] = made
    plots = {} if results is None else pages_measured.drawn(results)
    files |= {root / PLOTS / f"{name}.svg": plots[name] for name in sorted(shown & set(plots))}
    return files, sorted(shown - set(plots)) if results is not None else []


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if out of step"
    )
    parser.add_argument("--results", action="append", type=Path, default=[], metavar="FILE")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
