"""The router as models have it, and where numbers are none: ties, NaN, infinities, no tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, run_by, same_bits, supporting
from conformance_truth_topk_router import chosen

import gristmill
from gristmill.ops.topk_router import TOPK_ROUTER

NAN, INF = float("nan"), float("inf")
Pair = tuple[torch.Tensor, torch.Tensor]
over_devices = pytest.mark.parametrize("device", DEVICES)


def arguments(logits: torch.Tensor, topk: int, **options: Any) -> tuple[Any, ...]:
    return TOPK_ROUTER.bind_arguments(logits, topk, **options)


def by_everyone(logits: torch.Tensor, topk: int, **options: Any) -> list[tuple[str, Pair]]:
    """The result of every variant that can."""
    args = arguments(logits, topk, **options)
    return [
        (one.name, run_by(TOPK_ROUTER, one.name, args)) for one in supporting(TOPK_ROUTER, args)
    ]


def random(rows: int, experts: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, experts, generator=generator)).to(device)


# --- models, written as their own code has it


def qwen3(logits: torch.Tensor) -> Pair:
    scores = torch.softmax(logits, dim=1, dtype=torch.float64)
    weights, ids = torch.topk(scores, 8, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def mixtral(logits: torch.Tensor) -> Pair:
    weights, ids = torch.topk(torch.softmax(logits.double(), 1), 2, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def gpt_oss(logits: torch.Tensor) -> Pair:
    values, ids = torch.topk(logits.double(), 4, dim=-1)
    return torch.softmax(values, dim=1), ids


def qwen2_moe(logits: torch.Tensor) -> Pair:
    return torch.topk(torch.softmax(logits.double(), 1), 4, dim=-1)


def llama4(logits: torch.Tensor) -> Pair:
    values, ids = torch.topk(logits.double(), 1, dim=1)
    return torch.sigmoid(values), ids


def deepseek_v2(logits: torch.Tensor) -> Pair:
    rows, experts = logits.shape
    scores = logits.double().softmax(dim=-1)
    group_scores = scores.view(rows, 8, -1).max(dim=-1).values
    group_ids = torch.topk(group_scores, k=3, dim=-1)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, group_ids, 1)
    mask = mask.unsqueeze(-1).expand(rows, 8, experts // 8).reshape(rows, -1)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=6, dim=-1)
    return weights * 16.0, ids


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor) -> Pair:
    rows, experts = logits.shape
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    group_scores = choice.view(rows, 8, experts // 8).topk(2, dim=-1)[0].sum(dim=-1)
    group_ids = torch.topk(group_scores, k=4, dim=-1)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, group_ids, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, experts // 8).reshape(rows, -1)
    ids = torch.topk(choice.masked_fill(~mask.bool(), -INF), k=8, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, ids


def kimi_k2(logits: torch.Tensor, bias: torch.Tensor) -> Pair:
    scores = logits.double().sigmoid()
    ids = torch.topk(scores + bias.double(), k=8, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.827, ids


def ernie(logits: torch.Tensor, bias: torch.Tensor) -> Pair:
    scores = logits.double().softmax(-1)
    ids = torch.topk(scores + bias.double(), k=6, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), ids


SIGMOID = {"scoring": "sigmoid"}
MODELS: dict[Callable[..., Pair], tuple[int, int, dict[str, Any]]] = {
    qwen3: (128, 8, {}),
    mixtral: (8, 2, {}),
    gpt_oss: (128, 4, {}),
    qwen2_moe: (60, 4, {"renormalize": False}),
    llama4: (16, 1, {**SIGMOID, "renormalize": False}),
    deepseek_v2: (160, 6, {"renormalize": False, "groups": 8, "topk_groups": 3, "scale": 16.0}),
    deepseek_v3: (256, 8, {**SIGMOID, "groups": 8, "topk_groups": 4, "scale": 2.5, "bias": True}),
    kimi_k2: (384, 8, {**SIGMOID, "scale": 2.827, "bias": True}),
    ernie: (64, 6, {"bias": True}),
}


@over_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_as_the_model_has_it(model: Callable[..., Pair], dtype: torch.dtype, device: str) -> None:
    experts, topk, options = MODELS[model]
    # All different in a row, in 16 bits too, so that the models' own code has no ties.
    generator = torch.Generator().manual_seed(experts)
    values = torch.linspace(-3.0, 3.0, experts).to(dtype)
    order = torch.rand(50, experts, generator=generator).argsort(-1)
    logits = values[order].to(device)
    own: tuple[torch.Tensor, ...] = ()
    if "bias" in options:
        bias = (torch.rand(experts, generator=generator) - 0.3).to(device)
        options, own = {**options, "bias": bias}, (bias,)
    weights, ids = model(logits, *own)
    found = gristmill.topk_router(logits, topk, **options)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.int32)
    for name, (some_weights, some_ids) in [
        ("chosen", found),
        *by_everyone(logits, topk, **options),
    ]:
        assert torch.equal(some_ids.long(), ids), name
        torch.testing.assert_close(some_weights, weights.float(), rtol=2e-6, atol=0.0)


# --- ties, NaN, infinities


@over_devices
@pytest.mark.parametrize("experts", [5, 64, 300, 2500])
def test_of_equal_ones_the_lower_id_comes_first(experts: int, device: str) -> None:
    logits = random(20, experts, device).round().clamp(-1, 1)
    topk = min(12, experts)
    expected = [chosen(row, topk, 1, 1, pairs=False) for row in logits.tolist()]
    for name, (_, ids) in by_everyone(logits, topk):
        assert ids.tolist() == expected, name
    for name, (weights, ids) in by_everyone(torch.zeros_like(logits), topk, scoring="sigmoid"):
        assert ids.tolist() == [list(range(topk))] * 20, name
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / topk))


@over_devices
@pytest.mark.parametrize("bias", [None, 0.25])
def test_of_equal_groups_the_first_ones_stay(bias: float | None, device: str) -> None:
    logits = torch.zeros(3, 48, device=device)
    given = None if bias is None else torch.full((48,), bias, device=device)
    options: dict[str, Any] = {"scoring": "sigmoid", "groups": 6, "topk_groups": 2, "bias": given}
    for name, (_, ids) in by_everyone(logits, 16, **options):
        assert ids.tolist() == [list(range(16))] * 3, name
    logits[1, 40] = 1.0  # the last group comes before the first
    expected = [40, *range(8), 41, 42, 43, 44, 45, 46, 47]
    for name, (_, ids) in by_everyone(logits, 16, **options):
        assert ids[1].tolist() == expected, name


@over_devices
def test_two_of_a_group_count_where_there_is_a_bias(device: str) -> None:
    """One large score against two that are large together."""
    logits = torch.full((1, 8), -9.0, device=device)
    logits[0, 1] = 3.0
    logits[0, 4] = logits[0, 6] = 1.0
    options: dict[str, Any] = {"scoring": "sigmoid", "groups": 2, "topk_groups": 1}
    bias = torch.zeros(8, device=device)
    for _, (_, ids) in by_everyone(logits, 2, **options):
        assert ids.tolist() == [[1, 0]]
    for _, (_, ids) in by_everyone(logits, 2, bias=bias, **options):
        assert ids.tolist() == [[4, 6]]


@over_devices
def test_the_bias_chooses_and_is_not_in_the_weights(device: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 9.0, 10.0], device=device)
    expected = torch.sigmoid(torch.tensor([[-1.0, 0.0]], device=device))
    options: dict[str, Any] = {"scoring": "sigmoid", "bias": bias, "renormalize": False}
    for _, (weights, ids) in by_everyone(logits, 2, **options):
        assert ids.tolist() == [[3, 2]]
        torch.testing.assert_close(weights, expected)


@over_devices
def test_what_a_power_loses_is_no_tie(device: str) -> None:
    """Scores that are 0, or 1, in fp32: logits tell them apart."""
    low = torch.tensor([[-300.0, -200.0, 0.0, -250.0]], device=device)
    for _, (weights, ids) in by_everyone(low, 4):
        assert ids.tolist() == [[2, 1, 3, 0]]
        assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    high = torch.tensor([[30.0, 50.0, 40.0]], device=device)
    for _, (_, ids) in by_everyone(high, 3, scoring="sigmoid"):
        assert ids.tolist() == [[1, 2, 0]]


@over_devices
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("grouped", [False, True])
def test_nan_comes_first_and_stays_in_its_row(scoring: str, grouped: bool, device: str) -> None:
    logits = random(6, 64, device)
    options: dict[str, Any] = {"scoring": scoring}
    if grouped:
        options |= {"groups": 8, "topk_groups": 3}
    clean = dict(by_everyone(logits, 6, **options))
    logits[2, [9, 50]] = NAN
    logits[4] = NAN
    for name, (weights, ids) in by_everyone(logits, 6, **options):
        assert ids[2, :2].tolist() == [9, 50], name
        assert weights[2].isnan().all(), name
        assert ids[4].tolist() == list(range(6)), name
        healthy = [0, 1, 3, 5]
        assert same_bits(weights[healthy], clean[name][0][healthy]), name
        assert torch.equal(ids[healthy], clean[name][1][healthy]), name
    options["renormalize"] = False
    for name, (weights, _) in by_everyone(logits, 6, **options):
        # A softmax knows all of its row, a sigmoid only its own.
        assert weights[2].isnan().sum() == (6 if scoring == "softmax" else 2), name


@over_devices
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("options", [o for _, _, o in MODELS.values()], ids=str)
def test_ids_are_in_range_and_different_whatever_comes(
    options: dict[str, Any], wrong: float, device: str
) -> None:
    options = {"groups": 1, "topk_groups": 1, **options}
    logits = random(40, 64, device, seed=1)
    share = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)).to(device)
    rows = torch.linspace(0, 1.05, 40, device=device).unsqueeze(-1)
    logits = torch.where(share < rows, wrong, logits)
    if options.pop("bias", False):
        options["bias"] = torch.full((64,), wrong, device=device)
        options["bias"][::3] = 0.5
    first: torch.Tensor | None = None
    for name, (_, ids) in by_everyone(logits, 8, **options):
        assert int(ids.min()) >= 0, name
        assert int(ids.max()) < 64, name
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), name
        first = ids if first is None else first
        assert torch.equal(ids, first), name


@over_devices
def test_a_row_with_nobody_has_weights_of_zero(device: str) -> None:
    logits = torch.full((2, 16), -INF, device=device)
    logits[1, 3] = 0.5
    for renormalize in (True, False):
        for name, (weights, ids) in by_everyone(logits, 3, renormalize=renormalize):
            assert ids.tolist() == [[0, 1, 2], [3, 0, 1]], name
            assert weights.tolist() == [[0, 0, 0], [1, 0, 0]], name
    # As torch has it.
    logits[1, 3] = INF
    for name, (weights, _) in by_everyone(logits, 3):
        assert weights[1].isnan().all(), name


@over_devices
def test_zeros_are_equal(device: str) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=device)
    for name, (_, ids) in by_everyone(logits, 4):
        assert ids.tolist() == [[0, 1, 2, 3]], name


# --- what else a call may be


@over_devices
def test_ids_are_int32_where_nothing_is_said(device: str) -> None:
    """By every variant, and through the torch op, whose schema has None."""
    logits = torch.randn(5, 64, device=device)
    expected = gristmill.topk_router(logits, 4)[1]
    assert expected.dtype == torch.int32
    for ids in (
        TOPK_ROUTER.overload(logits, 4)[1],
        torch.compile(gristmill.topk_router, backend="eager")(logits, 4, ids_dtype=None)[1],
        *(pair[1] for _, pair in by_everyone(logits, 4)),
    ):
        assert ids.dtype == torch.int32
        assert torch.equal(ids, expected)


@over_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_no_tokens(dtype: torch.dtype, ids_dtype: torch.dtype, device: str) -> None:
    logits = torch.empty(0, 256, dtype=dtype, device=device, requires_grad=True)
    bias = torch.zeros(256, device=device)
    options: dict[str, Any] = {"scoring": "sigmoid", "groups": 8, "topk_groups": 4, "bias": bias}
    weights, ids = gristmill.topk_router(logits, 8, ids_dtype=ids_dtype, **options)
    assert (weights.shape, weights.dtype) == ((0, 8), dtype)
    assert (ids.shape, ids.dtype) == ((0, 8), ids_dtype)
    weights.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 256)


@over_devices
def test_weights_and_ids_are_what_the_experts_take(device: str) -> None:
    """Straight into a mixture, whose tokens see as many experts as they chose."""
    x, w13, w2 = (
        random(*shape, device).view(*view)
        for shape, view in (
            ((5, 32), (5, 32)),
            ((8, 64 * 32), (8, 64, 32)),
            ((8, 32 * 32), (8, 32, 32)),
        )
    )
    weights, ids = gristmill.topk_router(random(5, 8, device), 3)
    w13, w2 = w13 * 0.1, w2 * 0.1
    y = gristmill.moe(x, weights, ids, w13, w2)
    expected = torch.zeros_like(x)
    for token in range(5):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            expected[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)


def test_autocast_changes_nothing() -> None:
    logits = random(7, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = gristmill.topk_router(logits, 4)
    for one, other in zip(found, gristmill.topk_router(logits, 4), strict=True):
        assert same_bits(one, other)


def test_explain_names_the_kernel_for_a_gpu() -> None:
    from gristmill.select import KNOWN, ranked

    for experts, topk, options in MODELS.values():
        options = {**options, "bias": torch.zeros(experts)} if "bias" in options else options
        args = arguments(torch.zeros(4, experts, dtype=torch.bfloat16), topk, **options)
        problem = TOPK_ROUTER.problem(*args, device=KNOWN["sm_90a"])
        names = [one.variant.name for one in ranked("topk_router", TOPK_ROUTER.variants, problem)]
        assert names == ["cuda_warp", "library", "reference"]
    assert gristmill.explain(gristmill.topk_router, random(3, 16), 2).chosen == "library"


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_captured_in_a_graph(model: Callable[..., Pair]) -> None:
    experts, topk, options = MODELS[model]
    logits = random(33, experts, "cuda").bfloat16()
    if "bias" in options:
        options = {**options, "bias": torch.rand(experts, device="cuda")}
    gristmill.topk_router(logits, topk, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gristmill.topk_router(logits, topk, **options)
    for seed in (5, 6):
        logits.copy_(random(33, experts, "cuda", seed))
        graph.replay()
        for one, other in zip(found, gristmill.topk_router(logits, topk, **options), strict=True):
            assert same_bits(one, other)


@pytest.mark.gpu
def test_a_wide_batch_is_what_its_rows_are() -> None:
    """More tokens than run at once, in blocks of several warps."""
    logits = random(20011, 128, "cuda").bfloat16()
    weights, ids = gristmill.topk_router(logits, 8)
    some = torch.arange(0, 20011, 997, device="cuda")
    for row in some.tolist():
        one = gristmill.topk_router(logits[row : row + 1], 8)
        assert same_bits(one[0], weights[row : row + 1])
        assert torch.equal(one[1], ids[row : row + 1])
    expected = torch.softmax(logits.double(), -1).gather(1, ids.long())
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected.float(), rtol=2e-6, atol=0.0)
