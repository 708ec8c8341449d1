"""The `host` and `start` suites: what a call costs before any kernel runs.

Both decide small problems: at a decoding batch of one a kernel takes 2 µs and its call 10.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.bench.inputs import dtype_of
from gristmill.bench.results import Results, Row
from gristmill.bench.suites import OPS
from gristmill.errors import GristmillError
from gristmill.select.timing import time_host

SHAPES = ((1, 4096), (256, 4096))
MODES = ("forward", "forward with grad", "backward")
HOST_STEPS = len(SHAPES) * len(MODES)
CACHES = ("empty", "warm")
START_STEPS = len(OPS) * len(CACHES)
START_SHAPE = (256, 4096)
# Generous, because importing torch from a cold disk can take minutes.
START_TIMEOUT_S = 600


def run_host(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    *,
    dtype: str = "bfloat16",
    rounds: int = 3,
) -> None:
    """Host µs of eager calls of gristmill and of torch; the best of `rounds`, taken in turns."""
    for rows, columns in SHAPES:
        for mode in MODES:
            advance(f"host {mode} {rows}x{columns}")
            calls = _host_calls(mode, rows, columns, dtype_of(dtype), device)
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(rounds):
                for impl, (function, args) in calls.items():
                    best[impl] = min(best[impl], time_host(function, args))
            shape = {"op": "rms_norm", "dtype": dtype, "M": rows, "N": columns}
            results.add(
                [
                    {**shape, "impl": impl, "mode": mode, "host_us": round(us, 2)}
                    for impl, us in best.items()
                ]
            )


def _host_calls(
    mode: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    import gristmill

    grad = mode != "forward"
    x = torch.randn(rows, columns, dtype=dtype, device=device, requires_grad=grad)
    weight = torch.randn(columns, dtype=dtype, device=device, requires_grad=grad)
    if mode != "backward":
        return {
            "gristmill": (gristmill.rms_norm, (x, weight)),
            "eager": (F.rms_norm, (x, (columns,), weight, 1e-6)),
        }
    dy = torch.randn_like(x)

    def backward(y: torch.Tensor) -> Any:
        # The graph is kept, so that the same backward can be called again and again.
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    return {
        "gristmill": (backward, (gristmill.rms_norm(x, weight),)),
        "eager": (backward, (F.rms_norm(x, (columns,), weight, 1e-6),)),
    }


def run_start(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    *,
    dtype: str = "bfloat16",
    repeats: int = 3,
) -> None:
    """Seconds of the first call in a fresh process: with an empty cache, then with a warm one."""
    for name in OPS:
        for cache in CACHES:
            advance(f"start {name}, {cache} cache")
            results.add([_start_row(name, cache, device, dtype, repeats)])


def _start_row(name: str, cache: str, device: torch.device, dtype: str, repeats: int) -> Row:
    rows, columns = START_SHAPE
    row: Row = {
        "op": name,
        "dtype": dtype,
        "M": rows,
        "N": columns,
        "impl": "gristmill",
        "cache": cache,
        "error": None,
    }
    seen = []
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        for number in range(repeats + (cache == "warm")):
            place = Path(folder) / (f"cache{number}" if cache == "empty" else "cache")
            place.mkdir(mode=0o700, exist_ok=True)
            try:
                seen.append(_first_call(OPS[name], (rows, columns), dtype, device, place))
            except GristmillError as error:
                row["error"] = str(error)
                return row
    if cache == "warm":
        seen = seen[1:]  # the one that filled it
    row["first_call_s"] = round(median(run["first_call_s"] for run in seen), 4)
    row["import_s"] = round(median(run["import_s"] for run in seen), 4)
    row["variant"] = seen[-1]["variant"]
    row["compiles"] = seen[-1]["compiles"]
    return row


def _first_call(
    op: str, shape: Sequence[int], dtype: str, device: torch.device, cache: Path
) -> dict[str, Any]:
    # The child gets this process's import path, so that it measures the same code, and its
    # environment but for the cache folder; `env` sets that without this process reading it.
    script = (
        "import json, sys, time, torch; sys.path[:] = json.loads(sys.argv[1]); "
        "start = time.perf_counter(); import gristmill; seconds = time.perf_counter() - start; "
        "from gristmill.bench.first_call import main; main(sys.argv[2:], seconds)"
    )
    paths = json.dumps([str(Path(entry).resolve()) for entry in sys.path])
    words = [op, "x".join(map(str, shape)), dtype, str(device)]
    command = ["env", f"GRISTMILL_CACHE_DIR={cache}", sys.executable, "-c", script, paths, *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=START_TIMEOUT_S
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no output").splitlines()[-1]
        raise GristmillError(f"the first call of {op} failed in a fresh process: {last}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise GristmillError(f"the first call of {op} gave no answer: {error}") from error
    return answer
