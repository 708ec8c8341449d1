"""`tools/browser`, with programs in the place of a browser and of apt-get."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "browser"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that is all of PATH: the few programs that the tool itself calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def write(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


def run(programs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOL], env={"PATH": str(programs)}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome", "chrome"])
def test_a_browser_that_is_there_is_printed(programs: Path, name: str) -> None:
    write(programs / name, "exit 1")
    done = run(programs)
    assert (done.returncode, done.stdout) == (0, f"{programs / name}\n")


def test_without_apt_it_says_what_to_do(programs: Path) -> None:
    done = run(programs)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no apt-get" in done.stderr
    assert "apt-get install chromium" in done.stderr


def test_without_rights_it_says_what_to_do(programs: Path) -> None:
    write(programs / "apt-get", "exit 0")
    write(programs / "id", "echo 1000")
    done = run(programs)
    assert (done.returncode, done.stdout) == (1, "")
    assert "only root" in done.stderr


def test_root_installs_one(programs: Path) -> None:
    write(programs / "id", "echo 0")
    install = f"printf '#!/bin/sh\\n' >{programs}/chromium; /bin/chmod +x {programs}/chromium"
    write(programs / "apt-get", f'echo "apt-get $*"; case "$*" in *install*) {install};; esac')
    done = run(programs)
    assert (done.returncode, done.stdout) == (0, f"{programs / 'chromium'}\n")
    assert "install --no-install-recommends chromium" in done.stderr


def test_an_installation_that_fails_is_told(programs: Path) -> None:
    write(programs / "id", "echo 0")
    write(programs / "apt-get", 'case "$*" in *install*) exit 100;; esac')
    done = run(programs)
    assert (done.returncode, done.stdout) == (1, "")
    assert "could not install" in done.stderr
