"""Routing and sums over experts by their own host code in the emulation, and by plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from emulated_host import EmulatedHost, Run

from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.routing import Routing
from gristmill.select.device import Device
from gristmill.select.variant import Variant

UNSET = -7  # what tensors of integers start as


class Step(Variant):
    """A step of a plan where the emulated host expects a variant."""

    name = "step"

    def __init__(self, prepare: Callable[[], Callable[..., Any]]) -> None:
        self._prepare = prepare

    def supports(self, problem: Any) -> str | None:
        return None

    def bind(self, problem: Any, config: Any) -> Callable[..., Any]:
        run = self._prepare()
        return lambda *args: run(0, *args)


def routing_of(
    device: Device,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    x: torch.Tensor | None = None,
    **asked: Any,
) -> Routing:
    """For calls with tensors like these; elements of a row of `x` are side by side."""
    facts = IdFacts.of(topk_ids, expert_map)
    if x is None:
        return Routing(device, facts, experts, **asked)
    size = x.element_size()
    row_bytes = x.shape[1] * size
    stride = x.stride(0) * size if len(x) > 1 else row_bytes
    access = math.gcd(16, row_bytes, stride, x.data_ptr())
    rows = {"row_bytes": row_bytes, "row_stride": stride, "access": access}
    return Routing(device, facts, experts, **rows, **asked)


def run_step(
    host: EmulatedHost,
    prepare: Callable[[], Callable[..., Any]],
    args: Sequence[Any],
    *,
    written: Sequence[int] = (),
    order: int = 0,
) -> Run:
    nothing: Any = None  # the step knows what it is for
    return host.run(Step(prepare), nothing, nothing, args, written=written, order=order)


def filled_empty(
    size: int | tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """In place of `torch.empty`: nothing is right by chance, because it was there before."""
    shape = (size,) if isinstance(size, int) else size
    unset = float("nan") if dtype.is_floating_point else UNSET
    return torch.full(shape, unset, dtype=dtype, device=device)


def local_experts(
    ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int
) -> list[int | None]:
    """The expert of every slot, None where it takes no part."""
    table = None if expert_map is None else expert_map.tolist()
    found: list[int | None] = []
    for one in ids.flatten().tolist():
        place = one
        if table is not None:
            place = table[one] if 0 <= one < len(table) else -1
        found.append(place if 0 <= place < experts else None)
    return found


def expected_order(local: list[int | None], experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`slot_of` of those that take part, and `ends`."""
    keys = torch.tensor([experts if one is None else one for one in local])
    keys, order = torch.sort(keys, stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts), right=True)
    return order[keys < experts].int(), ends.int()


def expected_tiles(ends: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    tiles, first = [], 0
    for expert, end in enumerate(ends.tolist()):
        parts = -(-(end - first) // sizes[-1])
        each = -(-(end - first) // max(1, parts))
        for start in range(first, end, max(1, each)):
            size = next(one for one in sizes if one >= each)
            tiles.append((expert, start, min(each, end - start), size))
        first = end
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def random_ids(
    tokens: int, topk: int, experts: int, *, seed: int = 0, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Different experts in each row as long as there are so many; half of all on a few of them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, max(topk, experts), generator=generator)
    scores[: tokens // 2, : min(4, experts)] += 1
    return (scores.topk(topk, -1).indices % experts).to(dtype)
