"""What the shipped table covers, and that calls it does not cover run as without tables."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import gristmill
from gristmill.ops.nvfp4_linear.problem import SIZES
from gristmill.ops.registry import OPS
from gristmill.select import reset_tables, use
from gristmill.select.chooser import Choice, by_heuristics, ranked
from gristmill.select.device import KNOWN
from gristmill.select.explain import explain_problem
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import BUCKETS, Problem
from gristmill.select.table import Row, Table, parse
from gristmill.settings import reload_settings
from gristmill.warmup import default_shapes

H200 = KNOWN["sm_90a"]
PATH = Path(str(resources.files("gristmill"))) / "tables" / "nvidia-h200.json"
SHIPPED = Table.load(PATH)
LINEAR = OPS["nvfp4_linear"]
LINEAR_ROWS = [row for row in SHIPPED.rows.values() if row.key.startswith("nvfp4_linear ")]
# Within tiles, at their ends, at hints, beyond all rows.
MANY = sorted({*range(1, 20), *range(24, 300, 7), *range(250, 5000, 333), *SIZES.stops[::5], 10**6})


@pytest.fixture(autouse=True)
def without_tables_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
        switch(patch, "on")
        yield patch
    reload_settings()
    reset_tables()


def switch(patch: pytest.MonkeyPatch, table: str) -> None:
    patch.setenv("GRISTMILL_TABLE", table)
    reload_settings()
    reset_tables()


def by_family() -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in SHIPPED.rows.values():
        found.setdefault(row.family, []).append(row)
    return {
        family: sorted(rows, key=lambda row: row.covers.least) for family, rows in found.items()
    }


# the file


def test_the_file_is_its_own_canonical_text() -> None:
    text = PATH.read_text(encoding="utf-8")
    table = parse(text, str(PATH))
    assert table._text(table.rows.values()) == text


def test_no_two_rows_cover_one_size() -> None:
    for rows in by_family().values():
        for one, other in pairwise(rows):
            assert one.covers.end < other.covers.least, (one.key, other.key)
    again = Table.for_device(H200)
    for row in SHIPPED.rows.values():
        again.put(row)
    assert again.rows == SHIPPED.rows


def test_every_row_was_measured_where_it_holds() -> None:
    """Or at a size that its stop stands for; other times of its launch likewise."""
    for row in SHIPPED.rows.values():
        sizes = SIZES if row in LINEAR_ROWS else BUCKETS
        assert row.stop in row.covers
        assert row.rows in row.covers or sizes.stop(row.rows) == sizes.stop(row.stop), row.key
        assert all(int(rows) in row.covers for rows in row.also), row.key
        assert str(row.rows) not in row.also


def test_rows_of_nvfp4_linear_hold_no_farther_than_was_measured() -> None:
    """The tiles at both ends of what a row covers were measured with its launch."""
    assert len(LINEAR_ROWS) >= 20
    for row in LINEAR_ROWS:
        measured = {SIZES.span(rows) for rows in (row.rows, *map(int, row.also))}
        least, most = row.covers
        assert most is not None, row.key
        assert SIZES.span(max(1, least)) in measured, (row.key, row.covers)
        assert SIZES.span(most) in measured, (row.key, row.covers)
        if not row.also:
            span = SIZES.span(row.rows)
            assert span.least <= row.covers.least, (row.key, row.covers)
            assert row.covers.end <= span.end, (row.key, row.covers)


# what runs


def same(one: Choice, other: Choice) -> bool:
    return (one.variant, one.config) == (other.variant, other.config)


def linear_problems(rows: int) -> Iterator[Problem]:
    """Of each layer of which the table knows something, by the words of the row's key."""
    seen = set()
    for row in LINEAR_ROWS:
        words = row.key.split()
        named = dict(word.split("=") for word in words if "=" in word)
        if row.family not in seen:
            seen.add(row.family)
            args = LINEAR.example_for(
                H200, (rows, int(named["N"]), int(named["K"])), getattr(torch, named["x"])
            )
            problem = LINEAR.problem(*args, device=H200)
            assert problem.family() == row.family
            yield problem


