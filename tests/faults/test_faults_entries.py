"""Files that have the right name and are not what it says: never loaded, never waited for."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import stat
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import ARCH, VERSION, is_right, program, use_fake_compiler, write_source

from gristmill.errors import KernelNotCached
from gristmill.jit import cache, counters, entry, folder, nvrtc
from gristmill.jit.program import Program
from gristmill.settings import reload_settings

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs files of Unix"),
    pytest.mark.usefixtures("impatient"),
]


@pytest.fixture
def wanted(tmp_path, monkeypatch) -> Program:
    use_fake_compiler(put=monkeypatch.setattr)
    return program(write_source(tmp_path / "sources"))


@pytest.fixture
def path(wanted, home) -> Path:
    """The file of `wanted`, as the cache wrote it; nothing is in memory."""
    cache.load_or_compile(wanted, ARCH)
    cache.forget()
    counters.reset()
    (found,) = (home / "kernels").glob("*.kernel")
    return found


def test_what_is_cut_off_anywhere_is_no_entry(wanted, path) -> None:
    content = path.read_bytes()
    assert is_right(entry.decode(content, wanted, ARCH), wanted)
    for length in range(len(content)):
        assert entry.decode(content[:length], wanted, ARCH) is None
        assert entry.describe(content[:length]) is None
    assert entry.decode(content + b"\0", wanted, ARCH) is None


def test_what_has_one_other_bit_is_no_entry(wanted, path) -> None:
    content = bytearray(path.read_bytes())
    chance = random.Random(0)
    for place in range(len(content)):
        bit = 1 << chance.randrange(8)
        content[place] ^= bit
        assert entry.decode(bytes(content), wanted, ARCH) is None, place
        assert entry.describe(bytes(content)) is None, place
        content[place] ^= bit
    assert is_right(entry.decode(bytes(content), wanted, ARCH), wanted)


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", b"null", b'"key"', b"{", b"\xff", b"[" * 200_000],
    ids=lambda one: repr(one[:10]),
)
def test_a_right_hash_around_another_header_is_no_entry(header, wanted) -> None:
    """As a version of the same format with other fields would write it, or a mistake."""
    for length in (len(header), len(header) + 9, 2**32 - 1):
        body = struct.pack("<I", length) + header
        content = b"gristmill kernel 1\n" + hashlib.sha256(body).digest() + body
        assert entry.decode(content, wanted, ARCH) is None
        assert entry.describe(content) is None


def with_header(content: bytes, **changes: Any) -> bytes:
    """An entry with a right hash whose header says otherwise; a value of `...` is left out."""
    at = len(b"gristmill kernel 1\n") + 32
    (length,) = struct.unpack_from("<I", content, at)
    header = {**json.loads(content[at + 4 :][:length]), **changes}
    words = json.dumps({name: one for name, one in header.items() if one is not ...}).encode()
    body = struct.pack("<I", len(words)) + words + content[at + 4 + length :]
    return b"gristmill kernel 1\n" + hashlib.sha256(body).digest() + body


NO_TEXTS: list[Any] = [..., None, 3, True, [], {}, ["a"]]
# The first cannot be encoded, the others would change what a terminal shows.
ODD_TEXTS = ["\ud800", "a\x1b[31mb", "a\nb", "a\0"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((field, [*NO_TEXTS, *ODD_TEXTS]) for field in ("key", "source", "arch", "compiler")),
        ("headers", [*NO_TEXTS, *ODD_TEXTS]),
        ("log", NO_TEXTS),
        ("names", [..., None, 3, {}, "a", *([one] for one in (3, [], *ODD_TEXTS))]),
        ("lowered", [..., None, 3, [], "a", *({"a": one} for one in (3, None, *ODD_TEXTS))]),
        ("facts", [..., None, 3, [], "a"]),
        ("facts", [{"a": one} for one in (None, True, 1.0, "1", [], -1, 2**31, 10**400)]),
    ],
)
def test_a_header_with_an_odd_value_is_no_entry(field, values, wanted, path) -> None:
    content = path.read_bytes()
    assert is_right(entry.decode(with_header(content), wanted, ARCH), wanted)
    for value in values:
        path.write_bytes(with_header(content, **{field: value}))
        assert entry.describe(path.read_bytes()) is None, value
        cache.forget()
        counters.reset()
        assert cache.entries() == []
        assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
        assert counters.snapshot()["compiles"] == 1, value
        assert path.read_bytes() == content


def test_a_header_is_bounded_before_it_is_parsed(path) -> None:
    """Short values take 50 times their JSON in memory."""
    content = with_header(path.read_bytes(), more=[{}] * 3_000_000)
    tracemalloc.start()
    assert entry.describe(content) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# ---- a file in the place of another ----


def of_another_program(path: Path, wanted: Program) -> None:
    other = program(wanted.root or "", 7)
    cache.load_or_compile(other, ARCH)
    name = entry.file_name(other.key(ARCH), VERSION, "")
    os.replace(path.with_name(name), path)


def of_another_arch(path: Path, wanted: Program) -> None:
    cache.load_or_compile(wanted, "sm_80")
    os.replace(path.with_name(entry.file_name(wanted.key("sm_80"), VERSION, "")), path)


def of_another_compiler(path: Path, wanted: Program) -> None:
    """Whole, of this program and architecture, but not made by whom its name says."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake_compiler(version="nvrtc 12.9", put=patch.setattr)
        binary = nvrtc.compile_program(wanted, ARCH)
    path.write_bytes(entry.encode(wanted, ARCH, binary))


