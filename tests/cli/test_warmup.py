from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError
from gristmill.jit import cache
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN
from gristmill.select.problem import HINTS
from gristmill.select.tables import reset_tables
from gristmill.settings import reload_settings
from gristmill.warmup import (
    COLUMNS,
    EXPERTS,
    LAYERS,
    VOCABULARIES,
    Wanted,
    Warmed,
    default_shapes,
    jobs_of,
    warmup,
)

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(autouse=True)
def settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    reload_settings()
    reset_tables()


def test_what_is_warmed_is_what_a_call_looks_for() -> None:
    done = warmup("rms_norm", shapes=[(16, 4096)], arch="sm_90a")
    op = OPS["rms_norm"]
    args = op.example((16, 4096), torch.bfloat16, "meta")
    problem = op.problem(*args, device=KNOWN["sm_90a"])
    choice = ranked(op.name, op.variants, problem)[0]
    programs = choice.variant.programs(problem, choice.config)
    assert [one.kernels for one in done] == [one.names for one in programs] != []
    assert {one.variant for one in done} == {choice.variant.name}
    assert all(cache.is_cached(one, "sm_90a") for one in programs)


def test_progress_and_the_second_time() -> None:
    seen: list[tuple[Warmed, int, int]] = []
    ops = ["rms_norm", "add_rms_norm"]
    first = gristmill.warmup(
        ops, shapes=[(1, 1024), (2, 1024)], arch="sm_80", progress=lambda *event: seen.append(event)
    )
    assert [event[0] for event in seen] == first
    assert [(number, total) for _, number, total in seen] == [
        (number, len(first)) for number in range(1, len(first) + 1)
    ]
    assert {one.op for one in first} == set(ops)
    assert {one.arch for one in first} == {"sm_80"}
    second = gristmill.warmup(ops, shapes=[(1, 1024)], arch="sm_80")
    assert {one.how for one in second} == {"cached"}


@pytest.mark.parametrize(("table", "share"), [("none", 3), ("on", 2)])
def test_the_default_is_few_programs_for_many_shapes(
    monkeypatch: pytest.MonkeyPatch, table: str, share: int
) -> None:
    """Kernels serve ranges of lengths: a warm-up of an op must stay a matter of seconds.

    Tables may name a kernel for each of their rows, so that there are more with them.
    """
    monkeypatch.setenv("GRISTMILL_TABLE", table)
    reload_settings()
    reset_tables()
    compiled = [
        name for name, op in OPS.items() if any(one.name.startswith("cuda_") for one in op.variants)
    ]
    assert {"rms_norm", "layer_norm", "softmax", "cross_entropy_backward"} <= set(compiled)
    jobs = jobs_of(Wanted(), KNOWN["sm_90a"], [])
    for name in compiled:
        own = jobs_of(Wanted(name), KNOWN["sm_90a"], [])
        assert set(own) <= set(jobs)
        assert 1 <= len(own) < len(default_shapes(name)) / share


def test_losses_are_warmed_for_vocabularies() -> None:
    assert {columns for _, columns in default_shapes("cross_entropy_backward")} == {*VOCABULARIES}
    assert {columns for _, columns in default_shapes("layer_norm")} == {*COLUMNS}


def test_routers_are_warmed_for_numbers_of_experts() -> None:
    for name in ("topk_router", "topk_router_backward"):
        assert default_shapes(name) == tuple((rows, one) for one in EXPERTS for rows in HINTS)


def test_products_are_warmed_for_layers() -> None:
    for name in ("linear", "linear_with_pre", "matmul"):
        shapes = default_shapes(name)
        assert {shape[1:] for shape in shapes} == {*LAYERS}
        assert {rows for rows, *_ in shapes} == {*HINTS}
        args = OPS[name].example(shapes[0], torch.bfloat16, "meta")
        assert args[0].shape == (1, 4096)


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="unknown op 'rms'"):
        warmup("rms", arch="sm_90a")
    with pytest.raises(ArgumentError, match="a device or an architecture, not both"):
        warmup(device="cuda", arch="sm_90a")
    with pytest.raises(ArgumentError, match="nothing is compiled for cpu"):
        warmup(device="cpu")


def test_a_forced_variant_is_what_is_warmed_where_it_can_run() -> None:
    shapes = [(16, 256), (16, 131072)]
    with gristmill.use("rms_norm", "cuda_warp"):
        done = warmup("rms_norm", shapes=shapes, arch="sm_90a")
    assert [one.variant for one in done] == ["cuda_warp"]
    with gristmill.use("rms_norm", "library"):
        assert warmup("rms_norm", shapes=shapes, arch="sm_90a") == []


@pytest.mark.gpu
def test_on_a_gpu_the_first_call_compiles_nothing() -> None:
    gristmill.warmup("rms_norm", shapes=[(24, 4096)])
    before = gristmill.counters()["compiles"]
    x = torch.randn(24, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    gristmill.rms_norm(x, weight)
    assert gristmill.counters()["compiles"] == before
