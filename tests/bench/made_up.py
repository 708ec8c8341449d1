"""Results as a full run on a GPU would have them, every number made up: for sizes and layouts."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from gristmill.bench.peers import PEERS
from gristmill.bench.regret import families
from gristmill.bench.results import OURS, Results, Row
from gristmill.bench.suites import Task, tasks

CONFIG = {"threads": 256, "items": 2, "lanes": 16, "cluster": 1, "feed": 0, "hold": True}


def full_run() -> Results:
    """A row for every problem and implementation of kernel time, and of regret."""
    draw = random.Random(7)
    found, _ = tasks("cuda")
    rows = [row for task in found for row in _rows(task, draw)]
    rows += [_regret(point, draw) for point in families.points("cuda")]
    meta = {
        "gpu": "NVIDIA H200",
        "device": "cuda",
        "date": "2026-01-01",
        "torch": torch.__version__,
        "gristmill": "0.0",
        "peers": dict.fromkeys(PEERS, "1.0"),
        "method": "made up",
        "copy_tb_per_s": 4.2,
    }
    return Results(meta, rows)


def _rows(task: Task, draw: random.Random) -> list[Row]:
    moved = 2 * math.prod(task.shape[:2]) * 2
    roof = 2.0 + moved / 4.2e6
    base = {"op": task.name, "dtype": task.dtype, **task.sizes, "sets": task.sets, "bytes": moved}
    rows: list[Row] = []
    for peer, impl in [(OURS, OURS), *_implementations(task.name)]:
        us = round(roof * draw.uniform(1.0, 1.8), 3)
        timed: dict[str, Any] = {"us": us, "spread_us": 0.123, "roof_us": roof, "error": 0.0078}
        timed |= {"roof_share": round(roof / us, 4), "tb_per_s": moved / us / 1e6}
        if task.kind.product:
            timed["tflop_per_s"] = 312.5
        if impl == OURS:
            timed |= {"variant": "cuda_block", "config": CONFIG, "source": "shipped table"}
        rows.append({**base, "peer": peer, "impl": impl, **timed})
    return rows


def _implementations(name: str) -> list[tuple[str, str]]:
    return [(peer.name, impl) for peer in PEERS.values() for impl in peer.implementations(name)]


def _regret(point: families.Point, draw: random.Random) -> Row:
    best = draw.uniform(2.0, 200.0)
    picked = best * draw.choice([1.0, 1.0, 1.01, 1.07])
    words = " ".join(f"{key}={value}" for key, value in CONFIG.items())
    return {
        "suite": "regret",
        **point.family.problem(point.rows),
        "impl": OURS,
        "error": None,
        "picked": f"cuda_block {words}",
        "best": f"cuda_block {words}" if picked == best else f"cuda_warp {words}",
        "picked_us": round(picked, 3),
        "best_us": round(best, 3),
        "picked_spread_us": 0.01,
        "best_spread_us": 0.01,
        "regret": round(picked / best - 1, 5),
        "source": "shipped table",
        "failures": {},
    }
