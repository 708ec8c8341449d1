"""The kernels around NVFP4 products, compiled for every architecture: no spills, no stack."""

from __future__ import annotations

import os

import pytest
import torch
from architectures import EACH

from gristmill.errors import CompilerUnavailable
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import Resources, resource_usage
from gristmill.ops.nvfp4_linear import dequantized, finish, quantizers

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
REGISTERS = 65536  # of a multiprocessor
# Threads that a multiprocessor must hold for memory to be busy: with 96 bytes or more under way in
# each 72 KB are, of which an H200 needs about 26.
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
    whole = Program(source, tuple(name for program in programs for name in program.names))
    binary = compile_program(whole, arch, verbose=True)
    usage = resource_usage(binary)
    return {name: usage[binary.lowered[name]] for name in whole.names}


def _check(used: Resources, threads: int, parameters: int) -> None:
    assert used.spill_bytes == 0
    assert used.stack_bytes == 0
    granted = -(-used.registers // 8) * 8
    assert REGISTERS // (granted * threads) * threads >= RESIDENT
    assert 0 <= used.parameter_bytes - parameters < 16


@pytest.mark.parametrize("arch", EACH)
def test_dequantize(arch: str) -> None:
    programs = [dequantized.dequantize_program(dtype) for dtype in dequantized.TYPES]
    programs += [dequantized.dequantize_program(dtype, factor=True) for dtype in FLOATS]
    found = _compiled(programs, arch)
    assert len(found) == 7
    for used in found.values():
        _check(used, dequantized.THREADS, dequantized.PARAMS.size)


@pytest.mark.parametrize("arch", EACH)
@pytest.mark.parametrize("kind", quantizers.KINDS)
def test_quantize_tokens(kind: str, arch: str) -> None:
    programs = [quantizers.quantizer_program(kind, dtype) for dtype in quantizers.TYPES]
    params = quantizers.FP8_PARAMS if kind == "fp8" else quantizers.NVFP4_PARAMS
    for used in _compiled(programs, arch).values():
        _check(used, quantizers.THREADS, params.size)


@pytest.mark.parametrize("arch", EACH)
def test_finish(arch: str) -> None:
    programs = [
        finish.finish_program(dtype, token=token, shift=shift)
        for dtype in finish.TYPES
        for token in (False, True)
        for shift in (False, True)
    ]
    for used in _compiled(programs, arch).values():
        _check(used, finish.THREADS, finish.PARAMS.size)
