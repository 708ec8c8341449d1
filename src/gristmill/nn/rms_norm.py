"""RMSNorm as a module."""

from __future__ import annotations

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.rms_norm import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    r"""A drop-in for :class:`torch.nn.RMSNorm` that runs :func:`gristmill.rms_norm`.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + eps}} \cdot weight

    Takes the same arguments, holds the same parameters and loads the same state dicts. x is
    ``(..., *normalized_shape)`` of fp32, bf16, fp16 or fp64; the result has x's dtype. A
    ``normalized_shape`` of several dims is normalised over all of them, as torch does.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = len(self.normalized_shape)
        if dims == 1 and self.weight is not None:
            return rms_norm(x, self.weight, self.eps)  # which compares x with the weight
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"RMSNorm: x must be a torch.Tensor, got {type(x).__name__}")
        if x.shape[-dims:] != self.normalized_shape:
            raise ArgumentError(
                f"RMSNorm: x must end in {self.normalized_shape}, got {tuple(x.shape)}"
            )
        weight = self.weight.flatten() if self.elementwise_affine else None
        y = rms_norm(x.flatten(-dims), weight, self.eps)
        return y.reshape(x.shape)
