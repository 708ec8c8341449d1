"""When something is missing: degrade with one warning, or raise what was asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_helpers import KERNEL_OPS, allowed, copied
from conformance_truth import results_of, truth_of

import gristmill
from gristmill.errors import (
    CompilerUnavailable,
    DriverError,
    KernelNotCached,
)
from gristmill.jit import cache, kernel, nvrtc
from gristmill.ops import launch
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN, explain_problem, resolve
from gristmill.settings import reload_settings

H200 = KNOWN["sm_90a"]
ADVICE = "NVRTC is not installed; install gristmill[nvrtc]"


def fallbacks() -> dict[str, int]:
    return dict(gristmill.counters()["fallbacks"])


@pytest.mark.parametrize("error", [CompilerUnavailable(ADVICE), DriverError(ADVICE)], ids=repr)
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_without_kernels_the_next_best_runs_with_one_warning_each(
    op: Op,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a GPU: the problem is one of an H200, the tensors lie where they can be computed."""

    def missing(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(launch, "load", missing)
    before = fallbacks()
    args = op.example((8, 256), torch.bfloat16, "cpu")
    problem = op.problem(*args, device=H200)
    wanted = [one.name for one in op.variants if one.supports(problem) is None]
    ours = [name for name in wanted if name.startswith("cuda_")]
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        choice, plan = resolve(op.name, op.variants, problem)
        resolve(op.name, op.variants, op.problem(*args, device=H200))
    assert not choice.variant.name.startswith("cuda_")
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records})
    tried = [name for name in ours if any(f"variant {name} " in r.message for r in caplog.records)]
    # Those that decline the problem come after torch's own, so they are not tried at all.
    assert tried
    assert all(ADVICE in record.getMessage() for record in caplog.records)
    for name in tried:
        key = f"{op.name}:{name}"
        assert fallbacks()[key] == before.get(key, 0) + 2
    rows = {row.variant: row for row in explain_problem(op.name, op.variants, problem).rows}
    assert rows[tried[0]].status == "failed"
    assert ADVICE in rows[tried[0]].reason
    assert rows[choice.variant.name].status == "chosen"
    if choice.variant.name == "reference":  # torch's fused backward has no CPU kernel
        truths, own = truth_of(op.name, args), copied(args)
        for truth, result in zip(truths, results_of(op.name, own, plan(*own)), strict=True):
            assert truth.roundings(result) <= 2.0


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_asked_for_by_name_it_raises_what_is_missing(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> Any:
        raise CompilerUnavailable(ADVICE)

    monkeypatch.setattr(launch, "load", missing)
    problem = op.problem(*op.example((8, 256), torch.bfloat16, "cpu"), device=H200)
    before = fallbacks()
    with gristmill.use(op.name, "cuda_block"), pytest.raises(CompilerUnavailable, match="install"):
        resolve(op.name, op.variants, problem)
    assert fallbacks() == before


class _Crowded:
    """A kernel of which the device has room for not a single block or cluster."""

    name = "crowded"

    def occupancy(self, threads: int, shared: int = 0) -> int:
        return 0

    def max_active_clusters(self, threads: int, shared: int, cluster: int) -> int:
        return 0

    def prepare(self, **shape: Any) -> Any:
        raise AssertionError("a launch was prepared that can never start")


@pytest.mark.parametrize("shape", [(8, 256), (64, 65536)], ids=["short", "long"])
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_no_room_on_the_device_is_found_out_before_a_launch(
    op: Op, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "load", lambda *args: _Crowded())
    problem = op.problem(*op.example(shape, torch.bfloat16, "meta"), device=H200)
    before = fallbacks()
    choice, _ = resolve(op.name, op.variants, problem)
    assert not choice.variant.name.startswith("cuda_")
    more = sum(fallbacks().values()) - sum(before.values())
    assert more >= 1
    for variant in op.variants:
        if variant.name.startswith("cuda_") and variant.supports(problem) is None:
            with (
                gristmill.use(op.name, variant.name),
                pytest.raises(DriverError, match="crowded: this device has no room for "),
            ):
                resolve(op.name, op.variants, problem)


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_a_kernel_that_may_not_be_compiled_never_degrades(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> Any:
        raise KernelNotCached("gristmill warmup makes it")

    monkeypatch.setattr(launch, "load", missing)
    problem = op.problem(*op.example((8, 256), torch.bfloat16, "cpu"), device=H200)
    with pytest.raises(KernelNotCached, match="gristmill warmup"):
        resolve(op.name, op.variants, problem)


# --- the same on a GPU, with the real cache


@pytest.fixture
def nothing_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel in memory, none on disk, no plan."""
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
    reload_settings()
    _forget()
    yield
    _forget()


def _forget() -> None:
    # `gristmill.jit.kernel` is the function; its module holds what is loaded.
    import sys

    module = sys.modules[kernel.__module__]
    module._kernels.clear()
    module._modules.clear()
    cache.forget()
    for op in OPS.values():
        op.forget_plans()


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_without_nvrtc(
    op: Op, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> str:
        raise CompilerUnavailable(ADVICE)

    args = op.example((8, 256), torch.bfloat16, "cuda")
    truths = truth_of(op.name, args)
    limits = allowed(op, args, truths)
    monkeypatch.setattr(nvrtc, "compiler_version", missing)
    before = fallbacks()
    with caplog.at_level(logging.WARNING, logger="gristmill"):
        for _ in range(2):
            own = copied(args)
            results = results_of(op.name, own, op.run(*own))
            for truth, result, limit in zip(truths, results, limits, strict=True):
                assert truth.roundings(result) <= limit
            op.forget_plans()
    messages = [record.getMessage() for record in caplog.records]
    assert messages
    assert len(messages) == len(set(messages))
    assert all(ADVICE in message for message in messages)
    assert sum(fallbacks().values()) > sum(before.values())
    with gristmill.use(op.name, "cuda_block"), pytest.raises(CompilerUnavailable, match="install"):
        op.run(*copied(args))


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_jit_off(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    args = op.example((8, 256), torch.bfloat16, "cuda")
    monkeypatch.setenv("GRISTMILL_JIT", "off")
    reload_settings()
    with pytest.raises(KernelNotCached, match="gristmill warmup"):
        op.run(*copied(args))
    assert not op._plans
    monkeypatch.setenv("GRISTMILL_JIT", "on")
    reload_settings()
    gristmill.warmup(op.name, shapes=[(8, 256)], dtypes=[torch.bfloat16])
    _forget()
    monkeypatch.setenv("GRISTMILL_JIT", "off")
    reload_settings()
    compiles = gristmill.counters()["compiles"]
    truths, own = truth_of(op.name, args), copied(args)
    for truth, result in zip(truths, results_of(op.name, own, op.run(*own)), strict=True):
        assert truth.roundings(result) <= 2.0
    assert gristmill.counters()["compiles"] == compiles
    assert any(name.startswith(f"{op.name}:cuda_") for name in gristmill.counters()["choices"])
