"""The Triton kernels that the variants ask for, compiled for every architecture, within limits.

No GPU is needed. What is compared: local memory (spills), registers, shared memory against the
device's and against what `configs.py` promised, and the parameters against what a launch packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from architectures import EACH
from sampled import sampled

from gristmill.jit import TritonProgram, resource_usage
from gristmill.jit.triton import compile_program
from gristmill.ops.linear.configs import CANDIDATES, MatmulConfig, shared_bytes
from gristmill.ops.linear.problem import linear_problem, linear_with_pre_problem, matmul_problem
from gristmill.ops.linear.triton import PERSISTENT, SPLIT_K, TILES, TRITON, TritonMatmul
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem

pytest.importorskip("triton", reason="needs Triton")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
REGISTERS_PER_SM = 65536
# A word or two that the assembler parks around the loop, not in it, while it has registers left.
SPILL_LIMIT = 16


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def _linear(
    arch: str,
    rows: int,
    columns: int = 4096,
    depth: int = 4096,
    dtype: torch.dtype = BF16,
    activation: str | None = "silu",
    pre: bool = False,
) -> Problem:
    x = _empty(rows, depth, dtype=dtype)
    weight, bias = _empty(columns, depth, dtype=dtype), _empty(columns, dtype=dtype)
    make = linear_with_pre_problem if pre else linear_problem
    return make(KNOWN[arch], x, weight, bias, activation)


def _matmul(arch: str, a: torch.Tensor, b: torch.Tensor) -> Problem:
    return matmul_problem(KNOWN[arch], a, b)


def _check(variant: TritonMatmul, problem: Problem, config: MatmulConfig) -> None:
    for program in variant.programs(problem, config):
        binary = compile_program(program, problem.device.arch)
        (usage,) = resource_usage(binary).values()
        facts = binary.facts
        what = f"{program.function} {config} on {problem.device.arch}: {usage} {facts}"
        assert usage.stack_bytes <= SPILL_LIMIT, what
        assert usage.registers * facts["threads"] <= REGISTERS_PER_SM, what
        assert facts["shared"] <= problem.device.shared_per_block, what
        assert facts["profile_bytes"] == 0, what
        assert usage.parameter_bytes == program.parameters().size, what
        if program.function != "add_partials":
            assert facts["threads"] >= 32 * config.warps, what
            promised = shared_bytes(variant.kind, config, problem.layout.dtype.itemsize)
            assert facts["shared"] <= promised, what
        descriptors = 0 if program.function != "persistent" else 4 if problem.layout.pre else 3
        assert 128 * descriptors <= facts["scratch_bytes"] <= 128 * (descriptors + 2), what


def _possible(problem: Problem) -> Iterator[TritonMatmul]:
    for variant in TRITON:
        if variant.supports(problem) is None:
            yield variant


@pytest.mark.parametrize("rows", sampled([4096, 16], 2))
@pytest.mark.parametrize("arch", EACH)
def test_what_runs_by_default_on_each_architecture(arch: str, rows: int) -> None:
    problem = _linear(arch, rows)
    variants = list(_possible(problem))
    assert (PERSISTENT in variants) == (problem.device.capability >= (9, 0))
    for variant in variants:
        _check(variant, problem, variant.config(problem))


@pytest.mark.parametrize(
    ("dtype", "rows"), sampled([(F16, 300), (F16, 1), (F32, 300), (F32, 1)], 3), ids=str
)
def test_other_dtypes(dtype: torch.dtype, rows: int) -> None:
    problem = _linear("sm_90a", rows, dtype=dtype, activation="gelu")
    variants = list(_possible(problem))
    assert (PERSISTENT in variants) == (dtype == F16)
    for variant in variants:
        _check(variant, problem, variant.config(problem))


OPTIONS = {
    "no activation": {"activation": None},
    "relu": {"activation": "relu"},
    "gelu_tanh, pre": {"activation": "gelu_tanh", "pre": True},
    "ragged": {"columns": 1003, "depth": 999},
    "multiples of 8": {"columns": 4104, "depth": 1016},
}


@pytest.mark.parametrize("options", sampled(OPTIONS.values(), 2), ids=list(OPTIONS))
def test_options(options: dict[str, Any]) -> None:
    problem = _linear("sm_90a", 40, **options)
    for variant in _possible(problem):
        _check(variant, problem, variant.config(problem))


def test_kernels_that_overlap() -> None:
    few = _linear("sm_90a", 16)
    for variant in (TILES, SPLIT_K):
        early = [config for config in variant.configs(few) if config.early]
        assert 0 < len(early) < len(variant.configs(few))
        assert not any(config.early for config in variant.configs(_linear("sm_89", 16)))
        _check(variant, few, early[0])
        (program, *_) = variant.programs(few, early[0])
        lines = dict(program.constants)["LINES"]
        assert lines * 64 >= (early[0].stages - 1) * early[0].block_k  # 64 elements in a line


def _strided(arch: str) -> Iterator[Problem]:
    a, b = _empty(512, 256, dtype=BF16), _empty(256, 1024, dtype=BF16)
    yield _matmul(arch, a, b)
    yield _matmul(arch, a.t().contiguous().t(), b)
    yield _matmul(arch, _empty(6, 64, 128, dtype=F16), _empty(6, 128, 64, dtype=F16))
    # More than 2**31 elements: offsets of 64 bits.
    yield _matmul(arch, _empty(40000, 65536, dtype=BF16), _empty(65536, 64, dtype=BF16))


def test_layouts() -> None:
    wide = 0
    for problem in _strided("sm_90a"):
        for variant in _possible(problem):
            config = variant.config(problem)
            _check(variant, problem, config)
            (first, *_) = variant.programs(problem, config)
            wide += dict(first.constants).get("WIDE", False)
    assert wide == 2  # of the last problem, TILES and SPLIT_K


@pytest.mark.long
@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 1024, 4096])
def test_every_candidate(arch: str, rows: int) -> None:
    problem = _linear(arch, rows)
    for variant in _possible(problem):
        for config in variant.configs(problem):
            _check(variant, problem, config)


@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 1024, 4096, 100000])
def test_candidates_are_few_different_and_fit(arch: str, rows: int) -> None:
    for dtype in (BF16, F32):
        problem = _linear(arch, rows, dtype=dtype)
        for variant in _possible(problem):
            found = variant.configs(problem)
            assert (2 if variant is PERSISTENT else 8) <= len(found) <= CANDIDATES, variant
            assert len(set(found)) == len(found)
            assert found[0] == variant.config(problem)
            for config in found:
                assert (config.split_k > 1) == (variant is SPLIT_K)
                assert not config.swap or variant is not PERSISTENT
                needed = shared_bytes(variant.kind, config, dtype.itemsize)
                assert needed <= problem.device.shared_per_block


def test_a_program_does_not_depend_on_the_number_of_rows() -> None:
    problems = [_linear("sm_90a", rows) for rows in (1, 7, 1000, 123457)]
    for variant in TRITON:
        config = variant.config(problems[0])
        programs: set[tuple[TritonProgram, ...]] = {
            variant.programs(problem, config) for problem in problems
        }
        assert len(programs) == 1, variant


def test_few_rows_prefer_triton_and_many_the_library() -> None:
    few, many = _linear("sm_90a", 16), _linear("sm_90a", 4096)
    willing = [variant for variant in (TILES, SPLIT_K) if variant.declines(few) is None]
    assert len(willing) == 1  # the one of them that the model thinks faster
    assert PERSISTENT.declines(few) is not None
    for variant in TRITON:
        assert variant.declines(many) is not None


def test_reasons() -> None:
    assert TILES.supports(_linear("sm_90a", 16)) is None
    reasons = {
        "needs TMA": PERSISTENT.supports(_linear("sm_80", 256)),
        "takes bfloat16 and float16, not float32": PERSISTENT.supports(
            _linear("sm_90a", 256, dtype=F32)
        ),
        "needs more": TILES.supports(_linear("sm_90a", 256, dtype=torch.float64)),
        "nothing to compute": TILES.supports(_linear("sm_90a", 0)),
        "multiple of 16 bytes": PERSISTENT.supports(_linear("sm_90a", 256, columns=1003)),
        "aligned to 16 bytes": PERSISTENT.supports(_linear("sm_90a", 256, depth=1003)),
        "not a batch": PERSISTENT.supports(
            _matmul("sm_90a", _empty(6, 64, 128, dtype=F16), _empty(6, 128, 64, dtype=F16))
        ),
        "contiguous dim": PERSISTENT.supports(
            _matmul("sm_90a", _empty(128, 64, dtype=F16).t(), _empty(128, 64, dtype=F16))
        ),
    }
    for words, reason in reasons.items():
        assert words in str(reason)
