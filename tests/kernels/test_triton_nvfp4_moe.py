"""The Triton variant of `nvfp4_moe`: interpreted, compiled for every architecture, and chosen.

No GPU is needed. The PTX that decodes weights, which Triton's interpreter leaves out, is that of
the linear product, and tested there.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import EACH
from sampled import sampled

from gristmill.formats.nvfp4.tiles import padded
from gristmill.jit import TritonProgram, resource_usage
from gristmill.jit.triton import compile_program
from gristmill.ops.nvfp4_linear.triton_configs import shared_bytes
from gristmill.ops.nvfp4_moe.problem import forward_problem
from gristmill.ops.nvfp4_moe.triton import TritonExperts
from gristmill.ops.nvfp4_moe.triton_configs import CANDIDATES, FEW, ExpertsConfig
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

pytest.importorskip("triton", reason="needs Triton")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VARIANT = TritonExperts()
CHILD = Path(__file__).parent / "triton_nvfp4_moe_interpreted.py"
CHECKS = (
    ("shapes", "dtypes", "routes", "bounds"),
    ("activations", "layouts", "parts", "rows_alone"),
    ("every_case",),
    ("few_cases",),
)
REGISTERS_PER_SM = 65536
SPILL_LIMIT = 16  # as in test_triton_compile.py


@pytest.mark.parametrize(
    "checks",
    [pytest.param(one, marks=[] if one is CHECKS[-1] else [pytest.mark.long]) for one in CHECKS],
    ids=lambda names: names[0],
)
def test_the_interpreted_kernel_is_within_rounding_of_fp64(checks: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), *checks],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(checks)


# --- what is compiled ---


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def _problem(
    device: Device | str,
    rows: int = 16,
    experts: int = 128,
    topk: int = 8,
    hidden: int = 2048,
    inner: int = 768,
    *,
    dtype: torch.dtype = BF16,
    layout: str = "rows",
    activation: str = "silu",
    bias: torch.dtype | None = None,
    weights: torch.dtype = F32,
    ids: torch.dtype = torch.int32,
    mapped: torch.dtype | None = None,
    gap: int = 0,
    per_matrix: bool = False,
) -> Problem:
    """`gap`: bytes between the rows of codes and of scales."""

    def weight(n: int, k: int) -> tuple[torch.Tensor, ...]:
        blocks = k // 16
        scales = _empty(experts, n, blocks + gap, dtype=torch.float8_e4m3fn)[..., :blocks]
        if layout == "tiles":
            scales = _empty(experts, math.prod(padded(n, blocks)), dtype=torch.float8_e4m3fn)
        codes = _empty(experts, n, k // 2 + gap, dtype=torch.uint8)[..., : k // 2]
        row_scale = _empty(experts, n, dtype=F32)
        if per_matrix:
            row_scale = _empty(experts, 1, dtype=F32).expand(experts, n)
        return codes, scales, row_scale

    biases = [
        None if bias is None else _empty(experts, width, dtype=bias)
        for width in (2 * inner, hidden)
    ]
    return forward_problem(
        KNOWN[device] if isinstance(device, str) else device,
        _empty(rows, hidden, dtype=dtype),
        _empty(rows, topk, dtype=weights),
        _empty(rows, topk, dtype=ids),
        *weight(2 * inner, hidden),
        *weight(hidden, inner),
        *biases,
        activation,
        None,
        None if mapped is None else _empty(experts, dtype=mapped),
        layout,
        None,
    )


def _products(problem: Problem, config: ExpertsConfig) -> list[TritonProgram]:
    programs = VARIANT.programs(problem, config)
    found = [program for program in programs if isinstance(program, TritonProgram)]
    assert [dict(program.constants)["GATED"] for program in found] == [True, False]
    return found


def _check(problem: Problem, config: ExpertsConfig) -> None:
    assert VARIANT.supports(problem) is None
    for program in _products(problem, config):
        binary = compile_program(program, problem.device.arch)
        (usage,) = resource_usage(binary).values()
        facts = binary.facts
        gated = dict(program.constants)["GATED"]
        what = f"{config} {gated=} on {problem.device.arch}: {usage} {facts}"
        assert usage.stack_bytes <= SPILL_LIMIT, what
        assert usage.registers * facts["threads"] <= REGISTERS_PER_SM, what
        assert facts["profile_bytes"] == facts["scratch_bytes"] == 0, what
        assert usage.parameter_bytes == program.parameters().size, what
        promised = shared_bytes(config.product())
        assert facts["shared"] <= promised <= problem.device.shared_per_block, what


@pytest.mark.parametrize("arch", EACH)
def test_what_runs_by_default_on_each_architecture(arch: str) -> None:
    layout = "tiles" if KNOWN[arch].capability >= (10, 0) else "rows"
    for rows in (1, 4096):
        problem = _problem(arch, rows, layout=layout)
        _check(problem, VARIANT.config(problem))


OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": F16, "bias": F32, "weights": F16, "ids": torch.int64},
    "gelu": {"activation": "gelu", "weights": BF16, "mapped": torch.int32},
    "gpt-oss": {"hidden": 2880, "inner": 2880, "activation": "swiglu_oai", "bias": BF16},
    "gpt-oss tiles": {"hidden": 2880, "inner": 2880, "layout": "tiles", "dtype": F16},
    "one block": {"hidden": 16, "inner": 16, "experts": 1, "topk": 1},
    "odd": {"hidden": 272, "inner": 80, "experts": 3, "topk": 2, "mapped": torch.int64},
    "rows apart": {"gap": 16},
    "rows out of line": {"gap": 3},
    "a scale per matrix": {"per_matrix": True},
}


@pytest.mark.parametrize("options", sampled(OPTIONS.values(), 2), ids=list(OPTIONS))
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
def test_options(arch: str, options: dict[str, Any]) -> None:
    for rows in (1, 100):
        problem = _problem(arch, rows, **options)
        _check(problem, VARIANT.config(problem))


@pytest.mark.long
@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 1024, 4096])
def test_every_candidate(arch: str, rows: int) -> None:
    problem = _problem(arch, rows, layout="tiles" if KNOWN[arch].capability >= (10, 0) else "rows")
    for config in VARIANT.configs(problem):
        _check(problem, config)


# --- which configs, and when ---

MODELS = {  # experts, slots of a token, H, I
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "small": (1, 1, 16, 16),
}


@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_candidates_are_few_different_and_fit(arch: str, model: tuple[int, ...]) -> None:
    for rows in (1, 2, 9, 64, 250, 1024, 100000):
        problem = _problem(arch, rows, *model)
        found = VARIANT.configs(problem)
        assert 2 <= len(found) <= CANDIDATES
        assert len(set(found)) == len(found)
        assert found[0] == VARIANT.config(problem)
        for config in found:
            assert shared_bytes(config.product()) <= problem.device.shared_per_block
            assert config.block_k % 64 == 0  # whole tiles of scales
            assert config.block_n % 16 == 0  # whole pairs of gate and up


def test_more_tokens_of_an_expert_have_larger_tiles() -> None:
    sizes = [VARIANT.config(_problem("sm_80", rows)).block_m for rows in (1, 256, 1024, 16384)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 8
    assert sizes[-1] >= 64


def test_a_program_does_not_depend_on_the_number_of_tokens() -> None:
    for some in ((1, 2, FEW // 8), (FEW // 8 + 1, 1000, 123457)):
        problems = [_problem("sm_90a", rows) for rows in some]
        config = VARIANT.config(problems[0])
        programs = {tuple(_products(problem, config)) for problem in problems}
        assert len(programs) == 1


def test_few_slots_are_not_sorted() -> None:
    few, many = _problem("sm_80", FEW // 8), _problem("sm_80", FEW // 8 + 1)
    sources = [
        [program.source for program in VARIANT.programs(problem, VARIANT.config(problem))]
        for problem in (few, many)
    ]
    assert sources[0] == ["nvfp4_moe.py", "nvfp4_moe.py", "moe_combine.cu"]
    assert sources[1] == ["moe_route.cu", *sources[0]]


def test_many_tokens_and_bytes_out_of_line_are_left_to_others() -> None:
    assert VARIANT.declines(_problem("sm_100a", 1024 * 16)) is None
    assert "dequantise" in str(VARIANT.declines(_problem("sm_100a", 1024 * 16 + 1)))
    # Where torch's grouped mm would wait for the host there is nobody to leave them to.
    assert VARIANT.declines(_problem("sm_80", 1024 * 16 + 1)) is None
    assert VARIANT.declines(_problem("sm_100a", 1024 * 16 + 1, dtype=F16)) is None
    assert VARIANT.declines(_problem("sm_80", gap=16)) is None
    assert "byte by byte" in str(VARIANT.declines(_problem("sm_80", gap=3)))
    unaligned = _unaligned(_problem("sm_80"))
    assert "byte by byte" in str(VARIANT.declines(unaligned))
    assert VARIANT.supports(unaligned) is None


def _unaligned(problem: Problem) -> Problem:
    """With a w2 that lies at no multiple of 16 bytes."""
    details = problem.layout
    return replace(problem, layout=replace(details, w2=replace(details.w2, aligned=False)))


def _promised(problem: Problem) -> list[dict[str, int]]:
    found = _products(problem, VARIANT.config(problem))
    return [dict(program.divisible) for program in found]


def test_no_more_is_promised_of_a_weight_than_is_known() -> None:
    names = ("codes", "scales", "code_matrix", "code_row", "scale_matrix", "scale_row")
    for promised in _promised(_problem("sm_80")):
        assert [promised[name] for name in names] == [16] * 6
        assert promised["x_row"] == 8
    for promised in _promised(_problem("sm_80", gap=4)):
        assert promised["code_row"] == promised["scale_row"] == 4
    first, second = _promised(_unaligned(_problem("sm_80")))
    assert set(names) <= set(first)
    assert not set(names) & set(second)


def test_reasons() -> None:
    assert VARIANT.supports(_problem("sm_80")) is None
    old = Device("cuda", "an older one", arch="sm_75", capability=(7, 5))
    strided = _problem("sm_80")
    gaps = replace(strided.layout.w13, codes_strides=None)
    strided = replace(strided, layout=replace(strided.layout, w13=gaps))
    packed = _problem("sm_80")
    packed = replace(packed, layout=replace(packed.layout, layout="fragments"))
    reasons = {
        "needs a CUDA device, not cpu": VARIANT.supports(_problem(Device("cpu", "cpu"))),
        "8.0 or later, not sm_75": VARIANT.supports(_problem(old)),
        "nothing to compute": VARIANT.supports(_problem("sm_80", 0)),
        "not in layout 'fragments'": VARIANT.supports(packed),
        "hidden_states are float32": VARIANT.supports(_problem("sm_80", dtype=F32)),
        "w13_bias of fp32, bf16 or fp16, not torch.float64": VARIANT.supports(
            _problem("sm_80", bias=F64)
        ),
        "topk_weights of fp32, bf16 or fp16, not torch.float64": VARIANT.supports(
            _problem("sm_80", weights=F64)
        ),
        "not side by side": VARIANT.supports(strided),
        "2**31 elements": VARIANT.supports(_problem("sm_80", 2**28)),
        "kept at a time": VARIANT.supports(_problem("sm_80", 1, 1, 2**17, 2048, 2064)),
        "counts at most": VARIANT.supports(_problem("sm_80", 100, 50000, 8, 16, 16)),
    }
    for words, reason in reasons.items():
        assert words in str(reason)
    # Few slots are not counted.
    assert VARIANT.supports(_problem("sm_80", 1, 50000, 8, 16, 16)) is None
    assert VARIANT.varies_with_batch(_problem("sm_80")) is None
    assert VARIANT.indeterminate(_problem("sm_80")) is None
