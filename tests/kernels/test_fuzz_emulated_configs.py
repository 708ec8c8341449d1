"""Random launches, run on the CPU: what `rejects` accepts gives the right results.

A table may name any launch. Here valid and invalid launches are drawn for calls that are drawn as
well. Those that are accepted run on the variant's own host code, with every access to memory
checked, and are judged as every call is. The others must have a short reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import row_calls
import torch
from conformance_helpers import allowed, copied
from conformance_truth import results_of, truth_of
from emulated_host import EmulatedHost
from fuzz_emulated import MOST_THREADS, ORDERS, examples, given, hypothesis, st
from row_calls import CALLS

from gristmill.jit import Program
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import TWICE, RowConfig
from gristmill.ops.rows.variant import RowVariant
from gristmill.ops.topk_router.cuda import RouterConfig
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

ENTROPY = ("cross_entropy", "cross_entropy_shard", "cross_entropy_backward", "scale_gradient_")
FAMILIES: dict[str, Callable[[str], bool]] = {
    "norms": lambda op: "norm" in op and not op.endswith(("fp8", "backward")),
    "norms_fp8": lambda op: op.endswith("norm_fp8"),
    "norms_backward": lambda op: op.endswith("norm_backward"),
    "softmax": lambda op: "softmax" in op,
    "cross_entropy": lambda op: op in ENTROPY,
    "one_pass": lambda op: "one_pass" in op,
    "router": lambda op: op.startswith("topk_router"),
}
COLUMNS = (1, 3, 8, 24, 40, 64, 97, 129, 131, 160, 256, 257, 320, 500, 1000, 1024, 1031, 2048)
EXPERTS = (4, 7, 8, 64, 130)
ALIGNED, NESTED = row_calls.aligned, row_calls.nested
PLACES = (ALIGNED, ALIGNED, row_calls.unaligned, row_calls.far_apart, NESTED)
ROUNDINGS = 4.0  # as in the other fuzz tests; those of the reference, where they are more
HUGE = 10**4000
ODD = (0, -1, -2, -7, 3, 5, 31, 33, 48, 1025, 2048, 2**31, 2**63, HUGE, -HUGE)


@dataclass(frozen=True)
class Way:
    """The variants of some ops that have a scope and a way for rows to come to it, or a config."""

    family: str
    variant: str
    feed: int = 0

    def able(self) -> list[tuple[Op, Variant]]:
        return [
            (op, one)
            for op in OPS.values()
            if FAMILIES[self.family](op.name)
            for one in op.variants
            if one.name == self.variant
            if not isinstance(one, RowVariant) or self.feed in one.feeds_by_scope[one.scope]
        ]


def ways(family: str) -> list[Way]:
    found = {}
    for op in OPS.values():
        if FAMILIES[family](op.name):
            for one in op.variants:
                if isinstance(one, RowVariant):
                    found.update(
                        {Way(family, one.name, feed): 0 for feed in one.feeds_by_scope[one.scope]}
                    )
                elif one.config_type is RouterConfig:
                    found[Way(family, one.name)] = 0
    return list(found)


@dataclass(frozen=True)
class Sample:
    """A call, and a launch of a variant that supports it. `resident`: blocks that run at once."""

    op: Op
    args: tuple[Any, ...]
    problem: Problem
    variant: Variant
    config: Any
    resident: int
    order: int

    @property
    def reason(self) -> str | None:
        return self.variant.rejects(self.problem, self.config)

    @property
    def threads(self) -> int:
        if isinstance(self.config, RouterConfig):
            return self.config.warps * 32
        threads: int = self.config.threads * self.config.cluster
        return threads

    def programs(self) -> tuple[Program, ...]:
        found: tuple[Program, ...] = self.variant.programs(self.problem, self.config)  # type: ignore[assignment]
        return found


@st.composite
def numbers(draw: Any, good: Sequence[int]) -> int:
    """Nearly always one of the good ones."""
    chosen: int = draw(st.sampled_from(good))
    if draw(st.integers(0, 15)) == 15:
        chosen = draw(st.one_of(st.sampled_from(ODD), st.integers(-4, 40)))
    return chosen


@st.composite
def row_configs(draw: Any, variant: RowVariant, problem: Problem, feed: int) -> RowConfig:
    """Of any kernel of this scope, or one of the variant's own with some other numbers."""
    warp = variant.scope == "WARP"
    clusters = {"CLUSTER": (2, 3, 4, 8), "GRID": (1, 2, 3, 6)}.get(variant.scope, (1,))
    drawn = {
        "threads": draw(numbers((32, 64, 64, 96, 128, 256, 512))),
        "items": draw(numbers((1, 2, 3, 4, 8, 16))),
        "lanes": draw(numbers((1, 2, 4, 8, 16, 32) if warp else (32,))),
        "cluster": draw(numbers(clusters)),
        "feed": draw(numbers((feed,))),
        "blocks_per_sm": draw(numbers((0, 1, 1, 2))),
    }
    if draw(st.integers(0, 2)) == 0:
        own = draw(st.sampled_from(variant.configs(problem)))
        names = draw(st.lists(st.sampled_from(sorted(drawn)), max_size=3))
        return replace(own, **{name: drawn[name] for name in names})
    return RowConfig(**drawn, hold=drawn["feed"] != TWICE and draw(st.booleans()))


