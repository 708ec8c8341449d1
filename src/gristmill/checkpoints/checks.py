"""Checks of the files and the values of a checkpoint, for reading and for writing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch

from gristmill.errors import CheckpointError
from gristmill.log import shown

_LARGEST_CODE = 0x7E  # of E4M3: above it are NaN and everything with a sign


def printable(name: str) -> str:
    """The name of a tensor for a message: as it is, if it cannot break the line."""
    return name if name.isprintable() else shown(name)


def escaped(message: str) -> str:
    """A message of another library, which quotes from a file, on one line."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in message)


def check_regular(path: Path) -> os.stat_result:
    """Check that `path` is a regular file or a link to one. Opening a pipe waits for its writer."""
    try:
        found = path.stat()
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is not a regular file")
    return found


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
    """Check multipliers. Zero is valid: a layer of zeros may have it."""
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

    A factor of zero is valid: a layer of zeros may have it. A divisor must be above zero.
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
