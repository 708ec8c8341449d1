"""Where a compiled program comes from: memory, the user's folder, or the compiler.

One compile per key across threads (`Once`) and processes (a lock file per key); no lock that
another key could wait for. The folder is a help and never a need: whatever goes wrong with it is
one warning, and kernels are then kept in memory only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from gristmill.errors import CompilerUnavailable, KernelNotCached
from gristmill.jit import counters, entry
from gristmill.jit.binary import Binary
from gristmill.jit.compilers import Compilable, compiler_of
from gristmill.jit.entry import Entry
from gristmill.jit.folder import make_private, why_untrusted, write_whole
from gristmill.jit.once import Once
from gristmill.log import logger, warn_once
from gristmill.settings import settings

# How long to wait for another process that compiles the same kernel before compiling it here too.
# Ours take 0.1 s each; the longest known, with every CUDA header, 3 s.
LOCK_SECONDS = 30.0

_memory: Once[str, Binary] = Once()


def load_or_compile(program: Compilable, arch: str) -> Binary:
    """The binary of `program` for `arch` ("sm_90a"); compiled here only if it is in no cache."""
    found_elsewhere = False

    def make() -> Binary:
        nonlocal found_elsewhere
        found_elsewhere = True
        return _from_folder_or_compiler(program, arch)

    binary = _memory.get(program.key(arch), make)
    if not found_elsewhere:
        counters.add("memory_hits")
    return binary


def is_in_folder(program: Compilable, arch: str) -> bool:
    """Whether `load_or_compile` would find the program on disk, of this or any process."""
    path = folder() / f"{program.key(arch)}{entry.SUFFIX}"
    if not path.exists() or why_untrusted(path.parent, settings().cache_dir) is not None:
        return False
    binary = entry.read_binary(path, program, arch)
    return binary is not None and _same_toolchain(binary, program)


def folder() -> Path:
    """Where this user's kernels are kept; it need not exist."""
    return settings().cache_dir / "kernels"


def entries() -> list[Entry]:
    """Every whole kernel in the user's folder, sorted by name. Reads, writes nothing."""
    found = (entry.read_entry(path) for path in sorted(folder().glob(f"*{entry.SUFFIX}")))
    return [item for item in found if item is not None]


def clear() -> int:
    """Delete what the cache has put into the user's folder, and say how many kernels that were.

    Kernels that this process has loaded stay usable.
    """
    removed = 0
    for path in folder().glob("*"):
        if path.suffix in (entry.SUFFIX, ".lock", ".part"):
            path.unlink(missing_ok=True)
            removed += path.suffix == entry.SUFFIX
    return removed


def forget() -> None:
    """Drop the binaries kept in memory, so that the next use reads the folder again (tests)."""
    _memory.clear()


def _from_folder_or_compiler(program: Compilable, arch: str) -> Binary:
    path = folder() / f"{program.key(arch)}{entry.SUFFIX}"
    usable = _usable(path.parent)
    if usable and (binary := _read(path, program, arch)):
        return binary
    if not settings().jit:
        raise KernelNotCached(
            f"{program.source} for {arch} is not in the kernel cache ({path.parent}), and "
            f"GRISTMILL_JIT=off forbids compiling it; "
            f"make it beforehand with GRISTMILL_JIT=on: by gristmill warmup OP --shape ... --dtype "
            f"..., or by making the same call once"
        )
    compiler_of(program).compiler_version()  # no compiler: say so now, before anything is written
    if not (usable and _prepared(path.parent)):
        return _compile(program, arch)
    with _locked(path):
        # Another process may have made it while this one waited.
        if binary := _read(path, program, arch):
            return binary
        binary = _compile(program, arch)
        try:
            write_whole(path, entry.encode(program, arch, binary))
        except OSError as error:
            _warn(path.parent, f"cannot be written to ({error.strerror})")
    return binary


def _usable(place: Path) -> bool:
    reason = why_untrusted(place, settings().cache_dir)
    if reason is not None:
        warn_once(f"untrusted {place}", f"kernels are kept in memory only: {reason}")
    return reason is None


def _prepared(place: Path) -> bool:
    try:
        make_private(place, settings().cache_dir)
    except OSError as error:
        _warn(place, f"cannot be created ({error.strerror})")
        return False
    return True


def _warn(place: Path, reason: str) -> None:
    warn_once(f"unwritable {place}", f"kernels are kept in memory only: {place} {reason}")


def _read(path: Path, program: Compilable, arch: str) -> Binary | None:
    binary = entry.read_binary(path, program, arch)
    if binary is None or not _same_toolchain(binary, program):
        return None
    counters.add("disk_hits")
    return binary


def _same_toolchain(binary: Binary, program: Compilable) -> bool:
    """Whether the compiler of today would make the same binary.

    Where there is no compiler to be asked, or it may not be used, what is kept is what there is.
    """
    if not settings().jit:
        return True
    try:
        # What is installed need not be what is loaded: only the compiler itself can refuse.
        compiler = compiler_of(program)
        same = binary.compiler == compiler.installed_version()
        same = same or binary.compiler == compiler.compiler_version()
        return same and binary.headers == compiler.headers_version(program)
    except CompilerUnavailable:
        return True


def _compile(program: Compilable, arch: str) -> Binary:
    begin = time.perf_counter()
    binary = compiler_of(program).compile_program(program, arch)
    seconds = time.perf_counter() - begin
    counters.add("compiles")
    counters.add("compile_seconds", seconds)
    logger.info("compiled %s for %s in %.2f s", program.source, arch, seconds)
    return binary


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file of one key. Without it, work may be done twice, but never wrongly."""
    from filelock import FileLock

    lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a timeout is an OSError too
        logger.debug("no lock for %s (%s): compiling without it", path.name, error)
    try:
        yield
    finally:
        lock.release()
