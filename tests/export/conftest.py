"""What the conformance tests have for arguments and bits is of use here, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "conformance"))
