"""Triton as a compiler: programs, their cache, their errors, and the launch of what it makes.

Nothing here needs a GPU; scripts that must not share a process with others run in one of their own.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from jit_helpers import ARCH, SOURCES, run_python

from gristmill.errors import ArgumentError, CompileError, CompilerUnavailable, KernelNotCached
from gristmill.jit import Binary, TritonProgram, cache, counters, load_or_compile, resource_usage
from gristmill.jit import triton as compiler
from gristmill.jit.entry import key_in

pytest.importorskip("triton", reason="needs Triton")

SIGNATURE = (
    ("x", "*fp32"),
    ("count", "i32"),
    ("factor", "fp32"),
    ("y", "*fp32"),
    ("stride", "i64"),
)
SCALE = TritonProgram(
    "scale.py",
    "scale",
    SIGNATURE,
    (("absent", None), ("BLOCK", 128)),
    (("x", 16), ("y", 16)),
    warps=2,
    root=SOURCES,
)


@pytest.fixture
def copy(tmp_path):
    """A program over files of its own, which a test may change."""
    made = 0

    def copy(**changes: str) -> TritonProgram:
        nonlocal made
        made += 1
        root = tmp_path / f"triton{made}"
        shutil.copytree(SOURCES, root, ignore=shutil.ignore_patterns("*.cu*", "__pycache__"))
        for stem, text in changes.items():
            file = root / f"{stem}.py"
            file.write_text(file.read_text() + text)
        return dataclasses.replace(SCALE, root=root)

    return copy


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


def test_the_same_bytes_each_time(copy) -> None:
    first = compiler.compile_program(SCALE, ARCH)
    assert compiler.compile_program(SCALE, ARCH).cubin == first.cubin


def test_the_key_follows_everything_a_compile_depends_on(copy) -> None:
    others = [
        copy(scale="\n# changed\n"),
        copy(scale_part="\n# changed\n"),
        dataclasses.replace(SCALE, function="described"),
        dataclasses.replace(SCALE, signature=(*SIGNATURE[:-1], ("stride", "i32"))),
        dataclasses.replace(SCALE, constants=(("absent", None), ("BLOCK", 256))),
        dataclasses.replace(SCALE, divisible=(("x", 16),)),
        dataclasses.replace(SCALE, divisible=(("x", 16), ("y", 8))),
        dataclasses.replace(SCALE, warps=4),
        dataclasses.replace(SCALE, stages=4),
    ]
    keys = {program.key(ARCH) for program in others}
    assert len(keys) == len(others)
    assert SCALE.key(ARCH) not in keys
    assert SCALE.key("sm_80") != SCALE.key(ARCH)
    assert SCALE.key(ARCH).startswith("scale_scale-sm_90a-")
    # Where the files lie is no part of it, and the order of constants neither.
    assert copy().key(ARCH) == SCALE.key(ARCH)
    assert dataclasses.replace(SCALE, constants=SCALE.constants[::-1]).key(ARCH) == SCALE.key(ARCH)


def test_the_digest_of_the_source_is_of_its_texts_alone(copy) -> None:
    assert SCALE.source_digest() == dataclasses.replace(SCALE, warps=8).source_digest()
    assert SCALE.source_digest() == copy().source_digest()
    assert SCALE.source_digest() != copy(scale_part="\n# changed\n").source_digest()


def test_the_texts_of_the_package_are_found() -> None:
    program = TritonProgram("matmul.py", "tiles", ())
    assert list(program.texts()) == ["matmul.py", "epilogue.py"]


def test_kept_in_the_folder_with_its_facts(home) -> None:
    made = load_or_compile(SCALE, ARCH)
    assert counters.snapshot()["compiles"] == 1
    (file,) = home.files()
    assert key_in(file.name) == SCALE.key(ARCH)
    cache.forget()
    again = load_or_compile(SCALE, ARCH)
    assert again == made
    assert again.facts == made.facts
    assert counters.snapshot()["compiles"] == 1
    assert counters.snapshot()["disk_hits"] == 1
    (kept,) = cache.entries()
    listed = kept.entry
    assert (listed.source, listed.names, listed.arch) == ("scale.py", ("scale",), ARCH)
    assert listed.compiler == compiler.compiler_version()


def test_another_version_of_triton_compiles_again(home, monkeypatch) -> None:
    load_or_compile(SCALE, ARCH)
    cache.forget()
    monkeypatch.setattr(compiler, "installed_version", lambda: "triton 3.99.0")
    monkeypatch.setattr(compiler, "compiler_version", lambda: "triton 3.99.0")
    load_or_compile(SCALE, ARCH)
    assert counters.snapshot()["compiles"] == 2


def test_jit_off(home) -> None:
    home.set(GRISTMILL_JIT="off")
    with pytest.raises(KernelNotCached, match=r"scale.py \(scale\) for sm_90a is in no cache"):
        load_or_compile(SCALE, ARCH)
    home.set(GRISTMILL_JIT="on")
    load_or_compile(SCALE, ARCH)
    cache.forget()
    home.set(GRISTMILL_JIT="off")
    assert load_or_compile(SCALE, ARCH).facts["threads"] == 64


IN_ANOTHER_PYTHON = f"""
import os, pathlib, sys
from gristmill.errors import CompilerUnavailable
from gristmill.jit.cache import load_or_compile
from gristmill.jit.triton import TritonProgram
program = TritonProgram(
    "scale.py", "scale", {SIGNATURE!r}, {SCALE.constants!r}, {SCALE.divisible!r}, 2,
    root=pathlib.Path(sys.argv[1]),
)
"""


def test_a_warm_cache_imports_no_triton(home) -> None:
    made = load_or_compile(SCALE, ARCH)
    code = (
        IN_ANOTHER_PYTHON
        + f"""
