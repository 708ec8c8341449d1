"""What may stand in a tensor: ordinary numbers of several sizes, and in places or rows others.

A plan holds no tensor but what one is made of, `Drawn`: the same words make the same tensor again,
on any device, and can be pasted into a test.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

DTYPES = ("bfloat16", "float16", "float32")
SCALES = (1.0, 1.0, 1e-3, 30.0)
# What a special is, and where: `mixed` are NaN and both infinities, turn and turn about;
# `magnitudes` are numbers from 1e4 to the largest, evenly by their logarithms.
NUMBERS: dict[str, tuple[float, ...]] = {
    "nan": (float("nan"),),
    "inf": (float("inf"),),
    "-inf": (float("-inf"),),
    "infs": (float("inf"), float("-inf")),
    "mixed": (float("nan"), float("inf"), float("-inf")),
    "zero": (0.0, -0.0),
}
FINITE = ("zero", "subnormal", "huge", "magnitudes")
ALL = ("nan", "inf", "-inf", "infs", "mixed", *FINITE)
WRITABLE = (*["dense"] * 4, "padded", "shifted", "permuted", "columns", "negative")
LAYOUTS = (*WRITABLE, "expanded", "overlapping")


class Drawn(NamedTuple):
    """What one tensor of a call is made of."""

    dtype: str = "float32"
    scale: float = 1.0
    special: str | None = None
    where: str = "places"  # or "rows"
    count: int = 1  # of the places, or of the rows
    layout: str = "dense"
    by: int = 1


def drawn(
    *,
    dtype: str | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    scales: tuple[float, ...] = SCALES,
    specials: tuple[str, ...] = (),
    layouts: tuple[str, ...] = LAYOUTS,
) -> st.SearchStrategy[Drawn]:
    """Half of all tensors hold ordinary numbers alone, and all do if there are no `specials`."""
    special: Any = st.none()
    if specials:
        special = st.one_of(st.none(), st.sampled_from(specials))
    return st.builds(
        Drawn,
        dtype=st.just(dtype) if dtype else st.sampled_from(dtypes),
        scale=st.sampled_from(scales),
        special=special,
        where=st.sampled_from(["places", "rows"]),
        count=st.integers(1, 3),
        layout=st.sampled_from(layouts),
        by=st.integers(1, 16),
    )


def filled(
    how: Drawn, shape: tuple[int, ...], generator: torch.Generator, huge: float, *, ordinary: bool
) -> torch.Tensor:
    """Values on the CPU. `huge`: the largest that the op is to be asked for.

    `ordinary`: without the specials, and otherwise the same numbers.
    """
    dtype = getattr(torch, how.dtype)
    info = torch.finfo(dtype)
    values = torch.randn(shape, generator=generator) * how.scale
    values = values.clamp(info.min, info.max).to(dtype)
    if ordinary or how.special is None or values.numel() == 0:
        return values
    rows = values.view(-1, shape[-1]) if shape else values.view(1, 1)
    most = len(rows) if how.where == "rows" else rows.numel()
    at = torch.randperm(most, generator=generator)[: how.count]
    there = torch.zeros(most, dtype=torch.bool)
    there[at] = True
    there = there.unsqueeze(-1).expand(rows.shape) if how.where == "rows" else there.view_as(rows)
    rows[there] = _numbers(how.special, int(there.sum()), dtype, generator, huge)
    return values


def _numbers(
    special: str, count: int, dtype: torch.dtype, generator: torch.Generator, huge: float
) -> torch.Tensor:
    if special in NUMBERS:
        cycle = torch.tensor(NUMBERS[special])
        first = int(torch.randint(len(cycle), (), generator=generator))
        return cycle[(torch.arange(count) + first) % len(cycle)].to(dtype)
    part = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
    info = torch.finfo(dtype)
    if special == "subnormal":
        return (part * info.tiny).to(dtype)
    largest = min(info.max, huge)
    if special == "magnitudes":
        low = min(4.0, math.log10(largest))
        powers = 10 ** (low + part.abs() * (math.log10(largest) - low))
        return (part.sign() * powers).clamp(info.min, info.max).to(dtype)
    assert special == "huge"
    return (part.sign() * (0.5 + part.abs() / 2) * largest).clamp(info.min, info.max).to(dtype)
