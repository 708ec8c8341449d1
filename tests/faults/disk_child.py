"""What runs on the faulty disk: one fault after another, in one process that has it preloaded.

Each function tries a fault at every operation that its scenario makes, and gives back, in words,
what was not as it should be.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_helpers import (
    ARCH,
    fresh,
    heard_warnings,
    is_right,
    program,
    use_fake_compiler,
    write_source,
)
from faulty_disk import ALL, KILL, count, faults

from gristmill.errors import KernelNotCached
from gristmill.jit import bundle, cache, counters, entry, layers
from gristmill.jit.program import Program

# A scenario leaves a place as it should be found, and then does what must survive any fault. It
# gives what went wrong, or how to find out when the disk is well again.
Check = Callable[[], "str | None"]
Before = Callable[[Path, Program], None]
During = Callable[[Path, Program], "str | Check | None"]

MOST_OPERATIONS = 500


def _nothing(place: Path, wanted: Program) -> None:
    fresh(place / "home" / "cache")


def _warm(place: Path, wanted: Program) -> None:
    _nothing(place, wanted)
    cache.load_or_compile(wanted, ARCH)
    fresh(place / "home" / "cache")


def _damaged(place: Path, wanted: Program) -> None:
    _warm(place, wanted)
    for path in (place / "home" / "cache" / "kernels").glob("*.kernel"):
        path.write_bytes(path.read_bytes()[:-1])


def _warm_without_jit(place: Path, wanted: Program) -> None:
    _warm(place, wanted)
    fresh(place / "home" / "cache", GRISTMILL_JIT="off")


def _load(place: Path, wanted: Program) -> str | None:
    for one in (wanted, program(place.parent / "sources", 1)):
        if not is_right(cache.load_or_compile(one, ARCH), one):
            return "a wrong binary"
    return None


def _load_if_there(place: Path, wanted: Program) -> str | None:
    try:
        found = cache.load_or_compile(wanted, ARCH)
    except KernelNotCached:
        return None
    return None if is_right(found, wanted) else "a wrong binary"


def _ask(place: Path, wanted: Program) -> str | None:
    cache.is_cached(wanted, ARCH)
    return None


def _list(place: Path, wanted: Program) -> str | None:
    found = cache.entries()
    if any(one.entry.key != wanted.key(ARCH) for one in found):
        return f"a list of {found}"
    return None


def _clear(place: Path, wanted: Program) -> str | None:
    """It may fail, and say so by an OSError; what stays is whole."""
    with contextlib.suppress(OSError):
        cache.clear()
    return None


def _folder_layer(place: Path, wanted: Program) -> None:
    fresh(place / "layer")
    for number in (0, 1):
        cache.load_or_compile(program(place.parent / "sources", number), ARCH)
    fresh(place / "home" / "cache", GRISTMILL_CACHE_LAYERS=str(place / "layer"))


def _bundle(place: Path, wanted: Program) -> None:
    fresh(place / "elsewhere")
    made = [cache.encoded(program(place.parent / "sources", number), ARCH) for number in (0, 1)]
    (place / "layer").mkdir()
    bundle.write(place / "layer" / "kernels.bundle", made)
    _nothing(place, wanted)


def _bundle_layer(place: Path, wanted: Program) -> None:
    _bundle(place, wanted)
    fresh(place / "home" / "cache", GRISTMILL_CACHE_LAYERS=str(place / "layer" / "kernels.bundle"))


def _write_bundle(place: Path, wanted: Program) -> Check:
    """A bundle is written whole or not at all, and whoever writes it is told."""
    path = place / "layer" / "kernels.bundle"
    other = (entry.file_name("other-sm_90a-0", "", ""), random.Random(0).randbytes(5000))
    told = False
    try:
        bundle.write(path, [cache.encoded(wanted, ARCH), other])
    except OSError:
        told = True

    def check() -> str | None:
        new = bundle.damages(path) == [
            f"kernels/{other[0]}: is not a kernel, or not the one that its name says"
        ]
        if not new and bundle.damages(path):
            return "a bundle that is neither the old nor the new one"
        return None if new or told else "the old bundle, and no error"

    return check


# The part of the place whose disk fails, and how many warnings there may be: of a layer, one for
# each of its files.
WHERE: dict[str, tuple[str, int]] = {
    "folder layer": ("layer", 2),
    "bundle layer": ("layer", 2),
    "write a bundle": ("layer", 0),
}
SCENARIOS: dict[str, tuple[Before, During]] = {
    "empty": (_nothing, _load),
    "warm": (_warm, _load),
    "damaged": (_damaged, _load),
    "jit off": (_warm_without_jit, _load_if_there),
    "ask": (_warm, _ask),
    "list": (_warm, _list),
    "clear": (_warm, _clear),
    "folder layer": (_folder_layer, _load),
    "bundle layer": (_bundle_layer, _load),
    "write a bundle": (_bundle, _write_bundle),
}


def every_fault(
    folder: str, scenario: str, codes: list[int], lasting: bool, kinds: int = ALL, step: int = 0
) -> list[str]:
    """A fault at the first operation of the scenario, at the second, and so on to its last."""
    top = Path(folder)
    write_source(top / "sources")
    use_fake_compiler()
    cache.LOCK_SECONDS = 0.02
    before, during = SCENARIOS[scenario]
    part, warnings = WHERE.get(scenario, ("", 1))
    wrong: list[str] = []
    tried = 0
    for code in codes:
        for at in range(1, MOST_OPERATIONS):
            place = top / "place"
            wanted = program(top / "sources")
            before(place, wanted)
            files = open_files()
            with (
                heard_warnings() as heard,
                faults(place / part, at, code, lasting=lasting, kinds=kinds, step=step),
            ):
                what: str | Check | None
                try:
                    what = during(place, wanted)
                except BaseException as error:
                    what = f"{type(error).__name__}: {error}"
                reached = count() >= at
            if callable(what):
                what = what()
            _close_layers()
            if what is None and len(heard) > warnings:
                what = f"{len(heard)} warnings: {heard}"
            if what is None and (left := open_files() - files):
                what = f"files left open: {sorted(left)}"
            if what is None:
                what = _afterwards(place, wanted)
            if what is not None:
                wrong.append(f"{errno.errorcode[code]} at operation {at}: {what}")
            shutil.rmtree(place, ignore_errors=True)
            tried += 1
            if not reached:
                break
        else:
            wrong.append("it never ends")
    if tried < (6 if kinds == ALL else 2) * len(codes):
        wrong.append(f"only {tried} operations were seen: is the library preloaded?")
    return wrong


def _close_layers() -> None:
    """A layer stays open as long as its process, which here sees hundreds of them."""
    for layer in layers.layers():
        if isinstance(layer, layers.BundleLayer):
            layer._bundle.close()


def _afterwards(place: Path, wanted: Program) -> str | None:
    """The disk is well again: nothing that was left there does harm, and the cache works."""
    fresh(place / "home" / "cache")
    with heard_warnings() as heard:
        if what := _load(place, wanted):
            return f"{what} after the fault"
        cache.forget()
        if what := _load(place, wanted):
            return f"{what} after that"
    if heard:
        return f"afterwards warned of {heard}"
    if not cache.is_in_folder(wanted, ARCH):
        return "afterwards nothing is kept"
    return None


def open_files() -> set[str]:
    """Each with what it is; the one that lists them is gone when it is looked at."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{path.name}: {path.readlink()}")
    return found


