"""The variant `cutedsl` of rms_norm without a GPU: compiled within limits, and run from its PTX."""

from __future__ import annotations

import functools
import re
from typing import Any

import exact
import pytest
import torch
from ptx_interpreter import Kernel, offsets_of

from gristmill.jit import cutedsl, resource_usage
from gristmill.jit.cutedsl import CuteProgram
from gristmill.ops import launch
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm.cutedsl import CUTEDSL, CuteConfig, launcher
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem

needs_dsl = pytest.mark.skipif(cutedsl.why_missing() is not None, reason="needs the CuTe DSL")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
REGISTERS_PER_SM = 65536
USUAL = (1e-6, 0.0, "once", None)


def problem_of(
    x: torch.Tensor, weight: torch.Tensor | None, *options: Any, arch: str = "sm_90a"
) -> Problem:
    return OPS["rms_norm"].problem(x, weight, *(options or USUAL), device=KNOWN[arch])


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def ptx_of(program: CuteProgram, arch: str = "sm_90a") -> str:
    function = program.imported()
    return cutedsl.compiled(function, cutedsl._arguments(program, function), arch)[1]


# --- compiled

# x, weight, result, columns
COMPILED = [
    (BF16, BF16, None, 128),
    (BF16, BF16, None, 4096),
    (BF16, BF16, None, 32768),
    (BF16, F32, F32, 32768),
    (F32, F32, None, 32768),
    (F32, BF16, BF16, 32768),
    (F16, None, None, 5120),
    (BF16, BF16, None, 16383),
    (BF16, BF16, None, 32766),
]


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("x", "weight", "out", "columns"), COMPILED)
def test_compiled_within_limits(
    x: torch.dtype, weight: torch.dtype | None, out: torch.dtype | None, columns: int, arch: str
) -> None:
    factor = None if weight is None else meta(columns, dtype=weight)
    problem = problem_of(meta(64, columns, dtype=x), factor, 1e-6, 0.0, "once", out, arch=arch)
    assert CUTEDSL.supports(problem) is None
    config = CUTEDSL.config(problem)
    (program,) = CUTEDSL.programs(problem, config)
    binary = cutedsl.compile_program(program, arch)
    (usage,) = resource_usage(binary).values()
    assert usage.stack_bytes == 0, usage
    assert usage.registers * config.threads <= REGISTERS_PER_SM, usage
    assert usage.parameter_bytes == program.parameters().size
    # On sm_90 and up 1,024 bytes are the system's.
    assert usage.shared_bytes <= 1024 + 4 * 32


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_ptx_has_wide_accesses_and_waits(arch: str) -> None:
    problem = problem_of(meta(64, 4096), meta(4096), arch=arch)
    (program,) = CUTEDSL.programs(problem, CuteConfig(256, 256, 2))
    text = ptx_of(program, arch)
    assert f".target {arch}" in text
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == 4  # 2 of x, 2 of the weight
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == 2
    assert not re.findall(r"(?:ld|st)\.global\S*\.b(?:8|16|32|64)\s+[%\[](?!.*\{)", text)
    assert ".local" not in text
    # Nothing is read before the kernel before it is done.
    assert text.index("griddepcontrol.wait") < text.index("ld.global")
    assert Kernel(text).parameters == offsets_of(program.parameters())


@needs_dsl
@pytest.mark.parametrize(("shift", "width"), [(0, 16), (4, 8), (2, 4), (1, 2)])
def test_accesses_are_as_wide_as_the_rows_allow(shift: int, width: int) -> None:
    x = aligned(60, 1024, dtype=BF16, shift=shift)
    (program,) = CUTEDSL.programs(problem_of(x, None), CUTEDSL.config(problem_of(x, None)))
    loads = re.findall(r"ld\.global\.(?:v(\d)\.)?b(\d+)", ptx_of(program))
    assert loads
    assert {int(count or 1) * int(bits) // 8 for count, bits in loads} == {width}


def test_few_kernels_serve_all_lengths() -> None:
    for dtype, most in ((BF16, 40), (F32, 40)):
        programs = set()
        for columns in (*range(8, 2048, 8), *range(2048, 32769, 64)):
            problem = problem_of(meta(64, columns, dtype=dtype), meta(columns, dtype=dtype))
            assert CUTEDSL.supports(problem) in (None, cutedsl.why_missing())
            programs.update(CUTEDSL.programs(problem, CUTEDSL.config(problem)))
            more = problem_of(meta(9999, columns, dtype=dtype), meta(columns, dtype=dtype))
            assert CUTEDSL.config(more) == CUTEDSL.config(problem)
        assert len(programs) <= most


def test_every_launch_holds_its_row() -> None:
    for columns in (1, 2, 3, 7, 31, 33, 64, 129, 520, 1000, 4095, 5120, 16384, 16383, 32766, 32768):
        for dtype in (BF16, F32):
            problem = problem_of(meta(64, columns, dtype=dtype), None)
            vectors, vector = problem.layout.layout.vectors, problem.layout.layout.vector
            for config in CUTEDSL.configs(problem):
                assert config.lanes * config.items >= vectors, (columns, config)
                assert config.items * vector <= 32
                assert config.threads % 32 == 0
                assert 32 <= config.threads <= 1024
                within = config.lanes in (4, 8, 16, 32) and config.threads == 128
                assert within or config.lanes == config.threads


def test_reasons() -> None:
    ampere = problem_of(meta(4, 128), None, arch="sm_80")
    assert CUTEDSL.supports(ampere) == "needs compute capability 9.0 or later, not sm_80"
    wide = problem_of(meta(4, 128, dtype=F64), None)
    assert CUTEDSL.supports(wide) == "computes in fp32: x is float64, out is float64"
    for columns in (65536, 32769, 16385):
        reason = CUTEDSL.supports(problem_of(meta(4, columns), None))
        assert reason is not None
        assert reason.startswith(f"rows of {columns} columns, in vectors of ")
    many = CUTEDSL.supports(problem_of(meta(1, 128).expand(2**31, 128), None))
    assert many == f"{2**31} rows are more than a grid has"
    cpu = OPS["rms_norm"].problem(torch.empty(4, 128), None, *USUAL)
    assert CUTEDSL.supports(cpu) == "needs a CUDA device, not cpu"


# --- run from the PTX


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch):
    """`run(x, weight, y, config, *options)`: the variant's own launch, by the interpreter."""
    memory: list[torch.Tensor | None] = []

    class Interpreted:
        def __init__(self, program: CuteProgram, name: str, device_index: int) -> None:
            self._program, self._kernel = program, Kernel(ptx_of(program))
            assert self._kernel.parameters == offsets_of(program.parameters())

        def prepare_separate(self, *, grid: int, params: Any, dependent: bool) -> Any:
            assert dependent

            def start(stream: int, *values: Any) -> None:
                packed = params.pack(*values)
                self._kernel.run(grid, self._program.threads, packed, memory)

            return start

    monkeypatch.setattr(launch, "load", Interpreted)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)

    def run(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        y: torch.Tensor,
        config: CuteConfig | None,
        options: tuple[Any, ...],
    ) -> None:
        problem = problem_of(x, weight, *options)
        memory[:] = [x, weight, y]
        go = launcher(problem, config or CUTEDSL.config(problem))
        go(x, None, weight, None, y, None, options[0], options[1])

    return run


