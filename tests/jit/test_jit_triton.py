"""Triton as a compiler: its programs, its errors, and the launch of what it makes.

What is the same for the CuTe DSL is in test_jit_python_programs.py. Nothing here needs a GPU;
scripts that must not share a process with others run in one of their own.
"""

from __future__ import annotations

import struct

import pytest
from jit_helpers import ARCH, SOURCES, WITH_FAKE_DRIVER, WITH_PROGRAM, run_python
from jit_helpers import TRITON_SCALE as SCALE

from gristmill.errors import CompileError, CompilerUnavailable
from gristmill.jit import TritonProgram, cache, counters, load_or_compile, resource_usage
from gristmill.jit import triton as compiler
from gristmill.jit.compilers import to_text

pytest.importorskip("triton", reason="needs Triton")


def test_what_a_compile_gives() -> None:
    binary = compiler.compile_program(SCALE, ARCH)
    assert binary.cubin[:4] == b"\x7fELF"
    assert binary.compiler == compiler.compiler_version() == compiler.installed_version()
    assert binary.lowered == {"scale": "scale"}
    assert binary.facts == {
        "shared": 0,
        "threads": 64,
        "scratch_bytes": 0,
        "scratch_align": 1,
        "profile_bytes": 0,
    }
    (usage,) = resource_usage(binary).values()
    assert usage.stack_bytes == 0
    assert usage.registers > 4
    # x, count, factor, y, stride and two pointers, each at a multiple of its size.
    assert usage.parameter_bytes == SCALE.parameters().size == struct.calcsize("QifQqQQ") == 48


def test_scratch_memory_is_told() -> None:
    program = TritonProgram(
        "scale.py",
        "described",
        (("x", "*bf16"), ("y", "*bf16"), ("rows", "i32"), ("columns", "i32")),
        (("BLOCK", 64),),
        (("x", 16), ("y", 16), ("columns", 16)),
        root=SOURCES,
    )
    facts = compiler.compile_program(program, ARCH).facts
    assert facts["scratch_bytes"] == 256  # two descriptors of 128 bytes
    assert facts["scratch_align"] == 128
    assert facts["shared"] >= 64 * 64 * 2


def test_the_texts_of_the_package_are_found() -> None:
    program = TritonProgram("matmul.py", "tiles", ())
    assert list(program.texts()) == ["matmul.py", "epilogue.py"]


def test_another_version_of_triton_compiles_again(home, monkeypatch) -> None:
    load_or_compile(SCALE, ARCH)
    cache.forget()
    monkeypatch.setattr(compiler, "installed_version", lambda: "triton 3.99.0")
    monkeypatch.setattr(compiler, "compiler_version", lambda: "triton 3.99.0")
    load_or_compile(SCALE, ARCH)
    assert counters.snapshot()["compiles"] == 2


def test_triton_leaves_no_folder_of_its_own(home, tmp_path) -> None:
    house, temporary = tmp_path / "house", tmp_path / "temporary"
    house.mkdir()
    temporary.mkdir()
    code = WITH_PROGRAM + f"load_or_compile(program, {ARCH!r})"
    environment = {"HOME": str(house), "TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"}
    run_python(code, to_text(SCALE), GRISTMILL_CACHE_DIR=str(home.path), **environment)
    assert [file.suffix for file in home.files("*")] == [".kernel"]
    assert not list(house.rglob("*"))
    assert not list(temporary.rglob("*"))


def test_without_triton(home) -> None:
    code = (
        WITH_PROGRAM
        + f"""
sys.modules["triton"] = None
for _ in range(2):
    try:
        load_or_compile(program, {ARCH!r})
    except CompilerUnavailable as error:
        print(error)
"""
    )
    lines = run_python(code, to_text(SCALE), GRISTMILL_CACHE_DIR=str(home.path)).splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("Triton cannot be imported (")
    assert lines[0].endswith('; install it with: pip install "gristmill[triton]"')
    assert not home.path.exists()