def test_at_any_size_a_row_decides_or_what_decides_without_tables(
    without_tables_of_the_user: pytest.MonkeyPatch,
) -> None:
    problems = [problem for rows in MANY for problem in linear_problems(rows)]
    first = [next(iter(ranked(LINEAR.name, LINEAR.variants, one))) for one in problems]
    rows = [SHIPPED.row(problem) for problem in problems]
    switch(without_tables_of_the_user, "none")
    tabled = untabled = 0
    for problem, row, choice in zip(problems, rows, first, strict=True):
        if row is None:
            plain = ranked(LINEAR.name, LINEAR.variants, problem)[0]
            assert same(choice, plain), problem.key(problem.rows)
            assert choice.source == plain.source == "preference"
            untabled += 1
        else:
            assert (choice.source, choice.variant.name) == ("shipped table", row.variant)
            tabled += 1
    assert tabled > 100
    assert untabled > 100


def test_explain_says_of_a_size_between_two_rows_that_none_covers_it() -> None:
    family = max(by_family().items(), key=lambda one: len(one[1]) * (one[1][0] in LINEAR_ROWS))[1]
    below, above = next(
        (one, other) for one, other in pairwise(family) if one.covers.end + 1 < other.covers.least
    )
    rows = int(below.covers.end) + 1
    (problem,) = [one for one in linear_problems(rows) if one.family() == below.family]
    found = explain_problem(LINEAR.name, LINEAR.variants, problem)
    assert (found.source, found.covers, found.measured_at) == ("preference", None, None)
    (evidence,) = found.evidence
    assert (evidence.row, evidence.below, evidence.above) == (None, below, above)


def problems_of(name: str) -> Iterator[Problem]:
    op = OPS[name]
    for shape in default_shapes(name)[::5] or default_shapes(name):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            try:
                args = op.example_for(H200, shape, dtype)
                yield op.problem(*args, device=H200)
                with batch_invariant():
                    yield op.problem(*args, device=H200)
            except ValueError:
                continue


@pytest.mark.parametrize("name", OPS)
def test_heuristics_are_what_decides_without_tables(
    name: str, without_tables_of_the_user: pytest.MonkeyPatch
) -> None:
    """For every op; whatever tables hold, they say the same."""
    op = OPS[name]
    asked = list(problems_of(name))
    assert asked
    before = [by_heuristics(name, op.variants, problem) for problem in asked]
    switch(without_tables_of_the_user, "none")
    forced = 0
    for problem, found in zip(asked, before, strict=True):
        plain = ranked(name, op.variants, problem)
        assert found is not None
        assert found == plain[0] == by_heuristics(name, op.variants, problem)
        other = plain[-1].variant.name
        with use(name, other):
            by_name = by_heuristics(name, op.variants, problem)
            assert by_name is not None
            assert same(by_name, ranked(name, op.variants, problem)[0])
            forced += other != plain[0].variant.name
    assert forced or len(op.variants) == 1 or len(plain) == 1


def test_where_nothing_runs_heuristics_say_nothing() -> None:
    (first, *_) = linear_problems(64)
    assert by_heuristics(LINEAR.name, (), first) is None


# calls after the first one


def test_a_call_after_the_first_asks_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a row decides, nor where heuristics do."""
    op = OPS["rms_norm"]
    asked: list[Any] = []
    plain = Table.row

    def counting(self: Table, problem: Problem) -> Row | None:
        asked.append(problem)
        return plain(self, problem)

    op.forget_plans()
    monkeypatch.setattr(Table, "row", counting)
    x = torch.ones(3, 64)
    gristmill.rms_norm(x, torch.ones(64))
    first = len(asked)
    assert first > 0
    for _ in range(3):
        gristmill.rms_norm(x, torch.ones(64))
    assert len(asked) == first
    op.forget_plans()
