"""What several commands share: parsing of shapes and dtypes, error reports, the consoles."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from gristmill.errors import ArgumentError, DtypeError, GristmillError, UnknownVariant
from gristmill.names import counted

if TYPE_CHECKING:
    import torch
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

FAILURE, USAGE = 1, 2
SHAPE_HELP = (
    "A shape such as 4096x8192: rows x columns, with more leading dimensions if you like; of "
    "linear, matmul and nvfp4_linear MxNxK, or MxK for N = K, of moe and nvfp4_moe "
    "MxEXPERTSxTOPKxHxI, or MxH, of topk_router MxEXPERTSxTOPK, or MxEXPERTS for a topk of 8."
)
MOST_ELEMENTS = 10**17  # torch counts bytes in 64 bits
DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")
DTYPE_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DTYPE_HELP = "bfloat16, float16, float32 or float64 (or bf16, fp16, fp32, fp64)."


def console(*, stderr: bool = False) -> Console:
    """A console on the current stream, 200 columns wide if that is not a terminal.

    Text is shown as it is: paths and names may look like rich's markup or its emoji.
    """
    from rich.console import Console

    make = functools.partial(Console, stderr=stderr, highlight=False, markup=False, emoji=False)
    made = make()
    return made if made.is_terminal else make(width=200)


def write_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, default=str))


def parse_shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+([x×,]\d+)*", text):
        raise ArgumentError(f"{text!r} is not a shape: write rows x columns as in 4096x8192")
    shape = tuple(int(part) for part in re.split("[x×,]", text))
    if math.prod(shape) > MOST_ELEMENTS:
        raise ArgumentError(f"{text!r} is too large: sizes multiply to at most {MOST_ELEMENTS:.0e}")
    return shape


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of each word; a value is None, a truth value, a number, or else text."""
    named: dict[str, Any] = {"none": None, "true": True, "false": False}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name.isidentifier() or not equals:
            raise ArgumentError(f"{word!r} is not of the form NAME=VALUE, as in activation=silu")
        value = named.get(text.lower(), text)
        for kind in (int, float):
            if value is text:
                with contextlib.suppress(ValueError):
                    value = kind(text)
        found[name] = value
    return found


def parse_dtype(text: str) -> str:
    name = DTYPE_SHORT.get(text, text.removeprefix("torch."))
    if name not in DTYPE_NAMES:
        raise ArgumentError(f"{text!r} is not one of {', '.join(DTYPE_NAMES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, parse_dtype(name))
    return dtype


def torch_device(name: str | None) -> torch.device:
    """The device named, else the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"{name!r} is not a device: write cuda, cuda:1 or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError(f"{name!r} is not a device for this: write cuda, cuda:1 or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        sees = counted(torch.cuda.device_count(), "GPU")
        raise ArgumentError(
            f"there is no device {name!r}: torch sees {sees}; write cpu for the CPU"
        )
    return device


def check_file(path: Path, *, replaced: bool = True) -> None:
    """ArgumentError if no file can be written there: said before the work, not after it.

    `replaced`: it is written anew and put in its place, which a device or a pipe would not outlive.
    """
    real = _followed(path)
    device = path.absolute().is_relative_to("/dev") or (real.exists() and not real.is_file())
    if real.is_dir() or (replaced and device):
        raise ArgumentError(f"cannot write {path}: it is not a regular file; name another")
    if replaced or not real.exists():
        check_folder(real.parent)


def check_folder(path: Path) -> None:
    """ArgumentError if this folder neither takes files nor can be made."""
    real = _followed(path)
    there = next(one for one in (real, *real.parents) if one.exists())
    if not there.is_dir():
        raise ArgumentError(f"cannot write into {path}: {there} is no folder; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(f"cannot write into {path}: {there} is read-only; name another")


def _followed(path: Path) -> Path:
    real = Path(os.path.realpath(path))
    if any(one.is_symlink() for one in (real, *real.parents)):
        raise ArgumentError(f"cannot write {path}: a link in it leads to itself; name another")
    return real


def reported(function: Callable[P, R]) -> Callable[P, R]:
    """Errors that gristmill raises on purpose, and those of files, become a line and a code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except GristmillError as error:
            typer.echo(f"gristmill: {error}", err=True)
            wrong_call = isinstance(error, (ArgumentError, DtypeError, UnknownVariant))
            raise typer.Exit(USAGE if wrong_call else FAILURE) from error
        except BrokenPipeError:
            raise  # whoever reads the output has read enough
        except OSError as error:  # a file that is not there, a full disk
            typer.echo(f"gristmill: {error}", err=True)
            raise typer.Exit(FAILURE) from error

    return run
