from __future__ import annotations

import pytest

from gristmill.bench.suites import OPS, QUICK_SHAPES, SHAPES, Task, tasks
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS as REGISTRY


def test_a_gpu_runs_every_shape_of_every_op() -> None:
    found, notes = tasks("cuda")
    assert len(found) == len(set(found)) == len(OPS) * len(SHAPES) == 42
    assert {task.dtype for task in found} == {"bfloat16"}
    assert notes == []


def test_every_task_names_an_op_that_exists() -> None:
    assert {task.op for task in tasks("cuda")[0]} <= set(REGISTRY)


def test_a_cpu_leaves_the_large_shapes_out_and_says_so() -> None:
    found, notes = tasks("cpu")
    assert Task("rms_norm", 2048, 4096, "bfloat16") in found
    assert not [task for task in found if task.rows * task.columns > 2**25]
    assert "2048x262144" in notes[0]
    assert "--shape" in notes[0]


def test_a_shape_given_by_hand_is_run_on_a_cpu_too() -> None:
    found, notes = tasks("cpu", names=["rms_norm"], shapes=[(2048, 262144)])
    assert [task.shape for task in found] == ["2048x262144"]
    assert notes == []


def test_filters() -> None:
    found, _ = tasks(
        "cuda", names=["rms_norm_bwd"], shapes=[(3, 5), (7, 9)], dtypes=["float16", "float32"]
    )
    assert [str(task) for task in found] == [
        "rms_norm_bwd 3x5 float16",
        "rms_norm_bwd 7x9 float16",
        "rms_norm_bwd 3x5 float32",
        "rms_norm_bwd 7x9 float32",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_is_a_few_shapes(device: str) -> None:
    found, notes = tasks(device, quick=True)
    assert len(found) == len(OPS) * len(QUICK_SHAPES[device]) < 15
    assert notes == []


def test_a_misspelt_op_is_guessed() -> None:
    with pytest.raises(ArgumentError, match=r"unknown op 'rms_nrom' \(did you mean rms_norm\?\)"):
        tasks("cuda", names=["rms_nrom"])


def test_an_unknown_dtype_lists_those_there_are() -> None:
    with pytest.raises(ArgumentError, match="unknown dtype 'int8': there are bfloat16"):
        tasks("cuda", dtypes=["int8"])
