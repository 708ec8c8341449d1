from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.jit import cache, counters
from gristmill.log import forget_warnings
from gristmill.settings import PREFIX, reload_settings


@pytest.fixture(scope="session")
def faulty_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library to preload: faulty_disk.c, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("disk") / "faulty_disk.so"
    source = Path(__file__).parent / "faulty_disk.c"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
    )
    return str(library)


@pytest.fixture
def impatient() -> Iterator[None]:
    """Whoever waits for a pipe waits for ever: end that as an error of the test."""

    def give_up(*_: object) -> None:
        pytest.fail("it waits for a file")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 20, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One test's own cache folder, not made yet, and no other setting."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    reload_settings()
    cache.forget()
    counters.reset()
    forget_warnings()
    yield tmp_path / "cache"
    monkeypatch.undo()
    reload_settings()
    cache.forget()
