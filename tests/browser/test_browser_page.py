"""The report in a real browser: both themes, three widths, with scripts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.committed import committed
from browser.checks import faint, overflows, overlaps
from browser.driver import Browser, Tab
from browser.png import Pixel, pixels

from gristmill.bench.page import write_page

pytestmark = pytest.mark.browser
WIDTHS = (360, 768, 1280)
SCHEMES = ("light", "dark")
REFUSED = """
Object.defineProperty(window, "localStorage", { get() { throw new Error("refused"); } });
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(committed(), tmp_path_factory.mktemp("report")).as_uri()


def seen(tab: Tab, path: Path) -> list[Pixel]:
    """The colours of what is in view, at an eighth of its size."""
    return [pixel for row in pixels(tab.screenshot(path, scale=0.125)) for pixel in row]


def brightness(some: list[Pixel]) -> float:
    return sum(map(sum, some)) / len(some) / 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wrong_with_how_it_looks(
    tab: Tab, page: str, width: int, scheme: str, tmp_path: Path
) -> None:
    tab.emulate(width=width, scheme=scheme)
    tab.navigate(page)
    colours = seen(tab, tmp_path / f"top-{width}-{scheme}.png")
    assert len(set(colours)) > 50, "the screenshot is blank"
    assert (brightness(colours) > 200) == (scheme == "light")
    assert (brightness(colours) < 60) == (scheme == "dark")
    assert overlaps(tab, ".cards li, .front td, .front th") == []
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert overflows(tab) == []
    assert faint(tab) == []
    tab.screenshot(tmp_path / f"whole-{width}-{scheme}.png")
    assert tab.complaints() == []
    assert tab.requests() == [page], "something was loaded"


def test_the_toggle_changes_the_theme_and_is_remembered(
    tab: Tab, page: str, tmp_path: Path
) -> None:
    tab.emulate(scheme="light")
    tab.navigate(page)
    before = seen(tab, tmp_path / "before.png")
    assert tab.evaluate("document.getElementById('theme').textContent") == "Dark"
    tab.click("#theme")
    after = seen(tab, tmp_path / "after.png")
    assert brightness(before) > 200
    assert brightness(after) < 60
    assert faint(tab) == []
    tab.navigate(page)
    assert brightness(seen(tab, tmp_path / "again.png")) < 60, "it was forgotten"
    tab.click("#theme")
    assert brightness(seen(tab, tmp_path / "back.png")) > 200
    tab.evaluate("localStorage.clear()")
    assert tab.complaints() == []


def test_the_toggle_works_where_nothing_can_be_remembered(
    tab: Tab, page: str, tmp_path: Path
) -> None:
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=REFUSED)
    tab.emulate(scheme="dark")
    tab.navigate(page)
    tab.click("#theme")
    assert brightness(seen(tab, tmp_path / "light.png")) > 200
    assert tab.complaints() == []


def test_details_open_and_commands_are_copied(browser: Browser, tab: Tab, page: str) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call("Browser.grantPermissions", permissions=permissions)
    tab.emulate()
    tab.navigate(page)
    fold = "document.querySelector('.op details')"
    assert tab.evaluate(f"{fold}.open") is False
    tab.click(".op details summary")
    assert tab.evaluate(f"{fold}.open") is True
    tab.click(".op details .copy")
    command = tab.evaluate(f"{fold}.querySelector('.cmd').textContent")
    assert command.startswith("gristmill bench ")
    label = f"{fold}.querySelector('.copy').textContent"
    assert tab.wait_until(f"{label} === 'copied'")
    assert tab.evaluate("navigator.clipboard.readText()") == command
    assert tab.complaints() == []


def test_a_command_is_selected_where_the_clipboard_is_out_of_reach(tab: Tab, page: str) -> None:
    source = "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    tab.emulate()
    tab.navigate(page)
    tab.click(".op details summary")
    tab.click(".op details .copy")
    command = tab.evaluate("document.querySelector('.op .cmd').textContent")
    assert tab.evaluate("getSelection().toString()") == command


