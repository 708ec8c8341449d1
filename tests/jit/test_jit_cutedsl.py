"""The CuTe DSL as a compiler: its programs, its errors; and a world without it.

What is the same for Triton is in test_jit_python_programs.py. Nothing here needs a GPU. What needs
the DSL is skipped without it; most of the last part is not.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import struct
import sys

import pytest
import torch
from jit_helpers import ARCH, SOURCES, WITH_PROGRAM, run_python
from jit_helpers import CUTE_SCALE as SCALE

import gristmill
from gristmill.errors import (
    ArgumentError,
    CompileError,
    CompilerUnavailable,
    VariantUnavailable,
)
from gristmill.jit import TritonProgram, cache, load_or_compile, resource_usage
from gristmill.jit import cutedsl as compiler
from gristmill.jit.compilers import compiler_of, from_text, to_text
from gristmill.jit.cutedsl import CuteProgram
from gristmill.jit.parallel import compile_all
from gristmill.ops import ready
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm.cutedsl import CUTEDSL
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN

needs_dsl = pytest.mark.skipif(compiler.why_missing() is not None, reason="needs the CuTe DSL")

H200 = KNOWN["sm_90a"]


def rms_norm_problem(rows: int = 64, columns: int = 4096, dtype: torch.dtype = torch.bfloat16):
    args = OPS["rms_norm"].example((rows, columns), dtype, "meta")
    return OPS["rms_norm"].problem(*args, device=H200)


# --- what a compile gives


@needs_dsl
def test_what_a_compile_gives() -> None:
    binary = compiler.compile_program(SCALE, ARCH)
    assert binary.cubin[:4] == b"\x7fELF"
    assert binary.compiler == compiler.compiler_version() == compiler.installed_version()
    assert list(binary.lowered) == ["scale"]
    assert binary.facts == {"shared": 0, "threads": 64}
    (symbol, usage), *others = resource_usage(binary).items()
    assert (symbol, others) == (binary.lowered["scale"], [])
    assert usage.stack_bytes == 0
    # x, count, factor, y and stride, each at a multiple of its size; `absent` is none of them.
    assert usage.parameter_bytes == SCALE.parameters().size == struct.calcsize("QifQq") == 32


@needs_dsl
def test_the_target_is_the_one_asked_for() -> None:
    """Not the DSL's guess, which is sm_100a where there is no GPU, and not the environment's."""
    code = (
        WITH_PROGRAM
        + """
