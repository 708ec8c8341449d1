"""GRISTMILL_RECORD: the problems a run met, one JSON object per line, for `gristmill tune`.

A line describes the arguments of one call: of tensors all that a choice depends on (shape, strides,
dtype, alignment, which of them are the same), not their values. Each kind of problem is written
once per process, row count and words among its arguments, by a single append, so that several
processes may share a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.jit.folder import read_plain
from gristmill.locks import Lock
from gristmill.log import warn_once
from gristmill.select.problem import Problem
from gristmill.settings import settings

# A growing length is a new problem at every step; nobody tunes more than this many.
MOST = 10_000
_MOST_BYTES = 256 << 20  # of what several processes record: 10,000 lines have 10 MB

_ALIGNMENT = 64
_seen: set[tuple[Path, str, tuple[str, ...]]] = set()
_lock = Lock()


@dataclass(frozen=True)
class Recorded:
    """One line of a recording: `key` names the problem, `arguments` describe the op's arguments."""

    op: str
    key: str
    device: str
    arguments: tuple[Any, ...]


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
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=_opened) as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            warn_once(f"record {path}", f"GRISTMILL_RECORD: {path} cannot be written to: {error}")


def _opened(path: str, flags: int) -> int:
    """For the built-in open. Does not wait for a pipe's reader: without one, it is an OSError."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


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
            one = Recorded(op, key, device, tuple(entry["arguments"]))
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
    """
    values: list[Any] = []
    for position, entry in enumerate(recorded.arguments):
        if not isinstance(entry, dict):
            values.append(entry)
        elif "same_as" in entry:
            values.append(values[entry["same_as"]])
        elif "shape" not in entry:
            values.append(getattr(torch, entry["dtype"]))
        else:
            values.append(_tensor(entry, device, limits.get(position, 2)))
    return tuple(values)


def _tensor(entry: Mapping[str, Any], device: torch.device | str, limit: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    shape, stride = tuple(entry["shape"]), tuple(entry["stride"])
    offset = int(entry["offset"]) // dtype.itemsize
    span = 0
    if 0 not in shape:
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if torch.device(device).type == "meta":  # whose random numbers take torch seconds to import
        return torch.empty(offset + span, dtype=dtype, device=device).as_strided(
            shape, stride, offset
        )
    memory = torch.cat([part.to(dtype) for part in _values(offset + span, dtype, device, limit)])
    return memory.as_strided(shape, stride, offset)


def _values(
    count: int, dtype: torch.dtype, device: torch.device | str, limit: int
) -> Iterator[torch.Tensor]:
    """`count` random numbers that suit a dtype, in pieces that need little room beside it."""
    piece = 1 << 26
    for start in range(0, max(1, count), piece):
        size = max(0, min(piece, count - start))
        if dtype.is_floating_point:
            yield torch.randn(size, device=device).to(dtype)
        elif dtype == torch.bool:
            yield torch.rand(size, device=device) < 0.9
        elif dtype == torch.uint8:
            yield torch.randint(0, 256, (size,), dtype=dtype, device=device)
        else:
            yield torch.randint(0, max(1, limit), (size,), dtype=dtype, device=device)


def _words(args: tuple[Any, ...]) -> tuple[str, ...]:
    """The words among arguments: of two calls with one key they may ask for other kernels beside
    the chosen one, as reductions of a loss do."""
    return tuple(value for value in args if isinstance(value, str))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
