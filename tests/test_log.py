from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill import log
from gristmill.errors import CompilerUnavailable
from gristmill.jit.nvrtc import compiler_version
from gristmill.log import forget_warnings, log_once, one_line, shown, warn_once


@pytest.fixture(autouse=True)
def clean_slate(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    forget_warnings()
    with caplog.at_level(logging.DEBUG, logger="gristmill"):
        yield
    forget_warnings()


@pytest.fixture
def nvrtc() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        pytest.skip(str(error))


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_each_key_speaks_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        warn_once("a", "first")
        warn_once("b", "second")
        log_once(logging.INFO, "c", "third")
    assert caplog.messages == ["first", "second", "third"]
    assert levels(caplog) == ["WARNING", "WARNING", "INFO"]


def test_a_message_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    warn_once("a", "100 % sure of %s")
    assert caplog.messages == ["100 % sure of %s"]


def test_of_one_kind_the_first_ones_are_told_and_the_last_of_them_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(20):
        warn_once(f"a {number}", f"reason {number}", kind="a")
    warn_once("b", "another kind", kind="b")
    assert levels(caplog) == ["WARNING"] * 16 + ["DEBUG"] * 4 + ["WARNING"]
    ends = [message.endswith("GRISTMILL_LOG=debug)") for message in caplog.messages]
    assert [at for at, end in enumerate(ends) if end] == [15]


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_GIVEN_KEPT", 10)
    for number in range(50):
        warn_once(f"key {number}", "a warning", kind=f"kind {number}")
    assert len(log._given) == len(log._kinds) == 10


def test_one_line() -> None:
    assert one_line("error:\n  expected ';'\n\n\tat 3") == "error: expected ';' at 3"
    assert one_line(ValueError("no")) == "no"
    assert one_line("x" * 100, 20) == "x" * 16 + " ..."
    assert one_line("x" * 20, 20) == "x" * 20
    assert len(one_line("words " * 10_000)) <= 1000


def test_values_are_shown_in_one_short_line() -> None:
    assert shown({"a  b": (1, 2.5, None)}) == "{'a  b': (1, 2.5, None)}"
    assert shown("a\n\x1b") == r"'a\n\x1b'"
    assert shown(10**4000) == f"1{'0' * 17}...{'0' * 19}"
    # Python formats no more than 4300 digits; some versions say so themselves.
    assert "16610 bits" in (said := shown([-(10**5000)])) or "<int instance" in said
    nested: list[object] = ["x" * 1000]
    for _ in range(6):
        nested = [nested] * 6
    assert len(shown(nested)) == 300


def program_log(tmp_path: Path, code: str, **environment: str) -> str:
    """What a program of its own writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={
            **{name: it for name, it in os.environ.items() if not name.startswith("GRISTMILL_")},
            "PYTHONPATH": os.pathsep.join(sys.path),
            "GRISTMILL_CACHE_DIR": str(tmp_path / "cache"),
            **environment,
        },
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


PROGRAM = """
import logging
import torch, gristmill
{setup}
for _ in range(2):
    gristmill.warmup("rms_norm", shapes=[(4096, 4096)], arch="sm_90a")
    gristmill.rms_norm(torch.ones(2, 8))
"""


@pytest.mark.usefixtures("nvrtc")
def test_what_a_program_sees(tmp_path: Path) -> None:
    """One line for each compile, with kernel, arch, seconds and place; none in the second run.

    The first program has no logging of its own. The second has: it gets records, and no lines.
    """
    first = program_log(tmp_path, PROGRAM.format(setup=""), GRISTMILL_LOG="info").splitlines()
    folder = tmp_path / "cache" / "kernels"
    assert len(first) == len(list(folder.glob("*.kernel"))) >= 1
    for line in first:
        shape = r"gristmill: info: compiled norm\.cu \S.* for sm_90a in \d+\.\d\d s: "
        assert re.fullmatch(shape + re.escape(str(folder)), line)

    setup = "logging.basicConfig(format='%(name)s|%(levelname)s|%(message)s')"
    text = program_log(tmp_path, PROGRAM.format(setup=setup), GRISTMILL_LOG="debug")
    lines = [line for line in text.splitlines() if line.startswith("gristmill")]
    found = [line for line in lines if line.startswith("gristmill|DEBUG|found norm.cu ")]
    chosen = [line for line in lines if line.startswith("gristmill|DEBUG|chose rms_norm: ")]
    assert len(found) == len(first)
    assert all(line.endswith(str(folder)) for line in found)
    assert len(chosen) == 1
    assert "compiled" not in text
    assert "gristmill: debug" not in text
