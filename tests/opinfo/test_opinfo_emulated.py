"""The same samples through the public functions, with the CUDA kernels in the emulation.

Tensors are on the CPU and the machine is an H200 with fewer multiprocessors: what is chosen, bound,
launched and differentiated is what a GPU would be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from emulated_host import EmulatedHost
from emulation.harness import emulator_for
from opinfo_call import Call
from opinfo_counterparts import DTYPES, Counterpart, here
from opinfo_judge import judged, mismatches, named
from opinfo_layouts import ALL
from test_opinfo import name_of, report

from gristmill.ops import op as ops
from gristmill.ops.registry import OPS
from gristmill.select.chooser import Choice, ranked
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

MACHINE = replace(KNOWN["sm_90a"], multiprocessors=3)
# For each run: the kernels of one row in a warp, of fp32; what needs more of them is long.
QUICK = {
    "nn.functional.rms_norm": ("negative view", "nan"),
    "nn.functional.layer_norm": ("zero tensor", "expanded rows"),
    "softmax": ("conjugate view", "infinite", "misaligned"),
    "nn.functional.cross_entropy": ("negative view", "large", "largest gradient"),
}


def emulated(call_ops: tuple[str, ...]) -> list[str]:
    return [name for name in named(call_ops) if name.startswith("cuda")]


def has_kernels(counterpart: Counterpart) -> bool:
    calls = counterpart.calls(DTYPES["float32"])
    return any(emulated(call.ops) for call in calls)


@pytest.fixture
def host(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedHost]:
    """In place of the GPU behind every op."""
    host = EmulatedHost(emulator_for(pytestconfig), monkeypatch)

    def resolve(
        name: str, variants: Sequence[Variant], problem: Problem
    ) -> tuple[Choice, Callable[..., Any]]:
        choice = ranked(name, variants, problem)[0]
        if not choice.variant.name.startswith("cuda"):
            return choice, choice.variant.bind(problem, choice.config)

        def plan(*args: Any) -> Any:
            config, written = choice.config, OPS[name].written
            return host.run(choice.variant, problem, config, args, written=written).outputs

        return choice, plan

    monkeypatch.setattr(ops, "resolve", resolve)
    monkeypatch.setattr(ops, "device_of", lambda device: MACHINE)
    for op in OPS.values():
        op.forget_plans()
    yield host
    for op in OPS.values():
        op.forget_plans()


def check(
    calls: Sequence[Call], lay: str, variants: Callable[[tuple[str, ...]], list[str]]
) -> None:
    found = [one for call in calls for one in mismatches(call, lay, "cpu", variants)]
    report(found)


# One dtype or the other in each layout: a kernel takes g++ a second.
CASES = [
    (one, ("float32", "bfloat16")[number % 2], lay)
    for one in here()
    if has_kernels(one)
    for number, lay in enumerate(ALL)
]
FEW = [
    (one, lay)
    for one in here()
    if not one.variant and "top_left" not in "".join(one.ways)
    for lay in QUICK.get(one.name, ())
]


@pytest.mark.parametrize(("counterpart", "lay"), FEW, ids=name_of)
def test_rows_in_a_warp(host: EmulatedHost, counterpart: Counterpart, lay: str) -> None:
    """The first sample of which each result and each gradient is judged."""
    call = next(
        call
        for call in counterpart.calls(DTYPES["float32"])
        if call.tensors[0].shape[-1] == 64 and call.tensors[0].dim() == 2
        if all(judged(call, lay, "cpu"))
    )
    check([call], lay, lambda names: [one for one in emulated(names) if one == "cuda_warp"])


@pytest.mark.long
@pytest.mark.parametrize(("counterpart", "dtype", "lay"), CASES, ids=name_of)
def test_samples(host: EmulatedHost, counterpart: Counterpart, dtype: str, lay: str) -> None:
    """The first and the last sample of each way, by teams that are a warp or a block."""
    calls: dict[Any, list[Call]] = {}
    for call in counterpart.calls(DTYPES[dtype]):
        calls.setdefault(call.sample.partition("(")[0], []).append(call)
    few = [call for of_way in calls.values() for call in (of_way[0], of_way[-1])]
    larger = ("cuda_cluster", "cuda_cooperative")
    check(few, lay, lambda names: [one for one in emulated(names) if one not in larger])
