"""Optional packages whose import fails in any way: one reason, and everything else works."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jit_helpers import ARCH, CUTE_SCALE, TRITON_SCALE

from gristmill.errors import CompilerUnavailable
from gristmill.jit import cache, cutedsl, driver, nvrtc, optional, triton

# What a package does as it is imported, and the reason that is given.
BROKEN = {
    "ImportError": ("raise ImportError('no\\n  symbol')", "no symbol"),
    "empty ImportError": ("raise ImportError", "ImportError"),
    "another is missing": ("import no_such_package", "No module named 'no_such_package'"),
    "RuntimeError": ("raise RuntimeError('no\\ndevice')", "RuntimeError: no device"),
    "OSError": ("open('/dev/null/a')", "NotADirectoryError: [Errno 20]"),
    "SystemExit": ("raise SystemExit(3)", "SystemExit: 3"),
    "exit": ("import sys; sys.exit()", "SystemExit"),
    "MemoryError": ("raise MemoryError", "MemoryError"),
    "panic": (
        "class PanicException(BaseException): pass\nraise PanicException('in Rust')",
        "PanicException: in Rust",
    ),
    "RecursionError": ("def call(): call()\ncall()", "RecursionError: maximum recursion"),
    "SyntaxError": ("def", "SyntaxError: invalid syntax"),
    "zeros": ("\0", ""),  # versions of Python differ in what they say
    "no message": (
        "class Silent(Exception):\n  def __str__(self): raise ValueError\nraise Silent",
        "Silent",
    ),
    "much": ("raise ValueError('a' * 100_000)", "ValueError: aaa"),
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from; what has been imported, and what was found broken, is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    loaded: tuple[Any, ...] = (nvrtc._loaded, triton._triton, cutedsl._dsl)
    for function in loaded:
        function.cache_clear()
    optional.forget_broken()
    yield tmp_path
    for function in loaded:
        function.cache_clear()
    optional.forget_broken()


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN)
def test_the_reason_is_one_line_and_stays_the_same(code: str, reason: str, modules: Path) -> None:
    """A second attempt is not made: it could meet what the first has left, and even succeed."""
    count = f"with open({str(modules / 'count')!r}, 'a') as file: file.write('x')\n"
    (modules / "broken_one.py").write_text(code if reason[:6] in ("", "Syntax") else count + code)
    said = set()
    for _ in range(2):
        with pytest.raises(optional.NotImportableError) as caught:
            optional.imported("broken_one")
        said.add(str(caught.value))
    (message,) = said
    assert message.startswith(reason)
    assert "\n" not in message
    assert 0 < len(message) < 2000
    assert not (modules / "count").exists() or (modules / "count").read_text() == "x"


def test_an_interrupt_is_not_a_reason(modules: Path) -> None:
    (modules / "interrupted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        optional.imported("interrupted")
    (modules / "interrupted.py").write_text("value = 'as it should be'")
    assert optional.imported("interrupted").value == "as it should be"


@pytest.mark.parametrize("name", ["late_package", "late_package.inner"])
def test_what_is_not_there_is_looked_for_again(name: str, modules: Path) -> None:
    with pytest.raises(optional.NotImportableError, match="No module named 'late_package'"):
        optional.imported(name)
    (modules / "late_package").mkdir()
    (modules / "late_package" / "__init__.py").touch()
    (modules / "late_package" / "inner.py").touch()
    assert optional.imported(name).__name__ == name


@pytest.mark.parametrize(
    ("told", "found"),
    [
        *(("3.6.0", (3, 6)), ("3.10.1+git.abc", (3, 10)), ("4.8", (4, 8)), (3.6, (3, 6))),
        *((None, None), ("", None), ("9" * 5000 + ".1", None)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_release_is_what_the_version_begins_with(told: Any, found: Any) -> None:
    assert optional.release(SimpleNamespace(__version__=told)) == found
    assert optional.release(SimpleNamespace()) is None


def test_a_version_that_cannot_be_read_is_none(modules: Path) -> None:
    (modules / "lazy_version.py").write_text("def __getattr__(name): import no_such_package")
    assert optional.release(optional.imported("lazy_version")) is None


def test_metadata_that_is_damaged_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(name: str) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    assert optional.installed_version("torch") == importlib.metadata.version("torch")
    monkeypatch.setattr(importlib.metadata, "version", damaged)
    assert optional.installed_version("torch") == ""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: None)
    assert optional.installed_version("torch") == ""


# ---- compilers ----


def break_package(folder: Path, name: str, code: str) -> None:
    for known in [one for one in sys.modules if f"{one}.".startswith(f"{name}.")]:
        del sys.modules[known]
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


@pytest.mark.parametrize("kind", ["ImportError", "RuntimeError", "SystemExit", "SyntaxError"])
@pytest.mark.usefixtures("home")
def test_a_broken_compiler_is_unavailable(
    kind: str, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, reason = BROKEN[kind]
    monkeypatch.setattr(cutedsl, "why_missing", lambda: None)
    for name in ("triton", "cutlass", "cuda"):
        break_package(modules, name, code)
    for program, words in ((TRITON_SCALE, "Triton"), (CUTE_SCALE, "the CuTe DSL")):
        for _ in range(2):
            with pytest.raises(CompilerUnavailable, match=f"{words} cannot be imported") as caught:
                cache.load_or_compile(program, ARCH)
            assert reason in str(caught.value)
            assert "pip install" in str(caught.value)
    for function in (nvrtc.compiler_version, driver.bindings):
        with pytest.raises(CompilerUnavailable, match=f"cuda-bindings .*{reason}"):
            function()
    nvrtc.include_dir.cache_clear()
    nvrtc.include_dir()


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "does not say its version"), ("unknown", "does not say"), ("2.9.1", "is older than")],
)
def test_a_compiler_of_an_unknown_or_old_version(
    version: str | None, words: str, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutedsl, "why_missing", lambda: None)
    for name in ("triton", "cutlass"):
        break_package(modules, name, f"__version__ = {version!r}")
    (modules / "cutlass" / "cute.py").touch()
    for function in (triton.compiler_version, cutedsl.compiler_version):
        with pytest.raises(CompilerUnavailable, match=words):
            function()


@pytest.mark.usefixtures("home")
def test_a_part_of_triton_that_cannot_be_imported(modules: Path) -> None:
    break_package(modules, "triton", "__version__ = '3.6.0'")
    (modules / "triton" / "_C.py").write_text("raise SystemExit('a part')")
    for _ in range(2):
        with pytest.raises(CompilerUnavailable, match=r"Triton .* \(SystemExit: a part\)"):
            cache.load_or_compile(TRITON_SCALE, ARCH)


# Runs an op where Triton cannot be imported.
WITHOUT_TRITON = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import gristmill
x, weight = torch.randn(4, 64), torch.ones(64)
torch.testing.assert_close(
    gristmill.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
)
try:
    import triton
except (Exception, SystemExit):
    print("broken")
"""


@pytest.mark.parametrize("kind", ["RuntimeError", "SystemExit"])
def test_ops_run_where_triton_cannot_be_imported(kind: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(BROKEN[kind][0])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "broken\n"
