"""Each statement of docs/threat-model.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _statements() -> list[str]:
    """The items of the lists that say what holds."""
    (body,) = re.findall(r"^## What holds$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^- (.*?)(?=^- |^#|^\s*$|\Z)", body, re.MULTILINE | re.DOTALL)


@cache
def _tests_in(name: str) -> frozenset[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_what_holds_is_said_in_lists_alone() -> None:
    (body,) = re.findall(r"^## What holds$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    first = body.strip().split("\n\n")[0]
    for line in body.replace(first, "").splitlines():
        assert line == "" or line.startswith(("### ", "- ", "  ")), line
    assert len(_statements()) > 40


@pytest.mark.parametrize("statement", _statements(), ids=lambda text: text[:60])
def test_a_test_stands_for_each_statement(statement: str) -> None:
    named = _TEST.findall(statement)
    assert named, "no test is named"
    # A sentence, then its tests: nothing is claimed behind them.
    text = _TEST.sub("", statement)
    assert re.fullmatch(r"[^`]*(`[^`]+`[^`]*)*\.[\s,]*", text), statement
    for file, test in named:
        assert test in _tests_in(file), f"{file} has no {test}"
