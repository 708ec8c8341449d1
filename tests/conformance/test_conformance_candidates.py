"""Every launch that tuning may choose computes what the op promises, not only the usual one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conformance_helpers import allowed, composed, copied, run_by
from conformance_truth import Truth, results_of, truth_of

from gristmill.errors import CompileError, DriverError
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN, Problem, Variant

H200 = KNOWN["sm_90a"]
# Short rows, rows of a block, rows of a cluster, odd ones; few rows and more than there are SMs.
SHAPES = ((3, 1000), (300, 4096), (20, 20480), (7, 1001))
DTYPES = (torch.bfloat16, torch.float32)


def _tuned(op: Op) -> bool:
    """Whether some variant has more than one launch to choose from."""
    problem = op.problem(*op.example((300, 4096), torch.bfloat16, "meta"), device=H200)
    able = [variant for variant in op.variants if variant.supports(problem) is None]
    return any(len(variant.configs(problem)) > 1 for variant in able)


TUNED_OPS = [pytest.param(op, id=op.name) for op in OPS.values() if _tuned(op)]


def _possible(op: Op, problem: Problem) -> list[Variant]:
    return [one for one in op.variants if one.supports(problem) is None]


@pytest.mark.parametrize("op", TUNED_OPS)
def test_the_usual_launch_comes_first_and_none_twice(op: Op) -> None:
    for rows in (1, 64, 5000):
        args = op.example((rows, 4096), torch.bfloat16, "meta")
        problem = op.problem(*args, device=H200)
        for variant in _possible(op, problem):
            found = list(variant.configs(problem))
            assert found[0] == variant.config(problem)
            assert len(found) == len(set(found)) <= 40, variant
            if variant.config_type is not None:
                assert all(isinstance(config, variant.config_type) for config in found)


def _limits(op: Op, args: tuple[Any, ...], truths: list[Truth]) -> list[float]:
    """As everywhere, and at least twice what torch's own product is off by.

    Tensor cores cut off the sums' last bits where the reference, in fp32, rounds them: with 4096
    terms cuBLAS is off by 2.5 roundings, and so is every kernel here.
    """
    limits = allowed(op, args, truths)
    if not any(variant.name.startswith("triton") for variant in op.variants):
        return limits
    library = next(one for one in op.variants if one.name == "library")
    if library.supports(op.problem(*args)) is not None:  # nor is any launch in less than fp32 then
        return limits
    own = copied(args)
    found = _one_sum(own) if op.name == "nvfp4_linear" else run_by(op, "library", own)
    results = results_of(op.name, own, found)
    pairs = zip(limits, truths, results, strict=True)
    return [max(limit, 2 * truth.roundings(result)) for limit, truth, result in pairs]


def _one_sum(args: tuple[Any, ...]) -> torch.Tensor:
    """nvfp4_linear by torch's product of so many rows that it does not split its sums.

    Those of few rows are split into several, which are cut off less often.
    """
    x, codes, scales, row_scale, _, layout, _, _ = args
    weight = Weight(codes, scales, row_scale, layout, x.shape[-1]).blocks(x.dtype)
    many = x.repeat(-(-2048 // len(x)), 1)
    total = torch.mm(many, weight.t(), **_WIDE if x.dtype != torch.float32 else {})[: len(x)]
    return (total * row_scale).to(x.dtype)


_WIDE: dict[str, Any] = {"out_dtype": torch.float32}


def _example(op: Op, shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    rows, columns = shape
    whole = op.name.startswith("nvfp4")  # whose columns come in blocks of 16
    return op.example((rows, -(-columns // 16) * 16 if whole else columns), dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", TUNED_OPS)
def test_every_launch_is_right(op: Op, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    args = _example(op, shape, dtype, "cuda")
    problem = op.problem(*args)
    truths = truth_of(op.name, args)
    limits = _limits(op, args, truths)
    wrong = []
    for variant in _possible(op, problem):
        for config in variant.configs(problem):
            own = copied(args)
            try:
                plan = variant.bind(problem, config)
            except (CompileError, DriverError) as error:
                if config == variant.config(problem):
                    wrong.append(f"{variant.name} cannot be built as usual: {error}")
                continue
            results = results_of(op.name, own, plan(*own))
            for truth, result, limit in zip(truths, results, limits, strict=True):
                error = truth.roundings(result, composed=composed(op, variant.name, args))
                if not error <= limit and not math.isclose(error, limit):
                    wrong.append(f"{variant.name} {config}: {error:.2f} roundings > {limit:.2f}")
    assert not wrong
