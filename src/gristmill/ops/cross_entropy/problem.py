"""A call of a cross entropy op as the chooser and the kernels see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.ops.rows.problem import RowDetails, dtypes_of, flags_of, layout_of, like
from gristmill.select.device import Device
from gristmill.select.problem import Problem

# Shorter rows go by narrow vectors: two ragged ends would be most of them.
SHORTEST_RAGGED = 128


@dataclass(frozen=True)
class Details(RowDetails):
    """What a plan needs: where rows lie, and what the kernel has to do.

    `layout.views` are the logits, nothing (no second tensor comes through the feed), and the
    gradient where there is one. `smooth`: every logit takes part in the loss (label smoothing, or
    the sum of a shard); `weights`: each with its class's weight. `added`: the rows' losses are
    added up, by a kernel beside the one that is chosen; no choice depends on it, and no key has it.
    """

    capped: bool = False
    smooth: bool = False
    weights: bool = False
    added: bool = False


def forward_problem(
    device: Device,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> Problem:
    options = (weight, label_smoothing, softcap)
    added = reduction != "none"
    return _problem("cross_entropy", device, (logits, None), target, *options, added)


def one_pass_problem(device: Device, logits: torch.Tensor, *options: Any) -> Problem:
    gradient = like(logits, logits.dtype)
    return _one_pass("cross_entropy_one_pass", device, gradient, logits, *options)


def one_pass_problem_(device: Device, logits: torch.Tensor, *options: Any) -> Problem:
    return _one_pass("cross_entropy_one_pass_", device, logits, logits, *options)


def _one_pass(
    op: str,
    device: Device,
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    return_lse: bool,
) -> Problem:
    options = (weight, label_smoothing, softcap)
    added = reduction != "none"
    return _problem(op, device, (logits, None, gradient), target, *options, added)


def backward_problem(
    device: Device,
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    first_class: int,
    classes: int,
) -> Problem:
    tensors = (logits, None, like(logits, logits.dtype))
    options = (weight, label_smoothing, softcap)
    return _problem("cross_entropy_backward", device, tensors, target, *options)


def shard_problem(
    device: Device,
    logits: torch.Tensor,
    target: torch.Tensor,
    first_class: int,
    classes: int,
    ignore_index: int,
    softcap: float | None,
    sums: bool,
) -> Problem:
    smoothing = 1.0 if sums else 0.0
    options = (None, smoothing, softcap)
    return _problem("cross_entropy_shard", device, (logits, None), target, *options)


def scale_problem(device: Device, gradient: torch.Tensor, factor: torch.Tensor) -> Problem:
    ragged = gradient.shape[-1] >= SHORTEST_RAGGED
    layout, copied = layout_of((gradient, None), ragged=ragged, by_element=True)
    return Problem(
        op="scale_gradient_",
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(gradient=gradient),
        flags=tuple(flags_of(layout, copied)),
        device=device,
        layout=Details(layout, copied),
    )


def _problem(
    op: str,
    device: Device,
    tensors: Sequence[torch.Tensor | None],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    label_smoothing: float,
    softcap: float | None,
    added: bool = False,
) -> Problem:
    logits = tensors[0]
    if logits is None:
        raise RuntimeError("there are always logits")
    smooth = label_smoothing != 0.0
    weights = smooth and weight is not None
    # Weights are read beside the logits, and are not shifted as ragged rows are.
    ragged = not weights and logits.shape[-1] >= SHORTEST_RAGGED
    layout, copied = layout_of(tensors, ragged=ragged)
    words = {
        "capped": softcap is not None,
        "smooth": smooth,
        "weights": weight is not None,
    }
    return Problem(
        op=op,
        rows=layout.rows,
        dims=(("N", layout.columns),),
        dtypes=dtypes_of(logits=logits, target=target),
        flags=(*(word for word, there in words.items() if there), *flags_of(layout, copied)),
        device=device,
        layout=Details(layout, copied, softcap is not None, smooth, weights, added),
    )
