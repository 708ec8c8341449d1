"""A measurement in a process of its own, where nothing is loaded and nothing remembered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gristmill.errors import GristmillError
from gristmill.jit import child

# Generous, because importing torch from a cold disk can take minutes.
TIMEOUT_S = 600
_WATCH_S = 1.0

# Writes bytecode, so that the sources of modules are compiled once, as in an installed package.
_SCRIPT = """
import importlib, sys, time
sys.dont_write_bytecode = False
start = time.perf_counter()
import torch
seconds = {"torch_import_s": time.perf_counter() - start}
start = time.perf_counter()
import gristmill
seconds["import_s"] = time.perf_counter() - start
importlib.import_module(sys.argv[1]).main(sys.argv[2:], seconds)
"""


def in_fresh_process(
    module: str, words: Sequence[str], environment: Mapping[str, str], what: str
) -> dict[str, Any]:
    """The JSON that `main(words, imports)` of `module` writes as the last line of its stdout.

    `imports` are the seconds of importing torch and then gristmill, as "torch_import_s" and
    "import_s".
    `environment` is added to that of this process. GristmillError, saying `what` failed, if there
    is no such line.
    """
    command = child.command(_SCRIPT, module, *words, environment=environment)
    try:
        done = subprocess.run(
            command,
            cwd=os.sep,  # torch starts Pythons of its own, which import from there
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no output").splitlines()[-1]
        raise GristmillError(f"{what} failed in a fresh process: {last}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise GristmillError(f"{what} gave no answer: {error}") from error
    return answer


def end_with(parent: int) -> None:
    """In a child: when the process that started it is gone, end it, and all that it has started.

    A group of its own is what a terminal's interrupt, or a killed parent, does not reach; an engine
    that starts for minutes would keep the GPU from whoever is next.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def beyond_the_first(many: Sequence[float], few: Sequence[float], tokens: int) -> float:
    """Time of a token after the first: of runs of `tokens` tokens, less that of runs of one.

    GristmillError where a run of one took as long: then something else took the time.
    """
    found = (median(many) - median(few)) / (tokens - 1)
    if found <= 0:
        raise GristmillError(
            f"{tokens} tokens took {median(many):.3g}, and one took {median(few):.3g}: the machine "
            "is too busy to be measured"
        )
    return found
