"""Reports of compute-sanitizer about our kernels that are accepted, each with its reason.

tools/sanitize.py fails on every other report. A report is accepted if each of its accesses is one
of an entry's, by the source line that the report names and by whether it reads or writes there. A
report without lines is not accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "gristmill" / "kernels" / "cuda"


@dataclass(frozen=True)
class Access:
    """A read or a write in a report: "Read" or "Write", and where; `line` 0: it is not said."""

    kind: str
    file: str
    line: int


@dataclass(frozen=True)
class Place:
    """The one statement of a source file that has `text` in it."""

    kind: str
    file: str
    text: str

    def has(self, access: Access) -> bool:
        named = (access.kind, access.file) == (self.kind, self.file)
        return named and self.text in statement_at(self.file, access.line)


@dataclass(frozen=True)
class Accepted:
    """Reports of `tool` about `kernels` between `places`, and why each of them is in order."""

    tool: str
    kernels: tuple[str, ...]
    places: tuple[Place, ...]
    reason: str

    def covers(self, tool: str, kernel: str | None, accesses: Iterable[Access]) -> bool:
        """Whether it speaks of a report with these accesses, of which one writes and one reads."""
        found = tuple(accesses)
        if tool != self.tool or kernel not in self.kernels:
            return False
        if {one.kind for one in found} != {"Read", "Write"}:
            return False
        return all(any(place.has(one) for place in self.places) for one in found)


ACCEPTED = (
    Accepted(
        tool="racecheck",
        kernels=("nvfp4_wgmma", "nvfp4_moe"),
        places=(
            Place("Write", "machine.cuh", "cp.async.bulk.shared::cluster.global"),
            Place("Read", "nvfp4.cuh", "decode_row<T>(upper, codes.x, codes.y)"),
            Place("Read", "nvfp4.cuh", "decode_row<T>(lower, codes.z, codes.w)"),
            Place("Read", "nvfp4.cuh", "upper_scales[2] ="),
            Place("Read", "nvfp4.cuh", "lower_scales[2] ="),
            Place("Read", "nvfp4_wgmma.cu", "uint4 codes ="),
            Place("Read", "nvfp4_wgmma.cu", "uint2 scales ="),
            Place("Read", "nvfp4_moe.cu", "decode_piece<X>(mine,"),
        ),
        reason=(
            "A slot of the ring is read by 32 lanes of a warp and given back by one of them; "
            "racecheck takes the reads of the other 31 as unordered with the copy that fills the "
            "slot next. They are ordered: what a lane reads it decodes into operands of a wgmma, "
            "which is one operation of all lanes, and the lane that gives the slot back has waited "
            "for that operation by wgmma.wait_group. So every read has returned its value before "
            "the arrival, which the producer waits for before it copies (docs/kernel-rules.md). "
            "The same kernels with an arrival of every lane are run as well, and there no such "
            "report is accepted."
        ),
    ),
)


def reason(tool: str, kernel: str | None, accesses: Iterable[Access]) -> str | None:
    """Why a report with these accesses is accepted; None if it is not."""
    found = tuple(accesses)
    return next((one.reason for one in ACCEPTED if one.covers(tool, kernel, found)), None)


def statement_at(file: str, line: int) -> str:
    """The lines of the statement that has the given line of a source, numbered from 1; or ""."""
    lines = _lines(file)
    if not 1 <= line <= len(lines):
        return ""
    first = last = line - 1
    while first > 0 and not _ends(lines[first - 1]):
        first -= 1
    while last < len(lines) - 1 and not _ends(lines[last]):
        last += 1
    return "\n".join(lines[first : last + 1])


def _ends(line: str) -> bool:
    """Whether the next line begins a statement of its own."""
    code = line.partition("//")[0].strip()
    return not code or code.startswith("#") or code[-1] in ";{}:"


@functools.cache
def _lines(file: str) -> tuple[str, ...]:
    path = SOURCES / file
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
