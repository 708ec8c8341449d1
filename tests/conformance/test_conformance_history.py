"""An answer, or an error, does not depend on which calls came before."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from conformance_helpers import ALL_OPS, copied, supporting

import gristmill
from gristmill.errors import GristmillError
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

# Values that are one key to a dict, and others: each is tried after each that equals it.
VALUES = (
    True,
    1,
    1.0,
    numpy.float32(1),
    numpy.float64(1),
    numpy.int64(1),
    numpy.bool_(True),
    False,
    0,
    0.0,
    -0.0,
    numpy.float64(0),
    numpy.int64(0),
)


class Word(str):
    """A string of another class."""

    __slots__ = ()


def values_for(value: Any) -> list[Any]:
    """For an argument of this value: it, others, and all that look like one of them."""
    if isinstance(value, str):
        return [value, Word(value), numpy.str_(value)]
    if isinstance(value, torch.dtype):
        return [value, str(value)]
    found = [*VALUES]
    if isinstance(value, (int, float)) and value not in found:
        found += [value, float(value), numpy.float64(value)]
        if value == int(value):
            found += [int(value), numpy.int64(value)]
    return found


def outcome(op: Op, args: tuple[Any, ...]) -> Any:
    """What a call gives or raises, and what it leaves in its arguments."""
    own = copied(args)
    try:
        results = op.call(tuple(arg for arg in own if isinstance(arg, torch.Tensor)), own)
    except (GristmillError, RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    results = (results,) if isinstance(results, torch.Tensor) else results or ()
    tensors = [*results, *(own[at] for at in op.written)]
    return [
        (one.dtype, one.stride(), one.detach().reshape(-1).view(torch.uint8).tolist())
        for one in tensors
    ]


@pytest.mark.parametrize("op", ALL_OPS)
def test_scalars_that_are_one_key_to_a_dict(op: Op) -> None:
    args = op.example((2, 32), torch.float32, "cpu")
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor) or str(op.overload._schema.arguments[at].type).endswith(
            "Tensor]"
        ):
            continue
        calls = [(*args[:at], other, *args[at + 1 :]) for other in values_for(value)]
        fresh = []
        for call in calls:
            op.forget_plans()
            fresh.append(outcome(op, call))
        for order in (1, -1):
            op.forget_plans()
            for call, expected in list(zip(calls, fresh, strict=True))[::order]:
                name = op.overload._schema.arguments[at].name
                assert outcome(op, call) == expected, f"{name}={call[at]!r}"


def test_the_examples_of_the_issue() -> None:
    """They are errors by themselves, so they are errors after a call that they look like."""
    softmax, router, entropy = (OPS[name] for name in ("rms_norm", "topk_router", "cross_entropy"))
    for op, name, good, wrong in (
        (softmax, "eps", 1, True),
        (router, "topk", 1, True),
        (router, "topk", 1, 1.0),
        (entropy, "ignore_index", 1, 1.0),
        (entropy, "return_lse", True, 1),
    ):
        args = list(op.example((2, 32), torch.float32, "cpu"))
        at = [one.name for one in op.overload._schema.arguments].index(name)
        args[at] = good
        op.run(*args)
        args[at] = wrong
        with pytest.raises(GristmillError, match=f"^{op.name}: {name} must "):
            op.run(*args)


@pytest.mark.parametrize("op", ALL_OPS)
def test_tensors_that_differ_in_no_metadata(op: Op) -> None:
    """Whether they need gradients, and in which mode they were made."""
    args = op.example((2, 32), torch.float32, "cpu")
    expected = outcome(op, args)
    with torch.inference_mode():
        inference = copied(args)
    wanting = tuple(
        one.clone().requires_grad_()
        if isinstance(one, torch.Tensor)
        and one.is_floating_point()
        and one.element_size() > 1
        and at not in op.written
        else one
        for at, one in enumerate(args)
    )
    with torch.no_grad():
        for one in (wanting, inference, args):
            assert outcome(op, one) == expected


def in_other_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with other strides in dims of one element or none: contiguous, for torch."""
    strides = [
        step + 2 if size < 2 else step
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    place = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    assert place.is_contiguous()
    return place.copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (0, 32), (4, 32)], ids=str)
@pytest.mark.parametrize("op", ALL_OPS)
def test_strides_that_the_key_of_a_plan_leaves_out(
    op: Op, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One plan serves all of them, and each call gets the strides that its own tensors ask for."""
    args = op.example(shape, dtype, "cpu")
    loose = [
        at
        for at, one in enumerate(args)
        if isinstance(one, torch.Tensor) and one.is_contiguous() and min(one.shape, default=2) < 2
    ]
    places = [(), *((at,) for at in loose), tuple(loose)]
    calls = [
        tuple(in_other_strides(one) if at in there else one for at, one in enumerate(args))
        for there in places
    ]
    for variant in supporting(op, args):
        with gristmill.use(op.name, variant.name):
            alone = []
            for call in calls:
                op.forget_plans()
                alone.append(outcome(op, call))
                promised = op.outputs(*call)
                if promised is not None:
                    each = [promised] if isinstance(promised, torch.Tensor) else promised
                    strides = [one.stride() for one in each]
                    assert [one[1] for one in alone[-1][: len(strides)]] == strides, variant.name
            for order in (1, -1):
                op.forget_plans()
                for call, expected in list(zip(calls, alone, strict=True))[::order]:
                    assert outcome(op, call) == expected, variant.name
                # The key of a tensor without elements says whether it has memory all the same.
                assert len(op._plans) == 1 or not shape[0], variant.name


def test_the_strides_of_a_gradient_of_one_row() -> None:
    """The call of tools/fuzz.py whose dx had the strides of the call before."""
    op = OPS["log_softmax_backward"]
    dy = torch.randn(1, 100).bfloat16()
    sliced = torch.log_softmax(torch.randn(1, 102).half(), -1)[:, :100]
    dense = sliced.clone(memory_format=torch.contiguous_format)
    assert (sliced.stride(), dense.stride()) == ((102, 1), (100, 1))
    for order in ((sliced, dense, sliced), (dense, sliced, dense)):
        op.forget_plans()
        for y in order:
            assert op.run(dy, y, 2, 0.125).stride() == torch.empty_like(y).stride()
        assert len(op._plans) == 1