from gristmill.jit.cutedsl import compile_program
print(*(compile_program(program, arch).cubin[49] for arch in ("sm_90a", "sm_100a")))
"""
    )
    expected = [str(compiler.compile_program(SCALE, arch).cubin[49]) for arch in (ARCH, "sm_100a")]
    assert expected[0] != expected[1]
    for environment in ({}, {"CUTE_DSL_ARCH": "sm_120a"}):
        assert run_python(code, to_text(SCALE), **environment).split() == expected


# --- programs as text


def test_a_program_as_text_and_back() -> None:
    (program,) = CUTEDSL.programs(rms_norm_problem(), CUTEDSL.config(rms_norm_problem()))
    text = to_text(program)
    assert json.loads(text)["language"] == "cutedsl"
    assert from_text(text) == program
    assert compiler_of(program) is compiler
    # A file in Python of which nothing more is said is Triton's.
    triton = TritonProgram("matmul.py", "tiles", (("a", "*bf16"),))
    assert "language" not in json.loads(to_text(triton))
    assert from_text(to_text(triton)) == triton


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"language": "cuda"}, "its language 'cuda' is none but 'cutedsl'"),
        ({"source": "../rms_norm.py"}, "is no file name"),
        ({"source": "no_such.py"}, "FileNotFoundError"),
        ({"root": "/tmp"}, "it has a folder of its own"),
        ({"warps": 4}, "unexpected keyword argument 'warps'"),
    ],
)
def test_texts_that_are_no_program(changes, message) -> None:
    (program,) = CUTEDSL.programs(rms_norm_problem(), CUTEDSL.config(rms_norm_problem()))
    given = {**json.loads(to_text(program)), **changes}
    with pytest.raises(ArgumentError, match=message):
        from_text(json.dumps(given))


# --- the cache


@needs_dsl
def test_a_compile_leaves_nothing_behind(home, tmp_path) -> None:
    """No file, no variable, no hook in the process (an empty folder in TMPDIR is the DSL's own)."""
    house, temporary = tmp_path / "house", tmp_path / "temporary"
    house.mkdir()
    temporary.mkdir()
    code = (
        WITH_PROGRAM
        + f"""
hook, variables, here = sys.excepthook, dict(os.environ), os.getcwd()
load_or_compile(program, {ARCH!r})
assert sys.excepthook is hook
assert dict(os.environ) == variables and os.getcwd() == here
assert "torch" not in sys.modules
"""
    )
    environment = {"HOME": str(house), "TMPDIR": str(temporary), "PATH": "/usr/bin:/bin"}
    printed = run_python(code, to_text(SCALE), GRISTMILL_CACHE_DIR=str(home.path), **environment)
    assert printed == ""
    assert [file.suffix for file in home.files("*")] == [".kernel"]
    assert not list(house.rglob("*"))
    assert not [path for path in temporary.rglob("*") if path.is_file()]


@needs_dsl
def test_workers_compile_it_too(home) -> None:
    programs = [dataclasses.replace(SCALE, threads=threads) for threads in (32, 64)]
    results = compile_all(programs, ARCH, workers=2)
    assert [(result.how, result.error) for result in results] == [("compiled", "")] * 2
    assert len(home.files()) == 2
    assert cache.load_or_compile(programs[0], ARCH).facts["threads"] == 32


# --- errors


@needs_dsl
def test_an_error_of_the_language_is_a_compile_error() -> None:
    program = CuteProgram("cute_scale.py", "wrong", (("x", "*fp32"),), root=SOURCES)
    hook = sys.excepthook
    with pytest.raises(
        CompileError, match=r"cute_scale.py \(wrong\) does not compile for sm_90a: .*no_such_name"
    ) as caught:
        compiler.compile_program(program, ARCH)
    assert sys.excepthook is hook
    error = caught.value
    assert "is not defined" in error.log
    assert "\x1b" not in error.log
    assert error.program == "cute_scale.py"
    lines = (SOURCES / "cute_scale.py").read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "no_such_name" in line)
    assert error.source_line.startswith(f"cute_scale.py:{number}: scale_rows(x, no_such_name)")
    # The next compile is not troubled by it.
    assert compiler.compile_program(SCALE, ARCH).cubin


@needs_dsl
def test_a_function_that_launches_nothing() -> None:
    program = CuteProgram("cute_scale.py", "nothing", (("x", "*fp32"),), root=SOURCES)
    with pytest.raises(CompileError, match=r"\(nothing\) does not compile .*launches no kernel"):
        compiler.compile_program(program, ARCH)


@needs_dsl
def test_a_dsl_that_is_too_old(monkeypatch) -> None:
    monkeypatch.setattr(compiler._dsl(), "__version__", "4.3.5")
    compiler._dsl.cache_clear()
    with pytest.raises(CompilerUnavailable, match=r"CuTe DSL 4.3.5 is older than 4.7, .*pip inst"):
        compiler.compile_program(SCALE, ARCH)
    monkeypatch.undo()
    assert compiler.compiler_version()


# --- absent, and unmissed


@pytest.fixture
def without_dsl(monkeypatch):
    """As if it were not installed."""

    def version(name: str) -> str:
        if name == compiler.DISTRIBUTION:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    compiler._dsl.cache_clear()
    ready._FOUND.clear()
    yield
    ready._FOUND.clear()
    compiler._dsl.cache_clear()


REASON = 'needs nvidia-cutlass-dsl: pip install "gristmill[cutedsl]"'


def test_without_the_dsl_a_compile_says_what_to_install(home, without_dsl) -> None:
    assert compiler.installed_version() == ""
    for _ in range(2):
        with pytest.raises(CompilerUnavailable, match=r"is not installed.*gristmill\[cutedsl\]"):
            load_or_compile(SCALE, ARCH)
    assert not home.path.exists()


