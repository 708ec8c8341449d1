"""Where a compiled program comes from: memory, the user's folder, a layer, or the compiler.

One compile per key across threads (`Once`) and processes (a lock file per key); no lock that
another key could wait for. The folder is a help and never a need: whatever goes wrong with it is
one warning, and kernels are then kept in memory only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import CompilerUnavailable, KernelNotCached
from gristmill.jit import counters, entry
from gristmill.jit.binary import Binary
from gristmill.jit.compilers import Compilable, compiler_of, to_text
from gristmill.jit.entry import Entry
from gristmill.jit.file_lock import locked_file
from gristmill.jit.folder import (
    PART,
    UntrustedError,
    make_folders,
    names_in,
    read_file,
    remove_stale_parts,
    why_untrusted,
    write_whole,
)
from gristmill.jit.layers import forget_layers, layers
from gristmill.jit.once import Once
from gristmill.log import logger, warn_once
from gristmill.settings import CACHE_DIR, settings

# How long to wait for another process that compiles the same kernel before compiling it here too.
# Ours take 0.1 s each; the longest known, with every CUDA header, 3 s.
LOCK_SECONDS = 30.0

_LOCK = ".lock"
_memory: Once[str, Binary] = Once()
# Keys that the folder or a layer is known to have: read from there by this process, or written.
_stored: set[str] = set()
_tidied: Once[Path, None] = Once()
_rejected: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class Kept:
    """A whole kernel in the user's folder."""

    path: Path
    size: int
    modified: float
    entry: Entry


def load_or_compile(program: Compilable, arch: str) -> Binary:
    """The binary of `program` for `arch` ("sm_90a"); compiled here only if it is in no cache."""
    found_elsewhere = False

    def make() -> Binary:
        nonlocal found_elsewhere
        found_elsewhere = True
        return _kept(program, arch) or _made(program, arch)

    binary = _memory.get(program.key(arch), make)
    if not found_elsewhere:
        counters.add("memory_hits")
    return binary


def is_cached(program: Compilable, arch: str) -> bool:
    """Whether folder or layers have the program. If so it is in memory now, too."""
    key = program.key(arch)
    if key not in _stored:
        binary = _kept(program, arch)
        if binary is None:
            return False
        _memory.get(key, lambda: binary)
    return True


def is_in_folder(program: Compilable, arch: str) -> bool:
    """Whether the user's own folder has the program, of this or any process."""
    return _in_folder(program, arch) is not None


def folder() -> Path | None:
    """Where this user's kernels are kept; it need not exist. None: nowhere."""
    top = settings().cache_dir
    return None if top is None else top / "kernels"


def why_unusable() -> str | None:
    """Why nothing is read from the user's folder, if so."""
    top = settings().cache_dir
    if top is None:
        return f"this user has no home folder; set {CACHE_DIR.name} to the path of one for kernels"
    return why_untrusted(top / "kernels", top)


def is_writable() -> bool:
    """Whether what one process compiles is there for another. Makes the folder if it can."""
    place = _usable_folder()
    return place is not None and _is_prepared(place) and os.access(place, os.W_OK)


def entries() -> list[Kept]:
    """Every whole kernel in the user's folder, sorted by name. Reads, writes nothing."""
    found = []
    place = folder()
    for name in [] if place is None else names_in(place, suffix=entry.SUFFIX):
        assert place is not None
        with contextlib.suppress(OSError):
            status = (place / name).stat()
            about = entry.describe(read_file(place, name))
            if about is not None:
                found.append(Kept(place / name, status.st_size, status.st_mtime, about))
    return found


def clear() -> int:
    """Delete what the cache has put into the user's folder, and say how many kernels that were.

    Kernels that this process has loaded stay usable; whoever asks for one again brings it back into
    the folder. Layers are not touched. What cannot be deleted is left, and the first reason raised
    when all else is gone.
    """
    removed = 0
    failed: OSError | None = None
    place = folder()
    for name in [] if place is None else names_in(place):
        assert place is not None
        path = place / name
        if path.suffix in (entry.SUFFIX, _LOCK, PART):
            try:
                path.unlink(missing_ok=True)
                removed += path.suffix == entry.SUFFIX
            except OSError as error:
                failed = failed or error
    _memory.clear()
    _stored.clear()
    if failed is not None:
        raise failed
    return removed


def encoded(program: Compilable, arch: str) -> tuple[str, bytes]:
    """The file of `program` for `arch`, name and content, for a bundle."""
    binary = load_or_compile(program, arch)
    name = entry.file_name(program.key(arch), binary.compiler, binary.headers)
    return name, entry.encode(program, arch, binary)


def forget() -> None:
    """Drop what is kept in memory, so that the next use reads folder and layers again (tests)."""
    _memory.clear()
    _stored.clear()
    _tidied.clear()
    _rejected.clear()
    forget_layers()


def _kept(program: Compilable, arch: str) -> Binary | None:
    """From the folder or a layer; counted. The compiler is loaded only if neither has it."""
    start = time.perf_counter()
    place = _usable_folder()
    if place is not None and (binary := _at_hand(place, program, arch)):
        counters.add("disk_hits")
        return _found(binary, program, arch, place, start)
    if found := _in_layers(program, arch):
        binary, origin = found
        counters.add("layer_hits")
        return _found(binary, program, arch, origin, start)
    if place is not None and (binary := _in_folder(program, arch)):
        counters.add("disk_hits")
        return _found(binary, program, arch, place, start)
    return None


