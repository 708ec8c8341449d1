"""A wrong argument of `linear` or `matmul` is a typed error that names it and what is right."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError, DtypeError, GristmillError
from gristmill.ops.registry import OPS

FLOATS = "float32, bfloat16, float16, float64"


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


Wrong = tuple[dict[str, Any], type[GristmillError], list[str]]
LINEAR: list[Wrong] = [
    ({"x": [1.0]}, DtypeError, ["x must be a torch.Tensor", "list"]),
    ({"x": ones(4, 64, dtype=torch.int32)}, DtypeError, [FLOATS, "int32"]),
    ({"x": torch.tensor(1.0)}, ArgumentError, ["x must have at least one dim"]),
    ({"x": ones(4, 63)}, ArgumentError, ["x must end in K = 64", "(32, 64)", "(4, 63)"]),
    ({"x": torch.eye(4, 64).to_sparse()}, ArgumentError, ["x must be a dense", "sparse_coo"]),
    ({"weight": None}, DtypeError, ["weight must be a torch.Tensor", "NoneType"]),
    ({"weight": ones(64)}, ArgumentError, ["weight must have shape (N, K)", "(64,)"]),
    ({"weight": ones(2, 32, 64)}, ArgumentError, ["weight must have shape (N, K)", "(2, 32, 64)"]),
    (
        {"weight": ones(32, 64, dtype=torch.bfloat16)},
        DtypeError,
        ["weight is bfloat16", "x is float32", "one dtype"],
    ),
    ({"weight": ones(32, 64, device="meta")}, ArgumentError, ["weight is on meta", "x on cpu"]),
    ({"bias": ones(31)}, ArgumentError, ["bias must have shape (32,)", "(31,)"]),
    ({"bias": ones(4, 32)}, ArgumentError, ["bias must have shape (32,)", "(4, 32)"]),
    ({"bias": 1.0}, DtypeError, ["bias must be a torch.Tensor", "float"]),
    (
        {"bias": ones(32, dtype=torch.float64)},
        DtypeError,
        ["bias is float64", "x is float32", "one dtype"],
    ),
    ({"bias": ones(32, device="meta")}, ArgumentError, ["bias is on meta", "x on cpu"]),
    (
        {"activation": "swish"},
        ArgumentError,
        ["None, 'relu', 'silu', 'gelu' or 'gelu_tanh'", "got 'swish'"],
    ),
    ({"activation": 1}, ArgumentError, ["'gelu_tanh'", "got 1"]),
    ({"activation": ["silu"]}, ArgumentError, ["'gelu_tanh'", "got ['silu']"]),
]
MATMUL: list[Wrong] = [
    ({"a": None}, DtypeError, ["a must be a torch.Tensor", "NoneType"]),
    ({"b": 3}, DtypeError, ["b must be a torch.Tensor", "int"]),
    ({"a": ones(3, 8, dtype=torch.int8)}, DtypeError, [FLOATS, "int8"]),
    ({"a": ones(8)}, ArgumentError, ["a must have at least two dims", "(8,)", "torch.matmul"]),
    ({"b": ones(8)}, ArgumentError, ["b must have at least two dims", "(8,)", "unsqueeze"]),
    ({"b": ones(7, 5)}, ArgumentError, ["b must have K = 8 rows", "(3, 8)", "(7, 5)"]),
    ({"b": ones(8, 5, dtype=torch.float16)}, DtypeError, ["b is float16", "a is float32"]),
    ({"b": ones(8, 5, device="meta")}, ArgumentError, ["b is on meta", "a on cpu"]),
    (
        {"a": ones(2, 3, 8), "b": ones(4, 8, 5)},
        ArgumentError,
        ["broadcast", "(2, 3, 8)", "(4, 8, 5)"],
    ),
]
CASES = [
    *(pytest.param("linear", *one, id=f"linear-{number}") for number, one in enumerate(LINEAR)),
    *(pytest.param("matmul", *one, id=f"matmul-{number}") for number, one in enumerate(MATMUL)),
]


def good(name: str) -> dict[str, Any]:
    if name == "matmul":
        return {"a": ones(3, 8), "b": ones(8, 5)}
    return {"x": ones(4, 64), "weight": ones(32, 64), "bias": ones(32), "activation": "silu"}


@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_the_good_arguments_are_good(name: str) -> None:
    assert getattr(gristmill, name)(**good(name)).isfinite().all()


@pytest.mark.parametrize("how", ["called", "trained", "explained", "planned"])
@pytest.mark.parametrize(("name", "wrong", "kind", "words"), CASES)
def test_a_wrong_argument_is_named(
    name: str, wrong: dict[str, Any], kind: type[GristmillError], words: list[str], how: str
) -> None:
    values = {**good(name), **wrong}
    if how == "trained":
        first = "b" if name == "matmul" else "weight"
        if first in wrong:
            return
        values[first] = values[first].clone().requires_grad_()
    if how == "planned":  # where there is a plan for the right ones already
        getattr(gristmill, name)(**good(name))
    function = partial(gristmill.explain, name) if how == "explained" else getattr(gristmill, name)
    with pytest.raises(kind, match=rf"^{name}(_with_pre)?: ") as caught:
        function(**values)
    for word in words:
        assert re.search(re.escape(word), str(caught.value)), word


def test_sums_are_kept_only_of_an_activation() -> None:
    op = OPS["linear_with_pre"]
    with pytest.raises(ArgumentError, match=r"linear_with_pre: activation must be 'relu'.*None"):
        op.bind_arguments(ones(4, 64), ones(32, 64), None, None)


def test_an_example_of_one_size_or_four_is_refused() -> None:
    for name in ("linear", "matmul"):
        for shape in ((64,), (1, 2, 3, 4)):
            with pytest.raises(ArgumentError, match=f"{name}: an example is MxNxK"):
                OPS[name].example(shape, torch.float32, "cpu")
