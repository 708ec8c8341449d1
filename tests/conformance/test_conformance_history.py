"""An answer, or an error, does not depend on which calls came before."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from conformance_helpers import ALL_OPS, copied

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
