"""The sums over a token's experts with the launch that a GPU would get, run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from moe_steps import local_experts, random_ids, run_step

from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.ids import IdFacts
from gristmill.select.device import KNOWN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
DEVICE = KNOWN["sm_90a"]


def _some_invalid(ids: torch.Tensor, seed: int = 3) -> torch.Tensor:
    """A fifth of the slots without an expert, and one token with none at all."""
    generator = torch.Generator().manual_seed(seed)
    ids = ids.clone()
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    ids[len(ids) // 2] = -1
    return ids


def _partial(slots: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers: their sums are exact in fp32, and not in 16 bits."""
    generator = torch.Generator().manual_seed(slots)
    most = 100 if dtype == BF16 else 1000
    return torch.randint(-most, most, (slots, hidden), generator=generator).to(dtype)


def _spoiled(partial: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """With what is no number in every row that must not be looked at."""
    spoiled = partial.clone()
    spoiled[~taken] = float("nan")
    return spoiled


def _taken(ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int) -> torch.Tensor:
    return torch.tensor([one is not None for one in local_experts(ids, expert_map, experts)])


def _combine(
    host: EmulatedHost,
    one: Combine,
    partial: torch.Tensor,
    y: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    order: int = 0,
) -> Run:
    def prepare() -> Any:
        start = one.prepare()

        def run(stream: int, *tensors: torch.Tensor | None) -> None:
            start(stream, *(0 if each is None else each.data_ptr() for each in tensors))

        return run

    host.build(one.programs())
    args = (partial, y, ids, expert_map, weights)
    return run_step(host, prepare, args, written=(1,), order=order)


def _sum(partial: torch.Tensor, taken: torch.Tensor, topk: int) -> torch.Tensor:
    """In fp64."""
    kept = torch.where(taken[:, None], partial.double(), 0.0)
    return kept.view(-1, topk, partial.shape[1]).sum(1)


def _unset(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((tokens, hidden), float("nan"), dtype=dtype)


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "topk", "hidden"), [(1, 1, 8), (7, 8, 64), (5, 10, 1040), (3, 40, 24), (3, 3, 7)]
)
def test_sums_of_slots(
    host: EmulatedHost,
    tokens: int,
    topk: int,
    hidden: int,
    dtype: torch.dtype,
    out: torch.dtype,
) -> None:
    experts = 64
    ids = random_ids(tokens, topk, experts)
    if tokens > 1:
        ids = _some_invalid(ids)
    taken = _taken(ids, None, experts)
    partial = _partial(tokens * topk, hidden, dtype)
    y = _unset(tokens, hidden, out)
    one = Combine(DEVICE, IdFacts.of(ids), experts, hidden, dtype, out)
    assert one.columns == (1 if hidden == 7 else 16 // dtype.itemsize)
    run = _combine(host, one, _spoiled(partial, taken), y, ids)
    assert torch.equal(y, _sum(partial, taken, topk).to(out))
    assert [call.dependent for call in run.calls] == [True]
    assert run.calls[0].grid % tokens == 0


@pytest.mark.parametrize("dtype", [INT32, INT64], ids=str)
@pytest.mark.parametrize("map_dtype", [None, INT32, INT64], ids=str)
def test_who_takes_part(
    host: EmulatedHost, dtype: torch.dtype, map_dtype: torch.dtype | None
) -> None:
    tokens, topk, total, experts = 19, 6, 24, 16
    ids = _some_invalid(random_ids(tokens, 2 * topk, total, dtype=dtype))[:, ::2]
    ids[0, 0], ids[1, 1] = total, 2**31 - 1
    if dtype == INT64:
        ids[3, 0], ids[4, 1] = 2**32 + 1, -(2**32) + 2
    expert_map = None
    if map_dtype is not None:
        generator = torch.Generator().manual_seed(1)
        expert_map = torch.randperm(total, generator=generator).to(map_dtype)
        expert_map[3] = -1
    taken = _taken(ids, expert_map, experts)
    partial, y = _partial(tokens * topk, 16, F32), _unset(tokens, 16, BF16)
    facts = IdFacts.of(ids, expert_map)
    one = Combine(DEVICE, facts, experts, 16, F32, BF16)
    _combine(host, one, _spoiled(partial, taken), y, ids, expert_map)
    assert torch.equal(y, _sum(partial, taken, topk).to(BF16))


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sums_are_in_order(host: EmulatedHost, dtype: torch.dtype, order: int) -> None:
    """Bit by bit what adding one slot after another in fp32 gives."""
    tokens, topk, hidden = 6, 11, 48
    ids = _some_invalid(random_ids(tokens, topk, 32))
    taken = _taken(ids, None, 32)
    generator = torch.Generator().manual_seed(5)
    sizes = 2.0 ** torch.randint(-14, 15, (tokens * topk, hidden), generator=generator)
    partial = (torch.randn(tokens * topk, hidden, generator=generator) * sizes).to(dtype)
    rows = torch.where(taken[:, None], partial.float(), 0.0).view(tokens, topk, hidden)
    forth, back = torch.zeros(2, tokens, hidden)
    for j in range(topk):
        forth += rows[:, j]
        back += rows[:, topk - 1 - j]
    assert not torch.equal(forth, back)  # another order would be seen
    y = _unset(tokens, hidden, F32)
    one = Combine(DEVICE, IdFacts.of(ids), 32, hidden, dtype, F32)
    _combine(host, one, _spoiled(partial, taken), y, ids, order=order)
    assert torch.equal(y, forth)


@pytest.mark.parametrize("weights_dtype", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_rows_by_position(
    host: EmulatedHost, dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> None:
    """Rows in the order of experts, with weights that are still to be multiplied by."""
    tokens, topk, hidden = 9, 5, 40
    ids = _some_invalid(random_ids(tokens, topk, 16))
    taken = _taken(ids, None, 16)
    count = int(taken.sum())
    generator = torch.Generator().manual_seed(4)
    position_of = torch.full((tokens * topk,), -1, dtype=INT32)
    position_of[taken] = torch.randperm(count, generator=generator).int()
    partial = _partial(tokens * topk, hidden, dtype)
    by_slot = torch.zeros_like(partial)
    by_slot[taken] = partial[position_of[taken].long()]
    partial[count:] = float("nan")
    weights, strides, expected = None, (0, 0), by_slot.double()
    if weights_dtype is not None:
        halves = torch.randint(-4, 5, (topk, 2 * tokens), generator=generator) / 2
        weights = halves.to(weights_dtype)[:, ::2].t()
        expected = expected * weights.double().reshape(-1, 1)
        weights = torch.where(taken.view(tokens, topk), weights, float("nan")).to(weights_dtype)
        strides = (weights.stride(0), weights.stride(1))
    one = Combine(
        DEVICE,
        IdFacts.of(ids),
        16,
        hidden,
        dtype,
        BF16,
        sorted=True,
        weights=weights_dtype,
        weights_strides=strides,
    )
    y = _unset(tokens, hidden, BF16)
    _combine(host, one, partial, y, position_of, None, weights)
    assert torch.equal(y, _sum(expected, taken, topk).to(BF16))


def test_strided_weights(host: EmulatedHost) -> None:
    tokens, topk, hidden = 6, 4, 16
    ids = random_ids(tokens, topk, 8)
    weights = torch.arange(2 * tokens * topk).float().view(topk, 2 * tokens)[:, ::2].t()
    assert weights.stride() == (2, 2 * tokens)
    partial, y = _partial(tokens * topk, hidden, F32), _unset(tokens, hidden, F32)
    one = Combine(
        *(DEVICE, IdFacts.of(ids), 8, hidden, F32, F32, False, F32),
        weights_strides=(weights.stride(0), weights.stride(1)),
    )
    _combine(host, one, partial, y, ids, None, weights)
    expected = (partial.view(tokens, topk, hidden).double() * weights.double()[..., None]).sum(1)
    assert torch.equal(y, expected.float())


@pytest.mark.parametrize("gap", [8, 3])
def test_rows_of_y_apart(host: EmulatedHost, gap: int) -> None:
    tokens, topk, hidden = 5, 3, 32
    ids = random_ids(tokens, topk, 8)
    whole = _unset(tokens, hidden + gap, BF16)
    partial, y = _partial(tokens * topk, hidden, F32), whole[:, :hidden]
    one = Combine(DEVICE, IdFacts.of(ids), 8, hidden, F32, BF16, y_stride=hidden + gap)
    assert one.columns == (4 if gap == 8 else 1)
    _combine(host, one, partial, y, ids)
    assert torch.equal(y, _sum(partial, torch.ones(len(partial)).bool(), topk).to(BF16))
    assert whole[:, hidden:].isnan().all()


def test_what_is_not_finite_stays_in_its_token(host: EmulatedHost) -> None:
    ids = random_ids(4, 3, 8)
    partial, y = _partial(12, 16, F32), _unset(4, 16, BF16)
    partial[3], partial[9] = float("inf"), float("nan")
    _combine(host, Combine(DEVICE, IdFacts.of(ids), 8, 16, F32, BF16), partial, y, ids)
    assert y[1].isposinf().all()
    assert y[3].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_only_what_takes_part_is_read(host: EmulatedHost) -> None:
    ids = random_ids(8, 4, 8)
    ids[:, 1:] = -1
    partial, y = _partial(32, 512, F32), _unset(8, 512, BF16)
    one = Combine(DEVICE, IdFacts.of(ids), 8, 512, F32, BF16)
    run = _combine(host, one, partial, y, ids)
    (traffic,) = run.traffic
    warps = 4
    assert traffic.loaded == 8 * 512 * 4 + 8 * warps * 4 * 4
    assert traffic.stored == 8 * 512 * 2
