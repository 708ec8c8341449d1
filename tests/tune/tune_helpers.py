"""What the tests of tuning share: times known beforehand, and a look into tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.ops.registry import OPS
from gristmill.select.chooser import Choice, ranked
from gristmill.select.device import device_of
from gristmill.select.problem import Problem
from gristmill.select.table import Table
from gristmill.select.tables import user_table_path
from gristmill.select.timing import Timing
from gristmill.select.variant import Variant

Times = Callable[[str, int], float]

N = 32


def fake_times(monkeypatch: pytest.MonkeyPatch, times: Times) -> list[tuple[int, list[str]]]:
    """Let `times(candidate, rows)` be what is measured; gives a list of what was asked to run.

    The functions do run once, on the arguments that they would be timed on.
    """
    asked: list[tuple[int, list[str]]] = []

    def time_interleaved(
        functions: dict[str, Any], sets: list[Any], **options: Any
    ) -> dict[str, Timing]:
        rows = next(value for value in sets[0] if isinstance(value, torch.Tensor)).shape[0]
        asked.append((rows, list(functions)))
        for function in functions.values():
            function(*sets[0])
        return {name: Timing(times(name, rows), 0.0, 9, "wall") for name in functions}

    monkeypatch.setattr("gristmill.select.tuning.time_interleaved", time_interleaved)
    return asked


def user_table() -> Table:
    """What the user's file for the CPU holds."""
    return Table.load(user_table_path(device_of("cpu")))


def table_rows(path: Path | None = None) -> dict[str, str]:
    """The words of a table: "rms_norm rows=64" -> the variant that won there."""
    table = user_table() if path is None else Table.load(path)
    return {" ".join(row.key.split(" ")[:2]): row.variant for row in table.rows.values()}


def choice_of(op_name: str, rows: int) -> Choice:
    op = OPS[op_name]
    args = op.example((rows, N), torch.bfloat16, "cpu")
    return ranked(op.name, op.variants, op.problem(*args))[0]


def chosen(op_name: str, rows: int) -> str:
    """The variant that a call of so many rows would run now, on the CPU."""
    return choice_of(op_name, rows).variant.name


def chosen_source(op_name: str, rows: int) -> str:
    """Where that choice comes from."""
    return choice_of(op_name, rows).source


@dataclass(frozen=True)
class Launch:
    number: int


class Planted(Variant):
    """A variant with a few launches, of which `rule` says by the rows which is the usual one."""

    name = "planted"
    summary = "compiles and computes nothing"
    config_type = Launch

    def __init__(self, rule: Callable[[int], int], launches: int) -> None:
        self.rule, self.launches = rule, launches

    def launch(self, number: int) -> Launch:
        return Launch(number)

    def supports(self, problem: Problem) -> str | None:
        return None

    def config(self, problem: Problem) -> Launch:
        return Launch(self.rule(problem.rows))

    def configs(self, problem: Problem) -> Sequence[Launch]:
        others = [Launch(number) for number in range(self.launches)]
        return list(dict.fromkeys([self.config(problem), *others]))

    def bind(self, problem: Problem, config: Launch) -> Callable[..., Any]:
        return lambda *args: args[0]


def planted_op(rule: Callable[[int], int], launches: int = 4) -> Any:
    """As much of an op as tuning needs."""
    return SimpleNamespace(name="toy", variants=(Planted(rule, launches),))


def planted_on_rms_norm(
    monkeypatch: pytest.MonkeyPatch, rule: Callable[[int], int], launches: int = 4
) -> Planted:
    """Let rms_norm have one variant, of several launches."""
    variant = Planted(rule, launches)
    monkeypatch.setattr(OPS["rms_norm"], "variants", (variant,))
    return variant
