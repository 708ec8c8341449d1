"""What a process with an odd umask makes: the modes, in the end and meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fault_helpers import ARCH, heard_warnings, is_right, program, use_fake_compiler

from gristmill.jit import bundle, cache, counters
from gristmill.jit.folder import make_folders, write_whole
from gristmill.settings import reload_settings


def make_with_umask(mask: int, user: int, sources: str, place: str) -> dict[str, Any]:
    """As `user`: a kernel in a cache that is not there yet, and a file and folders beside it."""
    use_fake_compiler()
    wanted = program(sources)
    wanted.key(ARCH)  # reads the sources
    if os.getuid() == 0 and user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.environ["GRISTMILL_CACHE_DIR"] = f"{place}/home/.cache/gristmill"
    reload_settings()
    made: list[int] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and str(arguments[0]).startswith(place):
            made.append(arguments[1] & ~mask)
        elif event == "os.chmod" and isinstance(arguments[0], str):  # else a handle, of a file
            made.append(arguments[1])

    os.umask(mask)
    sys.addaudithook(hear)
    with heard_warnings() as heard:
        right = is_right(cache.load_or_compile(wanted, ARCH), wanted)
        make_folders(Path(place, "a", "b", "c"))
        write_whole(Path(place, "a", "private"), b"x")
        write_whole(Path(place, "a", "public"), b"x", mode=0o644)
        bundle.write(Path(place, "a", "one.bundle"), [cache.encoded(wanted, ARCH)])
    cache.forget()
    again = is_right(cache.load_or_compile(wanted, ARCH), wanted)
    modes = {
        str(path.relative_to(place)): path.stat().st_mode & 0o7777
        for path in Path(place).rglob("*")
        if path.suffix != ".lock"
    }
    return {
        "right": right and again,
        "hits": counters.snapshot()["disk_hits"],
        "warnings": heard,
        "modes": modes,
        "ever": made,
    }
