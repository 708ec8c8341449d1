"""Cases and costs of norms into FP8, made from those of the norms themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from gristmill.ops.op import Arguments, Case, Cost

Device = torch.device | str


@dataclass(frozen=True)
class Quantisation:
    """The options that FP8 adds; `scale` None: one per row. `fill` changes x."""

    scale: float | None = None
    shape: tuple[int, ...] = ()
    amax: bool = False
    fill: Callable[[torch.Tensor], torch.Tensor] | None = None

    def options(self, device: Device) -> tuple[torch.Tensor | None, bool]:
        if self.scale is None:
            return None, self.amax
        return torch.full(self.shape, self.scale, device=device), self.amax


# `join(arguments of the norm, scale, amax)` gives the arguments of its FP8 op.
Join = Callable[[Arguments, "torch.Tensor | None", bool], Arguments]

_TURNS = (
    Quantisation(amax=True),
    Quantisation(scale=0.01),
    Quantisation(),
    Quantisation(scale=0.0078125, shape=(1,), amax=True),
)


def fp8_cases(plain: Iterable[Case], join: Join) -> Iterator[Case]:
    """The norm's own cases, with options in turn, and those that only FP8 has.

    What a norm would be rounded to does not matter here, so its cases of that are left out.
    """
    kept = [case for case in plain if not case.name.startswith("out ")]
    for turn, case in enumerate(kept):
        yield Case(case.name, partial(_make, case, join, _TURNS[turn % len(_TURNS)]))
    several = next(case for case in kept if case.name == "33x128")
    for name, options in _own().items():
        yield Case(name, partial(_make, several, join, options))


def _own() -> dict[str, Quantisation]:
    return {
        "a scale per row": Quantisation(),
        "a scale per row, amax": Quantisation(amax=True),
        "given scale": Quantisation(scale=0.02),
        "given scale, amax": Quantisation(scale=0.02, amax=True),
        "scale 1": Quantisation(scale=1.0),
        "scale 1x1": Quantisation(scale=0.02, shape=(1, 1)),
        "everything saturates": Quantisation(scale=1e-5, amax=True),
        "the largest saturate": Quantisation(scale=0.004),
        "everything becomes zero": Quantisation(scale=1e4, amax=True),
        "subnormal results": Quantisation(scale=100.0),
        "the smallest normal scale": Quantisation(scale=2.0**-126),
        "the largest scale": Quantisation(scale=2.0**126),
        "rows of zeros among others": Quantisation(amax=True, fill=_every_third_row_zero),
        "one value a row": Quantisation(amax=True, fill=_one_value),
        "rows of all sizes": Quantisation(amax=True, fill=_all_sizes),
    }


def _every_third_row_zero(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[0], device=x.device).view(-1, 1)
    return torch.where(rows % 3 == 0, torch.zeros_like(x), x)


def _one_value(x: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(columns == x.shape[-1] // 2, x, torch.zeros_like(x))


def _all_sizes(x: torch.Tensor) -> torch.Tensor:
    """From rows so small that eps decides to large ones."""
    rows = torch.arange(x.shape[0], device=x.device).view(-1, 1)
    return (x.float() * torch.exp2(rows.float() - 24)).to(x.dtype)


def _make(case: Case, join: Join, options: Quantisation, device: Device, seed: int) -> Arguments:
    x, *rest = case.make(device, seed)
    if options.fill is not None:
        x = options.fill(x)
    return join((x, *rest), *options.options(device))


def fp8_cost(norm: Cost, x: torch.Tensor, scale: torch.Tensor | None, amax: bool) -> Cost:
    """`norm`: the cost of the norm with an FP8 result; here is what scale and amax add to it."""
    rows = x.numel() // max(1, x.shape[-1])
    moved = 4 * (rows if scale is None else 1) + 4 * amax
    return Cost(norm.bytes + moved, norm.operations + 3 * x.numel())
