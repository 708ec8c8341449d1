"""VLLM_BATCH_INVARIANT: a row alone and the same row in a batch are equal, bit by bit.

In the modes of gristmill a row depends on nothing else; here vLLM's layers, graphs and provider of
norms must be in that mode at each call, however it comes.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ir
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm_layers import (
    experts,
    invariant_provider,
    load,
    load_experts,
    quantization,
    rank,
)

from gristmill.integrations.vllm import norms
from gristmill.integrations.vllm.weights import HELD
from gristmill.nvfp4 import NVFP4Tensor, quantize
from gristmill.select.overrides import is_batch_invariant

pytestmark = pytest.mark.vllm_quick

HIDDEN, ROWS, EXPERTS, INNER, TOP_K = 192, 37, 6, 96, 2
EPS = 1e-5


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    """A runner of an earlier test would keep its name."""
    gc.collect()


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(rows: int, columns: int, std: float, seed: int) -> NVFP4Tensor:
    return quantize(some(rows, columns, seed=seed) * std)


def linear_layer() -> Any:
    """q, k and v in one, with scales that differ."""
    layer = QKVParallelLinear(
        HIDDEN,
        32,
        4,
        2,
        bias=False,
        quant_config=quantization("modelopt"),
        prefix="model.layers.0.qkv_proj",
        params_dtype=torch.float32,
    )
    parts = {"q": matrix(128, HIDDEN, 0.08, 1), "k": matrix(64, HIDDEN, 0.3, 2)}
    load(layer, "modelopt", {**parts, "v": matrix(64, HIDDEN, 0.02, 3)})
    return layer


def experts_layer(**options: Any) -> Any:
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "inner": INNER, "top_k": TOP_K}
    layer = experts(quantization("modelopt"), **sizes, **options)
    stacks = [
        [matrix(rows, columns, 0.1 * (1 + expert), expert) for expert in range(EXPERTS)]
        for rows, columns in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    ]
    load_experts(layer, "modelopt", *stacks)
    return layer


def watched(layer: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the mode was in force, call by call."""
    runner, modes = getattr(layer, HELD).runner, []
    inner = runner._run_impl

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        modes.append(is_batch_invariant())
        return inner(*tensors)  # type: ignore[no-any-return]

    monkeypatch.setattr(runner, "_run_impl", run)
    return modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_linear_rows_know_no_batch(
    dtype: torch.dtype, invariant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = some(ROWS, HIDDEN).to(dtype)
    with rank():
        layer = linear_layer()
        modes = watched(layer, monkeypatch)
        batch = layer(x)[0]
        for row in range(ROWS):
            assert torch.equal(layer(x[row : row + 1])[0], batch[row : row + 1])
        assert torch.equal(layer(x.flip(0)[4:20])[0], batch.flip(0)[4:20])
    assert modes == [True] * (ROWS + 2)


@pytest.mark.parametrize("ep", [(0, 1), (1, 2)], ids=["whole", "mapped"])
@torch.inference_mode()
def test_expert_rows_know_no_batch(
    ep: tuple[int, int], invariant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a half of the experts elsewhere, too: then some tokens have one here, or none."""
    x = some(ROWS, HIDDEN)
    weights, ids = torch.softmax(some(ROWS, EXPERTS, seed=4), -1).topk(TOP_K)
    ids = ids.int()
    with rank():
        layer = experts_layer(ep=ep)
        modes = watched(layer, monkeypatch)
        batch = layer.forward_modular(x, weights, ids)
        for row in range(ROWS):
            at = slice(row, row + 1)
            assert torch.equal(layer.forward_modular(x[at], weights[at], ids[at]), batch[at])
    assert modes == [True] * (ROWS + 1)


@torch.inference_mode()
def test_a_compiled_graph_in_another_thread_is_in_the_mode(
    invariant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs micro-batches in threads, which know nothing of a caller's context."""
    x = some(ROWS, HIDDEN)
    with rank():
        layer = linear_layer()
        compiled = torch.compile(lambda x: layer(x)[0] * 2, fullgraph=True, dynamic=True)
        want = compiled(x)
        modes = watched(layer, monkeypatch)
        results: list[torch.Tensor] = []

        def work() -> None:
            with torch.inference_mode():
                results.append(compiled(x[3:9]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=60)
    assert modes == [True]
    assert torch.equal(results[0], want[3:9])


@torch.inference_mode()
def test_without_the_variable_the_mode_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with rank():
        layer = linear_layer()
        modes = watched(layer, monkeypatch)
        layer(some(3, HIDDEN))
    assert modes == [False]


@torch.inference_mode()
def test_a_copy_of_a_layer_keeps_the_mode(invariant: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank():
        twin = copy.deepcopy(linear_layer())
        modes = watched(twin, monkeypatch)
        twin(some(3, HIDDEN))
    assert modes == [True]


@pytest.fixture
def provider() -> Iterator[None]:
    order = [norms.PROVIDER, "native"]
    with (
        rank(),
        invariant_provider(),
        ir.ops.rms_norm.set_priority(order),
        ir.ops.fused_add_rms_norm.set_priority(order),
    ):
        yield


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    heads = torch.cat([x * 3, x], dim=-1)[:, :HIDDEN].view(-1, 6, HIDDEN // 6)
    head = ir.ops.rms_norm(heads, weight[: HIDDEN // 6], EPS)
    y = ir.ops.rms_norm(x * 2, weight, EPS)
    return [head, *ir.ops.fused_add_rms_norm.maybe_inplace(y, residual, weight, EPS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_norms_know_no_batch(
    dtype: torch.dtype, provider: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called eagerly through vLLM's IR; lowered they are in test_vllm_passes.py."""
    from gristmill.integrations.vllm import norms_invariant

    modes = []
    inner = norms._rms_norm
    monkeypatch.setattr(
        norms,
        "_rms_norm",
        lambda *args, **options: (modes.append(is_batch_invariant()), inner(*args, **options))[1],
    )
    implementation = ir.ops.rms_norm.impls[norms.PROVIDER]
    assert Path(implementation.impl_fn.__code__.co_filename) == Path(norms_invariant.__file__)
    x, residual = some(2, ROWS, HIDDEN).to(dtype)
    weight = torch.linspace(0.5, 1.5, HIDDEN).to(dtype)
    batch = block(x.clone(), residual.clone(), weight)
    native = [op.impls["native"].impl_fn for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)]
    expected = native[1](native[0](x * 2, weight, EPS), residual, weight, EPS)
    tolerance = ir.ops.fused_add_rms_norm.get_tolerance(dtype)
    for got, want in zip(batch[1:], expected, strict=True):
        torch.testing.assert_close(got, want, **tolerance)
    for row in (0, 7, ROWS - 1):
        at = slice(row, row + 1)
        alone = block(x[at].clone(), residual[at].clone(), weight)
        for got, want in zip(alone, batch, strict=True):
            assert torch.equal(got, want[at])
    assert modes == [True] * 8


def test_opcheck_of_the_norms_that_enter_the_mode(provider: None) -> None:
    ops = torch.ops.gristmill
    x, residual = some(2, 5, HIDDEN).bfloat16()
    weight = torch.linspace(0.5, 1.5, HIDDEN).bfloat16()
    heads = x.view(5, 6, 32)[:, 1:3]
    torch.library.opcheck(ops.vllm_invariant_rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(ops.vllm_invariant_rms_norm.default, (heads, None, EPS))
    torch.library.opcheck(
        ops.vllm_invariant_fused_add_rms_norm_.default, (x, residual, weight, EPS)
    )


def test_the_norms_decline_what_autograd_would_lose(provider: None) -> None:
    takes = ir.ops.rms_norm.impls[norms.PROVIDER].supports_args
    x, weight = some(3, 8), torch.ones(8, requires_grad=True)
    assert takes(x, weight.detach(), EPS)
    assert not takes(x, weight, EPS)
    with torch.no_grad():
        assert takes(x, weight, EPS)


def test_layers_of_a_loaded_model_know_what_will_be_served() -> None:
    """The config that is read ahead of time has the names it is read by."""
    from gristmill.integrations.vllm import compat

    with rank() as config:
        config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 16]
        config.scheduler_config.max_num_batched_tokens = 777
        got = compat.serving("gristmill")
        assert config is get_current_vllm_config()
    assert got.captured == (1, 2, 4, 16)
    assert got.most == 777
    assert got.hidden is None  # there is no model
    assert compat.serving("gristmill") == compat.Serving()  # nor a config
