"""Tests in real vLLM: `make test-vllm` runs them in an environment of their own.

Where there is no vLLM this folder is not even collected. `import vllm` would not tell: `tests` is
on the path of a test run, so this very folder is what it would find.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAVE_VLLM = find_spec("vllm.version") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
