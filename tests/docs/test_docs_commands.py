"""Commands that a reader is told to type are typed here: of the start and of the container."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.select.device import KNOWN
from gristmill.settings import reload_settings

ROOT = Path(__file__).resolve().parents[2]
ARCH = re.compile(r"--arch (sm_\w+)")
# A program with two ops, as one would record it.
PROGRAM = """
import torch, gristmill as gm
gm.rms_norm(torch.randn(64, 4096).bfloat16(), torch.ones(4096).bfloat16())
gm.softmax(torch.randn(16, 1000).bfloat16())
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands(page: str) -> Iterator[str]:
    """The lines of a page that call gristmill, without what is said about them."""
    for block in blocks(page, "console"):
        for line in re.findall(r"^\$ gristmill (.+)$", block, re.M):
            yield re.sub(r"\s+#.*", "", line)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where commands run, with a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    reload_settings()
    yield tmp_path
    monkeypatch.undo()
    reload_settings()


def test_every_command_of_the_start_runs(folder: Path) -> None:
    """One after another, as a reader would; Python blocks are run by test_docs.py.

    That `doctor` ends well is tested with the command, in tests/cli.
    """
    typed = list(commands("start.md"))
    kinds = [words.split()[0] for words in typed]
    assert kinds == ["doctor", "explain", "explain", "warmup", "cache", "bench"]
    for words in typed[1:]:
        done = CliRunner().invoke(app, shlex.split(words))
        assert done.exit_code == 0, f"gristmill {words}\n{done.output}"
    assert "rms_norm" in (folder / "report" / "index.html").read_text(encoding="utf-8")


def fresh(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """This Python with these words, in a process that has no kernels in memory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL_")}
    return subprocess.run(
        [sys.executable, *words],
        env={**kept, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_dockerfile_bakes_what_was_recorded(tmp_path: Path) -> None:
    """Its commands with paths in a folder: compiled without a GPU, found when compiling is off."""
    (dockerfile,) = blocks("container.md", "dockerfile")
    text = dockerfile.replace("/tmp/", f"{tmp_path}/").replace("/opt/", f"{tmp_path}/opt/")
    ran = fresh("-c", PROGRAM, GRISTMILL_RECORD=str(tmp_path / "run.jsonl"))
    assert ran.returncode == 0, ran.stderr

    (baked,) = re.findall(r"^RUN gristmill (.+)$", text, re.M)
    built = str(tmp_path / "built")
    done = fresh("-m", "gristmill", *shlex.split(baked), GRISTMILL_CACHE_DIR=built)
    assert done.returncode == 0, done.stdout + done.stderr
    ((source, target),) = re.findall(r"^COPY --from=kernels (\S+) (\S+)$", text, re.M)
    Path(target).parent.mkdir(parents=True)
    Path(source).rename(target)

    (line,) = re.findall(r"^ENV (.+)$", text, re.M)
    settings = dict(word.split("=", 1) for word in line.split())
    assert settings == {"GRISTMILL_CACHE_LAYERS": target, "GRISTMILL_JIT": "off"}
    # What the program ran is in the layer; what it did not run is an error, not a stall.
    asked = (
        "warmup rms_norm --shape 64x4096 --shape 64x131072 --json --arch " + ARCH.search(baked)[1]
    )
    empty = str(tmp_path / "empty")
    done = fresh("-m", "gristmill", *asked.split(), GRISTMILL_CACHE_DIR=empty, **settings)
    told = json.loads(done.stdout)
    assert (told["cached"], told["compiled"], told["failed"]) == (1, 0, 1)
    assert "KernelNotCached" in done.stdout
    assert CliRunner().invoke(app, ["cache", "verify", target]).exit_code == 0


@pytest.mark.parametrize("page", ["container.md", "cache.md", "start.md"])
def test_architectures_named_are_known(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(ARCH.findall(text)) <= set(KNOWN) != set()
