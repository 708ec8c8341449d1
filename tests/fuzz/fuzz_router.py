"""Calls of the router."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, dtype_of, plan
from fuzz_values import ALL, DTYPES, drawn
from hypothesis import strategies as st

from gristmill.ops.registry import OPS

LAYOUTS = (*["dense"] * 3, "padded", "shifted", "columns", "negative", "expanded", "overlapping")
HUGE_GRADIENT = 1e15
# A score below 1e-38, times that.
LOST = 1e-20


@st.composite
def plans(draw: Any, op: str) -> Plan:
    groups = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 12]))
    size = draw(st.integers(1, 64)) if groups > 1 else draw(st.integers(1, 400))
    experts = groups * size
    kept = draw(st.integers(1, groups))
    words: dict[str, Any] = {
        "rows": draw(st.integers(0, max(1, min(60, 4000 // experts)))),
        "experts": experts,
        "topk": draw(st.integers(1, min(32, kept * size))),
        "groups": (groups, kept),
        "logits": draw(drawn(scales=(2.0, 2.0, 1e-3, 30.0), specials=ALL, layouts=LAYOUTS)),
        "grid": draw(st.integers(0, 3)) == 0,  # many ties
        "scoring": draw(st.sampled_from(["softmax", "sigmoid"])),
        "renormalize": draw(st.booleans()),
        "bias": draw(st.sampled_from([None, None, *DTYPES])),
        "scale": draw(st.sampled_from([1.0, 2.5, -0.5])),
        "ids": draw(st.sampled_from(["int32", "int64"])),
    }
    if op.endswith("_backward"):
        words["dweights"] = draw(
            drawn(specials=("nan", "inf", "zero", "subnormal", "huge"), layouts=LAYOUTS)
        )
    return plan(op, draw(SEEDS), **words)


def make(maker: Maker) -> Arguments:
    given = maker.plan
    logits = maker.tensor(
        "logits", (given.rows, given.experts), changed=torch.round if given.grid else None
    )
    bias = None
    if given.bias is not None:
        values = maker.uniform("bias", (given.experts,))
        values = (values * 4).round() / 4 if given.grid else values
        bias = values.to(getattr(torch, given.bias)).to(maker.device)
    options = (given.scoring, given.renormalize)
    choice = (bias, *given.groups)
    args = (logits, given.topk, *options, *choice, given.scale, dtype_of(given.ids))
    if given.op == "topk_router":
        return args
    _, ids = OPS["topk_router"].reference(*args)
    ids = ids.clone(memory_format=torch.contiguous_format)
    dweights = maker.tensor("dweights", (given.rows, given.topk), huge=HUGE_GRADIENT)
    return dweights, logits, ids, *options, given.scale


FAMILIES = {
    "topk_router": Family(plans, make, (0,), (0, 1)),
    "topk_router_backward": Family(plans, make, (0, 1, 2), (0,), lost=LOST),
}
