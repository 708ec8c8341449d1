"""First sight where there are several ranks: one measures, all compare; the group is pretended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from select_fakes import H200, Fake, problem, row_of, table_of
from select_sight import CPU, KEY, in_file, norm

import gristmill
from gristmill.errors import RanksDisagree
from gristmill.select import Row, Table, reset_tables, sight, tables, tables_for
from gristmill.select.problem import Span
from gristmill.select.table import row_to_json
from gristmill.select.tables import user_table_path


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pretended process group: `answers` holds what ranks have agreed on, by topic."""
    found = SimpleNamespace(answers={}, asked=[])

    def agree(topic: str, decide: Callable[[], str | None]) -> str | None:
        found.asked.append(topic)
        if topic not in found.answers:
            found.answers[topic] = decide()
        return found.answers[topic]

    pretended = SimpleNamespace(store=lambda: object(), alone=lambda: False, agree=agree)
    monkeypatch.setattr(sight, "agreement", pretended)
    return found


def test_the_rank_that_comes_first_measures_and_writes(
    first_call: Any, tuned: list[str], group: SimpleNamespace
) -> None:
    first_call()
    norm()
    norm(30)
    assert (tuned, group.asked) == ([KEY], [f"tune cpu {KEY}"])
    assert list(in_file().rows) == [KEY]
    assert group.answers[f"tune cpu {KEY}"] == row_to_json(in_file().rows[KEY])


def test_the_others_remember_what_it_says_and_keep_it_in_their_own_tables(
    first_call: Any, tuned: list[str], group: SimpleNamespace
) -> None:
    first_call()
    norm()
    told = group.answers[f"tune cpu {KEY}"]
    other = json.loads(told)
    other["variant"] = "reference" if other["variant"] == "library" else "library"
    group.answers[f"tune cpu {KEY}"] = json.dumps(other)
    user_table_path(CPU).unlink()
    tuned.clear()
    first_call()
    norm()
    assert tuned == []
    assert in_file().rows[KEY].variant == other["variant"]
    assert tables_for(CPU)[0].table.rows[KEY].variant == other["variant"]
    found = gristmill.explain("rms_norm", torch.ones(20, 64), torch.ones(64))
    assert (found.chosen, found.source) == (other["variant"], "tuning of this process")


def test_ranks_that_agree_on_nothing_run_the_usual_choice(
    first_call: Any, tuned: list[str], group: SimpleNamespace
) -> None:
    first_call()
    group.answers[f"tune cpu {KEY}"] = None
    assert torch.allclose(norm(), torch.ones(20, 64))
    assert tuned == []
    assert tables_for(CPU)[0].table.rows == {}


