"""The modules of tools/sanitize.py, which lie beside each other as scripts do."""

from __future__ import annotations

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
        import sanitize_blind
        import sanitize_parts
        import sanitize_report
        import sanitize_runs
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return SimpleNamespace(
        command=sanitize,
        blind=sanitize_blind,
        parts=sanitize_parts,
        report=sanitize_report,
        runs=sanitize_runs,
    )
