"""Which problems a benchmark measures.

A suite is data: names of ops and shapes. A `Task` is one point of it, and what one row per
implementation is written for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gristmill.errors import ArgumentError

DTYPES = ("bfloat16", "float16", "float32")

# Result files name what is measured ("rms_norm_bwd"), the registry names ops ("rms_norm_backward").
OPS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "add_rms_norm",
    "rms_norm_bwd": "rms_norm_backward",
}

# Training sizes, where the roof counts (half a GB or more moves in all but the first two), then
# decoding and prefill sizes, where launch cost and latency count.
SHAPES = (
    (32768, 256),
    (32768, 1024),
    (32768, 4096),
    (32768, 8192),
    (16384, 16384),
    (8192, 32768),
    (4096, 65536),
    (4096, 131072),
    (2048, 262144),
    (1, 4096),
    (16, 4096),
    (64, 8192),
    (256, 7168),
    (2048, 4096),
)
QUICK_SHAPES = {
    "cuda": ((1, 4096), (256, 7168), (2048, 4096), (32768, 4096)),
    "cpu": ((16, 4096), (512, 4096)),
}
# Elements of x. On a CPU the large problems would take minutes and gigabytes to say nothing new:
# its times are there for ratios.
CPU_LIMIT = 32 * 1024 * 1024


@dataclass(frozen=True)
class Task:
    """One problem to measure: an op at `rows` x `columns` in one dtype."""

    name: str
    rows: int
    columns: int
    dtype: str

    @property
    def op(self) -> str:
        """The name in the registry of ops."""
        return OPS[self.name]

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.columns}"

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str


SUITES = {
    suite.name: suite
    for suite in (
        Suite("rms_norm", "kernel time of RMSNorm: forward, with residual, backward"),
        Suite("host", "host time of an eager call: without grad, with grad, backward"),
        Suite("start", "first call in a fresh process: empty cache, then a warm one"),
    )
}


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """`name`, if it is one of `names`; else an error that lists them and guesses what was meant."""
    names = list(names)
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    raise ArgumentError(f"unknown {kind} {name!r}{guess}: there are {', '.join(names)}")


def tasks(
    device_type: str,
    *,
    quick: bool = False,
    names: Sequence[str] = (),
    shapes: Sequence[tuple[int, int]] = (),
    dtypes: Sequence[str] = (),
) -> tuple[list[Task], list[str]]:
    """The problems of the `rms_norm` suite on a kind of device, and notes on what was left out.

    An empty filter means everything the suite has; shapes given by hand are always run.
    """
    chosen = [known("op", name, OPS) for name in names] or list(OPS)
    dtypes = [known("dtype", dtype, DTYPES) for dtype in dtypes] or ["bfloat16"]
    notes = []
    if not shapes:
        shapes = QUICK_SHAPES.get(device_type, QUICK_SHAPES["cpu"]) if quick else SHAPES
        if device_type != "cuda":
            small = tuple(shape for shape in shapes if shape[0] * shape[1] <= CPU_LIMIT)
            if len(small) < len(shapes):
                large = ", ".join(f"{m}x{n}" for m, n in shapes if (m, n) not in small)
                notes.append(f"left out on {device_type} (name them with --shape to run): {large}")
            shapes = small
    found = [
        Task(name, rows, columns, dtype)
        for dtype in dtypes
        for name in chosen
        for rows, columns in shapes
    ]
    return found, notes
