"""Calls of every op, whole, as one process makes them: small, in fp64, of unequal shares.

Four ranks share five or six rows: some have two, some one, some none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import gristmill
from gristmill.formats.nvfp4 import quantize
from gristmill.ops.nvfp4_common import parts_of
from gristmill.ops.op import Arguments
from gristmill.ops.registry import OPS

F64 = torch.float64
LEADING = (5, 6)
COLUMNS = 64

# By op: what differs from the example of the op, one call for each entry.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "rms_norm": [{}, {"weight": None}, {"out_dtype": torch.float32, "casting": "llama"}],
    "add_rms_norm": [{}, {"weight": None, "eps": None}],
    "layer_norm": [{}, {"weight": None}, {"bias": None, "out_dtype": torch.float32}],
    "add_layer_norm": [{}, {"weight": None, "bias": None}],
    "rms_norm_backward": [{}, {"weight_grad": False}, {"dsum": "x"}],
    "layer_norm_backward": [{}, {"weight_grad": False}, {"bias_dtype": None, "dsum": "x"}],
    **{
        f"{name}_fp8": [{}, {"amax": True}, {"scale": torch.tensor(0.25)}]
        for name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
    },
    "cross_entropy_shard": [{}, {"sums": True, "softcap": 5.0}],
    "linear": [{}, {"bias": "rows"}, {"activation": "gelu"}],
    "linear_with_pre": [{}, {"bias": "rows"}],
    "moe": [{}, {"activation": "gelu", "limit": 1.0}, {"w13_bias": "w13", "expert_map": "w13"}],
    "moe_backward": [{}, {"weight_grad": False}, {"w13_bias": "w13", "w2_bias": "w2"}],
    "topk_router": [
        {},
        {"scoring": "sigmoid", "groups": 4, "topk_groups": 2, "ids_dtype": torch.int64},
    ],
}
IN_ROWS = ("norm", "softmax", "cross_entropy", "scale_gradient")
REDUCED: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.1},
    {"reduction": "none", "softcap": 3.0},
]


def calls(name: str) -> Iterator[Arguments]:
    """The calls of an op; the first one is an ordinary one."""
    torch.manual_seed(0)
    if name in SPECIAL:
        yield from SPECIAL[name](name)
        return
    for options in OPTIONS.get(name, [{}]):
        yield example(name, options)


def example(name: str, options: dict[str, Any]) -> Arguments:
    """The example of an op with other options; a word among them names what a tensor is like."""
    op = OPS[name]
    shape = (*LEADING, COLUMNS) if any(part in name for part in IN_ROWS) else (6, COLUMNS)
    arguments = op.example(shape, F64, "cpu")
    names = [argument.name for argument in op.overload._schema.arguments]
    call = dict(zip(names, arguments, strict=True))
    for key, value in options.items():
        if key == "dsum":
            value = torch.randn_like(call[value])
        elif key == "bias" and value == "rows":
            value = torch.randn(call["weight"].shape[0], dtype=F64)
        elif key in ("w13_bias", "w2_bias"):
            value = torch.randn(call[value].shape[:2], dtype=F64)
        elif key == "expert_map":
            value = torch.arange(call[value].shape[0]).roll(1)
        call[key] = value
    return tuple(call.values())


def softmax_calls(name: str) -> Iterator[Arguments]:
    x = torch.randn(*LEADING, 7, dtype=F64)
    if "backward" in name:
        y = torch.log_softmax(x, -1) if "log" in name else torch.softmax(x, -1)
        dy = torch.randn_like(x)
        yield from ((dy, y, 0, 1.0), (dy, y, 1, 0.5))
        return
    yield x, 0, 1.0, None
    yield x, 1, 0.5, None
    yield x, 0, 0.5, torch.rand(6, 7) > 0.3
    yield x, 2, 0.5, torch.randn(5, 1, 7, dtype=F64)
    yield x, 0, 1.0, torch.randn(7, dtype=F64)
    yield x, 0, 1.0, torch.randn(1, 6, 1, dtype=F64)
    yield x, 0, 1.0, torch.randn(5, 1, 1)


def cross_entropy_calls(name: str) -> Iterator[Arguments]:
    logits = torch.randn(*LEADING, 16, dtype=F64)
    target = torch.randint(0, 16, LEADING)
    target[0, 0] = -100
    weight = torch.rand(16, dtype=F64)
    for options in REDUCED:
        full = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, **options}
        middle = tuple(full[key] for key in ("label_smoothing", "z_loss", "softcap", "reduction"))
        for classes in (None, weight):
            forward = (logits, target, classes, -100, *middle, True)
            if name == "cross_entropy_backward":
                loss, lse, denominators, stats = OPS["cross_entropy"].run(*forward)
                dlse = None if classes is None else torch.randn_like(lse)
                saved = (logits, target, stats, denominators, classes)
                yield torch.randn_like(loss), dlse, *saved, -100, *middle, 0, 0
            else:
                yield forward


def linear_cross_entropy_calls(name: str) -> Iterator[Arguments]:
    x = torch.randn(*LEADING, 8, dtype=F64)
    weight, bias = torch.randn(16, 8, dtype=F64), torch.randn(16, dtype=F64)
    target = torch.randint(0, 16, LEADING)
    target[0, 0] = -100
    for options in REDUCED:
        full = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, **options}
        middle = tuple(full[key] for key in ("label_smoothing", "z_loss", "softcap", "reduction"))
        tensors = (x, weight, target, bias, None)
        forward = (*tensors, -100, *middle, None)
        if name == "linear_cross_entropy":
            yield forward
            continue
        loss, _, denominators, stats = OPS["linear_cross_entropy"].run(*forward)
        saved = (torch.randn_like(loss), None, stats, denominators)
        wanted = (True, True, True) if options["reduction"] == "mean" else (True, False, False)
        yield *tensors, *saved, -100, *middle, None, *wanted


def scale_calls(name: str) -> Iterator[Arguments]:
    gradient = torch.randn(*LEADING, 8, dtype=F64)
    yield gradient, torch.randn(*LEADING, dtype=F64)
    yield gradient, torch.tensor(0.5, dtype=F64)


def matmul_calls(name: str) -> Iterator[Arguments]:
    for a, b in (
        ((6, 8), (8, 12)),
        ((5, 6, 8), (5, 8, 12)),
        ((5, 6, 8), (8, 12)),
        ((6, 8), (5, 8, 12)),
        ((4, 1, 6, 8), (5, 8, 12)),
        ((1, 6, 8), (5, 8, 12)),
    ):
        yield torch.randn(a, dtype=F64), torch.randn(b, dtype=F64)


def row_products_calls(name: str) -> Iterator[Arguments]:
    for a, b in (((6, 8), (6, 12)), ((5, 6, 8), (5, 6, 12)), ((4, 5, 6, 8), (4, 5, 6, 7))):
        yield torch.randn(a, dtype=F64), torch.randn(b, dtype=F64)


def nvfp4_linear_calls(name: str) -> Iterator[Arguments]:
    weight = quantize(torch.randn(12, COLUMNS))
    x = torch.randn(*LEADING, COLUMNS, dtype=F64)
    dy = torch.randn(*LEADING, 12, dtype=F64)
    bias = torch.randn(12, dtype=F64)
    for one in (weight, weight.prepare("sm_90"), weight.prepare("sm_100")):
        codes, scales, row_scale, layout, _ = parts_of(name, "weight", one)
        parts = (codes, scales, row_scale)
        if name == "nvfp4_linear_backward":
            yield dy, *parts, layout, COLUMNS, F64
            continue
        yield x, *parts, None, layout, None, None
        yield x, *parts, bias, layout, torch.float32, None
        yield x, *parts, None, layout, None, "fp8"
    if name == "nvfp4_linear":
        # Three blocks: no two ranks have whole ones each.
        uneven = parts_of(name, "weight", quantize(torch.randn(12, 48)))[:3]
        yield torch.randn(6, 48, dtype=F64), *uneven, None, "rows", None, None


SPECIAL = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward"), softmax_calls
    ),
    **dict.fromkeys(
        ("cross_entropy", "cross_entropy_one_pass", "cross_entropy_backward"), cross_entropy_calls
    ),
    **dict.fromkeys(
        ("linear_cross_entropy", "linear_cross_entropy_backward"), linear_cross_entropy_calls
    ),
    "scale_gradient_": scale_calls,
    "matmul": matmul_calls,
    "row_products": row_products_calls,
    **dict.fromkeys(("nvfp4_linear", "nvfp4_linear_backward"), nvfp4_linear_calls),
}


def runner_calls(name: str) -> Iterator[Arguments]:
    """Runners have to be registered, by the same name on every rank."""
    torch.manual_seed(0)
    w13, w2 = quantize(torch.randn(4, 32, 32)), quantize(torch.randn(4, 32, 16))
    if name == "nvfp4_linear_gemm":
        runner: Any = gristmill.Nvfp4LinearRunner(quantize(torch.randn(12, COLUMNS)))
        inputs: tuple[Any, ...] = (torch.randn(*LEADING, COLUMNS, dtype=F64),)
        width = 12
    else:
        runner = gristmill.Nvfp4MoeRunner(w13, w2)
        inputs = (torch.randn(6, 32, dtype=F64), torch.rand(6, 2), torch.randint(0, 4, (6, 2)))
        width = 32
    KEPT.append(runner)
    yield *inputs, gristmill.register_runner(runner), width


# A runner lives as long as somebody holds it.
KEPT: list[Any] = []
RUNNERS = ("nvfp4_linear_gemm", "nvfp4_moe_gemm")
