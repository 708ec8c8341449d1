"""What the router ops must answer, in fp64: chosen by sorting, expert by expert."""

from __future__ import annotations

import math

import torch
from conformance_truth_core import Truth, accumulator_of, unit

Tensor = torch.Tensor
# What a power is off by, in half units of the last place (`exp2_fast` in machine.cuh), and what it
# is divided by.
POWER = 4.0


def topk_router(
    logits: Tensor,
    topk: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    groups: int,
    topk_groups: int,
    scale: float,
    ids_dtype: torch.dtype,
) -> list[Truth]:
    values = logits.double()
    scores, off = _scores(values, scoring)
    ranked = values if bias is None else scores + bias.double()
    rows = [
        chosen(row, topk, groups, topk_groups, pairs=bias is not None) for row in ranked.tolist()
    ]
    ids = torch.tensor(rows, dtype=torch.int64, device=logits.device).view(len(logits), topk)
    own, own_off = scores.gather(1, ids), off.gather(1, ids)
    if renormalize and scoring == "softmax":
        # One over the chosen logits. Among them may be no expert that has a score in fp32, or in
        # fp64; but what is no number makes all scores NaN, chosen or not.
        no_number = own.isnan()
        own, own_off = _scores(values.gather(1, ids), scoring)
        own = own.masked_fill(no_number, torch.nan)
    weights, terms = own, own * own_off
    if renormalize:
        total = _total(own, scoring)
        weights = own / total
        terms = weights * (own_off + (weights * own_off).sum(1, keepdim=True))
    weights, terms = weights * scale, terms * abs(scale)
    accumulator = accumulator_of(logits.dtype)
    # Powers below the smallest normal number may be lost.
    least = torch.where(own < 2 * torch.finfo(accumulator).tiny, 0.0, weights)
    low, high = torch.minimum(least, weights), torch.maximum(least, weights)
    exact = ids.double()
    return [
        Truth(low, high, terms, accumulator),
        Truth(exact, exact, exact, accumulator, exact=True),
    ]


def chosen(
    values: list[float], topk: int, groups: int, topk_groups: int, *, pairs: bool
) -> list[int]:
    """Of one token: falling values, then rising ids; NaN before all. `pairs`: groups by two."""

    def place(value: float) -> tuple[bool, float]:
        return (False, 0.0) if math.isnan(value) else (True, -value)

    size = len(values) // groups
    members = [range(group * size, group * size + size) for group in range(groups)]

    def worth(group: int) -> float:
        best = sorted((values[one] for one in members[group]), key=place)
        return sum(best[:2]) if pairs else best[0]

    order = sorted(range(groups), key=lambda group: (*place(worth(group)), group))
    able = [one for group in order[:topk_groups] for one in members[group]]
    return sorted(able, key=lambda one: (*place(values[one]), one))[:topk]


def doubtful(
    logits: Tensor,
    topk: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    groups: int,
    topk_groups: int,
    *rest: object,
) -> Tensor:
    """Which rows have biased scores, of experts or groups, so close that fp32 may swap them.

    Those that are equal in fp64 are so in fp32, too: the same logits and biases. Not so the sums
    of two different pairs of them: 0.5 + s and 0.25 + t may add up to what 0.25 + s and 0.5 + t do.
    """
    nothing = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if bias is None or logits.dtype == torch.float64 or not len(logits):
        return nothing
    ranked = _scores(logits.double(), scoring)[0] + bias.double()
    close = _close(ranked.unsqueeze(-1))
    if groups > 1:
        members = ranked.unflatten(-1, (groups, -1))
        close = close | _close(members.topk(min(2, members.shape[-1]), -1).values)
    return close


