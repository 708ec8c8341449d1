"""gristmill.nn.NVFP4MoE: made, moved, saved, loaded, compiled and trained beside."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gristmill import nvfp4
from gristmill.checkpoints import save_modelopt
from gristmill.errors import ArgumentError, DtypeError
from gristmill.nn import NVFP4MoE

EXPERTS, HIDDEN, INNER = 4, 64, 48


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dense() -> list[torch.Tensor]:
    """Gate, up and down, each of another size."""
    wide = [torch.randn(EXPERTS, INNER, HIDDEN) / 8 * factor for factor in (1, 3)]
    return [*wide, torch.randn(EXPERTS, HIDDEN, INNER) / 8]


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(torch.randn(rows, EXPERTS), -1).topk(2)
    return torch.randn(rows, HIDDEN), weights, ids


def by_hand(
    layers: list[torch.Tensor], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    gate, up, down = (nvfp4.dequantize(nvfp4.quantize(one)) for one in layers)
    result = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            h = torch.nn.functional.silu(gate[expert] @ x[row]) * (up[expert] @ x[row])
            result[row] += weight * (down[expert] @ h)
    return result


@pytest.mark.parametrize("as_list", [False, True], ids=["stacks", "lists"])
@pytest.mark.parametrize("rows", [1, 9])
def test_from_experts_is_each_matrix_quantised_for_itself(rows: int, as_list: bool) -> None:
    layers = dense()
    given = [list(one) for one in layers] if as_list else layers
    made = NVFP4MoE.from_experts(*given)
    args = routing(rows)
    torch.testing.assert_close(made(*args), by_hand(layers, *args), rtol=1e-4, atol=1e-5)
    # The global scales of gate and up stay apart.
    assert all(len(set(row.tolist())) == 2 for row in made.w13_weight_scale_2)
    assert tuple(made.w13.shape) == (EXPERTS, 2 * INNER, HIDDEN)
    assert tuple(made.w2.shape) == (EXPERTS, HIDDEN, INNER)


def test_biases_activation_and_limit_reach_the_op() -> None:
    layers = dense()
    biases = {"w13_bias": torch.randn(EXPERTS, 2 * INNER), "w2_bias": torch.randn(EXPERTS, HIDDEN)}
    options = {"activation": "swiglu_oai", "limit": 1.0, "alpha": 1.5}
    made = NVFP4MoE.from_experts(*layers, **biases, **options)
    args = routing(5)
    assert torch.equal(made(*args), nvfp4.moe(*args, made.w13, made.w2, **biases, **options))
    assert not torch.equal(made(*args), nvfp4.moe(*args, made.w13, made.w2))
    assert repr(made) == (
        "NVFP4MoE(num_experts=4, hidden_size=64, intermediate_size=48, bias=True, "
        "activation='swiglu_oai', limit=1.0, alpha=1.5)"
    )
    assert not torch.equal(
        made(*args), nvfp4.moe(*args, made.w13, made.w2, **biases, **{**options, "alpha": None})
    )
    del made.__dict__["alpha"]  # as of a pickle from before there was one
    torch.testing.assert_close(
        made(*args), nvfp4.moe(*args, made.w13, made.w2, **biases, **{**options, "alpha": 1.702})
    )


def test_state_dtypes_and_copies() -> None:
    made = NVFP4MoE.from_experts(*dense())
    assert list(made.state_dict()) == [
        f"{name}_{part}"
        for name in ("w13", "w2")
        for part in ("weight", "weight_scale", "weight_scale_2")
    ]
    args = routing(6)
    expected = made(*args)
    fresh = NVFP4MoE(EXPERTS, HIDDEN, INNER)
    assert not fresh(*args).any()
    fresh.load_state_dict(made.state_dict())
    copies = (
        fresh,
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        made.bfloat16().double(),
    )
    for other in copies:
        assert other.w13_weight_scale.dtype == torch.float8_e4m3fn
        assert other.w2_weight_scale_2.dtype == torch.float32
        assert torch.equal(other(*args), expected)
    assert not list(made.parameters())


def test_one_global_scale_per_expert_loads() -> None:
    stack = nvfp4.quantize(torch.randn(EXPERTS, HIDDEN, INNER))
    made = NVFP4MoE.from_experts(*dense())
    state = made.state_dict()
    state["w2_weight"], state["w2_weight_scale"] = stack.codes, stack.scales
    state["w2_weight_scale_2"] = stack.global_scale
    made.load_state_dict(state)
    assert torch.equal(nvfp4.dequantize(made.w2), nvfp4.dequantize(stack))


def test_biases_are_saved_and_follow_dtypes() -> None:
    made = NVFP4MoE(EXPERTS, HIDDEN, INNER, bias=True, dtype=torch.bfloat16)
    assert {"w13_bias", "w2_bias"} <= set(made.state_dict())
    assert made.w13_bias.dtype == torch.bfloat16
    assert made.float().w2_bias.dtype == torch.float32
    assert made(*routing(3)).shape == (3, HIDDEN)


def test_wrong_arguments() -> None:
    gate, up, down = dense()
    with pytest.raises(ArgumentError, match=r"gate and up must have one shape.*\(4, 48, 64\) and"):
        NVFP4MoE.from_experts(gate, up[:, :32], down)
    with pytest.raises(ArgumentError, match=r"down must have shape \(E, H, I\) = \(4, 64, 48\)"):
        NVFP4MoE.from_experts(gate, up, down[:3])
    with pytest.raises(ArgumentError, match=r"a stack of three dims or a list.*\(48, 64\)"):
        NVFP4MoE.from_experts(gate[0], up[0], down[0])
    with pytest.raises(ArgumentError, match=r"matrices of one shape, got \(32, 64\), \(48, 64\)"):
        NVFP4MoE.from_experts([gate[0], gate[1, :32]], list(up), list(down))
    with pytest.raises(ArgumentError, match=r"matrices of one shape, got nothing"):
        NVFP4MoE.from_experts([], [], [])
    with pytest.raises(DtypeError, match=r"quantize: w must be a tensor .*, got list"):
        NVFP4MoE.from_experts([[1.0]], list(up), list(down))  # type: ignore[list-item]
    with pytest.raises(DtypeError, match="NVFP4MoE: hidden_size must be an int, got float"):
        NVFP4MoE(4, 64.0, 48)
    with pytest.raises(ArgumentError, match=r"NVFP4MoE: .*multiple of 16, got 40"):
        NVFP4MoE(4, 64, 40)


@pytest.mark.parametrize("biased", [False, True])
def test_from_checkpoint(tmp_path: Path, biased: bool) -> None:
    layers = dense()
    names = ("gate_proj", "up_proj", "down_proj")
    weights: dict[str, Any] = {}
    biases = [torch.randn(EXPERTS, one.shape[1]) for one in layers]
    for name, stack, bias in zip(names, layers, biases, strict=True):
        for expert in range(EXPERTS):
            weights[f"mlp.experts.{expert}.{name}"] = nvfp4.quantize(stack[expert])
            if biased:
                weights[f"mlp.experts.{expert}.{name}.bias"] = bias[expert]
    save_modelopt(tmp_path, weights)
    made = NVFP4MoE.from_checkpoint(tmp_path, "mlp.experts", activation="gelu", limit=2.0)
    given = {"w13_bias": torch.cat(biases[:2], 1), "w2_bias": biases[2]} if biased else {}
    expected = NVFP4MoE.from_experts(*layers, activation="gelu", limit=2.0, **given)
    args = routing(5)
    assert torch.equal(made(*args), expected(*args))


def test_twelve_equal_layers_are_one_graph() -> None:
    layers = [NVFP4MoE.from_experts(*dense()) for _ in range(12)]
    args = routing(5)
    expected = [one(*args) for one in layers]
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda one, *args: one(*args), backend=counter, fullgraph=True)
    for one, want in zip(layers, expected, strict=True):
        assert torch.equal(run(one, *args), want)
    assert counter.frame_count == 1
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for one, want in zip(layers, expected, strict=True):
        one.compile(backend=counter, fullgraph=True)
        assert torch.equal(one(*args), want)
    assert counter.frame_count == 1


def test_a_router_and_an_adapter_train_through_frozen_experts() -> None:
    experts = NVFP4MoE.from_experts(*dense())
    router = torch.nn.Linear(HIDDEN, EXPERTS)
    adapter = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
    x, target = torch.randn(2, 64, HIDDEN)
    trained = [*router.parameters(), *adapter.parameters()]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        h = x + adapter(x)
        weights, ids = torch.softmax(router(h), -1).topk(2)
        loss = torch.nn.functional.mse_loss(experts(h, weights, ids), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(value.grad is not None and value.grad.any() for value in trained)


def test_options_and_biases_are_checked_when_made() -> None:
    with pytest.raises(ArgumentError, match="activation must be 'silu'"):
        NVFP4MoE(EXPERTS, HIDDEN, INNER, activation="relu")
    with pytest.raises(ArgumentError, match="w13_bias"):
        NVFP4MoE.from_experts(*dense(), w13_bias=torch.zeros(EXPERTS, INNER))
    alone = NVFP4MoE.from_experts(*dense(), w2_bias=torch.ones(EXPERTS, HIDDEN))
    assert "bias=True" in repr(alone)
