"""LayerNorm in plain PyTorch: the semantics, the CPU's kernels, the truth in tests.

Sums and products are taken in fp32, or fp64 for fp64 inputs. The functions are made of ordinary
torch ops: autograd, vmap and compilers (`gristmill.inline`) see through them.
"""

from __future__ import annotations

import torch

from gristmill.ops.norms.semantics import accumulator, normalised, sum_dtype


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    precise = accumulator(x.dtype)
    y, _ = normalised(x.to(precise), eps, _centered)
    if weight is not None:
        y = y * (weight.to(precise) + weight_offset)
    if bias is not None:
        y = y + bias.to(precise)
    return y.to(out_dtype or x.dtype)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    precise = accumulator(sum_dtype(x, residual))
    total = (x.to(precise) + residual.to(precise)).to(sum_dtype(x, residual))
    return layer_norm(total, weight, bias, eps, weight_offset, out_dtype or x.dtype), total


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    precise = accumulator(x.dtype)
    d = dy.to(precise)
    h, rstd = normalised(x.to(precise), eps, _centered)
    g = d if weight is None else d * (weight.to(precise) + weight_offset)
    dx = rstd * (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(precise)
    dweight, dbias = x.new_empty(0), x.new_empty(0)
    if weight_grad and weight is not None:
        dweight = _over_rows(d * h).to(weight.dtype)
    if bias_dtype is not None:
        dbias = _over_rows(d).to(bias_dtype)
    return dx.to(x.dtype), dweight, dbias


def _centered(h: torch.Tensor) -> torch.Tensor:
    """h without its mean. The second time takes what the first mean was off by its rounding.

    Of values near 1e4 in fp32 that is up to 5e-4, which would be seen where they differ by 1.
    """
    h = h - h.mean(-1, keepdim=True)
    return h - h.mean(-1, keepdim=True)


def _over_rows(values: torch.Tensor) -> torch.Tensor:
    leading = list(range(values.dim() - 1))
    return values.sum(leading) if leading else values
