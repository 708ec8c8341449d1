"""First sight where there are several ranks: one measures, all compare; the group is pretended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from select_sight import CPU, KEY, in_file, norm

import gristmill
from gristmill.errors import RanksDisagree
from gristmill.select import Table, reset_tables, sight, tables_for
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
