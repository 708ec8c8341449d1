"""Tests in Hugging Face's transformers; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

# Before transformers is imported: nothing here may ask the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# This folder is called transformers, too, and would be found, empty, where the package is not.
_spec = importlib.util.find_spec("transformers")
collect_ignore_glob = [] if _spec is not None and _spec.origin else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_graph_at_a_time() -> None:
    """Compiled graphs of other tests do not count towards dynamo's limit on recompiles."""
    torch._dynamo.reset()
