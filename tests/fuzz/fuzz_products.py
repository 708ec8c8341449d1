"""Calls of `linear` and `matmul`."""

from __future__ import annotations

from typing import Any

from fuzz_layouts import leadings
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, plan
from fuzz_values import ALL, drawn
from hypothesis import strategies as st

from gristmill.ops.linear.semantics import ACTIVATIONS

# Sums of products are fp32.
HUGE = 1e30
SIZES = st.one_of(st.integers(1, 300), st.sampled_from([8, 64, 128, 200, 256, 512]))
DEPTHS = st.one_of(SIZES, st.sampled_from([1000, 1024, 2048]))
NARROW = ("bfloat16", "bfloat16", "float16", "float32")  # as most calls are
ODD = ("negative", "expanded", "overlapping")
LAYOUTS = (*["dense"] * 6, "padded", "shifted", "columns", "every other", *ODD)
FACTORS = ("nan", "inf", "zero", "subnormal")


@st.composite
def linear_plans(draw: Any, op: str) -> Plan:
    dtype = draw(st.sampled_from(NARROW))
    activations = list(ACTIVATIONS) if op == "linear_with_pre" else [None, *ACTIVATIONS]

    def tensor(specials: tuple[str, ...], scales: tuple[float, ...] = (1.0,)) -> Any:
        return draw(drawn(dtype=dtype, scales=scales, specials=specials, layouts=LAYOUTS))

    words = {
        "leading": draw(leadings(200)),
        "columns": draw(SIZES),
        "depth": draw(DEPTHS),
        "x": tensor(ALL, (1.0, 1.0, 1e-3, 30.0)),
        "weight": tensor(FACTORS if draw(st.integers(0, 3)) == 0 else ()),
        "bias": tensor(FACTORS if draw(st.integers(0, 3)) == 0 else ()),
        "activation": draw(st.sampled_from(activations)),
    }
    words["bias"] = words["bias"] if draw(st.booleans()) else None
    return plan(op, draw(SEEDS), **words)


def make_linear(maker: Maker) -> Arguments:
    given = maker.plan
    x = maker.tensor("x", (*given.leading, given.depth), huge=HUGE)
    weight = maker.tensor("weight", (given.columns, given.depth), factor=given.depth**-0.5)
    return x, weight, maker.tensor("bias", (given.columns,)), given.activation


@st.composite
def matmul_plans(draw: Any, op: str) -> Plan:
    dtype = draw(st.sampled_from(NARROW))
    batch = tuple(draw(st.lists(st.integers(1, 4), max_size=2))) if draw(st.booleans()) else ()
    # Each side has all batches, or some of them once, or none.
    sides = []
    for _ in range(2):
        own = tuple(size if draw(st.booleans()) else 1 for size in batch)
        sides.append(own[draw(st.integers(0, len(own))) :] if draw(st.booleans()) else batch)
    words = {
        "sides": tuple(sides),
        "sizes": (draw(SIZES), draw(SIZES), draw(DEPTHS)),
        "a": draw(drawn(dtype=dtype, specials=ALL, layouts=LAYOUTS)),
        "b": draw(
            drawn(
                dtype=dtype,
                scales=(1.0,),
                specials=FACTORS if draw(st.integers(0, 3)) == 0 else (),
                layouts=LAYOUTS,
            )
        ),
    }
    return plan(op, draw(SEEDS), **words)


def make_matmul(maker: Maker) -> Arguments:
    given = maker.plan
    (first, second), (rows, columns, depth) = given.sides, given.sizes
    a = maker.tensor("a", (*first, rows, depth), huge=HUGE)
    return a, maker.tensor("b", (*second, depth, columns), factor=depth**-0.5)


# Activations of sums that cancel.
ROUNDINGS = (6.0, 6.0)
FAMILIES = {
    "linear": Family(linear_plans, make_linear, reference=ROUNDINGS),
    "linear_with_pre": Family(linear_plans, make_linear, (0,), (0, 1), reference=ROUNDINGS),
    "matmul": Family(matmul_plans, make_matmul),
}
