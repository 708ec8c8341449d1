"""The tests that need a GPU: most of them in parallel, then those that need the GPU alone.

    PYTHONPATH=src python tools/gpu_tests.py
    PYTHONPATH=src python tools/gpu_tests.py --workers 8 tests/conformance -k softmax --timeout 300

Several processes share one GPU, each with a context and an allocator of its own: by default as many
as there are CPU cores, less one. Tests marked `alone` fill the memory or measure time, so they run
afterwards, one at a time. Without pytest-xdist all run one at a time, in a single call of pytest.
With --long the tests marked `long` run as well. All other arguments are passed to pytest, except
that -n is --workers and -m is an error: the tests are selected here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

NOTHING_TO_DO = 5  # pytest's exit status where no test was selected


def commands(
    workers: int, words: Sequence[str] = (), *, long: bool = False, xdist: bool = True
) -> list[list[str]]:
    """What to run, one after another; `workers`: processes at a time."""
    # vLLM has an environment of its own, and `make test-vllm`.
    wanted = "gpu and not vllm" + ("" if long else " and not long")
    pytest = [sys.executable, "-m", "pytest"]
    # The last -n counts: one in PYTEST_ADDOPTS would have the tests marked `alone` skipped.
    one_process = ["-n", "0"] if xdist else []
    if workers <= 1 or not xdist:
        return [[*pytest, "-m", wanted, *words, *one_process]]
    # Durations differ by up to 1000x: idle workers take tests from busy ones.
    parallel = ["-n", str(workers), "--dist", "worksteal"]
    return [
        [*pytest, "-m", f"{wanted} and not alone", *words, *parallel],
        [*pytest, "-m", f"{wanted} and alone", *words, *one_process],
    ]


def count(text: str) -> int:
    """Processes, as pytest-xdist understands -n."""
    return max(1, (os.cpu_count() or 1) - 1) if text in ("auto", "logical") else int(text)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    # pytest would apply -n and -m to both calls.
    names = ("--workers", "-n", "--numprocesses")
    parser.add_argument(*names, type=count, default=count("auto"), help="processes at a time")
    parser.add_argument("-m", dest="marks", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help="also run the tests marked long")
    options, rest = parser.parse_known_args(words)
    if options.marks is not None:
        parser.error("-m would replace the marks that each call selects; select tests with -k")
    xdist = importlib.util.find_spec("xdist") is not None
    statuses = []
    for command in commands(options.workers, rest, long=options.long, xdist=xdist):
        sys.stderr.write(f"+ {shlex.join(command)}\n")
        sys.stderr.flush()
        statuses.append(subprocess.call(command))
    failed = [status for status in statuses if status not in (0, NOTHING_TO_DO)]
    return failed[0] if failed else min(statuses)


if __name__ == "__main__":
    sys.exit(main())
