"""On a GPU, by its own clock: nothing but the time differs, and nothing is timed in a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from multikernel_cases import CASES, Case
from multikernel_helpers import chosen, copied, fake_timing, same_bits, set_tuning

from gristmill.multikernel import MultiKernel

pytestmark = pytest.mark.gpu


def on_gpu(case: Case, rows: int) -> tuple[Any, ...]:
    """The arguments there; what is one tensor stays one."""
    moved: dict[int, torch.Tensor] = {}
    return tuple(moved.setdefault(id(one), one.cuda()) for one in case.make(rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tuning_on_the_device_changes_nothing_but_the_choice(case: Case) -> None:
    one = MultiKernel(f"gpu_{case.name}", case.kernels)
    args = on_gpu(case, 512)
    before = copied(args)
    torch.manual_seed(7)
    following = torch.rand(4, device="cuda")
    torch.manual_seed(7)
    outcome = one.tune(*args)
    assert outcome is not None
    assert same_bits(args, before)
    assert same_bits(torch.rand(4, device="cuda"), following)
    winner = chosen(one, *args)
    assert winner == outcome.row.variant
    assert winner in case.possible

    torch.manual_seed(7)
    expected = case.kernels[str(winner)](*before)
    following = torch.rand(4, device="cuda")
    torch.manual_seed(7)
    result = one(*args)
    assert same_bits(result, expected)
    assert same_bits(args, before)
    assert same_bits(torch.rand(4, device="cuda"), following)


@pytest.mark.alone
def test_the_clock_of_the_device_decides() -> None:
    """Kernel time, not host time: one launch against one for each row."""
    triton_kernels = pytest.importorskip("multikernel_triton")
    one = MultiKernel(
        "gpu_add",
        {"pieces": triton_kernels.add_in_pieces, "triton": triton_kernels.add_triton},
    )
    x, y = torch.randn(2, 256, 1024, device="cuda")
    outcome = one.tune(x, y)
    assert outcome is not None
    assert outcome.row.variant == "triton"
    assert outcome.row.times["pieces"] > 5 * outcome.row.times["triton"]
    assert same_bits(one(x, y), x + y)
    # By keyword alone, too: the device is found there.
    again = one.tune(x=x, y=y)
    assert again is not None
    assert again.row.us < 10 * outcome.row.us


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    one = MultiKernel("gpu_captured", {"a": lambda x: x + 1, "b": lambda x: x + 2})
    x = torch.zeros(64, 64, device="cuda")
    (x + 1).sum().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = one(x)
    graph.replay()
    assert float(y[0, 0]) == 1.0
    assert clock.runs == []
