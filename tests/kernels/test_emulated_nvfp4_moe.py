"""The plan of variant `cuda_wgmma` of nvfp4_moe with the launches of a GPU, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import EmulationError, maps_of_rows
from nvfp4_moe_cases import (
    ADDING,
    APART,
    BF16,
    CUTS,
    DEVICE,
    F16,
    F32,
    GROUPS,
    PLAIN,
    ROUTINGS,
    SMALL,
    WAYS,
    Call,
    Mixture,
)

from gristmill.ops.nvfp4_moe import wgmma
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import ADD, MoeConfig, Product

INT32, INT64 = torch.int32, torch.int64
# What routing has to be right for.
EVERY_WAY = tuple(replace(PLAIN, routing=routing, added=added) for routing, added in WAYS)


@pytest.fixture(autouse=True)
def _as_strict_as_can_be(host: EmulatedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor maps of the emulation, and arguments that were made right before."""
    monkeypatch.setattr(wgmma, "maps_of_rows", maps_of_rows)
    host.fresh = True


def _build(host: EmulatedHost, call: Call, configs: Sequence[MoeConfig]) -> None:
    problem = call.problem()
    host.build([one for config in configs for one in Wgmma().programs(problem, config)])


def _check(host: EmulatedHost, call: Call, config: MoeConfig, order: int = 0) -> Run:
    run = call.run(host, config, order)
    call.check(run.outputs, config)
    return run


def _quick_first(names: Iterable[str], *quick: str) -> list[Any]:
    """All, of which those that are not quick are for the long tests."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.long) for one in names]


def _name(config: Any) -> str:
    cuts = "plain" if config.up == SMALL else "groups"
    return f"{cuts}-{config.routing}-{'added' if config.added else 'apart'}"


@pytest.mark.parametrize(("routing", "added"), WAYS)
@pytest.mark.parametrize("name", _quick_first(CUTS, "plain", "groups", "split"))
def test_every_cut(host: EmulatedHost, name: str, routing: Any, added: bool) -> None:
    """Of rows that end within a unit and within a slab, and columns that end within a chunk."""
    config = replace(CUTS[name], routing=routing, added=added)
    mixture = Mixture(tokens=9, hidden=208, inner=272, w13_bias=F32, w2_bias=BF16)
    call, other = mixture.call(), replace(mixture, tokens=3, inner=144, x=F16, seed=1).call()
    for one in (call, other):
        _build(host, one, [config])
    run = _check(host, call, config)
    at_once = added and config.down[1] == 1  # only who has a row's whole sum adds it up as well
    assert len(run.calls) == 2 + (routing == "launch") + (not at_once)
    assert all(launch.dependent for launch in run.calls)
    _check(host, other, config, order=5)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32, 33, 64])
def test_all_tokens_are_one_tile(host: EmulatedHost, tokens: int) -> None:
    """As many as can be scanned, of each size that a tile has."""
    call = Mixture(tokens=tokens, topk=64 // tokens, experts=3, hidden=64, inner=32).call()
    run = _check(host, call, PLAIN)
    assert [launch.name.split("<")[0] for launch in run.calls] == [
        *("nvfp4_moe", "nvfp4_moe", "moe_combine")
    ]


@pytest.mark.parametrize(
    ("tokens", "topk", "launches"), [(13, 5, 3), (64, 2, 3), (65, 1, 4), (128, 8, 4), (205, 5, 4)]
)
def test_more_slots_are_put_in_order_and_more_tokens_added_apart(
    host: EmulatedHost, tokens: int, topk: int, launches: int
) -> None:
    call = Mixture(tokens, 3, topk=topk, hidden=64, inner=32).call()
    config = replace(PLAIN, tile=64, down=(1, 1, 2, 2, 2, 1))  # by two that add, or by one
    assert len(_check(host, call, config).calls) == launches


def _ids_of(counts: Sequence[int], topk: int = 1) -> torch.Tensor:
    """So many slots of each expert, spread over the tokens."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order].view(-1, topk)


