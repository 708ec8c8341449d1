"""Each config that the NVFP4 kernels in CUDA accept gives correct results, run on the CPU.

Each is a template instantiation, compiled by g++: they are drawn first, and built at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_emulated_nvfp4_mma as mma
import test_emulated_nvfp4_wgmma_host as wgmma
import torch
from accepted_configs import Seen, changed
from emulated_host import EmulatedHost
from emulation.harness import maps_of_rows
from fuzz_emulated import examples, given, st
from nvfp4_moe_cases import DEVICE, Call, Mixture
from nvfp4_wgmma_cases import BF16, F16, F32, problem_of

from gristmill.ops.nvfp4_linear import wgmma as linear_wgmma
from gristmill.ops.nvfp4_linear.mma import Mma
from gristmill.ops.nvfp4_linear.wgmma import Wgmma
from gristmill.ops.nvfp4_moe import wgmma as moe_wgmma
from gristmill.ops.nvfp4_moe.wgmma import Wgmma as MoeWgmma
from gristmill.select.device import KNOWN
from gristmill.select.variant import Variant

H200, A100 = KNOWN["sm_90a"], KNOWN["sm_80"]
ROWS = (1, 8, 30, 60, 90, 200, 2000)  # for which a config was chosen


@pytest.fixture(autouse=True)
def _maps_of_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_wgmma, "maps_of_rows", maps_of_rows)
    monkeypatch.setattr(moe_wgmma, "maps_of_rows", maps_of_rows)


def _drawn(strategy: Any, count: int) -> list[Any]:
    """As many examples, the same in every run."""
    found: list[Any] = []
    examples(count)(given(one=strategy)(lambda one: found.append(one)))()
    return found


def _accepted(variant: Variant, strategy: Any, count: int) -> list[tuple[Any, ...]]:
    """The examples whose config is accepted. Each has a problem and a config after its first."""
    seen, found = Seen(), []
    for one in _drawn(strategy, count):
        assert variant.supports(one[1]) is None
        if seen.accepts(variant, one[1], one[2], variant.name):
            found.append(one)
    seen.enough(variant.name, count // 5)
    return found


# ---- few tokens ----


@st.composite
def streamed(draw: Any) -> tuple[Any, ...]:
    tokens, columns = draw(st.integers(1, 40)), 16 * draw(st.integers(1, 200))
    call = mma.Call(tokens, draw(st.integers(1, 200)), columns, draw(st.sampled_from([BF16, F16])))
    problem = mma._problem(call.arguments(), draw(st.sampled_from([A100, H200])))
    chosen = Mma().configs(replace(problem, rows=draw(st.sampled_from(ROWS[:5]))))
    return call, problem, draw(changed(draw(st.sampled_from(chosen))))


def _streamed(host: EmulatedHost, count: int) -> None:
    accepted = _accepted(Mma(), streamed(), count)
    host.build([one for _, *given in accepted for one in Mma().programs(*given)])
    for call, problem, config in accepted:
        mma._check(host.run(Mma(), problem, config, call.arguments()).outputs, call)


# ---- any number of tokens ----


@st.composite
def multiplied(draw: Any) -> tuple[Any, ...]:
    tokens = draw(st.one_of(st.integers(1, 40), st.integers(1, 300)))
    size = (tokens, 8 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 80)))
    product = problem_of(*size, draw(st.sampled_from([BF16, F16])), whole=True, bias=F32)
    args = wgmma._arguments(product, F32)
    problem = wgmma._problem(args)
    chosen = Wgmma().configs(replace(problem, rows=draw(st.sampled_from(ROWS))))
    return product, problem, draw(changed(draw(st.sampled_from(chosen)))), args


def _multiplied(host: EmulatedHost, count: int) -> None:
    accepted = _accepted(Wgmma(), multiplied(), count)
    host.build([Wgmma().program(problem, config) for _, problem, config, _ in accepted])
    for product, problem, config, args in accepted:
        run = host.run(Wgmma(), problem, config, args)
        assert torch.equal(run.outputs, product.exact.float()), (problem, config)


# ---- experts ----


@st.composite
def mixtures(draw: Any) -> tuple[Any, ...]:
    mixture = Mixture(
        tokens=draw(st.one_of(st.integers(1, 40), st.integers(1, 100))),
        experts=draw(st.integers(1, 6)),
        topk=draw(st.integers(1, 3)),
        hidden=16 * draw(st.integers(1, 20)),
        inner=16 * draw(st.integers(1, 20)),
        x=draw(st.sampled_from([BF16, F16])),
        w2_bias=draw(st.sampled_from([None, F32])),
    )
    call: Call = mixture.call()
    problem = call.problem(DEVICE)
    chosen = MoeWgmma().configs(replace(problem, rows=draw(st.sampled_from(ROWS))))
    return call, problem, draw(changed(draw(st.sampled_from(chosen))))


def _mixed(host: EmulatedHost, count: int) -> None:
    accepted = _accepted(MoeWgmma(), mixtures(), count)
    host.build([one for _, *given in accepted for one in MoeWgmma().programs(*given)])
    for call, problem, config in accepted:
        call.check(host.run(MoeWgmma(), problem, config, call.arguments).outputs, config)


EVERY = (_streamed, _multiplied, _mixed)


@pytest.mark.parametrize("check", EVERY)
def test_any_config_that_is_accepted_is_right(
    host: EmulatedHost, check: Callable[[EmulatedHost, int], None]
) -> None:
    check(host, 14)


@pytest.mark.long
@pytest.mark.parametrize("check", EVERY)
def test_many_configs_that_are_accepted_are_right(
    host: EmulatedHost, check: Callable[[EmulatedHost, int], None]
) -> None:
    check(host, 150)
