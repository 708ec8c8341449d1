"""Examples of the NVFP4 ops are laid out for the GPU they are asked about, present or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import run_by
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.explain import tune_command
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN
from gristmill.select.device import device_of
from gristmill.select.record import Recorded, described
from gristmill.tune.jobs import plan_by_recording, plan_by_shapes

NAMES = ("nvfp4_linear", "nvfp4_linear_backward", "nvfp4_moe", "nvfp4_moe_backward")
over_ops = pytest.mark.parametrize("op", [pytest.param(OPS[name], id=name) for name in NAMES])
LAYOUTS = {"sm_80": "fragments", "sm_89": "fragments", "sm_90a": "fragments"}


def layout_on(op: Op, arch: str) -> str:
    if "moe" in op.name and arch in ("sm_80", "sm_89"):
        return "rows"  # which Triton reads
    return LAYOUTS.get(arch, "tiles")


@over_ops
@pytest.mark.parametrize("arch", KNOWN)
def test_an_example_is_laid_out_for_its_target(op: Op, arch: str) -> None:
    args = op.example_for(KNOWN[arch], (4, 80), torch.bfloat16)
    op.check(*args)
    layout = layout_on(op, arch)
    assert args[-2 if "moe" in op.name else -3] == layout
    problem = op.problem(*args, device=KNOWN[arch])
    assert problem.flags == (() if layout == "rows" else (layout,))
    on_cpu = op.example_for(device_of("cpu"), (4, 80), torch.bfloat16)
    assert op.problem(*on_cpu).flags == ()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", NAMES[:2])
def test_tuning_and_explaining_speak_of_its_layout(name: str, arch: str) -> None:
    op, target = OPS[name], KNOWN[arch]
    layout = layout_on(op, arch)
    plan = plan_by_shapes([name], target, shapes=[(16, 96, 80)])
    assert not plan.notes
    assert {family.at(16).problem.flags for family in plan.families} == {(layout,)}
    args = op.example_for(target, (16, 96, 80), torch.bfloat16)
    command = tune_command(op, op.problem(*args, device=target))
    assert command is not None
    assert f"tune {name} --shape 16x96x80" in command
    options = f"explain {name} --shape 16x96x80 --arch {arch} --json"
    found = CliRunner().invoke(app, options.split())
    assert found.exit_code == 0
    assert layout in found.stdout


@over_ops
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_recorded_calls_come_back_with_scales_that_are_some(op: Op, arch: str) -> None:
    """Random bytes are no scales in fragments: a call of them must be one that can be judged."""
    args = call_for(op, arch)
    recorded = Recorded(op.name, "key", "cpu", tuple(described(args)))
    plan = plan_by_recording([recorded], device_of("cpu"))
    assert not plan.notes
    torch.manual_seed(0)
    (family,) = plan.families
    again = family.at(family.asked[0]).make("cpu")
    results = [run_by(op, name, again) for name in ("library", "reference")]
    for one, other in zip(*map(as_tuple, results), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def call_for(op: Op, arch: str) -> tuple[Any, ...]:
    shape = (9, 4, 2, 80, 48) if "moe" in op.name else (9, 130, 80)
    return op.example(shape, torch.float32, "cpu", arch)


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@pytest.mark.parametrize("case", ["plain", "strided", "expanded", "mapped"])
def test_calls_over_other_experts_are_laid_out_as_the_first(case: str) -> None:
    """Plans are made for the strides of ids; what takes no part goes on to take none."""
    op = OPS["nvfp4_moe"]
    args = list(op.example((1, 8, 2, 32, 16), torch.bfloat16, "cpu"))
    ids = torch.tensor([[5, -1]], dtype=torch.int32)
    if case == "strided":
        ids = torch.tensor([[5, 0, -1, 0]], dtype=torch.int32)[:, ::2]
    if case == "expanded":
        args = list(op.example((3, 24, 1, 32, 16), torch.bfloat16, "cpu"))
        ids = torch.tensor([[5]], dtype=torch.int32).expand(3, 1)
    if case == "mapped":
        args[13] = torch.arange(20, dtype=torch.int32) % 8
        ids = torch.tensor([[5, 40]], dtype=torch.int32)
    args[2] = ids
    assert op.elsewhere is not None
    calls = op.elsewhere(*args)
    assert calls[0] == tuple(args)
    found = [call[2] for call in calls]
    assert {(one.stride(), one.dtype, one.shape) for one in found} == {
        (ids.stride(), ids.dtype, ids.shape)
    }
    first = [one[0, 0].item() for one in found]
    experts = {"expanded": 24, "mapped": 20}.get(case, 8)
    assert len(calls) == len(set(first)) == experts // ids.numel()
    assert all(0 <= one < experts for one in first)
    if case != "expanded":
        assert {one[0, 1].item() for one in found} == {ids[0, 1].item()}
    for call in calls:
        op.check(*call)
        assert all(one is other for one, other in zip(call[3:9], args[3:9], strict=True))