def test_without_the_dsl_the_variant_says_why_and_nothing_else_changes(without_dsl, caplog) -> None:
    op = OPS["rms_norm"]
    for rows, columns, dtype in ((1, 128, torch.float32), (4096, 4096, torch.bfloat16)):
        problem = rms_norm_problem(rows, columns, dtype)
        assert CUTEDSL.supports(problem) == REASON
        others = [one for one in op.variants if one is not CUTEDSL]
        assert ranked(op.name, op.variants, problem) != []
        assert [choice.variant for choice in ranked(op.name, op.variants, problem)] == [
            choice.variant for choice in ranked(op.name, others, problem)
        ]
        assert "cutlass" not in {name for name, module in sys.modules.items() if module}
    with gristmill.use("rms_norm", "cutedsl"), pytest.raises(VariantUnavailable, match="cutedsl"):
        ranked(op.name, op.variants, problem)
    assert not caplog.records


def test_without_the_dsl_explain_shows_it(without_dsl) -> None:
    from gristmill.explain import explain_call

    op = OPS["rms_norm"]
    args = op.example((64, 4096), torch.bfloat16, "meta")
    shown = explain_call(op, args, op.problem(*args, device=H200))
    (row,) = [one for one in shown.as_dict()["variants"] if one["variant"] == "cutedsl"]
    assert (row["status"], row["reason"]) == ("unsupported", REASON)
    assert "gristmill[cutedsl]" in str(shown)


@needs_dsl
@pytest.mark.parametrize("number", [0, -1], ids=["usual", "of a table"])
def test_without_the_dsl_a_kernel_from_a_cache_runs(number, home, request) -> None:
    """What a bundle or the folder has needs no compiler; what they do not have still does."""
    problem, other = rms_norm_problem(columns=4096), rms_norm_problem(columns=8192)
    config = CUTEDSL.configs(problem)[number]
    (program,) = CUTEDSL.programs(problem, config)
    load_or_compile(program, ARCH)
    cache.forget()
    request.getfixturevalue("without_dsl")
    assert CUTEDSL.supports(problem) is None
    assert load_or_compile(program, ARCH).facts["threads"] == config.threads
    assert CUTEDSL.supports(other) == REASON


def _stand_in(folder, *, known: bool) -> str:
    """A package named cutlass that is slow to import; `known`: as that of the DSL. Its folder."""
    package = folder / "elsewhere" / "cutlass"
    package.mkdir(parents=True)
    (package / "cute.py").write_text("")
    (package / "__init__.py").write_text(
        "import sys, time\n"
        "__version__ = '4.8.0'\n"
        "sys.excepthook = lambda *error: None\n"
        "time.sleep(0.5)\n"
    )
    if known:
        about = package.parent / "nvidia_cutlass_dsl-4.8.0.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.8.0\n")
    return str(package.parent)


def test_another_package_of_the_name_is_not_the_dsl(monkeypatch, tmp_path, request) -> None:
    request.getfixturevalue("without_dsl")
    monkeypatch.delitem(sys.modules, "cutlass")
    monkeypatch.syspath_prepend(_stand_in(tmp_path, known=False))
    compiler._is_installed.cache_clear()
    try:
        assert importlib.util.find_spec("cutlass") is not None
        assert CUTEDSL.supports(rms_norm_problem()) == REASON
        with pytest.raises(CompilerUnavailable, match=r"is not installed.*gristmill\[cutedsl\]"):
            load_or_compile(SCALE, ARCH)
        assert "cutlass" not in sys.modules
    finally:
        compiler._is_installed.cache_clear()


def test_threads_that_import_it_at_the_same_time_leave_no_hook(tmp_path) -> None:
    code = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from gristmill.jit.cutedsl import compiler_version
hook = sys.excepthook
first, second = (threading.Thread(target=compiler_version) for _ in range(2))
first.start()
while sys.excepthook is hook:  # until the package has put its own
    time.sleep(0.001)
second.start()
first.join()
second.join()
print(sys.excepthook is hook)
"""
    assert run_python(code, _stand_in(tmp_path, known=True)).split() == ["True"]


@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_prefers_it(invariant) -> None:
    """Only a table, or its name, brings it into a call, and so into a warm-up or a bundle."""
    op = OPS["rms_norm"]
    for rows, columns in itertools.product((1, 64, 70000), (1, 128, 1000, 4096, 16384, 32768)):
        with gristmill.batch_invariant(invariant):
            problem = rms_norm_problem(rows, columns)
            first = ranked(op.name, op.variants, problem)[0].variant
        assert first.name.startswith("cuda_")
        assert CUTEDSL.declines(problem)
