"""vLLM's own compile passes with our provider: choice, lowering, removal of clones, the result.

On a CPU an LLM does not run these passes, so they are driven here as vLLM drives them on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from vllm import ir
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.clone_elimination import UnsafeCloneEliminationPass
from vllm.compilation.passes.ir.inplace_functionalization import (
    VllmIRInplaceFunctionalizationPass,
)
from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.config.utils import Range
from vllm_counting import CALLS
from vllm_layers import invariant_provider

from gristmill.integrations.vllm import norms
from gristmill.integrations.vllm.plugin import register_norms
from gristmill.select.overrides import is_batch_invariant

pytestmark = pytest.mark.vllm_quick

HIDDEN, HEADS, HEAD, EPS = 128, 4, 32, 1e-5
NATIVE, OURS = ["native"], ["gristmill", "native"]
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
]
SetPriority = Callable[[list[str]], None]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def priority() -> Iterator[SetPriority]:
    """Sets the order of both ops, as a worker does at its start, with torch ops as on a GPU."""
    register_norms()
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(VllmConfig()))
        stack.enter_context(ir.enable_torch_wrap(True))

        def enter(names: list[str]) -> None:
            stack.enter_context(ir.ops.rms_norm.set_priority(names))
            stack.enter_context(ir.ops.fused_add_rms_norm.set_priority(names))

        yield enter


class Block(torch.nn.Module):
    """The norms of a transformer block, one of which is not for us."""

    def __init__(self, weight_dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.linspace(0.5, 1.5, HIDDEN)
        self.weight = torch.nn.Parameter(values.to(weight_dtype))
        self.head_weight = torch.nn.Parameter(values[:HEAD].to(weight_dtype))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        weight, head_weight = self.weight.data, self.head_weight.data
        a = ir.ops.rms_norm(x * 2, weight, EPS)
        # Heads within the output of a projection: rows that do not lie side by side.
        q = torch.cat([x * 3, x], dim=-1)[:, :HIDDEN].view(-1, HEADS, HEAD)
        q = ir.ops.rms_norm(q, head_weight, EPS)
        b, residual = ir.ops.fused_add_rms_norm.maybe_inplace(a, residual, weight, EPS)
        c = ir.ops.rms_norm(b, weight, EPS, HIDDEN // 2)
        return c, residual, q


class Gemma(torch.nn.Module):
    """The functional overload with an fp32 weight, its inputs used again afterwards."""

    def __init__(self, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-0.5, 0.5, HIDDEN).to(weight_dtype))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        weight = self.weight.float() + 1.0
        y, total = ir.ops.fused_add_rms_norm(x, residual, weight, EPS)
        return y, total, x + y, residual + total


@dataclass
class Passes:
    """What the passes did, one entry for each compile."""

    asked: list[dict[str, tuple[str, Any, bool]]] = field(default_factory=list)
    selected: list[dict[str, str]] = field(default_factory=list)
    clones: list[tuple[int, int]] = field(default_factory=list)
    targets: list[list[str]] = field(default_factory=list)


def compiled(module: torch.nn.Module, **options: Any) -> tuple[Any, Passes]:
    """`module` compiled with vLLM's passes in the places where vLLM puts them."""
    config = get_current_vllm_config()
    lowering, elimination = VllmIRLoweringPass(config), UnsafeCloneEliminationPass(config)
    inductor = deepcopy(config.compilation_config.inductor_compile_config)
    inductor["force_disable_caches"] = True
    inductor["pre_grad_custom_pass"] = VllmIRInplaceFunctionalizationPass(config)
    seen = Passes()

    def after_gradients(graph: fx.Graph) -> None:
        seen.asked.append(ir_nodes(graph))
        lowering(graph)
        lowered = clones(graph)
        elimination(graph)
        seen.clones.append((lowered, clones(graph)))
        chosen = lowering.selected_impls.values()
        seen.selected.append({name: impl for nodes in chosen for name, impl in nodes.items()})
        calls = [node for node in graph.nodes if node.op == "call_function"]
        seen.targets.append([str(node.target) for node in calls])

    inductor["post_grad_custom_post_pass"] = after_gradients

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        with pass_context(Range(1, 2048)):
            return compile_fx(graph, inputs, config_patches=inductor)

    return torch.compile(module, backend=backend, fullgraph=True, **options), seen


