"""Every op over rows, variant and way of feeding rows, on small problems, for compute-sanitizer.

    PYTHONPATH=src compute-sanitizer --tool memcheck --report-api-errors no python tools/sanitize.py
    PYTHONPATH=src compute-sanitizer --tool racecheck python tools/sanitize.py softmax cuda_block

Three kinds of problems: examples of many lengths; the op's own test cases, with their masks, causal
limits, odd rows, targets out of range and FP8 scales, by the variant that would be chosen, or with
--all by every variant that can; and each way that rows can come. Words on the command line narrow
it down to ops and variants of these names. Exits with 1 where a result is wrong; what the sanitizer
finds it reports itself (give it --error-exitcode). API errors are not ours: the driver's bindings
look for functions that a driver may not have. racecheck also reports the reductions of torch that
the results are compared with.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gristmill.bench.check import WrongResultError, check
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.device import Device, device_of
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

# Rows and columns: short and odd rows, then the lengths at which the preferences change.
SHAPES = (
    (9, 1),
    (33, 24),
    (21, 130),
    (13, 1000),
    (9, 2048),
    (9, 5120),
    (9, 8192),
    (7, 16384),
    (5, 20001),
    (5, 32768),
    (3, 65536),
    (3, 131072),
)
# So few that a handful of rows counts as many: rings and loops over rows are used, and short.
MULTIPROCESSORS = (3, 24)
# Elements of the largest tensor: test cases beyond that are slow here, and show nothing new.
CASE_LIMIT = 100_000
# The feeds that the kernels of a source know; others only let rows pass by.
ALL_FEEDS = (STRAIGHT, AHEAD, ASYNC, TWICE, 2, 3)
FEEDS = {
    "norm.cu": ALL_FEEDS,
    "norm_backward.cu": (STRAIGHT, AHEAD, 2, 3),
    "softmax.cu": ALL_FEEDS,
    "softmax_backward.cu": (STRAIGHT, AHEAD, ASYNC, 2, 3),
    "cross_entropy_one_pass.cu": ALL_FEEDS,
}


def main(words: list[str]) -> int:
    """Runs all that `words` name, and says what was run."""
    if not torch.cuda.is_available():
        sys.stderr.write("sanitize: there is no GPU here\n")
        return 2
    torch.manual_seed(0)
    count = wrong = 0
    everyone = "--all" in words
    for op, variant in kernels([word for word in words if word != "--all"]):
        for args, problem, config in runs(op, variant, device_of("cuda"), everyone=everyone):
            good = run(op, variant, problem, config, args)
            count, wrong = count + 1, wrong + (not good)
            mark = "" if good else "  WRONG"
            sys.stdout.write(f"{problem.key(problem.rows)} {variant.name} {config}{mark}\n")
    sys.stdout.write(f"{count} launches, {wrong} wrong\n")
    return 1 if wrong or not count else 0


def kernels(words: list[str]) -> Iterator[tuple[Op, RowVariant]]:
    """The ops and variants that `words` name; where no op, or no variant, is named: all."""
    ops = [word for word in words if word in OPS]
    variants = [word for word in words if word not in OPS]
    for op in OPS.values():
        for variant in op.variants:
            wanted = (not ops or op.name in ops) and (not variants or variant.name in variants)
            if wanted and isinstance(variant, RowVariant):
                yield op, variant


def runs(
    op: Op, variant: RowVariant, device: Device, *, place: str = "cuda", everyone: bool = False
) -> Iterator[tuple[tuple[Any, ...], Problem, RowConfig]]:
    """Arguments, problem and config of every launch of one variant of an op."""
    for shape, few, unaligned in itertools.product(SHAPES, MULTIPROCESSORS, (False, True)):
        if unaligned and shape[-1] > 8192:
            continue
        args = arguments(op, shape, unaligned, place)
        problem = op.problem(*args, device=replace(device, multiprocessors=few))
        if variant.supports(problem) is None:
            yield args, problem, variant.config(problem)
    for case in op.cases():
        args = case.make(place, 1)
        problem = op.problem(*args, device=replace(device, multiprocessors=3))
        if largest(args) <= CASE_LIMIT and variant in by(op, problem, everyone):
            yield args, problem, variant.config(problem)
    args = arguments(op, (13, 1536), False, place)
    problem = op.problem(*args, device=replace(device, multiprocessors=3))
    if variant.supports(problem) is None:
        for config in feeds(variant, problem):
            yield args, problem, config


def by(op: Op, problem: Problem, everyone: bool) -> list[Variant]:
    """Who runs a test case: the variant that would be chosen, or all that can."""
    able = [one for one in op.variants if one.supports(problem) is None]
    return able if everyone else [one for one in able if one.declines(problem) is None][:1]


def feeds(variant: RowVariant, problem: Problem) -> Iterator[RowConfig]:
    """Each way that rows of 1536 columns can come, whatever the preference is."""
    bases = {
        "BLOCK": RowConfig(threads=64, items=3),
        "CLUSTER": RowConfig(threads=32, items=3, cluster=4),
    }
    base = bases.get(variant.scope)
    if base is None:
        return
    source = variant.program(problem, variant.config(problem)).source
    for feed, hold in itertools.product(FEEDS.get(source, ()), (True, False)):
        if feed == TWICE and (hold or not getattr(problem.layout, "rereadable", True)):
            continue  # what is read twice does not wait, and must not be written over meanwhile
        yield replace(base, feed=feed, hold=hold)


def largest(args: tuple[Any, ...]) -> int:
    return max(arg.numel() for arg in args if isinstance(arg, torch.Tensor))


def arguments(op: Op, shape: tuple[int, ...], unaligned: bool, place: str) -> tuple[Any, ...]:
    """The op's example; `unaligned`: its rows begin between the boundaries of wide accesses."""
    args = op.example(shape, torch.bfloat16, place)
    if not unaligned:
        return args
    return tuple(shifted(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


def run(
    op: Op, variant: RowVariant, problem: Problem, config: RowConfig, args: tuple[Any, ...]
) -> bool:
    """One launch; whether it gave and wrote what the reference does, give or take a rounding."""
    own, other = ([*map(copy, args)] for _ in range(2))
    returned = tensors(variant.bind(problem, config)(*own))
    expected = tensors(op.reference(*other))
    try:
        # Coarse: inputs of the test cases are such that a rounding more can show.
        check(returned + tensors(own), expected + tensors(other), coarse=True)
    except WrongResultError as error:
        sys.stdout.write(f"    {error}\n")
        return False
    return True


def tensors(values: Any) -> list[torch.Tensor]:
    values = [values] if isinstance(values, torch.Tensor) else values or ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def copy(value: Any) -> Any:
    """A tensor's numbers at the same alignment; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return shifted(value) if value.data_ptr() % 16 else value.clone()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
