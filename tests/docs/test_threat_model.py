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
_NAMED = r"`tests/[\w/]+\.py::\w+`"
# Sentences, then tests with commas between them, and nothing else.
_STATEMENT = re.compile(rf"(\S.*\.)\s+({_NAMED}(?:,\s+{_NAMED})*)\s*", re.DOTALL)


def _body() -> str:
    """The section about what holds."""
    (body,) = re.findall(r"^## What holds$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    return body


def _statements() -> list[str]:
    """The items of its lists."""
    return re.findall(r"^- (.*?)(?=^- |^#|^\s*$|\Z)", _body(), re.MULTILINE | re.DOTALL)


def _named_by(statement: str) -> list[tuple[str, str]]:
    """The tests that a statement names; none if it does not have the form of one."""
    found = _STATEMENT.fullmatch(statement)
    if found is None or _TEST.search(found[1]) or re.search(r"^\s*[-+*] ", found[1], re.MULTILINE):
        return []
    return _TEST.findall(found[2])


@cache
def _tests_in(name: str) -> frozenset[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_what_holds_is_said_in_lists_alone() -> None:
    first, *rest = _body().strip().split("\n\n")
    assert not re.search(r"^\s*[-+*] ", first, re.MULTILINE)
    for line in "\n\n".join(rest).splitlines():
        assert re.match(r"$|### |- |  [^\s+*-]", line), line
    assert len(_statements()) > 40


@pytest.mark.parametrize("statement", _statements(), ids=lambda text: text[:60])
def test_a_test_stands_for_each_statement(statement: str) -> None:
    named = _named_by(statement)
    assert named, "a statement is sentences, and then tests with commas between them"
    for file, test in named:
        assert test in _tests_in(file), f"{file} has no {test}"


A, B = "`tests/a.py::test_a`", "`tests/b/c.py::test_b`"


@pytest.mark.parametrize(
    "statement",
    [
        *("It holds.", f"It holds {A}", f"It holds: {A}", A, f"It holds.{A}", "It holds. `a`"),
        *(f"It holds. {A} {B}", f"It holds. {A}, {B},", f"It holds. {A}. {B}", f"It holds. {A}."),
        *(f"It holds. {A} And so does this.", f"It holds. {A}, and {B}", f"It holds. {A}; {B}"),
        *(f"It holds. {A} So does this. {B}", f"It holds. {A}\n  - This. {B}"),
        *(f"It holds.\n  - This. {B}", f"It holds. tests/a.py::test_a, {B}"),
    ],
)
def test_any_other_form_is_rejected(statement: str) -> None:
    assert len(_named_by(f"With `a.b` it holds. So does this. {A},\n  {B}\n")) == 2
    assert _named_by(statement) == []
