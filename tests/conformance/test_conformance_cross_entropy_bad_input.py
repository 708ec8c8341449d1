"""Wrong arguments of the cross entropy ops: typed errors that name op, argument and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError, DtypeError, GristmillError
from gristmill.ops.registry import OPS


def good(**changed: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    values = {"logits": torch.randn(4, 6), "target": torch.tensor([0, 5, -100, 3])}
    return values | changed


WRONG = [
    ("logits", [[1.0]], DtypeError, "logits must be a torch.Tensor, got list"),
    ("logits", torch.ones(4, 6, dtype=torch.int64), DtypeError, "logits must have dtype .* int64"),
    ("logits", torch.tensor(1.0), ArgumentError, "logits must have at least one dim"),
    ("target", [0, 1, 2, 3], DtypeError, "target must be a torch.Tensor, got list"),
    ("target", torch.rand(4), DtypeError, "int64, int32, got float32; class probabilities"),
    ("target", torch.rand(4, 6), DtypeError, "class probabilities are not supported"),
    ("target", torch.zeros(4, dtype=torch.uint8), DtypeError, "int64, int32, got uint8"),
    ("target", torch.zeros(4, dtype=torch.bool), DtypeError, "int64, int32, got bool"),
    ("target", torch.zeros(3).long(), ArgumentError, r"\(4,\), got \(3,\)"),
    ("target", torch.zeros(4, 1).long(), ArgumentError, r"\(4,\), got \(4, 1\)"),
    ("target", torch.zeros(4, 6).long(), ArgumentError, r"\(4,\), got \(4, 6\)"),
    ("target", torch.zeros(4, dtype=torch.int64, device="meta"), ArgumentError, "one device"),
    ("weight", torch.ones(5), ArgumentError, r"weight must have shape \(6,\).*got \(5,\)"),
    ("weight", torch.ones(1, 6), ArgumentError, r"weight must have shape \(6,\)"),
    ("weight", torch.ones(6).long(), DtypeError, "weight must have dtype"),
    ("weight", torch.ones(6, device="meta"), ArgumentError, "one device"),
    ("ignore_index", 1.5, DtypeError, "ignore_index must be an integer, got float"),
    ("ignore_index", True, DtypeError, "ignore_index must be an integer, got bool"),
    ("ignore_index", None, DtypeError, "ignore_index must be an integer, got NoneType"),
    ("label_smoothing", -0.1, ArgumentError, "label_smoothing must be .*-0.1"),
    ("label_smoothing", 1.01, ArgumentError, "label_smoothing must be between 0 and 1, got 1.01"),
    ("label_smoothing", float("nan"), ArgumentError, "label_smoothing must be finite"),
    ("label_smoothing", "0.1", DtypeError, "label_smoothing must be a number, got str"),
    ("z_loss", -1e-4, ArgumentError, "z_loss must be .* at least 0, got -0.0001"),
    ("z_loss", float("inf"), ArgumentError, "z_loss must be finite"),
    ("z_loss", None, DtypeError, "z_loss must be a number, got NoneType"),
    ("softcap", 0.0, ArgumentError, "softcap must be None or greater than 0, got 0.0"),
    ("softcap", -3.0, ArgumentError, "softcap must be None or greater than 0, got -3.0"),
    ("softcap", float("nan"), ArgumentError, "softcap must be finite"),
    ("softcap", "big", DtypeError, "softcap must be a number, got str"),
    ("reduction", "most", ArgumentError, "reduction must be 'mean' or 'sum' or 'none', got 'most'"),
    ("reduction", None, ArgumentError, "reduction must be .* got None"),
    ("return_lse", 1, DtypeError, "return_lse must be True or False, got int"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    WRONG,
    ids=[f"{one[0]}-{number}" for number, one in enumerate(WRONG)],
)
def test_wrong_arguments(
    name: str, value: Any, error: type[Exception], message: str, one_pass: bool, grad: bool
) -> None:
    values = good()
    values["logits"].requires_grad_(grad)
    values[name] = value
    with pytest.raises(error, match=rf"^cross_entropy: {message}|^cross_entropy: .*{message}"):
        gristmill.cross_entropy(**values, one_pass=one_pass)


@pytest.mark.parametrize("one_pass", [False, True])
def test_weights_that_require_grad_are_refused_as_torch_does(one_pass: bool) -> None:
    values = good(weight=torch.rand(6, requires_grad=True))
    for logits in (values["logits"], values["logits"].clone().requires_grad_()):
        values["logits"] = logits
        with pytest.raises(ArgumentError, match="cross_entropy: weight must not require grad"):
            gristmill.cross_entropy(**values, one_pass=one_pass)
        with pytest.raises(RuntimeError, match=r"not differentiable with respect to .*weight"):
            torch.nn.functional.cross_entropy(logits, values["target"], values["weight"])
        with torch.no_grad():
            gristmill.cross_entropy(**values, one_pass=one_pass)


@pytest.mark.parametrize("name", ["one_pass", "inplace"])
@pytest.mark.parametrize("value", [None, 0, 1, "no"])
def test_modes_are_bools(name: str, value: Any) -> None:
    message = f"^cross_entropy: {name} must be True or False, got {type(value).__name__}"
    with pytest.raises(DtypeError, match=message):
        gristmill.cross_entropy(**good(), **{name: value})


def test_nothing_is_remembered_of_a_wrong_call() -> None:
    before = {name: len(op._plans) for name, op in OPS.items()}
    for name, value, error, _ in WRONG:
        with pytest.raises(error):
            gristmill.cross_entropy(**good(**{name: value}))
    assert {name: len(op._plans) for name, op in OPS.items()} == before


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(4), "dloss must have shape"),
        (0, torch.ones((), dtype=torch.float64), "dloss must have dtype float32, got float64"),
        (1, torch.ones(3), "dlse must have shape"),
        (1, torch.ones(4).bfloat16(), "dlse must have dtype float32, got bfloat16"),
        (4, torch.ones(4), "stats must have shape"),
        (5, torch.ones(0), r"denominators must have shape \(2,\), got \(0,\)"),
        (5, None, "denominators must be a torch.Tensor, got NoneType"),
        (12, -1, "first_class"),
        (12, 3, r"first_class 3 of classes 0"),
        (13, 5, r"shard of 6 classes .* classes 5"),
        (13, 2.0, "classes must be an integer"),
    ],
)
def test_backward(place: int, value: Any, message: str) -> None:
    op = OPS["cross_entropy_backward"]
    args = list(op.example((4, 6), torch.float32, "cpu"))
    args[place] = value
    with pytest.raises(GristmillError, match=f"^cross_entropy_backward: .*{message}"):
        op.run(*args)


def test_weights_of_a_shard_are_refused() -> None:
    op = OPS["cross_entropy_backward"]
    args = list(op.example((4, 6), torch.float32, "cpu"))
    args[6], args[13] = torch.ones(6), 12
    with pytest.raises(ArgumentError, match="weight must be None where the logits are a shard"):
        op.run(*args)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [(2, -1, "first_class -1"), (3, 5, "classes 5"), (6, 1, "sums must be"), (4, None, "ignore")],
)
def test_shard(place: int, value: Any, message: str) -> None:
    op = OPS["cross_entropy_shard"]
    args = list(op.example((4, 6), torch.float32, "cpu"))
    args[place] = value
    with pytest.raises(GristmillError, match=f"^cross_entropy_shard: .*{message}"):
        op.run(*args)


@pytest.mark.parametrize(
    ("gradient", "factor", "message"),
    [
        (torch.ones(4, 6), torch.ones(3), r"factor must have shape \(4,\), got \(3,\)"),
        (torch.ones(4, 6), torch.ones(4).half(), "factor must have dtype float32, got float16"),
        (torch.ones(4, 6), 0.5, "factor must be a torch.Tensor, got float"),
        (torch.ones(1, 6).expand(4, 6), torch.ones(()), "overwritten.*expanded"),
        (torch.tensor(1.0), torch.ones(()), "at least one dim"),
    ],
)
def test_scale(gradient: Any, factor: Any, message: str) -> None:
    with pytest.raises(GristmillError, match=f"^scale_gradient_: .*{message}"):
        OPS["scale_gradient_"].run(gradient, factor)


def test_while_compiling_too() -> None:
    compiled = torch.compile(gristmill.cross_entropy, backend="eager", fullgraph=True)
    for changed in ({"reduction": "most"}, {"label_smoothing": 2.0}, {"target": torch.rand(4)}):
        with pytest.raises(Exception, match="cross_entropy: "):
            compiled(**good(**changed))
