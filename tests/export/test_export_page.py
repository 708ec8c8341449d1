"""docs/export.md, whole: test_docs.py runs its examples but those that AOTInductor compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from export_models import SOURCES, environment

PAGE = SOURCES.parent / "docs" / "export.md"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
def test_every_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(?:python|py)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert "aoti_load_package" in "".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
