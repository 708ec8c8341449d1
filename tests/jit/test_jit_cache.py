"""Where a binary comes from. The compiler is real in a few tests and counted or faked in others."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import threading
from pathlib import Path

import pytest
from jit_helpers import ARCH

from gristmill.errors import CompileError, CompilerUnavailable, KernelNotCached
from gristmill.jit import cache, counters, entry, folder, nvrtc
from gristmill.jit.compilers import from_text
from gristmill.jit.file_lock import locked_file
from gristmill.jit.nvrtc import Binary


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that makes a new binary at each call, and says how often it was called."""
    calls: list[str] = []

    def compile_program(program, arch):
        calls.append(program.key(arch))
        lowered = {name: f"_Z{name}" for name in program.names}
        return Binary(b"cubin %d" % len(calls), lowered, "a log", "nvrtc 13.0")

    monkeypatch.setattr(nvrtc, "compile_program", compile_program)
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: "nvrtc 13.0")
    return calls


def counted(*names: str) -> tuple[float, ...]:
    values = counters.snapshot()
    return tuple(values[name] for name in names)


def test_memory_then_folder_then_compiler(tiny, home, compiler) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    assert counted("compiles", "disk_hits", "memory_hits") == (1, 0, 0)
    assert cache.load_or_compile(tiny, ARCH) is first
    assert counted("compiles", "disk_hits", "memory_hits") == (1, 0, 1)
    cache.forget()
    again = cache.load_or_compile(tiny, ARCH)
    assert again == first
    assert again is not first
    assert counted("compiles", "disk_hits", "memory_hits") == (1, 1, 1)
    assert cache.load_or_compile(tiny, "sm_80") != first
    assert counted("compiles", "disk_hits", "memory_hits") == (2, 1, 1)


def test_a_real_binary_survives_the_folder(tiny, home) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    cache.forget()
    assert cache.load_or_compile(tiny, ARCH) == first
    assert counted("compiles", "disk_hits") == (1, 1)
    assert counters.snapshot()["compile_seconds"] > 0
    assert first == nvrtc.compile_program(tiny, ARCH)


def test_only_the_user_may_look_into_the_folder(tiny, home, compiler) -> None:
    before = os.umask(0o002)
    try:
        cache.load_or_compile(tiny, ARCH)
    finally:
        os.umask(before)
    for place in (home.path, home.path / "kernels"):
        assert place.stat().st_mode & 0o777 == 0o700
    (file,) = (home.path / "kernels").iterdir()
    assert file.name == entry.file_name(tiny.key(ARCH), "nvrtc 13.0", "")
    assert file.stat().st_mode & 0o777 == 0o600


def damaged(content: bytes) -> list[bytes]:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return [b"", content[:7], content[:40], content[:-1], content + b"x", bytes(flipped), b"other"]


@pytest.mark.parametrize("which", range(7))
def test_a_damaged_entry_is_a_miss_and_is_replaced(tiny, home, compiler, which) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    (path,) = home.files()
    content = path.read_bytes()
    path.write_bytes(damaged(content)[which])
    cache.forget()
    second = cache.load_or_compile(tiny, ARCH)
    assert len(compiler) == 2
    assert second != first
    assert counted("rejected") == (1,)  # one file, however often it was looked at
    cache.forget()
    assert cache.load_or_compile(tiny, ARCH) == second
    assert len(compiler) == 2


def test_an_entry_of_another_program_is_a_miss(tiny, make_program, home, compiler) -> None:
    other = make_program(("twice<3>",), b__cu="// something else\n")
    wrong = cache.load_or_compile(other, ARCH)
    (path,) = home.files()
    path.rename(path.with_name(entry.file_name(tiny.key(ARCH), "nvrtc 13.0", "")))
    assert cache.load_or_compile(tiny, ARCH) != wrong
    assert len(compiler) == 2


