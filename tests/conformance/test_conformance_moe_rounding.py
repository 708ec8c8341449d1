"""What experts lose where products are torch's, as on a GPU: computed on a CPU, and no more.

There the products of 16-bit tensors are rounded to their dtype, and so is what goes into the next
one; `conformance_truth_experts` counts each of these roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance_helpers import allowed, composed, run_by, supporting
from conformance_truth import Truth, results_of, truth_of

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

BF16 = torch.bfloat16
NAMES = ("moe", "moe_backward", "nvfp4_moe", "nvfp4_moe_backward")
ACTIVATIONS = ("silu", "gelu", "swiglu_oai")
# Where activation, limit and alpha stand, counted from the end of the arguments.
OPTIONS = {"moe_backward": (-5, -4, -2), "nvfp4_moe_backward": (-5, -4, -1)}

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def by_library(op: Op, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return results_of(op.name, args, run_by(op, "library", args))


def errors(op: Op, truths: list[Truth], results: list[torch.Tensor], args: Any) -> list[float]:
    rounding = composed(op, "library", args, "cuda")
    assert rounding is BF16
    pairs = zip(truths, results, strict=True)
    return [truth.roundings(result, composed=rounding) for truth, result in pairs]


def limited(name: str, activation: str, limit: float, seed: int) -> tuple[Any, ...]:
    """A call of which much is cut."""
    torch.manual_seed(seed)
    args = list(OPS[name].example((25, 6, 2, 64, 48), BF16, "cpu"))
    at_activation, at_limit, at_alpha = OPTIONS[name]
    args[at_activation], args[at_limit] = activation, limit
    args[at_alpha] = 1.3 if activation == "swiglu_oai" else None
    return tuple(args)


@pytest.mark.parametrize("third", [0, *(pytest.param(it, marks=pytest.mark.long) for it in (1, 2))])
@pytest.mark.parametrize("name", NAMES)
def test_every_case_in_bf16(name: str, third: int) -> None:
    """The only dtype for which a GPU has this variant with more than a few slots."""
    op, seen = OPS[name], 0
    for case in list(op.cases())[third::3]:
        args = case.make("cpu", 0)
        runs = any(variant.name == "library" for variant in supporting(op, args))
        if args[0].dtype != BF16 or not runs:
            continue
        seen += 1
        truths = truth_of(name, args)
        found = errors(op, truths, by_library(op, args), args)
        for error, limit in zip(found, allowed(op, args, truths), strict=True):
            assert error <= limit, f"{case.name}: {error:.2f} roundings > {limit}"
    assert seen > 10


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_either_side_of_the_limit(name: str, activation: str) -> None:
    """A gate or an up that is rounded across the limit has its gradient, or has it no more."""
    op, crossed = OPS[name], 0
    for seed in range(4):
        args = limited(name, activation, 0.7, seed)
        truths, results = truth_of(name, args), by_library(op, args)
        for error, limit in zip(
            errors(op, truths, results, args), allowed(op, args, truths), strict=True
        ):
            assert error <= limit
        strict = [replace(truth, composed_range=None) for truth in truths]
        crossed += any(error > 2 for error in errors(op, strict, results, args))
    assert crossed, "nothing is near the limit: this shows nothing"


def wrong(name: str, args: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls whose results are not those of `args`, if not by much."""
    _, at_limit, _ = OPTIONS[name]
    for factor in (0.98, 1.02):
        other = list(args)
        other[at_limit] *= factor
        yield f"limit times {factor}", tuple(other)
    # By few roundings of bf16, up or down. One for all values of a token is less than many that
    # do not cancel.
    changes = (("dy", 2**-6), ("hidden_states", 2**-6), ("topk_weights", 2**-4))
    for position, (what, change) in enumerate(changes):
        generator = torch.Generator().manual_seed(position)
        signs = torch.rand(args[position].shape, generator=generator) - 0.5
        other = list(args)
        other[position] = (args[position].double() * (1 + signs.sign() * change)).to(BF16)
        yield what, tuple(other)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_little_more_than_these_roundings_is_noticed(name: str, activation: str) -> None:
    op, args = OPS[name], limited(name, activation, 0.7, 0)
    truths = truth_of(name, args)
    for what, other in wrong(name, args):
        assert max(errors(op, truths, by_library(op, other), args)) > 2, what
