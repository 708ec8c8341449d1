"""RMSNorm in plain PyTorch: the semantics, the CPU's kernels, the truth in tests, what is inlined.

Sums and products are taken in fp32, or fp64 for fp64 inputs. The functions are made of ordinary
torch ops: autograd, vmap and compilers see through them.
"""

from __future__ import annotations

import torch

from gristmill.ops.norms.semantics import normalised
from gristmill.ops.rms_norm.semantics import accumulator, epsilon, sum_dtype


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    precise = accumulator(x.dtype)
    y, _ = normalised(x.to(precise), epsilon(eps, x.dtype))
    if casting == "llama":
        y = y.to(x.dtype)
        if weight is not None:
            product = y.to(precise) * (weight.to(precise) + weight_offset)
            y = product.to(torch.promote_types(x.dtype, weight.dtype))
    elif weight is not None:
        y = y * (weight.to(precise) + weight_offset)
    return y.to(out_dtype or x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    precise = accumulator(sum_dtype(x, residual))
    total = (x.to(precise) + residual.to(precise)).to(sum_dtype(x, residual))
    y = rms_norm(total, weight, eps, weight_offset, casting, out_dtype or x.dtype)
    return y, total


def fused_add_rms_norm_(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> None:
    precise = accumulator(sum_dtype(x, residual))
    total = x.to(precise) + residual.to(precise)
    y, _ = normalised(total, eps)
    if weight is not None:
        y = y.to(weight.dtype) * weight
    residual.copy_(total)
    x.copy_(y)


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dsum: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    precise = accumulator(x.dtype)
    h, d = x.to(precise), dy.to(precise)
    h, rstd = normalised(h, epsilon(eps, x.dtype))
    g = d if weight is None else d * (weight.to(precise) + weight_offset)
    dx = rstd * (g - h * (g * h).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(precise)
    if weight_grad and weight is not None:
        leading = list(range(x.dim() - 1))
        products = d * h
        dweight = (products.sum(leading) if leading else products).to(weight.dtype)
    else:
        dweight = x.new_empty(0)
    return dx.to(x.dtype), dweight
