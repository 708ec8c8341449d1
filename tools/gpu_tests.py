"""The tests that need a GPU: most of them in parallel, then those that need the GPU alone.

    PYTHONPATH=src python tools/gpu_tests.py
    PYTHONPATH=src python tools/gpu_tests.py --workers 8 tests/conformance -k softmax --timeout 300

Several processes share one GPU, each with a context and an allocator of its own: by default as many
as there are CPU cores, less one. Tests marked `alone` fill the memory or measure time, so they run
afterwards, one at a time. Without pytest-xdist all run one at a time, in a single call of pytest.
With --long the tests marked `long` run as well. All other arguments are passed to pytest.
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


def commands(workers: int, words: Sequence[str] = (), *, long: bool = False) -> list[list[str]]:
    """What to run, one after another; `workers`: processes at a time."""
    # vLLM has an environment of its own, and `make test-vllm`.
    wanted = "gpu and not vllm" + ("" if long else " and not long")
    pytest = [sys.executable, "-m", "pytest"]
    if workers <= 1:
        return [[*pytest, "-m", wanted, *words]]
    # Durations differ by up to 1000x: idle workers take tests from busy ones.
    parallel = ["-n", str(workers), "--dist", "worksteal"]
    return [
        [*pytest, "-m", f"{wanted} and not alone", *parallel, *words],
        [*pytest, "-m", f"{wanted} and alone", *words],
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--long", action="store_true")
    options, rest = parser.parse_known_args(words)
    able = importlib.util.find_spec("xdist") is not None
    statuses = []
    for command in commands(options.workers if able else 1, rest, long=options.long):
        sys.stderr.write(f"+ {shlex.join(command)}\n")
        sys.stderr.flush()
        statuses.append(subprocess.call(command))
    failed = [status for status in statuses if status not in (0, NOTHING_TO_DO)]
    return failed[0] if failed else min(statuses)


if __name__ == "__main__":
    sys.exit(main())
