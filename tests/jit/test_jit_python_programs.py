"""Programs of languages inside Python, Triton's and the CuTe DSL: what is the same for both.

Nothing here needs a GPU; what compiles is skipped without the language's compiler.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import threading
from typing import Any

import pytest
from jit_helpers import (
    ARCH,
    CUTE_SCALE,
    SIGNATURE,
    SOURCES,
    TRITON_SCALE,
    WITH_PROGRAM,
    run_python,
)

from gristmill.errors import ArgumentError, KernelNotCached
from gristmill.jit import TritonProgram, cache, counters, cutedsl, load_or_compile
from gristmill.jit.binary import Binary
from gristmill.jit.compilers import compiler_of, to_text
from gristmill.jit.entry import decode, encode, key_in
from gristmill.jit.python_sources import PythonProgram


@pytest.fixture(params=[TRITON_SCALE, CUTE_SCALE], ids=["triton", "cutedsl"])
def scale(request) -> Any:
    return request.param


@pytest.fixture
def compiler(scale) -> Any:
    """The module that compiles it, if it can."""
    triton = isinstance(scale, TritonProgram)
    there = importlib.util.find_spec("triton") if triton else cutedsl.why_missing() is None
    if not there:
        pytest.skip("needs Triton" if triton else "needs the CuTe DSL")
    return compiler_of(scale)


@pytest.fixture
def copy(tmp_path, scale):
    """The program over files of its own, with a text added to those named by their stems."""
    made = 0

    def copy(**changes: str) -> PythonProgram:
        nonlocal made
        made += 1
        root = tmp_path / f"sources{made}"
        shutil.copytree(SOURCES, root, ignore=shutil.ignore_patterns("*.cu*", "__pycache__"))
        for stem, text in changes.items():
            file = root / f"{stem}.py"
            file.write_text(file.read_text() + text)
        return dataclasses.replace(scale, root=root)

    return copy


# --- keys

OWN_CHANGES: dict[str, list[dict[str, Any]]] = {
    "scale": [
        {"constants": (("absent", None), ("BLOCK", 256))},
        {"divisible": (("x", 16),)},
        {"divisible": (("x", 16), ("y", 8))},
        {"warps": 4},
        {"stages": 4},
    ],
    "cute_scale": [
        {"constants": (("absent", 1),)},
        {"aligned": ()},
        {"aligned": (("x", 8),)},
        {"threads": 128},
    ],
}
# Keys are in users' folders and bundles: for the same files of sources they stay the same.
KEYS = {
    "scale": "scale_scale-sm_90a-3e0cc70c09b5f5b286074238fd705131",
    "cute_scale": "cutedsl_cute_scale_scale-sm_90a-e8b3b1511f99a2463a381e0b6360fad2",
}


def stem_of(program: PythonProgram) -> str:
    return program.source.removesuffix(".py")


def test_the_key_follows_everything_a_compile_depends_on(scale, copy) -> None:
    stem = stem_of(scale)
    changes = [
        {"function": "wrong"},
        {"signature": (*SIGNATURE[:-1], ("stride", "i32"))},
        *OWN_CHANGES[stem],
    ]
    others = [
        copy(**{stem: "\n# changed\n"}),
        copy(**{f"{stem}_part": "\n# changed\n"}),
        *(dataclasses.replace(scale, **change) for change in changes),
    ]
    keys = {program.key(ARCH) for program in others}
    assert len(keys) == len(others)
    assert scale.key(ARCH) not in keys
    assert scale.key("sm_100a") != scale.key(ARCH)
    # Where the files lie is no part of it, and the order of constants neither.
    assert copy().key(ARCH) == scale.key(ARCH)
    assert dataclasses.replace(scale, constants=scale.constants[::-1]).key(ARCH) == scale.key(ARCH)


def test_the_key_is_what_it_was(scale) -> None:
    assert scale.key(ARCH) == KEYS[stem_of(scale)]


def test_the_digest_of_the_source_is_of_its_texts_alone(scale, copy) -> None:
    stem = stem_of(scale)
    assert list(scale.texts()) == [f"{stem}.py", f"{stem}_part.py"]
    for change in OWN_CHANGES[stem]:
        assert scale.source_digest() == dataclasses.replace(scale, **change).source_digest()
    assert scale.source_digest() == copy().source_digest()
    assert scale.source_digest() != copy(**{f"{stem}_part": "\n# changed\n"}).source_digest()


# --- compiling


def test_the_same_bytes_each_time_and_others_for_others(scale, compiler) -> None:
    first = compiler.compile_program(scale, ARCH).cubin
    assert compiler.compile_program(scale, ARCH).cubin == first
    assert compiler.compile_program(scale, "sm_100a").cubin != first
    assert compiler.compile_program(scale, ARCH).cubin == first  # whatever came between


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constants": ()}, "scale takes x, count, .* the program gives .* as parameters and"),
        ({"signature": (SIGNATURE[1], SIGNATURE[0], *SIGNATURE[2:])}, "scale takes x, count"),
        ({"function": "missing"}, "scale.py has no function 'missing'"),
    ],
)
def test_a_program_that_does_not_fit_its_function(scale, compiler, changes, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiler.compile_program(dataclasses.replace(scale, **changes), ARCH)


def test_an_architecture_that_is_none(scale, compiler) -> None:
    with pytest.raises(ArgumentError, match="sm_90a, not for 'gfx942'"):
        compiler.compile_program(scale, "gfx942")


# --- the cache


def test_kept_in_the_folder_with_its_facts(scale, compiler, home) -> None:
    made = load_or_compile(scale, ARCH)
    assert counters.snapshot()["compiles"] == 1
    (file,) = home.files()
    assert key_in(file.name) == scale.key(ARCH)
    cache.forget()
    again = load_or_compile(scale, ARCH)
    assert again == made
    assert again.facts == made.facts
    assert counters.snapshot()["compiles"] == 1
    assert counters.snapshot()["disk_hits"] == 1
    (kept,) = cache.entries()
    listed = kept.entry
    assert (listed.source, listed.names, listed.arch) == (scale.source, ("scale",), ARCH)
    assert listed.compiler == compiler.compiler_version()


def test_an_entry_without_a_fact_is_no_entry(scale, compiler) -> None:
    made = load_or_compile(scale, ARCH)
    for name in made.facts:
        less = {other: fact for other, fact in made.facts.items() if other != name}
        content = encode(scale, ARCH, dataclasses.replace(made, facts=less))
        assert (decode(content, scale, ARCH) is None) == (name in scale.facts)
    assert scale.facts
    assert decode(encode(scale, ARCH, made), scale, ARCH) == made


def test_jit_off(scale, compiler, home) -> None:
    home.set(GRISTMILL_JIT="off")
    with pytest.raises(
        KernelNotCached, match=r"scale.py \(scale\) for sm_90a is in no ca"
    ) as caught:
        load_or_compile(scale, ARCH)
    assert to_text(scale) in str(caught.value)
    home.set(GRISTMILL_JIT="on")
    load_or_compile(scale, ARCH)
    cache.forget()
    home.set(GRISTMILL_JIT="off")
    assert load_or_compile(scale, ARCH).facts["threads"] == 64


def test_a_warm_cache_imports_no_compiler(scale, compiler, home) -> None:
    made = load_or_compile(scale, ARCH)
    package = "cutlass" if compiler is cutedsl else "triton"
    code = (
        WITH_PROGRAM
        + f"""
binary = load_or_compile(program, {ARCH!r})
assert {package!r} not in sys.modules
sys.modules[{package!r}] = None  # nor is it missed
from gristmill.jit import cache
cache.forget()
assert load_or_compile(program, {ARCH!r}) == binary
print(len(binary.cubin), binary.facts["threads"])
"""
    )
    printed = run_python(code, to_text(scale), GRISTMILL_CACHE_DIR=str(home.path))
    assert printed.split() == [str(len(made.cubin)), "64"]


def test_threads_compile_at_the_same_time(scale, compiler, home) -> None:
    name, least = ("threads", 32) if compiler is cutedsl else ("warps", 1)
    programs = [dataclasses.replace(scale, **{name: least << at}) for at in range(4)]
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
        assert binary.facts["threads"] == 32 << number
    assert len({binary.cubin for _, binary in found}) == 4
