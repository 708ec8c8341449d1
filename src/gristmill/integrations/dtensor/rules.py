"""How each op may be sharded.

Where rows are independent, they may lie on different ranks; what is reduced over has to be whole,
or gives partial sums where sums are all there is. DTensor takes, of the ways that a rule allows,
the one for which it has to move least, and moves what it must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gristmill.errors import ArgumentError
from gristmill.integrations.dtensor.vocabulary import NOTHING, Result, Sharding

Call = Mapping[str, Any]
Rule = Callable[[Call], Sharding]

_NORM = {
    **dict.fromkeys(("x", "residual", "dy", "dsum"), "rows n"),
    **dict.fromkeys(("weight", "bias"), "n"),
}
_ROW = Result("rows n")
# A gradient of what all rows share: each rank has the sum over its own.
_SHARED = Result("n", sums="rows")


def _always(sharding: Sharding) -> Rule:
    return lambda call: sharding


def _norm(results: int) -> Rule:
    """Norms and in-place norms: all results are rows."""
    return _always(Sharding(_NORM, (_ROW,) * results))


def _norm_backward(call: Call) -> Sharding:
    weight = _SHARED if call["weight_grad"] and call["weight"] is not None else NOTHING
    if "bias_dtype" not in call:
        return Sharding(_NORM, (_ROW, weight))
    return Sharding(_NORM, (_ROW, weight, NOTHING if call["bias_dtype"] is None else _SHARED))


def _norm_fp8(call: Call) -> Sharding:
    """The largest number of all rows is that of the ranks' largest ones."""
    rows = (_ROW, _ROW) if "residual" in call else (_ROW,)
    scales = Result("rows one") if call["scale"] is None else NOTHING
    largest = Result("", sums="rows", by="max") if call["amax"] else NOTHING
    return Sharding(_NORM, (*rows, scales, largest))


def _softmax(call: Call) -> Sharding:
    """A causal mask counts the rows of the last two dims, so that these have to be whole."""
    inputs = {**dict.fromkeys(("x", "dy", "y"), "rows n"), "mask": "*rows n"}
    return Sharding(inputs, (_ROW,), whole_rows=1 if call["causal"] else 0)


_LOGITS = {
    "logits": "rows v",
    **dict.fromkeys(("target", "dlse"), "rows"),
    "stats": "rows two",
    "weight": "v",
}
_STATS = Result("rows two")


def _losses(call: Call) -> tuple[Result, Result, str]:
    """The loss, the denominators and what may be sharded, by reduction.

    A mean is no sum of means, as the ranks' rows that count differ in number: with sharded rows
    `gristmill.cross_entropy` adds up and divides.
    """
    reduction = call["reduction"]
    if reduction == "mean":
        return Result(""), Result("two"), ""
    loss = Result("rows") if reduction == "none" else Result("", sums="rows")
    return loss, NOTHING, "rows"


def _cross_entropy(call: Call) -> Sharding:
    loss, denominators, along = _losses(call)
    return Sharding(_LOGITS, (loss, Result("rows"), denominators, _STATS), along)


def _cross_entropy_one_pass(call: Call) -> Sharding:
    loss, _, along = _losses(call)
    return Sharding(_LOGITS, (loss, Result("rows"), Result("rows v")), along)


def _cross_entropy_in_place(call: Call) -> Sharding:
    """DTensor takes an op in place for one that returns what it has written, and this one does not.

    `gristmill.cross_entropy` never calls it for a DTensor.
    """
    raise ArgumentError(
        "cross_entropy_one_pass_: logits must be a plain tensor, got a DTensor; call "
        "gristmill.cross_entropy(..., one_pass=True), or this op with logits.to_local()"
    )


def _cross_entropy_backward(call: Call) -> Sharding:
    """The denominators are those of all rows, so that each row can do without the others."""
    dloss = "rows" if call["reduction"] == "none" else ""
    return Sharding({**_LOGITS, "dloss": dloss}, (Result("rows v"),))


def _scale_gradient(call: Call) -> Sharding:
    factor = "rows" if call["factor"].ndim else ""
    return Sharding({"gradient": "rows v", "factor": factor}, (), along="rows v")


_HIDDEN = {
    "x": "rows k",
    "weight": "v k",
    **dict.fromkeys(("target", "dlse"), "rows"),
    "stats": "rows two",
    **dict.fromkeys(("bias", "class_weight"), "v"),
}


def _linear_cross_entropy(call: Call) -> Sharding:
    loss, denominators, along = _losses(call)
    return Sharding(_HIDDEN, (loss, Result("rows"), denominators, _STATS), along)


def _linear_cross_entropy_backward(call: Call) -> Sharding:
    dloss = "rows" if call["reduction"] == "none" else ""
    return Sharding(
        {**_HIDDEN, "dloss": dloss},
        (
            Result("rows k") if call["x_grad"] else NOTHING,
            Result("v k", sums="rows") if call["weight_grad"] else NOTHING,
            Result("v", sums="rows") if call["bias_grad"] else NOTHING,
        ),
    )


_LINEAR = {"x": "rows k", "weight": "n k", "bias": "n"}


