"""The block of the suite `end_to_end`: tiny ones against loops over tokens and heads in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.bench.check import WrongResultError
from gristmill.bench.end_to_end import decoding, training, truth
from gristmill.bench.end_to_end.model import (
    EPS,
    TINY,
    TINY_MIXTURE,
    Cache,
    Pieces,
    Rotary,
    Sizes,
)
from gristmill.bench.end_to_end.pieces import (
    DECODING,
    GRISTMILL,
    GRISTMILL_LINEAR,
    TORCH,
    TRAINING,
    TRAINING_BLOCK,
)
from gristmill.bench.end_to_end.problem import Problem

CPU = torch.device("cpu")
TRAINED = Problem("training", TINY, 2, 12, TRAINING)
BLOCK = Problem("training_block", TINY, 2, 12, TRAINING_BLOCK)
DECODED = Problem("decoding", TINY, 3, 20, DECODING)
MIXED = Problem("decoding_moe", TINY_MIXTURE, 3, 20, DECODING)
# Of a whole result, by norms: what bf16 does to it on the way, doubled.
ROUNDED = 0.02


# ------------------------------------------------------------------------- the truth, once more


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum() / len(x) + EPS) * weight


def turned(x: Tensor, rotary: Rotary, token: int) -> Tensor:
    half = len(x) // 2
    cos, sin = rotary.cos[token].double(), rotary.sin[token].double()
    return torch.stack(
        [
            x[i] * cos[i] - x[i + half] * sin[i]
            if i < half
            else x[i] * cos[i] + x[i - half] * sin[i]
            for i in range(len(x))
        ]
    )


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def mlp(sizes: Sizes, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    if not sizes.experts:
        return swiglu(x, weights["gate_up"], weights["down"])
    logits = weights["router"] @ x
    chosen = sorted(range(sizes.experts), key=lambda e: -float(logits[e]))[: sizes.chosen]
    shares = torch.stack([logits[e] for e in chosen]).exp()
    made = [swiglu(x, weights["w13"][e], weights["w2"][e]) for e in chosen]
    return sum((s * y for s, y in zip(shares / shares.sum(), made, strict=True)), torch.zeros(()))


def by_token(
    sizes: Sizes,
    weights: dict[str, Tensor],
    x: Tensor,
    rotary: Rotary,
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence (tokens, hidden), token by token and head by head: (added, residual).

    `before`: keys and values (groups, tokens, head) that all of them see.
    """
    keys: list[list[Tensor]] = [[] for _ in range(sizes.groups)]
    values: list[list[Tensor]] = [[] for _ in range(sizes.groups)]
    if before is not None:
        keys, values = ([list(group) for group in one.double()] for one in before)
    added, residuals = [], []
    for token, state in enumerate(x):
        rows = (weights["qkv"] @ norm(state, weights["norm1"])).split(sizes.head)
        for group in range(sizes.groups):
            keys[group].append(turned(rows[sizes.heads + group], rotary, token))
            values[group].append(rows[sizes.heads + sizes.groups + group])
        heads = []
        for head in range(sizes.heads):
            group = head * sizes.groups // sizes.heads
            query = turned(rows[head], rotary, token)
            scores = torch.stack([query @ key / math.sqrt(sizes.head) for key in keys[group]])
            shares = scores.softmax(0)
            heads.append(sum((s * v for s, v in zip(shares, values[group], strict=True))))
        residual = state + weights["out"] @ torch.cat(heads)
        residuals.append(residual)
        added.append(mlp(sizes, weights, norm(residual, weights["norm2"])))
    return torch.stack(added), torch.stack(residuals)


def loss_by_token(weights: dict[str, Tensor], states: Tensor, targets: Tensor) -> Tensor:
    losses = []
    for state, target in zip(states.flatten(0, 1), targets.flatten().tolist(), strict=True):
        logits = weights["head"] @ norm(state, weights["norm3"])
        losses.append(logits.exp().sum().log() - logits[target])
    return torch.stack(losses).mean()


def off(got: Tensor, want: Tensor) -> float:
    left, right = got.detach().double(), want.detach().double()
    return float((left - right).norm() / right.norm())


