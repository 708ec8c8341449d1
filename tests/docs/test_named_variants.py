"""Variants and kernels that a page names in an example are there: a reader pastes them."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from gristmill.ops.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
NAMED = (
    re.compile(r'\buse\("(\w+)", "(\w+)"\)'),
    re.compile(r"\bGRISTMILL_USE=(\w+):(\w+)"),
    re.compile(r"\bfallback (\w+): variant (\w+)"),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_variants_named_in_examples_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for op, variant in (found for pattern in NAMED for found in pattern.findall(text)):
        if op in OPS:  # others are a reader's own
            assert variant in [one.name for one in OPS[op].variants], f"{op}: {variant}"


def test_kernels_in_lines_of_the_log_exist() -> None:
    text = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    lines = re.findall(r"^gristmill: info: compiled (\S+) ([^<]+)<", text, re.M)
    assert lines
    for source, kernel in lines:
        device = files("gristmill").joinpath("kernels", "cuda", source).read_text(encoding="utf-8")
        assert re.search(rf"__global__ [^;{{]*\b{kernel}\(", device), f"{source}: {kernel}"