def aligned(*shape: int, dtype: torch.dtype, seed: int = 0, shift: int = 0) -> torch.Tensor:
    """Random numbers whose first element is `shift` elements beyond a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    memory = torch.empty(count + 64, dtype=dtype)
    start = -memory.data_ptr() % 16 // dtype.itemsize + shift
    made = memory[start : start + count].view(shape)
    return made.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    options: tuple[Any, ...],
) -> None:
    eps, offset, casting, _ = options
    normalised = product = F32
    if casting == "llama":
        normalised = x.dtype
        product = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    allowed = exact.forward(
        x, weight, eps, offset, normalised=normalised, product=product, roundings=24.0
    )
    allowed.check(y, "y")


# rows, columns, x, weight, result, weight_offset, casting, launch
RUNS = [
    (3, 4096, BF16, BF16, None, 0.0, "once", None),
    (2, 1, BF16, BF16, None, 0.0, "once", None),
    (50, 7, F32, BF16, F16, 1.0, "once", None),
    (11, 128, F16, None, None, 0.0, "once", None),
    (5, 520, BF16, F32, F32, 1.0, "llama", None),
    (5, 520, BF16, BF16, None, 1.0, "llama", CuteConfig(64, 64, 2)),
    (5, 520, F32, F32, None, 0.5, "once", CuteConfig(128, 32, 8)),
    (5, 516, BF16, None, BF16, 0.0, "llama", CuteConfig(64, 64, 4)),
    (2, 1023, BF16, F16, None, 0.0, "once", None),
    (2, 5120, F32, F32, None, 0.0, "once", None),
    (1, 32768, BF16, BF16, None, 0.0, "once", None),
]


@needs_dsl
@pytest.mark.parametrize(
    ("rows", "columns", "x", "weight", "out", "offset", "casting", "config"), RUNS
)
def test_values(on_cpu, rows, columns, x, weight, out, offset, casting, config) -> None:
    options = (1e-5, offset, casting, out)
    inputs = aligned(rows, columns, dtype=x)
    factor = None if weight is None else aligned(columns, dtype=weight, seed=1)
    room = aligned(rows + 3, columns, dtype=out or x)
    room.fill_(7.0)
    on_cpu(inputs, factor, room[:rows], config, options)
    check(inputs, factor, room[:rows], options)
    assert bool((room[rows:] == 7.0).all())


@needs_dsl
def test_values_of_rows_that_lie_elsewhere(on_cpu) -> None:
    weight = aligned(256, dtype=BF16, seed=1)
    lying = {
        "sliced": aligned(6, 512, dtype=BF16)[:, 256:],
        "odd stride": aligned(6, 257, dtype=BF16)[:, :256],
        "unaligned": aligned(6, 256, dtype=BF16, shift=3),
        "nested": aligned(2, 3, 256, dtype=BF16).transpose(0, 1),
        "expanded": aligned(1, 256, dtype=BF16).expand(6, 256),
    }
    for x in lying.values():
        y = torch.empty_like(x)
        on_cpu(x, weight, y, None, USUAL)
        check(x, weight, y, USUAL)


@needs_dsl
def test_the_interpreter_notices(on_cpu) -> None:
    """What it is for: an address outside of the tensors, or one that is not aligned."""
    x, y = aligned(4, 256, dtype=BF16), aligned(4, 256, dtype=BF16)
    (program,) = CUTEDSL.programs(problem_of(x, None), CUTEDSL.config(problem_of(x, None)))
    kernel, params = Kernel(ptx_of(program)), program.parameters()

    def run(first: int, rows: int) -> None:
        numbers = (256, 0, 256, 0, rows, 1, 256, 1 / 256, 1e-6, 0.0)
        kernel.run(1, program.threads, params.pack(first, y.data_ptr(), *numbers), [x, y])

    run(x.data_ptr(), 4)
    check(x, None, y, USUAL)
    with pytest.raises(AssertionError, match="outside of all tensors"):
        run(0x1000, 4)
    with pytest.raises(AssertionError, match="is not aligned"):
        run(x.data_ptr() + 2, 3)
