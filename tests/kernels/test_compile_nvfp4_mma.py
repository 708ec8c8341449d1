"""What the variant `cuda_mma` would launch: compiled for every architecture, and within its limits.

No GPU is needed: NVRTC compiles, and what a kernel uses is read from the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.ops.nvfp4_linear.cases import forward_example
from gristmill.ops.nvfp4_linear.mma import MOST_TOKENS, Mma
from gristmill.ops.nvfp4_linear.mma_configs import MmaConfig, Shares, Slots, candidates, estimate
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
TOKENS = (1, 2, 8, 9, 16, 17, 32, 48, 64, 65, 128, 256)
# Rows and columns of layers, and of what is hardly one.
LAYERS = (
    (57344, 8192),
    (8192, 8192),
    (4096, 4096),
    (8192, 28672),
    (2112, 7168),
    (24576, 1536),
    (1, 16),
    (200, 1040),
)
REGISTERS = 65536
# Bytes: a word or two that wait outside of the main loop. Weights are in fragments up to sm_90;
# what others would do with them is no matter.
SPILL_LIMIT = {"sm_80": 16, "sm_89": 16, "sm_90a": 16, "sm_100a": 256, "sm_120a": 256}


def _problem(arch: str, tokens: int, rows: int, columns: int, dtype: str = "bfloat16") -> Problem:
    example = forward_example((1, 64, 64), getattr(torch, dtype), "cpu", "sm_90a")
    problem = forward_problem(KNOWN[arch], *example)
    return replace(problem, rows=tokens, dims=(("N", rows), ("K", columns)))


def _all(
    arch: str, layers: Sequence[tuple[int, int]] = LAYERS
) -> Iterator[tuple[Problem, MmaConfig]]:
    for rows, columns in layers:
        for tokens in TOKENS:
            problem = _problem(arch, tokens, rows, columns)
            assert Mma().supports(problem) is None
            for config in Mma().configs(problem):
                yield problem, config


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", KNOWN)
def test_every_launch_fits(arch: str) -> None:
    device = KNOWN[arch]
    for problem, config in _all(arch):
        shares = Shares.of(problem.dim("N"), problem.dim("K"), config)
        for passes in (1, 3):
            slots = Slots.of(shares, config, passes, device)
            assert slots.bytes(config) <= device.shared_per_block, (config, slots)
        assert config.shares == 1 or config.partial == (device.capability < (9, 0))
        # No block has nothing to do.
        assert (config.shares - 1) * shares.share < shares.chunks


def _check_compiled(arch: str, usual: Sequence[tuple[int, int]] | None = None) -> None:
    """Every config; with `usual` what runs untuned in these layers, in fp16 only the first's."""
    names: dict[str, MmaConfig] = {}
    for problem, config in _all(arch, usual or LAYERS):
        if usual and config != Mma().config(problem):
            continue
        both = not usual or problem.dims == (("N", usual[0][0]), ("K", usual[0][1]))
        for dtype in ("bfloat16", "float16") if both else ("bfloat16",):
            typed = replace(problem, dtypes=(("x", dtype), ("out", dtype)))
            for name in Mma().program(typed, config).names:
                names[name] = config
    assert names
    program = Program("nvfp4_mma.cu", tuple(names))
    binary = compile_program(program, arch, verbose=True)
    usage = resource_usage(binary)
    found = []
    for name, config in names.items():
        used = usage[binary.lowered[name]]
        assert used.spill_bytes is not None, "the assembler's report does not name the kernel"
        if max(used.spill_bytes, used.stack_bytes) > SPILL_LIMIT[arch]:
            found.append(f"{name}: {used.spill_bytes} bytes spilled, {used.stack_bytes} of stack")
        threads = 256 if "add" in name else config.threads * config.blocks_per_sm
        if used.registers * threads > REGISTERS:
            found.append(f"{name}: {used.registers} registers in {threads} threads")
    assert not found, "\n".join([f"{len(found)} of {len(names)} on {arch}:", *found])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_within_limits(arch: str) -> None:
    """What runs unless somebody tunes; the rest, which takes long, is in the test below."""
    _check_compiled(arch, LAYERS[1:5] if arch == "sm_90a" else LAYERS[2:3])


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ARCHS)
def test_more_kernels_compile_within_limits(arch: str) -> None:
    _check_compiled(arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_guess_is_the_first_of_those_worth_timing(arch: str) -> None:
    for rows, columns in LAYERS:
        for tokens in TOKENS:
            problem = _problem(arch, tokens, rows, columns)
            found = Mma().configs(problem)
            assert found[0] == Mma().config(problem)
            assert len(set(found)) == len(found)
            assert (len(found) == 1) >= (tokens > MOST_TOKENS)
            assert (Mma().declines(problem) is not None) == (tokens > MOST_TOKENS)
            # A tile has room for the tokens, and is not twice as large as they need.
            tile = found[0].tokens
            assert tile == 64 or (tokens <= tile and (tile == 8 or 2 * tokens > tile))


def test_the_model_knows_what_matters() -> None:
    """Few rows: several blocks share the columns. Many: nobody waits for others without need."""
    small = _problem("sm_90a", 1, 4096, 4096)
    assert candidates(small)[0].shares > 1
    large = _problem("sm_90a", 1, 57344, 8192)
    assert candidates(large)[0].shares == 1
    # The roof of memory is never passed, nor is it far where that is all there is.
    us = estimate(large, candidates(large)[0])
    roof = 57344 * 8192 * 0.5625 / large.device.bandwidth * 1e6
    assert roof < us < 1.2 * roof


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flags": ()}, "layout 'fragments'"),
        ({"dtypes": (("x", "float32"), ("out", "bfloat16"))}, "x of bf16 or fp16"),
        ({"dtypes": (("x", "bfloat16"), ("out", "float64"))}, "gives fp32, bf16 or fp16"),
        ({"rows": 0}, "nothing to compute"),
        ({"rows": 2**31}, "2**31 elements"),
        ({"dims": (("N", 2**31), ("K", 4096))}, "2**31 elements"),
        ({"rows": 2**29, "dims": (("N", 2**12), ("K", 64))}, "more than a grid has"),
    ],
)
def test_what_it_does_not_do(change: dict[str, object], reason: str) -> None:
    problem = _problem("sm_90a", 8, 4096, 4096)
    assert Mma().supports(problem) is None
    assert reason in (Mma().supports(replace(problem, **change)) or "")  # type: ignore[arg-type]


def test_what_it_does_not_do_with_other_tensors() -> None:
    problem = _problem("sm_90a", 8, 4096, 4096)
    for change, reason in (
        ({"weight_packed": False}, "dense and aligned"),
        ({"bias": torch.float64}, "bias of fp32, bf16 or fp16"),
    ):
        other = replace(problem, layout=replace(problem.layout, **change))
        assert reason in (Mma().supports(other) or "")
    turing = replace(problem.device, capability=(7, 5), arch="sm_75")
    assert "8.0" in (Mma().supports(replace(problem, device=turing)) or "")
