"""A wrong argument of an NVFP4 op is a typed error that names it, what came and what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gristmill
from gristmill import nvfp4
from gristmill.errors import ArgumentError, DtypeError, GristmillError, VariantUnavailable
from gristmill.ops.nvfp4_linear import linear_backward, linear_of
from gristmill.ops.nvfp4_linear.cases import backward_example, forward_example
from gristmill.ops.nvfp4_moe import moe_backward, moe_of
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvfp4_linear": linear_of,
    "nvfp4_linear_backward": linear_backward,
    "nvfp4_moe": moe_of,
    "nvfp4_moe_backward": moe_backward,
}
FLOATS = "float32, bfloat16, float16, float64"
INT8 = torch.uint8
E4M3 = torch.float8_e4m3fn


def good(op: Op, device: str = "cpu") -> dict[str, Any]:
    """Of 4 rows: a weight (32, 64), or 3 experts of (2 * 16, 32) and (32, 16), two for a row."""
    shape = (4, 3, 2, 32, 16) if "moe" in op.name else (4, 32, 64)
    names = [argument.name for argument in op.overload._schema.arguments]
    return dict(zip(names, op.example(shape, torch.bfloat16, device), strict=True))


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


Wrong = tuple[str, Any, type[GristmillError], list[str]]
LINEAR: list[Wrong] = [
    ("codes", None, DtypeError, ["tensor of torch.uint8", "NoneType"]),
    ("codes", ones(32, 32), DtypeError, ["tensor of torch.uint8", "float32"]),
    ("codes", ones(32, 32, dtype=INT8, device="meta"), ArgumentError, ["on meta", "on cpu"]),
    ("codes", ones(32, dtype=INT8), ArgumentError, [r"\(N, K / 2\)", r"got \(32,\)$"]),
    ("codes", ones(2, 32, 32, dtype=INT8), ArgumentError, [r"\(N, K / 2\)", r"nvfp4\.moe"]),
    ("codes", ones(32, 30, dtype=INT8), ArgumentError, ["K a multiple of 16", r"got \(32, 30\)"]),
    ("scales", ones(32, 4), DtypeError, ["float8_e4m3fn", "float32"]),
    ("scales", ones(32, 3, dtype=E4M3), ArgumentError, [r"\(32, 4\) in layout 'rows'", "32, 3"]),
    ("scales", ones(512, dtype=E4M3), ArgumentError, [r"\(32, 4\) in layout 'rows'", "512"]),
    ("row_scale", ones(32, dtype=torch.bfloat16), DtypeError, ["float32", "bfloat16"]),
    ("row_scale", torch.tensor(1.0), ArgumentError, [r"shape \(32,\), one for each row", r"\(\)"]),
    ("row_scale", ones(31), ArgumentError, [r"shape \(32,\), one for each row", r"\(31,\)"]),
    (
        "layout",
        "columns",
        ArgumentError,
        ["'rows' or 'tiles' or 'fragments'", "got 'columns'"],
    ),
]
LINEAR_FORWARD: list[Wrong] = [
    *LINEAR,
    ("x", [1.0], DtypeError, ["must be a torch.Tensor", "list"]),
    ("x", ones(4, 64, dtype=torch.int32), DtypeError, [FLOATS, "int32"]),
    ("x", torch.tensor(1.0), ArgumentError, ["at least one dim", "scalar"]),
    (
        "x",
        ones(4, 63),
        ArgumentError,
        ["must end in K = 64", r"\(32, 64\)", r"got shape \(4, 63\)"],
    ),
    ("x", torch.eye(4, 64).to_sparse(), ArgumentError, ["dense", "sparse_coo"]),
    ("bias", ones(31), ArgumentError, [r"shape \(32,\)", r"got \(31,\)"]),
    ("bias", ones(4, 32), ArgumentError, [r"shape \(32,\)", r"got \(4, 32\)"]),
    ("bias", ones(32, dtype=torch.int64), DtypeError, [FLOATS, "int64"]),
    ("bias", ones(32, device="meta"), ArgumentError, ["on meta", "x on cpu"]),
    ("out_dtype", torch.int8, DtypeError, [FLOATS, "int8"]),
    ("out_dtype", "float32", DtypeError, [FLOATS, "got str"]),
    ("act", "fp4", ArgumentError, ["None, 'fp8' or 'nvfp4'", "got 'fp4'"]),
    ("act", torch.bfloat16, ArgumentError, ["None, 'fp8' or 'nvfp4'", "got torch.bfloat16"]),
]
LINEAR_BACKWARD: list[Wrong] = [
    *LINEAR,
    ("dy", ones(4, 64), ArgumentError, ["must end in N = 32", r"got shape \(4, 64\)"]),
    ("dy", 1.0, DtypeError, ["must be a torch.Tensor", "float"]),
    ("dtype", torch.int8, DtypeError, [FLOATS, "int8"]),
    ("columns", 80, ArgumentError, ["must be K = 64", r"\(32, 64\)", "got 80"]),
    ("columns", None, DtypeError, ["must be an int", "NoneType"]),
    ("columns", 64.0, DtypeError, ["must be an int", "float"]),
]
IDS = torch.zeros(4, 2, dtype=torch.int64)
MOE: list[Wrong] = [
    ("hidden_states", ones(2, 2, 32), ArgumentError, [r"\(M, H\)", r"got \(2, 2, 32\)", "flatten"]),
    ("hidden_states", ones(32), ArgumentError, [r"\(M, H\)", r"got \(32,\)"]),
    ("hidden_states", ones(4, 32).long(), DtypeError, [FLOATS, "int64"]),
    ("topk_weights", IDS, DtypeError, [FLOATS, "int64"]),
    ("topk_weights", ones(4, 3), ArgumentError, [r"topk_weights, \(4, 3\)", r"got \(4, 2\)"]),
    ("topk_weights", ones(3, 2), ArgumentError, [r"\(M, k\)", "the 4 rows", r"got \(3, 2\)"]),
    ("topk_weights", ones(4), ArgumentError, [r"\(M, k\)", r"got \(4,\)"]),
    ("topk_ids", ones(4, 2), DtypeError, ["int32 or int64", "float32"]),
    ("topk_ids", None, DtypeError, ["int32 or int64", "NoneType"]),
    ("topk_ids", IDS.to(torch.int16), DtypeError, ["int32 or int64", "int16"]),
    ("topk_ids", IDS.to("meta"), ArgumentError, ["on meta", "hidden_states on cpu"]),
    ("w13_codes", ones(32, 16, dtype=INT8), ArgumentError, [r"\(E, N, K / 2\)", r"\(32, 16\)"]),
    ("w2_codes", ones(3, 32, 8), DtypeError, ["torch.uint8", "float32"]),
    ("w13_row_scale", ones(3), ArgumentError, [r"shape \(3, 32\), one for each row", r"\(3,\)"]),
    ("w2_scales", ones(3, 32, 2, dtype=E4M3), ArgumentError, [r"\(3, 32, 1\)", r"\(3, 32, 2\)"]),
    ("w13_bias", ones(3, 16), ArgumentError, [r"shape \(3, 32\)", r"got \(3, 16\)"]),
    ("w2_bias", ones(32), ArgumentError, [r"shape \(3, 32\)", r"got \(32,\)"]),
    ("w2_bias", IDS, DtypeError, [FLOATS, "int64"]),
    ("activation", "relu", ArgumentError, ["'silu' or 'swiglu_oai' or 'gelu'", "got 'relu'"]),
    ("limit", -1.0, ArgumentError, ["at least 0", "got -1.0"]),
    ("limit", float("nan"), ArgumentError, ["finite", "got nan"]),
    ("limit", "seven", DtypeError, ["a number", "str"]),
    ("alpha", 1.0, ArgumentError, ["slope in 'swiglu_oai'", "'silu'", "got 1.0"]),
    ("alpha", float("inf"), ArgumentError, ["finite", "got inf"]),
    ("alpha", "steep", DtypeError, ["a number", "str"]),
    ("expert_map", ones(5), DtypeError, ["int32 or int64", "float32"]),
    ("expert_map", IDS, ArgumentError, [r"\(experts of the model,\)", r"got \(4, 2\)"]),
    ("layout", "tile", ArgumentError, ["'rows' or 'tiles' or 'fragments'", "got 'tile'"]),
]
MOE_BACKWARD: list[Wrong] = [
    ("dy", ones(4, 31), ArgumentError, [r"hidden_states, \(4, 32\)", r"got \(4, 31\)"]),
    ("dy", None, DtypeError, ["must be a torch.Tensor", "NoneType"]),
    *MOE[2:4],
]
TABLES = {
    "nvfp4_linear": LINEAR_FORWARD,
    "nvfp4_linear_backward": LINEAR_BACKWARD,
    "nvfp4_moe": MOE,
    "nvfp4_moe_backward": MOE_BACKWARD,
}
PARAMETERS = [
    pytest.param(OPS[name], *wrong, id=f"{name}-{wrong[0]}-{number}")
    for name, table in TABLES.items()
    for number, wrong in enumerate(table)
]


@pytest.mark.parametrize(("op", "name", "value", "error", "words"), PARAMETERS)
def test_wrong_argument(
    op: Op, name: str, value: Any, error: type[GristmillError], words: list[str]
) -> None:
    values = good(op)
    plans = len(op._plans)
    # Another argument may be the one that does not fit what came.
    wrong = "topk_ids" if words[0].startswith("topk_weights,") else name
    pattern = ".*".join([f"^{op.name}: {wrong} ", *words])
    for attempt in (
        lambda: FUNCTIONS[op.name](*{**values, name: value}.values()),
        lambda: gristmill.explain(op.name, **{**values, name: value}),
    ):
        with pytest.raises(error, match=pattern) as caught:
            attempt()
        assert isinstance(caught.value, TypeError if error is DtypeError else ValueError)
    assert len(op._plans) == plans


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_registered_op_checks_too(name: str) -> None:
    op = OPS[name]
    values = good(op)
    with pytest.raises(ArgumentError, match=rf"^{name}: layout must be 'rows' or 'tile"):
        op.overload(*{**values, "layout": "other"}.values())


def test_the_wrong_layout_is_told_by_the_scales() -> None:
    values = good(OPS["nvfp4_linear"])
    with pytest.raises(ArgumentError, match=r"scales must have shape \(512,\) in layout 'tiles'"):
        linear_of(*{**values, "layout": "tiles"}.values())


# A weight (130, 80) in fragments: three slabs, two chunks.
PIECES = (3, 2, 2048)
IN_FRAGMENTS: list[Wrong] = [
    ("codes", ones(130, 40, dtype=INT8), ArgumentError, [r"\(3, 2, 2048\) in", r"got \(130, 40\)"]),
    ("codes", ones(2, 2, 2048, dtype=INT8), ArgumentError, [r"\(3, 2, 2048\)", "N = 130"]),
    ("codes", ones(3, 3, 2048, dtype=INT8), ArgumentError, [r"\(3, 2, 2048\)", "K = 80"]),
    ("codes", ones(*PIECES), DtypeError, ["tensor of torch.uint8", "float32"]),
    ("scales", ones(130, 5, dtype=E4M3), DtypeError, ["tensor of torch.uint8", "float8_e4m3fn"]),
    ("scales", ones(3, 2, 128, dtype=INT8), ArgumentError, [r"\(3, 2, 256\)", r"\(3, 2, 128\)"]),
    ("row_scale", ones(3, 130), ArgumentError, [r"\(N,\)", r"\(3, 130\)", r"nvfp4\.moe"]),
    ("row_scale", torch.tensor(1.0), ArgumentError, [r"\(N,\)", r"got \(\)$"]),
    ("row_scale", ones(130).half(), DtypeError, ["float32", "float16"]),
    ("bias", ones(192), ArgumentError, [r"shape \(130,\)", r"got \(192,\)"]),
]


@pytest.mark.parametrize("name", ["nvfp4_linear", "nvfp4_linear_backward"])
@pytest.mark.parametrize(("wrong", "value", "error", "words"), IN_FRAGMENTS)
def test_wrong_fragments(
    wrong: str, value: Any, error: type[GristmillError], words: list[str], name: str
) -> None:
    values = fragments_call(name)
    if wrong not in values:
        pytest.skip("has no such argument")
    with pytest.raises(error, match=".*".join([f"^{name}: {wrong} ", *words])):
        FUNCTIONS[name](*{**values, wrong: value}.values())


def test_columns_that_fragments_do_not_have() -> None:
    values = fragments_call("nvfp4_linear")
    for columns, words in (
        (64, r"codes must have shape \(3, 1, 2048\).*K = 64 columns, as the call has"),
        (144, r"codes must have shape \(3, 3, 2048\).*K = 144 columns"),
        (88, r"columns in blocks of 16, but the call has K = 88"),
    ):
        with pytest.raises(ArgumentError, match=f"^nvfp4_linear: .*{words}"):
            linear_of(*{**values, "x": ones(4, columns)}.values())
    values = fragments_call("nvfp4_linear_backward")
    for columns in (64, 144, 88):
        with pytest.raises(ArgumentError, match=rf"^nvfp4_linear_backward: codes .*K = {columns}"):
            linear_backward(*{**values, "columns": columns}.values())
    with pytest.raises(ArgumentError, match=r"dy must end in N = 130.*got shape \(4, 192\)"):
        linear_backward(*{**values, "dy": ones(4, 192)}.values())


def test_padding_is_no_column_of_a_packed_weight() -> None:
    """80 columns and 96 make the same two chunks: what users hold knows which it is."""
    packed = nvfp4.quantize(torch.randn(130, 80)).prepare("sm_90a")
    assert packed.layout == "fragments"
    with pytest.raises(ArgumentError, match=r"^nvfp4_linear: x must end in K = 80.*\(4, 96\)"):
        nvfp4.linear(torch.randn(4, 96), packed)
    with pytest.raises(DtypeError, match=r"^nvfp4_linear: x must be a torch.Tensor"):
        nvfp4.linear([1.0], packed)
    with pytest.raises(ArgumentError, match=r"^nvfp4_linear: x must have at least one dim"):
        nvfp4.linear(torch.tensor(1.0), packed)


def test_padding_is_no_column_of_packed_experts() -> None:
    def stack(*shape: int, pairs: bool = False) -> nvfp4.PackedNVFP4:
        packed = nvfp4.quantize(torch.randn(3, *shape)).prepare("sm_90a", pairs=pairs)
        assert packed.layout == ("pairs" if pairs else "fragments")
        return packed

    weights = torch.rand(4, 2)
    with pytest.raises(ArgumentError, match=r"w13 must .* H = 96, got \(3, 96, 80\)"):
        nvfp4.moe(torch.randn(4, 96), weights, IDS, stack(96, 80, pairs=True), stack(80, 48))
    with pytest.raises(ArgumentError, match=r"w2 must .* I = 48, got \(3, 80, 32\)"):
        nvfp4.moe(torch.randn(4, 80), weights, IDS, stack(96, 80, pairs=True), stack(80, 32))
    with pytest.raises(ArgumentError, match=r"w2 must .* = \(3, 80, 48\) .*\(3, 144, 48\)"):
        nvfp4.moe(torch.randn(4, 80), weights, IDS, stack(96, 80, pairs=True), stack(144, 48))
    assert nvfp4.moe(
        torch.randn(4, 80), weights, IDS, stack(96, 80, pairs=True), stack(80, 48)
    ).any()


def fragments_call(name: str) -> dict[str, Any]:
    names = [argument.name for argument in OPS[name].overload._schema.arguments]
    example = forward_example if name == "nvfp4_linear" else backward_example
    return dict(zip(names, example((4, 130, 80), torch.float32, "cpu", "sm_90a"), strict=True))


def test_experts_that_do_not_fit_together() -> None:
    x, weights = torch.randn(4, 64), torch.rand(4, 2)
    w13, w2 = nvfp4.quantize(torch.randn(3, 96, 64)), nvfp4.quantize(torch.randn(3, 64, 48))
    with pytest.raises(ArgumentError, match=r"w13 must have shape \(E, 2 \* I, H\) with H = 32"):
        nvfp4.moe(x[:, :32], weights, IDS, w13, w2)
    with pytest.raises(
        ArgumentError, match=r"w2 must have shape .* = \(3, 64, 48\).*\(2, 64, 48\)"
    ):
        nvfp4.moe(x, weights, IDS, w13, nvfp4.quantize(torch.randn(2, 64, 48)))
    with pytest.raises(
        ArgumentError, match=r"w2 must have shape .* = \(3, 64, 48\).*\(3, 64, 64\)"
    ):
        nvfp4.moe(x, weights, IDS, w13, nvfp4.quantize(torch.randn(3, 64, 64)))
    with pytest.raises(ArgumentError, match=r"w13 and w2 must have one layout.*prepare\(\)"):
        nvfp4.moe(x, weights, IDS, w13, w2.prepare("sm_100a"))
    odd = nvfp4.quantize(torch.randn(3, 95, 64))
    with pytest.raises(ArgumentError, match=r"w13 must have shape \(E, 2 \* I, H\).*\(3, 95, 64\)"):
        nvfp4.moe(x, weights, IDS, odd, w2)


def test_a_weight_that_is_none() -> None:
    x, dense = torch.randn(2, 64), torch.randn(32, 64)
    with pytest.raises(DtypeError, match=r"w4 must be an NVFP4Tensor.*got Tensor;.*quantize"):
        nvfp4.linear(x, dense)
    stack = nvfp4.quantize(torch.randn(3, 32, 64))
    with pytest.raises(ArgumentError, match=r"nvfp4_linear: codes .*a stack of weights is for nvf"):
        nvfp4.linear(x, stack)
    with pytest.raises(DtypeError, match=r"nvfp4_moe: w2 must be an NVFP4Tensor.*got Tensor"):
        nvfp4.moe(x, torch.rand(2, 2), IDS[:2], stack, dense)
    matrix = nvfp4.quantize(dense)
    with pytest.raises(ArgumentError, match=r"nvfp4_moe: w13_codes .*\(E, N, K / 2\)"):
        nvfp4.moe(x, torch.rand(2, 2), IDS[:2], matrix, matrix)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_use_of_a_variant_that_cannot_run_says_why(name: str) -> None:
    op = OPS[name]
    shape = (4, 3, 2, 32, 16) if "moe" in name else (4, 32, 64)
    args = op.example(shape, torch.float64, "cpu")
    with (
        gristmill.use(name, "library"),
        pytest.raises(VariantUnavailable, match=rf"{name}.*'library'.*in fp32 at most"),
    ):
        op.run(*args)


def test_an_example_of_no_sense() -> None:
    for name, shape in (("nvfp4_linear", (4, 40)), ("nvfp4_linear_backward", (4,))):
        with pytest.raises(ArgumentError, match=r"an example is \(M, K\) or \(M, N, K\)"):
            OPS[name].example(shape, torch.bfloat16, "meta")
    for shape in ((4, 40), (4, 8, 64)):
        with pytest.raises(ArgumentError, match=r"an example is \(M, H\) or \(M, experts, topk, H"):
            OPS["nvfp4_moe"].example(shape, torch.bfloat16, "meta")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_on_two_devices(name: str) -> None:
    values = good(OPS[name], "cuda")
    first = next(iter(values))
    for other in [one for one, value in values.items() if isinstance(value, torch.Tensor)]:
        if other == first or (first == "dy" and other == "hidden_states"):
            continue
        with pytest.raises(ArgumentError, match=rf"^{name}: {other} is on cpu, .* on cuda:0"):
            FUNCTIONS[name](*{**values, other: values[other].cpu()}.values())
