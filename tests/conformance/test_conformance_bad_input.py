"""A wrong argument is a typed error that names the op, the argument, what came and what is right.

And nothing else happens: no kernel is compiled, no plan kept, no tensor written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from conformance_helpers import ROW_NAMES, ROW_OPS, copied, same_bits

import gristmill
from gristmill.errors import (
    ArgumentError,
    DtypeError,
    GristmillError,
    SettingsError,
    UnknownVariant,
    VariantUnavailable,
)
from gristmill.ops.layer_norm import layer_norm_backward
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import rms_norm_backward
from gristmill.settings import reload_settings

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": gristmill.rms_norm,
    "add_rms_norm": gristmill.add_rms_norm,
    "fused_add_rms_norm_": gristmill.fused_add_rms_norm_,
    "rms_norm_backward": rms_norm_backward,
    "layer_norm": gristmill.layer_norm,
    "add_layer_norm": gristmill.add_layer_norm,
    "layer_norm_backward": layer_norm_backward,
}
KEYWORD_ONLY = ("weight_offset", "casting", "out_dtype")


def argument_names(op: Op) -> list[str]:
    return [argument.name for argument in op.overload._schema.arguments]


def call(op: Op, values: dict[str, Any]) -> Any:
    """The public function, keyword-only arguments by name."""
    positional = [
        value
        for name, value in values.items()
        if name not in KEYWORD_ONLY or op.name.endswith("_backward")
    ]
    keywords = {
        name: value
        for name, value in values.items()
        if name in KEYWORD_ONLY and not op.name.endswith("_backward")
    }
    return FUNCTIONS[op.name](*positional, **keywords)


def good(op: Op, device: str = "cpu") -> dict[str, Any]:
    args = op.example((4, 8), torch.bfloat16, device)
    values = dict(zip(argument_names(op), args, strict=True))
    if "dsum" in values:
        values["dsum"] = torch.randn(4, 8, dtype=torch.bfloat16, device=device)
    return values


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(4, 8)], layout=layout)


# argument, what comes, the class, what the message must say (a regular expression each).
TENSOR = "must be a torch.Tensor"
FLOATS = "float32, bfloat16, float16, float64"
ROW_TENSORS = ("x", "residual", "dy", "dsum")
WRONG: list[tuple[str, Any, type[GristmillError], list[str]]] = [
    *(
        case
        for name in (*ROW_TENSORS, "weight", "bias")
        for case in (
            (name, [1.0] * 8, DtypeError, [TENSOR, "list"]),
            (name, 3.0, DtypeError, [TENSOR, "float"]),
            (name, "text", DtypeError, [TENSOR, "str"]),
            (name, numpy.ones((4, 8), dtype="float32"), DtypeError, [TENSOR, "ndarray"]),
            (name, torch.ones(4, 8, dtype=torch.int32), DtypeError, [FLOATS, "int32"]),
            (name, torch.ones(8, dtype=torch.bool), DtypeError, [FLOATS, "bool"]),
            (name, torch.ones(8, dtype=torch.complex64), DtypeError, [FLOATS, "complex64"]),
            (name, torch.ones(8).to(torch.float8_e4m3fn), DtypeError, [FLOATS, "float8_e4m3fn"]),
            (name, torch.eye(4, 8).to_sparse(), ArgumentError, ["dense", "sparse_coo"]),
            (name, nested(torch.strided), ArgumentError, ["dense", "nested"]),
            (name, nested(torch.jagged), ArgumentError, ["dense", "nested"]),
        )
    ),
    *((name, None, DtypeError, [TENSOR, "NoneType"]) for name in ("x", "residual", "dy")),
    ("x", torch.tensor(1.0), ArgumentError, ["at least one dim", "scalar"]),
    *(
        case
        for name in ("residual", "dy", "dsum")
        for case in (
            (name, torch.ones(5, 8), ArgumentError, [r"shape of x, \(4, 8\)", r"got \(5, 8\)"]),
            (name, torch.ones(8), ArgumentError, [r"shape of x, \(4, 8\)", r"got \(8,\)"]),
            (name, torch.ones(4, 8, device="meta"), ArgumentError, ["on meta", "on cpu"]),
        )
    ),
    *(
        case
        for name in ("weight", "bias")
        for case in (
            (name, torch.ones(7), ArgumentError, [r"shape \(8,\)", "last dim of x", r"\(7,\)"]),
            (name, torch.ones(4, 8), ArgumentError, [r"shape \(8,\)", r"got \(4, 8\)"]),
            (name, torch.tensor(1.0), ArgumentError, [r"shape \(8,\)", r"got \(\)"]),
            (name, torch.ones(8, device="meta"), ArgumentError, ["on meta", "x on cpu", "one dev"]),
        )
    ),
    ("eps", -1e-6, ArgumentError, ["at least 0", "got -1e-06"]),
    ("eps", float("nan"), ArgumentError, ["finite", "got nan"]),
    ("eps", float("inf"), ArgumentError, ["finite", "got inf"]),
    ("eps", 1e39, ArgumentError, ["finite in fp32 and at least 0", r"got 1e\+39"]),
    ("eps", 10**400, ArgumentError, ["finite in fp32", "got 1000"]),
    ("eps", "small", DtypeError, ["a number", "got str"]),
    ("eps", True, DtypeError, ["a number", "got bool"]),
    ("eps", [1e-6], DtypeError, ["a number", "got list"]),
    ("eps", torch.tensor(1e-6), DtypeError, ["a number", "got Tensor"]),
    ("weight_offset", float("nan"), ArgumentError, ["finite", "got nan"]),
    ("weight_offset", 1e39, ArgumentError, ["finite in fp32", r"got 1e\+39"]),
    ("weight_offset", -1e39, ArgumentError, ["finite in fp32", r"got -1e\+39"]),
    ("weight_offset", None, DtypeError, ["a number", "got NoneType"]),
    ("weight_offset", "one", DtypeError, ["a number", "got str"]),
    ("casting", "twice", ArgumentError, ["'once' or 'llama'", "got 'twice'"]),
    ("casting", None, ArgumentError, ["'once' or 'llama'", "got None"]),
    ("casting", ["once"], ArgumentError, ["'once' or 'llama'", r"got \['once'\]"]),
    ("out_dtype", torch.int8, DtypeError, [FLOATS, "int8"]),
    ("out_dtype", "float32", DtypeError, [FLOATS, "got str"]),
    ("weight_grad", "yes", DtypeError, ["True or False", "got str"]),
    ("weight_grad", None, DtypeError, ["True or False", "got NoneType"]),
    ("bias_dtype", torch.int8, DtypeError, [FLOATS, "int8"]),
    ("bias_dtype", "float32", DtypeError, [FLOATS, "got str"]),
    ("bias_dtype", torch.ones(8), DtypeError, [FLOATS, "got Tensor"]),
]


def _label(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"nested_{str(value.layout)[6:]}"
    if isinstance(value, torch.Tensor):
        shape = "x".join(map(str, value.shape))
        return f"{str(value.dtype)[6:]}_{shape}_{value.device}_{str(value.layout)[6:]}"
    return "ndarray" if isinstance(value, numpy.ndarray) else str(value).replace(" ", "")[:20]


PARAMETERS = [
    pytest.param(op, *case, id=f"{op.name}-{case[0]}-{_label(case[1])}")
    for op in (OPS[name] for name in ROW_NAMES)
    for case in WRONG
    if case[0] in argument_names(op)
    and not (op.name == "fused_add_rms_norm_" and case[0] == "eps" and case[1] is None)
]


@pytest.fixture
def nothing_happens() -> Any:
    """Fails a test that makes a plan, compiles or loads."""
    before = gristmill.counters()
    plans = {name: len(op._plans) for name, op in OPS.items()}
    yield
    assert gristmill.counters() == before
    assert {name: len(op._plans) for name, op in OPS.items()} == plans


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize(("op", "name", "value", "error", "words"), PARAMETERS)
def test_wrong_argument(
    op: Op, name: str, value: Any, error: type[GristmillError], words: list[str]
) -> None:
    values = good(op)
    before = copied(tuple(values.values()))
    values[name] = value
    with pytest.raises(error) as caught:
        call(op, values)
    # Both ways to catch it work: as gristmill's error and as the built-in one.
    assert isinstance(caught.value, GristmillError)
    assert isinstance(caught.value, TypeError if error is DtypeError else ValueError)
    pattern = ".*".join([f"^{op.name}: {name} ", *words])
    caught.match(pattern)
    for (other, now), then in zip(values.items(), before, strict=True):
        if other != name and isinstance(now, torch.Tensor):
            assert same_bits(now, then), other


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize(("op", "name", "value", "error", "words"), PARAMETERS)
def test_explain_checks_as_the_call_does(
    op: Op, name: str, value: Any, error: type[GristmillError], words: list[str]
) -> None:
    values = {**good(op), name: value}
    with pytest.raises(error, match=".*".join([f"^{op.name}: {name} ", *words])):
        gristmill.explain(op.name, **values)


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("op", ROW_OPS)
def test_the_registered_op_checks_too(op: Op) -> None:
    values = good(op)
    wrong = {**values, "weight": torch.ones(7, dtype=torch.bfloat16)}
    with pytest.raises(ArgumentError, match=rf"^{op.name}: weight must have shape \(8,\)"):
        op.overload(*wrong.values())
    with pytest.raises(ArgumentError, match=rf"^{op.name}: eps must be .* got -1"):
        op.overload(*{**values, "eps": -1.0}.values())


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("op", ROW_OPS)
def test_too_few_and_unknown_arguments_name_what_there_is(op: Op) -> None:
    with pytest.raises(TypeError, match=f"{op.name} needs the argument '{argument_names(op)[0]}'"):
        gristmill.explain(op.name)
    with pytest.raises(TypeError, match=f"{op.name} takes .*weight"):
        gristmill.explain(op.name, **good(op), wait=1)


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("name", ["x", "residual"])
def test_in_place_on_memory_that_several_rows_share(name: str) -> None:
    values = good(OPS["fused_add_rms_norm_"])
    values[name] = torch.ones(1, 8, dtype=torch.bfloat16).expand(4, 8)
    with pytest.raises(ArgumentError, match=f"fused_add_rms_norm_: {name} .*overwritten.*expanded"):
        gristmill.fused_add_rms_norm_(**values)


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("name", ["x", "residual", "weight"])
def test_in_place_with_gradients_says_what_to_do(name: str) -> None:
    values = good(OPS["fused_add_rms_norm_"])
    values[name].requires_grad_()
    with pytest.raises(ArgumentError, match=r"has no gradient.*torch\.no_grad.*add_rms_norm"):
        gristmill.fused_add_rms_norm_(**values)


def test_use_with_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(UnknownVariant, match=r"'cuda_blok'.*did you mean 'cuda_block'.*reference"):
        gristmill.use("rms_norm", "cuda_blok")
    with pytest.raises(UnknownVariant, match=r"no op 'rms_nrm'.*did you mean 'rms_norm'"):
        gristmill.use("rms_nrm", "library")


@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("op", ROW_OPS)
def test_use_of_a_variant_that_cannot_run_says_why(op: Op) -> None:
    values = good(op)
    with (
        gristmill.use(op.name, "cuda_block"),
        pytest.raises(VariantUnavailable, match=f"{op.name}.*'cuda_block'.*needs a CUDA device"),
    ):
        call(op, values)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GRISTMILL_JIT", "maybe", "GRISTMILL_JIT='maybe'.*on, off"),
        ("GRISTMILL_USE", "rms_norm=library", "GRISTMILL_USE.*op:variant"),
    ],
)
def test_environment_that_makes_no_sense(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=words):
        reload_settings()


def test_environment_that_names_an_unknown_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_USE", "rms_norm:nothing")
    reload_settings()
    OPS["rms_norm"].forget_plans()
    with pytest.raises(
        UnknownVariant, match=r"GRISTMILL_USE=rms_norm:nothing.*there are: cuda_warp"
    ):
        gristmill.rms_norm(torch.ones(2, 4))
    monkeypatch.undo()
    reload_settings()


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_happens")
@pytest.mark.parametrize("op", ROW_OPS)
def test_tensors_on_two_devices(op: Op) -> None:
    values = good(op, "cuda")
    for name in [name for name, value in values.items() if isinstance(value, torch.Tensor)]:
        if name == "x":
            continue
        wrong = {**values, name: values[name].cpu()}
        with pytest.raises(ArgumentError, match=rf"^{op.name}: {name} is on cpu, x on cuda:0"):
            call(op, wrong)


def test_nothing_is_overwritten_in_an_empty_tensor_whatever_its_strides() -> None:
    x = torch.randn(1, 0, 64).expand(7, 0, 64)
    with torch.no_grad():
        gristmill.fused_add_rms_norm_(x, x.clone())


def test_one_tensor_cannot_be_overwritten_by_two_results() -> None:
    x = torch.randn(4, 64)
    kept = x.clone()
    with pytest.raises(ArgumentError, match="must be different tensors; got the same tensor twice"):
        gristmill.fused_add_rms_norm_(x, x)
    assert torch.equal(x, kept)


def test_linear_says_who_takes_an_nvfp4_weight() -> None:
    weight = gristmill.nvfp4.quantize(torch.randn(32, 64))
    for one in (weight, weight.prepare()):
        with pytest.raises(DtypeError, match=r"^linear: .*NVFP4.*; gristmill.nvfp4.linear takes"):
            gristmill.linear(torch.randn(4, 64), one)
