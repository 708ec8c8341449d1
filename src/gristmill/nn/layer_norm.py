"""LayerNorm as a module."""

from __future__ import annotations

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.layer_norm import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    r"""A drop-in for :class:`torch.nn.LayerNorm` that runs :func:`gristmill.layer_norm`.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + eps}} \cdot weight + bias

    Takes the same arguments, holds the same parameters and loads the same state dicts. input is
    ``(..., *normalized_shape)`` of fp32, bf16, fp16 or fp64; the result has its dtype. A
    ``normalized_shape`` of several dims is normalised over all of them, as torch does.
    """

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name for it
    ) -> torch.Tensor:
        x, dims = input, len(self.normalized_shape)
        if dims == 1 and self.weight is not None:
            # Which compares x with the weight.
            return layer_norm(x, self.weight, self.bias, self.eps)
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"LayerNorm: input must be a torch.Tensor, got {type(x).__name__}")
        if x.shape[-dims:] != self.normalized_shape:
            raise ArgumentError(
                f"LayerNorm: input must end in {self.normalized_shape}, got {tuple(x.shape)}"
            )
        y = layer_norm(x.flatten(-dims), _flat(self.weight), _flat(self.bias), self.eps)
        return y.reshape(x.shape)


def _flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.flatten()
