"""For which architectures every change has kernels compiled, and for which only the long tests."""

from __future__ import annotations

import pytest

from gristmill.select.device import KNOWN

# Their code is nearly that of sm_80 and of sm_100a; what is their own, the memory of a block, is
# checked without a compiler.
ALIKE = ("sm_89", "sm_103a", "sm_120a")
EACH = [
    pytest.param(arch, id=arch, marks=[pytest.mark.long] if arch in ALIKE else []) for arch in KNOWN
]
