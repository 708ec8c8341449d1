"""Every kernel that the variants ask for, compiled for every architecture, within its limits.

No GPU is needed: NVRTC compiles, and what a kernel uses is read from the result. A launch that
cannot fit, a spill, or a block that the registers do not allow would otherwise be seen first on
somebody's machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cross_entropy_calls import cross_entropy_calls
from softmax_calls import softmax_calls

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import Resources, resource_usage
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import TWICE, RowConfig
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ENTROPY_SOURCES = (
    "cross_entropy.cu",
    "cross_entropy_backward.cu",
    "cross_entropy_one_pass.cu",
)
SOURCES = ("norm.cu", "norm_backward.cu", "softmax.cu", "softmax_backward.cu", *ENTROPY_SOURCES)

# Columns: powers of two, what models have, and lengths that allow only narrow vectors.
SHORT_COLUMNS = (1, 64, 100, 127, 256, 257, 512, 768, 1022, 1024)
COLUMNS = (*SHORT_COLUMNS, 2048, 2880, 4096, 5120, 7168, 8192, 10001)
LONG_COLUMNS = (12288, 16384, 20480, 32768, 50000, 65536, 131072, 200000, 262144)
LONGEST = (16388, 32764, 262143, 524288, 2**22 + 1, 2**22 + 8, 2**30)
FEW_COLUMNS = (4096, 10001, 65536)
ROWS = (1, 64, 1024, 32768)

# x, its companion (residual, dy), weight, and how rows lie.
MIXES = {
    "bf16": (BF16, BF16, BF16, "dense"),
    "fp32": (F32, F32, F32, "dense"),
    "mixed": (BF16, F32, F16, "nested"),
}
MORE_MIXES = {
    "fp16": (F16, F16, F16, "dense"),
    "bf16, fp32 weight": (BF16, BF16, F32, "dense"),
    "fp32, bf16 weight": (F32, F32, BF16, "dense"),
    "fp32, bf16 companion": (F32, BF16, F32, "dense"),
    "bf16, no weight": (BF16, BF16, None, "dense"),
    "bf16, odd strides": (BF16, BF16, BF16, "odd stride"),
    "bf16, nested": (BF16, BF16, BF16, "nested"),
    "fp32, odd strides": (F32, F32, F32, "odd stride"),
}
Mix = tuple[torch.dtype, torch.dtype, "torch.dtype | None", str]
# Of a mix, rows, columns and a dtype of results: ops, and their arguments.
Calls = Callable[[Mix, int, int, "torch.dtype | None"], Iterator[tuple[str, tuple[Any, ...]]]]

# The rest (other mixes, sm_89, sm_103a, sm_120a, most lengths) is in the long test below.
TARGETS = {"sm_90a": FEW_COLUMNS[:2], "sm_80": FEW_COLUMNS[2:], "sm_100a": FEW_COLUMNS[:1]}

NAMES_PER_PROGRAM = 16
REGISTERS_PER_BLOCK = 65536
# Nothing may spill where rows are dense and aligned and nobody asked for another variant; elsewhere
# (odd strides, odd lengths, variants by request) a few words are no matter.
SPILL_LIMIT = 128
REGISTER_GRANULE = 8  # registers are given to the threads of a warp in steps of so many
MOST_ITEMS = 16  # loops over them are unrolled
RESERVED_SHARED = 1024  # of static shared memory, by the system, on sm_90 and up


@dataclass(frozen=True)
class Launch:
    """A launch that a variant would make, as data."""

    variant: RowVariant
    problem: Problem
    config: RowConfig
    preferred: bool  # what runs unless somebody asks for another variant

    def __str__(self) -> str:
        problem = self.problem
        size = f"{problem.rows}x{problem.dim('N')}"
        return f"{problem.op} {self.variant.name} {size} {self.config}"

    def program(self) -> Program:
        return self.variant.program(self.problem, self.config)

    def demand(self) -> tuple[bool, int]:
        return self.preferred, self.config.threads

    def misfit(self) -> str | None:
        """Why the device would refuse the launch, or compute only a part."""
        config, device = self.config, self.problem.device
        if not 32 <= config.threads <= 1024 or config.threads % 32:
            return f"{config.threads} threads"
        reach = config.items * (config.lanes if self.variant.scope == "WARP" else config.threads)
        vectors = self.problem.layout.layout.vectors
        if config.feed != TWICE and reach * config.cluster < vectors:
            return f"{reach * config.cluster} of {vectors} vectors have a thread"
        if self.preferred and config.items > MOST_ITEMS and config.feed != TWICE:
            return f"{config.items} vectors in each thread"
        shared = self.variant.shared_bytes(self.problem.layout, config)
        if shared > device.shared_per_block:
            return f"{shared} bytes of shared memory, of {device.shared_per_block}"
        if self.variant.scope == "CLUSTER" and config.cluster > 16:
            return f"a cluster of {config.cluster} blocks"
        return None


def _rows(shape: tuple[int, int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    rows, columns = shape
    if layout == "odd stride":
        return torch.empty(rows, columns + 1, dtype=dtype, device="meta")[:, :columns]
    if layout == "nested":
        return torch.empty(8, rows // 8, columns, dtype=dtype, device="meta").transpose(0, 1)
    return torch.empty(shape, dtype=dtype, device="meta")


def _calls(
    mix: Mix, rows: int, columns: int, out_dtype: torch.dtype | None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every op, or with `out_dtype` those that take one."""
    x_dtype, other_dtype, weight_dtype, layout = mix
    x = _rows((rows, columns), x_dtype, layout)
    other = _rows((rows, columns), other_dtype, layout)
    weight = None
    if weight_dtype is not None:
        weight = torch.empty(columns, dtype=weight_dtype, device="meta")
    bias = torch.empty(columns, dtype=weight_dtype or x_dtype, device="meta")
    yield "rms_norm", (x, weight, 1e-6, 0.0, "once", out_dtype)
    yield "add_rms_norm", (x, other, weight, 1e-6, 0.0, "once", out_dtype)
    yield "layer_norm", (x, weight, bias, 1e-5, 0.0, out_dtype)
    yield "add_layer_norm", (x, other, weight, bias, 1e-5, 0.0, out_dtype)
    if out_dtype is not None:
        return
    if x_dtype == other_dtype == weight_dtype == BF16:
        yield "rms_norm", (x, weight, 1e-6, 0.0, "llama", None)
    yield from softmax_calls(x, other, weight_dtype)
    yield from cross_entropy_calls(x, weight)
    yield "fused_add_rms_norm_", (x, other, weight, 1e-6)
    for dsum in (None, x):
        yield "rms_norm_backward", (other, x, weight, dsum, 1e-6, 0.0, True)
        yield "layer_norm_backward", (other, x, weight, dsum, 1e-5, 0.0, True, bias.dtype)