def test_two_compilers_keep_an_entry_each(tiny, home, compiler, monkeypatch) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    for version in ("nvrtc 13.1", "nvrtc 13.0", "nvrtc 13.1"):
        for name in ("compiler_version", "installed_version"):
            monkeypatch.setattr(nvrtc, name, functools.partial(str, version))
        monkeypatch.setattr(nvrtc, "compile_program", _stamped(compiler, version))
        cache.forget()
        found = cache.load_or_compile(tiny, ARCH)
        assert found.compiler == version
        assert (found == first) == (version == "nvrtc 13.0")
    assert len(compiler) == 2
    assert len(home.files()) == 2


def _stamped(calls: list[str], version: str):
    def compile_program(program, arch):
        calls.append(program.key(arch))
        lowered = {name: f"_Z{name}" for name in program.names}
        return Binary(b"cubin %d" % len(calls), lowered, "", version)

    return compile_program


def test_hit_by_the_installed_version_does_not_load_the_compiler(
    tiny, home, compiler, monkeypatch
) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    cache.forget()
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: pytest.fail("NVRTC was loaded"))
    monkeypatch.setattr(nvrtc, "installed_version", lambda: first.compiler)
    assert cache.load_or_compile(tiny, ARCH) == first


@pytest.mark.parametrize("installed", ["", "nvrtc 12.9"])
def test_the_loaded_compiler_outranks_the_installed_one(
    installed, tiny, home, compiler, monkeypatch
) -> None:
    cache.load_or_compile(tiny, ARCH)
    cache.forget()
    monkeypatch.setattr(nvrtc, "installed_version", lambda: installed)
    cache.load_or_compile(tiny, ARCH)
    assert len(compiler) == 1


def test_other_cuda_headers_are_another_entry(tiny, home, compiler, monkeypatch) -> None:
    cache.load_or_compile(tiny, ARCH)
    monkeypatch.setattr(nvrtc, "headers_version", lambda program: "cuda 13.1")
    cache.forget()
    cache.load_or_compile(tiny, ARCH)
    assert len(compiler) == 2


def _no_compiler() -> str:
    raise CompilerUnavailable("no NVRTC here")


def test_what_is_kept_needs_no_compiler(tiny, make_program, home, compiler, monkeypatch) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    cache.forget()
    monkeypatch.setattr(nvrtc, "compiler_version", _no_compiler)
    assert cache.load_or_compile(tiny, ARCH) == first
    with pytest.raises(CompilerUnavailable, match="no NVRTC here"):
        cache.load_or_compile(make_program(b__cu="\n"), ARCH)


