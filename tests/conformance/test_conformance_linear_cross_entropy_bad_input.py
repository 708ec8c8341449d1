"""Wrong arguments: an error that names the op, the argument, what came and what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError, DtypeError, GristmillError
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

FORWARD, BACKWARD = OPS["linear_cross_entropy"], OPS["linear_cross_entropy_backward"]
FLOATS = "float32, bfloat16, float16, float64"
TARGET = torch.tensor([0, 1, 2, 3])


def good(op: Op) -> dict[str, Any]:
    names = [argument.name for argument in op.overload._schema.arguments]
    return dict(zip(names, op.example((4, 9, 6), torch.float32, "cpu"), strict=True))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


Wrong = tuple[str, Any, type[GristmillError], list[str]]
BOTH: list[Wrong] = [
    ("x", "text", DtypeError, ["must be a torch.Tensor", "str"]),
    ("x", ones(4, 6, dtype=torch.int32), DtypeError, [FLOATS, "int32"]),
    ("x", torch.tensor(1.0), ArgumentError, ["at least one dim"]),
    ("x", ones(4, 6).to_sparse(), ArgumentError, ["dense", "sparse"]),
    ("weight", None, DtypeError, ["must be a torch.Tensor", "NoneType"]),
    ("weight", ones(9, 7), ArgumentError, [r"\(V, 6\)", r"got \(9, 7\)"]),
    ("weight", ones(6), ArgumentError, [r"\(V, 6\)", r"got \(6,\)"]),
    ("weight", ones(9, 6, dtype=torch.bfloat16), DtypeError, ["of x, float32", "bfloat16", "auto"]),
    ("weight", torch.ones(9, 6, device="meta"), ArgumentError, ["on meta", "x on cpu"]),
    ("target", ones(4), DtypeError, ["class indices", "int64, int32", "float32"]),
    ("target", ones(4, 9), DtypeError, ["class indices", "float32"]),
    ("target", [0, 1, 2, 3], DtypeError, ["must be a torch.Tensor", "list"]),
    ("target", TARGET[:3], ArgumentError, [r"without its last dim, \(4,\)", r"got \(3,\)"]),
    ("target", TARGET.view(4, 1), ArgumentError, [r"\(4,\)", r"got \(4, 1\)"]),
    ("target", TARGET.to("meta"), ArgumentError, ["on meta", "x on cpu"]),
    ("bias", ones(6), ArgumentError, [r"shape \(9,\)", r"got \(6,\)"]),
    ("bias", ones(9, dtype=torch.float64), DtypeError, ["of x, float32", "float64"]),
    ("class_weight", ones(8), ArgumentError, [r"shape \(9,\)", r"got \(8,\)"]),
    ("class_weight", TARGET, DtypeError, [FLOATS, "int64"]),
    ("ignore_index", 1.5, DtypeError, ["an integer", "float"]),
    ("ignore_index", None, DtypeError, ["an integer", "NoneType"]),
    ("label_smoothing", -0.1, ArgumentError, ["at least 0", "got -0.1"]),
    ("label_smoothing", 1.1, ArgumentError, ["between 0 and 1", "got 1.1"]),
    ("label_smoothing", "some", DtypeError, ["a number", "str"]),
    ("z_loss", -1.0, ArgumentError, ["at least 0", "got -1.0"]),
    ("z_loss", float("nan"), ArgumentError, ["finite", "got nan"]),
    ("softcap", 0.0, ArgumentError, ["greater than 0", "got 0.0"]),
    ("softcap", -3.0, ArgumentError, ["greater than 0", "got -3.0"]),
    ("softcap", "30", DtypeError, ["a number", "str"]),
    ("reduction", "batchmean", ArgumentError, ["'mean' or 'sum' or 'none'", "got 'batchmean'"]),
    ("reduction", None, ArgumentError, ["'mean' or 'sum' or 'none'", "got None"]),
    ("chunk_rows", 0, ArgumentError, ["at least 1", "got 0"]),
    ("chunk_rows", 2.0, DtypeError, ["None or an int", "float"]),
    ("chunk_rows", True, DtypeError, ["None or an int", "bool"]),
]
GRADIENTS: list[Wrong] = [
    ("dloss", ones(4), ArgumentError, [r"shape \(\) with reduction 'mean'", r"got \(4,\)"]),
    ("dloss", TARGET, DtypeError, [FLOATS, "int64"]),
    ("dlse", ones(3), ArgumentError, [r"shape \(4,\)", r"got \(3,\)"]),
    ("stats", ones(4), ArgumentError, [r"shape \(4, 2\)", r"got \(4,\)"]),
    ("denominators", ones(1), ArgumentError, [r"shape \(2,\)", r"got \(1,\)"]),
    ("x_grad", 1, DtypeError, ["True or False", "int"]),
    ("weight_grad", None, DtypeError, ["True or False", "NoneType"]),
    ("bias_grad", "no", DtypeError, ["True or False", "str"]),
]
PARAMETERS = [
    pytest.param(op, *wrong, id=f"{op.name}-{wrong[0]}-{number}")
    for op, table in ((FORWARD, BOTH), (BACKWARD, [*BOTH, *GRADIENTS]))
    for number, wrong in enumerate(table)
]


@pytest.mark.parametrize(("op", "name", "value", "error", "words"), PARAMETERS)
def test_wrong_argument(
    op: Op, name: str, value: Any, error: type[GristmillError], words: list[str]
) -> None:
    values = {**good(op), name: value}
    plans = len(op._plans)

    def by_function() -> None:
        x, weight, target, *_ = values.values()
        rest = dict(list(values.items())[3:])
        gristmill.linear_cross_entropy(x, weight, target, **rest)

    attempts = [lambda: op.run(*values.values()), lambda: gristmill.explain(op.name, **values)]
    pattern = ".*".join([f"^{op.name}: {name} ", *words])
    for attempt in [*attempts, by_function] if op is FORWARD else attempts:
        with pytest.raises(error, match=pattern) as caught:
            attempt()
        assert isinstance(caught.value, TypeError if error is DtypeError else ValueError)
    assert len(op._plans) == plans


def test_the_registered_op_checks_too() -> None:
    values = good(FORWARD)
    for change, words in (
        ({"reduction": "avg"}, "reduction must be 'mean' or 'sum' or 'none'"),
        ({"weight": ones(9, 5)}, r"weight must have shape \(V, 6\)"),
    ):
        with pytest.raises(ArgumentError, match=f"^linear_cross_entropy: {words}"):
            FORWARD.overload(*{**values, **change}.values())
        meta = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in {**values, **change}.items()
        }
        with pytest.raises(ArgumentError, match=f"^linear_cross_entropy: {words}"):
            FORWARD.overload(*meta.values())


def test_an_example_of_no_sense() -> None:
    for op in (FORWARD, BACKWARD):
        for shape in ((4,), (2, 3, 4, 5)):
            with pytest.raises(ArgumentError, match=r"an example is \(M, K\) or \(M, V, K\), got"):
                op.example(shape, torch.float32, "meta")
