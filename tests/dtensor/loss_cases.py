"""Losses over DTensors: what is shared out how, and what one process makes of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Scenario:
    """Logits on a mesh. Placements are written as "S0" (sharded on dim 0), "R" and "P"."""

    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    rows: tuple[int, ...] = (6, 5)
    classes: int = 36
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    target: tuple[str, ...] | None = None  # placements; None: a plain tensor
    change: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the targets

    def whole(self) -> dict[str, torch.Tensor]:
        """All of the numbers, the same in every process."""
        generator = torch.Generator().manual_seed(11)
        logits = torch.randn(*self.rows, self.classes, generator=generator) * 3
        target = torch.randint(0, self.classes, self.rows, generator=generator)
        target = target if self.change is None else self.change(target)
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        each = self.rows if self.options.get("reduction") == "none" else ()
        return {
            "logits": logits.to(self.dtype),
            "target": target,
            "weight": torch.rand(self.classes, generator=generator) + 0.1,
            "dloss": torch.randn(each, generator=generator).to(precise),
            "dlse": torch.randn(self.rows, generator=generator).to(precise),
        }


def ignored(target: torch.Tensor) -> torch.Tensor:
    """Most of the first rows are left out, and a few of the others."""
    at = torch.arange(target.numel()).view(target.shape)
    return torch.where((at < target.numel() // 2 - 2) | (at % 7 == 3), -100, target)


def first_rows(target: torch.Tensor) -> torch.Tensor:
    """Only the very first row counts: other ranks have none."""
    found = torch.full_like(target, -100)
    found.view(-1)[0] = target.view(-1)[0]
    return found


def no_class(target: torch.Tensor) -> torch.Tensor:
    found = target.clone()
    found.view(-1)[3] = 36
    return found


LSE = {"return_lse": True}
ALL = {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 6.0, "return_lse": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "classes": {"mesh": (4,), "placements": ("S-1",)},
    "uneven classes": {"mesh": (4,), "placements": ("S-1",), "classes": 37},
    "fewer classes than ranks": {"mesh": (4,), "placements": ("S-1",), "classes": 3},
    "rows": {"mesh": (4,), "placements": ("S0",)},
    "uneven rows": {"mesh": (4,), "placements": ("S1",), "rows": (2, 7)},
    "fewer rows than ranks": {"mesh": (4,), "placements": ("S0",), "rows": (3,)},
    "rows and classes": {"mesh": (2, 2), "placements": ("S0", "S-1"), "classes": 37},
    "classes and rows": {"mesh": (2, 2), "placements": ("S-1", "S1"), "rows": (2, 5)},
    "classes twice": {"mesh": (2, 2), "placements": ("S-1", "S-1"), "classes": 38},
    "rows twice": {"mesh": (2, 2), "placements": ("S0", "S1"), "rows": (3, 5)},
    "replicated": {"mesh": (4,), "placements": ("R",)},
    "rows, replicated": {"mesh": (2, 2), "placements": ("R", "S0")},
    "partial": {"mesh": (4,), "placements": ("P",)},
    "partial, classes": {"mesh": (2, 2), "placements": ("P", "S-1")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"options": LSE, "change": ignored},
    "mean, all": {"options": ALL, "change": ignored},
    "mean, weights": {"options": ALL, "change": ignored, "weighted": True},
    "sum, all": {"options": {**ALL, "reduction": "sum"}, "change": ignored},
    "none, all": {"options": {**ALL, "reduction": "none"}, "change": ignored},
}
SCENARIOS = {
    f"{layout}: {name}": Scenario(**{**places, **options})
    for layout, places in LAYOUTS.items()
    for name, options in OPTIONS.items()
} | {
    "no lse": Scenario((4,), ("S-1",), options={"z_loss": 0.1}, change=ignored),
    "no lse, rows": Scenario((4,), ("S0",), options={"z_loss": 0.1}, change=ignored),
    "one row counts": Scenario((4,), ("S0",), change=first_rows),
    "one row counts, weights": Scenario(
        (2, 2), ("S0", "S-1"), options={"z_loss": 0.1}, change=first_rows, weighted=True
    ),
    "no row counts": Scenario((4,), ("S0",), change=lambda target: target * 0 - 100),
    "a target that is no class": Scenario(
        (2, 2), ("S0", "S-1"), options={"reduction": "none"}, change=no_class
    ),
    "a target that is no class, weights": Scenario(
        (4,), ("S0",), options={"reduction": "none"}, change=no_class, weighted=True
    ),
    "another ignore_index": Scenario((4,), ("S-1",), options={"ignore_index": 5}),
    "a target that is sharded": Scenario((4,), ("S-1",), target=("S0",), change=ignored),
    "a target like the rows": Scenario((2, 2), ("S0", "S-1"), target=("S0", "R")),
    "a target on its own": Scenario((2, 2), ("S0", "S-1"), target=("S1", "S0"), rows=(5, 3)),
    "int32 targets": Scenario((4,), ("S0",), change=lambda target: target.int()),
    "one row": Scenario((4,), ("S-1",), rows=(), options=LSE),
    "one row, weights": Scenario((4,), ("S-1",), rows=(), options=LSE, weighted=True),
    "no rows": Scenario((4,), ("S0",), rows=(0,), options={"reduction": "sum"}),
    "bf16": Scenario((2, 2), ("S0", "S-1"), dtype=torch.bfloat16, options=ALL),
    "fp16": Scenario((4,), ("S0",), dtype=torch.float16, options=ALL, weighted=True),
    "fp32": Scenario((2, 2), ("S0", "S-1"), dtype=torch.float32, options=ALL),
}


@dataclass(frozen=True)
class LinearScenario:
    """A linear layer and its loss on a mesh; placements as above."""

    mesh: tuple[int, ...]
    x: tuple[str, ...]
    weight: tuple[str, ...]
    rows: tuple[int, ...] = (4, 5)
    classes: int = 36
    columns: int = 12
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = True
    weighted: bool = False

    def whole(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(13)
        target = torch.randint(0, self.classes, self.rows, generator=generator)
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        each = self.rows if self.options.get("reduction") == "none" else ()
        return {
            "x": torch.randn(*self.rows, self.columns, generator=generator).to(self.dtype),
            "weight": torch.randn(self.classes, self.columns, generator=generator).to(self.dtype),
            "bias": torch.randn(self.classes, generator=generator).to(self.dtype),
            "target": ignored(target),
            "class_weight": torch.rand(self.classes, generator=generator) + 0.1,
            "dloss": torch.randn(each, generator=generator).to(precise),
        }


MOST = {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 6.0}
LINEAR_LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {"mesh": (4,), "x": ("S0",), "weight": ("R",)},
    "uneven rows": {"mesh": (4,), "x": ("S1",), "weight": ("R",)},
    "classes": {"mesh": (4,), "x": ("R",), "weight": ("S0",)},
    "uneven classes": {"mesh": (4,), "x": ("R",), "weight": ("S0",), "classes": 37},
    "classes, sequence parallel": {"mesh": (4,), "x": ("S1",), "weight": ("S0",)},
    "rows and classes": {"mesh": (2, 2), "x": ("S0", "R"), "weight": ("R", "S0")},
    "rows twice, classes": {"mesh": (2, 2), "x": ("S0", "S1"), "weight": ("R", "S0")},
    "classes twice": {"mesh": (2, 2), "x": ("S0", "R"), "weight": ("S0", "S0"), "classes": 38},
    "columns": {"mesh": (4,), "x": ("S-1",), "weight": ("S1",)},
    "partial": {"mesh": (2, 2), "x": ("P", "S0"), "weight": ("S0", "R")},
    "replicated": {"mesh": (4,), "x": ("R",), "weight": ("R",)},
}
LINEAR_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"bias": False},
    "mean, all": {"options": {**MOST, "chunk_rows": 3}},
    "mean, weights": {"options": MOST, "weighted": True},
    "sum": {"options": {"reduction": "sum", "chunk_rows": 1}},
    "sum, all": {"options": {**MOST, "reduction": "sum"}},
    "none, all": {"options": {**MOST, "reduction": "none"}},
}
LINEAR_SCENARIOS = {
    f"{layout}: {name}": LinearScenario(**{**places, **options})
    for layout, places in LINEAR_LAYOUTS.items()
    for name, options in LINEAR_OPTIONS.items()
} | {
    "bf16": LinearScenario(
        (2, 2), ("S0", "R"), ("R", "S0"), dtype=torch.bfloat16, options={"chunk_rows": 4}
    ),
    "fp32": LinearScenario((4,), ("R",), ("S0",), dtype=torch.float32, options=MOST),
    "no rows": LinearScenario((4,), ("R",), ("S0",), rows=(0,), options={"reduction": "sum"}),
    "one row": LinearScenario((4,), ("R",), ("S0",), rows=(), options=MOST),
}
