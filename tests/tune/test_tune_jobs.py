"""What is tuned ahead of time: which sizes, in which order, and how far they are searched."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tune_helpers import N

from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN, device_of
from gristmill.select.problem import HINTS, Span
from gristmill.select.record import Recorded, described
from gristmill.select.table import Row
from gristmill.select.tables import remember
from gristmill.tune.jobs import CAPTURE_SIZES, Family, Plan, plan_by_recording, plan_by_shapes

CPU, H200 = device_of("cpu"), KNOWN["sm_90a"]
WEIGHT = (1, 256, 128)


def told(family: Family) -> tuple[list[int], list[int]]:
    """The sizes that are measured in any case, and all that can be."""
    return list(family.asked), list(family.search.rows)


def by_shapes(*shapes: tuple[int, ...], op: str = "rms_norm", **options: Any) -> Plan:
    return plan_by_shapes([op], CPU, shapes=shapes, **options)


def row_at(op: str, rows: int, shape: tuple[int, ...] = (1, N)) -> Row:
    problem = OPS[op].problem(*OPS[op].example(shape, torch.bfloat16, "cpu"))
    return Row(
        key=problem.key(rows),
        covers=problem.sizes.span(rows),
        variant="library",
        config=None,
        us=1.0,
        spread_us=0.0,
        second=None,
        date="2026-01-01",
        source_hash="",
        rows=rows,
        times={},
        candidates=1,
        torch="2.13",
    )


# row ops: sizes go with the nearest hint


def test_a_shape_is_tuned_at_its_hint() -> None:
    (family,) = by_shapes((64, N)).families
    assert told(family) == ([64], [64])
    assert family.at(64).rows == 64
    assert family.key.startswith("rms_norm rows=* N=32 ")


def test_a_size_that_is_no_hint_is_also_measured_itself() -> None:
    (family,) = by_shapes((50, N), (100, N)).families
    assert told(family) == ([50, 64, 100], [50, 64, 100])
    # Where two of them have different winners, the switch lies in the middle by ratio.
    assert family.search.sizes.span(64) == Span(57, 80)


def test_between_two_hints_are_probes() -> None:
    (family,) = by_shapes((1, N), rows=[1, 16, 256, 1024]).families
    assert told(family) == ([1, 16, 256, 1024], [1, 4, 16, 32, 64, 128, 256, 512, 1024])
    (family,) = by_shapes((1, N), rows=[1, 16], probes=0).families
    assert told(family) == ([1, 16], [1, 16])


def test_several_sizes_between_two_hints_are_equally_far_apart() -> None:
    (family,) = by_shapes((1, N), rows=[1024, 4096], probes=3).families
    assert told(family) == ([1024, 4096], [1024, 1448, 2048, 2896, 4096])
    # Of those that there are: between 1 and 16 no ten different ones, and no hint itself.
    (family,) = by_shapes((1, N), rows=[1, 16], probes=10).families
    assert family.search.rows == tuple(sorted(set(family.search.rows)))
    assert all(1 <= rows <= 16 for rows in family.search.rows)


def test_options_take_the_place_of_the_example_s_arguments() -> None:
    (family,) = by_shapes((64, 32, 16), op="linear", options={"activation": "silu"}).families
    assert family.key.endswith(" silu")
    plan = by_shapes((64, N), options={"activation": "silu"})
    assert not plan.families
    assert "rms_norm has no argument 'activation'" in plan.notes[0]


def test_named_rows_take_the_place_of_the_shape_s() -> None:
    (family,) = by_shapes((7, N), rows=[60, 64]).families
    assert told(family) == ([60, 64], [60, 64])


def test_a_size_that_is_asked_for_and_in_the_middle_is_there_once() -> None:
    (family,) = by_shapes((1, N), rows=[64, 128, 256]).families
    assert told(family) == ([64, 128, 256], [64, 128, 256])


def test_without_shapes_every_usual_length_at_every_hint() -> None:
    plan = plan_by_shapes(["rms_norm"], CPU)
    lengths = {family.at(1).problem.dim("N") for family in plan.families}
    assert len(lengths) == len(plan.families) > 10
    assert {4096, 8192} < lengths
    (one,) = [family for family in plan.families if family.at(1).problem.dim("N") == 4096]
    probes = {4, 32, 128, 512, 2048, 8192, 32768}
    assert told(one) == (list(HINTS), sorted({*HINTS, *probes}))


def test_a_switch_that_a_table_knows_can_be_measured_again() -> None:
    """Its row may be stale, and would then be passed over with nothing in its place."""
    remember(CPU, [row_at("rms_norm", 100, (1, 4096))], keep=False)
    plan = plan_by_shapes(["rms_norm"], CPU)
    (one,) = [family for family in plan.families if family.at(1).problem.dim("N") == 4096]
    assert 100 in one.search.rows
    assert told(by_shapes((120, 4096)).families[0]) == ([64, 120], [64, 100, 120])


# kernels that tile the rows: sizes go with the next stop


def test_a_shape_of_a_kernel_with_tiles_is_measured_at_its_own_rows() -> None:
    (family,) = by_shapes((60, *WEIGHT[1:]), op="nvfp4_linear").families
    assert told(family) == ([60], [60])
    assert family.search.sizes.span(60) == Span(57, 64)


def test_between_two_sizes_are_all_stops() -> None:
    (family,) = by_shapes(WEIGHT, op="nvfp4_linear", rows=[4, 30, 60]).families
    assert told(family) == ([4, 30, 60], [4, 8, 16, 24, 30, 40, 48, 56, 60])


def test_of_sizes_with_the_same_tiles_the_largest_is_measured() -> None:
    (family,) = by_shapes(WEIGHT, op="nvfp4_linear", rows=[57, 60, 64, 65]).families
    assert told(family) == ([64, 65], [64, 65])
    last = 65536
    rows = [last, last + 1, 2 * last]
    (family,) = by_shapes(WEIGHT, op="nvfp4_linear", rows=rows).families
    assert told(family) == ([last, 2 * last], [last, 2 * last])


def test_capture_sizes_are_searched_between_the_first_and_the_last() -> None:
    sizes = CAPTURE_SIZES["vllm"]
    assert len(sizes) == 51
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-2:] == (496, 512)
    (family,) = by_shapes(WEIGHT, op="nvfp4_linear", within=sizes).families
    assert told(family) == ([1, 512], list(sizes))
    (family,) = by_shapes((1, N), within=[40, 3, 100]).families
    assert told(family) == ([3, 100], [3, 40, 100])
    # Hints that are no such sizes bound what these hold for.
    assert family.search.sizes.span(40) == Span(26, 50)


def test_rows_and_capture_sizes_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="both name row counts"):
        by_shapes((1, N), rows=[1], within=[1, 2])


# all ops


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
    (family,) = by_shapes(shape, op=op).families
    assert told(family) == ([rows, 64], [rows, 64])
    for size in (family.at(rows), family.at(64)):
        assert size.problem.family() == family.key
        args = size.make("cpu")
        assert OPS[op].problem(*args) == size.problem
    # A shape's own arguments, with all its leading dims, not those of the same number of rows.
    assert (
        family.at(rows).make("meta")[0].shape
        == OPS[op].example(shape, torch.bfloat16, "meta")[0].shape
    )


def test_every_op_can_be_tuned_at_its_usual_shapes() -> None:
    plan = plan_by_shapes(list(OPS), CPU)
    assert {family.op.name for family in plan.families} == set(OPS)
    assert plan.notes == []
    assert len({family.key for family in plan.families}) == len(plan.families)
    for family in plan.families:
        assert set(family.asked) <= set(family.search.rows)
        assert family.asked == tuple(sorted(family.asked))
        spans = [family.search.sizes.span(rows) for rows in family.search.rows]
        assert len(set(spans)) == len(spans), family.key


def test_shapes_that_make_no_sense_are_told() -> None:
    plan = plan_by_shapes(["nvfp4_linear", "rms_norm"], CPU, shapes=[(4, 31), (0, N)])
    assert [family.key.split(" ")[0] for family in plan.families] == ["rms_norm"]
    assert any("nvfp4_linear" in note and "multiple" in note for note in plan.notes)
    assert "rms_norm: 0x32 has no rows" in plan.notes
    with pytest.raises(ArgumentError, match=r"unknown op 'norm' .*: there are rms_norm"):
        plan_by_shapes(["norm"], CPU)


def test_sizes_that_cannot_be_made_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    example = OPS["rms_norm"].example

    def make(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        if shape[0] in (64, 128):
            raise ArgumentError("no such thing")
        return example(shape, dtype, device)

    monkeypatch.setattr(OPS["rms_norm"], "example", make)
    plan = by_shapes((1, N), rows=[16, 64, 256])
    assert [told(family) for family in plan.families] == [([16, 256], [16, 32, 256])]
    assert plan.notes == ["rms_norm: 1x32 cannot have 64 rows"]
    plan = by_shapes((1, N), within=[16, 32, 64])
    assert [told(family) for family in plan.families] == [([16, 32], [16, 32])]
    plan = by_shapes((1, N), rows=[64])
    assert (plan.families, plan.notes) == ([], ["rms_norm: 1x32 cannot have 64 rows"])


# recordings


def recorded(op: str, rows: int, **changes: Any) -> Recorded:
    args = OPS[op].example((rows, N), torch.bfloat16, "cpu")
    problem = OPS[op].problem(*args)
    one = Recorded(op, problem.key(rows), "cpu", tuple(described(args)))
    return replace(one, **changes)


def test_a_recording_is_tuned_where_it_was_met() -> None:
    rows = (3, 40, 60, 70, 100, 5000)
    (family,) = plan_by_recording([recorded("rms_norm", one) for one in rows], CPU).families
    assert told(family) == ([3, 5000], list(rows))
    assert family.split
    # Recorded sizes count as stops, and so do the hints between them.
    assert family.search.sizes.span(70) == Span(67, 83)
    (family,) = plan_by_recording(
        [recorded("rms_norm", rows) for rows in (60, 70, 80)], CPU, split=False
    ).families
    assert told(family)[0] == [60, 80]
    assert not family.split
    (family,) = plan_by_recording([recorded("rms_norm", 60)], CPU).families
    assert told(family) == ([60], [60])


def test_recorded_sizes_that_are_close_together_are_one() -> None:
    lines = [recorded("rms_norm", rows) for rows in range(33, 70)]
    (family,) = plan_by_recording(lines, CPU).families
    assert told(family) == ([33, 69], [33, 40, 48, 56, 64, 69])


def test_a_recording_of_thousands_of_sizes_is_planned_at_once() -> None:
    one = recorded("rms_norm", 64)
    lines = []
    for rows in range(1, 5001):
        first, *others = one.arguments
        lines.append(replace(one, arguments=({**first, "shape": [rows, N]}, *others)))
    begun = time.monotonic()
    (family,) = plan_by_recording(lines, CPU).families
    assert time.monotonic() - begun < 20
    assert family.asked == (1, 5000)
    assert len(family.search.rows) < 120


def test_a_recording_of_another_gpu_is_tuned_here() -> None:
    (family,) = plan_by_recording([recorded("rms_norm", 64, device=H200.name)], CPU).families
    assert family.at(64).problem.device == CPU


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.indices])
def test_indices_point_into_what_they_index(op: str) -> None:
    one = OPS[op]
    args = one.example((64, N), torch.bfloat16, "cpu")
    problem = one.problem(*args)
    line = Recorded(op, problem.key(64), "cpu", tuple(described(args)))
    (family,) = plan_by_recording([line], CPU).families
    made = family.at(64).make("cpu")
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
    assert [family.op.name for family in plan.families] == ["softmax"]
    assert [note[:2] for note in plan.notes] == ["a:", "b:", "c:", "d:"]
    assert "no_such_op is no op of gristmill's" in plan.notes[0]