def of_other_names(path: Path, wanted: Program) -> None:
    """Has the key, and lacks the kernel that is asked for."""
    binary = nvrtc.compile_program(program(wanted.root or "", 7), ARCH)
    path.write_bytes(entry.encode(wanted, ARCH, binary))


def empty(path: Path, wanted: Program) -> None:
    path.write_bytes(b"")


def cut_off(path: Path, wanted: Program) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def huge(path: Path, wanted: Program) -> None:
    """Begins as it should; 10 GB of nothing follow, which take no room on the disk."""
    with path.open("r+b") as file:
        file.truncate(10 * 2**30)


def writable(path: Path, wanted: Program) -> None:
    path.chmod(0o666)


def pipe(path: Path, wanted: Program) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def listening_socket(path: Path, wanted: Program) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket may have 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def link_to_nothing(path: Path, wanted: Program) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nothing")


def link_to_itself(path: Path, wanted: Program) -> None:
    path.unlink()
    path.symlink_to(path)


def link_to_a_writable_file(path: Path, wanted: Program) -> None:
    other = path.parent.parent / "elsewhere"
    other.write_bytes(path.read_bytes())
    other.chmod(0o666)
    path.unlink()
    path.symlink_to(other)


def link_to_zeros(path: Path, wanted: Program) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def full_pipe(path: Path, wanted: Program) -> int:
    """Holds the right content, until the handle is closed."""
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path, 0o600)
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    assert os.write(handle, content) == len(content)
    return handle


def device(path: Path, wanted: Program) -> None:
    """Of endless zeros, which only its owner can write to."""
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")


REPLACED = [
    of_another_program,
    of_another_arch,
    of_another_compiler,
    of_other_names,
    empty,
    cut_off,
    huge,
    writable,
    pipe,
    listening_socket,
    link_to_nothing,
    link_to_itself,
    link_to_a_writable_file,
    link_to_zeros,
]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_wrong_file_is_a_miss_and_is_replaced(replace, wanted, path, caplog) -> None:
    replace(path, wanted)
    cache.forget()
    counters.reset()
    assert not cache.is_cached(wanted, ARCH)
    assert wanted.key(ARCH) not in {one.entry.key for one in cache.entries() if one.path != path}
    assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
    assert counters.snapshot()["compiles"] == 1
    assert caplog.messages == []
    cache.forget()
    assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
    assert counters.snapshot()["compiles"] == 1
    assert path.is_file()
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def other_folder(path: Path, wanted: Program) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("replace", [pipe, full_pipe, device, link_to_zeros, other_folder])
def test_what_is_not_a_regular_file_is_not_read(replace, wanted, path) -> None:
    handle = replace(path, wanted)
    begin = time.perf_counter()
    for read in (folder.read_file, lambda place, name: folder.open_file(place / name)):
        with pytest.raises(folder.UntrustedError, match=r"\.kernel is not a regular file$"):
            read(path.parent, path.name)
    assert not cache.is_cached(wanted, ARCH)
    assert time.perf_counter() - begin < 2
    if handle is not None:
        os.close(handle)


@pytest.mark.parametrize("replace", REPLACED)
def test_a_wrong_file_is_not_there_without_a_compiler(replace, wanted, path, monkeypatch) -> None:
    replace(path, wanted)
    cache.forget()
    monkeypatch.setenv("GRISTMILL_JIT", "off")
    reload_settings()
    with pytest.raises(KernelNotCached):
        cache.load_or_compile(wanted, ARCH)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(wanted, path) -> None:
    os.chown(path, 4_000_017, -1)
    assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
    assert counters.snapshot()["compiles"] == 1
    assert path.stat().st_uid == 0


def test_a_folder_in_the_place_of_a_file_costs_one_warning(wanted, path, caplog) -> None:
    path.unlink()
    path.mkdir()
    for _ in range(2):
        assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
        cache.forget()
    (message,) = caplog.messages
    assert str(path.parent) in message
    assert list(path.parent.glob(".*")) == []
    # The next one is kept all the same.
    other = program(wanted.root or "", 1)
    assert is_right(cache.load_or_compile(other, ARCH), other)
    assert cache.is_in_folder(other, ARCH)


def test_a_huge_file_is_not_read_into_memory(wanted, path) -> None:
    huge(path, wanted)
    tracemalloc.start()
    cache.load_or_compile(wanted, ARCH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < folder.MOST_BYTES


WRONG_LOCKS: list[Callable[[Path, Program], None]] = [pipe, link_to_nothing, link_to_itself]


@pytest.mark.parametrize("replace", [*WRONG_LOCKS, writable])
def test_a_lock_file_that_is_something_else(replace, wanted, home, monkeypatch, caplog) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    (home / "kernels").mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    lock = home / "kernels" / f"{wanted.key(ARCH)}.lock"
    lock.touch()
    replace(lock, wanted)
    assert is_right(cache.load_or_compile(wanted, ARCH), wanted)
    assert cache.is_in_folder(wanted, ARCH)
    assert caplog.messages == []
