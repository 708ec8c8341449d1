"""What the block of the suite `end_to_end` should give, in fp64, and how far from it a result is.

Written from the formulas, of plain products and sums: nothing of what is measured is in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gristmill.bench.check import WrongResultError, check_lines
from gristmill.bench.end_to_end.model import EPS, Cache, Rotary, Sizes, Weights

# Of a row or a column of a result. bf16 rounds some ten times on the way: the worst line of a
# gradient was off by 1.6% (of the head's, 512 wide); a wrong weight is off by tens of percent.
LIMIT = 0.05
# Of the loss, a mean over all tokens.
LOSS_LIMIT = 1e-3
LOSS = "loss"


def in_fp64(tensors: Weights, *, grad: bool = False) -> dict[str, Tensor]:
    return {name: tensor.detach().double().requires_grad_(grad) for name, tensor in tensors.items()}


def block(
    sizes: Sizes,
    weights: Weights,
    x: Tensor,
    residual: Tensor | None,
    rotary: Rotary,
    cache: Cache | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the block adds, the residual before that, and its new keys and values; all are fp64."""
    total = x if residual is None else x + residual
    hidden = _norm(total, weights["norm1"])
    batch, tokens, _ = hidden.shape
    qkv = (hidden @ weights["qkv"].T).view(batch, tokens, -1, sizes.head)
    query = _turned(qkv[:, :, : sizes.heads], rotary)
    key = _turned(qkv[:, :, sizes.heads : sizes.heads + sizes.groups], rotary)
    value = qkv[:, :, sizes.heads + sizes.groups :]
    keys, values = key, value
    if cache is not None:
        at = int(cache.position)
        keys, values = cache.keys.double().transpose(1, 2), cache.values.double().transpose(1, 2)
        keys = torch.cat((keys[:, :at], key, keys[:, at + 1 :]), 1)
        values = torch.cat((values[:, :at], value, values[:, at + 1 :]), 1)
    attended = _attention(query, keys, values, causal=cache is None)
    total = total + attended.reshape(batch, tokens, -1) @ weights["out"].T
    hidden = _norm(total, weights["norm2"])
    if sizes.experts:
        added = _mixture(sizes, weights, hidden.view(-1, sizes.hidden)).view_as(hidden)
    else:
        added = _gated(hidden @ weights["gate_up"].T) @ weights["down"].T
    return added, total, key.transpose(1, 2), value.transpose(1, 2)


def head_loss(weights: Weights, total: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy behind the final norm and the head."""
    logits = _norm(total, weights["norm3"]).flatten(0, -2) @ weights["head"].T
    there = logits.gather(1, targets.reshape(-1, 1)).squeeze(1)
    return (torch.logsumexp(logits, 1) - there).mean()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    """(batch, tokens, heads, head): the pairs (i, i + head / 2) as complex numbers, turned."""
    half = x.shape[-1] // 2
    cos, sin = (one.double()[:, None, :half] for one in rotary)
    real, imaginary = x[..., :half], x[..., half:]
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


def _attention(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Tensor:
    """(batch, tokens, heads, head); each head of keys and values serves several of queries."""
    times = query.shape[2] // keys.shape[2]
    keys, values = keys.repeat_interleave(times, 2), values.repeat_interleave(times, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, keys) / query.shape[-1] ** 0.5
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


def _gated(both: Tensor) -> Tensor:
    width = both.shape[-1] // 2
    gate, up = both[..., :width], both[..., width:]
    return gate / (1 + torch.exp(-gate)) * up


def _mixture(sizes: Sizes, weights: Weights, tokens: Tensor) -> Tensor:
    """Expert by expert, over the tokens that have it."""
    scores = (tokens @ weights["router"].T).softmax(-1)
    shares, ids = scores.topk(sizes.chosen, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    result = torch.zeros_like(tokens)
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        inner = _gated(tokens[row] @ weights["w13"][expert].double().T)
        made = inner @ weights["w2"][expert].double().T
        result.index_add_(0, row, made * shares[row, slot].unsqueeze(1))
    return result


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor], limit: float) -> float:
    """The largest error of a tensor, by the norm of its difference over its norm.

    WrongResultError if the loss is off, or a row or a column of anything else by more than `limit`.
    """
    worst = 0.0
    for name, expected in want.items():
        outputs = got[name].detach()
        if outputs.shape != expected.shape:
            shapes = tuple(outputs.shape), tuple(expected.shape)
            raise WrongResultError(f"{name} is {shapes[0]} instead of {shapes[1]}")
        same = outputs.to(expected.dtype)
        off = float((same - expected).norm() / expected.norm())
        if name == LOSS:
            # Who gives it in 16 bits has rounded it once: bf16 knows 12.25 and 12.31, not 12.28.
            rounding = torch.finfo(outputs.dtype).eps / 2
            if not off <= max(LOSS_LIMIT, rounding):  # also when it is NaN
                raise WrongResultError(f"the loss is {float(same):.5f}, not {float(expected):.5f}")
        else:
            try:
                check_lines(same, expected, limit=limit)
            except WrongResultError as error:
                raise WrongResultError(f"{name}: {error}") from error
        worst = max(worst, off)
    return float(f"{worst:.4g}")
