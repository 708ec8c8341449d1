"""What the variant `cuda_wgmma` would launch: compiled for Hopper, the only one that has its
instructions, and within its limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from nvfp4_wgmma_cases import EVERY, Kernel

from gristmill.errors import CompilerUnavailable, DriverError
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.ops.nvfp4_linear.cases import forward_example
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.ops.nvfp4_linear.wgmma import Wgmma
from gristmill.ops.nvfp4_linear.wgmma_configs import Cut, WgmmaConfig, cut
from gristmill.select.device import KNOWN
from gristmill.select.problem import CANONICAL_ROWS, Problem

ARCH = "sm_90a"
SOURCE = Path(str(resources.files("gristmill"))) / "kernels" / "cuda" / "nvfp4_wgmma.cu"
REGISTERS_PER_SM, THREADS_PER_SM = 65536, 2048
REGISTER_GRANULE = 8
TOKENS = (1, 8, 16, 17, 32, 48, 64, 65, 100, 128, 200, 256, 512, 1024, 4096)
LAYERS = (
    *((57344, 8192), (8192, 8192), (4096, 4096), (8192, 28672)),
    *((2112, 7168), (24576, 1536), (16, 16), (200, 1040)),
)


def _problem(tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    example = forward_example((1, 64, 64), dtype, "cpu", ARCH)
    problem = forward_problem(KNOWN[ARCH], *example)
    return replace(problem, rows=tokens, dims=(("N", rows), ("K", columns)))


def _cut(problem: Problem, config: WgmmaConfig) -> Cut:
    return cut(config, problem.rows, problem.dim("N"), problem.dim("K"), problem.device)


def _launches(most: int | None, dtype: torch.dtype) -> Iterator[tuple[Problem, WgmmaConfig]]:
    """The first `most` configs of each problem, of those that give different kernels."""
    seen = set()
    for rows, columns in LAYERS:
        for tokens in TOKENS:
            problem = _problem(tokens, rows, columns, dtype)
            assert Wgmma().supports(problem) is None
            for config in Wgmma().configs(problem)[:most]:
                program = Wgmma().program(problem, config)
                if program not in seen:
                    seen.add(program)
                    yield problem, config


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _registers_after(groups: int) -> int:
    """What the threads hold together once the producer has given and the others have taken."""
    text = SOURCE.read_text()
    (given,) = re.findall(r"lower_registers<(\d+)>", text)
    (choice,) = re.findall(r"raise_registers<(.*)>\(\)", text)
    few, rest = re.fullmatch(r"GROUPS < 3 \? (\d+) : (\d+)", choice).groups()  # type: ignore[union-attr]
    return 128 * int(given) + 128 * groups * int(few if groups < 3 else rest)


def _excess(program: Program, threads: int, blocks: int, groups: int, tokens: int) -> str | None:
    binary = compile_program(program, ARCH, verbose=True)
    used = resource_usage(binary)[binary.lowered[program.names[0]]]
    assert used.spill_bytes is not None, "the assembler's report does not name the kernel"
    if used.spill_bytes or used.stack_bytes:
        return f"{used.spill_bytes} bytes spilled, {used.stack_bytes} of stack"
    granted = -(-used.registers // REGISTER_GRANULE) * REGISTER_GRANULE * threads
    if granted * blocks > REGISTERS_PER_SM:
        return f"{used.registers} registers in each of {blocks} times {threads} threads"
    if tokens > 128 and _registers_after(groups) > granted:
        return "takes registers that nobody gives: it would wait for ever"
    return "serialized" if "serialized" in binary.log else None


def _excesses(most: int | None, dtype: torch.dtype) -> list[str]:
    found = []
    for problem, config in _launches(most, dtype):
        whole, program = _cut(problem, config), Wgmma().program(problem, config)
        assert whole.blocks * whole.threads <= THREADS_PER_SM
        reason = _excess(program, whole.threads, whole.blocks, whole.groups, whole.tokens)
        if reason is not None:
            found.append(f"{program.names[0]}: {reason}")
    return found


@pytest.mark.usefixtures("compiler")
def test_what_runs_untuned_is_within_limits() -> None:
    """No spills, and matrix instructions that overlap."""
    assert not _excesses(1, torch.bfloat16)


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_timed_is_within_limits(dtype: torch.dtype) -> None:
    """The assembler may put matrix instructions behind each other: a timing will tell."""
    assert not [one for one in _excesses(None, dtype) if not one.endswith("serialized")]


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kernel", EVERY, ids=str)
def test_every_kind_is_within_limits(kernel: Kernel) -> None:
    reason = _excess(kernel.program, kernel.threads, 1, kernel.groups, kernel.tokens)
    assert reason is None


@pytest.mark.parametrize("rows", [16, 64, 80, 1040, 57344])
@pytest.mark.parametrize("columns", [16, 64, 80, 1040, 28672])
def test_every_problem_has_a_config(rows: int, columns: int) -> None:
    for tokens in (*TOKENS, 70000):
        problem = _problem(tokens, rows, columns)
        configs = Wgmma().configs(problem)
        assert Wgmma().config(problem) == configs[0]
        assert len(set(configs)) == len(configs)
        for config in configs:
            whole = _cut(problem, config)
            assert whole.reason is None
            assert whole.shared <= problem.device.shared_per_block


@pytest.mark.parametrize("kernel", EVERY, ids=str)
def test_the_host_gives_what_the_kernel_needs(kernel: Kernel) -> None:
    """Which is what runs in test_emulated_nvfp4_wgmma.py, and no byte less would."""
    whole = cut(kernel.config, kernel.tokens, 4096, 4096, KNOWN[ARCH])
    assert (whole.tokens, whole.depth, whole.stages) == (kernel.tokens, kernel.depth, kernel.stages)
    assert whole.shared == kernel.shared
    assert whole.threads == kernel.threads
    assert whole.reason is None


def test_a_config_for_other_rows_has_a_launch() -> None:
    """Where results must not depend on the batch, one config serves any number of tokens."""
    for rows, columns in LAYERS:
        for config in Wgmma().configs(_problem(CANONICAL_ROWS, rows, columns)):
            for tokens in (1, 8, 9, 16, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 5000):
                whole = _cut(_problem(tokens, rows, columns), config)
                assert whole.reason is None, (tokens, config)
                assert whole.tokens >= min(tokens, config.tokens)
                assert whole.depth % config.k_groups == 0
                assert whole.stages >= 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (WgmmaConfig(256, 4, 1, 1, 2), "4 warpgroups with tiles of 256 tokens .* registers"),
        (WgmmaConfig(64, 1, 1, 1, 2, split=8), "2 chunks of columns cannot be split in 8"),
        (WgmmaConfig(256, 2, 1, 1, 5), "bytes of shared memory, and a block has 65536"),
    ],
)
def test_a_config_without_a_launch_is_an_error_of_bind_alone(
    config: WgmmaConfig, reason: str
) -> None:
    """Which lets another variant stand in."""
    problem = _problem(300, 64, 80)
    small = replace(problem.device, shared_per_block=65536)
    problem = replace(problem, device=small) if "65536" in reason else problem
    assert Wgmma().source_hash(problem, config)
    with pytest.raises(DriverError, match=f"cuda_wgmma: no launch by .*{reason}"):
        Wgmma().bind(problem, config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flags": ()}, "layout 'fragments'"),
        ({"dtypes": (("x", "float32"), ("out", "bfloat16"))}, "x of bf16 or fp16"),
        ({"dtypes": (("x", "bfloat16"), ("out", "float64"))}, "gives fp32, bf16 or fp16"),
        ({"rows": 0}, "nothing to compute"),
        ({"rows": 2**31}, "2**31 elements"),
        ({"dims": (("N", 2**31), ("K", 4096))}, "2**31 elements"),
        ({"rows": 2**30, "dims": (("N", 2**12), ("K", 64))}, "more than a grid has"),
        ({"device": KNOWN["sm_80"]}, "sm_90a alone"),
        ({"device": KNOWN["sm_100a"]}, "sm_90a alone"),
    ],
)
def test_what_it_does_not_do(change: dict[str, object], reason: str) -> None:
    problem = _problem(8, 4096, 4096)
    assert Wgmma().supports(problem) is None
    assert reason in (Wgmma().supports(replace(problem, **change)) or "")  # type: ignore[arg-type]


def test_what_it_does_not_do_with_other_tensors() -> None:
    problem = _problem(8, 4096, 4096)
    for change, reason in (
        ({"weight_packed": False}, "dense and aligned"),
        ({"bias": torch.float64}, "bias of fp32, bf16 or fp16"),
    ):
        other = replace(problem, layout=replace(problem.layout, **change))
        assert reason in (Wgmma().supports(other) or "")
