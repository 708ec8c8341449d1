"""Calls that nobody thought of, of every op, by every variant that runs here.

    pytest tests/fuzz --fuzz-cases 200 --fuzz-seed 7
    python tools/fuzz.py --device cuda --cases 10000 --jobs 10

A call that fails is printed as `plan(...)`, which belongs into test_fuzz_kept.py.
"""

from __future__ import annotations

import pytest
from conformance_helpers import DEVICES
from fuzz_families import FAMILIES
from fuzz_run import check, each_plan

from gristmill.ops.registry import OPS

FEW = {"cpu": 8, "cuda": 12}
MANY = {"cpu": 100, "cuda": 100}

over_devices = pytest.mark.parametrize("device", DEVICES)
over_ops = pytest.mark.parametrize("op", list(OPS))


def test_every_op_is_drawn() -> None:
    assert set(FAMILIES) == set(OPS)


@over_devices
@over_ops
def test_any_call(op: str, device: str, fuzz_cases: int | None, fuzz_seed: int | None) -> None:
    each_plan(op, fuzz_cases or FEW[device], fuzz_seed, lambda call: check(call, device))


@pytest.mark.long
@over_devices
@over_ops
def test_many_calls(op: str, device: str, fuzz_cases: int | None, random_seed: int) -> None:
    """Other ones every time: the seed is in the report of a failure."""
    each_plan(op, fuzz_cases or MANY[device], random_seed, lambda call: check(call, device))
