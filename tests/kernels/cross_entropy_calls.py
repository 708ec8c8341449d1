"""Calls of the cross entropy ops on meta tensors: what the compile tests walk over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Where options are tried, too: rows of a warp, a block, a cluster, odd ones.
OPTION_COLUMNS = (512, 10001, 20480)


def cross_entropy_calls(
    logits: torch.Tensor, weight: torch.Tensor | None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    rows, columns = logits.shape[:-1], logits.shape[-1]
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    stats = torch.empty((*rows, 2), dtype=torch.float32, device="meta")
    dloss = torch.empty((), dtype=torch.float32, device="meta")
    denominators = torch.empty(2, dtype=torch.float32, device="meta")
    # Weight, smoothing, softcap.
    choices: list[tuple[Any, float, float | None]] = [(None, 0.0, None)]
    if columns in OPTION_COLUMNS:
        choices += [(None, 0.1, None), (None, 0.0, 30.0), (weight, 0.1, None), (weight, 0.1, 30.0)]
    for own, smoothing, softcap in choices:
        options = (own, -100, smoothing, 0.0, softcap, "mean")
        yield "cross_entropy", (logits, target, *options, False)
        yield "cross_entropy_one_pass", (logits, target, *options, False)
        yield (
            "cross_entropy_backward",
            (dloss, None, logits, target, stats, denominators, *options, 0, 0),
        )
        if own is None:
            shard = (0, 2 * columns, -100, softcap, smoothing != 0.0)
            yield "cross_entropy_shard", (logits, target, *shard)
    yield "cross_entropy_one_pass_", (logits, target, None, -100, 0.0, 0.0, None, "sum", False)
    yield "scale_gradient_", (logits, dloss)
