"""NVFP4 calls that nobody thought of: shapes, dtypes, layouts and options at random, in pieces."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from conformance_helpers import DEVICES, allowed, composed, copied, run_by, supporting
from conformance_truth import results_of, truth_of

from gristmill.ops import nvfp4_common
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_moe import slots
from gristmill.ops.registry import OPS

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
LAYOUTS = st.sampled_from(["rows", "tiles", "fragments"])
BLOCKS = st.integers(1, 20).map(lambda count: 16 * count)
SETTINGS = hypothesis.settings(
    max_examples=100 if torch.cuda.is_available() else 40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)


def check(name: str, args: tuple[Any, ...], piece: int) -> None:
    op = OPS[name]
    truths = truth_of(name, args)
    limits = allowed(op, args, truths)
    for variant in supporting(op, args):
        rounding = composed(op, variant.name, args)
        if rounding and name == "nvfp4_moe_backward" and args[-4] is not None:
            # The gradient jumps at the limit, and products rounded on the way may cross it.
            continue
        own = copied(args)
        with (
            mock.patch.object(nvfp4_common, "PIECE_BYTES", piece),
            mock.patch.object(slots, "NARROW", 16),
        ):
            results = results_of(name, own, run_by(op, variant.name, own))
        for truth, limit, result in zip(truths, limits, results, strict=True):
            error = truth.roundings(result, composed=rounding)
            assert error <= limit, f"{variant.name}: {error:.2f} roundings > {limit}"


@st.composite
def linears(draw: Any) -> tuple[str, tuple[Any, ...]]:
    columns, rows, layout = draw(BLOCKS), draw(st.integers(1, 300)), draw(LAYOUTS)
    leading = draw(st.lists(st.integers(1, 9), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = random_weight(
        (rows, columns), "cpu", layout=layout, generator=generator, per_row=draw(st.booleans())
    )
    if draw(st.booleans()):
        dy = torch.randn(*leading, rows, generator=generator).to(draw(DTYPES))
        return "nvfp4_linear_backward", (dy, *weight, draw(DTYPES))
    x = torch.randn(*leading, columns, generator=generator).to(draw(DTYPES))
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(rows, generator=generator).to(draw(DTYPES))
    out = draw(st.one_of(st.none(), DTYPES))
    act = draw(st.sampled_from([None, None, "fp8", "nvfp4"]))
    return "nvfp4_linear", (x, *weight[:3], bias, layout, out, act)


@st.composite
def mixtures(draw: Any) -> tuple[str, tuple[Any, ...]]:
    hidden, inner, layout = draw(BLOCKS), draw(BLOCKS), draw(LAYOUTS)
    experts, topk = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    rows = draw(st.one_of(st.integers(1, 3), st.integers(1, 60)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    per_row = draw(st.booleans())

    def stack(*shape: int, pairs: bool = False) -> Any:
        return random_weight(
            (experts, *shape),
            "cpu",
            layout=layout,
            generator=generator,
            per_row=per_row,
            pairs=pairs,
        )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(draw(DTYPES))

    # Any expert any number of times, and none.
    ids = torch.randint(-1, experts, (rows, topk), generator=generator)
    w13, w2 = stack(2 * inner, hidden, pairs=True), stack(hidden, inner)
    biases = [normal(experts, 2 * inner), normal(experts, hidden)]
    mapped = None
    if draw(st.booleans()):
        mapped = torch.randint(-1, experts, (experts + 2,), generator=generator).int()
    activation = draw(st.sampled_from(["silu", "gelu", "swiglu_oai"]))
    alpha = draw(st.sampled_from([None, 0.5, 3.0])) if activation == "swiglu_oai" else None
    args = (
        normal(rows, hidden),
        normal(rows, topk).abs(),
        ids.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        *w13[:3],
        *w2[:3],
        biases[0] if draw(st.booleans()) else None,
        biases[1] if draw(st.booleans()) else None,
        activation,
        draw(st.sampled_from([None, 0.5, 7.0])),
        mapped,
        layout,
        alpha,
    )
    if draw(st.booleans()):
        dy = torch.randn(rows, hidden, generator=generator).to(args[0].dtype)
        return "nvfp4_moe_backward", (dy, *args)
    return "nvfp4_moe", args


@pytest.mark.parametrize("device", DEVICES)
@SETTINGS
@hypothesis.given(call=linears(), piece=st.sampled_from([8 << 10, 100 << 10, 32 << 20]))
def test_any_linear(device: str, call: tuple[str, tuple[Any, ...]], piece: int) -> None:
    check(call[0], moved(call[1], device), piece)


@pytest.mark.parametrize("device", DEVICES)
@SETTINGS
@hypothesis.given(call=mixtures(), piece=st.sampled_from([8 << 10, 100 << 10, 32 << 20]))
def test_any_mixture(device: str, call: tuple[str, tuple[Any, ...]], piece: int) -> None:
    check(call[0], moved(call[1], device), piece)