def _made(program: Compilable, arch: str) -> Binary:
    """From the compiler, and into the folder."""
    if not settings().jit:
        raise KernelNotCached(_not_cached(program, arch))
    compiler = compiler_of(program)
    version = compiler.compiler_version()  # no compiler: say so now, before anything is written
    place = _usable_folder()
    if place is None or not _is_prepared(place):
        return _compile(program, arch, None)
    name = entry.file_name(program.key(arch), version, compiler.headers_version(program))
    lock = place / f"{name}{_LOCK}"
    with locked_file(lock, LOCK_SECONDS):
        # Another process may have made it while this one waited.
        binary = _in_folder(program, arch)
        if binary is not None:
            counters.add("disk_hits")
        else:
            binary = _compile(program, arch, place)
            try:
                write_whole(place / name, entry.encode(program, arch, binary))
                _stored.add(program.key(arch))
            except OSError as error:
                _warn(place, f"cannot be written to ({error.strerror})")
                return binary
            _rejected.discard((place, name))
        # Whoever still waits for this lock, or makes it anew, finds the kernel before compiling.
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
    return binary


def _in_folder(program: Compilable, arch: str) -> Binary | None:
    """Of the compiler that is here; where there is none, or it may not be used, of any."""
    place = folder()
    if place is None or why_unusable() is not None:
        return None
    if binary := _at_hand(place, program, arch):
        return binary
    if not settings().jit:
        return None
    try:
        # What is installed need not be what is loaded.
        return _of_compiler(place, program, arch, compiler_of(program).compiler_version())
    except CompilerUnavailable:
        return _of_any_compiler(place, program, arch)


def _at_hand(place: Path, program: Compilable, arch: str) -> Binary | None:
    """What can be found without loading a compiler, which takes longer than all the rest."""
    if not settings().jit:
        return _of_any_compiler(place, program, arch)
    return _of_compiler(place, program, arch, compiler_of(program).installed_version())


def _of_compiler(place: Path, program: Compilable, arch: str, version: str) -> Binary | None:
    headers = compiler_of(program).headers_version(program)
    return _read(place, entry.file_name(program.key(arch), version, headers), program, arch)


def _of_any_compiler(place: Path, program: Compilable, arch: str) -> Binary | None:
    for name in names_in(place, f"{program.key(arch)}.", entry.SUFFIX):
        if binary := _read(place, name, program, arch):
            return binary
    return None


def _in_layers(program: Compilable, arch: str) -> tuple[Binary, Path] | None:
    for layer in layers():
        for content in layer.kernels(program.key(arch)):
            if binary := entry.decode(content, program, arch):
                return binary, layer.path
            _reject(layer.path, program.key(arch), "damaged, or of another program")
    return None


def _read(place: Path, name: str, program: Compilable, arch: str) -> Binary | None:
    try:
        content = read_file(place, name)
    except UntrustedError as error:
        _reject(place, name, str(error))
        return None
    except OSError:
        return None
    binary = entry.decode(content, program, arch)
    # The name says which compiler made it; what it says itself must be the same.
    if binary is None or name != entry.file_name(
        program.key(arch), binary.compiler, binary.headers
    ):
        _reject(place, name, "damaged, or not what its name says")
        return None
    return binary


def _reject(place: Path, name: str, reason: str) -> None:
    """Count and log a file once, though it is looked at several times before it is replaced."""
    if (place, name) in _rejected:
        return
    _rejected.add((place, name))
    counters.add("rejected")
    logger.info("rejected %s in %s: %s", name, place, reason)


def _usable_folder() -> Path | None:
    """The user's folder, if it may be read from; the reason why not is told once."""
    if reason := why_unusable():
        warn_once(f"folder {folder()}", f"kernels are kept in memory only: {reason}")
        return None
    return folder()


def _is_prepared(place: Path) -> bool:
    try:
        make_folders(place)
    except OSError as error:
        _warn(place, f"cannot be created ({error.strerror})")
        return False
    _tidied.get(place, lambda: _tidy(place))
    return True


def _tidy(place: Path) -> None:
    with contextlib.suppress(OSError):
        remove_stale_parts(place)


def _warn(place: Path, reason: str) -> None:
    warn_once(f"folder {place}", f"kernels are kept in memory only: {place} {reason}")


def _compile(program: Compilable, arch: str, place: Path | None) -> Binary:
    start = time.perf_counter()
    binary = compiler_of(program).compile_program(program, arch)
    note_compile(program, arch, time.perf_counter() - start, place)
    return binary


def note_compile(program: Compilable, arch: str, seconds: float, place: Path | None) -> None:
    """Count and log a compile, in this process or in one that works for it."""
    counters.add("compiles")
    counters.add("compile_seconds", seconds)
    kept = "memory only" if place is None else str(place)
    names = ", ".join(program.names)
    logger.info("compiled %s %s for %s in %.2f s: %s", program.source, names, arch, seconds, kept)


def _found(binary: Binary, program: Compilable, arch: str, place: Path, start: float) -> Binary:
    seconds, names = time.perf_counter() - start, ", ".join(program.names)
    logger.debug("found %s %s for %s in %.4f s: %s", program.source, names, arch, seconds, place)
    _stored.add(program.key(arch))
    return binary


def _not_cached(program: Compilable, arch: str) -> str:
    searched = [str(folder() or "no folder of the user"), *map(str, settings().cache_layers)]
    command = (
        f"gristmill warmup --arch {arch} --bundle FILE --program {shlex.quote(to_text(program))}"
    )
    return (
        f"{program.source} ({', '.join(program.names)}) for {arch} is in no cache "
        f"({', '.join(searched)}), and GRISTMILL_JIT=off forbids compiling it; make it where a "
        f"compiler is, by: {command}; then name FILE in GRISTMILL_CACHE_LAYERS, or give it to "
        f"gristmill cache import. Many at once: gristmill warmup OPS --all --arch {arch} --bundle "
        f"FILE, or --recorded with what GRISTMILL_RECORD has written"
    )
