"""On a GPU: with a bundle of everything, and nothing compiled, calls of an op run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gristmill
from gristmill.jit import cache
from gristmill.ops.registry import OPS
from gristmill.select.tables import reset_tables
from gristmill.settings import reload_settings


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    reload_settings()
    reset_tables()
    cache.forget()
    for op in OPS.values():
        op.forget_plans()


@pytest.mark.gpu
@pytest.mark.long
def test_a_bundle_of_everything_serves(tmp_path: Path, anew: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "all.zip"
    ops = ("cross_entropy", "cross_entropy_backward", "scale_gradient_", "linear")
    done = gristmill.warmup(ops, every=True, bundle=bundle)
    assert {one.how for one in done} <= {"compiled", "cached"}
    anew.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "empty"))
    anew.setenv("GRISTMILL_CACHE_LAYERS", str(bundle))
    anew.setenv("GRISTMILL_JIT", "off")
    _forget()
    before, draw = gristmill.counters()["compiles"], random.Random(0)
    for _ in range(200):
        rows = draw.choice([1, 7, 70, 300, 2000])
        classes = draw.choice([8, 100, 1000, 4099, 32000, 50257])
        logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, classes, (rows,), device="cuda")
        cap, smoothing = draw.choice([None, 30.0]), draw.choice([0.0, 0.1])
        loss = gristmill.cross_entropy(logits, target, softcap=cap, label_smoothing=smoothing)
        loss.backward()
        x = torch.randn(draw.randint(1, 400), 8 * draw.randint(1, 600), device="cuda")
        weight = torch.randn(draw.randint(1, 3000), x.shape[1], device="cuda")
        gristmill.linear(x.bfloat16(), weight.bfloat16())
    assert gristmill.counters()["compiles"] == before
