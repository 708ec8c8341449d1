"""The suite `cold_start`: what gristmill adds to the start of a process, beyond torch's own.

Three caches: an empty one; a warm one, the folder of a run before; and a bundle, made of that
folder and the only source there is (`GRISTMILL_JIT=off`, an empty folder). Every number is that of
a fresh process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gristmill.bench.cold_start.models import FORMS, LLAMA
from gristmill.bench.fresh import in_fresh_process
from gristmill.bench.results import OURS, Results, Row
from gristmill.bench.suites import Task, known, written
from gristmill.errors import GristmillError
from gristmill.jit import bundle
from gristmill.settings import VARIABLES

SUITE = "cold_start"
CACHES = ("empty", "warm", "bundle")
# Seconds beyond torch's own start, of a whole model on an H200.
GOALS = {"empty": 3.0, "warm": 0.3, "bundle": 0.3}
# One op of each kind of kernel: every process imports torch anew.
CALLS = (
    Task("rms_norm", (256, 4096), "bfloat16"),
    Task("softmax", (256, 4096), "bfloat16"),
    Task("cross_entropy", (256, 128256), "bfloat16"),
    # Few rows and many have kernels of their own.
    Task("nvfp4_linear", (1, 4096, 4096), "bfloat16"),
    Task("nvfp4_linear", (256, 4096, 4096), "bfloat16"),
)
# Without a GPU kernels are compiled and read for this one.
ARCH = "sm_90a"
NO_GPU = (
    f"no GPU is here: kernels of cold_start were compiled and read for {ARCH}, not loaded or run"
)

# What gristmill takes, part by part, and what torch took before.
PARTS = ("import_s", "prepare_s", "warmup_s", "first_call_s", "first_step_s")
TORCH_PARTS = ("torch_import_s", "context_s", "cublas_s", "torch_step_s")
# The work itself, which is no part of a start: a second time it is all that is left.
_WORK = {"first_call_s": "second_call_s", "first_step_s": "second_step_s"}
_CHILD = "gristmill.bench.cold_start.child"


@dataclass(frozen=True)
class Start:
    """Something that is started: `words` tell the child what, `about` is what a row says of it."""

    name: str
    words: tuple[str, ...]
    about: Mapping[str, Any]
    caches: tuple[str, ...] = CACHES
    is_model: bool = False


def starts(device: torch.device, names: Sequence[str] = ()) -> list[Start]:
    """What is measured on a device, or of that what is named, by "op" of its rows.

    Without a GPU no calls are: they would compile nothing.
    """
    found = [Start("import", ("import",), {"shape": ""}, caches=("any",))]
    if device.type == "cuda":
        for task in CALLS:
            words = ("call", task.op, written(task.shape), task.dtype, str(device))
            found.append(Start(task.name, words, {"dtype": task.dtype, **task.sizes}))
    for form, kind in FORMS.items():
        tokens = sorted({shape[0] for shapes in kind.needs(LLAMA).values() for shape in shapes})
        about = {"dtype": "bfloat16", "shape": f"M={','.join(map(str, tokens))}"}
        how = ("model", form, str(device)) if device.type == "cuda" else ("kernels", form, ARCH)
        found.append(Start(f"llama3_8b_{form}", how, about, is_model=True))
    wanted = [known("op", name, [start.name for start in found]) for name in names]
    return [start for start in found if not names or start.name in wanted]


def steps(device: torch.device, names: Sequence[str] = ()) -> int:
    return sum(len(start.caches) for start in starts(device, names))


def run(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    *,
    repeats: int = 5,
    names: Sequence[str] = (),
) -> None:
    """Each start with each cache, `repeats` times: medians, and the least and most of the sum."""
    if device.type != "cuda":
        results.note(NO_GPU)
    left = [start for start in starts(device, names) if not _is_there(start, results)]
    if left:
        _write_bytecode()
    for start in left:
        with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
            caches = _Caches(Path(folder))
            for cache in start.caches:
                advance(f"{SUITE} {start.name}, {cache} cache")
                row = _row(start, cache, caches, repeats)
                if device.type == "cuda" and start.is_model:
                    row["goal_s"] = GOALS[cache]
                elif start.is_model:
                    row["target"] = ARCH
                results.add([row])


def _is_there(start: Start, results: Results) -> bool:
    """Whether there are rows of all caches: one is made of the one before."""
    about = {"suite": SUITE, "op": start.name, **start.about}
    return all(results.has(**about, cache=cache) for cache in start.caches)


def _write_bytecode() -> None:
    """One start that nobody counts, after which no source of Python's has to be compiled."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        environment = _Caches(Path(folder)).environment("empty")
        in_fresh_process(_CHILD, ("import",), environment, "import gristmill")


