"""What the ranks compute, and what one process has to say to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scenario:
    """Logits of all classes, the same on every rank, and how they are shared out.

    `sizes` gives the classes of each rank, for a number of ranks; None: the same for all, and not
    said to the function.
    """

    rows: tuple[int, ...] = (6, 5)
    classes: int = 4 * 60
    dtype: torch.dtype = torch.float32
    target: torch.dtype = torch.int64
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Callable[[int], list[int]] | None = None
    logits: Change | None = None
    targets: Change | None = None

    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, target, and gradients of the loss and of lse."""
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(*self.rows, self.classes, generator=generator) * 3
        target = torch.randint(0, self.classes, self.rows, generator=generator)
        logits = logits if self.logits is None else self.logits(logits)
        target = target if self.targets is None else self.targets(target)
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        each = self.rows if self.options.get("reduction") == "none" else ()
        dloss = torch.randn(each, generator=generator).to(precise) * 2
        dlse = torch.randn(self.rows, generator=generator).to(precise)
        return logits.to(self.dtype), target.to(self.target), dloss, dlse

    def shares(self, ranks: int) -> list[int]:
        if self.sizes is not None:
            return self.sizes(ranks)
        return [self.classes // ranks] * ranks


def unequal(classes: int) -> Callable[[int], list[int]]:
    """Of the ranks the last has most of the classes, the second none."""

    def sizes(ranks: int) -> list[int]:
        found = [7, 0, *[11] * (ranks - 2)][:ranks]
        found[-1] += classes - sum(found)
        return found

    return sizes


def ignored(target: torch.Tensor) -> torch.Tensor:
    at = torch.arange(target.numel()).view(target.shape)
    return torch.where(at % 3 == 1, -100, target)


def low_masked(logits: torch.Tensor) -> torch.Tensor:
    """Nothing but -infinity on the first rank of two, and on the first two of four."""
    logits[..., : logits.shape[-1] // 2] = -torch.inf
    return logits


def confident(logits: torch.Tensor) -> torch.Tensor:
    """Hardly a doubt about class 130."""
    logits[..., 130] += 22.0
    return logits


def upper(target: torch.Tensor) -> torch.Tensor:
    return 120 + target % 120


ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 8.0}
SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    **{
        f"{reduction} {name}": Scenario(
            options={"reduction": reduction, "return_lse": True, **options}, targets=ignored
        )
        for reduction in ("mean", "sum", "none")
        for name, options in {
            "ignore": {},
            "smoothing": {"label_smoothing": 0.2},
            "z_loss": {"z_loss": 0.05},
            "softcap": {"softcap": 5.0},
            "all": ALL,
        }.items()
    },
    "bf16": Scenario(dtype=torch.bfloat16, options=ALL),
    "fp16": Scenario(dtype=torch.float16, options={"reduction": "none"}),
    "fp64": Scenario(dtype=torch.float64, options={**ALL, "return_lse": True}),
    "int32": Scenario(target=torch.int32, targets=ignored),
    "unequal": Scenario(sizes=unequal(240), options={"reduction": "none", **ALL}),
    "unequal odd": Scenario(classes=50257 % 4096, sizes=unequal(50257 % 4096)),
    "targets in one shard": Scenario(targets=lambda t: t % 5, options={"reduction": "none"}),
    "targets in the last": Scenario(targets=lambda t: t % 5 + 235, options={"reduction": "none"}),
    "masked shard": Scenario(
        logits=low_masked, targets=upper, options={"reduction": "none", "return_lse": True}
    ),
    "large logits": Scenario(logits=lambda x: x * 300, options={"reduction": "none"}),
    "all logits the same": Scenario(logits=lambda x: x * 0 - 12.0, options={"reduction": "none"}),
    "confident": Scenario(
        logits=confident, targets=lambda t: t * 0 + 130, options={"reduction": "none"}
    ),
    "all ignored": Scenario(targets=lambda t: t * 0 - 100),
    "all ignored, sum": Scenario(targets=lambda t: t * 0 - 100, options={"reduction": "sum"}),
    "no rows": Scenario(rows=(0, 3), options={"reduction": "sum"}),
    "one row": Scenario(rows=(), options={"return_lse": True}),
    "one class each": Scenario(classes=4, sizes=lambda ranks: [4 // ranks] * ranks),
    "no class": Scenario(
        targets=lambda t: torch.where(t == t.max(), 240, t), options={"reduction": "none"}
    ),
    "another ignore_index": Scenario(
        targets=lambda t: t % 7, options={"ignore_index": 3, "reduction": "none"}
    ),
}
