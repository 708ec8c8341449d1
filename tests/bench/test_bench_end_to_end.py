"""The suite `end_to_end`: its rows, its tables, and what becomes of what is wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gristmill.bench.end_to_end import decoding, training
from gristmill.bench.end_to_end import suite as end_to_end
from gristmill.bench.end_to_end.model import LLAMA, TINY, TINY_MIXTURE, Pieces, Sizes
from gristmill.bench.end_to_end.pieces import (
    DECODING,
    TORCH,
    TRAINING,
    TRAINING_BLOCK,
    Implementation,
)
from gristmill.bench.end_to_end.problem import Problem
from gristmill.bench.results import OURS, Results, Row
from gristmill.cli.app import app
from gristmill.errors import ArgumentError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRAINED = Problem("training", TINY, 2, 12, TRAINING)
BLOCK = Problem("training_block", TINY, 2, 12, TRAINING_BLOCK)
DECODED = Problem("decoding", TINY, 3, 20, DECODING)
MIXED = Problem("decoding_moe", TINY_MIXTURE, 3, 20, DECODING)
# Of a whole result, by norms: what bf16 does to it on the way, doubled.
ROUNDED = 0.02


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return TORCH.norm(x, weight) * 2


def unseen(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return TORCH.add_norm(x, torch.zeros_like(residual), weight)


def raises(both: Tensor) -> Tensor:
    raise RuntimeError("no such kernel\nand more")


def named(name: str, pieces: Pieces) -> Implementation:
    return Implementation(name, OURS, lambda: pieces)


@pytest.mark.parametrize("problem", [TRAINED, BLOCK, DECODED, MIXED], ids=lambda one: one.op)
def test_one_that_is_wrong_or_raises_is_reported_and_not_timed(problem: Problem) -> None:
    wrong = named("wrong", TORCH._replace(norm=doubled, add_norm=unseen))
    broken = named("broken", TORCH._replace(norm=raises, add_norm=raises))
    those = (wrong, *problem.implementations[:1], broken)
    way = training if problem.is_training else decoding
    rows = {
        row["impl"]: row for row in way.measure(replace(problem, implementations=those), CPU, 2)
    }
    assert list(rows) == ["wrong", "eager", "broken"]
    assert rows["eager"]["error"] is None
    assert rows["eager"]["ms"] > 0
    assert rows["wrong"]["error"].startswith("WrongResultError: ")
    assert " is off by " in rows["wrong"]["error"] or "the loss is " in rows["wrong"]["error"]
    assert rows["broken"]["error"].startswith(("RuntimeError: no such kernel", "TypeError: "))
    assert not {"ms", "spread_ms"} & (set(rows["wrong"]) | set(rows["broken"]))


def test_what_another_one_wrote_to_the_cache_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that attends to the cache without writing to it would get away with it otherwise."""

    def measured() -> list[Row]:
        both = replace(DECODED, implementations=DECODED.implementations[::2][:2])
        return decoding.measure(both, CPU, 1)

    assert [(row["impl"], row["error"]) for row in measured()] == [
        ("eager", None),
        ("gristmill", None),
    ]
    writes = iter((True, True, True, False))  # a check and two sets of the first, then the other

    def run(block: Any, x: Tensor, residual: Tensor, rotary: Any, cache: Any) -> Any:
        if not next(writes, True):
            cache = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
        return block(x, residual, rotary, cache)

    monkeypatch.setattr(decoding, "_run", run)
    rows = measured()
    assert rows[0]["error"] is None
    assert rows[1]["error"].startswith("WrongResultError: key: ")