# By the largest tile: experts with none, a few, and more than it has, so that every size is there.
COUNTS = {
    8: (1, 8, 0, 20, 9),
    16: (8, 9, 16, 17, 33, 1),
    32: (3, 9, 17, 25, 33, 64, 0),
    48: (3, 17, 33, 48, 0, 100),
    64: (3, 9, 17, 25, 33, 41, 49, 64, 65, 130),
    96: (3, 65, 96, 97, 1, 150),
    128: (3, 17, 33, 49, 65, 81, 97, 113, 0, 130),
    192: (3, 33, 65, 97, 113, 129, 145, 161, 0, 200),
}


@pytest.mark.parametrize(
    "wide", [True, pytest.param(False, marks=pytest.mark.long)], ids=["wide", "narrow"]
)
@pytest.mark.parametrize("tile", COUNTS)
def test_tiles_of_every_size(host: EmulatedHost, tile: int, wide: bool) -> None:
    ids = _ids_of(COUNTS[tile])
    mixture = Mixture(len(ids), len(COUNTS[tile]), topk=1, hidden=80, inner=48, w2_bias=F32)
    _check(host, mixture.call(ids), replace(APART, tile=tile, routing="launch", wide=wide))


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("tile", [8, 16, 32, 48, 64])
def test_tiles_that_are_added_where_they_are(host: EmulatedHost, tile: int, split: int) -> None:
    """Of up to 64 tokens: with an expert that all of them have, and others of some."""
    ids = torch.zeros((64, 3), dtype=torch.int64)
    ids[:, 1], ids[:40, 2], ids[40:, 2] = 1 + torch.arange(64) % 5, 6, -1
    call = Mixture(64, 7, topk=3, hidden=144, inner=48, w2_bias=F32).call(ids)
    config = replace(PLAIN, tile=tile, down=(1, 1, 2, 2, split, 1))
    run = _check(host, call, config)
    assert len(run.calls) == 3
    assert run.calls[-1].grid == 3 * split


# Cuts of both products, the largest tile, wide: those that add in pieces, those of many warpgroups
# whose producer gives registers away.
LARGE = {
    "groups": (GROUPS, GROUPS, 128, True),
    "split": ((1, 1, 2, 2, 2, 1), (2, 1, 2, 2, 2, 1), 128, False),
    "three": ((1, 3, 6, 2, 1, 1), (3, 1, 2, 2, 1, 1), 96, True),
    "four": ((2, 2, 4, 2, 1, 1), (4, 1, 2, 2, 1, 1), 64, False),
    "largest": ((2, 1, 2, 2, 1, 1), SMALL, 192, True),
}


@pytest.mark.parametrize("name", _quick_first(LARGE, "groups", "split", "largest"))
def test_large_tiles(host: EmulatedHost, name: str) -> None:
    ids = _ids_of((90, 128, 40))
    call = Mixture(len(ids), 3, topk=1, hidden=144, inner=80).call(ids)
    up, down, tile, wide = LARGE[name]
    _check(host, call, MoeConfig(up, down, tile, "launch", added=False, wide=wide), order=2)


@pytest.mark.parametrize("order", [0, 1, 3, 4])
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("config", [PLAIN, ADDING], ids=["plain", "groups"])
def test_few_blocks_do_unit_after_unit(
    host: EmulatedHost, config: MoeConfig, routing: Any, wide: bool, order: int
) -> None:
    """Of tiles of different sizes, so that slots of the ring have different depths."""
    ids = _ids_of((2, 9, 8, 0, 13), topk=2)
    call = Mixture(16, 5, hidden=208, inner=144).call(ids)
    run = _check(host, call, replace(config, routing=routing, added=False, wide=wide), order)
    products = [launch for launch in run.calls if "nvfp4_moe" in launch.name]
    assert [launch.grid for launch in products] == [3, 3]  # of 12 to 20 units
    # Where the second product adds, its blocks have all tiles in any case.
    if config is PLAIN and routing == "launch":
        run = _check(host, call, replace(config, routing=routing), order)
        assert run.calls[-1].grid == 4


@pytest.mark.parametrize("order", [0, 2, 3])
def test_a_last_slot_with_nothing_for_some(host: EmulatedHost, order: int) -> None:
    """Five chunks of four at a time, for two warpgroups in turn: the second one has none."""
    ids = _ids_of((60, 50))
    call = Mixture(len(ids), 2, topk=1, hidden=272, inner=80).call(ids)
    _check(host, call, replace(ADDING, tile=64, added=False), order)


