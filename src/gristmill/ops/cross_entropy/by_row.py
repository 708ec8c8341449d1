"""The cross entropy ops with every row computed alone: rows that do not depend on the batch.

The loss of all rows and what a mean is divided by are made of all rows at once.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.by_row import Kinds, by_row
from gristmill.ops.cross_entropy import reference


def _kinds(*args: Any) -> Kinds:
    reduction = args[7]
    return "row" if reduction == "none" else "whole", "row", "whole", "row"


cross_entropy = by_row(reference.cross_entropy, rows=(0, 1), results=_kinds)
cross_entropy_shard = by_row(reference.cross_entropy_shard, rows=(0, 1))


def cross_entropy_backward(
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    each = dloss.expand(target.shape)
    result: torch.Tensor = _backward(each, dlse, logits, target, *rest)
    return result


_backward = by_row(reference.cross_entropy_backward, rows=(2, 0, 1, 3, 4))


def cross_entropy_one_pass(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not target.numel():
        return reference.cross_entropy_one_pass(logits, target, *options)
    loss, lse, denominators, stats = cross_entropy(logits, target, *options)
    rest = (logits, target, stats, denominators, *options[:-1], 0, 0)
    return loss, lse, cross_entropy_backward(loss.new_ones(()), None, *rest)


def cross_entropy_one_pass_(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    loss, lse, gradient = cross_entropy_one_pass(logits, target, *options)
    logits.copy_(gradient)
    return loss, lse
