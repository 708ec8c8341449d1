"""What the files and the numbers of a checkpoint must be, on the way in and on the way out."""

from __future__ import annotations

import reprlib
import stat
from pathlib import Path
from typing import Any

import torch

from gristmill.errors import CheckpointError

_LARGEST_CODE = 0x7E  # of E4M3: above it are NaN and everything with a sign

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def shown(value: Any) -> str:
    """A value out of a file for a message, in some hundred characters at most."""
    return _short.repr(value)


def check_plain(path: Path) -> None:
    """That a file is an ordinary one, or a link to one: to open a pipe might wait for ever."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} cannot be read: it is no plain file")


def check_block_scales(where: str, scales: torch.Tensor) -> None:
    codes = scales.view(torch.uint8)
    if codes.numel() == 0 or int(codes.amax()) <= _LARGEST_CODE:
        return
    place = (codes > _LARGEST_CODE).nonzero()[0].tolist()
    value = float(scales[tuple(place)].float())
    raise CheckpointError(
        f"{where}: block scales must be neither negative nor NaN, got {value} at {place}"
    )


def check_global_scales(where: str, scales: torch.Tensor) -> None:
    """Of multipliers. Zero is that of a layer of zeros."""
    wrong = ~(scales.isfinite() & (scales >= 0))
    if not bool(wrong.any()):
        return
    place = wrong.nonzero()[0].tolist()
    value = float(scales[tuple(place)])
    raise CheckpointError(
        f"{where}: global scales must be finite and not negative, got {value} at {place}"
    )


def multiplier(where: str, scale: torch.Tensor, divides: bool) -> torch.Tensor:
    """A stored global scale, one value of fp32, as the factor that weights are multiplied by.

    Zero is the factor of a layer of zeros; nothing is divided by it.
    """
    if scale.numel() != 1:
        raise CheckpointError(f"{where} must be one value, got shape {tuple(scale.shape)}")
    factor = scale.reshape(()).clone()
    if divides:
        factor = 1 / factor
    for value in (scale.reshape(()), factor):
        if not bool(value.isfinite()) or float(value) < 0:
            least = "above zero" if divides else "not negative"
            raise CheckpointError(
                f"{where}: a global scale must be finite and {least}, got {float(scale)}"
            )
    return factor
