"""What stands between the products of dense experts, compiled for every architecture."""

from __future__ import annotations

import os

import pytest
from architectures import EACH

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.ops.moe import grouped

REGISTERS = 65536
RESIDENT = 1024  # threads that a multiprocessor must hold for memory to be busy


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", EACH)
def test_activation_and_shift(arch: str) -> None:
    types = tuple(grouped.TYPES.values())
    names = [
        f"moe_activate<{kind},{bias},{number}>"
        for kind in ("bf16", "f16")
        for bias in ("Absent", *types)
        for number in grouped.ACTIVATIONS.values()
    ]
    names += [f"moe_shift<bf16,{bias}>" for bias in types]
    binary = compile_program(Program(grouped.SOURCE, tuple(names)), arch, verbose=True)
    usage = resource_usage(binary)
    for name in names:
        used = usage[binary.lowered[name]]
        granted = -(-used.registers // 8) * 8
        assert REGISTERS // (granted * grouped.THREADS) * grouped.THREADS >= RESIDENT, name
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        assert 0 <= used.parameter_bytes - grouped.PARAMS.size < 16, name
