"""The plan of variant `grouped_mm` of dense experts, its launches run on the CPU.

The products are torch's own, of tensors on the CPU here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_host import EmulatedHost
from moe_steps import run_step

from gristmill.ops.experts.semantics import Activation
from gristmill.ops.moe import MOE, grouped
from gristmill.ops.moe.grouped import GroupedMm
from gristmill.select.device import KNOWN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = KNOWN["sm_90a"]
CASES = {case.name: case for case in MOE.cases()}
NAMES = (
    "1 rows, 1 of 4 experts, 32 by 16",
    "13 rows, 3 of 3 experts, 64 by 48",
    "33 rows, 10 of 12 experts, 64 by 32",
    "70 rows, 4 of 16 experts, 32 by 272",
    "gelu bfloat16 limit",
    "swiglu_oai bfloat16 limit",
    "alpha bfloat16",
    "nobody",
    "some missing",
    "out of range",
    "one expert beyond a tile",
    "repeated",
    "mapped",
    "mapped away",
    "bias float32",
    "bias float16",
    "weights bf16, ids int32",
    "weights float16",
    "columns strided",
    "expanded rows",
    "routing strided",
    "routing transposed",
    "weights strided",
    "weights transposed",
    "weights unaligned",
)


def _expected(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in fp64, and the size of the terms that it is made of."""
    x, weights, ids, w13, w2, b13, b2, name, limit, mapped, alpha = args
    y, size = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    for row in range(len(x)):
        for weight, number in zip(weights[row].double(), ids[row].tolist(), strict=True):
            expert = number
            if mapped is not None:
                expert = int(mapped[number]) if 0 <= number < len(mapped) else -1
            if not 0 <= expert < len(w13):
                continue
            both = w13[expert].double() @ x[row].double()
            both = both if b13 is None else both + b13[expert].double()
            h = _activated(Activation(name, limit, alpha), *both.chunk(2))
            out = w2[expert].double() @ h
            out = out if b2 is None else out + b2[expert].double()
            y[row] += weight * out
            size[row] += weight.abs() * (w2[expert].double().abs() @ (h.abs() + 1) + 1)
    return y, size


def _activated(act: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if act.limit is not None:
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    if act.name == "gelu":
        return F.gelu(gate) * up
    slope = (1.702 if act.alpha is None else act.alpha) if act.name == "swiglu_oai" else 1.0
    return gate / (1 + torch.exp(-slope * gate)) * (up + (act.name == "swiglu_oai"))


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_is_right(host: EmulatedHost, name: str) -> None:
    args = CASES[name].make("cpu", 2)
    problem = MOE.problem(*args, device=DEVICE)
    variant = GroupedMm()
    assert variant.supports(problem) is None
    run = host.run(variant, problem, None, args)
    expected, size = _expected(args)
    assert run.outputs.shape == args[0].shape
    assert run.outputs.dtype == args[0].dtype
    assert bool(run.outputs.isfinite().all())
    # Each product, the activated value and the result are rounded to bf16.
    off = (run.outputs.double() - expected).abs()
    assert bool((off <= 2**-7 * size).all()), float((off / size.clamp(min=1e-9)).max())
    assert len(run.calls) == (3 if args[6] is None else 4)
    names = {name for program in variant.programs(problem, None) for name in program.names}
    assert {call.name for call in run.calls} == names


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bias", [None, F32, BF16, F16])
@pytest.mark.parametrize(
    "act",
    [
        Activation("silu", None, None),
        Activation("gelu", None, None),
        Activation("swiglu_oai", 7.0, None),
        Activation("swiglu_oai", 0.5, 0.3),
        Activation("silu", 1.0, None),
    ],
    ids=str,
)
def test_activation(
    host: EmulatedHost, act: Activation, bias: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Rounded once, each row with the bias of its expert; rows of nobody are left alone."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 3, 4, 13, 13], dtype=torch.int32)
    count, width = 19, 40
    both = (torch.randn(count, 2 * width) * 3).to(dtype)
    both[5, 3], both[6, width + 3] = math.nan, math.inf
    shift = None if bias is None else torch.randn(len(ends), 2 * width).to(bias)
    out = torch.full((count, width), 77.0, dtype=dtype)
    program = _program(dtype, bias, act.name)

    def prepare() -> Any:
        start = grouped._start(program, DEVICE, count, len(ends), width, act)
        return lambda stream, *given: start(stream, *given[:3], given[3].data_ptr())

    run_step(host, prepare, (both, out, shift, ends), written=(1,), order=1)
    assert bool((out[13:] == 77).all())
    expert = torch.searchsorted(ends, torch.arange(13), right=True)
    exact = both[:13].double() + (0 if shift is None else shift[expert].double())
    expected = _activated(act, *exact.chunk(2, -1))
    assert bool(out[5, 3].isnan())
    healthy = expected.isfinite()
    assert healthy.sum() >= expected.numel() - 2
    error = (out[:13].double() - expected).abs()[healthy]
    allowed = torch.finfo(dtype).eps * 0.51 * expected.abs()[healthy] + 2e-6
    assert bool((error <= allowed).all())


def _program(dtype: torch.dtype, bias: torch.dtype | None, activation: str) -> Any:
    word = "Absent" if bias is None else grouped.TYPES[bias]
    number = grouped.ACTIVATIONS[activation]
    name = f"moe_activate<{grouped.TYPES[dtype]},{word},{number}>"
    return grouped.Program(grouped.SOURCE, (name,))


def test_what_it_does_not_take() -> None:
    def reason(name: str, arch: str = "sm_90a") -> str | None:
        args = CASES[name].make("meta", 0)
        return GroupedMm().supports(MOE.problem(*args, device=KNOWN[arch]))

    assert reason("frozen") is None
    assert reason("frozen", "sm_100a") is None
    assert "waits for the host on sm_80" in str(reason("frozen", "sm_80"))
    assert "waits for the host with float32" in str(reason("silu float32"))
    assert "multiples of 8" in str(reason("odd sizes"))
    assert "fp32, bf16 or fp16" in str(reason("bias float64"))
    assert "fp32, bf16 or fp16" in str(reason("weights float64"))
    assert "nothing to compute" in str(reason("0 rows, 2 of 4 experts, 32 by 16"))
    args = list(CASES["bias float32"].make("meta", 0))
    args[5] = args[5].t().contiguous().t()
    assert "contiguous" in str(GroupedMm().supports(MOE.problem(*args, device=DEVICE)))