def test_a_triton_that_is_too_old(monkeypatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.5.1")
    compiler._triton.cache_clear()
    with pytest.raises(CompilerUnavailable, match=r"Triton 3.5.1 is older than 3.6, .*pip install"):
        compiler.compile_program(SCALE, ARCH)
    monkeypatch.undo()
    assert compiler.compiler_version()


def test_in_the_interpreter_nothing_is_compiled(home) -> None:
    code = (
        WITH_PROGRAM
        + f"""
try:
    load_or_compile(program, {ARCH!r})
except CompilerUnavailable as error:
    print(error)
"""
    )
    environment = {"GRISTMILL_CACHE_DIR": str(home.path), "TRITON_INTERPRET": "1"}
    assert "unset TRITON_INTERPRET" in run_python(code, to_text(SCALE), **environment)


def test_an_error_of_the_language_is_a_compile_error() -> None:
    program = TritonProgram("scale.py", "wrong", (("x", "*fp32"),), (("BLOCK", 32),), root=SOURCES)
    with pytest.raises(
        CompileError, match=r"scale.py \(wrong\) does not compile for sm_90a"
    ) as caught:
        compiler.compile_program(program, ARCH)
    error = caught.value
    assert "no_such_name" in error.log
    assert "is not defined" in error.log
    assert error.program == "scale.py"
    lines = (SOURCES / "scale.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "no_such_name" in line)
    assert error.source_line.startswith(f"scale.py:{number}: tl.store(x + at, no_such_name + at)")


def test_an_error_of_the_compiler_is_a_compile_error(monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(compiler, "_compile", broken)
    with pytest.raises(CompileError, match="PassManager::run failed") as caught:
        compiler.compile_program(SCALE, ARCH)
    assert caught.value.log == "RuntimeError: PassManager::run failed"


# Launches, against a driver that only keeps what it was given.

PROLOGUE = (
    WITH_PROGRAM
    + WITH_FAKE_DRIVER
    + """
def takes(*sizes):
    number("separate").value = len(sizes)
    (ctypes.c_int * 16).in_dll(fake, "separate_sizes")[: len(sizes)] = sizes

SIZES = (8, 4, 4, 8, 8, 8, 8)
takes(*SIZES)
scale = kernel(program, "scale", 0)
PARAMS = program.parameters()
"""
)


@pytest.fixture
def run(fake_driver, home):
    def run(body: str) -> None:
        environment = {"LD_LIBRARY_PATH": str(fake_driver), "GRISTMILL_CACHE_DIR": str(home.path)}
        run_python(PROLOGUE + body, to_text(SCALE), **environment)

    return run


def test_a_launch_hands_over_each_parameter(run) -> None:
    run("""
launch = scale.prepare_separate(grid=7, params=PARAMS)
launch(0x7000, 11, -12, 1.5, 13, -(2**40), 14, 0)
assert (last.grid, last.block, last.shared, last.stream) == (7, 64, 0, 0x7000)
assert last.count == 0
# As the kernel sees them, without the padding between them.
assert bytes(last.params)[:48] == struct.pack("<QifQqQQ", 11, -12, 1.5, 13, -(2**40), 14, 0)
launch(0, 1, 2, 3.0, 4, 5, 6, 7)
assert bytes(last.params)[:48] == struct.pack("<QifQqQQ", 1, 2, 3.0, 4, 5, 6, 7)
assert number("launches").value == 2
scale.prepare_separate(grid=1, params=PARAMS, dependent=True)(0, 1, 2, 3.0, 4, 5, 6, 7)
assert list(attributes()) == [6] and attributes()[6][0] == 1
""")


def test_parameters_of_another_layout_are_refused(run) -> None:
    run("""
for sizes in (SIZES[:-1], (*SIZES, 8), (8, 8, *SIZES[2:])):
    takes(*sizes)
    with pytest.raises(CompileError, match="scale: the launch packs parameters at .* takes them"):
        scale.prepare_separate(grid=1, params=PARAMS)
""")


def test_errors_and_threads_without_a_context(run) -> None:
    run("""
launch = scale.prepare_separate(grid=3, params=PARAMS)
launch(0, 1, 2, 3.0, 4, 5, 6, 7)
number("next_result").value = 1
with pytest.raises(DriverError, match=r"launching scale as .*grid=3"):
    launch(0, 1, 2, 3.0, 4, 5, 6, 7)
with pytest.raises(struct.error):
    launch(0, 1, 2)
other = kernel(program, "scale", 1).prepare_separate(grid=1, params=PARAMS)
thread = threading.Thread(target=other, args=(0, 21, 22, 1.0, 23, 24, 25, 26))
thread.start()
thread.join()
assert number("launches").value == 2 and last.context == 0xC1
assert bytes(last.params)[:8] == struct.pack("<Q", 21)
""")


def test_threads_do_not_mix_their_values(run) -> None:
    run("""
launch = scale.prepare_separate(grid=1, params=PARAMS)

def work(value):
    for _ in range(3000):
        launch(value % 3, value, value, 0.0, 0, 0, 0, 0)

threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert (number("launches").value, number("mixed").value) == (12000, 0)
launch(0, 1, 2, 0.0, 0, 0, 0, 0)
assert number("mixed").value == 1  # so the fake does notice
""")
