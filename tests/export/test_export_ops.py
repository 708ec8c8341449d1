"""Every op goes into an exported program, onto the disk and back: options, None, dtypes, words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from conformance_helpers import copied, same_bits

from gristmill.ops.op import Arguments, Op
from gristmill.ops.registry import OPS

# Cases differ in sizes, too; for what is tried here small ones will do.
MOST_ELEMENTS = 1 << 16


def kinds_of(op: Op, most: int | None = None) -> list[Arguments]:
    """The example, and of all cases one for each combination of options and dtypes."""
    return list(islice(_kinds_of(op), most))


def _kinds_of(op: Op) -> Iterator[Arguments]:
    example = op.example((16, 64), torch.bfloat16, "cpu")
    known = {_kind(example)}
    yield example
    for case in op.cases():
        args = case.make("cpu", 0)
        small = all(it.numel() <= MOST_ELEMENTS for it in args if isinstance(it, torch.Tensor))
        if small and _kind(args) not in known:
            known.add(_kind(args))
            yield args


def _kind(args: Arguments) -> tuple[str, ...]:
    return tuple(str(it.dtype) if isinstance(it, torch.Tensor) else repr(it) for it in args)


class Calls(torch.nn.Module):
    """An op called once for each of several lists of arguments, of which tensors are inputs."""

    def __init__(self, op: Op, calls: list[Arguments]) -> None:
        super().__init__()
        self.op, self.calls = op, calls

    @property
    def count(self) -> int:
        """How many tensors it takes."""
        return sum(isinstance(it, torch.Tensor) for args in self.calls for it in args)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        tensors = (it for args in self.calls for it in args if isinstance(it, torch.Tensor))
        return tuple(copied(tuple(tensors)))

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        left = iter(tensors)
        return [
            self.op.overload(*[next(left) if isinstance(it, torch.Tensor) else it for it in args])
            for args in self.calls
        ]


@pytest.mark.parametrize("name", OPS)
def test_some_calls_are_saved_and_loaded(name: str) -> None:
    _check_calls(OPS[name], kinds_of(OPS[name], 3))


@pytest.mark.long
@pytest.mark.parametrize("name", OPS)
def test_every_kind_of_call_is_saved_and_loaded(name: str) -> None:
    _check_calls(OPS[name], kinds_of(OPS[name]))


def _check_calls(op: Op, calls: list[Arguments]) -> None:
    """Results, and what the op writes to, bit for bit."""
    model = Calls(op, calls)
    program = torch.export.export(model, model.inputs())
    assert [node.target for node in program.graph.nodes].count(op.overload) == len(calls)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    ours, theirs = model.inputs(), model.inputs()
    expected, found = model(*ours), loaded(*theirs)
    for one, other in zip(_tensors(found, theirs), _tensors(expected, ours), strict=True):
        assert same_bits(one, other)


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [it for it in torch.utils._pytree.tree_leaves(trees) if isinstance(it, torch.Tensor)]


def test_no_schema_has_a_dtype_as_a_default() -> None:
    """AOTInductor writes down what a call leaves out, and a dtype that it finds there as an int."""
    for name, op in OPS.items():
        for argument in op.overload._schema.arguments:
            if "ScalarType" in str(argument.real_type):
                assert argument.default_value is None, f"{name}: {argument.name}"
