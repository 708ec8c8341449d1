"""Sizes and weights drawn at random: by a seed, within their ranges, off the tuned sizes."""

from __future__ import annotations

import math
from random import Random

import pytest

from gristmill.bench.regret.families import KINDS, points
from gristmill.bench.regret.sampling import (
    GRID,
    K_RANGE,
    LEAST_ELEMENTS,
    MOST_ELEMENTS,
    N_RANGE,
    NAMED,
    NAMED_WEIGHTS,
    QUICK,
    Sampling,
    drawn_rows,
    drawn_weight,
    is_tuned,
)
from gristmill.select.device import KNOWN
from gristmill.select.problem import HINTS, tiled
from gristmill.select.tables import tables_for


@pytest.mark.parametrize("count", [1, 2, 3, 8, 24, 200])
@pytest.mark.parametrize("seed", range(20))
def test_drawn_rows_are_different_and_off_the_tuned_sizes(count: int, seed: int) -> None:
    rows = drawn_rows(Random(seed), count)
    assert len(rows) == len(set(rows)) == count
    assert list(rows) == sorted(rows)
    assert not set(rows) & {*HINTS, *tiled().stops}
    far = [size for size in rows if size > 512]
    assert len(far) == (max(1, count // 4) if count > 1 else 0)
    assert 3 <= min(rows) <= 512
    assert max(rows) <= 4096


def test_drawn_rows_are_log_uniform() -> None:
    """Of eight sizes six are up to 512, one in each sixth of the log range."""
    every = [drawn_rows(Random(seed), 8) for seed in range(400)]
    near = [size for rows in every for size in rows if size <= 512]
    assert len(near) == 6 * len(every)
    share = math.log(513 / 3) / 6
    for at in range(1, 6):
        edge = 3 * math.exp(at * share)
        part = sum(size < edge for size in near) / len(near)
        assert part == pytest.approx(at / 6, abs=0.03)
    far = [size for rows in every for size in rows if size > 512]
    middle = sum(size <= math.sqrt(513 * 4096) for size in far) / len(far)
    assert middle == pytest.approx(0.5, abs=0.06)


def test_a_seed_gives_the_same_problems_and_another_gives_others() -> None:
    first, again, other = (Sampling(seed=seed) for seed in (1, 1, 2))
    assert first.drawn() == again.drawn() != other.drawn()
    assert first.rows((4096, 4096)) == again.rows((4096, 4096)) != other.rows((4096, 4096))
    # Weight by weight: no two have the same sizes.
    assert len({first.rows(layer) for layer in NAMED_WEIGHTS}) > len(NAMED_WEIGHTS) - 2


def test_the_default_draw_is_the_same_everywhere() -> None:
    """In every process and version of Python; a change here makes runs incomparable."""
    assert Sampling().rows((4096, 4096)) == (5, 11, 22, 65, 107, 453, 764, 1791)
    assert Sampling(weights=2).drawn() == ((576, 9536), (46784, 896))


def test_what_is_drawn_for_a_weight_does_not_depend_on_what_else_is_measured() -> None:
    alone = {str(point) for point in points("cuda", names=["nvfp4_linear_fp8"])}
    every = {str(point) for point in points("cuda") if point.family.name == "nvfp4_linear_fp8"}
    assert alone == every
    assert Sampling(weights=12).drawn()[:8] == Sampling(weights=8).drawn()


def test_drawn_weights_are_within_their_ranges() -> None:
    random = Random(0)
    for _ in range(2000):
        n, k = drawn_weight(random)
        assert n % 64 == k % 64 == 0
        assert N_RANGE[0] <= n <= N_RANGE[1]
        assert K_RANGE[0] <= k <= K_RANGE[1]
        assert LEAST_ELEMENTS <= n * k <= MOST_ELEMENTS
    found = Sampling(weights=50).drawn()
    assert len(set(found)) == 50
    assert not set(found) & set(NAMED_WEIGHTS)


def test_a_weight_that_has_a_name_is_not_drawn() -> None:
    first, *rest = Sampling(weights=3).drawn()
    assert Sampling(weights=2).drawn([first]) == tuple(rest)


def test_some_weights_are_in_the_shipped_table_and_some_are_not() -> None:
    (shipped,) = [source for source in tables_for(KNOWN["sm_90a"]) if source.shipped]
    families = {row.family for row in shipped.table.rows.values()}

    def in_table(layer: tuple[int, int]) -> bool:
        return any(f"N={layer[0]} K={layer[1]} " in family for family in families)

    named = [in_table(layer) for layer in NAMED_WEIGHTS]
    assert 8 <= sum(named) <= len(named) - 6
    quick = [in_table(layer) for layer in KINDS["nvfp4_linear"].quick]
    assert any(quick)
    assert not all(quick)
    assert not any(in_table(layer) for layer in Sampling().drawn())
    assert list(NAMED) == ["llama3_8b", "llama3_70b", "qwen3_14b", "qwen3_32b", "mistral_small"]


def test_the_grid() -> None:
    assert all(is_tuned(size) for size in GRID)
    assert GRID[:6] == (1, 2, 4, 8, 16, 24)
    assert GRID[-6:] == (504, 512, 768, 1024, 2048, 4096)
    assert len(GRID) == 71
    drawn = set(Sampling().rows((4096, 4096)))
    assert set(Sampling(grid=True).rows((4096, 4096))) == drawn | set(GRID)


def test_a_run_takes_minutes_and_a_quick_one_less() -> None:
    """About a second each, beside compilation."""
    usual = points("cuda", names=["nvfp4_linear"])
    assert len(usual) == 8 * (len(NAMED_WEIGHTS) + 8) <= 250
    quick = points("cuda", names=["nvfp4_linear"], quick=True)
    assert len(quick) == QUICK.sizes * (3 + QUICK.weights) == 15
    one = points("cuda", names=["nvfp4_linear"], sample=Sampling(sizes=1, weights=0))
    assert len(one) == len(NAMED_WEIGHTS)


def test_on_a_cpu_and_by_hand_nothing_is_drawn() -> None:
    assert [point.rows for point in points("cpu", names=["nvfp4_linear"])] == [4, 64]
    by_hand = points("cuda", names=["nvfp4_linear"], shapes=[(24, 128, 256)])
    assert [str(point) for point in by_hand] == ["nvfp4_linear 24x128x256 bfloat16"]
