"""The suite `end_to_end`: one transformer block, training and decoding, in plain PyTorch.

The same block with pieces exchanged: torch's own, Inductor's, gristmill's, Liger's. So that what
kernels gain is seen in the whole that they are a part of.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gristmill.bench.end_to_end import decoding, training
from gristmill.bench.end_to_end.model import LLAMA, QWEN, TINY, TINY_MIXTURE
from gristmill.bench.end_to_end.pieces import DECODING, TRAINING, TRAINING_BLOCK, Implementation
from gristmill.bench.end_to_end.problem import SUITE, Problem
from gristmill.bench.end_to_end.report import tables
from gristmill.bench.peers import PEERS
from gristmill.bench.results import Results
from gristmill.bench.suites import known

__all__ = ["IMPLEMENTATIONS", "OPS", "SUITE", "problems", "run", "steps", "tables"]

OPS = ("training", "training_block", "decoding", "decoding_moe")
IMPLEMENTATIONS = tuple(dict.fromkeys(one.name for one in (*TRAINING, *DECODING)))
BATCHES = (1, 16, 64)
# Fewer: each is compiled three times.
MIXTURE_BATCHES = (1, 64)
METHOD = (
    "one block of a transformer, random weights in bf16, the same for everybody; results checked "
    "against fp64 before timing (those with NVFP4 weights against fp64 over the weights' own "
    "values). training: forward and backward, no optimizer, launched by the host as a user's would "
    "be, CUDA events around 4 steps in a row; peak memory beyond weights and inputs. decoding: one "
    "token a sequence over a full static cache, CUDA-graph replay over rotated sets of weights "
    "(cold L2), no host time in it; the roof is a copy of as many bytes as the weights and the "
    "cache have. Implementations take turns; median and interquartile range"
)
NO_GPU = "no GPU is here: the suite end_to_end ran tiny blocks, none of them by torch.compile"


def problems(
    device: torch.device,
    quick: bool,
    *,
    ops: Sequence[str] = (),
    implementations: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> list[Problem]:
    """What is measured, in order; an empty filter means everything.

    Batches are those of decoding, and may be others than the usual ones.
    """
    wanted = [known("op", name, OPS) for name in ops] or list(OPS)
    names = [known("implementation", name, IMPLEMENTATIONS) for name in implementations]
    there = [one for one in _all(device, quick and not ops, batches) if one.op in wanted]
    if batches:
        there = [one for one in there if not one.is_training]
    absent = _absent(device)
    found = []
    for one in there:
        mine = tuple(
            each
            for each in one.implementations
            if (not names or each.name in names)
            and each.peer not in absent
            # Compiling the smallest block takes a CPU longer than all the rest.
            and (device.type == "cuda" or not each.compiled or each.name in names)
        )
        if mine:
            found.append(replace(one, implementations=mine))
    return found


def _all(device: torch.device, quick: bool, batches: Sequence[int]) -> list[Problem]:
    if device.type != "cuda":
        usual = batches or (1, 4)
        return [
            Problem("training", TINY, 2, 32, TRAINING),
            Problem("training_block", TINY, 2, 32, TRAINING_BLOCK),
            *(Problem("decoding", TINY, batch, 32, DECODING) for batch in usual),
            *(Problem("decoding_moe", TINY_MIXTURE, batch, 32, DECODING) for batch in usual),
        ]
    usual = batches or ((1, 64) if quick else BATCHES)
    found = [
        Problem("training", LLAMA, 2, 2048, TRAINING),
        *(Problem("decoding", LLAMA, batch, 1024, DECODING) for batch in usual),
    ]
    if quick:
        return found
    found.insert(1, Problem("training_block", LLAMA, 2, 2048, TRAINING_BLOCK))
    few = batches or MIXTURE_BATCHES
    return found + [Problem("decoding_moe", QWEN, batch, 1024, DECODING) for batch in few]


def _absent(device: torch.device) -> dict[str, str]:
    """The peers that cannot take part, and why."""
    peers = dict.fromkeys(one.peer for one in TRAINING if not one.is_ours)
    reasons = {name: PEERS[name].missing(device) for name in peers}
    return {name: why for name, why in reasons.items() if why is not None}


def steps(
    device: torch.device,
    quick: bool,
    *,
    ops: Sequence[str] = (),
    implementations: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> int:
    chosen = problems(device, quick, ops=ops, implementations=implementations, batches=batches)
    return len(chosen)


def run(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    *,
    samples: int,
    quick: bool,
    ops: Sequence[str] = (),
    implementations: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> None:
    """A row for each implementation of each problem, but for those that `results` has already."""
    chosen = problems(device, quick, ops=ops, implementations=implementations, batches=batches)
    _describe(device, results, [each for one in chosen for each in one.implementations])
    for problem in chosen:
        advance(f"{SUITE} {problem.op}, {problem.shape}")
        if problem.is_in(results.rows):
            continue
        # Every problem is compiled anew: past a few shapes Dynamo would not compile at all.
        torch._dynamo.reset()
        way = training if problem.is_training else decoding
        try:
            rows = way.measure(problem, device, samples)
        except Exception as error:  # what is wrong with one problem must not take the others along
            rows = problem.failed(error)
        results.add(rows)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _describe(device: torch.device, results: Results, chosen: Sequence[Implementation]) -> None:
    meta = results.meta
    meta.setdefault("methods", {})[SUITE] = METHOD
    if device.type != "cuda":
        results.note(NO_GPU)
    for name, why in _absent(device).items():
        meta.setdefault("missing_peers", {}).setdefault(name, why)
    for name in dict.fromkeys(one.peer for one in chosen if not one.is_ours):
        meta.setdefault("peers", {}).setdefault(name, PEERS[name].version())
