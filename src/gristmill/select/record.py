"""GRISTMILL_RECORD: the problems a run met, one JSON object per line, for `gristmill tune`.

A line describes the arguments of one call: of tensors all that a choice depends on (shape, strides,
dtype, alignment, which of them are the same), not their values. Each kind of problem is written
once per process, row count and words among its arguments, by a single append, so that several
processes may share a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.jit.folder import make_folders, read_plain
from gristmill.locks import Lock
from gristmill.log import one_line, warn_once
from gristmill.select.problem import Problem
from gristmill.settings import settings

# A growing length is a new problem at every step; nobody tunes more than this many.
MOST = 10_000
_MOST_BYTES = 256 << 20  # of what several processes record: 10,000 lines have 10 MB

_ALIGNMENT = 64
_PIECE = 1 << 26  # elements that are filled at once, to need little memory beside a tensor
# What torch and Python raise for a description of an argument that is wrong.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_seen: set[tuple[Path, str, tuple[str, ...]]] = set()
_lock = Lock()


@dataclass(frozen=True)
class Recorded:
    """One line of a recording: `key` names the problem, `arguments` describe the op's arguments.

    `where`: the file and the line, for errors.
    """

    op: str
    key: str
    device: str
    arguments: tuple[Any, ...]
    where: str = field(default="recording", compare=False)


def record(op: str, problem: Problem, args: tuple[Any, ...]) -> None:
    """Write the problem down if GRISTMILL_RECORD asks for it and it is new."""
    path = settings().record
    if path is None:
        return
    key = problem.key(problem.rows)
    with _lock:
        kind = path, key, _words(args)
        if kind in _seen or len(_seen) >= MOST:
            return
        _seen.add(kind)
        entry = {"op": op, "key": key, "device": problem.device.name, "arguments": described(args)}
        try:
            make_folders(path.parent)
            with open(path, "a", encoding="utf-8", opener=_opened) as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            warn_once(f"record {path}", f"GRISTMILL_RECORD: {path} cannot be written to: {error}")


def _opened(path: str, flags: int) -> int:
    """For the built-in open. Does not wait for a pipe's reader: without one, it is an OSError."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def forget_recorded() -> None:
    """Write every problem down again when it is met again (tests)."""
    with _lock:
        _seen.clear()


def read_recording(path: Path) -> list[Recorded]:
    """The problems of a recording, each once; ArgumentError, with the line, for anything else."""
    try:
        lines = read_plain(path, _MOST_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"recording {path}: cannot be read: {error}") from error
    found: dict[tuple[str, tuple[str, ...]], Recorded] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            op, key, device = entry["op"], entry["key"], entry["device"]
            if not all(isinstance(one, str) and one.isprintable() for one in (op, key, device)):
                raise ValueError("'op', 'key' and 'device' must be printable strings")
            where = f"recording {path}: line {number}"
            one = Recorded(op, key, device, tuple(entry["arguments"]), where)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArgumentError(
                f"recording {path}: line {number} is not one of a recording: {error!r}"
            ) from error
        found.setdefault((one.key, _words(one.arguments)), one)
    return list(found.values())


def described(args: tuple[Any, ...]) -> list[Any]:
    """Arguments as JSON: tensors by their metadata, dtypes by name, the rest as it is."""
    first: dict[int, int] = {}
    return [_described(value, position, first) for position, value in enumerate(args)]


def _described(value: Any, position: int, first: dict[int, int]) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) in first:
        return {"same_as": first[id(value)]}
    first[id(value)] = position
    return {
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "dtype": _name(value.dtype),
        "offset": value.data_ptr() % _ALIGNMENT,
    }


def rebuilt(
    recorded: Recorded, device: torch.device | str, limits: Mapping[int, int]
) -> tuple[Any, ...]:
    """Arguments of that kind, on `device`, with random values.

    `limits`: for arguments that hold indices, by position, what they index: values below it.
    Raises ArgumentError if the line does not describe arguments, or there is no memory for them.
    """
    values: list[Any] = []
    for position, entry in enumerate(recorded.arguments):
        try:
            values.append(_rebuilt(entry, values, device, limits.get(position, 2)))
        except torch.OutOfMemoryError:
            raise  # the line may be right
        except _MISFITS as error:
            raise ArgumentError(
                f"{recorded.where}: argument {position} cannot be made from "
                f"{one_line(repr(entry), 300)}: {one_line(repr(error), 300)}"
            ) from error
    return tuple(values)


def _rebuilt(entry: Any, before: Sequence[Any], device: torch.device | str, limit: int) -> Any:
    if not isinstance(entry, dict):
        return entry
    if "same_as" in entry:
        return before[entry["same_as"]]
    if "shape" not in entry:
        return _dtype(entry["dtype"])
    return _tensor(entry, device, limit)


def _tensor(entry: Mapping[str, Any], device: torch.device | str, limit: int) -> torch.Tensor:
    dtype = _dtype(entry["dtype"])
    shape, stride = tuple(entry["shape"]), tuple(entry["stride"])
    offset = int(entry["offset"]) // dtype.itemsize
    span = 0
    if 0 not in shape:
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Allocated whole and first: where there is no memory for it, that fails at once.
    memory = torch.empty(offset + span, dtype=dtype, device=device)
    if not memory.is_meta:  # whose random numbers take torch seconds to import
        for piece in memory.split(_PIECE):
            piece.copy_(_values(len(piece), dtype, device, limit))
    return memory.as_strided(shape, stride, offset)


def _values(count: int, dtype: torch.dtype, device: torch.device | str, limit: int) -> torch.Tensor:
    """`count` random numbers that suit a dtype."""
    if dtype.is_floating_point:
        return torch.randn(count, device=device)
    if dtype == torch.bool:
        return torch.rand(count, device=device) < 0.9
    if dtype == torch.uint8:
        return torch.randint(0, 256, (count,), dtype=dtype, device=device)
    return torch.randint(0, max(1, limit), (count,), dtype=dtype, device=device)


def _words(args: tuple[Any, ...]) -> tuple[str, ...]:
    """The words among arguments: of two calls with one key they may ask for other kernels beside
    the chosen one, as reductions of a loss do."""
    return tuple(value for value in args if isinstance(value, str))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
