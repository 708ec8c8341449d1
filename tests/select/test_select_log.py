from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from select_fakes import H200, Config, Fake, problem, row_of, table_of
from torch._subclasses.fake_tensor import FakeTensorMode

import gristmill as gm
from gristmill.errors import CompileError, CompilerUnavailable, DriverError
from gristmill.select import Device, reset_tables, resolve, use
from gristmill.select.tables import user_table_path


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, logger="gristmill"):
        yield


def told(caplog: pytest.LogCaptureFixture, level: str = "WARNING") -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def broken(name: str, error: Exception) -> Fake:
    return Fake(name, failure=error)


def test_a_fallback_says_what_where_why_and_what_runs_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolve("toy", [broken("first", DriverError("no driver")), Fake("second")], problem())
    assert told(caplog) == [
        "fallback toy: variant first cannot be built on NVIDIA H200 (sm_90a, 132 SMs), second runs "
        "instead: DriverError: no driver"
    ]


def test_what_runs_in_the_end_is_named_for_all_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = broken("first", DriverError("a")), broken("second", CompileError("b"))
    resolve("toy", [first, second, Fake("third")], problem())
    assert [("third runs instead" in line) for line in told(caplog)] == [True, True]


def test_each_reason_has_a_line_of_its_own_and_only_one(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for words in ("no libnvrtc", "nvrtc is of 2019"):
            variants = [broken("first", CompilerUnavailable(words)), Fake("second")]
            resolve("toy", variants, problem())
            resolve("toy", variants, problem(rows=1))
    lines = told(caplog)
    assert [line.partition("Unavailable: ")[2] for line in lines] == [
        "no libnvrtc",
        "nvrtc is of 2019",
    ]


def test_reasons_that_never_repeat_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        resolve("toy", [broken("first", DriverError(f"at {number}")), Fake("second")], problem())
    assert len(told(caplog)) == 16


def test_a_compilers_pages_become_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pages = "\n".join(f"norm.cu({number}): error: expected a ';'" for number in range(500))
    resolve("toy", [broken("first", CompileError(pages)), Fake("second")], problem())
    (line,) = told(caplog)
    assert "\n" not in line
    assert len(line) < 1200
    assert "norm.cu(0): error" in line


# the reference on a GPU


def test_the_reference_on_a_gpu_is_told_with_every_reason(caplog: pytest.LogCaptureFixture) -> None:
    variants = [
        Fake("first", refusal="needs N <= 128"),
        Fake("second", refusal="needs N <= 128"),
        broken("third", DriverError("no driver")),
        Fake("reference"),
    ]
    resolve("toy", variants, problem())
    resolve("toy", variants, problem(rows=7))
    fallback, slow = told(caplog)
    assert fallback.startswith("fallback toy: variant third")
    assert slow == (
        "slow toy: reference runs toy rows=1000 N=4096 x=bfloat16 weight=float32 llama strided on "
        "NVIDIA H200 (sm_90a, 132 SMs): first, second: needs N <= 128; third: cannot be built"
    )


@pytest.mark.parametrize(
    "solved",
    [
        problem(device=Device("cpu", "cpu")),
        problem(device=Device("meta", "meta")),
        problem(rows=0),
        problem(dims=(("N", 0),)),
    ],
    ids=["cpu", "meta", "no rows", "no columns"],
)
def test_elsewhere_and_of_nothing_it_is_not(
    solved: object, caplog: pytest.LogCaptureFixture
) -> None:
    resolve("toy", [Fake("first", refusal="no"), Fake("reference")], solved)  # type: ignore[arg-type]
    assert told(caplog) == []


def test_a_reference_that_is_asked_for_measured_or_alone_is_no_surprise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference = Fake("reference")
    with use("toy", "reference"):
        resolve("toy", [Fake("first", refusal="no"), reference], problem())
    resolve("toy", [reference], problem())
    table_of(row_of(problem(), reference)).save(user_table_path(H200))
    reset_tables()
    choice, _ = resolve("toy", [Fake("first"), reference], problem())
    assert choice.variant is reference
    assert told(caplog) == []


def test_fp64_is_not_meant_to_be_fast(caplog: pytest.LogCaptureFixture) -> None:
    exact = problem(dtypes=(("x", "float64"),))
    resolve("toy", [Fake("first", refusal="computes in fp32"), Fake("reference")], exact)
    assert told(caplog) == []
    assert [line[:9] for line in told(caplog, "INFO")] == ["slow toy:"]


# choices


def test_every_choice_is_a_line_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    variants = [Fake("first"), Fake("second", configured=True)]
    row = row_of(problem(), variants[1], Config(threads=64))
    table_of(row).save(user_table_path(H200))
    reset_tables()
    resolve("toy", variants, problem())
    resolve("toy", variants, problem(dims=(("N", 7),)))
    tuned, preferred = told(caplog, "DEBUG")
    assert tuned.startswith("chose toy: second threads=64 vector=16 order=")
    assert " by user table (" in tuned
    assert tuned.endswith(
        " for toy rows=1000 N=4096 x=bfloat16 weight=float32 llama strided on NVIDIA H200 (sm_90a, "
        "132 SMs)"
    )
    assert preferred.startswith(
        "chose toy: first by preference (number 1 of 2 in the order of preference) for toy "
        "rows=1000 N=7 "
    )


def test_calls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, 8)
    gm.rms_norm(x)
    assert [line[:15] for line in told(caplog, "DEBUG")] == ["chose rms_norm:"]
    caplog.clear()
    for _ in range(3):
        gm.rms_norm(x)
    assert caplog.records == []


def test_what_only_traces_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gm.rms_norm(x)

    def of_ours() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "gristmill"]

    gm.rms_norm(torch.ones(2, 8, device="meta"))
    with FakeTensorMode():
        gm.rms_norm(torch.ones(2, 8))
    program = torch.export.export(Norm(), (torch.ones(2, 8),)).module()
    assert of_ours() == []
    program(torch.ones(2, 8))
    assert [line[:15] for line in of_ours()] == ["chose rms_norm:"]
