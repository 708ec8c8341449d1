"""Processes that start together and are timed one after the other.

Starting an engine is a minute of work for the host, and of several at once hardly more; a timing
wants the GPU for itself. So a process that is ready says so, and waits for its turn. It talks by
files in a folder of its own: `ready` and `answer.json` are the child's, `go` is the parent's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.errors import GristmillError
from gristmill.jit import child

_LOOK_S = 0.1
_TEARDOWN_S = 20.0
_SCRIPT = """
import importlib, sys
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
"""


@dataclass
class Started:
    """A process, and the folder that it talks by."""

    name: str
    place: Path
    process: subprocess.Popen[bytes]

    @property
    def is_ready(self) -> bool:
        return (self.place / "ready").exists()

    @property
    def has_answered(self) -> bool:
        return (self.place / "answer.json").exists()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_done(self) -> bool:
        return self.has_answered or self.has_ended

    def go(self) -> None:
        (self.place / "go").touch()

    def answer(self) -> dict[str, Any]:
        """What it has written; an engine may fall over while it is torn down, which is no matter.

        GristmillError if there is nothing.
        """
        try:
            found: dict[str, Any] = json.loads((self.place / "answer.json").read_text())
        except (OSError, ValueError):
            said = (self.place / "log").read_text(errors="replace").strip().splitlines()
            code = self.process.poll()
            how = "was still running" if code is None else f"ended with code {code}"
            last = said[-1] if said else "it said nothing"
            raise GristmillError(f"{self.name} {how} and gave no answer: {last}") from None
        return found

    def stop(self) -> None:
        """With all that it has started itself."""
        if not self.has_ended:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(
    name: str, module: str, spec: Mapping[str, Any], environment: Mapping[str, str], place: Path
) -> Started:
    """A process that calls `main` of `module` with `spec`, as JSON.

    The spec also has its folder, `place`, and the id of this process, `parent`.
    """
    place.mkdir(parents=True)
    told = json.dumps({**spec, "place": str(place), "parent": os.getpid()})
    command = child.command(_SCRIPT, module, told, environment=environment)
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=place,  # an engine starts Pythons of its own, which import from there
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with its own children
        )
    return Started(name, place, process)


def in_turns(
    started: Sequence[Started],
    advance: Callable[[str], None],
    *,
    start_limit_s: float,
    run_limit_s: float,
) -> Iterator[tuple[Started, dict[str, Any] | GristmillError]]:
    """Wait until all are ready or have ended, then let each run alone: its answer, or why not.

    Whatever happens, none is left running.
    """
    try:
        _wait(lambda: all(one.is_ready or one.has_ended for one in started), start_limit_s)
        for one in started:
            advance(one.name)
            if one.is_ready and not one.has_ended:
                one.go()
                _wait(one.is_done, run_limit_s)
                if one.has_answered:
                    _wait(lambda one=one: one.has_ended, _TEARDOWN_S)  # type: ignore[misc]
            try:
                yield one, one.answer()
            except GristmillError as error:
                yield one, error
            one.stop()  # its memory is the next one's
    finally:
        for one in started:
            one.stop()


def wait_for_turn(place: Path) -> None:
    """In a child: say that it is ready, and wait."""
    (place / "ready").touch()
    while not (place / "go").exists():
        time.sleep(_LOOK_S)


def write_answer(place: Path, answer: Mapping[str, Any]) -> None:
    """In a child: all of it, or nothing."""
    partial = place / "answer.partial"
    partial.write_text(json.dumps(answer))
    os.replace(partial, place / "answer.json")


def _wait(done: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not done() and time.monotonic() < end:
        time.sleep(_LOOK_S)
