"""A wrong argument raises, whichever it is and whatever the others are, and nothing is written."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from conformance_helpers import DEVICES, copied, memory
from fuzz_bad import bad_calls, made_bad
from fuzz_plan import Plan

from gristmill.errors import GristmillError
from gristmill.ops.registry import OPS

FEW = {"cpu": 12, "cuda": 25}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", list(OPS))
def test_any_wrong_call(
    op: str, device: str, fuzz_cases: int | None, fuzz_seed: int | None
) -> None:
    settings = hypothesis.settings(
        max_examples=fuzz_cases or FEW[device],
        deadline=None,
        database=None,
        derandomize=fuzz_seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(call=bad_calls(op))
    def raises(call: tuple[Plan, int, Any]) -> None:
        args = made_bad(*call, device)
        hypothesis.assume(args is not None)
        refused(op, args)

    if fuzz_seed is not None:
        raises = hypothesis.seed(fuzz_seed)(raises)
    raises()


def refused(op: str, args: Any) -> None:
    """In our words on the direct way, in torch's where its schema is asked first."""
    before = copied(tuple(one for one in args if _plain(one)))
    with pytest.raises(GristmillError, match=r"^\w+: "):
        OPS[op].run(*args)
    with pytest.raises((GristmillError, TypeError, ValueError, RuntimeError)):
        OPS[op].overload(*args)
    after = tuple(one for one in args if _plain(one))
    for one, other in zip(before, after, strict=True):
        if one.device.type != "meta":
            assert torch.equal(memory(one), memory(other))


def _plain(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.layout == torch.strided
