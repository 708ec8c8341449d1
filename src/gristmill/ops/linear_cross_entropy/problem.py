"""A call of a linear cross entropy op as the chooser sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.select.device import Device
from gristmill.select.problem import Problem


@dataclass(frozen=True)
class Sizes:
    """What a plan for the chunks depends on beyond what a choice does."""

    rows: int
    classes: int
    columns: int
    dtype: torch.dtype
    chunk_rows: int | None
    device: str


def forward_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    *options: Any,
) -> Problem:
    tensors = (x, weight, target, bias, class_weight)
    return _problem("linear_cross_entropy", device, tensors, options, {})


def backward_problem(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    dloss: torch.Tensor,
    dlse: torch.Tensor | None,
    stats: torch.Tensor,
    denominators: torch.Tensor,
    *rest: Any,
) -> Problem:
    tensors = (x, weight, target, bias, class_weight)
    names = ("dx", "dweight", "dbias")
    wanted: dict[str, Any] = dict(zip(names, rest[-len(names) :], strict=True))
    wanted["dlse"] = dlse is not None
    return _problem("linear_cross_entropy_backward", device, tensors, rest[: -len(names)], wanted)


def _problem(
    op: str,
    device: Device,
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    more: dict[str, Any],
) -> Problem:
    x, weight, target, bias, class_weight = tensors
    _, label_smoothing, z_loss, softcap, reduction, chunk_rows = options
    (classes, columns), rows = weight.shape, math.prod(x.shape[:-1])
    flags = {
        "bias": bias is not None,
        "class_weight": class_weight is not None,
        "smoothing": label_smoothing > 0,
        "z_loss": z_loss > 0,
        "softcap": softcap is not None,
        reduction: True,
        **more,
    }
    dtypes = {"x": x.dtype, "target": target.dtype}
    return Problem(
        op=op,
        rows=rows,
        dims=(("V", classes), ("K", columns)),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(name for name, there in flags.items() if there),
        device=device,
        layout=Sizes(rows, classes, columns, x.dtype, chunk_rows, device.kind),
    )