def ir_nodes(graph: fx.Graph) -> dict[str, tuple[str, Any, bool]]:
    """By node: the IR op, its variance_size, whether x lies contiguous."""
    found = {}
    for node in graph.nodes:
        if str(node.target).startswith("vllm_ir."):
            name = str(node.target).split(".")[1]
            options = node.args[3 if name == "rms_norm" else 4 :]
            size = options[0] if options else None
            found[node.name] = (name, size, node.args[0].meta["val"].is_contiguous())
    return found


def clones(graph: fx.Graph) -> int:
    return sum(node.target is torch.ops.aten.clone.default for node in graph.nodes)


def inputs(tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, tokens, HIDDEN, generator=generator).to(dtype)
    return x, residual


def assert_close(results: Tensors, expected: Tensors, dtype: torch.dtype) -> None:
    tolerance = ir.ops.fused_add_rms_norm.get_tolerance(dtype)
    for ours, native in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, native, check_stride=True, **tolerance)


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@torch.inference_mode()
def test_norms_are_chosen_and_lowered_and_no_clone_is_left(
    priority: SetPriority, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    block = Block(weight_dtype)
    x, residual = inputs(8, dtype)
    priority(NATIVE)
    expected = block(x.clone(), residual.clone())

    priority(OURS)
    function, seen = compiled(block)
    for _ in range(2):
        CALLS.clear()
        given = x.clone()
        result = function(given, residual.clone())
        assert CALLS == {"rms_norm": 1, "fused_add_rms_norm_": 1}
        assert torch.equal(given, x)
        assert_close(result, expected, dtype)

    (asked,), (selected,), (targets,) = seen.asked, seen.selected, seen.targets
    assert sorted(asked.values(), key=str) == [
        ("fused_add_rms_norm", None, True),
        ("rms_norm", HIDDEN // 2, True),
        ("rms_norm", None, False),
        ("rms_norm", None, True),
    ]
    # Heads, whose rows lie apart, are Inductor's to fuse.
    assert selected == {
        node: "gristmill" if size is None and contiguous else "native"
        for node, (_, size, contiguous) in asked.items()
    }
    assert seen.clones == [(2, 0)]
    assert targets.count("gristmill.rms_norm.default") == 1
    assert targets.count("gristmill.fused_add_rms_norm_.default") == 1
    assert not [name for name in targets if name.startswith("vllm_ir")]


@torch.inference_mode()
def test_native_stays_where_the_order_does_not_name_us(priority: SetPriority) -> None:
    priority(NATIVE)
    function, seen = compiled(Block(torch.bfloat16))
    CALLS.clear()
    function(*inputs(8, torch.bfloat16))
    assert set(seen.selected[0].values()) == {"native"}
    assert not CALLS
    assert not [name for name in seen.targets[0] if name.startswith("gristmill")]


@torch.inference_mode()
def test_inputs_that_are_used_again_keep_their_clones(priority: SetPriority) -> None:
    dtype = torch.bfloat16
    gemma = Gemma(dtype)
    x, residual = inputs(8, dtype)
    priority(NATIVE)
    expected = gemma(x.clone(), residual.clone())

    priority(OURS)
    function, seen = compiled(gemma)
    CALLS.clear()
    given = x.clone(), residual.clone()
    result = function(*given)
    assert CALLS == {"fused_add_rms_norm_": 1}
    assert list(seen.selected[0].values()) == ["gristmill"]
    assert seen.clones == [(2, 2)]
    assert torch.equal(given[0], x)
    assert torch.equal(given[1], residual)
    assert_close(result, expected, dtype)


@torch.inference_mode()
def test_one_graph_serves_every_number_of_tokens(priority: SetPriority) -> None:
    dtype = torch.bfloat16
    block = Block(dtype)
    priority(OURS)
    function, seen = compiled(block, dynamic=True)
    for tokens in (8, 2, 33, 300):
        x, residual = inputs(tokens, dtype, seed=tokens)
        CALLS.clear()
        result = function(x.clone(), residual.clone())
        assert CALLS == {"rms_norm": 1, "fused_add_rms_norm_": 1}
        with ir.ops.rms_norm.set_priority(NATIVE), ir.ops.fused_add_rms_norm.set_priority(NATIVE):
            assert_close(result, block(x, residual), dtype)
    assert len(seen.selected) == 1
    assert sorted(seen.selected[0].values()) == ["gristmill"] * 2 + ["native"] * 2


@torch.inference_mode()
def test_a_batch_invariant_graph_enters_the_mode(
    priority: SetPriority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As VLLM_BATCH_INVARIANT has it: no clone is left, and rows know no batch, bit by bit."""
    modes = []
    inner = norms._rms_norm, norms._fused_add_rms_norm_

    def watching(index: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            modes.append(is_batch_invariant())
            return inner[index](*args, **options)

        return call

    monkeypatch.setattr(norms, "_rms_norm", watching(0))
    monkeypatch.setattr(norms, "_fused_add_rms_norm_", watching(1))
    dtype = torch.bfloat16
    block, (x, residual) = Block(dtype), inputs(8, dtype)
    priority(NATIVE)
    expected = block(x.clone(), residual.clone())
    with invariant_provider():
        priority(OURS)
        function, seen = compiled(block, dynamic=True)
        batch = function(x.clone(), residual.clone())
        part = function(x[3:6].clone(), residual[3:6].clone())
        assert "gristmill" in seen.selected[0].values()
    assert_close(batch, expected, dtype)
    # The first result is native's norm of a part of ours, left to Inductor.
    for few, all_of_them in zip(part[1:], batch[1:], strict=True):
        assert torch.equal(few, all_of_them[3:6])
    assert modes == [True] * 6
    assert seen.clones == [(2, 0)]
    assert seen.targets[0].count("gristmill.vllm_invariant_rms_norm.default") == 2
    assert seen.targets[0].count("gristmill.vllm_invariant_fused_add_rms_norm_.default") == 1
    assert not [name for name in seen.targets[0] if name.startswith("vllm_ir")]


def test_opcheck(priority: SetPriority) -> None:
    priority(OURS)
    weight = torch.linspace(0.5, 1.5, HIDDEN).bfloat16()
    x, residual = inputs(8, torch.bfloat16)
    CALLS.clear()
    torch.library.opcheck(torch.ops.vllm_ir.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.vllm_ir.fused_add_rms_norm.default, (x, residual, weight, EPS))
    assert set(CALLS) == {"rms_norm", "fused_add_rms_norm_"}
    torch.library.opcheck(
        torch.ops.gristmill.rms_norm.default, (x, weight, EPS, 0.0, "llama", None)
    )
    torch.library.opcheck(
        torch.ops.gristmill.fused_add_rms_norm_.default, (x, residual, weight, EPS)
    )


def test_the_keys_of_compile_caches_tell_us_from_native(priority: SetPriority) -> None:
    lowering = VllmIRLoweringPass(get_current_vllm_config())
    priority(NATIVE)
    before = lowering.uuid()
    priority(OURS)
    assert "gristmill" in lowering.uuid()
    assert lowering.uuid() != before
    hashes = {IrOpPriorityConfig.with_default(names).compute_hash() for names in (NATIVE,)}
    ours = IrOpPriorityConfig.with_default(NATIVE, rms_norm=OURS, fused_add_rms_norm=OURS)
    assert ours.compute_hash() not in hashes