def _close(parts: Tensor) -> Tensor:
    """Of sums over the last dim; those of the same parts are equal, and not close."""
    values = parts.sum(-1)
    values, order = values.sort(-1, descending=True)
    parts = parts.take_along_dim(order.unsqueeze(-1), -2)
    gaps, other = values.diff(dim=-1).abs(), (parts.diff(dim=-2) != 0).any(-1)
    # A NaN comes first, and leaves the numbers after it as close as they are.
    size = values.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    return (other & (gaps < 64 * unit(torch.float32) * (1 + size))).any(-1)


def topk_router_backward(
    dweights: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> list[Truth]:
    """By the chain rule, score by score; the tests of gradients hold it against autograd."""
    values, ids = logits.double(), topk_ids.long()
    s, off = _scores(values, scoring)
    d, own = dweights.double() * scale, s.gather(1, ids)
    ds, ds_terms = d, d.abs()
    zeros = torch.zeros_like(s)
    if renormalize:
        if scoring == "softmax":
            # Whatever the others have: where that is nearly all, little is left of fp64 numbers.
            of_chosen = _scores(values.gather(1, ids), scoring)
            s, off = (zeros.scatter(1, ids, one) for one in of_chosen)
            own = s.gather(1, ids)
        total = _total(own, scoring)
        mean = (d * own).sum(1, keepdim=True) / total
        ds = (d - mean) / total
        ds_terms = (d.abs() + (d.abs() * own).sum(1, keepdim=True) / total) / total
    chosen_there = zeros.scatter(1, ids, 1.0) > 0
    exact, terms = (
        torch.where(chosen_there, s * zeros.scatter(1, ids, one), 0.0) for one in (ds, ds_terms)
    )
    if scoring == "sigmoid":
        rest = torch.sigmoid(-values)
        exact, terms = (torch.where(chosen_there, one * rest, 0.0) for one in (exact, terms))
    elif not renormalize:
        exact = exact - s * (own * ds).sum(1, keepdim=True)
        terms = terms + s * (own * ds_terms).sum(1, keepdim=True)
    # Powers are off on both ways: into the scores, and into what they are divided by.
    terms = terms * (2 * off + 2 * off.gather(1, ids).amax(1, keepdim=True))
    accumulator = accumulator_of(logits.dtype)
    least = torch.where(s < 2 * torch.finfo(accumulator).tiny, 0.0, exact)
    low, high = torch.minimum(least, exact), torch.maximum(least, exact)
    return [Truth(low, high, terms, accumulator)]


def lost_slopes(
    dweights: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """Which rows multiply an infinite gradient by what may be lost: a score or, of a sigmoid, what
    is missing to 1. fp32 has no number for it, and of 0 times infinity comes a NaN."""
    values = logits.double()
    chosen = values.gather(1, topk_ids.long())
    factors = _scores(chosen if scoring == "sigmoid" or renormalize else values, scoring)[0]
    if scoring == "sigmoid":
        factors = torch.minimum(factors, torch.sigmoid(-chosen))
    least = 2 * torch.finfo(accumulator_of(logits.dtype)).tiny
    return dweights.isinf().any(1) & (factors < least).any(1)


def _total(scores: Tensor, scoring: str) -> Tensor:
    total = scores.sum(1, keepdim=True)
    return total + 1e-20 if scoring == "sigmoid" else torch.where(total == 0, 1.0, total)


def _scores(values: Tensor, scoring: str) -> tuple[Tensor, Tensor]:
    """The scores, and by how many roundings each may be off."""
    if scoring == "sigmoid":
        return torch.sigmoid(values), torch.full_like(values, 2 * POWER)
    largest = values.amax(1, keepdim=True)
    nobody = largest == float("-inf")
    distance = (values - largest).masked_fill(nobody, float("-inf"))
    powers = distance.exp()
    scores = (powers / powers.sum(1, keepdim=True)).masked_fill(nobody, 0.0)
    # An exponent that is rounded makes the power off by that share of it.
    far = torch.where(distance.isfinite(), distance.abs(), 0.0)
    off = POWER + far + (scores * (POWER + far)).sum(1, keepdim=True)
    return scores, off
