"""Which row counts are taken to be alike, and the line that names a problem."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from select_fakes import H200, problem

from gristmill.ops.nvfp4_linear.problem import SIZES
from gristmill.select import HINTS, Problem
from gristmill.select.problem import BUCKETS, Sizes, Span, tiled

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

ROWS = st.integers(min_value=0, max_value=1 << 40)
STOPS = st.sets(st.integers(1, 1 << 30), min_size=1, max_size=12).map(sorted).map(tuple)
SIZES_OF_ALL_KINDS = st.builds(Sizes, STOPS, st.booleans())
TILED = st.builds(
    tiled,
    st.integers(0, 6).map(lambda power: 2**power),
    st.integers(1, 64),
    st.integers(1, 1 << 17),
)


def edges(sizes: Sizes) -> list[int]:
    """Row counts at which something may change, and their neighbours."""
    spans = [sizes.span(stop) for stop in sizes.stops]
    found = {0, 1 << 40, *sizes.stops, *(span.least for span in spans)}
    found |= {span.most for span in spans if span.most is not None}
    return sorted(rows for one in found for rows in (one - 1, one, one + 1) if rows >= 0)


# stops


@given(SIZES_OF_ALL_KINDS)
def test_each_stop_is_its_own(sizes: Sizes) -> None:
    assert tuple(map(sizes.stop, sizes.stops)) == sizes.stops


@given(SIZES_OF_ALL_KINDS, ROWS, ROWS)
def test_stops_are_monotone(sizes: Sizes, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert sizes.stop(low) <= sizes.stop(high)


@given(st.integers(1, 1 << 40), STOPS)
def test_the_nearest_stop_is_so_by_ratio(rows: int, stops: tuple[int, ...]) -> None:
    def distance(stop: int) -> float:
        return abs(math.log(rows) - math.log(stop))

    # A tolerance for the logarithms only: the choice itself is exact.
    assert distance(Sizes(stops).stop(rows)) <= min(map(distance, stops)) + 1e-9


@given(ROWS, STOPS)
def test_up_is_the_next_stop_that_is_no_smaller(rows: int, stops: tuple[int, ...]) -> None:
    larger = [stop for stop in stops if stop >= rows]
    assert Sizes(stops, up=True).stop(rows) == min(larger, default=stops[-1])


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
def test_a_tie_goes_to_the_smaller_stop(rows: int, expected: int) -> None:
    assert BUCKETS.stop(rows) == expected


def test_hints_ascend() -> None:
    assert list(HINTS) == sorted(set(HINTS))
    assert Sizes(HINTS) == BUCKETS


# spans


@given(st.one_of(SIZES_OF_ALL_KINDS, TILED), ROWS)
def test_spans_divide_all_row_counts(sizes: Sizes, some: int) -> None:
    """Each begins where the last one ends, and all row counts of one have that one and its stop."""
    reached = 0
    spans = []
    while True:
        spans.append(sizes.span(reached))
        assert spans[-1].least == reached
        if spans[-1].most is None:
            break
        reached = spans[-1].most + 1
    holding = [span for span in spans if some in span]
    assert holding == [sizes.span(some)]
    for rows in edges(sizes):
        span = sizes.span(rows)
        assert rows in span
        assert span in spans
        assert sizes.stop(span.least) == sizes.stop(rows)
        assert sizes.stop(1 << 41 if span.most is None else span.most) == sizes.stop(rows)
    assert len(spans) == len(sizes.stops) + sizes.up


@given(SIZES_OF_ALL_KINDS)
def test_a_stop_lies_in_its_span(sizes: Sizes) -> None:
    for stop in sizes.stops:
        assert stop in sizes.span(stop)
        assert not sizes.up or sizes.span(stop).most == stop


@given(STOPS, st.integers(1, 1 << 40))
def test_beyond_the_last_stop_up_has_a_span_of_its_own(stops: tuple[int, ...], more: int) -> None:
    """What tiles have shown for the last one is not known to hold there."""
    assert Sizes(stops, up=True).span(stops[-1] + more) == Span(stops[-1] + 1, None)
    assert Sizes(stops).span(stops[-1] + more).least <= stops[-1]


@pytest.mark.parametrize("hints", [HINTS, (1, 16, 64, 100, 256), (7,)])
def test_spans_end_where_the_stop_changes(hints: tuple[int, ...]) -> None:
    sizes = Sizes(hints)
    for hint in hints:
        low, high = sizes.span(hint)
        assert sizes.stop(low) == hint
        assert low == 0 or sizes.stop(low - 1) != hint
        assert sizes.stop(10**9 if high is None else high) == hint
        assert high is None or sizes.stop(high + 1) != hint


@given(ROWS, ROWS, st.one_of(st.none(), ROWS))
def test_a_span_has_its_ends_and_what_lies_between(rows: int, least: int, more: int | None) -> None:
    span = Span(least, None if more is None else least + more)
    assert (rows in span) == (span.least <= rows <= span.end)
    assert least in span
    assert least - 1 not in span
    assert (span.most is None) == (1 << 60 in span)
    assert "64" not in span


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (Span(0, None), "any number of rows"),
        (Span(1, None), "any number of rows"),
        (Span(32769, None), "32769 rows and more"),
        (Span(0, 4), "up to 4 rows"),
        (Span(0, 1), "up to 1 row"),
        (Span(1, 1), "1 row"),
        (Span(3, 3), "3 rows"),
        (Span(57, 64), "57 to 64 rows"),
    ],
)
def test_a_span_in_words(span: Span, words: str) -> None:
    assert str(span) == words


# of kernels with tiles


@given(TILED)
def test_steps_of_tiles_are_few_and_small(sizes: Sizes) -> None:
    assert sizes.up
    assert list(sizes.stops) == sorted(set(sizes.stops))
    assert sizes.stops[0] == 1


@given(st.integers(64, 65536))
def test_a_step_adds_at_most_an_eighth_to_the_work(rows: int) -> None:
    more = SIZES.stop(rows) - rows
    assert more <= rows // 8
    assert rows < 128 or more <= rows // 16


def test_the_stops_of_nvfp4_linear_have_all_sizes_that_serving_captures() -> None:
    captured = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert tiled(8) == SIZES
    assert [stop for stop in SIZES.stops if stop <= 512] == captured
    assert SIZES.stops[-1] == 65536
    assert set(HINTS) <= set(SIZES.stops)
    per_octave = [sum(2**n < stop <= 2 ** (n + 1) for stop in SIZES.stops) for n in range(16)]
    assert max(per_octave) == 16
    assert len(SIZES.stops) < 200


# keys


def test_key_is_one_readable_line_that_ignores_the_order_of_flags() -> None:
    expected = "toy rows=1024 N=4096 x=bfloat16 weight=float32 llama strided"
    assert problem().key(1024) == expected
    assert problem(flags=("llama", "strided")).key(1024) == expected
    assert problem().family() == expected.replace("1024", "*")


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
    assert problem(**changes).family() != problem().family()


def test_dim_and_dtype() -> None:
    assert problem().dim("N") == 4096
    assert problem().dtype("x") == "bfloat16"
    assert problem().dtype("residual") is None
    with pytest.raises(KeyError, match=r"toy.*'K'.*only N"):
        problem().dim("K")


def test_equal_problems_on_twin_devices_are_equal() -> None:
    twin = replace(H200, index=3)
    assert problem(device=twin) == problem()
    assert hash(problem(device=twin)) == hash(problem())


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ({"layout": "strides (8, 1)"}, {"layout": ["not", "even", "hashable"]}),
        ({"sizes": BUCKETS}, {"sizes": SIZES}),
    ],
    ids=["layout", "sizes"],
)
def test_layout_and_sizes_take_no_part_in_comparisons_and_keys(
    mine: dict[str, object], others: dict[str, object]
) -> None:
    # Two calls that differ in strides alone share their failures, tables and explanations.
    one, other = problem(**mine), problem(**others)
    assert one == other
    assert hash(one) == hash(other)
    assert one.key(1024) == other.key(1024)
    assert "strides" not in repr(one)
    assert "stops" not in repr(one)


def test_a_problem_asks_for_itself_or_for_one_size_that_stands_for_all() -> None:
    assert problem().asked() == problem()
    one: Problem = problem(5, batch_invariant=True)
    assert one.asked() == problem(256, batch_invariant=True)
