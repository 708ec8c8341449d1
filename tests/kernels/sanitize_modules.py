"""The modules of tools/sanitize.py, which lie beside each other as scripts do."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

from gristmill.select.device import KNOWN

ROOT = Path(__file__).resolve().parents[2]
H200 = KNOWN["sm_90a"]


def load() -> SimpleNamespace:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import sanitize
        import sanitize_accepted
        import sanitize_blind
        import sanitize_parts
        import sanitize_report
        import sanitize_runs
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return SimpleNamespace(
        accepted=sanitize_accepted,
        command=sanitize,
        blind=sanitize_blind,
        parts=sanitize_parts,
        report=sanitize_report,
        runs=sanitize_runs,
    )


def code_in(cubin: bytes) -> list[bytes]:
    """The machine code of each kernel of a cubin, which is an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    strings = sections[names][4]
    return [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", strings + name)
    ]
