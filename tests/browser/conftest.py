"""A browser for the tests of a module, and a tab of it for each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from browser.driver import Browser, Tab, find_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        reason = "no Chromium is here: tools/browser installs one where it can"
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with Browser(path, tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as opened:
        yield opened
