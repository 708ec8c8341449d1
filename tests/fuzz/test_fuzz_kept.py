"""Calls that went wrong once: in a kernel, in a variant, or in what they were judged by.

A failure of tests/fuzz or tools/fuzz.py prints such a line. It goes here, with a word on it.
"""

from __future__ import annotations

from typing import Any

import pytest
from conformance_helpers import DEVICES
from fuzz_bad import made_bad
from fuzz_plan import Plan, plan
from fuzz_run import check
from fuzz_values import Drawn
from test_fuzz_bad import refused

BF16, FP16, FP32 = (Drawn(dtype) for dtype in ("bfloat16", "float16", "float32"))
ENTROPY: dict[str, Any] = {
    "target": "int64",
    "ignore_index": -100,
    "ignored": 0.0,
    "wrong": 0,
    "smoothing": 0.0,
    "z_loss": 0.0,
    "softcap": None,
    "reduction": "mean",
}
LINEAR_ENTROPY: dict[str, Any] = {
    "classes": 30,
    "columns": 16,
    "x": FP32,
    "weight": FP32,
    "bias": None,
    "class_weight": None,
    "chunk_rows": None,
    **ENTROPY,
}
MASKED: dict[str, Any] = {
    **LINEAR_ENTROPY,
    "bias": FP32._replace(special="-inf", where="rows"),
    "ignored": 1.0,
    "reduction": "sum",
}
GRADIENTS: dict[str, Any] = {"grads": (True, True, True), "dlse": False}
NORM: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5, "offset": 0.0}
ROUTER: dict[str, Any] = {
    "groups": (1, 1),
    "grid": False,
    "bias": None,
    "scale": 1.0,
    "ids": "int32",
    "scoring": "softmax",
    "renormalize": True,
}
SIGMOID, PLAIN = {**ROUTER, "scoring": "sigmoid"}, {**ROUTER, "renormalize": False}
DENSE: dict[str, Any] = {"ids": "int32", "mapped": False, "w13_bias": None}
PACKED: dict[str, Any] = {
    "experts": 1,
    "topk": 1,
    "hidden": 16,
    "inner": 16,
    "x": BF16,
    "weights": BF16,
    "ids": "int32",
    "mapped": False,
    "w13_bias": None,
    "w2_bias": None,
    "activation": "silu",
    "limit": None,
    "alpha": None,
    "layout": "rows",
    "per_row": False,
    "piece": 8192,
}

