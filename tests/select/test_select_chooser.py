from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from select_fakes import H200, Config, Fake, problem, row_of, table_of

from gristmill.errors import (
    CompileError,
    CompilerUnavailable,
    DriverError,
    KernelNotCached,
    UnknownVariant,
    VariantUnavailable,
)
from gristmill.select import (
    Device,
    Table,
    counters,
    ranked,
    register_variants,
    reset_tables,
    resolve,
    use,
)
from gristmill.select.tables import user_table_path
from gristmill.settings import reload_settings


def tuned(variant: Fake, config: Any = None) -> None:
    """Put `variant` into the user's table as the winner of `problem()`."""
    table_of(row_of(problem(), variant, config)).save(user_table_path(H200))
    reset_tables()


def names(variants: Sequence[Fake]) -> list[str]:
    return [choice.variant.name for choice in ranked("toy", variants, problem())]


def test_preference_is_the_order_of_the_variants_that_support_the_problem() -> None:
    variants = [
        Fake("first", refusal="needs N <= 128"),
        Fake("second", configured=True),
        Fake("reference"),
    ]
    choices = ranked("toy", variants, problem())
    assert [choice.variant.name for choice in choices] == ["second", "reference"]
    assert choices[0].config == Config(threads=128)
    assert choices[0].source == "preference"
    assert choices[0].reason == "number 2 of 3 in the order of preference"


def test_those_that_decline_come_after_all_that_do_not_and_keep_their_order() -> None:
    variants = [
        Fake("first", declined="few rows"),
        Fake("second"),
        Fake("third", declined="few rows"),
        Fake("reference"),
    ]
    assert names(variants) == ["second", "reference", "first", "third"]
    assert resolve("toy", variants, problem())[0].variant.name == "second"


def test_one_that_declines_runs_when_nothing_else_can() -> None:
    refused, failed = Fake("first", refusal="no"), Fake("second", failure=DriverError("no"))
    variants = [Fake("third", declined="slow here"), refused, failed]
    choice, plan = resolve("toy", variants, problem())
    assert (choice.variant.name, choice.source) == ("third", "preference")
    assert plan(1) == ("third", 1)


def test_one_that_declines_is_not_asked_when_it_does_not_support_the_problem() -> None:
    variants = [Fake("first", refusal="too wide", declined="slow here"), Fake("second")]
    assert names(variants) == ["second"]


def test_table_goes_before_preference_and_lists_its_variant_once() -> None:
    variants = [Fake("first"), Fake("second", configured=True), Fake("reference")]
    tuned(variants[1], Config(threads=64))
    choices = ranked("toy", variants, problem())
    assert [choice.variant.name for choice in choices] == ["second", "first", "reference"]
    assert choices[0].config == Config(threads=64)
    assert [choice.source for choice in choices] == ["user table", "preference", "preference"]


def test_stale_row_falls_back_to_preference() -> None:
    old, new = Fake("second", source="v1"), Fake("second", source="v2")
    tuned(old)
    assert names([Fake("first"), old]) == ["second", "first"]
    assert names([Fake("first"), new]) == ["first", "second"]


def test_a_measured_row_overrules_that_a_variant_declines() -> None:
    declining = Fake("third", declined="slow here")
    tuned(declining)
    choices = ranked("toy", [Fake("first"), declining], problem())
    assert [choice.variant.name for choice in choices] == ["third", "first"]
    assert choices[0].source == "user table"


def test_forced_is_the_only_choice_and_beats_the_table() -> None:
    variants = [Fake("first"), Fake("second"), Fake("third", declined="slow here")]
    tuned(variants[0])
    for name in ("second", "third"):
        with use("toy", name):
            (choice,) = ranked("toy", variants, problem())
        assert (choice.variant.name, choice.source) == (name, "forced")


def test_forced_variant_takes_its_measured_config() -> None:
    variants = [Fake("first"), Fake("second", configured=True)]
    tuned(variants[1], Config(threads=1024))
    with use("toy", "second"):
        (choice,) = ranked("toy", variants, problem())
    assert (choice.source, choice.config) == ("forced", Config(threads=1024))
    assert "config from the user table" in choice.reason


def test_forced_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_USE", "toy:second")
    reload_settings()
    assert names([Fake("first"), Fake("second")]) == ["second"]


def test_forced_and_unsupported_raises_with_the_reason() -> None:
    with (
        use("toy", "first"),
        pytest.raises(
            VariantUnavailable,
            match=r"toy: variant 'first'.*rows=1000 N=4096.*H200.*needs clusters",
        ),
    ):
        ranked("toy", [Fake("first", refusal="needs clusters"), Fake("second")], problem())


def test_forced_name_that_this_op_lacks_raises() -> None:
    register_variants("toy", ["first", "elsewhere"])
    with (
        use("toy", "elsewhere"),
        pytest.raises(UnknownVariant, match=r"toy has no variant 'elsewhere'; there are: first"),
    ):
        ranked("toy", [Fake("first")], problem())


def test_nothing_supports_it_lists_every_reason() -> None:
    variants = [Fake("first", refusal="too wide"), Fake("second", refusal="no fp64")]
    with pytest.raises(VariantUnavailable, match=r"first: too wide; second: no fp64"):
        ranked("toy", variants, problem())


def test_resolve_binds_the_first_with_its_config() -> None:
    first, second = Fake("first", configured=True), Fake("second")
    choice, plan = resolve("toy", [first, second], problem())
    assert plan(1, 2) == ("first", 1, 2)
    assert choice.variant is first
    assert first.bound == [(problem(), Config(threads=128))]
    assert second.bound == []
    assert counters()["choices"] == {"toy:first": 1}
    assert counters()["fallbacks"] == {}


