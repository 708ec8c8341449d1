"""The routing of tokens to experts with the launch that a GPU would get, run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from moe_steps import (
    UNSET,
    expected_order,
    expected_tiles,
    filled_empty,
    local_experts,
    random_ids,
    routing_of,
    run_step,
)

from gristmill.ops.experts import routing
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.routing import Routed, Routing, misfit
from gristmill.select.device import KNOWN

BF16, F32 = torch.bfloat16, torch.float32
INT32, INT64 = torch.int32, torch.int64
# Few multiprocessors: some slots are left for each.
DEVICE = replace(KNOWN["sm_90a"], multiprocessors=5)
SIZES = (8, 16, 64)


@pytest.fixture(autouse=True)
def _nothing_is_right_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", filled_empty)


def _tokens(count: int, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator).to(dtype)


def _route(
    host: EmulatedHost,
    ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    order: int = 0,
    **asked: Any,
) -> Run:
    one = routing_of(DEVICE, ids, expert_map, experts, x=x, **asked)
    assert misfit(one.device, one.experts) is None
    host.build(one.programs())
    return run_step(host, one.prepare, (ids, expert_map, x), order=order)


def _check(
    routed: Routed,
    ids: torch.Tensor,
    experts: int,
    expert_map: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    sizes: tuple[int, ...] = (),
) -> None:
    local = local_experts(ids, expert_map, experts)
    slot_of, ends = expected_order(local, experts)
    count = len(slot_of)
    assert routed.slot_of.shape == (ids.numel(),)
    assert torch.equal(routed.slot_of[:count], slot_of)
    assert (routed.slot_of[count:] == UNSET).all()
    assert torch.equal(routed.ends, ends)
    if sizes:
        tiles = expected_tiles(ends, sizes)
        assert routed.tile_count.tolist() == [len(tiles)]
        assert (
            len(tiles) <= len(routed.tiles) == ids.numel() // sizes[-1] + min(experts, ids.numel())
        )
        assert torch.equal(routed.tiles[: len(tiles)], tiles)
        assert (routed.tiles[len(tiles) :] == UNSET).all()
        assert routed.tiles_at % 16 == 0
    if x is not None:
        assert routed.x_sorted is not None
        assert torch.equal(routed.x_sorted[:count], x[slot_of.long() // ids.shape[1]])
        assert routed.x_sorted[count:].isnan().all()
    if len(routed.position_of):
        positions = torch.full((len(local),), -1, dtype=INT32)
        positions[slot_of.long()] = torch.arange(count, dtype=INT32)
        assert torch.equal(routed.position_of, positions)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts"),
    [
        (1, 1, 1),
        (1, 1, 128),
        (3, 2, 3),
        (9, 8, 256),
        (33, 4, 1000),
        (64, 10, 512),
        (129, 8, 128),
        (700, 2, 3),
        (301, 9, 1),
        (40, 40, 64),
    ],
)
def test_slots_in_order(host: EmulatedHost, tokens: int, topk: int, experts: int) -> None:
    ids, x = random_ids(tokens, topk, experts), _tokens(tokens, 24)
    run = _route(host, ids, experts, x=x, sizes=SIZES, positions=True)
    _check(run.outputs, ids, experts, x=x, sizes=SIZES)
    (call,) = run.calls
    assert call.dependent
    assert call.grid <= DEVICE.multiprocessors + 1


@pytest.mark.parametrize("order", range(1, 5))
def test_in_any_order_of_threads(host: EmulatedHost, order: int) -> None:
    ids, x = random_ids(97, 8, 128), _tokens(97, 136)
    run = _route(host, ids, 128, x=x, sizes=SIZES, positions=True, order=order)
    _check(run.outputs, ids, 128, x=x, sizes=SIZES)


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("map_dtype", [None, INT32, INT64], ids=str)
def test_slots_that_take_no_part(
    host: EmulatedHost, dtype: torch.dtype, map_dtype: torch.dtype | None
) -> None:
    """An id of -1, beyond the experts or the map, or mapped to what is none."""
    tokens, topk, total, experts = 41, 6, 24, 16
    ids = random_ids(tokens, topk, total, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    ids[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    ids[0, 0], ids[1, 1], ids[2, :], ids[-1, -1] = total, 2**31 - 1, -(2**31), experts
    if dtype == INT64:
        # Their lower halves are experts.
        ids[3, 0], ids[4, 1], ids[5, 2] = 2**32 + 1, -(2**32) + 2, 2**62 + 3
    expert_map = None
    if map_dtype is not None:
        expert_map = torch.randperm(total, generator=generator).to(map_dtype)
        expert_map[3], expert_map[7], expert_map[9] = -1, -(2**31), 2**31 - 1
        if map_dtype == INT64:
            expert_map[11] = 2**32 + 1
    x = _tokens(tokens, 8, F32)
    run = _route(host, ids, experts, expert_map, x, sizes=SIZES, positions=True)
    _check(run.outputs, ids, experts, expert_map, x, SIZES)
    assert any(one is None for one in local_experts(ids, expert_map, experts))


def test_nobody_takes_part(host: EmulatedHost) -> None:
    ids, x = torch.full((7, 3), -1), _tokens(7, 8)
    routed = _route(host, ids, 4, x=x, sizes=SIZES, positions=True).outputs
    _check(routed, ids, 4, x=x, sizes=SIZES)
    assert routed.tile_count.tolist() == [0]


def test_a_map_of_no_experts(host: EmulatedHost) -> None:
    ids, expert_map = random_ids(5, 2, 4), torch.zeros(0, dtype=INT32)
    _check(_route(host, ids, 4, expert_map).outputs, ids, 4, expert_map)


@pytest.mark.parametrize("expert", [0, 5, 15])
def test_all_on_one_expert(host: EmulatedHost, expert: int) -> None:
    ids, x = torch.full((133, 3), expert), _tokens(133, 8)
    run = _route(host, ids, 16, x=x, sizes=SIZES)
    _check(run.outputs, ids, 16, x=x, sizes=SIZES)


def test_an_expert_twice_in_a_row(host: EmulatedHost) -> None:
    ids = random_ids(50, 8, 128)
    ids[:, 5] = ids[:, 2]
    ids[:, 6] = ids[:, 2]
    x = _tokens(50, 8)
    _check(_route(host, ids, 128, x=x).outputs, ids, 128, x=x)


@pytest.mark.parametrize("sizes", [(1,), (128,), (7, 9), (1, 2, 4, 8, 16, 32, 64, 100)], ids=str)
def test_sizes_of_tiles(host: EmulatedHost, sizes: tuple[int, ...]) -> None:
    ids = random_ids(200, 4, 24)
    _check(_route(host, ids, 24, sizes=sizes).outputs, ids, 24, sizes=sizes)


@pytest.mark.parametrize("kind", ["columns", "rows", "turned", "one row", "expanded"])
def test_strides_of_ids(host: EmulatedHost, kind: str) -> None:
    base = random_ids(22, 12, 32, dtype=INT64)
    ids = {
        "columns": base[:, ::3],
        "rows": base[::2, 1:9],
        "turned": base.t(),
        "one row": base[3:4, 2:7],
        "expanded": base[:1].expand(9, 12),
    }[kind]
    expert_map = torch.randperm(64, generator=torch.Generator().manual_seed(2))[::2].int()[::2]
    padded = torch.stack([expert_map, torch.zeros_like(expert_map)], 1)[:, 0]
    assert padded.stride() == (2,)
    x = _tokens(ids.shape[0], 8)
    _check(_route(host, ids, 32, padded, x).outputs, ids, 32, padded, x)


@pytest.mark.parametrize(
    ("columns", "dtype", "access"),
    [
        (8, BF16, 16),
        (1032, BF16, 16),
        (2056, BF16, 16),
        (12, BF16, 8),
        (262, BF16, 4),
        (301, BF16, 2),
        (33, F32, 4),
    ],
)
def test_rows_of_any_length(
    host: EmulatedHost, columns: int, dtype: torch.dtype, access: int
) -> None:
    """More and less than a warp moves at a time."""
    ids, x = random_ids(11, 3, 8), _tokens(11, columns, dtype)
    assert routing_of(DEVICE, ids, None, 8, x=x).access == access
    _check(_route(host, ids, 8, x=x).outputs, ids, 8, x=x)


@pytest.mark.parametrize("kind", ["apart", "shifted", "one row", "expanded"])
def test_strides_of_x(host: EmulatedHost, kind: str) -> None:
    whole = _tokens(9, 80)
    x = {
        "apart": whole[:, :24],
        "shifted": whole[:, 1:25],
        "one row": whole[2:3, 4:28],
        "expanded": whole[:1].expand(9, 80),
    }[kind]
    ids = random_ids(x.shape[0], 4, 16)
    _check(_route(host, ids, 16, x=x).outputs, ids, 16, x=x)


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("chunk", [1, 40])
def test_more_slots_than_shared_memory_holds(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, chunk: int, order: int
) -> None:
    monkeypatch.setattr(routing, "CHUNK", chunk)
    ids, x = random_ids(130, 6, 16), _tokens(130, 16)
    ids[7:50, 2:] = -1
    run = _route(host, ids, 16, x=x, sizes=SIZES, positions=True, order=order)
    _check(run.outputs, ids, 16, x=x, sizes=SIZES)


def test_every_row_is_read_once(host: EmulatedHost) -> None:
    """And written as often as it is wanted; every block reads all ids."""
    tokens, topk, columns = 40, 8, 520
    ids, x = random_ids(tokens, topk, 64), _tokens(tokens, columns)
    run = _route(host, ids, 64, x=x)
    blocks, slots, row = DEVICE.multiprocessors, tokens * topk, 2 * columns
    assert run.calls[0].grid == blocks + 1
    (traffic,) = run.traffic
    assert traffic.loaded == 4 * slots * (blocks + 1) + tokens * row
    assert traffic.stored == slots * (row + 4) + 4 * 64


def test_rows_that_nobody_wants_are_not_read(host: EmulatedHost) -> None:
    """But for the first of each warp, which does not wait to be told."""
    ids, x = torch.full((200, 1), -1, dtype=INT32), _tokens(200, 520)
    run = _route(host, ids, 64, x=x)
    warps = run.calls[0].block // 32
    (traffic,) = run.traffic
    blocks, row = DEVICE.multiprocessors, 2 * 520
    assert traffic.loaded == 4 * 200 * (blocks + 1) + blocks * warps * row
    assert traffic.stored == 4 * 64


def test_launches(host: EmulatedHost) -> None:
    ids = random_ids(4096, 8, 256)
    many = routing_of(KNOWN["sm_90a"], ids, None, 256, x=torch.zeros(4096, 8), sizes=SIZES)
    assert many.threads == 1024
    # One is left for the list of tiles.
    assert many.share == 251
    assert -(-many.slots // many.share) == 131
    few = routing_of(KNOWN["sm_90a"], ids[:9], None, 256, x=torch.zeros(9, 8))
    assert (few.threads, few.share) == (256, 1)
    # Nothing is moved: less than a warp's worth of slots is not worth a block.
    assert routing_of(KNOWN["sm_90a"], ids[:9], None, 256).share == 32


def test_an_older_gpu_waits_for_the_previous_kernel_to_end(host: EmulatedHost) -> None:
    ids = random_ids(5, 2, 4)
    one = routing_of(KNOWN["sm_80"], ids, None, 4)
    run = run_step(host, one.prepare, (ids, None))
    assert [call.dependent for call in run.calls] == [False]
    _check(run.outputs, ids, 4)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 8), (16, 8), (-1,), tuple(range(1, 10))], ids=str)
def test_bad_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at most 8 ascending positive numbers"):
        routing_of(DEVICE, random_ids(5, 2, 4), None, 4, sizes=sizes)


def test_bad_counts_of_slots() -> None:
    for tokens in (0, 2**30):
        facts = IdFacts(INT32, tokens, 2, (2, 1))
        with pytest.raises(ValueError, match="1 to 2\\^31 - 1 slots"):
            Routing(DEVICE, facts, 4)


@pytest.mark.parametrize("arch", KNOWN)
def test_experts_that_shared_memory_holds(arch: str) -> None:
    assert misfit(KNOWN[arch], 2048) is None
    refusal = misfit(KNOWN[arch], 100_000)
    assert refusal is not None
    most = int(refusal.split()[3])
    assert misfit(KNOWN[arch], most) is None
    facts = IdFacts(INT32, 10**6, 8, (8, 1))
    assert Routing(KNOWN[arch], facts, most).shared <= KNOWN[arch].shared_per_block


def test_a_gpu_without_votes() -> None:
    old = replace(DEVICE, capability=(7, 5), arch="sm_75")
    assert misfit(old, 4) == "needs compute capability 8.0 or later, not sm_75"
