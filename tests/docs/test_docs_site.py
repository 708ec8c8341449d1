"""The site as `make docs` builds it: strictly, and asking nobody else for anything."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200-2026-11-16" / "all" / "results.json"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="needs mkdocs-material: the extra docs"
)

# What a reader would type into the search, and the page that must have all of these words.
QUESTIONS = {
    "install CUDA 12": "start.html",
    "which kernel runs": "choosing.html",
    "first call slow": "cache.html",
    "forbid compiling": "container.html",
    "deterministic": "batch_invariance.html",
    "FSDP2": "dtensor.html",
    "torch 2.11": "support.html",
    "GPUs": "support.html",
    "how measured": "benchmarks.html",
    "add kernel": "writing-a-kernel.html",
    "read-only file system": "container.html",
    "batch invariant vLLM": "vllm.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_asked_of_others(site: Path) -> None:
    """No page or style of the site loads anything from another host; links may lead there."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
        r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*href=[\"']?(?:https?:)?//"
        r"|@import\s+[\"'](?:https?:)?//|url\([\"']?(?:https?:)?//"
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(files) > 30
    for path in files:
        found = loads.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(site)}: {found and found[0]}"


def test_both_themes_follow_the_system(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'data-md-color-media="([^"]*)"', text)[-3:] == [
        "(prefers-color-scheme)",
        "(prefers-color-scheme: light)",
        "(prefers-color-scheme: dark)",
    ]


def test_what_lies_outside_of_docs_is_on_the_site(site: Path) -> None:
    assert "Keep a Changelog" in (site / "changelog.html").read_text(encoding="utf-8")
    contributing = (site / "contributing.html").read_text(encoding="utf-8")
    assert 'href="design.html"' in contributing
    assert 'href="changelog.html"' in contributing
    results = (site / "results.html").read_text(encoding="utf-8")
    assert 'href="repository/benchmarks/results/index.html"' in results
    runs = (site / "repository" / "benchmarks" / "results" / "index.html").read_text("utf-8")
    assert 'href="../../../results.html"' in runs


def test_the_report_is_there(site: Path) -> None:
    if not RESULTS.exists():
        pytest.skip("no full run is committed yet")
    assert (site / "report" / "index.html").read_text(encoding="utf-8").count("<svg") > 5
    assert 'href="report/index.html"' in (site / "results.html").read_text(encoding="utf-8")


def test_lists_and_tables_are_rendered(site: Path) -> None:
    """Code hosts take Markdown that Python's does not: a list right after a paragraph, say."""
    for path in site.rglob("*.html"):
        if "repository" in path.parts or "report" in path.parts:
            continue
        body = re.sub(
            r"<(pre|code|script|style)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S
        )
        for paragraph in re.findall(r"<p>(.*?)</p>", body, re.S):
            raw = re.search(r"^(?:- |\* |1\. |\|.*\|$|#+ )", paragraph, re.M)
            assert raw is None, f"{path.name}: {paragraph[:200]}"


@pytest.mark.parametrize(("question", "page"), QUESTIONS.items())
def test_a_question_finds_its_page(site: Path, question: str, page: str) -> None:
    """Every word is on the page, as the index of the search has it."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    sections = [one for one in index["docs"] if one["location"].partition("#")[0] == page]
    assert sections, page
    text = " ".join(
        re.sub(r"<[^>]+>", " ", one["title"] + " " + one["text"]) for one in sections
    ).lower()
    for word in question.lower().split():
        assert word in text, f"{page} does not have {word!r}"