FAILURES = [
    CompileError("error: expected a ';'"),
    CompilerUnavailable("install the nvrtc extra"),
    DriverError("out of resources"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_what_cannot_be_built_degrades_with_one_warning(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    variants = [Fake("first", failure=failure), Fake("second", refusal="no"), Fake("third")]
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        choice, plan = resolve("toy", variants, problem())
        resolve("toy", variants, problem(rows=1))
    assert plan() == ("third",)
    assert choice.source == "preference"
    (record,) = caplog.records
    assert "toy: variant first" in record.getMessage()
    assert str(failure) in record.getMessage()
    assert counters()["fallbacks"] == {"toy:first": 2}
    assert counters()["choices"] == {"toy:third": 2}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_forced_and_unbuildable_raises_the_reason_itself(failure: Exception) -> None:
    variants = [Fake("first", failure=failure), Fake("second")]
    with use("toy", "first"), pytest.raises(type(failure)) as caught:
        resolve("toy", variants, problem())
    assert caught.value is failure
    assert counters()["fallbacks"] == {}


def test_tuned_winner_that_cannot_be_built_degrades_to_preference() -> None:
    variants = [Fake("first"), Fake("second", failure=DriverError("no"))]
    tuned(variants[1])
    choice, _ = resolve("toy", variants, problem())
    assert (choice.variant.name, choice.source) == ("first", "preference")


@pytest.mark.parametrize("failure", [KernelNotCached("run warmup"), MemoryError("x")])
def test_a_missing_kernel_and_foreign_errors_never_degrade(failure: Exception) -> None:
    second = Fake("second")
    with pytest.raises(type(failure)):
        resolve("toy", [Fake("first", failure=failure), second], problem())
    assert second.bound == []


def test_nothing_can_be_built_names_every_failure() -> None:
    variants = [Fake("first", failure=FAILURES[0]), Fake("second", failure=FAILURES[1])]
    with pytest.raises(VariantUnavailable, match=r"first: CompileError.*second: CompilerUnav"):
        resolve("toy", variants, problem())


def test_building_in_a_capture_warns_once_and_names_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compiled, library = Fake("first", source="text"), Fake("second")
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        resolve("toy", [library], problem())
        resolve("toy", [compiled], problem(device=Device("cpu", "cpu")))
        assert caplog.records == []
        resolve("toy", [compiled], problem())
        _, plan = resolve("toy", [compiled], problem(rows=1))
    assert plan() == ("first",)
    (record,) = caplog.records
    assert "gristmill.warmup" in record.getMessage()


def test_a_device_without_tables_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked("toy", [Fake("first")], problem())

    def forbidden(*args: object) -> None:
        raise AssertionError("read the disk again")

    monkeypatch.setattr(Table, "load", forbidden)
    monkeypatch.setattr("gristmill.select.tables.user_table_path", forbidden)
    assert names([Fake("first")]) == ["first"]


# modes


def test_only_deterministic_variants_run_where_that_is_asked_for() -> None:
    variants = [Fake("first", random="adds in any order"), Fake("second")]
    assert names(variants) == ["first", "second"]
    found = ranked("toy", variants, problem(deterministic=True))
    assert [choice.variant.name for choice in found] == ["second"]
    with pytest.raises(
        VariantUnavailable,
        match=r"as asked for \(deterministic\): first: not deterministic: adds in any order",
    ):
        ranked("toy", variants[:1], problem(deterministic=True))


def test_only_batch_invariant_variants_run_where_that_is_asked_for() -> None:
    variants = [Fake("first", varies="splits long rows"), Fake("second")]
    found = ranked("toy", variants, problem(batch_invariant=True))
    assert [choice.variant.name for choice in found] == ["second"]
    both = problem(batch_invariant=True, deterministic=True)
    with pytest.raises(
        VariantUnavailable, match=r"\(deterministic and batch-invariant\): first: not batch-inv"
    ):
        ranked("toy", variants[:1], both)


@pytest.mark.parametrize(
    ("variant", "modes"),
    [
        (Fake("first", random="adds in any order"), {"deterministic": True}),
        (Fake("first", varies="splits long rows"), {"batch_invariant": True}),
    ],
)
def test_a_name_does_not_overrule_a_mode(variant: Fake, modes: dict[str, bool]) -> None:
    with use("toy", "first"), pytest.raises(VariantUnavailable, match=r"asked for by name.*not "):
        ranked("toy", [variant, Fake("second")], problem(**modes))


def test_where_rows_know_no_batch_configs_are_asked_with_one_count_and_bound_with_the_true() -> (
    None
):
    asked: list[tuple[str, int]] = []

    class Curious(Fake):
        def config(self, problem: Any) -> Any:
            asked.append(("config", problem.rows))
            return Config(threads=problem.rows)

        def declines(self, problem: Any) -> str | None:
            asked.append(("declines", problem.rows))
            return None

    curious = Curious("first", configured=True)
    plans = [resolve("toy", [curious], problem(rows, batch_invariant=True)) for rows in (1, 5000)]
    assert [choice.config for choice, _ in plans] == [Config(threads=256)] * 2
    assert [one.rows for one, _ in curious.bound] == [1, 5000]
    assert set(asked) == {("config", 256), ("declines", 256)}


def test_a_variant_promises_nothing_unless_it_says_so() -> None:
    from gristmill.select import Variant

    class Plain(Variant):
        name, summary = "plain", "nothing said"

        def supports(self, problem: Any) -> str | None:
            return None

        def bind(self, problem: Any, config: Any) -> Any:
            return lambda: None

    plain = Plain()
    assert plain.configs(problem()) == (None,)
    assert plain.indeterminate(problem()) is None
    assert "does not promise" in (plain.varies_with_batch(problem()) or "")
    assert plain.source_hash(problem(), None) == ""
