"""The suite `transformers`: a Hugging Face model as it is, and after `gristmill.patch`.

Three ops: a training step, the memory of head and loss, and generation token by token. Every row is
a process of its own, so that neither memory nor compiled code of one is the other's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gristmill.bench.fresh import in_fresh_process
from gristmill.bench.hugging_face.models import GENERATION, TINY, TRAINING, Sizes
from gristmill.bench.results import Results, Row
from gristmill.bench.suites import known
from gristmill.errors import ArgumentError, GristmillError

SUITE = "transformers"
OPS = ("training", "loss", "generation")
# Whose losses the others' are held against.
BASELINE = "eager"
REPEATS = 10
QUICK_REPEATS = 3
# Of a loss, relative to that of the model as it is, after a few steps: bf16 rounds in both.
LOSS_LIMIT = 0.01
METHOD = (
    "Llama of random weights in bf16; training: forward, loss, backward, AdamW, median of steps; "
    "loss: head and loss alone, memory beyond their inputs; generation: batch 1, static cache, "
    "compiled with CUDA graphs, (time of many tokens - time of one) / (many - 1); its rows "
    "*_graph: forward of one token (torch.compile) and argmax as one CUDA graph, replayed, timed "
    "by CUDA events"
)
NO_GPU = "no GPU is here: the suite transformers ran a tiny model, and memory was not measured"
_CHILD = "gristmill.bench.hugging_face.child"


@dataclass(frozen=True)
class Case:
    """One row: an op and a way to run it.

    `patch`: the arguments of `gristmill.patch`, or None for a model as it is. `inline`: of which
    ops the compiler sees the formula. `loss`: which one, where that is all there is. `needs`:
    modules that must be gristmill's, or the row would not be what its name says. `captured`: tokens
    are made by replays of one CUDA graph, and not by `generate`.
    """

    op: str
    impl: str
    patch: Mapping[str, Any] | None = None
    compiled: bool = False
    inline: tuple[str, ...] = ()
    loss: str = ""
    needs: tuple[str, ...] = ()
    captured: bool = False

    @property
    def is_ours(self) -> bool:
        return self.patch is not None or self.loss not in ("", "eager")


_PATCH = {"norms": True, "loss": "cross_entropy"}
_LINEAR = {"norms": True, "loss": "linear_cross_entropy"}
_NVFP4 = {"norms": True, "loss": None, "nvfp4": True}
_NVFP4_HEAD = {**_NVFP4, "nvfp4": ["*_proj", "lm_head"]}
# The first of each op is what the others are held against.
CASES = (
    Case("training", "eager"),
    Case("training", "patched", _PATCH),
    Case("training", "patched_linear_cross_entropy", _LINEAR),
    Case("training", "compiled", compiled=True),
    Case("training", "patched_compiled", _PATCH, compiled=True),
    Case("training", "patched_compiled_inline", _PATCH, compiled=True, inline=("rms_norm",)),
    Case("training", "patched_linear_cross_entropy_compiled", _LINEAR, compiled=True),
    Case("loss", "eager", loss="eager"),
    Case("loss", "cross_entropy", loss="cross_entropy"),
    Case("loss", "linear_cross_entropy", loss="linear_cross_entropy"),
    Case("generation", "bf16"),
    Case("generation", "bf16_norms", {"norms": True, "loss": None}),
    Case("generation", "nvfp4", {**_NVFP4, "norms": False}),
    Case("generation", "nvfp4_norms", _NVFP4),
    Case("generation", "nvfp4_head", _NVFP4_HEAD, needs=("lm_head",)),
    Case("generation", "bf16_graph", captured=True),
    Case("generation", "nvfp4_norms_graph", _NVFP4, captured=True),
    Case("generation", "nvfp4_head_graph", _NVFP4_HEAD, needs=("lm_head",), captured=True),
)
QUICK = {
    "training": ("eager", "patched", "patched_linear_cross_entropy"),
    "loss": ("eager", "linear_cross_entropy"),
    "generation": ("bf16", "nvfp4_norms"),
}


def missing() -> str | None:
    """Why the suite cannot run here, in one line."""
    if importlib.util.find_spec("transformers") is None:
        return (
            "the suite transformers needs Hugging Face's library, and no module of that name is "
            "here: pip install 'gristmill[transformers]'"
        )
    return None


def cases(
    ops: Sequence[str] = (), implementations: Sequence[str] = (), *, quick: bool = False
) -> list[Case]:
    """The rows to measure, in order; an empty filter means everything."""
    ops = [known("op", op, OPS) for op in ops] or list(OPS)
    there = [case for case in CASES if case.op in ops]
    names = dict.fromkeys(case.impl for case in there)
    wanted = [known("implementation", name, names) for name in implementations]
    if wanted:
        return [case for case in there if case.impl in wanted]
    return [case for case in there if not quick or case.impl in QUICK[case.op]]


def run(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    chosen: Sequence[Case],
    *,
    repeats: int = REPEATS,
) -> None:
    """A row for each case; one that fails has a row that says why."""
    if why := missing():
        raise ArgumentError(why)
    results.meta.setdefault("methods", {})[SUITE] = METHOD
    if device.type != "cuda":
        results.note(NO_GPU)
    losses: dict[str, list[float]] = {
        row["op"]: row["losses"]
        for row in results.rows
        if row.get("suite") == SUITE and row["impl"] == BASELINE and "losses" in row
    }
    for case in chosen:
        advance(f"{SUITE} {case.op}, {case.impl}")
        if results.has(suite=SUITE, op=case.op, impl=case.impl):
            continue
        told = spec(case, device, repeats)
        try:
            answer = in_fresh_process(
                _CHILD,
                [json.dumps(told)],
                {"HF_HUB_OFFLINE": "1"},
                f"{case.op}, {case.impl}",
            )
        except (GristmillError, OSError) as error:
            answer = {"error": str(error)}
        row = row_of(case, device, answer, losses.get(case.op))
        if case.impl == BASELINE and "losses" in row:
            losses[case.op] = row["losses"]
        results.add([row])


def sizes_of(op: str, device: torch.device) -> Sizes:
    if device.type != "cuda":
        return TINY
    return GENERATION if op == "generation" else TRAINING


def spec(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """What a child is told."""
    return {
        "op": case.op,
        "device": str(device),
        "sizes": asdict(sizes_of(case.op, device)),
        "patch": None if case.patch is None else dict(case.patch),
        "compiled": case.compiled,
        "inline": list(case.inline),
        "loss": case.loss,
        "needs": list(case.needs),
        "captured": case.captured,
        "repeats": repeats,
    }


def row_of(
    case: Case, device: torch.device, answer: Mapping[str, Any], eager: Sequence[float] | None
) -> Row:
    """What a child says, beside the losses of the model as it is; more of a difference than
    roundings make is an error.
    """
    sizes = sizes_of(case.op, device)
    shape = f"{sizes.layers} layers, " if case.op != "loss" else ""
    shape += f"{sizes.tokens} tokens" if case.op == "generation" else sizes.trained
    row: Row = {"suite": SUITE, "op": case.op, "dtype": "bfloat16", "shape": shape}
    row |= {"impl": case.impl, "ours": case.is_ours, "error": None, **answer}
    if "losses" not in row or eager is None:
        return row
    pairs = zip(row["losses"], eager, strict=True)
    # Written so that a NaN is the largest of all.
    off = max((abs(one - other) / abs(other) for one, other in pairs), key=_or_infinity)
    row["loss_off"] = round(off, 6)
    if not off <= LOSS_LIMIT:
        row["error"] = f"its losses are off by {off:.2%}: {row['losses']}, of eager {list(eager)}"
    return row


def _or_infinity(value: float) -> float:
    return value if value == value else float("inf")
