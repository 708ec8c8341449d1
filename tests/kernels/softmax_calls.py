"""The calls of the softmax ops whose kernels are compiled for every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gristmill.ops.softmax.semantics import BOTTOM_RIGHT, EVERYTHING, TOP_LEFT

# Where masks, limits and logarithms are tried, too.
LOG_COLUMNS = (4096, 20480)
MASK_COLUMNS = (512, 4096, 10001, 262144)
CAUSAL_COLUMNS = (512, 4096, 10001, 20480)


def softmax_calls(
    x: torch.Tensor, other: torch.Tensor, mask_dtype: torch.dtype | None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """For x, or y and dy, as they lie."""
    yield "softmax", (x, EVERYTHING, 1.0, None)
    yield "softmax_backward", (other, x, EVERYTHING, 1.0)
    columns = x.shape[-1]
    mask = torch.empty(x.shape[-2:], dtype=torch.bool, device=x.device)
    if columns in LOG_COLUMNS:
        yield "log_softmax", (x, EVERYTHING, 1.0, None)
        yield "log_softmax_backward", (other, x, EVERYTHING, 1.0)
        yield "log_softmax", (x, TOP_LEFT, 1.0, mask)
        yield "softmax", (x, EVERYTHING, -1.0, None)
        if mask_dtype is not None:
            yield "softmax", (x, EVERYTHING, 1.0, mask.to(mask_dtype))
    if columns in MASK_COLUMNS:
        yield "softmax", (x, EVERYTHING, 1.0, mask)
    if columns in CAUSAL_COLUMNS:
        yield "softmax", (x, BOTTOM_RIGHT, 1.0, None)
        yield "softmax_backward", (other, x, BOTTOM_RIGHT, 1.0)
