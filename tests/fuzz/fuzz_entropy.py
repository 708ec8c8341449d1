"""Calls of the cross entropy ops, and of those that make the logits themselves."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_layouts import laid_out, leadings, shapes
from fuzz_plan import SEEDS, Arguments, Family, Maker, Plan, plan
from fuzz_values import ALL, DTYPES, LAYOUTS, WRITABLE, drawn
from hypothesis import strategies as st

from gristmill.ops.cross_entropy import reference
from gristmill.ops.cross_entropy.semantics import accumulator
from gristmill.ops.registry import OPS

# Mostly ordinary; now and then a whole tensor of numbers as large as there are.
LOGITS = (2.0, 2.0, 2.0, 1e-3, 60.0, 1e4, 1e8, 1e20, 1e38)
# A product of a gradient and a factor, and sums of them.
HUGE_GRADIENT = 1e15
FORWARD = ("cross_entropy", "cross_entropy_one_pass", "cross_entropy_one_pass_")
WRONG = (-1, -7, 1 << 20, (1 << 31) - 1)  # no class anywhere; beyond 32 bits see the kept tests


@st.composite
def options(draw: Any) -> dict[str, Any]:
    return {
        "target": draw(st.sampled_from(["int64", "int32"])),
        "ignore_index": draw(st.sampled_from([-100, -100, -2, 3])),
        "ignored": draw(st.sampled_from([0.0, 0.3, 0.3, 1.0])),
        "wrong": draw(st.sampled_from([0, 0, 0, 0, 1, 2])),
        "smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.0, 1e-2])),
        "softcap": draw(st.sampled_from([None, None, 3.0, 30.0])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
    }


def settled(words: dict[str, Any]) -> dict[str, Any]:
    if words.get("weight") is not None and words["reduction"] == "mean":
        # A target that is no class counts with the weight 1: the other rows change, too.
        return {**words, "wrong": 0}
    return words


@st.composite
def plans(draw: Any, op: str) -> Plan:
    layouts = WRITABLE if op.endswith("_") else LAYOUTS
    words: dict[str, Any] = {
        "shape": draw(shapes()),
        "logits": draw(drawn(scales=LOGITS, specials=ALL, layouts=layouts)),
    }
    if op == "scale_gradient_":
        words["per_row"] = draw(st.booleans())
        words["factor"] = draw(drawn(dtype="float32", specials=ALL, layouts=("dense",)))
        return plan(op, draw(SEEDS), **words)
    words |= draw(options())
    if op == "cross_entropy_shard":
        words["shards"] = draw(st.integers(1, 4))
        words["sums"] = draw(st.booleans())
        return plan(op, draw(SEEDS), **words)
    words["weight"] = draw(st.sampled_from([None, None, *DTYPES]))
    words["return_lse"] = draw(st.booleans())
    words = settled(words)
    if op == "cross_entropy_backward":
        words["dlse"] = draw(drawn(dtype="float32", layouts=("dense",)))
        words["dlse"] = words["dlse"] if draw(st.booleans()) else None
        words["dloss"] = draw(
            drawn(dtype="float32", specials=("nan", "inf", "zero"), layouts=("dense", "shifted"))
        )
        words["shards"] = draw(st.integers(1, 3)) if words["weight"] is None else 1
    return plan(op, draw(SEEDS), **words)


def targets(maker: Maker, shape: tuple[int, ...], classes: int) -> torch.Tensor:
    given = maker.plan
    target = maker.integers("target", 0, max(1, classes), shape)
    if given.wrong and target.numel() and not maker.ordinary:
        at = torch.randperm(target.numel(), generator=maker.generator("at"))[: given.wrong]
        bad = torch.tensor(WRONG)[maker.integers("bad", 0, len(WRONG), (len(at),))]
        target.view(-1)[at] = bad
    ignored = maker.uniform("ignored", shape) < given.ignored
    target = torch.where(ignored, given.ignore_index, target)
    return target.to(getattr(torch, given.target)).to(maker.device)


def _class_weight(maker: Maker, classes: int) -> torch.Tensor | None:
    if maker.plan.weight is None:
        return None
    values = 0.2 + maker.uniform("weight", (classes,))
    return values.to(getattr(torch, maker.plan.weight)).to(maker.device)


def make(maker: Maker) -> Arguments:
    given = maker.plan
    op, shape = given.op, given.shape
    if op == "scale_gradient_":
        gradient = maker.tensor("logits", shape, huge=HUGE_GRADIENT)
        rows = shape[:-1] if given.per_row else ()
        return gradient, maker.tensor("factor", rows, huge=HUGE_GRADIENT)
    logits = maker.tensor("logits", shape)
    shards = given.words.get("shards", 1)
    classes = shape[-1] * shards
    first = shape[-1] * (shards // 2)
    target = targets(maker, shape[:-1], classes)
    if op == "cross_entropy_shard":
        rest = (given.ignore_index, given.softcap, given.sums)
        return logits, target, first, classes, *rest
    rest = (
        _class_weight(maker, shape[-1]),
        given.ignore_index,
        given.smoothing,
        given.z_loss,
        given.softcap,
        given.reduction,
    )
    if op in FORWARD:
        return logits, target, *rest, given.return_lse
    own = accumulator(logits.dtype)
    if shards > 1:
        # What the stats of all shards might be: those of this one, and a little more.
        stats = reference.stats_of(logits, given.softcap) + 1.0
        denominators = logits.new_full((2,), float(max(1, target.numel())), dtype=own)
        if given.reduction != "mean":
            denominators = denominators[:0]
    else:
        first = classes = 0
        _, _, denominators, stats = reference.cross_entropy(logits, target, *rest, given.return_lse)
    rows = shape[:-1] if given.reduction == "none" else ()
    dloss = maker.tensor("dloss", rows)
    dlse = maker.tensor("dlse", shape[:-1])
    if dlse is not None and not given.return_lse:
        dlse = dlse.masked_fill(target == given.ignore_index, 0.0)
    return dloss, dlse, logits, target, stats, denominators, *rest, first, classes


@st.composite
def linear_plans(draw: Any, op: str) -> Plan:
    dtype = draw(st.sampled_from(DTYPES))
    layouts = ("dense", "dense", "padded", "shifted", "columns")
    words: dict[str, Any] = {
        "leading": draw(leadings(40)),
        "classes": draw(st.one_of(st.integers(1, 300), st.integers(300, 3000))),
        "columns": draw(st.one_of(st.integers(1, 100), st.sampled_from([128, 256]))),
        "x": draw(drawn(dtype=dtype, scales=(1.0, 1e-3, 3.0), specials=ALL, layouts=layouts)),
        "weight": draw(drawn(dtype=dtype, scales=(1.0,), layouts=layouts)),
        # A masked vocabulary, too.
        "bias": draw(drawn(dtype=dtype, scales=(1.0,), specials=("-inf",), layouts=("dense",))),
        "class_weight": draw(st.sampled_from([None, None, *DTYPES])),
        **draw(options()),
        "chunk_rows": draw(st.sampled_from([None, None, 1, 3, 16, 1000])),
    }
    words["bias"] = words["bias"] if draw(st.booleans()) else None
    if op == "linear_cross_entropy_backward":
        words["grads"] = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
        words["dlse"] = draw(st.booleans())
    return plan(op, draw(SEEDS), **words)


def make_linear(maker: Maker) -> Arguments:
    given = maker.plan
    leading, classes, columns = given.leading, given.classes, given.columns
    # Logits of fp16 have to be finite: their sums in fp32 are rounded to it.
    huge = 30.0 if given.x.dtype == "float16" else 1e6
    x = maker.tensor("x", (*leading, columns), huge=huge)
    weight = maker.tensor("weight", (classes, columns), factor=2 / columns**0.5)
    target = targets(maker, leading, classes)
    bias = maker.tensor("bias", (classes,))
    class_weight = None
    if given.class_weight is not None:
        class_weight = 0.25 + maker.uniform("class_weight", (classes,))
        class_weight = class_weight.to(getattr(torch, given.class_weight)).to(maker.device)
    tensors = (x, weight, target, bias, class_weight)
    rest = (
        given.ignore_index,
        given.smoothing,
        given.z_loss,
        given.softcap,
        given.reduction,
        given.chunk_rows,
    )
    if given.op == "linear_cross_entropy":
        return *tensors, *rest
    _, _, denominators, stats = OPS["linear_cross_entropy"].reference(*tensors, *rest)
    rows = leading if given.reduction == "none" else ()
    dloss, dlse = (
        torch.randn(sizes, generator=maker.generator(name)).to(maker.device)
        for name, sizes in (("dloss", rows), ("dlse", leading))
    )
    x_grad, weight_grad, bias_grad = given.grads
    grads = (x_grad, weight_grad, bias_grad and bias is not None)
    given_dlse = laid_out(dlse, "shifted", 3) if given.dlse else None
    return *tensors, dloss, given_dlse, stats, denominators, *rest, *grads


FAMILIES = {
    "cross_entropy": Family(plans, make, (0, 1), (0, 1), settled=settled),
    "cross_entropy_one_pass": Family(plans, make, (0, 1), (0, 1, 2), settled=settled),
    "cross_entropy_one_pass_": Family(plans, make, (0, 1), (0, 1, 2), settled=settled),
    "cross_entropy_backward": Family(plans, make, (0, 1, 2, 3, 4), (0,), settled=settled),
    # Its sums are results themselves. A thread of a warp adds up 256 numbers one after another, and
    # is off by 2.9 roundings on the CPU, too: the 4 that the emulated kernels' tests allow.
    "cross_entropy_shard": Family(plans, make, (0, 1), (0,), least=2.0),
    "scale_gradient_": Family(plans, make, (0, 1), (0,)),
    "linear_cross_entropy": Family(linear_plans, make_linear, (0, 2), (0, 1)),
    "linear_cross_entropy_backward": Family(linear_plans, make_linear, (0, 2, 5, 6, 7), (0,)),
}