def _linear(call: Call) -> Sharding:
    """Columns of the weight may be sharded where nothing but their sum is asked for."""
    if call["bias"] is None and call["activation"] is None:
        return Sharding(_LINEAR, (Result("rows n", sums="k"),), along="rows n k")
    return Sharding(_LINEAR, (_ROW,), along="rows n")


def _linear_with_pre(call: Call) -> Sharding:
    return Sharding(_LINEAR, (_ROW, _ROW), along="rows n")


_MATMUL = Sharding(
    {"a": "*rows m k", "b": "*rows k n"}, (Result("rows m n", sums="k"),), along="rows m n k"
)
_ROW_PRODUCTS = Sharding(
    {"a": "rows m", "b": "rows n"}, (Result("m n", sums="rows"),), along="rows m n"
)

# Experts are whole on every rank, their tokens need not be.
_TOKENS = {
    "hidden_states": "rows h",
    "dy": "rows h",
    "topk_weights": "rows top",
    "topk_ids": "rows top",
}
_TOKEN = Result("rows h")


def _moe_backward(call: Call) -> Sharding:
    trained = ("w13", "w2", "w13_bias", "w2_bias")
    gradients = [
        Result("", sums="rows") if call["weight_grad"] and call[name] is not None else NOTHING
        for name in trained
    ]
    return Sharding(_TOKENS, (_TOKEN, Result("rows top"), *gradients))


def _nvfp4_weight(call: Call, columns: str) -> dict[str, str]:
    """A weight's parts. Only in layout "rows" is a part of each a part of the weight.

    The others lay out blocks of many rows and columns, whose edges need not be those of shards: a
    rank packs its own rows or columns then, as `gristmill.distributed` does for modules.
    """
    if call["layout"] != "rows":
        return {}
    return {"codes": f"n {columns}", "scales": f"n {columns}", "row_scale": "n", "bias": "n"}


def _nvfp4_linear(call: Call) -> Sharding:
    """As `linear`, for columns in whole blocks of one scale on every rank.

    With `act` a row's scale is that of all its columns, so that they have to be together.
    """
    inputs = {"x": "rows k", **_nvfp4_weight(call, "k")}
    if "codes" not in inputs:
        return Sharding(inputs, (_ROW,))
    blocks, ranks = call["scales"].shape[-1], call["scales"].mesh.size()
    if call["bias"] is None and call["act"] is None and blocks % ranks == 0:
        return Sharding(inputs, (Result("rows n", sums="k"),), along="rows n k")
    return Sharding(inputs, (_ROW,), along="rows n")


def _nvfp4_linear_backward(call: Call) -> Sharding:
    """Not along the columns of the weight: how many they are is an argument, of all ranks alike.

    A weight whose columns are sharded is gathered for it; `gristmill.distributed`'s row-parallel
    style, which works on each rank's own columns, does not.
    """
    inputs = {"dy": "rows n", **_nvfp4_weight(call, "whole")}
    if "codes" not in inputs:
        return Sharding(inputs, (Result("rows k"),))
    return Sharding(inputs, (Result("rows k", sums="n"),), along="rows n")


_ROUTER = {"logits": "rows e", "dweights": "rows top", "topk_ids": "rows top"}

RULES: dict[str, Rule] = {
    "rms_norm": _norm(1),
    "add_rms_norm": _norm(2),
    "fused_add_rms_norm_": _norm(0),
    "rms_norm_backward": _norm_backward,
    "rms_norm_fp8": _norm_fp8,
    "add_rms_norm_fp8": _norm_fp8,
    "layer_norm": _norm(1),
    "add_layer_norm": _norm(2),
    "layer_norm_backward": _norm_backward,
    "layer_norm_fp8": _norm_fp8,
    "add_layer_norm_fp8": _norm_fp8,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "softmax_backward": _softmax,
    "log_softmax_backward": _softmax,
    "cross_entropy": _cross_entropy,
    "cross_entropy_one_pass": _cross_entropy_one_pass,
    "cross_entropy_one_pass_": _cross_entropy_in_place,
    "cross_entropy_backward": _cross_entropy_backward,
    "cross_entropy_shard": _always(Sharding(_LOGITS, (Result("rows numbers"),))),
    "scale_gradient_": _scale_gradient,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "linear": _linear,
    "linear_with_pre": _linear_with_pre,
    "matmul": _always(_MATMUL),
    "row_products": _always(_ROW_PRODUCTS),
    "moe": _always(Sharding(_TOKENS, (_TOKEN,))),
    "moe_backward": _moe_backward,
    "nvfp4_linear": _nvfp4_linear,
    "nvfp4_linear_backward": _nvfp4_linear_backward,
    "nvfp4_moe": _always(Sharding(_TOKENS, (_TOKEN,))),
    "nvfp4_moe_backward": _always(Sharding(_TOKENS, (_TOKEN, Result("rows top")))),
    "topk_router": _always(Sharding(_ROUTER, (Result("rows top"), Result("rows top")))),
    "topk_router_backward": _always(Sharding(_ROUTER, (Result("rows e"),))),
    # The ops of runners, whose weights DTensor does not see.
    "nvfp4_linear_gemm": _always(Sharding({"x": "rows k"}, (_ROW,))),
    "nvfp4_moe_gemm": _always(Sharding(_TOKENS, (_TOKEN,))),
    # Raises wherever it runs.
    "runner_gradient": _always(Sharding({}, (Result(""),), along="")),
}
