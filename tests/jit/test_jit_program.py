"""What is compiled, and the key it is kept under."""

from __future__ import annotations

import pytest
from jit_helpers import run_python

from gristmill.jit.program import Program


def test_texts_are_the_closure_of_our_includes(make_program) -> None:
    program = make_program(
        a__cu='#include "b.cuh"\n  #  include "d.cuh"\n#include <cuda_fp8.h>\n',
        b__cuh='#include "c.cuh"\n',
        c__cuh='#include "b.cuh"\n// a circle\n',
        d__cuh="int d;\n",
        unused__cuh="int unused;\n",
    )
    assert next(iter(program.texts())) == "a.cu"
    assert set(program.texts()) == {"a.cu", "b.cuh", "c.cuh", "d.cuh"}
    assert program.texts()["d.cuh"] == "int d;\n"
    assert program.includes_cuda_headers()


def test_a_header_that_is_not_ours_is_left_to_the_compiler(make_program) -> None:
    program = make_program(a__cu='#ifdef NEVER\n#include "elsewhere.h"\n#endif\n')
    assert set(program.texts()) == {"a.cu"}
    assert not program.includes_cuda_headers()


BASE = {"a__cu": '#include "h.cuh"\n', "h__cuh": "int one;\n"}


@pytest.mark.parametrize(
    "change",
    [
        {"a__cu": '#include "h.cuh"\n\n'},
        {"h__cuh": "int two;\n"},
        {"names": ("k<1>",)},
        {"names": ("k<2>", "k<1>")},
        {"options": ("--use_fast_math",)},
    ],
)
def test_everything_a_compile_depends_on_is_in_the_digest(make_program, change) -> None:
    base = make_program(names=("k<1>", "k<2>"), **BASE)
    same = make_program(names=("k<1>", "k<2>"), **BASE)
    other = make_program(**{"names": ("k<1>", "k<2>"), **BASE, **change})
    assert base.root != same.root
    assert base.digest() == same.digest()
    assert base.key("sm_90a") == same.key("sm_90a")
    assert base.digest() != other.digest()
    assert base.key("sm_90a") != other.key("sm_90a")


def test_the_architecture_is_in_the_key_only(make_program) -> None:
    program = make_program(**BASE)
    assert program.key("sm_90a") != program.key("sm_100a")
    assert program.key("sm_90a").startswith("a-sm_90a-")


def test_the_digest_is_the_same_in_every_process(make_program) -> None:
    program = make_program(**BASE)
    code = (
        "import sys, pathlib; from gristmill.jit.program import Program;"
        "print(Program('a.cu', (), root=pathlib.Path(sys.argv[1])).digest())"
    )
    assert run_python(code, program.root).strip() == program.digest()


def test_a_source_that_does_not_exist_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such_kernel\.cu"):
        Program("no_such_kernel.cu", ()).texts()


def test_import_loads_no_compiler_and_touches_no_disk(tmp_path) -> None:
    code = """
import sys
before = set(sys.modules)
events = []
def hook(event, arguments):
    # Reading Python's own modules is what an import is; anything written or created is not.
    if event in ("os.mkdir", "os.rename", "os.remove", "os.chmod", "socket.connect"):
        events.append((event, arguments))
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        events.append((event, arguments))
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import gristmill.jit, gristmill.jit.cache, gristmill.jit.driver, gristmill.jit.counters
loaded = set(sys.modules) - before
assert not [name for name in loaded if name.split(".")[0] in ("cuda", "filelock", "torch")], loaded
assert not events, events
"""
    run_python(code, GRISTMILL_CACHE_DIR=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
