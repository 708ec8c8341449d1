"""The named sets of shapes: what they promise, who has which, and how many problems that makes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.bench.shapes import MOST_ELEMENTS, OF_TASKS, SETS, sets_of, shapes_of
from gristmill.bench.suites import KINDS, Task, tasks
from gristmill.cli.app import app
from gristmill.errors import ArgumentError

# Problems of a full run on a GPU, by suite: docs/benchmarks.md has this table. By recorded first
# calls on an H200 the compilers of four peers take 1.5 s a problem, and of a linear layer 9.
COUNTS = {
    "rms_norm": 108,
    "layer_norm": 97,
    "softmax": 78,
    "cross_entropy": 91,
    "linear": 22,
    "nvfp4_linear": 28,
    "nvfp4_moe": 16,
    "moe": 8,
    "topk_router": 12,
}


def test_nobody_makes_a_run_longer_unawares() -> None:
    found = Counter(task.kind.suite for task in tasks("cuda")[0])
    assert dict(found) == COUNTS
    assert found.total() == 460


def test_the_page_and_the_help_name_every_set_and_count() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    shown = " ".join(
        CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output.split()
    )
    for name in SETS:
        assert f"`{name}`" in text
        assert name in shown
    lines = [line for line in text.splitlines() if line.startswith("| `") and line.endswith(" |")]
    told = {
        line.split("|")[1].strip(): int(line.split("|")[3])
        for line in lines
        if line.count("|") == 4 and line.split("|")[3].strip().isdecimal()
    }
    both = {"`nvfp4_moe`, `moe`": COUNTS["nvfp4_moe"] + COUNTS["moe"]}
    assert told == {f"`{name}`": COUNTS[name] for name in COUNTS if "moe" not in name} | both
    assert "| all | | 460 |" in text


def test_quacks_pairs() -> None:
    quack = SETS["quack"].shapes
    assert quack[0] == (32768, 256)
    assert [n for m, n in quack if m == 32768] == [2**power for power in range(8, 17)]
    assert quack[9:] == ((16384, 131072), (8192, 262144))


def test_hidden_4096_by_batch_and_sequence() -> None:
    assert SETS["hidden4096"].shapes == tuple((2**power, 4096) for power in range(13, 20))


def test_prefill_like_deepseek_v3() -> None:
    assert set(SETS["deepseek_v3"].shapes) == {
        (m, n) for m in (4096, 16384, 65536) for n in (6144, 7168, 8192)
    }


def test_vocabularies_are_those_of_models() -> None:
    real = {32000, 50257, 128256, 129280, 151936, 200064, 262144}
    assert {n for _, n in SETS["vocabularies"].shapes} == real
    assert min(m for m, _ in SETS["vocabularies"].shapes) == 1


def test_odd_sizes_are_odd() -> None:
    for rows, columns in SETS["odd"].shapes:
        assert columns % 8, (rows, columns)
    assert sum(rows % 2 for rows, _ in SETS["odd"].shapes) >= 3


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_a_set(name: str) -> None:
    one = SETS[name]
    assert one.name == name
    assert one.summary
    assert len(set(one.shapes)) == len(one.shapes)
    assert set(one.quick) <= set(one.shapes)
    if len(one.shapes[0]) == 2:
        assert max(map(math.prod, one.shapes)) <= MOST_ELEMENTS
    assert name in {used for sets in OF_TASKS.values() for used in sets}


def test_every_task_has_sets_and_a_first_look_on_both_devices() -> None:
    assert list(OF_TASKS) == list(KINDS)
    for name, sets in OF_TASKS.items():
        assert set(sets) <= set(SETS)
        assert shapes_of(name, quick="cuda"), name
        assert shapes_of(name, quick="cpu"), name


def test_a_shape_of_two_sets_is_measured_once_and_says_both() -> None:
    shapes = shapes_of("rms_norm")
    assert shapes.count((32768, 4096)) == 1
    assert Task("rms_norm", (32768, 4096), "bfloat16").sets == ["quack", "hidden4096"]
    assert sets_of("rms_norm_bwd", (32768, 4096)) == ["quack"]
    assert sets_of("rms_norm", (3, 5)) == []
    assert sets_of("nvfp4_moe", (16, 256, 8, 7168, 2048)) == ["experts"]


def test_problems_by_set() -> None:
    found, _ = tasks("cuda", suites=["rms_norm", "softmax"], sets=["decode", "scores"])
    assert {task.name for task in found} == {
        *("rms_norm", "add_rms_norm", "rms_norm_bwd"),
        *("softmax", "softmax_bwd", "softmax_causal", "softmax_causal_bwd"),
    }
    assert all(set(task.sets) & {"decode", "scores"} for task in found)
    found, _ = tasks("cuda", names=["softmax"], sets=["decode"])
    assert [task.shape for task in found] == list(SETS["decode"].shapes)
    found, _ = tasks("cpu", names=["softmax"], sets=["decode"], quick=True)
    assert [task.shape for task in found] == [(256, 4096)]


def test_sets_that_are_not_there_or_not_theirs() -> None:
    with pytest.raises(ArgumentError, match=r"unknown set of shapes 'decod' \(did you mean decode"):
        tasks("cuda", sets=["decod"])
    with pytest.raises(ArgumentError, match="rms_norm: not measured over vocabularies, but over"):
        tasks("cuda", names=["softmax", "rms_norm"], sets=["vocabularies"])
    with pytest.raises(ArgumentError, match="not measured over experts, but over router128"):
        tasks("cuda", suites=["topk_router"], sets=["experts"])
    for filters in ({"shapes": [(4, 4)]}, {"rows": [4]}, {"models": ["tiny"]}):
        with pytest.raises(ArgumentError, match="sets choose among a suite's shapes"):
            tasks("cuda", sets=["decode"], **filters)  # type: ignore[arg-type]
