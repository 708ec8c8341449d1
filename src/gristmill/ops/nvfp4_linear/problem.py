"""A call of an NVFP4 linear op as the chooser sees it."""

from __future__ import annotations

import math

import torch

from gristmill.formats.nvfp4.tensor import TILES
from gristmill.select.device import Device
from gristmill.select.problem import Problem


def forward_problem(
    device: Device,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
) -> Problem:
    dtypes = {"x": x.dtype, "out": out_dtype or x.dtype}
    flags = ["bias"] if bias is not None else []
    return _problem("nvfp4_linear", device, x, codes, dtypes, [*flags, *_layout(layout)])


def backward_problem(
    device: Device,
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> Problem:
    dtypes = {"dy": dy.dtype, "x": dtype}
    return _problem("nvfp4_linear_backward", device, dy, codes, dtypes, _layout(layout))


def _problem(
    op: str,
    device: Device,
    rows: torch.Tensor,
    codes: torch.Tensor,
    dtypes: dict[str, torch.dtype],
    flags: list[str],
) -> Problem:
    return Problem(
        op=op,
        rows=math.prod(rows.shape[:-1]),
        dims=(("N", codes.shape[0]), ("K", codes.shape[1] * 2)),
        dtypes=tuple((name, str(one).removeprefix("torch.")) for name, one in dtypes.items()),
        flags=tuple(flags),
        device=device,
    )


def _layout(layout: str) -> list[str]:
    return [layout] if layout == TILES else []
