"""The kernels of the fused linear layer and loss: those of the loss, whose ops its blocks call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gristmill.ops.cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD
from gristmill.ops.op import Op
from gristmill.ops.space import Needed
from gristmill.select.device import Device


def forward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    yield from _of(CROSS_ENTROPY, device, dtype)


def backward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    yield from _of(CROSS_ENTROPY_BACKWARD, device, dtype)


def _of(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    if op.space is not None:
        yield from op.space(op, device, dtype)