def test_a_loss_leads_to_its_rows(tab: Tab, page: str) -> None:
    tab.emulate()
    tab.navigate(page)
    tab.click(".losses a")
    there = "document.getElementById(decodeURIComponent(location.hash.slice(1)))"
    assert tab.wait_until(f"{there}.closest('details').open")
    place = f"{there}.getBoundingClientRect().top"
    assert tab.wait_until(f"0 <= {place} && {place} < innerHeight"), tab.evaluate(place)
    assert tab.evaluate("document.getAnimations().length") == 0, "something moves"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_works_without_scripts(tab: Tab, page: str, scheme: str, tmp_path: Path) -> None:
    tab.emulate(width=768, scheme=scheme, scripts=False)
    tab.navigate(page)
    assert (brightness(seen(tab, tmp_path / f"{scheme}.png")) < 60) == (scheme == "dark")
    assert tab.evaluate("document.querySelectorAll('.copy').length") == 0
    assert tab.evaluate("document.getElementById('theme').checkVisibility()") is False
    tab.click(".op details summary")
    assert tab.evaluate("document.querySelector('.op .cmd').checkVisibility()") is True
    assert overflows(tab) == []
    assert tab.complaints() == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_prints_dark_on_white_within_the_sheet(
    tab: Tab, page: str, scheme: str, tmp_path: Path
) -> None:
    tab.emulate(width=794, scheme=scheme, media="print")  # a sheet of A4
    tab.navigate(page)
    tab.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert brightness(seen(tab, tmp_path / f"print-{scheme}.png")) > 200
    assert tab.evaluate("document.documentElement.scrollWidth") <= 794
    assert tab.evaluate("document.querySelector('nav').checkVisibility()") is False
    assert faint(tab) == []


def test_it_can_be_used_by_keyboard(tab: Tab, page: str) -> None:
    tab.emulate()
    tab.navigate(page)
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('href')") == "#headline"
    top = tab.evaluate("document.activeElement.getBoundingClientRect().top")
    assert top >= 0, "the link that has the focus is not to be seen"
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "theme"
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.evaluate(style) != "none"


BAD = """<!doctype html><html><body style="margin:0;font:16px sans-serif;background:#fff">
{}</body></html>"""


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<p style='width:900px'>" + "wide " * 60 + "</p>", "leaves the page"),
        ("<div style='width:80px;white-space:nowrap'>much too long for it</div>", "leaves its box"),
        (
            "<div style='height:20px;overflow:hidden'><p>one</p><p>two</p><p>three</p></div>",
            "is cut off",
        ),
        ("<svg width=60 height=20><text x=5 y=15>a long label</text></svg>", "leaves its box"),
    ],
)
def test_the_checker_sees_what_overflows(
    tab: Tab, tmp_path: Path, body: str, complaint: str
) -> None:
    path = tmp_path / "bad.html"
    path.write_text(BAD.format(body))
    tab.emulate(width=360)
    tab.navigate(path.as_uri())
    assert any(complaint in line for line in overflows(tab)), overflows(tab)


def test_the_checker_sees_faint_text_overlaps_errors_and_requests(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    body = (
        "<p style='color:#aaa'>faint</p><ul class=cards><li style='height:9px'>a</li>"
        "<li style='margin-top:-5px'>b</li></ul><img src='missing.png'>"
        "<script>console.error('wrong'); undefinedName()</script>"
    )
    path.write_text(BAD.format(body))
    tab.emulate()
    tab.navigate(path.as_uri())
    assert [line for line in faint(tab) if "'faint'" in line]
    assert overlaps(tab, ".cards li") == ["'a' lies on 'b'"]
    assert overlaps(tab, ".none-at-all")
    said = " ".join(tab.complaints())
    assert "wrong" in said
    assert "undefinedName" in said
    assert (tmp_path / "missing.png").as_uri() in tab.requests()


def test_a_blank_page_is_seen_as_blank(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "blank.html"
    path.write_text(BAD.format(""))
    tab.emulate()
    tab.navigate(path.as_uri())
    assert set(seen(tab, tmp_path / "blank.png")) == {(255, 255, 255)}