def killed_at_every_operation(folder: str, step: int) -> list[str]:
    """A process that is killed before the first operation of a write, before the second, ...

    A write takes `step` bytes at once, so that most of these moments are amid the file.
    """
    top = Path(folder)
    write_source(top / "sources")
    use_fake_compiler()
    wanted = program(top / "sources")
    place = top / "place"
    wrong: list[str] = []
    for at in range(1, MOST_OPERATIONS):
        child = os.fork()
        if child == 0:
            fresh(place / "home" / "cache")
            with faults(place, at, KILL, step=step):
                cache.load_or_compile(wanted, ARCH)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        how = os.waitstatus_to_exitcode(status)
        if what := _harm(place, wanted):
            wrong.append(f"killed at operation {at}: {what}")
        shutil.rmtree(place, ignore_errors=True)
        if how != -signal.SIGKILL:
            if how != 0 or at < 15:
                wrong.append(f"the child ended with {how} at operation {at}")
            break
    else:
        wrong.append("it never ends")
    return wrong


def _harm(place: Path, wanted: Program) -> str | None:
    """What is in the cache: nothing, or the right binary; and it can be mended."""
    fresh(place / "home" / "cache", GRISTMILL_JIT="off")
    if what := _load_if_there(place, wanted):
        return what
    return _afterwards(place, wanted)


def killed_at_random(folder: str, times: int, numbers: int, step: int) -> dict[str, Any]:
    """Kill a process that fills a cache, `times` times; after each, read all that is there."""
    top = Path(folder)
    write_source(top / "sources")
    use_fake_compiler()
    home, chance = top / "cache", random.Random(times)
    wrong: list[str] = []
    found = left = longest = 0
    for number in range(times):
        begun, begin = os.pipe()
        child = os.fork()
        if child == 0:
            _write_for_ever(home, top / "sources", numbers, step, begin)
        os.close(begin)
        os.read(begun, 1)
        os.close(begun)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = max(left, len(list((home / "kernels").glob(".*"))))
        there, bad = _read_all(home, top / "sources", numbers)
        found += there
        longest = max(longest, there)
        wrong += [f"kill {number}: {what}" for what in bad]
    return {"wrong": wrong, "found": found, "left": left, "longest": longest}


def _write_for_ever(home: Path, sources: Path, numbers: int, step: int, begin: int) -> None:
    """Fill a cache again and again, slowly, until somebody kills this process."""
    while True:
        fresh(home)
        with faults(home, 0, 0, step=step, pause_us=20):
            os.write(begin, b".")
            for number in range(numbers):
                cache.load_or_compile(program(sources, number), ARCH)
        for path in (home / "kernels").glob("*.kernel"):
            path.unlink()


def _read_all(home: Path, sources: Path, numbers: int) -> tuple[int, list[str]]:
    """How many kernels can be loaded without a compiler, and which are not what they should be."""
    fresh(home, GRISTMILL_JIT="off")
    there, wrong = 0, []
    for number in range(numbers):
        one = program(sources, number)
        try:
            right = is_right(cache.load_or_compile(one, ARCH), one)
        except KernelNotCached:
            continue
        except Exception as error:
            wrong.append(f"number {number}: {type(error).__name__}: {error}")
            continue
        there += 1
        if not right:
            wrong.append(f"number {number} is wrong")
    if counters.snapshot()["rejected"]:
        wrong.append("a damaged file has the name of a kernel")
    return there, wrong
