"""Wrong arguments of dense experts: an error that names the op, the argument and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES

import gristmill
from gristmill import nvfp4
from gristmill.errors import ArgumentError, DtypeError, GristmillError, VariantUnavailable
from gristmill.ops.moe import moe_backward
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

FLOATS = "float32, bfloat16, float16, float64"
IDS = torch.zeros(4, 2, dtype=torch.int64)
Wrong = tuple[str, Any, type[GristmillError], list[str]]


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def good(op: Op, device: str = "cpu") -> dict[str, Any]:
    names = [argument.name for argument in op.overload._schema.arguments]
    return dict(zip(names, op.example((4, 3, 2, 32, 16), torch.bfloat16, device), strict=True))


def run(op: Op, values: dict[str, Any]) -> Any:
    if op.name == "moe_backward":
        return moe_backward(*values.values())
    names = list(values)
    positional = [values[name] for name in names[:5]]
    return gristmill.moe(*positional, **{name: values[name] for name in names[5:]})


FORWARD: list[Wrong] = [
    ("hidden_states", ones(2, 2, 32), ArgumentError, [r"\(M, H\)", r"got \(2, 2, 32\)", "flatten"]),
    ("hidden_states", ones(4, 32).long(), DtypeError, [FLOATS, "int64"]),
    ("hidden_states", [1.0], DtypeError, ["must be a torch.Tensor", "list"]),
    ("topk_weights", IDS, DtypeError, [FLOATS, "int64"]),
    ("topk_weights", ones(3, 2), ArgumentError, [r"\(M, k\)", "the 4 rows", r"got \(3, 2\)"]),
    ("topk_ids", ones(4, 2), DtypeError, ["int32 or int64", "bfloat16"]),
    ("topk_ids", IDS[:, :1], ArgumentError, [r"topk_weights, \(4, 2\)", r"got \(4, 1\)"]),
    ("topk_ids", IDS.to("meta"), ArgumentError, ["on meta", "hidden_states on cpu"]),
    ("w13", None, DtypeError, ["must be a torch.Tensor", "NoneType"]),
    ("w13", ones(3, 32, 32).long(), DtypeError, [FLOATS, "int64"]),
    (
        "w13",
        ones(3, 32, 32, dtype=torch.float32),
        DtypeError,
        ["float32, hidden_states are bfloat"],
    ),
    ("w13", ones(32, 32), ArgumentError, [r"\(E, 2 \* I, H\)", r"got \(32, 32\)"]),
    ("w13", ones(3, 31, 32), ArgumentError, [r"\(E, 2 \* I, H\)", r"\(3, 31, 32\)"]),
    ("w13", ones(3, 32, 31), ArgumentError, ["H = 32", r"\(3, 32, 31\)"]),
    ("w13", ones(3, 32, 32, device="meta"), ArgumentError, ["on meta", "hidden_states on cpu"]),
    ("w2", ones(2, 32, 16), ArgumentError, [r"\(3, 32, 16\)", r"got \(2, 32, 16\)"]),
    ("w2", ones(3, 16, 32), ArgumentError, [r"\(E, H, I\) = \(3, 32, 16\)", r"got \(3, 16, 32\)"]),
    ("w2", ones(3, 32), ArgumentError, [r"\(E, H, I\)", r"got \(3, 32\)"]),
    ("w13_bias", ones(3, 16), ArgumentError, [r"shape \(3, 32\)", r"got \(3, 16\)"]),
    ("w2_bias", ones(32), ArgumentError, [r"shape \(3, 32\)", r"got \(32,\)"]),
    ("w2_bias", IDS, DtypeError, [FLOATS, "int64"]),
    ("activation", "relu", ArgumentError, ["'silu' or 'swiglu_oai' or 'gelu'", "got 'relu'"]),
    ("limit", -1.0, ArgumentError, ["at least 0", "got -1.0"]),
    ("limit", "seven", DtypeError, ["a number", "str"]),
    ("alpha", 1.0, ArgumentError, ["slope in 'swiglu_oai'", "'silu'", "got 1.0"]),
    ("alpha", float("nan"), ArgumentError, ["finite", "got nan"]),
    ("expert_map", ones(5), DtypeError, ["int32 or int64", "bfloat16"]),
    ("expert_map", IDS, ArgumentError, [r"\(experts of the model,\)", r"got \(4, 2\)"]),
]
BACKWARD: list[Wrong] = [
    ("dy", ones(4, 31), ArgumentError, [r"hidden_states, \(4, 32\)", r"got \(4, 31\)"]),
    ("dy", None, DtypeError, ["must be a torch.Tensor", "NoneType"]),
    ("weight_grad", 1, DtypeError, ["True or False", "int"]),
    FORWARD[10],
    FORWARD[24],
]
PARAMETERS = [
    pytest.param(OPS[name], *wrong, id=f"{name}-{wrong[0]}-{number}")
    for name, table in (("moe", FORWARD), ("moe_backward", BACKWARD))
    for number, wrong in enumerate(table)
]


@pytest.mark.parametrize(("op", "name", "value", "error", "words"), PARAMETERS)
def test_wrong_argument(
    op: Op, name: str, value: Any, error: type[GristmillError], words: list[str]
) -> None:
    values = good(op)
    plans = len(op._plans)
    pattern = ".*".join([f"^{op.name}: {name} ", *words])
    for attempt in (
        lambda: run(op, {**values, name: value}),
        lambda: gristmill.explain(op.name, **{**values, name: value}),
    ):
        with pytest.raises(error, match=pattern) as caught:
            attempt()
        assert isinstance(caught.value, TypeError if error is DtypeError else ValueError)
    assert len(op._plans) == plans


def test_the_registered_op_checks_too() -> None:
    values = good(OPS["moe"])
    with pytest.raises(ArgumentError, match=r"^moe: activation must be 'silu' or"):
        OPS["moe"].overload(*{**values, "activation": "relu"}.values())


def test_kinds_of_weights_are_not_mixed() -> None:
    values = good(OPS["moe"])
    packed = nvfp4.quantize(torch.randn(3, 32, 32))
    with pytest.raises(DtypeError, match=r"w2 must be an NVFP4Tensor.*got Tensor"):
        run(OPS["moe"], {**values, "w13": packed})
    with pytest.raises(DtypeError, match=r"w13 must be an NVFP4Tensor.*got Tensor"):
        run(OPS["moe"], {**values, "w2": packed})


def test_weights_of_another_dtype_are_for_autocast() -> None:
    values = good(OPS["moe"])
    values["w13"] = values["w13"].float()
    with torch.autocast("cpu", torch.bfloat16):
        assert run(OPS["moe"], values).dtype == torch.bfloat16


def test_an_example_of_no_sense() -> None:
    with pytest.raises(ArgumentError, match=r"^moe: an example is \(M, H\) or \(M, experts, topk"):
        OPS["moe"].example((4, 8, 64), torch.bfloat16, "meta")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["moe", "moe_backward"])
def test_use_of_a_variant_that_cannot_run_says_why(name: str, device: str) -> None:
    op = OPS[name]
    args = op.example((4, 3, 2, 32, 16), torch.float64, device)
    with (
        gristmill.use(name, "library"),
        pytest.raises(VariantUnavailable, match=rf"{name}.*'library'.*in fp32 at most"),
    ):
        op.run(*args)
