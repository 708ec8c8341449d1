"""Softmax and log_softmax: what they refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gristmill
from gristmill.ops.registry import OPS

FUNCTIONS = {"softmax": gristmill.softmax, "log_softmax": gristmill.log_softmax}
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "mask too long": (
        ValueError,
        r"mask must broadcast to .*\(4, 6, 8\), got \(9,\)",
        {"mask": (9,)},
    ),
    "mask of more dims": (ValueError, "mask must broadcast", {"mask": (1, 4, 6, 8)}),
    "mask that would enlarge x": (ValueError, "mask must broadcast", {"mask": (7, 6, 8)}),
    "mask of integers": (
        TypeError,
        "mask must have dtype bool, float32.*got int64",
        {"mask": torch.ones(8, dtype=torch.int64)},
    ),
    "mask of bytes": (
        TypeError,
        "mask must have dtype bool.*got uint8",
        {"mask": torch.ones(8, dtype=torch.uint8)},
    ),
    "mask is a list": (TypeError, "mask must be a torch.Tensor, got list", {"mask": [True] * 8}),
    "sparse mask": (ValueError, "mask must be a dense tensor", {"mask": torch.eye(8).to_sparse()}),
    "mask elsewhere": (
        ValueError,
        "mask is on meta, x on cpu",
        {"mask": torch.ones(8, device="meta")},
    ),
    "causal unknown": (
        ValueError,
        "causal must be None, 'top_left' or 'bottom_right', got 'upper'",
        {"causal": "upper"},
    ),
    "causal is the op's int": (ValueError, "causal must be None, .* got 1", {"causal": 1}),
    "causal is a list": (ValueError, r"causal must be None, .* got \[\]", {"causal": []}),
    "causal is a bool": (ValueError, "causal must be None, .* got True", {"causal": True}),
    "causal along another dim": (
        ValueError,
        "dim must be -1, got 1",
        {"dim": 1, "causal": "top_left"},
    ),
    "dim too large": (ValueError, "dim must be from -3 to 2 .* got 3", {"dim": 3}),
    "dim too small": (ValueError, "dim must be from -3 to 2 .* got -4", {"dim": -4}),
    "dim is a float": (TypeError, "dim must be an int, got float", {"dim": 1.0}),
    "scale infinite": (ValueError, "scale must be finite", {"scale": float("inf")}),
    "scale is NaN": (ValueError, "scale must be finite", {"scale": float("nan")}),
    "scale too large for fp32": (ValueError, "scale must be finite in fp32", {"scale": 1e39}),
    "scale is a string": (TypeError, "scale must be a number, got str", {"scale": "1"}),
}


@over_functions
@pytest.mark.parametrize(("error", "message", "options"), BAD.values(), ids=BAD.keys())
def test_bad_input(
    name: str, error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    options = dict(options)
    if isinstance(options.get("mask"), tuple):
        options["mask"] = torch.ones(options["mask"], dtype=torch.bool)
    with pytest.raises(error, match=message) as raised:
        FUNCTIONS[name](torch.randn(4, 6, 8), **options)
    assert str(raised.value).startswith(f"{name}: ")
    assert isinstance(raised.value, gristmill.errors.GristmillError)


@over_functions
@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0], "x must be a torch.Tensor, got list"),
        (torch.ones(3, dtype=torch.int32), "x must have dtype float32.*got int32"),
        (torch.tensor(1.0), "at least one dim"),
        (torch.eye(3).to_sparse(), "x must be a dense tensor"),
    ],
    ids=["list", "integers", "scalar", "sparse"],
)
def test_bad_x(name: str, x: Any, message: str) -> None:
    for dim in (-1, 0):
        with pytest.raises(gristmill.errors.GristmillError, match=message):
            FUNCTIONS[name](x, dim)


@over_functions
def test_causal_needs_two_dims(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have at least two dims, got shape \(8,\)"):
        FUNCTIONS[name](torch.randn(8), causal="top_left")


@over_functions
def test_the_ops_have_ints_for_words(name: str) -> None:
    """Early ones, which DTensor's cache of sharding rules tells apart; `explain` takes either."""
    function, overload = FUNCTIONS[name], OPS[name].overload
    x = torch.randn(3, 6, 9)
    for code, word in enumerate((None, "top_left", "bottom_right")):
        assert torch.equal(overload(x, code), function(x, causal=word))
        assert str(gristmill.explain(name, x, code)) == str(gristmill.explain(name, x, causal=word))
    for bad in (3, -1):
        with pytest.raises(
            gristmill.errors.ArgumentError,
            match=rf"{name}: causal must be one of 0 \(None\), 1 \('top_left'\), .* got {bad}",
        ):
            overload(x, bad)


@over_functions
def test_an_unknown_word_is_told_while_compiling(name: str) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"causal must be None, .* got 'upper'"):
        compiled(torch.randn(3, 5), causal="upper")


@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward"])
def test_bad_gradients(name: str) -> None:
    op, y = OPS[name], torch.softmax(torch.randn(3, 8), -1)
    with pytest.raises(ValueError, match=f"{name}: dy must have the shape of y"):
        op.run(y[:, :4], y, 0, 1.0)
    with pytest.raises(TypeError, match=f"{name}: dy must have dtype"):
        op.run(y.int(), y, 0, 1.0)
    with pytest.raises(ValueError, match=f"{name}: scale must be finite"):
        op.run(y, y, 0, float("inf"))
    with pytest.raises(ValueError, match=f"{name}: causal must be None, 'top_left' or"):
        op.run(y, y, "left", 1.0)