def test_a_step_that_fails_while_it_is_timed_leaves_the_others() -> None:
    calls = []

    def fails() -> dict[str, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return {}

    found = training.time_steps({"fails": fails, "runs": dict}, CPU, 4)
    assert isinstance(found["fails"], RuntimeError)
    assert len(calls) == 3
    assert not isinstance(found["runs"], Exception)
    assert (found["runs"]["repeats"], found["runs"]["method"]) == (4, "wall")


@pytest.fixture(scope="module")
def measured() -> Results:
    results = Results({})
    told: list[str] = []
    end_to_end.run(CPU, results, told.append, samples=2, quick=False)
    assert len(told) == end_to_end.steps(CPU, quick=False)
    assert told[0] == "end_to_end training, 2x32"
    return results


def test_rows(measured: Results) -> None:
    assert measured.failures() == []
    assert measured.timed() == []  # those of kernels are others
    ops = dict.fromkeys(row["op"] for row in measured.rows)
    assert tuple(ops) == end_to_end.OPS
    for row in measured.rows:
        assert row["suite"] == "end_to_end"
        assert row["dtype"] == "bfloat16"
        assert row["ours"] is row["impl"].startswith("gristmill")
        assert row["peer"] == ("gristmill" if row["ours"] else row["impl"])
        assert min(row["ms"], row["first_call_s"]) > 0
        assert row["spread_ms"] >= 0
        assert row["repeats"] == 2
        assert 0 < row["fp64_error"] < ROUNDED
        if row["op"].startswith("training"):
            assert (row["M"], row["batch"], row["length"], row["shape"]) == (64, 2, 32, "2x32")
            assert row["tokens_per_s"] == pytest.approx(64e3 / row["ms"], rel=0.01)
            assert "peak_gib" not in row  # there is no GPU to ask
        else:
            assert row["M"] == row["batch"]
            assert row["shape"] == f"batch {row['batch']}, 32 cached"
            assert row["bytes"] > 0
            assert "roof_share" not in row
    quantised = [row for row in measured.rows if row["impl"] == "gristmill_nvfp4"]
    assert [(row["op"], row["batch"]) for row in quantised] == [
        ("decoding", 1),
        ("decoding", 4),
        ("decoding_moe", 1),
        ("decoding_moe", 4),
    ]
    assert "CUDA-graph replay" in measured.meta["methods"]["end_to_end"]
    assert "liger" in measured.meta["missing_peers"]
    assert measured.meta["peers"] == {"eager": torch.__version__}
    assert any("tiny blocks" in note for note in measured.meta["notes"])


def test_what_is_there_is_not_measured_again(
    measured: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [row for row in measured.rows if (row["op"], row["batch"]) != ("decoding", 4)]
    partial = Results(copy.deepcopy(measured.meta), list(kept))
    asked: list[Problem] = []

    def measure(problem: Problem, device: torch.device, samples: int) -> list[Row]:
        asked.append(problem)
        return [{"op": "new"}]

    monkeypatch.setattr(decoding, "measure", measure)
    monkeypatch.setattr(training, "measure", measure)
    told: list[str] = []
    end_to_end.run(CPU, partial, told.append, samples=2, quick=False)
    assert [(one.op, one.batch) for one in asked] == [("decoding", 4)]
    assert len(told) == end_to_end.steps(CPU, quick=False)
    assert partial.rows == [*kept, {"op": "new"}]
    assert partial.meta["notes"] == measured.meta["notes"]
    # One implementation less, and its problem is measured again.
    partial = Results({}, [row for row in measured.rows if row is not measured.rows[1]])
    end_to_end.run(CPU, partial, told.append, samples=2, quick=False)
    assert [(one.op, one.batch) for one in asked[1:]] == [("training", 2)]


def test_a_problem_that_fails_as_a_whole_has_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(problem: Problem, data: Any) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("tried to allocate everything\nin vain")

    monkeypatch.setattr(training, "expectation", fails)
    results = Results({})
    chosen = ["eager", "gristmill"]
    ops = ["training", "decoding"]
    end_to_end.run(
        CPU,
        results,
        lambda _: None,
        samples=1,
        quick=True,
        ops=ops,
        implementations=chosen,
        batches=(),
    )
    errors = [(row["op"], row["impl"], row["error"]) for row in results.rows]
    reason = "OutOfMemoryError: tried to allocate everything"
    assert errors == [
        *(("training", name, reason) for name in chosen),
        *(("decoding", name, None) for _ in (1, 4) for name in chosen),
    ]
    assert all("ms" not in row for row in results.rows[:2])


def test_what_is_chosen() -> None:
    names = {(one.op, one.batch): [each.name for each in one.implementations] for one in on_a_gpu()}
    assert list(names) == [
        *(("training", 2), ("training_block", 2)),
        *(("decoding", 1), ("decoding", 16), ("decoding", 64)),
        *(("decoding_moe", 1), ("decoding_moe", 64)),
    ]
    assert names["decoding", 16] == [one.name for one in DECODING]
    assert set(names["training", 2]) >= {"eager", "inductor", "gristmill_linear_loss"}
    assert {one.sizes for one in on_a_gpu(ops=["training", "decoding"])} == {LLAMA}
    quick = on_a_gpu(quick=True)
    assert [(one.op, one.batch) for one in quick] == [
        *(("training", 2), ("decoding", 1), ("decoding", 64))
    ]
    one = on_a_gpu(ops=["decoding"], batches=[7], implementations=["eager", "gristmill_nvfp4"])
    assert [(each.shape, len(each.implementations)) for each in one] == [
        ("batch 7, 1024 cached", 2)
    ]
    assert on_a_gpu(ops=["training"], batches=[7]) == []
    # On a CPU nothing is compiled unless it is asked for.
    there = {each.name for each in end_to_end.problems(CPU, False)[0].implementations}
    assert there == {"eager", "gristmill", "gristmill_linear_loss"}
    asked = end_to_end.problems(CPU, False, implementations=["inductor"])
    assert {each.name for one in asked for each in one.implementations} == {"inductor"}


def on_a_gpu(*, quick: bool = False, **filters: Any) -> list[Problem]:
    return end_to_end.problems(CUDA, quick, **filters)


def test_unknown_names() -> None:
    with pytest.raises(ArgumentError, match=r"unknown op 'decode' \(did you mean decoding\?\)"):
        end_to_end.steps(CPU, False, ops=["decode"])
    with pytest.raises(ArgumentError, match="did you mean gristmill_nvfp4"):
        end_to_end.steps(CPU, False, implementations=["gristmill_nvfp"])


# ------------------------------------------------------------------------------------------ tables


def row(op: str, batch: int, impl: str, **others: Any) -> Row:
    problem = replace(TRAINED if op == "training" else DECODED, op=op, batch=batch)
    ours = Implementation(impl, OURS, lambda: TORCH)
    return {**problem.row_of(ours), **others}


def test_tables() -> None:
    rows = [
        row("training", 2, "eager", ms=40.0, tokens_per_s=2000, peak_gib=10.5, fp64_error=0.004),
        row("training", 2, "inductor", ms=30.0, first_call_s=12.5),
        row("training", 2, "gristmill", error="WrongResultError: far off"),
        row("decoding", 1, "eager", ms=0.12, roof_share=0.8, fp64_error=0.003),
        row("decoding", 1, "gristmill", ms=0.1, roof_share=0.96, fp64_error=0.001),
        row("decoding", 16, "gristmill", ms=0.2, roof_share=0.5, fp64_error=0.002),
        row("decoding", 16, "eager", ms=0.1, roof_share=0.9),
        {"suite": "vllm", "op": "llama", "impl": "bf16"},
    ]
    (title, grid), (other_title, other) = end_to_end.tables(rows)
    assert (
        title == "end to end, training one block with head and loss, tiny, 2x12 tokens: ms a step"
    )
    assert grid == (
        *[
            [
                *("what runs", "ms", "vs eager", "vs inductor"),
                *("tokens/s", "peak GiB", "error", "first call s"),
            ]
        ],
        [
            ["eager", "40.0", "1.00x", "0.75x", "2,000", "10.5", "0.4%", ""],
            ["inductor", "30.0", "1.33x", "1.00x", "", "", "", "12.5"],
            ["gristmill", "failed", "", "", "", "", "", ""],
        ],
    )
    assert other_title == "end to end, decoding by one block, tiny, 20 cached: µs a step"
    header, body = other
    assert header == [
        *("what runs", "batch 1", "batch 16", "vs eager, 1", "vs eager, 16"),
        *("of roof, 1", "of roof, 16", "error"),
    ]
    assert body == [
        ["eager", "120", "100", "1.00x", "1.00x", "80%", "90%", "0.3%"],
        ["gristmill", "100", "200", "1.20x", "0.50x", "96%", "50%", "0.2%"],
    ]
    assert end_to_end.tables([]) == []
    # Without a GPU nobody has a peak of memory, nor a roof.
    (_, (training_header, _)), (_, (decoding_header, lines)) = end_to_end.tables(
        [row("training", 2, "eager", ms=1.0), row("decoding", 1, "eager", ms=1.0)]
    )
    assert "peak GiB" not in training_header
    assert decoding_header == ["what runs", "batch 1", "vs eager, 1", "error"]
    assert lines == [["eager", "1,000", "1.00x", ""]]


def test_the_command_prints_the_tables() -> None:
    words = ["bench", "end_to_end", "--op", "decoding", "--impls", "eager,gristmill_nvfp4"]
    result = CliRunner().invoke(app, [*words, "--batches", "2", "--samples", "1"])
    assert result.exit_code == 0, result.output
    assert "decoding by one block, tiny, 32 cached" in result.output
    assert "gristmill_nvfp4" in result.output
    result = CliRunner().invoke(app, ["bench", "end_to_end", "--impls", "gristmil"])
    assert result.exit_code == 2
    assert "did you mean gristmill?" in result.output


# Large enough that a few dozen copies do not fit into an L2 cache.
MIDDLE = Sizes("middle", 1024, 8, 2, 128, 4096, 8192)
MIDDLE_MIXTURE = Sizes("middle-moe", 1024, 8, 2, 128, 512, 8192, experts=16, chosen=4)


@pytest.mark.gpu
def test_steps_of_decoding_are_captured() -> None:
    for problem, sizes in ((DECODED, MIDDLE), (MIXED, MIDDLE_MIXTURE)):
        torch._dynamo.reset()
        rows = decoding.measure(replace(problem, sizes=sizes), CUDA, 2)
        assert [row["error"] for row in rows] == [None] * len(DECODING)
        assert {row["method"] for row in rows} == {"graph"}
        assert all(row["roof_share"] > 0 for row in rows)


@pytest.mark.gpu
def test_steps_of_training_have_a_peak() -> None:
    ours = tuple(one for one in TRAINING if one.peer != "liger")
    torch._dynamo.reset()
    problem = replace(TRAINED, sizes=MIDDLE, length=256, implementations=ours)
    rows = training.measure(problem, CUDA, 2)
    assert [row["error"] for row in rows] == [None] * len(ours)
    assert {row["method"] for row in rows} == {"events"}
    assert all(row["peak_gib"] > 0 for row in rows)
