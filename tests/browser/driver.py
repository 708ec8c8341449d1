"""A small driver for headless Chromium: its DevTools protocol over a pair of pipes, nothing else.

    with Browser(path, folder) as browser:
        with browser.tab() as tab:
            tab.navigate("file:///...")
            tab.evaluate("document.title")

Messages are JSON, each ended by a NUL, on the browser's descriptors 3 (in) and 4 (out).
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_LIMIT_S = 30.0


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser answered with an error, or not at all."""


class Browser:
    """A process of the browser's, with a profile of its own under `folder`."""

    def __init__(self, path: str, folder: Path):
        there, ours = os.pipe()
        back, theirs = os.pipe()
        # Out of the way of 3 and 4, which they become in the child.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (there, theirs)]
        for end in (there, theirs):
            os.close(end)

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._log = (folder / "browser.log").open("wb")
        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(3, 4),
            preexec_fn=place,
        )
        for end in high:
            os.close(end)
        self._write, self._read = ours, back
        self._pending = b""
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for end in (self._write, self._read):
            os.close(end)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method; events that come meanwhile are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + _LIMIT_S
        while number not in self._answers:
            self._receive(end, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, method: str, session: str, limit_s: float = _LIMIT_S) -> dict[str, Any]:
        """The first event of this name in the session, whether it has come or is to come."""
        end = time.monotonic() + limit_s
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event["method"] == method and event.get("sessionId") == session:
                    return event
            seen = len(self.events)
            self._receive(end, method)

    def _receive(self, end: float, what: str) -> None:
        left = end - time.monotonic()
        if left <= 0 or not select.select([self._read], [], [], left)[0]:
            raise BrowserError(f"no answer to {what} after {_LIMIT_S:.0f} s")
        data = os.read(self._read, 1 << 20)
        if not data:
            raise BrowserError(f"the browser has ended while {what} was waited for")
        *messages, self._pending = (self._pending + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            yield Tab(self, session)
        finally:
            self.call("Target.closeTarget", targetId=target)


class Tab:
    """A page: what it says, what it asks for, how it looks."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def navigate(self, url: str) -> None:
        """Load a page, and forget what the one before has said."""
        self._browser.events = [
            event for event in self._browser.events if event.get("sessionId") != self._session
        ]
        answer = self.call("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url}: {answer['errorText']}")
        self._browser.wait("Page.loadEventFired", self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def emulate(
        self,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        scripts: bool = True,
        media: str = "screen",
    ) -> None:
        """Before a page is loaded: how wide the window is, which theme the reader has.

        `media`: "print" for what would be printed.
        """
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,  # a mobile one would widen its window to what overflows
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def screenshot(self, path: Path, *, scale: float = 1.0) -> bytes:
        """A PNG of what is in view, smaller by `scale`."""
        view = self.call("Page.getLayoutMetrics")["cssVisualViewport"]
        clip = {"x": view["pageX"], "y": view["pageY"], "scale": scale}
        clip |= {"width": view["clientWidth"], "height": view["clientHeight"]}
        answer = self.call("Page.captureScreenshot", format="png", clip=clip)
        data = base64.b64decode(answer["data"])
        path.write_bytes(data)
        return data

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the first element that is there."""
        found = f"document.querySelector({selector!r})"
        self.evaluate(f"{found}.scrollIntoView({{behavior: 'instant', block: 'center'}})")
        box = self.evaluate(f"{found}.getBoundingClientRect().toJSON()")
        # What is wider than the window has its start in view.
        x = box["x"] + min(box["width"] / 2, 40)
        y = box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            code = codes[key]
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def wait_until(self, condition: str, limit_s: float = 5.0) -> bool:
        """Whether a condition comes to hold."""
        end = time.monotonic() + limit_s
        while not self.evaluate(condition):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nobody caught."""
        self.evaluate("1")  # what was said before has arrived by then
        found = []
        for event in self._events():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails']}")
            elif event["method"] == "Runtime.consoleAPICalled":
                if params["type"] in ("error", "warning", "assert"):
                    found.append(f"console: {params['args']}")
            elif event["method"] == "Log.entryAdded":
                found.append(f"log: {params['entry']['level']} {params['entry']['text']}")
        return found

    def requests(self) -> list[str]:
        """Addresses that the page has asked for, itself among them."""
        self.evaluate("1")
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        return [one for one in self._browser.events if one.get("sessionId") == self._session]