def test_a_block_for_each_unit_there_may_be(host: EmulatedHost) -> None:
    call = Mixture(16, 5, hidden=208, inner=80).call()
    for routing in ROUTINGS:
        run = _check(host, call, replace(APART, persistent=False, routing=routing))
        tiles = 5 if routing == "scan" else 32 // 16 + 5
        products = [launch for launch in run.calls if "nvfp4_moe" in launch.name]
        assert [launch.grid for launch in products] == [tiles * 3, tiles * 4]


@pytest.mark.parametrize("config", [PLAIN, ADDING], ids=_name)
@pytest.mark.parametrize("limit", [None, 0.75])
@pytest.mark.parametrize(
    ("activation", "alpha"),
    [("silu", None), ("gelu", None), ("swiglu_oai", None), ("swiglu_oai", 3)],
)
def test_activations(
    host: EmulatedHost,
    config: MoeConfig,
    activation: str,
    alpha: float | None,
    limit: float | None,
) -> None:
    mixture = Mixture(activation=activation, alpha=alpha, limit=limit, w13_bias=F32)
    _check(host, mixture.call(), config)


@pytest.mark.parametrize("bias", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("config", [*EVERY_WAY, ADDING], ids=_name)
def test_biases(host: EmulatedHost, config: MoeConfig, bias: torch.dtype) -> None:
    for w13, w2 in ((bias, None), (None, bias), (bias, bias)):
        _check(host, Mixture(w13_bias=w13, w2_bias=w2, seed=2).call(), config)


def _spread(values: torch.Tensor, unset: float) -> torch.Tensor:
    """The same with gaps between rows and columns."""
    rows, columns = values.shape
    wide = torch.full((rows + 1, 3 * columns + 2), unset, dtype=values.dtype)
    return wide[:rows, : 3 * columns : 3].copy_(values)


@pytest.mark.parametrize("weights", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("ids", [INT32, INT64], ids=str)
@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_routing_of_every_type_and_stride(
    host: EmulatedHost, config: MoeConfig, weights: torch.dtype, ids: torch.dtype
) -> None:
    call = Mixture(weights=weights, ids=ids).call()
    _check(host, call, config)
    columns = replace(call, shares=call.shares.t().contiguous().t(), ids=_spread(call.ids, 1))
    for one in (columns, replace(call, shares=_spread(call.shares, float("nan")))):
        assert torch.equal(one.run(host, config).outputs, call.run(host, config).outputs)


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_slots_without_an_expert(host: EmulatedHost, config: MoeConfig, dtype: torch.dtype) -> None:
    """Tokens with some experts, and with none: those are zeros."""
    ids = [[0, -1, 3], [-1, -1, -1], [4, 1, 2], [7, 4, -5], [2**31 - 1, 0, -(2**31)]]
    call = Mixture(5, 4, topk=3, ids=dtype, w2_bias=F32).call(torch.tensor(ids))
    y = _check(host, call, config).outputs
    assert (y[[1, 3]] == 0).all()
    if dtype == INT64:
        beyond = call.ids.clone()
        beyond[1] = torch.tensor([2**32, 2**32 + 1, -(2**32)])
        y = _check(host, replace(call, ids=beyond), config).outputs
        assert (y[1] == 0).all()


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_mapped_experts(host: EmulatedHost, config: MoeConfig, dtype: torch.dtype) -> None:
    table = torch.tensor([2, -1, 0, 7, 1, 3, -9], dtype=dtype)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [-1, 2]])
    call = Mixture(ids=INT64).call(ids, table)
    y = _check(host, call, config).outputs
    assert (y[3] == 0).all()
    assert (y[[0, 1, 2, 4]] != 0).any(-1).all()
    strided = torch.full((len(table), 2), 1, dtype=dtype)[:, 0].copy_(table)
    assert torch.equal(replace(call, expert_map=strided).run(host, config).outputs, y)


@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_an_expert_twice_in_a_row(host: EmulatedHost, config: MoeConfig) -> None:
    ids = torch.tensor([[1, 1, 1], [2, 0, 2], [0, 1, 1], [3, 3, -1]])
    _check(host, Mixture(4, 4, topk=3).call(ids), config)


