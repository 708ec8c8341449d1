from __future__ import annotations

import math

import pytest
from select_fakes import H200, problem

from gristmill.select import HINTS, bucket

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

ROWS = st.integers(min_value=0, max_value=1 << 40)
SOME_HINTS = st.sets(st.integers(1, 1 << 30), min_size=1, max_size=12).map(sorted)


@hypothesis.given(SOME_HINTS)
def test_each_hint_is_its_own_bucket(hints: list[int]) -> None:
    assert [bucket(hint, hints) for hint in hints] == hints


@hypothesis.given(ROWS, ROWS)
def test_bucket_is_monotone(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert bucket(low) <= bucket(high)


@hypothesis.given(st.integers(1, 1 << 40), SOME_HINTS)
def test_bucket_is_nearest_in_log_space(rows: int, hints: list[int]) -> None:
    def distance(hint: int) -> float:
        return abs(math.log(rows) - math.log(hint))

    # A tolerance for the logarithms only: bucket itself is exact.
    assert distance(bucket(rows, hints)) <= min(map(distance, hints)) + 1e-9


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, 1),
        (1, 1),
        (4, 1),
        (5, 16),
        (32, 16),
        (33, 64),
        (2048, 1024),
        (2049, 4096),
        (10**9, 65536),
    ],
)
def test_bucket_breaks_ties_towards_the_smaller(rows: int, expected: int) -> None:
    assert bucket(rows) == expected


def test_hints_ascend() -> None:
    assert list(HINTS) == sorted(set(HINTS))


def test_key_is_one_readable_line_that_ignores_the_order_of_flags() -> None:
    expected = "toy rows=1024 N=4096 x=bfloat16 weight=float32 llama strided"
    assert problem().key(1024) == expected
    assert problem(flags=("llama", "strided")).key(1024) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "other"},
        {"dims": (("N", 8192),)},
        {"dtypes": (("x", "bfloat16"),)},
        {"dtypes": (("x", "float16"), ("weight", "float32"))},
        {"flags": ()},
    ],
)
def test_key_tells_problems_apart(changes: dict[str, object]) -> None:
    assert problem(**changes).key(64) != problem().key(64)


def test_dim_and_dtype() -> None:
    assert problem().dim("N") == 4096
    assert problem().dtype("x") == "bfloat16"
    assert problem().dtype("residual") is None
    with pytest.raises(KeyError, match=r"toy.*'K'.*only N"):
        problem().dim("K")


def test_equal_problems_on_twin_devices_are_equal() -> None:
    from dataclasses import replace

    twin = replace(H200, index=3)
    assert problem(device=twin) == problem()
    assert hash(problem(device=twin)) == hash(problem())


def test_layout_takes_no_part_in_comparisons_and_keys() -> None:
    # Two calls that differ in strides alone share their failures, tables and explanations.
    one, other = problem(layout="strides (8, 1)"), problem(layout=["not", "even", "hashable"])
    assert one == other
    assert hash(one) == hash(other)
    assert one.key(1024) == other.key(1024)
    assert "strides" not in repr(one)
