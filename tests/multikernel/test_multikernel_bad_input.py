"""What a MultiKernel refuses, and in which words: who, which argument, what came, what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.multikernel import MultiKernel
from gristmill.ops.registry import OPS


def kernel(x: torch.Tensor, y: torch.Tensor, *, eps: float = 1.0) -> torch.Tensor:
    return x + y


def other(*args: Any) -> Any:
    return args[0]


KERNELS = {"a": kernel}
SCHEMA = "(Tensor x, Tensor y) -> Tensor"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": 5}, DtypeError, r"name must be a string, got int"),
        ({"name": "a-b"}, ArgumentError, r"name must be a Python identifier.*got 'a-b'"),
        ({"name": "class"}, ArgumentError, r"name must be a Python identifier.*got 'class'"),
        ({"name": "rms_norm"}, ArgumentError, r"'rms_norm' is that of an op of gristmill"),
        ({"kernels": {}}, ArgumentError, r"MultiKernel 'bad': kernels is empty"),
        ({"kernels": [kernel]}, DtypeError, r"kernels must be a dict .*got list"),
        ({"kernels": {"a": 1}}, DtypeError, r"kernel 'a' must be callable, got int"),
        ({"kernels": {"a:b": kernel}}, ArgumentError, r"without spaces.*bad:fast; got 'a:b'"),
        ({"kernels": {1: kernel}}, ArgumentError, r"a kernel's name must be a string.*got 1"),
        ({"kernels": {"": kernel}}, ArgumentError, r"a kernel's name must be a string"),
        ({"hints": []}, ArgumentError, r"'bad': hints is empty"),
        ({"hints": [64, 0]}, ArgumentError, r"hints must be positive ints, got 0"),
        ({"hints": [64, 2.5]}, ArgumentError, r"hints must be positive ints, got 2.5"),
        ({"hints": [True]}, ArgumentError, r"hints must be positive ints, got True"),
        ({"hints": 64}, DtypeError, r"hints must be a list of ints, got int"),
        ({"hints": "64"}, DtypeError, r"hints must be a list of ints, got str"),
        ({"key": 3}, DtypeError, r"key must be a function .*got int"),
        ({"mutates": "y"}, DtypeError, r"mutates must be a list of names or positions, got 'y'"),
        ({"mutates": ["z"]}, ArgumentError, r"mutates names 'z', .*there are: x, y, eps"),
        ({"mutates": [3]}, ArgumentError, r"mutates names 3, which is no argument"),
        ({"mutates": [-1]}, ArgumentError, r"mutates names -1, which is no argument"),
        ({"mutates": [None]}, DtypeError, r"names or positions of arguments, got None"),
        ({"version": 2}, DtypeError, r"version must be a string, got int"),
        ({"supports": ["a"]}, DtypeError, r"supports must be a dict .*got list"),
        ({"supports": {"b": kernel}}, ArgumentError, r"supports names 'b', .*there are: a"),
        ({"supports": {"a": "yes"}}, DtypeError, r"supports\['a'\] must be callable, got str"),
        ({"batch_invariant": "a"}, DtypeError, r"batch_invariant must be a list .*got 'a'"),
        ({"batch_invariant": ["b"]}, ArgumentError, r"batch_invariant names 'b', .*there are: a"),
        ({"fake": kernel}, ArgumentError, r"fake is given without schema"),
        ({"schema": SCHEMA}, ArgumentError, r"schema is given without fake"),
        (
            {"schema": f".out{SCHEMA}", "fake": kernel},
            ArgumentError,
            r"schema must begin with the arguments in parentheses.*got '\.out",
        ),
        ({"schema": f"2{SCHEMA}", "fake": kernel}, ArgumentError, r"schema must begin with"),
        ({"schema": 5, "fake": kernel}, DtypeError, r"schema must be a string, got int"),
        ({"schema": SCHEMA, "fake": 5}, DtypeError, r"fake must be callable, got int"),
        ({"schema": "(x)", "fake": kernel}, ArgumentError, r"schema must read like .*got '\(x\)'"),
        (
            {"schema": "(Tensor x, Tensor(a!) y) -> Tensor", "fake": kernel, "mutates": ["x"]},
            ArgumentError,
            r"mutates is \['x'\], but schema writes to \['y'\]",
        ),
        (
            {"schema": "(Tensor x) -> Tensor", "fake": kernel},
            ArgumentError,
            r"kernel 'a'\(x.* does not take the arguments of schema .*: missing .*'y'",
        ),
    ],
)
def test_refused_when_it_is_made(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"name": "bad", "kernels": KERNELS, **change}
    with pytest.raises(error, match=message):
        MultiKernel(**given)


def test_what_is_refused_leaves_no_torch_op() -> None:
    with pytest.raises(ArgumentError):
        MultiKernel("half_made", KERNELS, schema=SCHEMA, fake=None)
    with pytest.raises(ArgumentError):
        MultiKernel("half_made", KERNELS, schema=SCHEMA, fake=kernel, hints=[0])
    assert not hasattr(torch.ops.gristmill_user, "half_made")


def test_every_name_of_an_op_is_refused() -> None:
    for name in OPS:
        with pytest.raises(ArgumentError, match="take another name"):
            MultiKernel(name, KERNELS)


def test_mutates_by_name_by_position_and_by_schema() -> None:
    assert MultiKernel("written", KERNELS, mutates=["y", 0]).mutates == ("y", "x")
    assert MultiKernel("written", {"a": other}, mutates=["y", 3]).mutates == ("y", "3")
    assert MultiKernel("written", {"a": torch.add}, mutates=["y"]).mutates == ("y",)
    by_schema = MultiKernel(
        "written", KERNELS, schema="(Tensor x, Tensor(a!) y) -> Tensor", fake=kernel, mutates=[1]
    )
    assert by_schema.mutates == ("y",)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda *args: 1.5, r"key must give an int that is not negative.*got 1.5"),
        (lambda *args: -1, r"key must give an int that is not negative.*got -1"),
        (lambda *args: True, r"key must give an int .*got True"),
        (lambda *args: (), r"key must give an int .*got \(\)"),
        (lambda *args: ("a", 1), r"key must give an int .*got \('a', 1\)"),
        (lambda *args: (1, [2]), r"after the size, key must give ints.*got \[2\]"),
    ],
)
def test_key_that_gives_something_else(key: Any, message: str) -> None:
    one = MultiKernel("keyed", KERNELS, key=key)
    with pytest.raises(DtypeError, match=message):
        one(torch.ones(2), torch.ones(2))


def test_key_that_raises_is_heard() -> None:
    def key(x: Any, y: Any) -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        MultiKernel("keyed", KERNELS, key=key)(torch.ones(2), torch.ones(2))


def test_predicate_that_gives_something_else() -> None:
    one = MultiKernel("predicated", KERNELS, supports={"a": lambda x, y: 5})
    with pytest.raises(DtypeError, match=r"supports\['a'\] must give None, a bool or a reason"):
        one(torch.ones(2), torch.ones(2))


def test_call_without_a_tensor_needs_a_key() -> None:
    kernels = {"a": lambda n: n + 1, "b": lambda n: n + 1}
    with pytest.raises(ArgumentError, match=r"there is no tensor among the arguments.*key="):
        MultiKernel("numbers", kernels)(5)
    assert MultiKernel("numbers", kernels, key=lambda n: n)(5) == 6


def test_arguments_of_tuning() -> None:
    one = MultiKernel("tuned", {"a": lambda x: x + 1, "b": lambda x: x + 1}, hints=[16, 256])
    with pytest.raises(ArgumentError, match=r"make\(16\) must give a tuple .*got int"):
        one.tune_at_hints(lambda size: 5)
    with pytest.raises(ArgumentError, match=r"make\(16\) must give arguments of size 16.* size 99"):
        one.tune_at_hints(lambda size: torch.ones(99))
    with pytest.raises(ArgumentError, match=r"'tuned': tune needs tensors that hold numbers"):
        one.tune(torch.ones(4, device="meta"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 4).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.tensor(5.0),
        lambda: torch.ones(0, 4),
        lambda: torch.ones(4, dtype=torch.complex64),
        lambda: torch.ones(4, dtype=torch.bool),
        lambda: torch.nn.Parameter(torch.ones(4)),
        lambda: torch.ones(1).expand(1000, 1000),
    ],
)
def test_tensors_of_every_kind_find_a_kernel(make: Any) -> None:
    one = MultiKernel("kinds", {"a": lambda x: x, "b": lambda x: x})
    x = make()
    assert one(x) is x
    assert one(x) is x
    with one.use("b"):
        assert one(x) is x
    assert str(one.explain(x))
