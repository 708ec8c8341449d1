"""Calls of mixtures of experts, dense and NVFP4, and of NVFP4 linear layers."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_layouts import leadings
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, dtype_of, plan
from fuzz_values import ALL, DTYPES, drawn
from hypothesis import strategies as st

from gristmill.ops.nvfp4_linear.cases import random_weight

LAYOUTS = ("fragments", "rows", "fragments", "tiles")  # Hopper's own more often
NARROW = ("bfloat16", "bfloat16", "float16", "float32")  # as most calls are
BLOCKS = st.one_of(st.integers(1, 6), st.integers(1, 20)).map(lambda count: 16 * count)
# How much of a weight is decoded at a time; patched in by the judge. Small pieces of large weights
# would only take long.
PIECES = (100 << 10, 32 << 20)
SMALL, SMALL_PIECE = 4096, 8 << 10
# Sums of products are fp32.
HUGE = 1e30
# What gate is off by has to be small beside 1: the truth follows an activation by its slope.
HUGE_GATE, HUGE_GATE_16_BITS = 3e3, 60.0
# A sigmoid of gate below 1e-38, times gate, up, x and dy.
LOST = 1e-22
ROW_LAYOUTS = (*["dense"] * 4, "padded", "shifted", "columns", "negative", "overlapping")


def _piece(draw: Any, elements: int) -> int:
    pieces = (SMALL_PIECE, *PIECES) if elements <= SMALL else PIECES
    piece: int = draw(st.sampled_from(pieces))
    return piece


@st.composite
def linear_plans(draw: Any, op: str) -> Plan:
    words: dict[str, Any] = {
        "leading": draw(st.one_of(leadings(9), leadings(200))),
        "columns": draw(BLOCKS),
        "rows": draw(st.one_of(BLOCKS, st.integers(1, 300))),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "per_row": draw(st.booleans()),
    }
    words["piece"] = _piece(draw, words["columns"] * words["rows"])
    if op == "nvfp4_linear_backward":
        words["dy"] = draw(drawn(dtypes=NARROW, specials=ALL, layouts=ROW_LAYOUTS))
        words["dtype"] = draw(st.sampled_from(DTYPES))
        return plan(op, draw(SEEDS), **words)
    words["act"] = draw(st.sampled_from([None, None, "fp8", "nvfp4"]))
    words["x"] = draw(drawn(dtypes=NARROW, specials=ALL, layouts=ROW_LAYOUTS))
    words["bias"] = draw(drawn(layouts=("dense", "shifted"))) if draw(st.booleans()) else None
    words["out"] = draw(st.sampled_from([None, None, *DTYPES]))
    return plan(op, draw(SEEDS), **settled(words))


def settled(words: dict[str, Any]) -> dict[str, Any]:
    # Activations that may be rounded have to be numbers: their scale is that of the largest.
    if words["act"] is not None and words["x"].special is not None:
        return {**words, "x": words["x"]._replace(special="zero")}
    return words


def make_linear(maker: Maker) -> Arguments:
    given = maker.plan
    weight = random_weight(
        (given.rows, given.columns),
        maker.device,
        layout=given.layout,
        generator=maker.generator("weight"),
        per_row=given.per_row,
    )
    if given.op == "nvfp4_linear_backward":
        dy = maker.tensor("dy", (*given.leading, given.rows), huge=HUGE)
        return dy, *weight, dtype_of(given.dtype)
    x = maker.tensor("x", (*given.leading, given.columns), huge=HUGE)
    bias = maker.tensor("bias", (given.rows,))
    return x, *weight[:3], bias, given.layout, dtype_of(given.out), given.act


@st.composite
def plans(draw: Any, op: str) -> Plan:
    packed = op.startswith("nvfp4")
    sizes = BLOCKS if packed else st.one_of(BLOCKS, BLOCKS, st.integers(1, 80))
    activation = draw(st.sampled_from(["silu", "gelu", "swiglu_oai"]))
    specials = ("nan", "zero", "subnormal", "huge")
    words: dict[str, Any] = {
        "rows": draw(st.one_of(st.integers(1, 3), st.integers(0, 60))),
        "experts": draw(st.one_of(st.integers(1, 4), st.integers(1, 12))),
        "topk": draw(st.integers(1, 5)),
        "hidden": draw(sizes),
        "inner": draw(sizes),
        "x": draw(
            drawn(dtypes=NARROW, scales=(1.0, 1.0, 1e-3), specials=specials, layouts=ROW_LAYOUTS)
        ),
        "weights": draw(drawn(scales=(1.0,), specials=("nan", "zero"), layouts=ROW_LAYOUTS)),
        "ids": draw(st.sampled_from(["int32", "int64"])),
        "mapped": draw(st.booleans()),
        "w13_bias": draw(drawn(scales=(1.0,), layouts=("dense",))),
        "w2_bias": draw(drawn(scales=(1.0,), layouts=("dense",))),
        "activation": activation,
        "limit": draw(st.sampled_from([None, None, 0.5, 7.0])),
        "alpha": draw(st.sampled_from([None, 0.5, 3.0])) if activation == "swiglu_oai" else None,
    }
    for bias in ("w13_bias", "w2_bias"):
        words[bias] = words[bias] if draw(st.booleans()) else None
    if packed:
        words["layout"] = draw(st.sampled_from(LAYOUTS))
        words["per_row"] = draw(st.booleans())
        words["piece"] = _piece(draw, words["hidden"] * words["inner"])
    else:
        words["weight_layout"] = draw(st.sampled_from(["dense", "dense", "shifted", "columns"]))
    if op.endswith("_backward"):
        words["dy"] = draw(
            drawn(dtype=words["x"].dtype, scales=(1.0,), specials=specials, layouts=ROW_LAYOUTS)
        )
        if not packed:
            words["weight_grad"] = draw(st.booleans())
    return plan(op, draw(SEEDS), **words)


def make(maker: Maker) -> Arguments:
    given = maker.plan
    rows, experts, topk = given.rows, given.experts, given.topk
    hidden, inner = given.hidden, given.inner
    huge = HUGE_GATE if given.x.dtype == "float32" else HUGE_GATE_16_BITS
    x = maker.tensor("x", (rows, hidden), huge=huge)
    weights = maker.tensor("weights", (rows, topk)).abs()
    # Any expert any number of times, and none.
    ids = maker.integers("ids", -1, experts, (rows, topk)).to(getattr(torch, given.ids))
    biases = [
        maker.tensor("w13_bias", (experts, 2 * inner)),
        maker.tensor("w2_bias", (experts, hidden)),
    ]
    mapped = None
    if given.mapped:
        mapped = maker.integers("mapped", -1, experts, (experts + 2,)).int().to(maker.device)
    shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    tokens = (x, weights, ids.to(maker.device))
    if given.op.startswith("nvfp4"):
        stacks = [
            random_weight(
                shape,
                maker.device,
                layout=given.layout,
                generator=maker.generator(f"weight {place}"),
                per_row=given.per_row,
                pairs=place == 0,
            )[:3]
            for place, shape in enumerate(shapes)
        ]
        parts = (*stacks[0], *stacks[1])
        options = (given.activation, given.limit, mapped, given.layout, given.alpha)
    else:
        how = given.x._replace(
            special=None, scale=1.0, layout=given.weight_layout, by=1 + given.x.by % 3
        )
        parts = tuple(
            maker.tensor(f"weight {place}", shape, how, factor=shape[-1] ** -0.5)
            for place, shape in enumerate(shapes)
        )
        options = (given.activation, given.limit, mapped, given.alpha)
    args = (*tokens, *parts, *biases, *options)
    if not given.op.endswith("_backward"):
        return args
    dy = maker.tensor("dy", (rows, hidden), huge=huge)
    flags = (given.weight_grad,) if given.op == "moe_backward" else ()
    return dy, *args, *flags


FAMILIES = {
    "nvfp4_linear": Family(linear_plans, make_linear, settled=settled),
    "nvfp4_linear_backward": Family(linear_plans, make_linear),
    **{op: Family(plans, make, (0, 1), lost=LOST) for op in ("moe", "nvfp4_moe")},
    **{
        op: Family(plans, make, (0, 1, 2), (0, 1), lost=LOST)
        for op in ("moe_backward", "nvfp4_moe_backward")
    },
}
