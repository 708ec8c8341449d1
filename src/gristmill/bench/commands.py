"""The command that measures a row of results again.

It names what the row is about and no more: all implementations of a problem are timed in turns, so
its rows share one command. Rows of whole models have a process each, and a command each; what they
are held against comes with them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from gristmill.bench.experts.models import KNOWN
from gristmill.bench.results import Row
from gristmill.bench.suites import KINDS

_DEFAULT_DTYPE = "bfloat16"
# Rows that say what they are by another name than that of their suite.
_SUITES = {"matrix": "regret", "host": "host_cost"}


def suite_of(row: Row) -> str | None:
    """The suite that a row comes from, also of files whose rows do not say it."""
    if "suite" in row:
        return _SUITES.get(row["suite"], str(row["suite"]))
    if "mode" in row:
        return "host_cost"
    if "cache" in row:
        return "cold_start"
    return KINDS[row["op"]].suite if row.get("op") in KINDS else None


def command_of(row: Row, *, device: str | None = None) -> str:
    """A line for a shell, as in `gristmill bench rms_norm --op rms_norm --shape 1x4096 ...`.

    `device`: "cpu" for rows of a CPU, which elsewhere would be measured on the GPU. Of a row that
    no suite knows, nothing: "".
    """
    suite = suite_of(row)
    if suite is None:
        return ""
    words = ["gristmill", "bench", suite, *_OPTIONS.get(suite, _problem)(row)]
    if device == "cpu":
        words += ["--device", "cpu"]
    return shlex.join(words)


def _problem(row: Row) -> list[str]:
    """A problem of an op at a shape; of the experts of a known model by its name."""
    words = ["--op", str(row["op"])]
    if row.get("model") in KNOWN:
        words += ["--models", row["model"], "--rows", str(row["M"])]
    else:
        words += ["--shape", _shape(row)]
    if row.get("routing"):
        words += ["--routing", str(row["routing"])]
    return [*words, *_dtype(row)]


def _shape(row: Row) -> str:
    return str(row["shape"]) if row.get("shape") else f"{row['M']}x{row['N']}"


def _dtype(row: Row) -> list[str]:
    """Nothing of what is measured by default."""
    dtype = row.get("dtype") or _DEFAULT_DTYPE
    return [] if dtype == _DEFAULT_DTYPE else ["--dtype", str(dtype)]


def _host(row: Row) -> list[str]:
    # The suite's shapes are rows x columns, also of a square weight.
    return ["--op", str(row["op"]), "--shape", f"{row['M']}x{row['N']}", *_dtype(row)]


def _start(row: Row) -> list[str]:
    return ["--op", str(row["op"])]


def _choice(row: Row) -> list[str]:
    return ["--op", str(row["op"]), *_dtype(row)]


def _regret(row: Row) -> list[str]:
    if row["suite"] == "matrix":  # all sizes of an op come together
        return _choice(row)
    every = ["--all-launches"] if row.get("launches") == "all" else []
    return ["--op", str(row["op"]), "--shape", _shape(row), *_dtype(row), *every]


def _served(row: Row) -> list[str]:
    batch = ["--batches", str(row["batch"])] if "batch" in row else []
    return ["--models", str(row["op"]), *batch, "--impls", str(row["impl"])]


def _patched(row: Row) -> list[str]:
    impl = str(row["impl"])
    baseline = "eager"
    if row["op"] == "generation":
        baseline = "bf16_graph" if impl.endswith("_graph") else "bf16"
    return ["--op", str(row["op"]), "--impls", ",".join(dict.fromkeys([baseline, impl]))]


def _block(row: Row) -> list[str]:
    # Batches are those of decoding.
    batch = [] if str(row["op"]).startswith("training") else ["--batches", str(row["batch"])]
    impls = ",".join(dict.fromkeys(["eager", str(row["impl"])]))
    return ["--op", str(row["op"]), *batch, "--impls", impls]


_OPTIONS: dict[str, Callable[[Row], list[str]]] = {
    "host_cost": _host,
    "cold_start": _start,
    "choice": _choice,
    "regret": _regret,
    "end_to_end": _block,
    "vllm": _served,
    "transformers": _patched,
}