def _launches(
    arch: str,
    mix: Mix,
    all_columns: tuple[int, ...],
    out_dtype: torch.dtype | None = None,
    calls: Calls = _calls,
) -> Iterator[Launch]:
    for rows in ROWS if mix[3] != "nested" else ROWS[1:]:
        for columns in all_columns:
            for name, args in calls(mix, rows, columns, out_dtype):
                problem = OPS[name].problem(*args, device=KNOWN[arch]).asked()
                able = [one for one in OPS[name].variants if one.supports(problem) is None]
                first = next((one for one in able if one.declines(problem) is None), able[0])
                for variant in able:
                    if isinstance(variant, RowVariant):
                        config = variant.config(problem)
                        yield Launch(variant, problem, config, preferred=variant is first)


# A few mixes where the memory of a block differs; the rest takes long.
FITTED = [
    pytest.param(
        arch, mixes, marks=[pytest.mark.long] * (more or arch not in ("sm_80", "sm_90a", "sm_120a"))
    )
    for arch in KNOWN
    for more, mixes in enumerate((MIXES, MORE_MIXES))
]


@pytest.mark.parametrize(("arch", "mixes"), FITTED)
def test_every_launch_fits_the_device(arch: str, mixes: dict[str, Mix]) -> None:
    columns = tuple({*COLUMNS, *LONG_COLUMNS, *(2**k + 8 for k in range(4, 18)), *LONGEST})
    misfits = sorted(
        {
            f"{launch}: {reason}"
            for mix in mixes.values()
            for out_dtype in (None, BF16, F32)
            for launch in _launches(arch, mix, columns, out_dtype)
            if (reason := launch.misfit()) is not None
        }
    )
    assert not misfits, "\n".join([f"{len(misfits)} launches do not fit {arch}:", *misfits[:20]])


