"""Which experts tokens take in a benchmark: drawn, for several calls at once.

Calls in a row must find none of their experts in the L2 cache. Which experts a draw names says
nothing about what it costs, so every draw is renamed: its experts, however many they are, become
the next ones of one random order of all of them, in which the calls go round.
"""

from __future__ import annotations

import torch

from gristmill.bench.suites import known

# Skewed: so many experts get this share of the slots, as far as tokens can take so many of them.
HOT, HOT_SHARE = 4, 0.5


def draw(
    routing: str, calls: int, tokens: int, experts: int, topk: int, generator: torch.Generator
) -> torch.Tensor:
    """``(calls, M, k)`` int64: the experts of each token, distinct in a row.

    "uniform": every token takes `topk` distinct experts at random. "skewed": of every token
    ``topk * HOT_SHARE`` experts, at least one, at most `HOT`, are taken at random of `HOT` hot ones
    (the same for all tokens of a call), the rest at random of the others: with 2 to 8 experts of a
    token (4 hot ones of 8) half of all slots are with four experts. Where there are too few others,
    more are hot. The order in a row is random.
    """
    known("routing", routing, ("uniform", "skewed"))
    scores = torch.rand((calls, tokens, experts), generator=generator, device=generator.device)
    if routing == "skewed":
        hot = min(HOT, experts)
        count = min(hot, max(1, round(topk * HOT_SHARE), topk - (experts - hot)))
        # The first `count` of the hot ones come before all others, and the rest of them last.
        rank = scores[..., :hot].argsort(-1).argsort(-1)
        scores[..., :hot] += torch.where(rank < count, 1.0, -1.0)
    ids = scores.topk(topk, dim=-1).indices
    order = torch.rand(ids.shape, generator=generator, device=generator.device).argsort(-1)
    return renamed(ids.gather(-1, order), experts, generator)


def renamed(ids: torch.Tensor, experts: int, generator: torch.Generator) -> torch.Tensor:
    """The same draws with other names: the experts of a call are the next ones of a round."""
    order = torch.randperm(experts, generator=generator, device=generator.device)
    first, found = 0, []
    for call in ids:
        there = torch.unique(call)
        # In random order: among the names a hot expert stands anywhere.
        there = there[torch.randperm(len(there), generator=generator, device=generator.device)]
        places = (torch.arange(len(there), device=ids.device) + first) % experts
        names = torch.empty(experts, dtype=ids.dtype, device=ids.device)
        names[there] = order[places]
        found.append(names[call])
        first += len(there)
    return torch.stack(found)


def distinct(ids: torch.Tensor) -> list[int]:
    """How many experts each call ``(calls, M, k)`` reads."""
    return [len(torch.unique(call)) for call in ids]
