from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from jit_helpers import TINY

from gristmill.jit import cache, counters
from gristmill.jit.program import Program
from gristmill.log import forget_warnings
from gristmill.settings import PREFIX, reload_settings


class Home:
    """One test's own cache folder and environment."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)
        reload_settings()

    def files(self, pattern: str = "*.kernel") -> list[Path]:
        return sorted((self.path / "kernels").glob(pattern))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    home = Home(tmp_path / "cache", monkeypatch)
    home.set(GRISTMILL_CACHE_DIR=str(home.path))
    cache.forget()
    counters.reset()
    forget_warnings()
    yield home
    monkeypatch.undo()
    reload_settings()
    cache.forget()


@pytest.fixture
def make_program(tmp_path: Path):
    """A program from texts given as name=text (dots in names written as __)."""
    made = 0

    def make(names: tuple[str, ...] = (), options: tuple[str, ...] = (), **texts: str) -> Program:
        nonlocal made
        made += 1
        root = tmp_path / f"sources{made}"
        root.mkdir()
        files = {name.replace("__", "."): text for name, text in texts.items()}
        for name, text in files.items():
            (root / name).write_text(text)
        return Program(next(iter(files)), names, options, root)

    return make


@pytest.fixture
def tiny(make_program) -> Program:
    return make_program(("twice<3>",), a__cu=TINY)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that only keeps what it was given (fake_driver.c)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "fake_driver.c"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source],
        check=True,
    )
    return folder
