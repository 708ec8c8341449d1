"""The router's kernels, compiled for every architecture: no spills, no stack, warps enough."""

from __future__ import annotations

import os

import pytest
from architectures import EACH

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.ops.op import Op
from gristmill.ops.topk_router import TOPK_ROUTER, TOPK_ROUTER_BACKWARD
from gristmill.ops.topk_router.cuda import BACKWARD_PARAMS, LANES, MOST_WARPS, PARAMS, RouterConfig
from gristmill.select.device import KNOWN

REGISTERS = 65536  # of a multiprocessor
NAMES_PER_PROGRAM = 16


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _names(op: Op, arch: str) -> list[str]:
    """Every kernel that the cases ask for; a sample of them where nothing was tuned."""
    kernel = next(one for one in op.variants if one.name == "cuda_warp")
    names = {}
    for case in op.cases():
        problem = op.problem(*case.make("cpu", 0), device=KNOWN[arch])
        if kernel.supports(problem) is None:
            (program,) = kernel.programs(problem, RouterConfig(1))
            assert isinstance(program, Program)
            names[program.names[0]] = program.source
    assert set(names.values()) == {"topk_router.cu"}
    assert len(names) > 20
    return sorted(names)[:: 1 if arch == "sm_90a" else 4]


@pytest.mark.parametrize("arch", EACH)
@pytest.mark.parametrize("op", [TOPK_ROUTER, TOPK_ROUTER_BACKWARD], ids=lambda op: op.name)
def test_within_limits(op: Op, arch: str) -> None:
    names = _names(op, arch)
    params = PARAMS if op is TOPK_ROUTER else BACKWARD_PARAMS
    for first in range(0, len(names), NAMES_PER_PROGRAM):
        program = Program("topk_router.cu", tuple(names[first : first + NAMES_PER_PROGRAM]))
        binary = compile_program(program, arch, verbose=True)
        usage = resource_usage(binary)
        for name in program.names:
            used = usage[binary.lowered[name]]
            assert used.spill_bytes == 0, name
            assert used.stack_bytes == 0, name
            assert used.shared_bytes <= 1024, name  # what the system keeps
            granted = -(-used.registers // 8) * 8
            assert granted * MOST_WARPS * LANES <= REGISTERS, name
            assert 0 <= used.parameter_bytes - params.size < 16, name