class _Caches:
    """The environments of three caches, in the order empty, warm, bundle."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self._warm: Path | None = None

    def environment(self, cache: str) -> dict[str, str]:
        if cache == "warm":
            assert self._warm is not None, "an empty one becomes the warm one"
            return self._of(self._warm)
        empty = self._empty()
        if cache == "bundle":
            return {**self._of(empty, self._bundle()), "GRISTMILL_JIT": "off"}
        self._warm = self._warm or empty
        return self._of(empty)

    def _empty(self) -> Path:
        self._made += 1
        place = self._folder / f"cache{self._made}"
        place.mkdir(mode=0o700)
        return place

    def _bundle(self) -> Path:
        """All of the warm folder in one file."""
        path = self._folder / "kernels.bundle"
        if not path.exists():
            assert self._warm is not None, "a bundle is made of the warm one"
            files = sorted((self._warm / "kernels").glob("*.kernel"))
            bundle.write(path, [(file.name, file.read_bytes()) for file in files])
        return path

    @staticmethod
    def _of(place: Path, layers: Path | str = "") -> dict[str, str]:
        # Settings of other runs must not take part. An empty value means the default.
        return {
            **{variable.name: "" for variable in VARIABLES},
            "GRISTMILL_CACHE_DIR": str(place),
            "GRISTMILL_CACHE_LAYERS": str(layers),
            "GRISTMILL_JIT": "on",
        }


def _row(start: Start, cache: str, caches: _Caches, repeats: int) -> Row:
    row: Row = {"suite": SUITE, "op": start.name, **start.about, "impl": OURS, "cache": cache}
    row["error"] = None
    try:
        seen = [
            in_fresh_process(
                _CHILD, start.words, caches.environment(cache), f"{start.name}, {cache}"
            )
            for _ in range(repeats)
        ]
    except (GristmillError, OSError) as error:
        row["error"] = str(error)
        return row
    for name in seen[0]:
        values = [run[name] for run in seen]
        row[name] = round(median(values), 4) if name.endswith("_s") else max(values)
    sums = [beyond_torch(run) for run in seen]
    row |= {
        "beyond_s": round(median(sums), 4),
        "least_s": round(min(sums), 4),
        "most_s": round(max(sums), 4),
        "torch_s": round(median(torchs_own(run) for run in seen), 4),
        "repeats": repeats,
        "error": _wrong(cache, seen),
    }
    return row


def beyond_torch(run: Mapping[str, float]) -> float:
    """The seconds that gristmill adds to a start; what the work takes itself is not in them."""
    work = sum(run.get(name, 0.0) for name in _WORK.values())
    return max(0.0, sum(run.get(name, 0.0) for name in PARTS) - work)


def torchs_own(run: Mapping[str, float]) -> float:
    return sum(run.get(name, 0.0) for name in TORCH_PARTS)


def _wrong(cache: str, seen: list[dict[str, Any]]) -> str | None:
    """What must not happen, however fast it is."""
    if count := max(run.get("failures", 0) for run in seen):
        return f"the warm-up could not make {count} programs"
    if cache in ("warm", "bundle") and (count := max(run["compiles"] for run in seen)):
        return f"{count} programs were compiled, though the cache was a {cache} one"
    if count := max(run.get("step_compiles", 0) for run in seen):
        return f"the step after the warm-up compiled {count} programs"
    return None