def test_a_rank_in_a_capture_takes_what_others_have_measured_and_measures_nothing(
    first_call: Any, tuned: list[str], group: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call()
    norm()
    user_table_path(CPU).unlink()
    tuned.clear()
    first_call()
    monkeypatch.setattr(sight, "is_capturing", lambda device: True)
    norm(20)
    norm(500)
    assert tuned == []
    assert list(tables_for(CPU)[0].table.rows) == [KEY]
    # Where it is the first to ask, all ranks run the usual choice.
    assert group.answers[f"tune cpu {KEY.replace('rows=16', 'rows=256')}"] is None


def test_ranks_that_disagree_while_tuning_raise(
    first_call: Any, group: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call()

    def differ(*args: Any) -> None:
        raise RanksDisagree("another version of gristmill")

    monkeypatch.setattr(sight.agreement, "agree", differ)
    with pytest.raises(RanksDisagree, match="another version"):
        norm()


def test_what_choices_depend_on_is_compared_once_for_each_device(
    first_call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_call()
    norm()
    first_call(GRISTMILL_TUNE="off")
    compared: list[tuple[str, dict[str, str]]] = []
    opened = SimpleNamespace(store=object(), checked=set())

    def check_equal(topic: str, mine: dict[str, str], *, settled: Any) -> None:
        compared.append((topic, mine))
        opened.checked.add(topic)

    monkeypatch.setattr(sight, "entries", lambda: opened)
    monkeypatch.setattr(
        sight, "agreement", SimpleNamespace(alone=lambda: False, check_equal=check_equal)
    )
    norm(20)
    norm(500)
    ((topic, mine),) = compared
    assert topic == "choices on cpu"
    assert mine["GRISTMILL_TUNE"] == "off"
    assert mine["GRISTMILL_TABLE"] == "on"
    assert mine[KEY] == in_file().rows[KEY].launch()
    assert mine[f"covers of {KEY}"] == "5 to 32 rows"


def test_a_users_row_is_compared_though_a_shipped_one_has_its_key(
    first_call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks of which one has a row of its own, and the other the shipped one, run other kernels."""
    first_call()
    norm()
    row = in_file().rows[KEY]
    shipped = Table.for_device(CPU)
    shipped.put(row)
    shipped.save(tmp_path / "package" / "tables" / "cpu.json")
    content = json.loads(user_table_path(CPU).read_text())
    other = "reference" if row.variant == "library" else "library"
    content["rows"][0]["variant"] = other
    user_table_path(CPU).write_text(json.dumps(content))
    monkeypatch.setattr(
        "gristmill.select.tables.resources.files", lambda package: tmp_path / "package"
    )
    reset_tables()
    compared: list[dict[str, str]] = []
    opened = SimpleNamespace(store=object(), checked=set())
    monkeypatch.setattr(sight, "entries", lambda: opened)
    check = SimpleNamespace(check_equal=lambda topic, mine, settled: compared.append(mine))
    monkeypatch.setattr(sight, "agreement", check)
    sight.compare_ranks(CPU)
    assert compared[0][KEY] == f"{other} null"
    assert compared[0][f"shipped {KEY}"] == row.launch()
    assert compared[0][f"covers of shipped {KEY}"] == "5 to 32 rows"


class Compared:
    """What a rank compares, and how it judges what another had before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: dict[str, str] = {}
        self.mine: dict[str, str] = {}
        self.settled: Callable[[str, str | None, str | None], bool] | None = None
        opened = SimpleNamespace(store=object(), checked=frozenset())
        monkeypatch.setattr(sight, "entries", lambda: opened)
        known = SimpleNamespace(check_equal=self.check_equal, published=self.published.get)
        monkeypatch.setattr(sight, "agreement", known)

    def check_equal(self, topic: str, mine: dict[str, str], *, settled: Any) -> None:
        self.mine, self.settled = mine, settled

    def rows(self, *rows: Row) -> dict[str, str]:
        """What a rank has to say of these rows, in the table of its process."""
        reset_tables()
        for row in rows:
            tables_for(H200)[0].table.put(row)
        sight.compare_ranks(H200)
        return {name: text for name, text in self.mine.items() if "toy " in name}

    def differing(self, here: dict[str, str], there: dict[str, str]) -> list[str]:
        """What is named as a difference; `here` is what was compared last."""
        assert self.settled is not None
        names = sorted(here.keys() | there.keys())
        pairs = [(name, here.get(name), there.get(name)) for name in names]
        return [one[0] for one in pairs if one[1] != one[2] and not self.settled(*one)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    monkeypatch.setattr(tables, "_shipped", list)
    return Compared(monkeypatch)


def wide(variant: str = "first", covers: tuple[int, int | None] = (513, 2048), **more: Any) -> Row:
    return row_of(problem(1024), Fake(variant), covers=covers, **more)


def test_rows_of_one_launch_that_cover_other_sizes_are_a_difference(compared: Compared) -> None:
    """Between the two ends one rank would run a row, and the other by heuristics."""
    there = compared.rows(wide(covers=(513, 1500)))
    here = compared.rows(wide(covers=(513, 2048)))
    assert here[problem().key(1024)] == there[problem().key(1024)]
    assert compared.differing(here, there) == [f"covers of {problem().key(1024)}"]


def test_tables_that_decide_alike_are_no_difference(compared: Compared) -> None:
    """One rank has read what the other has measured: there it stands in the row's file."""
    between = row_of(problem(2048), Fake("second"), stop=2048, covers=(1449, 2896))
    users = user_table_path(H200)
    table_of(wide()).save(users)
    there = compared.rows(between)
    table_of(between).save(users)
    here = compared.rows()
    assert here == there
    assert here[f"covers of {problem().key(1024)}"] == "513 to 1448 rows"


def test_what_a_row_of_this_run_has_taken_from_others_is_no_difference(compared: Compared) -> None:
    """A rank that comes later reads a table that others have added to."""
    stale = row_of(problem(3000), Fake("first"), stop=3000, covers=(2049, 4096))
    there = compared.rows(wide(), stale)
    tuned = row_of(problem(2048), Fake("second"), stop=2048, covers=(1449, 3500))
    here = compared.rows(wide(), stale, tuned)
    assert stale.key not in here
    news = [tuned.key, stale.key, wide().key]
    expected = sorted([*news[:2], *(f"covers of {key}" for key in news)])
    assert sorted(compared.differing(here, there)) == expected
    compared.published[f"tune {H200.name} {tuned.key}"] = row_to_json(tuned)
    assert compared.differing(here, there) == []
    # Of other kinds of problems, and of launches, nothing is excused.
    other = row_of(problem(1024, dims=(("N", 512),)), Fake("first"))
    assert compared.differing(here, {**there, other.key: other.launch()}) == [other.key]
    changed = {**there, wide().key: "third null"}
    assert compared.differing(here, changed) == [wide().key]
    # Nor that this rank lacks what the row of this run has not replaced.
    far = row_of(problem(64), Fake("first"))
    assert compared.differing(here, {**there, far.key: far.launch()}) == [far.key]


def test_a_row_of_this_run_that_is_another_here_is_a_difference(compared: Compared) -> None:
    compared.published[f"tune {H200.name} {wide().key}"] = row_to_json(wide("second"))
    there = compared.rows()
    assert compared.differing(compared.rows(wide("second")), there) == []
    assert compared.differing(compared.rows(wide("third")), there) == [wide().key]
    # One that only the first rank has: it was told of it, and this one will be.
    there = compared.rows(wide("second"))
    assert compared.differing(compared.rows(), there) == []
    there = compared.rows(wide("third"))
    assert compared.differing(compared.rows(), there) == [wide().key]


def test_ranks_that_meet_other_sizes_of_one_row_ask_under_one_name(
    first_call: Any, tuned: list[str], group: SimpleNamespace
) -> None:
    """Also where what is measured already leaves a part without the usual row count."""
    first_call()
    norm(20)
    row = in_file().rows[KEY]
    taken = replace(row, key=KEY.replace("rows=16", "rows=60"), covers=Span(50, 90), rows=60)
    Table.for_device(CPU).save(user_table_path(CPU))
    asked = []
    for order in ((40, 45, 100, 120), (45, 40, 120, 100)):
        user_table_path(CPU).unlink()
        known = Table.for_device(CPU)
        known.put(taken)
        known.save(user_table_path(CPU))
        first_call()
        group.asked.clear()
        group.answers.clear()
        for rows in order:
            norm(rows)
        asked.append(list(group.asked))
    assert asked[0] == asked[1]
    assert asked[0] == [f"tune cpu {KEY.replace('rows=16', f'rows={one}')}" for one in (49, 91)]


def test_ranks_that_differ_raise_out_of_the_call(
    monkeypatch: pytest.MonkeyPatch, first_call: Any
) -> None:
    first_call()

    def differ(*args: Any, **options: Any) -> None:
        raise RanksDisagree("ranks 0 and 1 would run different kernels")

    monkeypatch.setattr(
        sight, "entries", lambda: SimpleNamespace(store=object(), checked=frozenset())
    )
    monkeypatch.setattr(sight, "agreement", SimpleNamespace(check_equal=differ))
    with pytest.raises(RanksDisagree, match="different kernels"):
        norm()
