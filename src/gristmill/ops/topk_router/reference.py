"""The router in plain PyTorch: the semantics, the CPU's kernels, what is transformed.

Scores are taken in fp32, or fp64 for fp64 logits. The functions are made of ordinary torch ops:
autograd, vmap and compilers see through them.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.topk_router.semantics import SMALLEST_TOTAL, BackwardCall, Call, accumulator

_NOBODY = float("-inf")


def topk_router(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    logits = call.logits.to(accumulator(call.logits.dtype))
    scores = scores_of(logits, call.scoring)
    # Scores are in the order of their logits, but may have more ties: rounding makes them.
    ranked = logits if call.bias is None else scores + call.bias.to(scores.dtype)
    ids = _chosen(call, ranked.detach())
    return weights_of(call, logits, scores, ids) * call.scale, ids.to(call.ids)


def topk_router_backward(*args: Any) -> torch.Tensor:
    call = BackwardCall(*args)
    precise = accumulator(call.logits.dtype)
    logits, ids = call.logits.to(precise), call.topk_ids.long()
    d = call.dweights.to(precise) * call.scale
    everyone = torch.zeros_like(logits)
    if call.scoring == "softmax" and not call.renormalize:
        scores = scores_of(logits, call.scoring)
        mean = (d * scores.gather(-1, ids)).sum(-1, keepdim=True)
        return (scores * (everyone.scatter(-1, ids, d) - mean)).to(call.logits.dtype)
    chosen = logits.gather(-1, ids)
    scores = scores_of(chosen, call.scoring)  # of a softmax what all others have cancels
    if call.renormalize:
        shares = shares_of(scores, call.scoring)
        d = d - (d * shares).sum(-1, keepdim=True)
        if call.scoring == "sigmoid":
            d = d / (scores.sum(-1, keepdim=True) + SMALLEST_TOTAL)
    if call.scoring == "sigmoid":
        # 1 - s as a sigmoid of its own: near 1 nothing would be left of a difference.
        d = d * torch.sigmoid(-chosen)
    return everyone.scatter(-1, ids, scores * d).to(call.logits.dtype)


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """The scores of all experts, in the dtype of `logits`; zeros where all logits are -inf."""
    if scoring == "sigmoid":
        return torch.sigmoid(logits)
    nobody = logits.detach().amax(-1, keepdim=True) == _NOBODY
    return torch.softmax(logits.masked_fill(nobody, 0.0), -1).masked_fill(nobody, 0.0)


def weights_of(
    call: Call, logits: torch.Tensor, scores: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """Of the chosen, without `scale`. `scores`: of all experts, or None if nobody needed them."""
    chosen = logits.gather(-1, ids)
    if call.scoring == "softmax" and call.renormalize:
        # Of the chosen logits: with a bias their scores may be below what fp32 has numbers for.
        weights = scores_of(chosen, call.scoring)
        if scores is None:
            return weights
        # One expert that is no number makes all scores NaN, chosen or not.
        return weights.masked_fill(scores.gather(-1, ids).isnan(), float("nan"))
    weights = scores_of(chosen, call.scoring) if scores is None else scores.gather(-1, ids)
    return shares_of(weights, call.scoring) if call.renormalize else weights


def shares_of(scores: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores made to add up to one. Where those of a softmax are all zero they stay so."""
    total = scores.sum(-1, keepdim=True)
    if scoring == "sigmoid":
        return scores / (total + SMALLEST_TOTAL)
    return scores / total.masked_fill(total == 0.0, 1.0)


def _chosen(call: Call, ranked: torch.Tensor) -> torch.Tensor:
    """``(..., topk)`` int64: the largest, of equal ones the lowest id first; NaN is the largest."""
    if not call.grouped:
        return _largest(ranked, call.topk)
    members = ranked.unflatten(-1, (call.groups, call.group_size))
    if call.bias is None:
        best = members.amax(-1)
    else:
        best = members.topk(min(2, call.group_size), -1).values.sum(-1)
    kept = _largest(best, call.topk_groups).sort(-1).values
    # Only who is in these groups takes part: in the order of ids, for the ties.
    inside = torch.arange(call.group_size, device=ranked.device)
    candidates = (kept.unsqueeze(-1) * call.group_size + inside).flatten(-2)
    return candidates.gather(-1, _largest(ranked.gather(-1, candidates), call.topk))


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    # On a GPU torch sorts by bits: -0 would come after 0, and a NaN with a sign after all numbers.
    values = (values + 0.0).masked_fill(values.isnan(), float("nan"))
    return values.sort(stable=True, dim=-1, descending=True).indices[..., :count]
