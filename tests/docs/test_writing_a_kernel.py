"""docs/writing-a-kernel.md is a program: its blocks, put into a copy of the checkout, work.

A block's title is the file it belongs to, blocks of one file follow each other, and a diff adds
its lines where the lines without a mark stand. All of it runs in processes of its own: the op that
the page builds is in no registry of this one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.errors import CompilerUnavailable
from gristmill.jit.nvrtc import compiler_version

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing-a-kernel.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
OURS = "tests/kernels/test_emulated_l2_normalize.py"
MISTAKEN = "tests/kernels/test_mistakes_of_the_walk.py"
SOURCE = "src/gristmill/kernels/cuda/l2_normalize.cu"

# What the page's table calls a mistake -> the text it is made of, what that becomes, and a call.
MISTAKES = {
    "no `wait_for_previous_grid();`": (
        "    wait_for_previous_grid();\n",
        "",
        "cuda_block",
        (3, 4096),
    ),
    "stores without `column[i] >= end`": (
        "if (column[i] >= end || row >= p.source.rows) continue;",
        "if (row >= p.source.rows) continue;",
        "cuda_block",
        (3, 1001),
    ),
    "`reduce` only `if (column[0] < end)`": (
        "team.reduce(squares);",
        "if (column[0] < end) team.reduce(squares);",
        "cuda_block",
        (3, 24),
    ),
    "a field more in the struct than the host packs": (
        "    Rows y;\n",
        "    Rows y, z;\n",
        "cuda_block",
        (3, 4096),
    ),
}
# The walk's own test, and the same launches of sources with a mistake in them.
TEST_OF_MISTAKES = """
import re, shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import test_emulated_l2_normalize as walk
from emulation.harness import EmulationError

from gristmill.ops.l2_normalize.cuda import L2Normalize

FOLDER = Path(str(resources.files("gristmill"))) / "kernels" / "cuda"
MISTAKES = {mistakes!r}


@pytest.mark.parametrize(("old", "new", "variant", "shape", "said"), MISTAKES)
def test_a_mistake_is_found(old, new, variant, shape, said, host, tmp_path, monkeypatch):
    for header in FOLDER.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    text = (FOLDER / "l2_normalize.cu").read_text()
    assert text.count(old) == 1
    (tmp_path / "l2_normalize.cu").write_text(text.replace(old, new))
    right = L2Normalize.program
    wrong = lambda self, *args: replace(right(self, *args), root=tmp_path)
    monkeypatch.setattr(L2Normalize, "program", wrong)
    with pytest.raises(EmulationError) as raised:
        walk.launch(host, variant, walk.normal(shape, walk.BF16))
    assert said in re.sub("0x[0-9a-f]+", "0x...", str(raised.value))
"""


def assembled(folder: Path) -> None:
    """A checkout with the page's files in it."""
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    written: dict[str, str] = {}
    for language, name, body in BLOCK.findall(PAGE):
        if language == "diff":
            apply(folder / name, body)
        else:
            written[name] = written.get(name, "") + body
    for name, text in written.items():
        assert not (folder / name).exists(), f"{name} is there already"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def apply(path: Path, diff: str) -> None:
    lines = diff.splitlines()
    assert all(line[0] in " +" for line in lines), "the page only adds lines"
    before = "\n".join(line[1:] for line in lines if line[0] == " ")
    after = "\n".join(line[1:] for line in lines)
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} has changed where the page adds to it: {before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def mistakes() -> Iterator[tuple[str, str, str, tuple[int, ...], str]]:
    rows = dict(re.findall(r"^\| (.+?) \| `([^`]+)` \|$", PAGE, re.MULTILINE))
    for name, (old, new, variant, shape) in MISTAKES.items():
        yield old, new, variant, shape, rows[name]


class Checkout:
    """A copy of the checkout with the page's files, and commands that run in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        assembled(folder)
        text = TEST_OF_MISTAKES.replace("{mistakes!r}", repr(list(mistakes())))
        (folder / MISTAKEN).write_text(text, encoding="utf-8")

    def run(self, *words: str) -> str:
        """A module of Python; its output. Settings of this process are not those of a reader."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
        environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(self.folder / "tests")]),
            "CUDA_VISIBLE_DEVICES": "",
            "GRISTMILL_CACHE_DIR": str(self.folder / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Checkout:
    """What is emulated is kept where this run keeps it."""
    folder = tmp_path_factory.mktemp("walk")
    kept = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    cache = folder / "cache" if kept is None else Path(kept.mkdir("emulation")).parents[1]
    return Checkout(folder / "checkout", cache)


@pytest.fixture
def compilers() -> None:
    """Without them the test is skipped, but in CI it must not be."""
    missing = "" if shutil.which("g++") else "g++ is not installed"
    try:
        compiler_version()
    except CompilerUnavailable as error:
        missing = str(error)
    if missing and not os.environ.get("CI"):
        pytest.skip(missing)


@pytest.mark.usefixtures("compilers")
def test_what_the_page_builds_is_right(checkout: Checkout) -> None:
    """The kernel emulated and compiled, its mistakes found, the op by some conformance tests.

    In one process: to import torch takes longer than most of it.
    """
    conformance = [
        f"tests/conformance/test_conformance_{part}.py" for part in ("outputs", "examples")
    ]
    some = "l2_normalize and (64x64 or 5x7 or columns or 0x64 or cost)"
    said = checkout.run(
        "pytest",
        *("-q", "--no-header", "-o", f"cache_dir={checkout.cache}"),
        *("-m", "not gpu"),  # not a sample: all of these
        *(OURS, MISTAKEN, *conformance),
        *("-k", f"emulated_l2_normalize or mistakes_of_the_walk or ({some})"),
    )
    kernels, conforming = 6 + 1 + 3 + 1 + len(MISTAKES), 4 * 2 + 1
    assert f"{kernels + conforming} passed" in said, said


def test_explain_prints_what_the_page_shows(checkout: Checkout) -> None:
    (shown,) = re.findall(
        r"^```console\n\$ gristmill (.+?)\n(l2_normalize .+?)^```$", PAGE, re.M | re.S
    )
    command, lines = shown
    assert checkout.run("gristmill", *command.split()).startswith(lines)


def test_the_page_shows_python_and_cuda_as_they_are_checked(checkout: Checkout) -> None:
    """Formatted and linted as the rest: what a reader copies passes `make lint`."""
    files = [name for language, name, _ in BLOCK.findall(PAGE) if name.endswith(".py")]
    checkout.run("ruff", "check", *files)
    checkout.run("ruff", "format", "--check", *files)
    text = (checkout.folder / SOURCE).read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= 140
