"""A model of one layer that has most of our ops in it, and calls of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import gristmill as gm

SOURCES = Path(__file__).resolve().parents[2] / "src"
WIDTH, EXPERTS, CLASSES = 64, 4, 50
# Of a call as it is traced, and of others.
SIZES = {"as traced": (2, 6), "larger": (5, 11), "one of each": (1, 2)}


class Layer(torch.nn.Module):
    """Attention, a mixture of experts, a loss. All but the NVFP4 weight is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = gm.nn.RMSNorm(WIDTH)
        self.last_norm = gm.nn.LayerNorm(WIDTH)
        self.qkv, self.qkv_bias = _parameter(3 * WIDTH, WIDTH), _parameter(3 * WIDTH)
        self.out = gm.nn.NVFP4Linear.from_linear(torch.nn.Linear(WIDTH, WIDTH))
        self.router = _parameter(EXPERTS, WIDTH)
        self.up, self.down = _parameter(EXPERTS, WIDTH, WIDTH), _parameter(EXPERTS, WIDTH, 32)
        self.head = _parameter(CLASSES, WIDTH)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = gm.linear(self.norm(x), self.qkv, self.qkv_bias).chunk(3, -1)
        scores = gm.softmax(q @ k.mT, scale=0.125, mask=mask[:, None, :], causal="bottom_right")
        y, x = gm.add_rms_norm(self.out(scores @ v), x, self.norm.weight)
        tokens = y.reshape(-1, WIDTH)
        weights, ids = gm.topk_router(gm.linear(tokens, self.router), 2)
        mixed = gm.moe(tokens, weights, ids, self.up, self.down)
        logits = gm.linear(self.last_norm(x + mixed.view_as(x)), self.head)
        return gm.cross_entropy(logits, target, label_smoothing=0.1), logits.detach()


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(0.1 * torch.randn(shape))


OPS = (
    "rms_norm",
    "linear",
    "softmax",
    "nvfp4_linear",
    "add_rms_norm",
    "topk_router",
    "moe",
    "layer_norm",
    "cross_entropy",
)


def layer(device: str) -> Layer:
    """fp32 on a CPU, where results are compared; bf16 on a GPU, where kernels read that."""
    torch.manual_seed(0)
    return Layer().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def inputs(device: str, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, length, WIDTH, generator=generator)
    mask = torch.rand(batch, length, generator=generator) < 0.8
    target = torch.randint(0, CLASSES, (batch, length), generator=generator)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return x.to(device, dtype), mask.to(device), target.to(device)


def exported(
    model: torch.nn.Module, device: str, strict: bool = False
) -> torch.export.ExportedProgram:
    """With any number of sequences of any length."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = tuple({0: batch, 1: length} for _ in range(3))
    args = inputs(device, *SIZES["as traced"])
    return torch.export.export(model, args, dynamic_shapes=shapes, strict=strict)


def environment() -> dict[str, str]:
    """Of a process that knows of the sources of gristmill and of no test."""
    return {**os.environ, "PYTHONPATH": str(SOURCES)}


def run_python(script: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """A new process, which says on stderr where it was if a signal ends it."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, *map(str, arguments)],
        env=environment(),
        cwd=SOURCES.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