# --------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("problem", [TRAINED, BLOCK], ids=lambda one: one.op)
def test_the_truth_of_training_is_that_of_tokens_one_by_one(problem: Problem) -> None:
    data = training.make_data(problem, CPU)
    found = training.expectation(problem, data)
    weights = truth.in_fp64(data.weights, grad=True)
    x = data.x.detach().double().requires_grad_()
    pairs = [by_token(TINY, weights, one, data.rotary) for one in x]
    out = torch.stack([added + residual for added, residual in pairs])
    if problem is TRAINED:
        value = loss_by_token(weights, out, data.targets)
        value.backward()
        assert float(found["loss"]) == pytest.approx(float(value.detach()), rel=1e-6)
    else:
        out.backward(data.incoming.double())
        assert off(found["output"], out) < 1e-6
    gradients = {name: leaf.grad for name, leaf in {"x": x, **weights}.items()}
    assert len(found) == len(gradients) + 1
    for name, gradient in gradients.items():
        assert gradient is not None
        assert off(found[f"the gradient of {name}"], gradient) < 1e-6, name


@pytest.mark.parametrize("pieces", [TORCH, GRISTMILL, GRISTMILL_LINEAR])
@pytest.mark.parametrize("problem", [TRAINED, BLOCK], ids=lambda one: one.op)
def test_implementations_train_alike(problem: Problem, pieces: Pieces) -> None:
    data = training.make_data(problem, CPU)
    expected = training.expectation(problem, data)
    step = training.make_step(problem, data, pieces, is_compiled=False)
    outputs = step()
    assert set(outputs) == set(expected)
    assert all(off(outputs[name], expected[name]) < ROUNDED for name in expected)
    assert 0 < truth.compare(outputs, expected, truth.LIMIT) < ROUNDED
    assert all(leaf.grad is None for leaf in data.leaves.values())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """`torch.compile` as far as Dynamo: the graphs that it makes, which then run as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    torch._dynamo.reset()
    for module in (training, decoding):
        monkeypatch.setattr(module, "compiled", compiled)
    yield graphs
    torch._dynamo.reset()


def test_a_training_step_is_one_graph(traced: list[Any]) -> None:
    data = training.make_data(TRAINED, CPU)
    expected = training.expectation(TRAINED, data)
    step = training.make_step(TRAINED, data, GRISTMILL, is_compiled=True)
    for _ in range(2):
        assert truth.compare(step(), expected, truth.LIMIT) < ROUNDED
    assert len(traced) == 1
    called = [str(node.target) for node in traced[0].graph.nodes]
    assert sum("gristmill.add_rms_norm" in name for name in called) == 2
    assert any("cross_entropy" in name for name in called)


# --------------------------------------------------------------------------------------- decoding


def form_of(problem: Problem, *, quantised: bool) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = decoding.make_weights(problem.sizes, generator)
    inputs = decoding.make_inputs(problem, weights.get("router"), generator)
    make = decoding.nvfp4_form if quantised else decoding.dense_form
    return make(problem, weights, inputs), inputs


@pytest.mark.parametrize("quantised", [False, True], ids=["dense", "nvfp4"])
@pytest.mark.parametrize("problem", [DECODED, MIXED], ids=lambda one: one.op)
def test_a_decoding_step_is_that_of_tokens_one_by_one(problem: Problem, quantised: bool) -> None:
    form, inputs = form_of(problem, quantised=quantised)
    sizes, weights = problem.sizes, truth.in_fp64(form.exact)
    wanted = []
    for index in range(problem.batch):
        before = tuple(one[index, :, : problem.length - 1] for one in inputs.cache[:2])
        state = (inputs.x[index] + inputs.residual[index].double()).double()
        wanted.append(by_token(sizes, weights, state, inputs.rotary, before))
    added, residual = (torch.stack(one) for one in zip(*wanted, strict=True))
    expected = decoding.expectation(problem, form.exact, inputs)
    assert off(expected["output"], added) < 1e-6
    assert off(expected["residual"], residual) < 1e-6
    for pieces in (TORCH, GRISTMILL):
        if quantised and pieces is TORCH:
            continue
        for index in range(form.copies):  # every copy is the same block
            cache = Cache(*(one.clone() for one in inputs.cache))
            block = form.make(index, pieces)
            outputs = block(inputs.x, inputs.residual, inputs.rotary, cache)
            made = decoding.named(outputs, cache)
            assert off(made["output"], added) < ROUNDED
            assert truth.compare(made, expected, truth.LIMIT) < ROUNDED
            # And nothing else of the cache is touched.
            rest = torch.arange(problem.length - 1)
            for after, there in zip(cache[:2], inputs.cache[:2], strict=True):
                assert torch.equal(after[:, :, rest], there[:, :, rest])


def test_copies_are_not_one_memory() -> None:
    for quantised in (False, True):
        form, _ = form_of(DECODED, quantised=quantised)
        blocks = [form.make(index, GRISTMILL) for index in range(form.copies)]
        places = {
            one.data_ptr()
            for block in blocks
            for one in (*block.out.parameters(), *block.out.buffers())
        }
        each = len([*blocks[0].out.parameters(), *blocks[0].out.buffers()])
        assert len(blocks) == 2
        assert len(places) == 2 * each


def test_copies_share_one_graph(traced: list[Any]) -> None:
    for quantised, count in ((False, 1), (True, 2)):
        form, inputs = form_of(DECODED, quantised=quantised)
        step = decoding.make_step(form, GRISTMILL, is_compiled=True)
        expected = decoding.expectation(DECODED, form.exact, inputs)
        for index in (0, 1, 2, 0):
            outputs = step(index, *inputs)
            made = decoding.named(outputs, inputs.cache)
            assert truth.compare(made, expected, truth.LIMIT) < ROUNDED
        assert len(traced) == count


def test_bytes_are_those_of_weights_and_cache() -> None:
    cache = 2 * 2 * TINY.groups * 20 * TINY.head * 3
    matrices = 64 * (128 + 64 + 256 + 128)
    dense, _ = form_of(DECODED, quantised=False)
    assert dense.bytes == cache + 2 * (matrices + 2 * 64)
    packed, _ = form_of(DECODED, quantised=True)
    rows = 128 + 64 + 256 + 64
    assert packed.bytes == cache + matrices // 2 + matrices // 16 + 4 * rows + 2 * 2 * 64
    # Of a mixture only the experts that some token has.
    mixed, inputs = form_of(MIXED, quantised=False)
    assert 2 <= inputs.experts <= 6
    cache = 2 * 2 * TINY_MIXTURE.groups * 20 * TINY_MIXTURE.head * 3
    shared = 2 * (64 * (128 + 64) + 8 * 64 + 2 * 64)
    assert mixed.bytes == cache + shared + inputs.experts * 2 * 3 * 32 * 64


def test_tokens_go_to_the_experts_they_are_meant_for() -> None:
    """So clearly that 16 bits do not change it: in fp64 the nearest other one is far behind."""
    problem = Problem(
        "decoding_moe", replace(TINY_MIXTURE, hidden=256, experts=32), 64, 8, DECODING
    )
    generator = torch.Generator().manual_seed(3)
    weights = truth.in_fp64(decoding.make_weights(problem.sizes, generator))
    inputs = decoding.make_inputs(problem, weights["router"].bfloat16(), generator)
    state = (inputs.x + inputs.residual).double().squeeze(1)
    state = state / state.square().mean(-1, keepdim=True).sqrt()
    logits = (state @ weights["router"].T).sort(descending=True).values
    assert float((logits[:, 1] - logits[:, 2]).min()) > 0.5
    assert inputs.experts > 24  # of 32, with 128 draws


# ------------------------------------------------------------------------------------- comparing


def test_what_is_compared() -> None:
    right = {"loss": torch.tensor(2.0), "gradient": torch.randn(64, 64)}
    assert truth.compare(right, right, 0.05) == 0
    with pytest.raises(WrongResultError, match=r"the loss is 2\.01000, not 2\.00000"):
        truth.compare({**right, "loss": torch.tensor(2.01)}, right, 0.05)
    with pytest.raises(WrongResultError, match="the loss is nan"):
        truth.compare({**right, "loss": torch.tensor(torch.nan)}, right, 0.05)
    # A loss in bf16 is as good as bf16 can say it, and no worse.
    large = {**right, "loss": torch.tensor(12.27848)}
    rounded = {**large, "loss": torch.tensor(12.25, dtype=torch.bfloat16)}
    assert truth.compare(rounded, large, 0.05) == pytest.approx(0.00232, rel=0.01)
    with pytest.raises(WrongResultError, match=r"the loss is 12\.18750, not 12\.27848"):
        truth.compare({**large, "loss": torch.tensor(12.1875).bfloat16()}, large, 0.05)
    one_row = right["gradient"].clone()
    one_row[17] = 0
    with pytest.raises(WrongResultError, match="gradient: a row is off by 1 "):
        truth.compare({**right, "gradient": one_row}, right, 0.05)
    with pytest.raises(WrongResultError, match=r"gradient is \(64,\) instead of \(64, 64\)"):
        truth.compare({**right, "gradient": torch.zeros(64)}, right, 0.05)
