"""The site of the documents, opened from disk as whoever has run `make docs` opens it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser.driver import Tab

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=300,
    )
    return folder


@pytest.mark.parametrize("page", ["index.html", "ops/rms_norm.html"])
def test_the_search_finds_a_page_without_a_server(tab: Tab, site: Path, page: str) -> None:
    tab.emulate()
    tab.navigate((site / page).as_uri())
    tab.click(".md-search__input")
    tab.call("Input.insertText", text="forbid compiling")
    tab.call("Input.dispatchKeyEvent", type="keyUp", key="g")
    assert tab.wait_until(f"{FOUND}.length > 0", limit_s=30)
    assert any("/container.html" in address for address in tab.evaluate(FOUND))
    assert tab.complaints() == []
    assert not [address for address in tab.requests() if address.startswith("http")]