KEPT: dict[str, Plan] = {
    # A mean over no rows handed out infinite gradients, and `library` made NaN of 0 times that.
    "all rows ignored, library": plan(
        "linear_cross_entropy_backward",
        201650,
        leading=(5,),
        **{**LINEAR_ENTROPY, "ignored": 1.0},
        **GRADIENTS,
    ),
    # `library` gave gradients with torch's strides, not those that the op promises.
    "strides of gradients, library": plan(
        "linear_cross_entropy_backward",
        1,
        leading=(5,),
        **{**LINEAR_ENTROPY, "weight": FP32._replace(layout="columns"), "reduction": "none"},
        **GRADIENTS,
    ),
    # Of a row whose target is no class lse may be anything, also where all logits are masked.
    "masked vocabulary, wrong targets": plan(
        "linear_cross_entropy",
        9528,
        leading=(6,),
        **{
            **LINEAR_ENTROPY,
            "bias": FP32._replace(special="-inf", where="rows"),
            "wrong": 2,
            "z_loss": 0.01,
        },
    ),
    # cuBLASLt's relu makes 0 of NaN, and is allowed to.
    "relu of NaN, library_fused": plan(
        "linear",
        989,
        leading=(140,),
        columns=96,
        depth=64,
        x=FP16._replace(special="mixed", where="rows", count=3),
        weight=FP16,
        bias=FP16,
        activation="relu",
    ),
    # Nothing is left of h / (1 + e^-h) in fp32 where that power overflows.
    "silu far below zero": plan(
        "linear_with_pre",
        7,
        leading=(168,),
        columns=124,
        depth=37,
        x=FP32._replace(scale=30.0),
        weight=FP32._replace(layout="columns", by=10),
        bias=FP32,
        activation="silu",
    ),
    # A CPU's BLAS began its sums with the bias, and rounded 1000 times at its size: 9.95 of 2.
    "small products and a bias, library on a CPU": plan(
        "linear_with_pre",
        2968267,
        leading=(163,),
        columns=8,
        depth=1000,
        x=FP32._replace(scale=0.001, by=6),
        weight=FP32._replace(layout="every other", by=10),
        bias=FP32._replace(layout="shifted", by=16),
        activation="relu",
    ),
    # One number of 2000 among 240 of a row, at whose size its sums are rounded: 12.0 of 11.8.
    "an outlier in a mixture of experts": plan(
        "moe_backward",
        1239358,
        rows=2,
        **{
            **DENSE,
            "experts": 5,
            "topk": 3,
            "hidden": 240,
            "inner": 288,
            "x": FP32._replace(special="huge"),
            "weights": FP32._replace(layout="shifted", by=10),
            "w2_bias": FP16._replace(by=8),
            "activation": "swiglu_oai",
            "limit": 0.5,
            "alpha": 0.5,
        },
        weight_layout="shifted",
        dy=FP32._replace(special="subnormal", count=2, layout="padded", by=16),
        weight_grad=True,
    ),
    # The sum of all distances leaves fp32 before the share of each class is taken of it.
    "a smoothed loss of the largest logits": plan(
        "cross_entropy",
        478680,
        shape=(41, 1249),
        logits=FP32._replace(scale=1e38, special="infs", where="rows", count=2),
        **{**ENTROPY, "ignored": 0.3, "smoothing": 0.1, "reduction": "none"},
        weight="bfloat16",
        return_lse=True,
    ),
    # 134 equal rows one after another: all roundings between two powers of two go the same way.
    "an expanded gradient, library": plan(
        "layer_norm_backward",
        5700,
        shape=(134, 82),
        x=FP32._replace(scale=30.0, special="mixed", count=2, layout="overlapping", by=16),
        weight=None,
        bias=FP32,
        eps=1e-6,
        offset=1.0,
        dy=FP32._replace(layout="expanded"),
        dsum=None,
        weight_grad=False,
    ),
    # Beyond a causal limit kernels write zeros while a row comes, and NaN later if it is NaN.
    "NaN in a causal softmax": plan(
        "softmax",
        308,
        shape=(38, 512),
        x=FP16._replace(special="nan", count=3, layout="shifted", by=2),
        keep=1.0,
        scale=-1.0,
        mask=None,
        causal="bottom_right",
    ),
    "inf in a causal gradient": plan(
        "softmax_backward",
        1190,
        shape=(142, 212),
        x=FP16,
        keep=0.7,
        scale=1.0,
        mask=None,
        causal="bottom_right",
        dy=BF16._replace(scale=30.0, special="inf", count=3, layout="padded", by=6),
    ),
    # A power that underflows, times an infinite sum.
    "inf in a gradient of logarithms": plan(
        "log_softmax_backward",
        1826,
        shape=(35, 247),
        x=FP32._replace(scale=30.0),
        keep=1.0,
        scale=0.125,
        mask=None,
        causal="bottom_right",
        dy=FP32._replace(special="mixed", count=2),
    ),
    # A score that underflows, times 1e15.
    "huge gradients of a router": plan(
        "topk_router_backward",
        0,
        rows=3,
        **{**PLAIN, "experts": 12, "topk": 1, "grid": True},
        logits=BF16._replace(scale=30.0),
        dweights=BF16._replace(special="huge"),
    ),
    # Of a row with a NaN the sum of powers is one; the largest logit is that of the others.
    "NaN in a shard": plan(
        "cross_entropy_shard",
        359,
        shape=(2, 7930),
        logits=FP32._replace(scale=60.0, special="mixed", count=2),
        **{**ENTROPY, "softcap": 3.0},
        shards=1,
        sums=True,
    ),
    # The hardware's powers are off by two units in the last place.
    "large logits in one pass": plan(
        "cross_entropy_one_pass_",
        16215391,
        shape=(65, 94),
        logits=FP32._replace(scale=60.0, special="nan", layout="permuted", by=16),
        **{**ENTROPY, "target": "int32", "z_loss": 0.01, "reduction": "sum"},
        weight="float16",
        return_lse=False,
    ),
    # A few numbers of 1e16 among thousands around zero: 4.9 roundings by cuda_cooperative.
    "outliers": plan(
        "layer_norm",
        347,
        shape=(6, 6473),
        x=FP32._replace(special="huge", count=3, layout="dense", by=10),
        **{**NORM, "weight": FP32._replace(layout="shifted", by=16)},
        out=None,
    ),
    # torch's own kernels make a whole row, or all of dweight, NaN.
    "inf in a norm, library": plan(
        "rms_norm",
        25408,
        shape=(280, 175),
        x=FP32._replace(special="-inf", layout="padded", by=5),
        weight=None,
        eps=1e-6,
        offset=0.0,
        casting="once",
        out=None,
    ),
    "inf in a norm's gradient": plan(
        "layer_norm_backward",
        3516,
        shape=(10, 5712),
        x=FP32,
        **{**NORM, "bias": FP32},
        dy=FP32._replace(special="mixed", count=1),
        dsum=FP32._replace(scale=30.0),
        weight_grad=False,
    ),
    # A sigmoid that underflows is zero: no slope of it is NaN.
    "huge tokens": plan(
        "nvfp4_moe_backward",
        1964408,
        rows=15,
        **{
            **PACKED,
            "experts": 4,
            "inner": 48,
            "x": FP32._replace(special="huge", count=3),
            "activation": "swiglu_oai",
        },
        dy=FP32,
    ),
    # cuBLASLt wants the address of a bias to be a multiple of 16.
    "bias somewhere, scaled_mm_fp8": plan(
        "nvfp4_linear",
        445,
        leading=(),
        columns=288,
        rows=32,
        layout="fragments",
        per_row=True,
        piece=102400,
        act="fp8",
        x=BF16._replace(scale=30.0),
        bias=FP16._replace(scale=0.001, layout="shifted", by=12),
        out="float16",
    ),
    # torch's sort on CUDA puts -0 below +0, and a NaN with a sign below all numbers.
    "NaN and infinities in groups of experts": plan(
        "topk_router",
        376097,
        rows=1,
        **{**ROUTER, "experts": 384, "topk": 31, "groups": (12, 8), "scale": 2.5},
        logits=BF16._replace(scale=2.0, special="mixed", where="rows", layout="shifted", by=16),
    ),
    "NaN and infinities among experts": plan(
        "topk_router",
        322033,
        rows=12,
        **{**SIGMOID, "experts": 272, "topk": 29, "renormalize": False},
        logits=BF16._replace(scale=0.001, special="mixed", count=3, layout="dense", by=5),
    ),
    # The largest logit, 6e7, is answered with an error of 4, and the sum of powers is e^4 for it.
    "huge logits in a shard": plan(
        "cross_entropy_shard",
        147287914,
        shape=(512,),
        logits=BF16._replace(scale=0.001, special="huge", count=2, by=12),
        **{**ENTROPY, "target": "int32"},
        shards=4,
        sums=True,
    ),
    # Without smoothing 0 * inf is left out by the reference, and is NaN in the kernels.
    "infinite gradient of a loss": plan(
        "cross_entropy_backward",
        183,
        shape=(146,),
        logits=FP32._replace(scale=0.001, special="huge", count=2, by=8),
        **{
            **ENTROPY,
            "target": "int32",
            "ignore_index": -2,
            "z_loss": 0.01,
            "softcap": 30.0,
            "reduction": "sum",
        },
        weight=None,
        return_lse=False,
        dlse=None,
        dloss=FP32._replace(special="inf", count=3, layout="shifted", by=14),
        shards=1,
    ),
    # A logit next to a tie of bf16: of lse the square of what that is off by counts, too.
    "a logit next to a tie": plan(
        "linear_cross_entropy",
        302727241,
        leading=(3, 3, 1),
        **{
            **LINEAR_ENTROPY,
            "classes": 45,
            "columns": 256,
            "x": BF16._replace(scale=3.0, layout="columns", by=5),
            "weight": BF16._replace(count=2, by=6),
            "class_weight": "float32",
            "ignore_index": -2,
            "ignored": 0.3,
            "smoothing": 0.1,
            "softcap": 30.0,
        },
    ),
    # Near the cap its slope, 1 - tanh^2, cancels: 2.06 and 2.44 roundings by the kernels.
    "saturated logits": plan(
        "cross_entropy_one_pass",
        21289920,
        shape=(47, 1000),
        logits=FP16._replace(scale=60.0, count=2, by=14),
        **{
            **ENTROPY,
            "ignore_index": -2,
            "ignored": 0.3,
            "softcap": 3.0,
            "reduction": "none",
        },
        weight="float16",
        return_lse=False,
    ),
    "saturated logits in place": plan(
        "cross_entropy_one_pass_",
        5334,
        shape=(1536,),
        logits=FP32._replace(scale=60.0, where="rows", count=2, layout="columns", by=4),
        **{
            **ENTROPY,
            "target": "int32",
            "ignored": 0.3,
            "smoothing": 0.1,
            "softcap": 3.0,
            "reduction": "sum",
        },
        weight="float16",
        return_lse=False,
    ),
    # A probability below 2^-126 is lost; times a gradient of lse of 50 it is not that small.
    "large gradients of lse": plan(
        "cross_entropy_backward",
        1000001,
        shape=(29, 2056),
        logits=BF16._replace(scale=60.0, count=2, layout="permuted", by=2),
        **{**ENTROPY, "ignore_index": 3, "ignored": 1.0, "smoothing": 0.1, "reduction": "sum"},
        weight="float16",
        return_lse=True,
        dlse=FP32._replace(scale=30.0, by=7),
        dloss=FP32._replace(scale=0.001, where="rows", layout="shifted", by=13),
        shards=1,
    ),
    # cuBLAS adds up parts of a sum in fp16: one was -inf, and the sum is 48129.
    "parts of a sum that overflow, library": plan(
        "linear_with_pre",
        1527,
        leading=(2, 6, 1),
        columns=256,
        depth=1024,
        x=FP16._replace(scale=0.001, special="huge", where="rows", count=3, layout="every other"),
        weight=FP16._replace(special="subnormal", where="rows", count=3, by=6),
        bias=FP16._replace(count=3, layout="shifted", by=4),
        activation="relu",
    ),
    # Biased scores as close as 1e-11 beside a NaN: which of them is first was taken for certain.
    "NaN beside close scores": plan(
        "topk_router",
        779,
        rows=7,
        experts=152,
        topk=18,
        **{**SIGMOID, "groups": (8, 3), "grid": True, "bias": "float16"},
        logits=FP32._replace(scale=30.0, special="nan", count=2, by=11),
    ),
    # `library` had NaN for the losses of ignored rows whose logits are not finite, and gradients.
    "masked vocabulary, all rows ignored, library": plan(
        "linear_cross_entropy", 11026275, leading=(), **MASKED
    ),
    "gradients of a masked vocabulary, all rows ignored, library": plan(
        "linear_cross_entropy_backward", 3, leading=(5,), **MASKED, **GRADIENTS
    ),
    # Its lse, the loss and a logit, is NaN where the loss is.
    "masked vocabulary, library": plan(
        "linear_cross_entropy", 30670365, leading=(3,), **{**MASKED, "ignored": 0.3}
    ),
    "inf in an ignored row, library": plan(
        "linear_cross_entropy",
        1409,
        leading=(39,),
        **{**LINEAR_ENTROPY, "x": FP32._replace(special="inf"), "ignored": 1.0, "reduction": "sum"},
    ),
    # A bias chose experts whose probabilities are below 1e-38: their weights had few bits, or none.
    "faint scores": plan(
        "topk_router",
        1447742,
        rows=18,
        **{**ROUTER, "experts": 179, "topk": 2, "bias": "float32", "scale": 2.5},
        logits=FP16._replace(scale=30.0, special="nan", where="rows", count=3),
    ),
    # Sums of two pairs of biased scores, equal in fp64 and not in fp32: taken for a tie.
    "groups of nearly equal pairs": plan(
        "topk_router",
        1,
        rows=42,
        **{**ROUTER, "experts": 84, "topk": 21, "groups": (12, 5), "grid": True, "bias": "float16"},
        logits=BF16._replace(scale=2.0),
    ),
    # An infinite gradient times what is 0 in fp32: of a sigmoid 1 - s, of a softmax s.
    "inf in the gradient of a saturated sigmoid": plan(
        "topk_router_backward",
        13324928,
        rows=2,
        **{**SIGMOID, "experts": 150, "topk": 17, "renormalize": False},
        logits=BF16._replace(scale=30.0),
        dweights=BF16._replace(special="inf", where="rows", count=2),
    ),
    "inf in the gradient of a faint score": plan(
        "topk_router_backward",
        2500,
        rows=3,
        **{**PLAIN, "experts": 72, "topk": 20, "groups": (8, 5), "grid": True, "bias": "float32"},
        logits=FP32._replace(scale=30.0),
        dweights=BF16._replace(special="inf", count=3),
    ),
    "inf in the gradient of a faint share": plan(
        "topk_router_backward",
        1073741824,
        rows=16,
        **{**ROUTER, "experts": 80, "topk": 6, "groups": (8, 1), "bias": "bfloat16"},
        logits=FP32._replace(scale=30.0),
        dweights=FP16._replace(special="inf", count=2),
    ),
    # The judge's: the sum of 35 rows is off by 2.2 roundings in one of 768 columns.
    "a sum of rows that walks": plan(
        "layer_norm_backward",
        8499,
        shape=(35, 768),
        x=FP32._replace(scale=0.001),
        weight=FP32._replace(scale=30.0, layout="shifted", by=15),
        bias=FP32._replace(scale=0.001),
        eps=0.1,
        offset=1.0,
        dy=FP32._replace(layout="padded", by=10),
        dsum=FP32._replace(scale=30.0, layout="shifted", by=14),
        weight_grad=True,
    ),
    # Distances of logits are infinite, and with a smoothing of 1 the target has no share of one.
    "no share of an infinite distance": plan(
        "cross_entropy_one_pass",
        31,
        shape=(18, 1536),
        logits=BF16._replace(scale=1e38, special="-inf", where="places", count=1),
        **{**ENTROPY, "ignored": 0.3, "wrong": 1, "smoothing": 1.0, "reduction": "none"},
        weight="float16",
        return_lse=True,
    ),
}
# Calls with one wrong argument: its position, and what comes instead.
BAD: dict[str, tuple[Plan, int, Any]] = {
    # It was taken for "as it is", and decided by torch's promotion.
    "no dtype": (
        plan(
            "nvfp4_linear_backward",
            0,
            leading=(1,),
            columns=16,
            rows=1,
            layout="rows",
            per_row=False,
            piece=8192,
            dy=BF16,
            dtype="bfloat16",
        ),
        6,
        None,
    ),
    # Refused, but in torch's words about a data pointer.
    "sparse row scales": (plan("nvfp4_moe_backward", 0, rows=1, **PACKED, dy=BF16), 6, "sparse"),
    "sparse gradient of losses": (
        plan(
            "cross_entropy_backward",
            0,
            shape=(3, 5),
            logits=FP32,
            **{**ENTROPY, "reduction": "none"},
            weight=None,
            return_lse=False,
            dlse=None,
            dloss=FP32,
            shards=1,
        ),
        0,
        "sparse",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(KEPT))
def test_kept(name: str, device: str) -> None:
    check(KEPT[name], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(BAD))
def test_kept_wrong_call(name: str, device: str) -> None:
    given, place, wrong = BAD[name]
    refused(given.op, made_bad(given, place, wrong, device))