@st.composite
def samples(draw: Any, way: Way) -> Sample:
    op, variant = draw(st.sampled_from(way.able()))
    call = draw(st.sampled_from([call for call in CALLS if call.op == op.name]))
    router = variant.config_type is RouterConfig
    columns = draw(st.sampled_from(EXPERTS if router else COLUMNS))
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    args = call.make(draw(st.sampled_from((2, 4, 6))), columns, dtype, "cpu")
    args = call.laid(args, draw(st.sampled_from(PLACES[: 4 if router else 5])))
    device = KNOWN[draw(st.sampled_from(("sm_90a", "sm_90a", "sm_80")))]
    count = draw(st.sampled_from((3, 12)))
    problem = op.problem(*args, device=replace(device, multiprocessors=count))
    hypothesis.assume(variant.supports(problem) is None)
    if isinstance(variant, RowVariant):
        hypothesis.assume(way.feed in variant.feeds(problem))
        config: Any = draw(row_configs(variant, problem, way.feed))
    else:
        config = RouterConfig(draw(numbers((1, 2, 3, 4, 8))))
    resident, order = draw(st.sampled_from((1, 1, 2))), draw(ORDERS)
    return Sample(op, args, problem, variant, config, resident, order)


def drawn_for(way: Way, count: int) -> list[Sample]:
    """The same ones in every run, all at once: their kernels are compiled together."""
    found: list[Sample] = []

    @examples(count)
    @given(sample=samples(way))
    def collect(sample: Sample) -> None:
        found.append(sample)

    collect()
    return found


def check(host: EmulatedHost, sample: Sample) -> None:
    op, own = sample.op, copied(sample.args)
    truths = truth_of(op.name, sample.args)
    limits = allowed(op, sample.args, truths, factor=ROUNDINGS)
    host.resident = sample.resident
    run = host.run(
        sample.variant,
        sample.problem,
        sample.config,
        own,
        written=op.written,
        order=sample.order,
    )
    results = results_of(op.name, own, run.outputs)
    for truth, result, limit in zip(truths, results, limits, strict=True):
        error = truth.roundings(result)
        assert error <= limit, f"{error:.2f} roundings > {limit:.2f}"


def check_all(host: EmulatedHost, family: str, count: int) -> None:
    drawn = {way: drawn_for(way, count) for way in ways(family)}
    accepted = {way: [one for one in some if one.reason is None] for way, some in drawn.items()}
    rejected = [sample for some in drawn.values() for sample in some if sample.reason is not None]
    # None of it is empty.
    assert all(len(some) >= count // 4 for some in accepted.values())
    assert rejected
    assert all(0 < len(sample.reason or "") < 120 for sample in rejected)
    run = [one for some in accepted.values() for one in some if one.threads <= MOST_THREADS]
    assert {one.op.name for one in run} == {op.name for way in drawn for op, _ in way.able()}
    host.build(list(dict.fromkeys(program for one in run for program in one.programs())))
    wrong = []
    for sample in run:
        try:
            check(host, sample)
        except Exception as error:  # whatever a wrong launch raises
            key = sample.problem.key(sample.problem.rows)
            wrong.append(f"{sample.variant.name} {sample.config} on {key}: {error!r}"[:600])
    assert wrong == []


def test_every_row_variant_is_drawn() -> None:
    drawn = {
        (op.name, variant.name)
        for family in FAMILIES
        for way in ways(family)
        for op, variant in way.able()
    }
    assert drawn == {
        (op.name, variant.name)
        for op in OPS.values()
        for variant in op.variants
        if variant.config_type in (RowConfig, RouterConfig)
    }
    called = {call.op for call in CALLS}
    assert {name for name, _ in drawn} <= called


over_families = pytest.mark.parametrize("family", FAMILIES)


@over_families
def test_any_launch(host: EmulatedHost, family: str) -> None:
    check_all(host, family, 12)


@pytest.mark.long
@over_families
def test_many_launches(host: EmulatedHost, family: str) -> None:
    check_all(host, family, 250)
