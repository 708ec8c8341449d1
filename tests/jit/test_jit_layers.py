"""Layers of the cache: bundles and folders that are read after the user's own, never written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jit_helpers import ARCH

from gristmill.errors import ArgumentError, CompilerUnavailable, KernelNotCached
from gristmill.jit import bundle, cache, counters, nvrtc
from gristmill.jit.binary import Binary
from gristmill.jit.compilers import from_text, to_text
from gristmill.jit.entry import encode, file_name
from gristmill.jit.program import Program
from gristmill.jit.triton import TritonProgram


def _file(program: Program, compiler: str = "nvrtc 13.0", mark: bytes = b"") -> tuple[str, bytes]:
    lowered = {name: f"_Z{name}" for name in program.names}
    binary = Binary(b"from a layer " + mark, lowered, "", compiler)
    name = file_name(program.key(ARCH), compiler, "")
    return name, encode(program, ARCH, binary)


@pytest.fixture
def compiler(monkeypatch) -> list[str]:
    calls: list[str] = []

    def compile_program(program, arch):
        calls.append(program.key(arch))
        return Binary(b"compiled", dict.fromkeys(program.names, "_Z"), "", "nvrtc 13.0")

    monkeypatch.setattr(nvrtc, "compile_program", compile_program)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: "nvrtc 13.0")
    return calls


def as_bundle(path: Path, *files: tuple[str, bytes]) -> Path:
    bundle.write(path, files)
    return path


def as_folder(path: Path, *files: tuple[str, bytes]) -> Path:
    (path / "kernels").mkdir(parents=True)
    for name, content in files:
        (path / "kernels" / name).write_bytes(content)
    return path


KINDS = pytest.mark.parametrize("make", [as_bundle, as_folder])


@KINDS
def test_a_layer_is_asked_before_the_compiler(make, tiny, home, compiler, tmp_path) -> None:
    layer = make(tmp_path / "layer", _file(tiny))
    home.set(GRISTMILL_CACHE_LAYERS=str(layer))
    assert cache.is_cached(tiny, ARCH)
    assert not cache.is_in_folder(tiny, ARCH)
    found = cache.load_or_compile(tiny, ARCH)
    assert found.cubin == b"from a layer "
    assert compiler == []
    values = counters.snapshot()
    assert (values["layer_hits"], values["disk_hits"], values["compiles"]) == (1, 0, 0)
    assert home.files("*") == []  # a layer is not copied


@KINDS
def test_the_folder_of_the_user_comes_first(make, tiny, home, compiler, tmp_path) -> None:
    cache.load_or_compile(tiny, ARCH)
    cache.forget()
    home.set(GRISTMILL_CACHE_LAYERS=str(make(tmp_path / "layer", _file(tiny))))
    assert cache.load_or_compile(tiny, ARCH).cubin == b"compiled"


@KINDS
def test_layers_are_asked_in_order(make, tiny, make_program, home, compiler, tmp_path) -> None:
    other = make_program(("b",), b__cu="// b\n")
    first = make(tmp_path / "first", _file(tiny, mark=b"1"))
    second = make(tmp_path / "second", _file(tiny, mark=b"2"), _file(other, mark=b"2"))
    home.set(GRISTMILL_CACHE_LAYERS=f"{first}{os.pathsep}{second}")
    assert cache.load_or_compile(tiny, ARCH).cubin == b"from a layer 1"
    assert cache.load_or_compile(other, ARCH).cubin == b"from a layer 2"


@KINDS
def test_a_layer_of_another_compiler_serves(make, tiny, home, compiler, tmp_path) -> None:
    layer = make(tmp_path / "layer", _file(tiny, "nvrtc 14.2"))
    home.set(GRISTMILL_CACHE_LAYERS=str(layer))
    assert cache.load_or_compile(tiny, ARCH).compiler == "nvrtc 14.2"


@KINDS
def test_no_compiler_is_needed_or_loaded(make, tiny, home, tmp_path, monkeypatch) -> None:
    def missing() -> str:
        raise CompilerUnavailable("no NVRTC here")

    layer = make(tmp_path / "layer", _file(tiny))
    home.set(GRISTMILL_CACHE_LAYERS=str(layer))
    monkeypatch.setattr(nvrtc, "compiler_version", missing)
    assert cache.load_or_compile(tiny, ARCH).cubin == b"from a layer "
    cache.forget()
    home.set(GRISTMILL_JIT="off")
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: pytest.fail("asked for the compiler"))
    assert cache.load_or_compile(tiny, ARCH).cubin == b"from a layer "


@KINDS
def test_what_is_missing_is_named_with_what_was_searched(
    make, tiny, make_program, home, tmp_path
) -> None:
    layer = make(tmp_path / "layer", _file(tiny))
    home.set(GRISTMILL_CACHE_LAYERS=str(layer), GRISTMILL_JIT="off")
    with pytest.raises(KernelNotCached) as caught:
        cache.load_or_compile(make_program(("b",), b__cu="// b\n"), ARCH)
    for word in (str(home.path), str(layer), "b.cu (b) for sm_90a", "--arch sm_90a --bundle FILE"):
        assert word in str(caught.value)


@KINDS
@pytest.mark.parametrize("damage", ["other", "cut", "flipped"])
def test_a_damaged_kernel_of_a_layer_is_a_miss(
    make, damage, tiny, make_program, home, compiler, tmp_path
) -> None:
    name, content = _file(tiny)
    if damage == "other":
        content = _file(make_program(("b",), b__cu="// b\n"))[1]
    elif damage == "cut":
        content = content[:-1]
    else:
        content = content[:-1] + bytes([content[-1] ^ 1])
    home.set(GRISTMILL_CACHE_LAYERS=str(make(tmp_path / "layer", (name, content))))
    assert cache.load_or_compile(tiny, ARCH).cubin == b"compiled"
    assert counters.snapshot()["rejected"] == 1


@pytest.mark.parametrize("kind", ["absent", "empty folder", "text", "open folder", "open bundle"])
def test_a_layer_that_cannot_be_used_is_one_warning(
    kind, tiny, home, compiler, tmp_path, caplog
) -> None:
    layer = tmp_path / "layer"
    reasons = {"absent": "is not there", "empty folder": "has no folder named kernels"}
    if kind == "empty folder":
        layer.mkdir()
    elif kind == "text":
        layer.write_text("hello")
        reasons[kind] = "is not a bundle"
    elif kind == "open folder":
        (as_folder(layer, _file(tiny)) / "kernels").chmod(0o777)
    elif kind == "open bundle":
        as_bundle(layer, _file(tiny)).chmod(0o666)
    good = as_bundle(tmp_path / "good.bundle", _file(tiny, mark=b"good"))
    home.set(GRISTMILL_CACHE_LAYERS=f"{layer}{os.pathsep}{good}")
    for _ in range(2):
        assert cache.load_or_compile(tiny, ARCH).cubin == b"from a layer good"
        cache.forget()
    (message,) = caplog.messages
    assert str(layer) in message
    assert reasons.get(kind, "can be written to by others") in message
    assert "passed over" in message


def test_a_layer_is_never_written_to(tiny, home, compiler, tmp_path) -> None:
    layer = as_folder(tmp_path / "layer")
    home.set(GRISTMILL_CACHE_LAYERS=str(layer))
    cache.load_or_compile(tiny, ARCH)
    assert list((layer / "kernels").iterdir()) == []
    assert cache.clear() == 1


def test_a_file_others_can_write_is_not_read(tiny, home, compiler, tmp_path) -> None:
    layer = as_folder(tmp_path / "layer", _file(tiny))
    next((layer / "kernels").iterdir()).chmod(0o666)
    home.set(GRISTMILL_CACHE_LAYERS=str(layer))
    assert cache.load_or_compile(tiny, ARCH).cubin == b"compiled"


# ---- programs as text ----

SCALE = TritonProgram(
    "epilogue.py",
    "scale",
    (("x", "*fp32"), ("count", "i32")),
    (("absent", None), ("BLOCK", 128), ("KIND", "silu"), ("ON", True)),
    (("x", 16),),
    warps=2,
)


@pytest.mark.parametrize(
    "program",
    [
        Program("norm.cu", ("norm_forward<Tensor<bf16,16>,Absent>", "b"), ("-DX=1",)),
        Program("norm.cu", ()),
        SCALE,
    ],
)
def test_a_program_survives_its_text(program) -> None:
    text = to_text(program)
    assert "\n" not in text
    assert from_text(text) == program
    assert from_text(text).key(ARCH) == program.key(ARCH)


def test_a_program_elsewhere_is_taken_only_where_that_is_said(tiny) -> None:
    with pytest.raises(ArgumentError, match="a folder of its own"):
        from_text(to_text(tiny))
    assert from_text(to_text(tiny), anywhere=True) == tiny


@pytest.mark.parametrize(
    "text",
    [
        "",
        "norm.cu",
        "[]",
        "{}",
        '{"source": "../norm.cu", "names": []}',
        '{"source": "/etc/passwd", "names": []}',
        '{"source": "nothing.cu", "names": []}',
        '{"source": "norm.cu"}',
        '{"source": "norm.cu", "names": [], "other": 1}',
        '{"source": 3}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60],
)
def test_what_is_no_program_is_refused(text) -> None:
    with pytest.raises(ArgumentError, match="is not a program of gristmill") as caught:
        from_text(text)
    assert len(str(caught.value)) < 2000
