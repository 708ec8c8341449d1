"""What is tuned ahead of time: which sizes, in which order, and what is only tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tune_helpers import N

from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN, device_of
from gristmill.select.problem import HINTS
from gristmill.select.record import Recorded, described
from gristmill.select.table import Row
from gristmill.select.tables import remember
from gristmill.tune.jobs import Job, Plan, plan_by_recording, plan_by_shapes

CPU = device_of("cpu")


def told(job: Job) -> tuple[int, int, list[int], list[int]]:
    """Hint, measured size, probes, sizes asked for."""
    return (
        job.hint,
        job.size.rows,
        [size.rows for size in job.probes],
        [size.rows for size in job.asked],
    )


def by_shapes(*shapes: tuple[int, ...], op: str = "rms_norm", **options: Any) -> Plan:
    return plan_by_shapes([op], CPU, shapes=shapes, **options)


def row_at(op: str, rows: int, shape: tuple[int, ...] = (1, N)) -> Row:
    problem = OPS[op].problem(*OPS[op].example(shape, torch.bfloat16, "cpu"))
    return Row(
        problem.key(rows), "library", None, 1.0, 0.0, None, "2026-01-01", "", rows, {}, 1, "2.13"
    )


def test_a_shape_is_tuned_at_its_hint() -> None:
    assert [told(job) for job in by_shapes((64, N)).jobs] == [(64, 64, [], [])]


def test_a_size_that_is_no_hint_is_also_tried_itself() -> None:
    (job,) = by_shapes((50, N), (100, N)).jobs
    assert told(job) == (64, 64, [], [50, 100])
    assert job.key.startswith("rms_norm rows=64 N=32 ")


def test_several_hints_are_split_between_neighbours_only() -> None:
    plan = by_shapes((1, N), hints=[1, 16, 256, 1024])
    assert [told(job) for job in plan.jobs] == [
        (1, 1, [], []),
        (16, 16, [4], []),
        (256, 256, [], []),
        (1024, 1024, [512], []),
    ]
    plan = by_shapes((1, N), hints=[1, 16], probes=0)
    assert [told(job) for job in plan.jobs] == [(1, 1, [], []), (16, 16, [], [])]


def test_several_sizes_between_two_hints_are_equally_far_apart() -> None:
    plan = by_shapes((1, N), hints=[1024, 4096], probes=3)
    assert [told(job) for job in plan.jobs][1] == (4096, 4096, [1448, 2048, 2896], [])
    # Of those that there are: between 1 and 16 no ten different ones, and no hint itself.
    (_, job) = by_shapes((1, N), hints=[1, 16], probes=10).jobs
    assert [size.rows for size in job.probes] == sorted({*[size.rows for size in job.probes]})
    assert all(1 < size.rows < 16 for size in job.probes)


def test_options_take_the_place_of_the_example_s_arguments() -> None:
    (job,) = by_shapes((64, 32, 16), op="linear", options={"activation": "silu"}).jobs
    assert job.key.endswith(" silu")
    plan = by_shapes((64, N), options={"activation": "silu"})
    assert not plan.jobs
    assert "rms_norm has no argument 'activation'" in plan.notes[0]


def test_hints_that_are_none_yet_are_tried_like_shapes() -> None:
    plan = by_shapes((1, N), hints=[60, 64])
    assert [told(job) for job in plan.jobs] == [(64, 64, [], [60])]


def test_a_size_that_is_asked_for_and_in_the_middle_is_tried_once() -> None:
    plan = by_shapes((1, N), hints=[64, 128, 256])
    assert [told(job) for job in plan.jobs] == [(64, 64, [], [128]), (256, 256, [], [])]


def test_without_shapes_every_usual_length_at_every_hint() -> None:
    plan = plan_by_shapes(["rms_norm"], CPU)
    lengths = {job.size.problem.dim("N") for job in plan.jobs}
    assert len(lengths) > 10
    assert {4096, 8192} < lengths
    one = [job for job in plan.jobs if job.size.problem.dim("N") == 4096]
    assert [job.hint for job in one] == list(HINTS)
    assert [told(job)[2] for job in one] == [[], [4], [32], [128], [512], [2048], [8192], [32768]]


def test_a_bucket_that_was_split_is_tuned_again_and_split_no_further() -> None:
    """Its row may be stale, and would then be passed over with nobody to stand in for it."""
    remember(CPU, [row_at("rms_norm", 128, (1, 4096))], keep=False)
    plan = plan_by_shapes(["rms_norm"], CPU)
    one = [job for job in plan.jobs if job.size.problem.dim("N") == 4096]
    assert [job.hint for job in one] == sorted({*HINTS, 128})
    assert [told(job)[2] for job in one if job.hint in (128, 256)] == [[], []]
    assert [told(job) for job in by_shapes((120, 4096)).jobs] == [(128, 128, [], [120])]


@pytest.mark.parametrize(
    ("op", "shape", "rows"),
    [
        ("rms_norm", (3, 20, N), 60),
        ("linear", (60, 48, 64), 60),
        ("linear_cross_entropy", (60, 50, 32), 60),
        ("nvfp4_moe", (60, 4, 2, 64, 48), 60),
        ("cross_entropy_backward", (60, N), 60),
    ],
)
def test_rows_are_found_in_the_shapes_of_every_op(
    op: str, shape: tuple[int, ...], rows: int
) -> None:
    (job,) = by_shapes(shape, op=op).jobs
    assert told(job) == (64, 64, [], [rows])
    (asked,) = job.asked
    assert asked.problem.family() == job.size.problem.family()
    args = job.size.make("cpu")
    assert OPS[op].problem(*args).key(64) == job.key


def test_every_op_can_be_tuned_at_its_usual_shapes() -> None:
    plan = plan_by_shapes(list(OPS), CPU)
    assert {job.op.name for job in plan.jobs} == set(OPS)
    assert plan.notes == []
    assert len({job.key for job in plan.jobs}) == len(plan.jobs)


def test_shapes_that_make_no_sense_are_told() -> None:
    plan = plan_by_shapes(["nvfp4_linear", "rms_norm"], CPU, shapes=[(4, 31), (0, N)])
    assert [job.key.split(" ")[0] for job in plan.jobs] == ["rms_norm"]
    assert any("nvfp4_linear" in note and "multiple" in note for note in plan.notes)
    assert "rms_norm: 0x32 has no rows" in plan.notes
    with pytest.raises(ArgumentError, match=r"unknown op 'norm' .*: there are rms_norm"):
        plan_by_shapes(["norm"], CPU)


# recordings


def recorded(op: str, rows: int, **changes: Any) -> Recorded:
    args = OPS[op].example((rows, N), torch.bfloat16, "cpu")
    problem = OPS[op].problem(*args)
    one = Recorded(op, problem.key(rows), "cpu", tuple(described(args)))
    return replace(one, **changes)


def test_a_recording_is_tuned_where_it_was_met() -> None:
    plan = plan_by_recording(
        [recorded("rms_norm", rows) for rows in (3, 40, 60, 70, 100, 5000)], CPU
    )
    assert [told(job) for job in plan.jobs] == [
        (1, 3, [], []),
        (64, 60, [40, 100], []),
        (4096, 5000, [], []),
    ]
    without = plan_by_recording([recorded("rms_norm", rows) for rows in (60, 70)], CPU, split=False)
    assert [told(job) for job in without.jobs] == [(64, 60, [], [])]


def test_a_recording_of_another_gpu_is_tuned_here() -> None:
    h200 = KNOWN["sm_90a"]
    (job,) = plan_by_recording([recorded("rms_norm", 64, device=h200.name)], CPU).jobs
    assert job.size.problem.device == CPU


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.indices])
def test_indices_point_into_what_they_index(op: str) -> None:
    one = OPS[op]
    args = one.example((64, N), torch.bfloat16, "cpu")
    problem = one.problem(*args)
    line = Recorded(op, problem.key(64), "cpu", tuple(described(args)))
    (job,) = plan_by_recording([line], CPU).jobs
    made = job.size.make("cpu")
    assert one.problem(*made).key(64) == problem.key(64)
    names = [argument.name for argument in one.overload._schema.arguments]
    for name, (indexed, dim) in one.indices.items():
        values = made[names.index(name)]
        if values is not None:
            limit = made[names.index(indexed)].shape[dim]
            assert 0 <= int(values.min()) <= int(values.max()) < limit
            assert int(values.max()) > limit // 4  # and into all of it
    one.run(*made)


def test_every_op_with_integers_says_what_they_index() -> None:
    for name, op in OPS.items():
        args = op.example((64, 64), torch.bfloat16, "meta")
        names = [argument.name for argument in op.overload._schema.arguments]
        whole = [
            names[at]
            for at, value in enumerate(args)
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
        ]
        assert set(whole) <= set(op.indices), name


def test_lines_that_fit_no_op_are_told() -> None:
    bad = recorded("rms_norm", 64)
    lines = [
        replace(bad, op="no_such_op", key="a"),
        replace(bad, key="b", arguments=bad.arguments[:1]),
        replace(bad, key="c", arguments=({"dtype": "no_such"}, *bad.arguments[1:])),
        replace(bad, key="d", arguments=({"same_as": 7}, *bad.arguments[1:])),
        recorded("softmax", 64),
    ]
    plan = plan_by_recording(lines, CPU)
    assert [job.op.name for job in plan.jobs] == ["softmax"]
    assert [note[:2] for note in plan.notes] == ["a:", "b:", "c:", "d:"]
    assert "no_such_op is no op of gristmill's" in plan.notes[0]
