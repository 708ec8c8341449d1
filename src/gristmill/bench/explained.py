"""Why a problem ran on the variant that it ran on, beside its time: for runs on a CPU.

There the times say little, and what can be seen is how a choice is made: which variants could run,
what each of them takes, and what the others say against it. (On a GPU `gristmill explain` tells it,
and the suite `regret` times every variant.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gristmill.bench.inputs import Arguments
from gristmill.bench.product_report import Grid
from gristmill.bench.results import Row, label, microseconds
from gristmill.explain import explain_call
from gristmill.ops.op import Op
from gristmill.select.explain import Explanation
from gristmill.select.timing import Timing, time_interleaved

TITLE = "choices: which variant ran, and why"
HEADER = ("problem", "variant", "why", "could run, µs", "could not")


def told(op: Op, args: Arguments, *, samples: int) -> Row:
    """Keys for a row of results: the reason, the time of each variant, what others say against it.

    "variants" are those that can run these arguments, with µs, the chosen one among them;
    "declined" are the others, and why.
    """
    problem = op.problem(*args)
    found = explain_call(op, args, problem)
    declined = {one.variant: _against(one) for one in found.rows if _against(one)}
    return {
        "reason": found.reason,
        "variants": _times(op, problem, args, found, samples),
        "declined": declined,
    }


def _against(one: Any) -> str:
    """What speaks against a variant; empty for one that could run."""
    return "" if one.status in ("chosen", "available") else str(one.reason or one.status)


def _times(
    op: Op, problem: Any, args: Arguments, found: Explanation, samples: int
) -> dict[str, float]:
    able = {one.variant: one.config for one in found.rows if not _against(one)}
    plans = {
        variant.name: variant.bind(problem, able[variant.name])
        for variant in op.variants
        if variant.name in able
    }
    with torch.no_grad():
        timings = time_interleaved(plans, [args], samples=samples)
    return {
        name: round(timing.us, 3) for name, timing in timings.items() if isinstance(timing, Timing)
    }


def table(rows: Sequence[Row]) -> tuple[str, Grid] | None:
    """A line per problem, if any row tells of its choice."""
    lines = []
    for row in rows:
        if "declined" not in row or "variant" not in row:
            continue
        others = [f"{name}: {why}" for name, why in _grouped(row["declined"]).items()]
        times = [f"{name} {microseconds(us)}" for name, us in row["variants"].items()]
        told = [str(row["variant"]), str(row["reason"]), ", ".join(times)]
        lines.append([f"{row['op']} {label(row)}", *told, "; ".join(others)])
    return (TITLE, (list(HEADER), lines)) if lines else None


def _grouped(declined: dict[str, str]) -> dict[str, str]:
    """Variants with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in declined.items():
        by_reason.setdefault(why, []).append(name)
    return {", ".join(names): why for why, names in by_reason.items()}
