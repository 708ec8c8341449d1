"""Reports of compute-sanitizer about our kernels that are accepted, each with its reason.

tools/sanitize.py fails on every other report. A report is accepted if each of its accesses is one
of an entry's: by the source line and the function that the report names, and by whether it reads or
writes there. A report without lines is not accepted. Only the kernels with rings are compiled with
line numbers (sanitize_blind.py), so no report about another kernel is accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src" / "gristmill" / "kernels" / "cuda"


@dataclass(frozen=True)
class Access:
    """A read or a write of a report; `line` 0: no source line is named."""

    kind: str  # "Read", "Write" or "Atomic"
    function: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Place:
    """The only statement with `text` in `file`, in `function` or in code inlined into it."""

    kind: str
    function: str
    file: str
    text: str

    def has(self, access: Access) -> bool:
        """Whether `access` is one by this statement."""
        named = (access.kind, access.function, access.file)
        return named == (self.kind, self.function, self.file) and self.text in statement_at(
            self.file, access.line
        )


@dataclass(frozen=True)
class Accepted:
    """Reports of `tool` in runs of `variants` between `places`, and why each is not a race."""

    tool: str
    variants: tuple[str, ...]
    places: tuple[Place, ...]
    reason: str

    def covers(self, tool: str, run: str, accesses: Iterable[Access]) -> bool:
        """Whether the report is one of a write and a read, all of them at `places`."""
        found = tuple(accesses)
        if tool != self.tool or variant_of(run) not in self.variants:
            return False
        if {one.kind for one in found} != {"Read", "Write"}:
            return False
        return all(any(place.has(one) for place in self.places) for one in found)


_DECODED = "decode_piece"
ACCEPTED = (
    Accepted(
        tool="racecheck",
        variants=("nvfp4_linear/cuda_wgmma", "nvfp4_moe/cuda_wgmma"),
        places=(
            Place("Write", "bulk_copy", "machine.cuh", "cp.async.bulk.shared::cluster.global"),
            Place("Read", _DECODED, "nvfp4.cuh", "decode_row<T>(upper, codes.x, codes.y)"),
            Place("Read", _DECODED, "nvfp4.cuh", "upper_scales[2] ="),
            Place("Read", "nvfp4_wgmma", "nvfp4_wgmma.cu", "uint4 codes ="),
            Place("Read", "nvfp4_wgmma", "nvfp4_wgmma.cu", "uint2 scales ="),
        ),
        reason=(
            "32 lanes of a warp read a slot of the ring and one of them gives it back. racecheck "
            "reports the reads of the other 31 as unordered with the copy that fills the slot "
            "next. They are ordered by data flow: a lane decodes what it reads into operands of a "
            "wgmma, which is one operation of all lanes and completes only after their loads have "
            "returned. The lane that gives the slot back has waited for it by wgmma.wait_group, "
            "and the producer waits for that arrival before it copies (docs/kernel-rules.md). The "
            "same kernels also run with an arrival of every lane, where no report is accepted. "
            "That the arrival follows the wait is checked by the emulation "
            "(tests/kernels/test_emulated_ring_order.py)."
        ),
    ),
)


def reason(tool: str, run: str, accesses: Iterable[Access]) -> str | None:
    """Why a report with these accesses is accepted; None if it is not."""
    found = tuple(accesses)
    return next((one.reason for one in ACCEPTED if one.covers(tool, run, found)), None)


def variant_of(run: str) -> str:
    """The op and the variant in the name of a run."""
    return "/".join(run.split("/")[:2])


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
