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
    if backward:
        words["dy"] = draw(drawn(specials=ALL))
    return plan(op, draw(SEEDS), **words)


def make(maker: Maker) -> Arguments:
    given, shape = maker.plan, maker.plan.shape
    backward, mask = given.op.endswith("_backward"), _mask(maker)
    causal = CAUSAL[given.causal]
    plain = mask is None and given.scale > 0
    x = maker.tensor("x", shape, huge=float("inf") if plain else HUGE_PRODUCT)
    if given.scale > 0:  # else they are +inf, or NaN
        out = maker.uniform("keep", shape) >= given.keep
        x.masked_fill_(out.to(maker.device), NONE)
    if not backward:
        return x, causal, given.scale, mask
    y = OPS[given.op.removesuffix("_backward")].reference(x, causal, 1.0, mask)
    y = laid_out(y.contiguous(), given.x.layout, given.x.by)
    return maker.tensor("dy", shape, huge=HUGE_GRADIENT), y, causal, given.scale


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
