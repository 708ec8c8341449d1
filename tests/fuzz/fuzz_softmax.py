"""Calls of the softmax ops, with masks and causal limits."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_layouts import laid_out, shapes
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, plan
from fuzz_values import ALL, DTYPES, drawn
from hypothesis import strategies as st

from gristmill.ops.registry import OPS
from gristmill.ops.softmax.semantics import CAUSAL

NONE = float("-inf")
# With a mask, or a scale that is not positive, scale * x is made in fp32 first.
HUGE_PRODUCT = 1e36
# Products with dy are added up in fp32.
HUGE_GRADIENT = 1e20
# A power below 1e-38, times such a sum.
LOST = 1e-14


@st.composite
def masks(draw: Any, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """None, or what broadcasts to `shape`: some dims of one, some not there at all."""
    if draw(st.booleans()):
        return None
    sizes = [size if draw(st.booleans()) else 1 for size in shape]
    return {
        "sizes": tuple(sizes[draw(st.integers(0, len(sizes))) :]),
        "keep": draw(st.sampled_from([0.1, 0.7, 1.0])),
        "how": draw(drawn(dtypes=("bool", "bool", *DTYPES), scales=(1.0,))),
    }


@st.composite
def plans(draw: Any, op: str) -> Plan:
    shape = draw(shapes())
    backward = op.endswith("_backward")
    words: dict[str, Any] = {
        "shape": shape,
        "x": draw(drawn(specials=() if backward else ALL)),
        "keep": draw(st.sampled_from([1.0, 1.0, 0.7, 0.01])),
        "scale": draw(st.sampled_from([1.0, 1.0, 0.125, 3.0, -1.0, 0.0])),
        "mask": draw(masks(shape)),
        "causal": None,
    }
    if len(shape) > 1:
        words["causal"] = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    words["spoil"] = draw(st.sampled_from([None, None, "hidden", "visible", "both"]))
    if backward:
        words["dy"] = draw(drawn(specials=ALL))
    return plan(op, draw(SEEDS), **words)


def make(maker: Maker) -> Arguments:
    given, shape = maker.plan, maker.plan.shape
    backward, mask = given.op.endswith("_backward"), _mask(maker)
    causal = CAUSAL[given.causal]
    plain = mask is None and given.scale > 0

    def changed(x: torch.Tensor) -> torch.Tensor:
        if given.scale > 0:  # else they are +inf, or NaN
            out = maker.uniform("keep", shape) >= given.keep
            x = x.masked_fill(out.to(maker.device), NONE)
        return x if backward else _spoiled(maker, x)

    huge = float("inf") if plain else HUGE_PRODUCT
    x = maker.tensor("x", shape, huge=huge, changed=changed)
    if not backward:
        return x, causal, given.scale, mask
    y = OPS[given.op.removesuffix("_backward")].reference(x, causal, 1.0, mask)
    y = laid_out(y.contiguous(), given.x.layout, given.x.by)
    dy = maker.tensor("dy", shape, huge=HUGE_GRADIENT, changed=lambda dy: _spoiled(maker, dy))
    return dy, y, causal, given.scale


def _spoiled(maker: Maker, rows: torch.Tensor) -> torch.Tensor:
    """With NaN or an infinity on both sides of the causal limit, or on one, in some of the rows."""
    given, shape = maker.plan, rows.shape
    spoil = given.words.get("spoil")
    if spoil is None or maker.ordinary or not rows.numel():
        return rows
    queries = shape[-2] if len(shape) > 1 else 1
    limits = torch.arange(rows.numel() // shape[-1]) % queries
    limits = limits + (shape[-1] - queries if given.causal == "bottom_right" else 0)
    distances = maker.integers("distance", 0, 20, (2, *limits.shape))
    flat = rows.reshape(-1, shape[-1]).clone()
    values = torch.tensor([float("nan"), float("inf"), NONE]).to(rows.dtype)
    for side, columns in (
        ("visible", limits - distances[0]),
        ("hidden", limits + 1 + distances[1]),
    ):
        if spoil not in (side, "both"):
            continue
        there = (maker.uniform(side, limits.shape) < 0.2) & (columns >= 0) & (columns < shape[-1])
        places = there.nonzero().flatten()
        what = values[maker.integers(f"what {side}", 0, 3, (len(places),))]
        flat[places.to(rows.device), columns[places].to(rows.device)] = what.to(rows.device)
    return flat.view(shape)


def _mask(maker: Maker) -> torch.Tensor | None:
    words = maker.plan.mask
    if words is None:
        return None
    how, sizes = words["how"], words["sizes"]
    keep = maker.uniform("mask", sizes) < words["keep"]
    if how.dtype != "bool":
        numbers = torch.randn(sizes, generator=maker.generator("numbers"))
        keep = numbers.to(getattr(torch, how.dtype)).masked_fill(~keep, NONE)
    return laid_out(keep.to(maker.device), how.layout, how.by)


FAMILIES = {
    **{op: Family(plans, make) for op in ("softmax", "log_softmax")},
    "softmax_backward": Family(plans, make),
    "log_softmax_backward": Family(plans, make, lost=LOST),
}
