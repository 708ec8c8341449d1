from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.log import forget_warnings
from gristmill.ops.moe import library as dense_experts
from gristmill.ops.nvfp4_linear import library as packed
from gristmill.ops.nvfp4_moe import slots as packed_experts
from gristmill.ops.registry import OPS
from gristmill.select.chooser import forget_failures
from gristmill.settings import reload_settings


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No warning, failure, setting or plan of one test is seen by another."""
    forget_warnings()
    yield
    monkeypatch.undo()
    reload_settings()
    forget_failures()
    for op in OPS.values():
        op.forget_plans()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 16-bit tensors, whose fp32 results a CPU has to get by another way.

    torch's grouped mm takes 16-bit tensors on a CPU, too, and rounds its results to their dtype.
    """

    def own(tensor: torch.Tensor) -> torch.dtype:
        return tensor.dtype

    def wide(multiply: Any) -> Any:
        def product(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
            assert a.dtype == b.dtype
            assert (out_dtype == torch.float32) == (a.dtype != torch.float32)
            return multiply(a.float(), b.float())

        return product

    for module in (packed, packed_experts, dense_experts):
        monkeypatch.setattr(module, "arithmetic", own)
    monkeypatch.setattr(torch, "mm", wide(torch.mm))
    monkeypatch.setattr(torch, "bmm", wide(torch.bmm))
