"""Routing and sums over experts, compiled for every architecture, and within its limits.

No GPU is needed: NVRTC compiles, and what a kernel uses is read from the result.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from architectures import EACH

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import Resources, resource_usage
from gristmill.ops.experts import combine, routing
from gristmill.ops.experts.combine import Combine
from gristmill.ops.experts.ids import IdFacts
from gristmill.ops.experts.routing import Routing
from gristmill.select.device import KNOWN

REGISTERS = 65536
INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Threads of sums that a multiprocessor must hold for memory to be busy.
RESIDENT = 768


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _compiled(programs: list[Program], arch: str) -> dict[str, Resources]:
    (source,) = {program.source for program in programs}
    names = dict.fromkeys(name for program in programs for name in program.names)
    whole = Program(source, tuple(names))
    binary = compile_program(whole, arch, verbose=True)
    usage = resource_usage(binary)
    return {name: usage[binary.lowered[name]] for name in whole.names}


def _facts() -> list[IdFacts]:
    maps = (None, *INTEGERS)
    return [
        IdFacts(dtype, 64, 8, (8, 1), mapped) for dtype, mapped in itertools.product(INTEGERS, maps)
    ]


@pytest.mark.parametrize("arch", EACH)
def test_routing(arch: str) -> None:
    facts = _facts()
    if arch == "sm_90a":
        calls = [*((one, 16) for one in facts), *((facts[0], access) for access in (8, 4, 2))]
    else:
        calls = [(facts[0], 16), (facts[5], 16), (facts[5], 2)]
    programs = [Routing(KNOWN[arch], one, 256, access=access).program() for one, access in calls]
    found = _compiled(programs, arch)
    assert len(found) == len(calls)
    for name, used in found.items():
        granted = -(-used.registers // 8) * 8
        assert granted * routing.MOST_THREADS <= REGISTERS, name
        # Rows that are no multiples of 16 bytes are rare: a few words are no matter.
        assert used.spill_bytes == 0 or not name.endswith(",16>"), name
        assert used.spill_bytes is not None
        assert used.spill_bytes <= 64, name
        assert 0 <= used.parameter_bytes - routing.PARAMS.size < 16, name


@pytest.mark.parametrize("arch", EACH)
def test_combine(arch: str) -> None:
    calls = [
        Combine(KNOWN[arch], facts, 256, 4096, partial, torch.bfloat16)
        for facts in (_facts() if arch == "sm_90a" else _facts()[::5])
        for partial in (torch.float32, torch.bfloat16)
    ]
    calls += [
        Combine(KNOWN[arch], _facts()[0], 256, hidden, partial, out, sorted=True, weights=weights)
        for partial, out, weights, hidden in (
            *((kind, kind, torch.float32, 4096) for kind in FLOATS),
            *((torch.bfloat16, torch.float32, weights, 4096) for weights in (None, *FLOATS)),
            *((kind, kind, kind, 7) for kind in FLOATS),
        )
    ]
    found = _compiled([one.program() for one in calls], arch)
    assert len(found) == len(calls)
    for name, used in found.items():
        granted = -(-used.registers // 8) * 8
        assert REGISTERS // (granted * combine.THREADS) * combine.THREADS >= RESIDENT, name
        assert (used.spill_bytes, used.stack_bytes) == (0, 0), name
        assert 0 <= used.parameter_bytes - combine.PARAMS.size < 16, name
