"""What must not change a bit of a mixture's result: threads, neighbours, tiles, who adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost
from emulation.harness import maps_of_rows
from nvfp4_moe_cases import ADDING, APART, BF16, CUTS, F32, PLAIN, ROUTINGS, Call, Mixture

from gristmill.ops.nvfp4_moe import wgmma
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import ADD, TILES, MoeConfig

KINDS = {
    "whole": APART,
    "groups": replace(ADDING, added=False),
    "split": replace(CUTS["split"], added=False),
}
MIXTURE = Mixture(10, 5, topk=3, hidden=208, inner=144, w13_bias=F32, w2_bias=BF16, seed=4)


@pytest.fixture(autouse=True)
def _maps_of_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "maps_of_rows", maps_of_rows)


def _answers(host: EmulatedHost, call: Call, configs: Iterable[MoeConfig]) -> list[torch.Tensor]:
    configs = list(configs)
    problem = call.problem()
    host.build([one for config in configs for one in Wgmma().programs(problem, config)])
    return [call.run(host, config).outputs for config in configs]


def _are_equal(answers: list[torch.Tensor]) -> bool:
    assert len(answers) > 1
    assert answers[0].isfinite().all()
    return all(torch.equal(answers[0], other) for other in answers[1:])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_threads_changes_nothing(host: EmulatedHost, kind: str, routing: Any) -> None:
    call = MIXTURE.call()
    config = replace(KINDS[kind], routing=routing)
    assert _are_equal([call.run(host, config, order).outputs for order in (0, 1, 2, 3)])


@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_order_of_threads_changes_nothing_where_experts_are_added(
    host: EmulatedHost, split: int
) -> None:
    call = MIXTURE.call()
    config = replace(PLAIN, routing="launch", down=(1, 1, 2, 2, split, 1))
    assert call.products(config)[1].step == ADD
    assert _are_equal([call.run(host, config, order).outputs for order in (0, 1, 2, 3)])


@pytest.mark.parametrize("wide", [True, False], ids=["wide", "narrow"])
@pytest.mark.parametrize("kind", KINDS)
def test_who_puts_slots_in_order_changes_nothing(host: EmulatedHost, kind: str, wide: bool) -> None:
    """So a call with a few tokens more, or less, gives each of them what it got before."""
    config = replace(KINDS[kind], wide=wide)
    every = (replace(config, routing=routing) for routing in ROUTINGS)
    assert _are_equal(_answers(host, MIXTURE.call(), every))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_see_each_other(host: EmulatedHost, kind: str) -> None:
    """One, some in another order, and all of them with many more."""
    config = KINDS[kind]
    call = replace(MIXTURE, tokens=70).call()
    together = call.run(host, config).outputs
    for tokens in ([3], [9, 0, 4], list(range(22))):
        some = call.some(tokens).run(host, config).outputs
        assert torch.equal(some, together[tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_tiles_change_nothing(host: EmulatedHost, kind: str) -> None:
    call = replace(MIXTURE, tokens=50).call()
    every = [replace(KINDS[kind], tile=tile) for tile in TILES if kind == "whole" or tile < 192]
    assert _are_equal(_answers(host, call, every))


def test_depth_stages_and_rows_change_nothing(host: EmulatedHost) -> None:
    """So they may be lowered where shared memory is short."""
    cuts = ((1, 2, 4, 2, 1, 1), (1, 2, 8, 3, 1, 1), (2, 2, 4, 2, 1, 1))
    every = [replace(ADDING, up=cut, down=cut, added=False) for cut in cuts]
    assert _are_equal(_answers(host, MIXTURE.call(), every))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_blocks_that_stay_change_nothing(host: EmulatedHost, routing: Any) -> None:
    call, config = MIXTURE.call(), replace(APART, routing=routing)
    answers = [call.run(host, replace(config, persistent=False)).outputs]
    for resident in (1, 2):
        host.resident = resident
        answers.append(call.run(host, config).outputs)
    assert _are_equal(answers)
