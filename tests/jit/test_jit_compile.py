"""NVRTC: what it makes, what its errors say, what its kernels use. No GPU is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from jit_helpers import ARCH, SOURCES

from gristmill.errors import ArgumentError, CompileError, CompilerUnavailable
from gristmill.jit import nvrtc
from gristmill.jit.nvrtc import Binary, compile_program
from gristmill.jit.program import Program
from gristmill.jit.resources import resource_usage

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_several_kernels_from_one_program(arch: str) -> None:
    program = Program("probe.cu", ("fill<2>", "fill<3>", "meet"), root=SOURCES)
    binary = compile_program(program, arch)
    assert binary.cubin.startswith(b"\x7fELF")
    assert set(binary.lowered) == set(program.names)
    assert len(set(binary.lowered.values())) == 3
    for symbol in binary.lowered.values():
        assert symbol.encode() in binary.cubin
    # Only what was asked for is there (templates), and what is no template.
    assert set(binary.lowered.values()) <= set(resource_usage(binary))
    assert binary.compiler.startswith("nvrtc 1")
    assert binary.headers == ""


def test_a_compile_is_reproducible(tiny) -> None:
    assert compile_program(tiny, ARCH).cubin == compile_program(tiny, ARCH).cubin


def test_options_reach_the_compiler(make_program) -> None:
    text = "#ifndef WANTED\n#error no\n#endif\n"
    with pytest.raises(CompileError):
        compile_program(make_program(a__cu=text), ARCH)
    compile_program(make_program(options=("-DWANTED=1",), a__cu=text), ARCH)


def test_cuda_headers_are_found(make_program) -> None:
    if nvrtc.include_dir() is None:
        pytest.skip("no CUDA headers here")
    text = "#include <cuda_fp8.h>\n__global__ void k(__nv_fp8_e4m3* x) { *x = __nv_fp8_e4m3(1.f); }"
    binary = compile_program(make_program(("k",), a__cu=text), ARCH)
    assert binary.headers.startswith("cuda 1")


def test_cuda_headers_that_are_not_there(make_program, monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "include_dir", lambda: None)
    program = make_program(a__cu="#include <cuda_fp8.h>\n")
    with pytest.raises(CompilerUnavailable, match=r'pip install "gristmill\[nvrtc\]"'):
        compile_program(program, ARCH)


def test_an_error_shows_the_line(make_program) -> None:
    program = make_program(
        a__cu='#include "wrong.cuh"\n', wrong__cuh="\n\n__device__ int f() { return 1 +; }\n"
    )
    with pytest.raises(CompileError) as caught:
        compile_program(program, ARCH)
    error = caught.value
    assert error.source_line == "wrong.cuh:3: __device__ int f() { return 1 +; }"
    assert error.source_line in str(error)
    assert error.program == "a.cu"
    assert "wrong.cuh(3): error: expected an expression" in error.log
    assert "a.cu does not compile for sm_90a" in str(error)


def test_an_error_inside_a_template_shows_the_line(make_program) -> None:
    text = "template <class T>\n__global__ void k(T* p) {\n    *p = T::missing;\n}\n"
    with pytest.raises(CompileError) as caught:
        compile_program(make_program(("k<float>",), a__cu=text), ARCH)
    assert caught.value.source_line == "a.cu:3: *p = T::missing;"


def test_a_wrong_name_expression_is_shown(make_program) -> None:
    with pytest.raises(CompileError) as caught:
        compile_program(make_program(("nobody<float>",), a__cu="\n"), ARCH)
    assert "nobody<float>" in caught.value.source_line
    assert "nobody" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "arch", "word"),
    [(("--no-such-option",), ARCH, "--no-such-option"), ((), "sm_7", "gpu-architecture")],
)
def test_wrong_options_are_compile_errors(make_program, options, arch, word) -> None:
    with pytest.raises(CompileError, match=word) as caught:
        compile_program(make_program(options=options, a__cu="\n"), arch)
    assert caught.value.source_line == ""


def test_resources_agree_with_the_assembler() -> None:
    program = Program("spill.cu", ("spilling",), root=SOURCES)
    binary = compile_program(program, "sm_80", verbose=True)
    (usage,) = resource_usage(binary).values()
    assert f"Used {usage.registers} registers" in binary.log
    assert f"{usage.stack_bytes} bytes stack frame" in binary.log
    assert usage.registers == 32
    assert usage.stack_bytes > 0
    assert usage.spill_bytes is not None
    assert usage.spill_bytes >= usage.stack_bytes
    assert usage.shared_bytes == 33 * 4
    assert usage.parameter_bytes == 16


def test_spills_are_unknown_unless_asked_for() -> None:
    program = Program("spill.cu", ("spilling",), root=SOURCES)
    (usage,) = resource_usage(compile_program(program, ARCH)).values()
    assert usage.spill_bytes is None


def test_parameter_size_counts_the_padding_of_c() -> None:
    program = Program("probe.cu", ("fill<2>",), root=SOURCES)
    binary = compile_program(program, ARCH)
    assert resource_usage(binary)[binary.lowered["fill<2>"]].parameter_bytes == 32


def test_resources_of_something_else() -> None:
    with pytest.raises(ArgumentError, match="ELF"):
        resource_usage(Binary(b"not a cubin", {}, "", "nvrtc 13.0"))


@pytest.fixture
def no_compiler(monkeypatch):
    nvrtc._loaded.cache_clear()
    yield monkeypatch
    nvrtc._loaded.cache_clear()


def test_no_bindings(no_compiler, tiny) -> None:
    no_compiler.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(CompilerUnavailable, match=r'pip install "gristmill\[nvrtc\]"') as caught:
        compile_program(tiny, ARCH)
    assert "\n" not in str(caught.value)


def _fake_nvrtc(version) -> SimpleNamespace:
    return SimpleNamespace(nvrtcVersion=version, nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0))


def test_no_library(no_compiler, tiny) -> None:
    def missing():
        raise RuntimeError("Failed to find\n  libnvrtc.so.13")

    no_compiler.setitem(sys.modules, "cuda.bindings.nvrtc", _fake_nvrtc(missing))
    with pytest.raises(CompilerUnavailable, match=r"libnvrtc.*pip install") as caught:
        compile_program(tiny, ARCH)
    assert "\n" not in str(caught.value)


def test_cuda_12(no_compiler, tiny) -> None:
    no_compiler.setitem(sys.modules, "cuda.bindings.nvrtc", _fake_nvrtc(lambda: (0, 12, 8)))
    with pytest.raises(CompilerUnavailable, match=r"NVRTC 12\.8 is older than 13\.0.*pip install"):
        compile_program(tiny, ARCH)
