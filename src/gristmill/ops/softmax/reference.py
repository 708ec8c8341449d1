"""Softmax in plain PyTorch: the semantics, the CPU's kernels, what is inlined and transformed.

Exponents and sums are taken in fp32, or fp64 for fp64 inputs. The functions are made of ordinary
torch ops: autograd, vmap and compilers see through them.
"""

from __future__ import annotations

import torch

from gristmill.ops.softmax.semantics import EVERYTHING, accumulator, causal_offset

_NOBODY = float("-inf")


def softmax(x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    if x.shape[-1] == 0:
        return x.clone()
    values, nobody = _values(x, causal, scale, mask)
    return torch.softmax(values, -1).masked_fill(nobody, 0.0).to(x.dtype)


def log_softmax(
    x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    if x.shape[-1] == 0:
        return x.clone()
    values, nobody = _values(x, causal, scale, mask)
    result = torch.log_softmax(values, -1)
    # Constants, for autograd: what cannot happen has no gradient, and none comes from it.
    return result.masked_fill(nobody | (result == _NOBODY), _NOBODY).to(x.dtype)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float) -> torch.Tensor:
    precise = accumulator(y.dtype)
    p, d = _seen(y.to(precise), causal), _seen(dy.to(precise), causal)
    dx = scale * p * (d - (d * p).sum(-1, keepdim=True))
    return _seen(dx, causal).to(y.dtype)  # 0 there even if the sum is NaN


def log_softmax_backward(
    dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float
) -> torch.Tensor:
    precise = accumulator(y.dtype)
    logs = _seen(y.to(precise), causal, _NOBODY)
    d = dy.to(precise).masked_fill(logs == _NOBODY, 0.0)
    dx = scale * (d - logs.exp() * d.sum(-1, keepdim=True))
    return dx.masked_fill(logs == _NOBODY, 0.0).to(y.dtype)


def _values(
    x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the softmax is of, and which rows have nobody in them: those are zeros instead."""
    values = x.to(accumulator(x.dtype))
    if mask is None and 0.0 < scale != 1.0:
        # What a row has in common goes before anything is scaled, and rounded.
        largest = _seen(values.detach(), causal, _NOBODY).amax(-1, keepdim=True)
        values = (values - largest.masked_fill(largest == _NOBODY, 0.0)) * scale
    elif scale != 1.0:
        values = values * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            values = values.masked_fill(~mask, _NOBODY)
        else:
            values = values + mask.to(values.dtype)
    values = _seen(values, causal, _NOBODY)
    nobody = values.detach().amax(-1, keepdim=True) == _NOBODY
    return values.masked_fill(nobody, 0.0), nobody


def _seen(values: torch.Tensor, causal: int, instead: float = 0.0) -> torch.Tensor:
    """`values`, with something else beyond the causal limit."""
    if causal == EVERYTHING:
        return values
    queries, keys = values.shape[-2:]
    rows = torch.arange(queries, device=values.device)[:, None]
    columns = torch.arange(keys, device=values.device)
    hidden = columns > rows + causal_offset(causal, queries, keys)
    return values.masked_fill(hidden, instead)