binary = load_or_compile(program, {ARCH!r})
assert "triton" not in sys.modules
print(len(binary.cubin), binary.facts["threads"])
"""
    )
    printed = run_python(code, SOURCES, GRISTMILL_CACHE_DIR=str(home.path))
    assert printed.split() == [str(len(made.cubin)), "64"]


def test_triton_leaves_no_folder_of_its_own(home, tmp_path) -> None:
    house, temporary = tmp_path / "house", tmp_path / "temporary"
    house.mkdir()
    temporary.mkdir()
    code = IN_ANOTHER_PYTHON + f"load_or_compile(program, {ARCH!r})"
    environment = {"HOME": str(house), "TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"}
    run_python(code, SOURCES, GRISTMILL_CACHE_DIR=str(home.path), **environment)
    assert [file.suffix for file in home.files("*")] == [".kernel"]
    assert not list(house.rglob("*"))
    assert not list(temporary.rglob("*"))


def test_without_triton(home) -> None:
    code = (
        IN_ANOTHER_PYTHON
        + f"""
sys.modules["triton"] = None
for _ in range(2):
    try:
        load_or_compile(program, {ARCH!r})
    except CompilerUnavailable as error:
        print(error)
"""
    )
    lines = run_python(code, SOURCES, GRISTMILL_CACHE_DIR=str(home.path)).splitlines()
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
        IN_ANOTHER_PYTHON
        + f"""
try:
    load_or_compile(program, {ARCH!r})
except CompilerUnavailable as error:
    print(error)
"""
    )
    environment = {"GRISTMILL_CACHE_DIR": str(home.path), "TRITON_INTERPRET": "1"}
    assert "unset TRITON_INTERPRET" in run_python(code, SOURCES, **environment)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constants": (("BLOCK", 128),)}, "scale takes x, count, .* as parameters and BLOCK as"),
        ({"signature": (SIGNATURE[1], SIGNATURE[0], *SIGNATURE[2:])}, "scale takes x, count"),
        ({"function": "missing"}, "scale.py has no function 'missing'"),
    ],
)
def test_a_program_that_does_not_fit_its_function(changes, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiler.compile_program(dataclasses.replace(SCALE, **changes), ARCH)


def test_an_architecture_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="sm_90a, not for 'gfx942'"):
        compiler.compile_program(SCALE, "gfx942")


def test_threads_compile_at_the_same_time(home) -> None:
    programs = [
        dataclasses.replace(SCALE, constants=(("absent", None), ("BLOCK", block)))
        for block in (32, 64, 128, 256)
    ]
    found: list[tuple[int, Binary]] = []

    def work(number: int) -> None:
        for at, program in enumerate(programs[number:] + programs[:number]):
            found.append(((at + number) % 4, load_or_compile(program, ARCH)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 16
    assert counters.snapshot()["compiles"] == 4
    assert len(home.files()) == 4
    for number, binary in found:
        assert binary is load_or_compile(programs[number], ARCH)
    assert len({binary.cubin for _, binary in found}) == 4


# Launches, against a driver that only keeps what it was given.

COMPILER = shutil.which("cc") or shutil.which("gcc")

PROLOGUE = (
    IN_ANOTHER_PYTHON
    + """
import ctypes, struct, threading
import pytest
from gristmill.errors import CompileError, DriverError
from gristmill.jit.kernel import kernel

fake = ctypes.CDLL("libcuda.so.1")

class Last(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_uint32) for name in ("grid", "block", "shared", "count")]
        + [(name, ctypes.c_uint64) for name in ("stream", "function", "context")]
        + [("attributes", ctypes.c_uint32 * 18 * 4), ("params", ctypes.c_ubyte * 64)]
    )

last = Last.in_dll(fake, "last")

def number(name):
    return ctypes.c_int.in_dll(fake, name)

def takes(*sizes):
    number("separate").value = len(sizes)
    (ctypes.c_int * 16).in_dll(fake, "separate_sizes")[: len(sizes)] = sizes

SIZES = (8, 4, 4, 8, 8, 8, 8)
takes(*SIZES)
scale = kernel(program, "scale", 0)
PARAMS = program.parameters()
"""
)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "fake_driver.c"
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-O1", "-Wall", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source],
        check=True,
    )
    return folder


@pytest.fixture
def run(request, home):
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    folder = request.getfixturevalue("fake_driver")

    def run(body: str) -> None:
        environment = {"LD_LIBRARY_PATH": str(folder), "GRISTMILL_CACHE_DIR": str(home.path)}
        run_python(PROLOGUE + body, SOURCES, **environment)

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
assert last.count == 1 and last.attributes[0][0] == 6 and last.attributes[0][2] == 1
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