@pytest.mark.parametrize(
    ("columns", "forward", "backward"),
    [
        (256, "cuda_warp", "cuda_warp"),
        (257, "cuda_warp", "cuda_warp"),
        (320, "cuda_warp", "cuda_block"),
        (321, "cuda_warp", "cuda_block"),
        (513, "cuda_block", "cuda_block"),
        (1022, "cuda_warp", "cuda_block"),
        (1026, "cuda_block", "cuda_block"),
        (5003, "cuda_block", "cuda_cluster"),
        (12290, "cuda_block", "cuda_cluster"),
        (16386, "cuda_cluster", "cuda_cluster"),
        (65536, "cuda_cluster", "cuda_cluster"),
    ],
)
def test_short_vectors_count_by_what_they_hold(columns: int, forward: str, backward: str) -> None:
    """LayerNorm of odd lengths: a row of few bytes is short, however many vectors it has."""
    preferred = {
        launch.problem.op: launch.variant.name
        for launch in _launches("sm_90a", MIXES["bf16"], (columns,))
        if launch.preferred and launch.problem.rows == 32768
    }
    assert preferred["layer_norm"] == preferred["add_layer_norm"] == forward
    assert preferred["layer_norm_backward"] == backward


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _excess(launch: Launch, used: Resources) -> str | None:
    """What a compiled kernel uses too much of."""
    usual = launch.preferred and not {"narrow", "nested"} & set(launch.problem.flags)
    spilled = used.spill_bytes or 0
    if spilled > (0 if usual else SPILL_LIMIT) or used.stack_bytes > (0 if usual else SPILL_LIMIT):
        return f"{spilled} bytes spilled, {used.stack_bytes} of stack"
    granted = -(-used.registers // REGISTER_GRANULE) * REGISTER_GRANULE
    if granted * launch.config.threads > REGISTERS_PER_BLOCK:
        return f"{used.registers} registers in each of {launch.config.threads} threads"
    if used.shared_bytes > RESERVED_SHARED:
        return f"{used.shared_bytes} bytes of static shared memory"
    return None


def _check_compiled(
    arch: str, source: str, mix: Mix, columns: tuple[int, ...], calls: Calls = _calls
) -> None:
    wanted: dict[str, Launch] = {}
    for launch in _launches(arch, mix, columns, calls=calls):
        if launch.misfit() is not None:
            continue  # test_every_launch_fits_the_device tells
        program = launch.program()
        for name in program.names if program.source == source else ():
            # Of launches that share a kernel the one that asks most of it.
            if name not in wanted or wanted[name].demand() < launch.demand():
                wanted[name] = launch
    names = sorted(wanted)
    assert names
    excesses = []
    for first in range(0, len(names), NAMES_PER_PROGRAM):
        program = Program(source, tuple(names[first : first + NAMES_PER_PROGRAM]))
        binary = compile_program(program, arch, verbose=True)
        usage = resource_usage(binary)
        for name in program.names:
            used = usage[binary.lowered[name]]
            assert used.spill_bytes is not None, "the assembler's report does not name the kernel"
            if (reason := _excess(wanted[name], used)) is not None:
                excesses.append(f"{name}\n    for {wanted[name]}: {reason}")
    assert not excesses, "\n".join([f"{len(excesses)} of {len(names)} on {arch}:", *excesses[:20]])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_kernels_compile_within_limits(arch: str, source: str) -> None:
    """A sample, larger for the architecture that was tuned for.

    The rest is in the test below: a kernel takes 0.15 s, and there are 862 of sm_90a alone.
    """
    _check_compiled(arch, source, MIXES["bf16"], TARGETS[arch])


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mix", MIXES | MORE_MIXES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("arch", KNOWN)
def test_more_kernels_compile_within_limits(arch: str, source: str, mix: str) -> None:
    _check_compiled(arch, source, (MIXES | MORE_MIXES)[mix], (*COLUMNS, *LONG_COLUMNS))
