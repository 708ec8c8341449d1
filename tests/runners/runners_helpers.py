"""Small runners, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import gristmill.runners  # noqa: F401 - defines the ops below

SOURCE = Path(__file__).resolve().parents[2] / "src"

linear_gemm = torch.ops.gristmill.nvfp4_linear_gemm
moe_gemm = torch.ops.gristmill.nvfp4_moe_gemm


class Times:
    """x times a weight: the least that a linear layer can be."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype)


class Experts:
    """Every expert is a matrix; a row goes to its experts with their weights."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def _run_impl(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        each = torch.einsum("mh,mkhg->mkg", hidden_states.float(), self.weights[topk_ids])
        return (each * topk_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class Returns:
    """A runner that gives back what it was made with, or what that makes of the input."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def _run_impl(self, *tensors: torch.Tensor) -> Any:
        return self.result(*tensors) if callable(self.result) else self.result


def weight(rows: int = 8, columns: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def run_python(script: str, *args: str, env: dict[str, str] | None = None) -> str:
    """What a program of its own process prints; a program that fails here is an error."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}", **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
