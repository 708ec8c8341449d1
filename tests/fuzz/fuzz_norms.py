"""Calls of the norms: forward, backward, in place, into FP8."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_layouts import shapes
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, dtype_of, plan
from fuzz_values import ALL, DTYPES, LAYOUTS, WRITABLE, Drawn, drawn
from hypothesis import strategies as st

# Squares of a row are added up in fp32: beyond this they may overflow, for want of a second pass.
HUGE = 1e16
# A product of three such numbers in the gradient, and a sum of them, is still one.
HUGE_GRADIENT = 1e8
VECTOR_LAYOUTS = ("dense", "dense", "shifted", "every other", "negative")
FORWARD = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "fused_add_rms_norm_")
BACKWARD = ("rms_norm_backward", "layer_norm_backward")
FP8 = ("rms_norm_fp8", "add_rms_norm_fp8", "layer_norm_fp8", "add_layer_norm_fp8")


@st.composite
def plans(draw: Any, op: str) -> Plan:
    shape = draw(shapes())
    first = draw(st.sampled_from(DTYPES))
    # Mostly one dtype for all: each mixture of dtypes is a kernel of its own.
    mixed = draw(st.integers(0, 3)) == 0

    def dtype() -> str:
        return draw(st.sampled_from(DTYPES)) if mixed else first

    layouts = WRITABLE if op.startswith("fused_") else LAYOUTS

    def rows(specials: tuple[str, ...] = ALL) -> Drawn:
        return draw(drawn(dtype=dtype(), specials=specials, layouts=layouts))

    def vector(specials: tuple[str, ...] = ()) -> Drawn | None:
        if not draw(st.booleans()):
            return None
        # Weights hold ordinary numbers: what they do to every row is plain multiplication.
        return draw(drawn(dtype=dtype(), specials=specials, layouts=VECTOR_LAYOUTS))

    words: dict[str, Any] = {"shape": shape, "x": rows(), "weight": vector()}
    if op.startswith(("add_", "fused_")):
        words["residual"] = rows(("nan", "infs", "zero", "huge", "magnitudes"))
    if "layer_norm" in op:
        words["bias"] = vector()
    words["eps"] = draw(st.sampled_from([1e-6, 1e-5, 0.1]))
    if op in ("rms_norm", "add_rms_norm", "rms_norm_backward") and draw(st.integers(0, 9)) == 0:
        words["eps"] = None
    if not op.startswith("fused_"):
        words["offset"] = draw(st.sampled_from([0.0, 1.0]))
    if "rms_norm" in op and op not in BACKWARD and not op.startswith("fused_"):
        words["casting"] = draw(st.sampled_from(["once", "llama"]))
    if op in BACKWARD:
        words["dy"] = rows()
        words["dsum"] = rows(("nan", "inf")) if draw(st.booleans()) else None
        words["weight_grad"] = words["weight"] is not None and draw(st.booleans())
    elif op in FP8:
        words["scale"] = draw(st.sampled_from([None, None, 1.0, 0.01, 1e-4, 100.0]))
        words["amax"] = draw(st.booleans())
    elif not op.startswith("fused_"):
        words["out"] = draw(st.sampled_from([None, None, None, *DTYPES]))
    return plan(op, draw(SEEDS), **words)


def make(maker: Maker) -> Arguments:
    given = maker.plan
    op, shape = given.op, given.shape
    huge = HUGE_GRADIENT if op in BACKWARD else HUGE
    x = maker.tensor("x", shape, huge=huge)
    vectors = [maker.tensor("weight", shape[-1:])]
    if "layer_norm" in op:
        vectors.append(maker.tensor("bias", shape[-1:]))
    if op == "fused_add_rms_norm_":
        return x, maker.tensor("residual", shape, huge=huge), vectors[0], given.eps
    if op in BACKWARD:
        dy = maker.tensor("dy", shape, huge=huge)
        dsum = None
        if given.dsum is not None:
            dsum = maker.tensor("dsum", shape, given.dsum._replace(dtype=given.x.dtype), huge=huge)
        options = [given.eps, given.offset, given.weight_grad]
        if op == "layer_norm_backward":
            options.append(None if vectors[1] is None else vectors[1].dtype)
        return dy, x, vectors[0], dsum, *options
    tensors = [x]
    if op.startswith("add_"):
        tensors.append(maker.tensor("residual", shape, huge=huge))
    options = [given.eps, given.offset]
    if "rms_norm" in op:
        options.append(given.casting)
    if op in FP8:
        scale = None if given.scale is None else torch.tensor(given.scale, device=maker.device)
        return *tensors, *vectors, scale, *options, given.amax
    return *tensors, *vectors, *options, dtype_of(given.out)


def _family(op: str) -> Family:
    rows: tuple[int, ...] = (0, 1) if op.startswith(("add_", "fused_")) else (0,)
    results = rows
    if op in BACKWARD:
        rows, results = (0, 1, 3), (0,)
    if op in FP8:
        results = (*rows, len(rows))  # the scale of each row; not if one is given: see the judge
        return Family(plans, make, rows, results, reference=(2.5, 6.0))
    if op in BACKWARD:
        # Gradients of weights are sums over rows. One addition after another, the sums of 35 rows
        # of 768 ordinary numbers are off by 1.7 to 2.8 roundings in the worst column.
        # Where one product of a row is larger than the others, dx is -rstd * h * slope in the other
        # columns: nine roundings, and three times those of rstd (see _exact_dx in
        # test_fuzz_emulated_norms). A rounding deviates by 0.4 half units, rstd by 0.6, and all of
        # them by sqrt(9 * 0.4**2 + (3 * 0.6)**2) = 2.2; |dx| equals its terms there, so that two
        # half units count as one rounding. A limit of 2 is 1.8 deviations, one of 3 is 2.7. And of
        # LayerNorm, less than four lanes add up the squares of distances from a row's first number:
        # where that is z deviations from the mean, they have 1 + z**2 times the roundings. In 6000
        # calls each of ordinary numbers, mostly short rows, the emulated kernels of RMSNorm and
        # LayerNorm were off by more than 2 in 2 and in 25 calls, by 2.9 at most.
        return Family(plans, make, rows, results, alike=True, least=1.5)
    return Family(plans, make, rows, results)


FAMILIES = {op: _family(op) for op in (*FORWARD, *BACKWARD, *FP8)}