def test_nothing_is_created_when_there_is_no_compiler(tiny, home, monkeypatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler_version", _no_compiler)
    with pytest.raises(CompilerUnavailable):
        cache.load_or_compile(tiny, ARCH)
    assert not home.path.exists()


def test_nothing_is_kept_after_a_failed_compile(make_program, home) -> None:
    program = make_program(a__cu="this is not CUDA\n")
    for _ in range(2):
        with pytest.raises(CompileError, match=r"a\.cu"):
            cache.load_or_compile(program, ARCH)
    assert home.files() == home.files("*.part") == home.files(".*") == []
    assert counted("compiles", "memory_hits", "disk_hits") == (0, 0, 0)


# ---- GRISTMILL_JIT=off ----


def test_jit_off_takes_only_what_is_kept(tiny, home, compiler, monkeypatch) -> None:
    first = cache.load_or_compile(tiny, ARCH)
    cache.forget()
    home.set(GRISTMILL_JIT="off")
    # Asking for its version would load the compiler, which need not even be installed.
    monkeypatch.setattr(nvrtc, "compiler_version", lambda: pytest.fail("asked for the compiler"))
    assert cache.load_or_compile(tiny, ARCH) == first


@pytest.mark.parametrize("damage", [False, True])
def test_jit_off_names_the_command_and_writes_nothing(tiny, home, compiler, damage) -> None:
    if damage:
        cache.load_or_compile(tiny, ARCH)
        home.files()[0].write_bytes(b"damaged")
        cache.forget()
    home.set(GRISTMILL_JIT="off")
    before = len(compiler)
    with pytest.raises(KernelNotCached) as caught:
        cache.load_or_compile(tiny, ARCH)
    message = str(caught.value)
    for word in ("a.cu", ARCH, "GRISTMILL_JIT=off", "gristmill warmup", str(home.path)):
        assert word in message
    words = shlex.split(message[message.index("gristmill warmup") : message.index("; then name")])
    assert words[:2] == ["gristmill", "warmup"]
    assert from_text(words[words.index("--program") + 1], anywhere=True) == tiny
    assert len(compiler) == before
    assert home.path.exists() == damage
    if damage:
        assert home.files()[0].read_bytes() == b"damaged"


# ---- folders that cannot be trusted or written to ----


def planted(tiny, home) -> Path:
    """Leave an entry in the folder, as somebody else could have."""
    cache.load_or_compile(tiny, ARCH)
    cache.forget()
    return home.files()[0]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("which", ["cache", "kernels"])
def test_a_folder_others_can_write_to_is_not_read(
    tiny, home, compiler, caplog, mode, which
) -> None:
    path = planted(tiny, home)
    content = path.read_bytes()
    place = home.path if which == "cache" else home.path / "kernels"
    place.chmod(mode)
    for _ in range(2):
        cache.load_or_compile(tiny, ARCH)
        cache.forget()
    assert len(compiler) == 3
    assert counted("disk_hits") == (0,)
    assert path.read_bytes() == content
    (message,) = caplog.messages
    assert f"{place} can be written to by others" in message
    assert "in memory only" in message


def test_a_folder_of_another_user_is_not_read(tiny, home, compiler, caplog, monkeypatch) -> None:
    planted(tiny, home)
    me = os.getuid()
    if me == 0:
        os.chown(home.path / "kernels", 12345, -1)
    else:
        monkeypatch.setattr(folder.os, "getuid", lambda: me + 1)
    cache.load_or_compile(tiny, ARCH)
    assert counted("disk_hits") == (0,)
    assert "belongs to another user" in caplog.text


def test_a_folder_of_root_is_read(tiny, home, compiler, monkeypatch) -> None:
    planted(tiny, home)
    stat, fstat = Path.stat, os.fstat

    def as_roots(found: os.stat_result) -> os.stat_result:
        values = list(found)
        values[4] = 0  # st_uid
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", lambda self, **options: as_roots(stat(self, **options)))
    monkeypatch.setattr(folder.os, "fstat", lambda handle: as_roots(fstat(handle)))
    monkeypatch.setattr(folder.os, "getuid", lambda: 4711)
    cache.load_or_compile(tiny, ARCH)
    assert counted("disk_hits") == (1,)


def test_jit_off_does_not_read_an_untrusted_folder(tiny, home, compiler) -> None:
    planted(tiny, home)
    (home.path / "kernels").chmod(0o777)
    home.set(GRISTMILL_JIT="off")
    with pytest.raises(KernelNotCached):
        cache.load_or_compile(tiny, ARCH)


def test_a_folder_that_cannot_exist_means_memory_only(
    tiny, make_program, tmp_path, home, compiler, caplog
) -> None:
    (tmp_path / "file").write_text("in the way")
    home.set(GRISTMILL_CACHE_DIR=str(tmp_path / "file" / "cache"))
    first = cache.load_or_compile(tiny, ARCH)
    cache.load_or_compile(make_program(b__cu="\n"), ARCH)
    assert cache.load_or_compile(tiny, ARCH) is first
    assert counted("compiles", "memory_hits") == (2, 1)
    (message,) = caplog.messages
    assert "in memory only" in message
    assert cache.entries() == []


@pytest.mark.parametrize("function", ["make_folders", "write_whole"])
def test_a_read_only_folder_means_one_warning(
    tiny, make_program, home, compiler, caplog, monkeypatch, function
) -> None:
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache, function, refuse)
    first = cache.load_or_compile(tiny, ARCH)
    cache.load_or_compile(make_program(b__cu="\n"), ARCH)
    assert cache.load_or_compile(tiny, ARCH) is first
    assert len(compiler) == 2
    (message,) = caplog.messages
    assert "Read-only file system" in message
    assert "in memory only" in message
    assert home.files() == []


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    target = tmp_path / "entry.kernel"
    target.write_bytes(b"old")

    def refuse(self, other):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        folder.write_whole(target, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["entry.kernel"]
    assert target.read_bytes() == b"old"


# ---- listing and clearing ----


def test_entries_and_clear(tiny, home, compiler) -> None:
    assert cache.entries() == []
    assert cache.clear() == 0
    cache.load_or_compile(tiny, ARCH)
    cache.load_or_compile(tiny, "sm_80")
    (home.path / "kernels" / "damaged.kernel").write_bytes(b"?")
    keep = home.path / "kernels" / "notes.txt"
    keep.write_text("the user's own")
    found = cache.entries()
    assert [item.entry.arch for item in found] == ["sm_80", ARCH]
    assert found[1].entry.key == tiny.key(ARCH)
    assert (found[1].entry.source, found[1].entry.names) == ("a.cu", ("twice<3>",))
    assert found[1].entry.compiler == "nvrtc 13.0"
    assert found[1].size == found[1].path.stat().st_size
    assert cache.clear() == 3
    assert [path.name for path in (home.path / "kernels").iterdir()] == ["notes.txt"]
    cache.load_or_compile(tiny, ARCH)  # not from memory: the folder is to have it again
    assert len(compiler) == 3
    assert [item.entry.arch for item in cache.entries()] == [ARCH]


# ---- locks ----


def test_a_lock_that_cannot_be_had_is_done_without(tiny, home, compiler, monkeypatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    (home.path).mkdir(mode=0o700)
    (home.path / "kernels").mkdir(mode=0o700)
    with locked_file(
        home.path / "kernels" / f"{entry.file_name(tiny.key(ARCH), 'nvrtc 13.0', '')}.lock", 1.0
    ):
        cache.load_or_compile(tiny, ARCH)
    assert len(compiler) == 1
    assert len(home.files()) == 1


def test_many_threads_compile_once(tiny, home, compiler, monkeypatch) -> None:
    inside, go = threading.Event(), threading.Event()
    compile_now = nvrtc.compile_program

    def slow(program, arch):
        inside.set()
        assert go.wait(10)
        return compile_now(program, arch)

    monkeypatch.setattr(nvrtc, "compile_program", slow)
    found: list[Binary] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.load_or_compile(tiny, ARCH)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(found) == 16
    assert all(item is found[0] for item in found)
    assert counted("compiles", "memory_hits") == (1, 15)


def test_a_compile_blocks_no_other_kernel(tiny, make_program, home, compiler, monkeypatch) -> None:
    slow, kept, new = tiny, make_program(b__cu="\n"), make_program(c__cu="\n")
    warm = cache.load_or_compile(kept, ARCH)
    inside, go = threading.Event(), threading.Event()
    compile_now = nvrtc.compile_program

    def blocked(program, arch):
        if program is slow:
            inside.set()
            assert go.wait(10)
        return compile_now(program, arch)

    monkeypatch.setattr(nvrtc, "compile_program", blocked)
    thread = threading.Thread(target=cache.load_or_compile, args=(slow, ARCH))
    thread.start()
    try:
        assert inside.wait(10)
        assert cache.load_or_compile(kept, ARCH) is warm  # from memory
        cache._memory._made.pop(kept.key(ARCH))
        assert cache.load_or_compile(kept, ARCH) == warm  # from the folder
        cache.load_or_compile(new, ARCH)  # from the compiler
        assert thread.is_alive()
    finally:
        go.set()
        thread.join(10)
    assert len(home.files()) == 3


def test_an_error_reaches_every_waiting_thread_and_is_forgotten(
    tiny, home, compiler, monkeypatch
) -> None:
    inside, go = threading.Event(), threading.Event()
    compile_now = nvrtc.compile_program

    def failing(program, arch):
        inside.set()
        assert go.wait(10)
        raise CompileError("out of luck")

    monkeypatch.setattr(nvrtc, "compile_program", failing)
    errors: list[str] = []

    def ask() -> None:
        try:
            cache.load_or_compile(tiny, ARCH)
        except CompileError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert errors == ["out of luck"] * 4
    monkeypatch.setattr(nvrtc, "compile_program", compile_now)
    assert cache.load_or_compile(tiny, ARCH).cubin == b"cubin 1"
