"""The router's gradient against autograd of the plain formula in fp64, and under compilers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, same_bits

import gristmill
from gristmill.errors import DoubleBackwardError
from gristmill.ops.topk_router import TOPK_ROUTER_BACKWARD

over_devices = pytest.mark.parametrize("device", DEVICES)
over_scores = pytest.mark.parametrize(
    ("scoring", "renormalize"),
    [(scoring, so) for scoring in ("softmax", "sigmoid") for so in (True, False)],
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(
    logits: torch.Tensor, ids: torch.Tensor, scoring: str, renormalize: bool, scale: float
) -> torch.Tensor:
    """The weights of given experts, written out."""
    powers = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    scores = powers / powers.sum(-1, keepdim=True)
    if scoring == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    own = torch.stack([scores[row][of] for row, of in enumerate(ids.long())])
    if renormalize:
        own = own / (own.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    return scale * own


def options_of(scoring: str, renormalize: bool, grouped: bool, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize, "scale": 1.5}
    if grouped:
        bias = torch.rand(32, generator=torch.Generator().manual_seed(1)).to(device)
        options |= {"bias": bias, "groups": 4, "topk_groups": 2}
    return options


def random(rows: int, experts: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (2 * torch.randn(rows, experts, generator=generator)).to(device)


@over_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", [False, True])
@over_scores
def test_against_autograd(
    scoring: str, renormalize: bool, grouped: bool, dtype: torch.dtype, device: str
) -> None:
    logits = random(9, 32, device).to(dtype).requires_grad_()
    options = options_of(scoring, renormalize, grouped, device)
    weights, ids = gristmill.topk_router(logits, 5, **options)
    assert weights.requires_grad
    assert not ids.requires_grad
    dweights = random(9, 5, device).to(weights.dtype)
    weights.backward(dweights)
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, ids, scoring, renormalize, 1.5)
    expected.backward(dweights.double())
    assert logits.grad is not None
    assert exact.grad is not None
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance / 4)
    if scoring == "sigmoid" or renormalize:
        chosen = torch.zeros(9, 32, dtype=torch.bool, device=device).scatter(1, ids.long(), True)
        assert not logits.grad[~chosen].any()


@over_scores
def test_gradcheck(scoring: str, renormalize: bool) -> None:
    """The choice does not change while a logit does by little."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    logits = torch.linspace(-2, 2, 12, dtype=torch.float64)[order].view(1, 12)
    logits = torch.cat((logits, logits.flip(1) * 0.7)).requires_grad_()
    options: dict[str, Any] = {"scoring": scoring, "renormalize": renormalize, "scale": 2.0}
    assert torch.autograd.gradcheck(
        lambda x: gristmill.topk_router(x, 4, **options)[0], (logits,), eps=1e-6
    )


def test_the_bias_has_no_gradient() -> None:
    bias = torch.rand(32, requires_grad=True)
    logits = random(4, 32).requires_grad_()
    weights, _ = gristmill.topk_router(logits, 4, scoring="sigmoid", bias=bias)
    weights.sum().backward()
    assert bias.grad is None
    assert logits.grad is not None
    # Frozen logits, and a bias that asks for one: there is nothing to compute.
    weights, _ = gristmill.topk_router(logits.detach(), 4, scoring="sigmoid", bias=bias)
    weights.sum().backward()
    assert bias.grad is None


def test_rows_that_nobody_has_give_zeros() -> None:
    logits = random(4, 16)
    logits[1] = float("-inf")
    for scoring in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            own = logits.clone().requires_grad_()
            weights, _ = gristmill.topk_router(own, 3, scoring=scoring, renormalize=renormalize)
            weights.square().sum().backward()
            assert own.grad is not None
            assert own.grad.isfinite().all()
            assert not own.grad[1].any()


def test_the_second_gradient_is_refused() -> None:
    logits = random(3, 16).requires_grad_()
    weights, _ = gristmill.topk_router(logits, 2)
    (first,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="topk_router_backward"):
        first.sum().backward()


def test_under_transforms() -> None:
    """vmap and functional gradients see through the reference."""
    logits = random(6, 16).view(2, 3, 16)
    each = torch.vmap(lambda x: gristmill.topk_router(x, 4, groups=4, topk_groups=2))(logits)
    whole = gristmill.topk_router(logits.view(6, 16), 4, groups=4, topk_groups=2)
    assert torch.equal(each[1].view(6, 4), whole[1])
    torch.testing.assert_close(each[0].view(6, 4), whole[0])

    def total(x: torch.Tensor) -> torch.Tensor:
        return gristmill.topk_router(x, 4, scoring="sigmoid")[0].square().sum()

    own = logits[0].clone().requires_grad_()
    total(own).backward()
    torch.testing.assert_close(torch.func.grad(total)(logits[0]), own.grad)


@over_devices
@pytest.mark.parametrize("grouped", [False, True])
@over_scores
def test_compiled_whole(scoring: str, renormalize: bool, grouped: bool, device: str) -> None:
    """One graph, forward and backward, for any number of rows, with the bits of an eager call."""
    options = options_of(scoring, renormalize, grouped, device)

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = gristmill.topk_router(x, 5, **options)
        return (weights * (1 + ids)).sum(), ids

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 12):
        grads = []
        for function in (loss, compiled):
            x = random(rows, 32, device).requires_grad_()
            value, ids = function(x)
            value.backward()
            grads.append((value.detach(), ids, x.grad))
        for one, other in zip(*grads, strict=True):
            assert one is not None
            assert other is not None
            assert same_bits(one, other)


def test_one_node_in_the_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(
        lambda x: gristmill.topk_router(x, 3, ids_dtype=torch.int64),
        fullgraph=True,
        backend=backend,
    )
    _, ids = function(random(4, 16))
    assert ids.dtype == torch.int64
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("topk_router" in str(call) for call in calls) == 1
    assert not any("topk" in str(call) for call in calls if "topk_router" not in str(call))


@over_devices
def test_gradients_are_the_same_on_every_run(device: str) -> None:
    logits = random(50, 64, device)
    _, ids = gristmill.topk_router(logits, 6)
    args = (random(50, 6, device), logits, ids, "softmax", False, 1.0)
    torch.use_deterministic_algorithms(True)
    try:
        first = TOPK_ROUTER_BACKWARD.run(*args)
        assert same_bits(first, TOPK_ROUTER_BACKWARD.run(*args))
    finally:
        torch.use_deterministic_algorithms(False)
