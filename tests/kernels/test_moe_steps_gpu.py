"""Routing and sums over experts on a GPU: many slots, one graph for every routing."""

from __future__ import annotations

import pytest
import torch
from moe_steps import random_ids, routing_of

from gristmill.ops import launch
from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.routing import Routed
from gristmill.select.device import device_of

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (8, 16, 32, 64, 128)


def _order(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = ids.flatten().long()
    keys = torch.where((flat < 0) | (flat >= experts), experts, flat)
    keys, order = torch.sort(keys, stable=True)
    every = torch.arange(experts, device=ids.device)
    return order[keys < experts].int(), torch.searchsorted(keys, every, right=True).int()


def _check(routed: Routed, ids: torch.Tensor, experts: int, x: torch.Tensor) -> None:
    slot_of, ends = _order(ids, experts)
    count = len(slot_of)
    assert torch.equal(routed.ends, ends)
    assert torch.equal(routed.slot_of[:count], slot_of)
    assert routed.x_sorted is not None
    assert torch.equal(routed.x_sorted[:count], x[slot_of.long() // ids.shape[1]])
    positions = torch.full((ids.numel(),), -1, dtype=torch.int32, device="cuda")
    positions[slot_of.long()] = torch.arange(count, dtype=torch.int32, device="cuda")
    assert torch.equal(routed.position_of, positions)
    tiles = routed.tiles[: int(routed.tile_count)].cpu()
    covered = [range(first, first + size) for _, first, size, _ in tiles.tolist()]
    assert [one for part in covered for one in part] == list(range(count))
    assert (tiles[:, 2] <= tiles[:, 3]).all()
    starts = torch.cat([torch.zeros(1), ends.cpu()[:-1]])
    assert (tiles[:, 1] >= starts[tiles[:, 0].long()]).all()
    assert (tiles[:, 1] + tiles[:, 2] <= ends.cpu()[tiles[:, 0].long()]).all()


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "columns"),
    [
        (1, 1, 1, 8),
        (9, 8, 256, 7168),
        (33, 3, 7, 2880),
        (128, 8, 128, 2048),
        (1024, 8, 2048, 512),
        (4096, 8, 256, 7168),
        (70_001, 9, 64, 64),
    ],
)
def test_routing(tokens: int, topk: int, experts: int, columns: int) -> None:
    ids = random_ids(tokens, topk, experts).cuda()
    ids[:, -1:][ids[:, :1] % 5 == 0] = -1
    x = torch.randn(tokens, columns, device="cuda").to(BF16)
    routing = routing_of(device_of("cuda"), ids, None, experts, x=x, sizes=SIZES, positions=True)
    route = routing.prepare()
    for _ in range(3):
        _check(route(launch.current_stream(0), ids, None, x), ids, experts, x)


def test_a_graph_takes_any_routing() -> None:
    tokens, topk, experts = 300, 4, 32
    ids = random_ids(tokens, topk, experts, dtype=torch.int64).cuda()
    x = torch.randn(tokens, 256, device="cuda").to(BF16)
    routing = routing_of(device_of("cuda"), ids, None, experts, x=x, sizes=SIZES, positions=True)
    route = routing.prepare()
    route(launch.current_stream(0), ids, None, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = route(launch.current_stream(0), ids, None, x)
    for seed in range(3):
        ids.copy_(random_ids(tokens, topk, experts, seed=seed))
        ids[seed * 10] = -1
        x.normal_()
        graph.replay()
        _check(routed, ids, experts, x)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 7168), (257, 9, 2880), (4096, 8, 2048)], ids=str)
def test_combine(shape: tuple[int, int, int], dtype: torch.dtype, by_position: bool) -> None:
    tokens, topk, hidden = shape
    experts = 64
    ids = random_ids(tokens, topk, experts).cuda()
    ids[:, -1:][ids[:, :1] % 5 == 0] = -1
    slot_of, _ = _order(ids, experts)
    slots, count = tokens * topk, len(slot_of)
    partial = torch.randint(-100, 100, (slots, hidden), device="cuda").to(dtype)
    by_slot = torch.zeros_like(partial)
    ids_of_rows = ids
    if by_position:
        ids_of_rows = torch.full((slots,), -1, dtype=torch.int32, device="cuda")
        ids_of_rows[slot_of.long()] = torch.arange(count, dtype=torch.int32, device="cuda")
        by_slot[slot_of.long()] = partial[:count]
        partial[count:] = float("nan")
    else:
        by_slot[slot_of.long()] = partial[slot_of.long()]
        partial[ids.flatten() < 0] = float("nan")
    weights = torch.randint(-4, 5, (tokens, topk), device="cuda") / 4
    device, y = device_of("cuda"), torch.full((tokens, hidden), float("nan")).to("cuda", BF16)
    one = Combine(
        *(device, IdFacts.of(ids), experts, hidden, dtype, BF16, by_position, F32),
        weights_strides=(topk, 1),
    )
    torch.cuda.synchronize()  # what it reads early has been there for long
    combine = one.prepare()
    addresses = (partial.data_ptr(), y.data_ptr(), ids_of_rows.data_ptr())
    combine(launch.current_stream(0), *addresses, 0, weights.data_ptr())
    rows = by_slot.double().view(tokens, topk, hidden) * weights.double().unsqueeze(-1)
    assert torch.equal(y, rows.sum(1).to(F32).to(BF16))
