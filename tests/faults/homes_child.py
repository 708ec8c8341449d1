"""A user without a home, or with one that is no use: what a process of theirs does."""

from __future__ import annotations

import os
from typing import Any

from fault_helpers import ARCH, heard_warnings, is_right, program, use_fake_compiler

from gristmill.errors import GristmillError
from gristmill.jit import cache, counters
from gristmill.settings import reload_settings


def load_as(user: int, sources: str, variables: dict[str, str | None]) -> dict[str, Any]:
    """Load three kernels, two of them twice, as `user`, with variables of the environment set."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    use_fake_compiler()
    wanted = [program(sources, number) for number in (0, 1, 0, 1, 2)]
    keys = [one.key(ARCH) for one in wanted]  # reads the sources
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    reload_settings()
    with heard_warnings() as heard:
        right = [is_right(cache.load_or_compile(one, ARCH), one) for one in wanted]
        cached = cache.is_in_folder(wanted[0], ARCH)
        listed = [one.entry.key for one in cache.entries()]
        cache.forget()
        os.environ["GRISTMILL_JIT"] = "off"
        reload_settings()
        try:
            cache.load_or_compile(wanted[0], ARCH)
            message = ""
        except GristmillError as error:
            message = f"{type(error).__name__}: {error}"
    values = counters.snapshot()
    return {
        "right": right,
        "warnings": heard,
        "compiles": values["compiles"],
        "hits": values["disk_hits"],
        "cached": cached,
        "listed": [key in keys for key in listed],
        "jit off": message,
        "user": os.getuid(),
        "folder": str(cache.folder()),
    }