@pytest.mark.parametrize("tile", [8, 16, 48, 64])
def test_an_expert_many_times_in_the_columns_of_a_tile(host: EmulatedHost, tile: int) -> None:
    """Two and three side by side, at the ends of tiles and of warps."""
    ids = torch.tensor([[0, 1, 2]]).repeat(60, 1)
    ids[[3, 28, 47, 59]] = torch.tensor([0, 0, 1])  # 28: columns 31 and 32
    ids[[5, 30, 33]] = 0
    _check(host, Mixture(60, 3, topk=3).call(ids), replace(PLAIN, tile=tile))


@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_nobody_at_all(host: EmulatedHost, config: MoeConfig) -> None:
    call = Mixture(9, 4).call(torch.full((9, 2), -1))
    y = _check(host, call, config).outputs
    assert (y == 0).all()


@pytest.mark.parametrize("layout", ["dense", "odd stride", "odd start", "columns", "expanded"])
@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_x_of_any_strides(host: EmulatedHost, config: MoeConfig, layout: str) -> None:
    call = Mixture().call()
    dense, wide = call.x.contiguous(), torch.full((14, 233), float("nan"), dtype=BF16)
    x = {
        "dense": lambda: dense,
        "odd stride": lambda: wide[:5, :80].copy_(dense),
        "odd start": lambda: wide.view(-1)[1 : 1 + 5 * 88].view(5, 88)[:, :80].copy_(dense),
        "columns": lambda: dense.t().contiguous().t(),
        "expanded": lambda: dense[:1].expand(5, 80),
    }[layout]()
    _check(host, replace(call, x=x), config)


def test_rows_without_distance_have_no_map(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = []

    def maps(*args: Any) -> Any:
        strides.append(args[5])
        return maps_of_rows(*args)

    monkeypatch.setattr(wgmma, "maps_of_rows", maps)
    call = Mixture().call()
    _check(host, replace(call, x=call.x[:1].expand(5, 80)), PLAIN)
    assert strides == [80, 80, 48, 48]


@pytest.mark.parametrize("config", EVERY_WAY, ids=_name)
def test_tokens_that_are_not_finite_leave_the_others_alone(
    host: EmulatedHost, config: MoeConfig
) -> None:
    call = Mixture(seed=3).call()
    expected = call.run(host, config).outputs
    x = call.x.clone()
    x[1], x[3] = float("nan"), float("inf")
    y = replace(call, x=x).run(host, config).outputs
    assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])
    assert y[[1, 3]].isnan().all()


def test_not_a_word_of_shared_memory_is_too_much(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end are the sums of all tokens; without those some of it is for others."""
    call, config = Mixture(32, 3).call(), replace(PLAIN, routing="launch")
    _check(host, call, config)
    whole = Product.shared.fget  # type: ignore[attr-defined]

    def less(product: Product) -> Any:
        return whole(product) - 20 * (product.step == ADD)  # 16 are between the lines

    monkeypatch.setattr(Product, "shared", property(less))
    with pytest.raises(EmulationError, match="shared memory"):
        call.run(host, config)


# Tokens, experts, topk: few slots, more, many.
TIMED = ((1, 8, 4), (6, 9, 8), (20, 9, 4), (150, 2, 1))


@pytest.mark.parametrize("size", TIMED, ids=str)
def test_configs_that_would_be_timed(host: EmulatedHost, size: tuple[int, int, int]) -> None:
    """The first, and the first of each kind, as they are on the device there is."""
    call = Mixture(*size, hidden=208, inner=144, w13_bias=BF16, w2_bias=BF16).call()
    problem = call.problem()
    assert problem.device == DEVICE
    configs = Wgmma().configs(problem)
    kinds = (
        lambda one: one.down[4] > 1,
        lambda one: one.tile != configs[0].tile,
        lambda one: not one.wide,
        lambda one: not one.persistent,
    )
    some = dict.fromkeys([configs[0], *(next(filter(kind, configs), configs[0]) for kind in kinds)])
    _build(host, call, list(some))
    for config in some:
        _check(host, call, config)
