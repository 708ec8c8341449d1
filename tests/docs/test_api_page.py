"""What docs/api.md says beyond signatures, which tests/test_docs.py has: errors and inlining."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

from gristmill import errors
from gristmill.ops import inline

DOCS = Path(__file__).resolve().parents[2] / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")


def test_errors_are_also_what_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+ \|$", API, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 10
    for name, base in rows:
        error = getattr(errors, name)
        assert issubclass(error, errors.GristmillError), name
        assert issubclass(error, getattr(builtins, base)), f"{name} is no {base}"


def test_what_can_be_inlined() -> None:
    """The sentence of the API, and every line of a page that asks for it."""
    section = API.partition("### `inline(")[2].partition("\n### ")[0]
    (sentence,) = re.findall(r"`rms_norm` and .* can be inlined\.", section, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    norms = {
        f"{add}{name}{fp8}"
        for add in ("", "add_")
        for name in ("rms_norm", "layer_norm")
        for fp8 in ("", "_fp8")
    }
    assert named | norms == inline._KNOWN
    for path in DOCS.glob("**/*.md"):
        for call in re.findall(r"\binline\(([^)]*)\)", path.read_text(encoding="utf-8")):
            asked = set(re.findall(r'"(\w+)"', call))
            assert asked <= inline._KNOWN, f"{path.name}: inline({call})"
