"""Softmax and log_softmax: what they mean, their gradients, and how they take part in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ours
from conformance_helpers import DEVICES, run_by, supporting

import gristmill
from gristmill.ops.registry import OPS
from gristmill.ops.softmax import semantics, softmax_backward

NONE = float("-inf")
PAIRS = {
    "softmax": (gristmill.softmax, torch.softmax),
    "log_softmax": (gristmill.log_softmax, torch.log_softmax),
}
over_pairs = pytest.mark.parametrize("name", PAIRS)
over_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seen(queries: int, keys: int, causal: str, device: str = "cpu") -> torch.Tensor:
    offset = keys - queries if causal == "bottom_right" else 0
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)


# --- rows that are not ordinary


@over_devices
@over_pairs
@pytest.mark.parametrize("columns", [5, 64, 1000, 4096, 4099, 20000])
def test_nan_and_infinity_give_what_torch_gives(name: str, columns: int, device: str) -> None:
    """By every variant: a NaN, and a +inf, make their row NaN; -inf is nobody; others stay."""
    own, theirs = PAIRS[name]
    x = torch.randn(7, columns, device=device)
    at = columns // 3
    x[1, at] = float("nan")
    x[2, at] = float("inf")
    x[3, :at] = NONE
    x[4, 0] = float("inf")
    x[4, 1:] = NONE
    x[5, :] = float("nan")
    expected = theirs(x.double(), -1)
    op = OPS[name]
    for variant in supporting(op, (x, 0, 1.0, None)):
        y = run_by(op, variant.name, (x, 0, 1.0, None))
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(own(x).isnan(), expected.isnan())


@over_devices
@over_pairs
@pytest.mark.parametrize("how", ["input", "bool mask", "mask of numbers", "causal"])
def test_a_row_with_nobody_in_it(name: str, how: str, device: str) -> None:
    """Zeros, or -inf, and no gradient: by every variant, alone and among other rows."""
    function = PAIRS[name][0]
    x = torch.randn(6, 6, 40, device=device)
    options: dict[str, Any] = {}
    rows = torch.zeros(6, 6, dtype=torch.bool, device=device)
    rows[::2, 1::2] = True
    if how == "input":
        x[rows] = NONE
    elif how == "bool mask":
        options["mask"] = ~rows[..., None] & (torch.rand(6, 6, 40, device=device) < 0.5)
        options["mask"][~rows, 0] = True
    elif how == "mask of numbers":
        options["mask"] = torch.zeros(6, 6, 1, device=device).masked_fill(rows[..., None], NONE)
    else:
        x = torch.randn(6, 60, 40, device=device)
        options["causal"] = "bottom_right"
        rows = (torch.arange(60, device=device) < 20).expand(6, 60)
    x.requires_grad_()
    y = function(x, **options)
    assert (y[rows] == (0.0 if name == "softmax" else NONE)).all()
    if name == "softmax":
        torch.testing.assert_close(y[~rows].sum(-1), torch.ones_like(y[~rows].sum(-1)))
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    assert (x.grad[rows] == 0).all()
    assert x.grad.isfinite().all()
    assert x.grad[~rows].any()


@over_devices
@over_pairs
def test_what_is_masked_out_does_not_count_whatever_it_is(name: str, device: str) -> None:
    function = PAIRS[name][0]
    x = torch.randn(3, 50, 64, device=device)
    mask = torch.rand(3, 50, 64, device=device) < 0.5
    mask &= seen(50, 64, "bottom_right", device)
    expected = function(x, mask=mask)
    spoiled = x.masked_fill(~mask, float("nan"))
    assert torch.equal(function(spoiled, mask=mask), expected)
    hidden = ~seen(50, 64, "bottom_right", device)
    limited = function(x, causal="bottom_right")
    for value in (float("nan"), float("inf")):
        answer = function(x.masked_fill(hidden, value), causal="bottom_right")
        assert torch.equal(answer, limited)


HIDDEN = {
    "top_left": ("top_left", None),
    "bottom_right": ("bottom_right", None),
    "bool mask": (None, torch.bool),
    "mask of numbers": (None, torch.float32),
    "both": ("bottom_right", torch.bool),
}


@over_devices
@over_pairs
@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("columns", [5, 12, 61, 256, 1000, 4096, 4099, 20000])
def test_a_row_of_nan_is_nan_where_it_is_hidden(
    name: str, columns: int, how: str, device: str
) -> None:
    """By every variant, as torch's softmax of what was filled with -inf; dx is 0 beyond a limit."""
    own, theirs = PAIRS[name]
    causal, dtype = HIDDEN[how]
    rows = 12
    x = torch.randn(2, rows, columns, device=device)
    limit = torch.ones(rows, columns, dtype=torch.bool, device=device)
    limit = limit if causal is None else seen(rows, columns, causal, device)
    part = limit.clone()
    mask = None
    if dtype is not None:
        keep = torch.rand(rows, columns, device=device) < 0.6
        keep[:, 0] = True
        part &= keep
        mask = keep if dtype == torch.bool else torch.where(keep, 0.5, NONE)
    if dtype != torch.float32:  # to which a NaN may be added
        x[0].masked_fill_(~part, float("nan"))
        x[1, 2].masked_fill_(~part[2], float("inf"))
    x[1, 4, 0], x[1, 6, 0], x[1, rows - 1, 0] = float("nan"), float("inf"), float("nan")
    v = x.double() + (mask if dtype == torch.float32 else 0.0)
    v = v.masked_fill(~part, NONE)
    nobody = ~part.any(-1, keepdim=True)
    expected = theirs(v, -1).masked_fill(nobody, 0.0 if name == "softmax" else NONE)
    assert expected[1].isnan().all(-1).sum() >= 1
    args = (x, semantics.CAUSAL[causal], 1.0, mask)
    ways = [(one.name, run_by(OPS[name], one.name, args)) for one in supporting(OPS[name], args)]
    with gristmill.batch_invariant():
        ways.append(("one by one", own(x, mask=mask, causal=causal)))
    for way, y in ways:
        assert torch.equal(y.isnan(), expected.isnan()), way
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    if causal is None:
        return
    spoiled = expected.isnan().all(-1, keepdim=True)
    back = OPS[f"{name}_backward"]
    dy = torch.randn_like(x)
    dy[0, rows - 1, 0] = float("nan")
    spoiled[0, rows - 1] = True
    args = (dy, ways[0][1], semantics.CAUSAL[causal], 1.0)
    for one in supporting(back, args):
        dx = run_by(back, one.name, args)
        assert (dx.masked_select(~limit) == 0).all(), one.name
        if dtype is None:
            assert torch.equal(dx.isnan(), spoiled & limit), one.name


@over_devices
@over_pairs
def test_a_large_offset_costs_no_accuracy(name: str, device: str) -> None:
    """Differences decide. Scaled or not: 1e5 has 7 digits in fp32, and so have they."""
    function, theirs = PAIRS[name]
    steps = torch.randint(0, 64, (16, 4096), device=device) / 4
    x = 1e5 + steps
    for scale in (1.0, 0.3):
        y = function(x, scale=scale)
        expected = theirs(x.double() * scale, -1)
        limit = 1e-5 if scale == 1.0 or device == "cuda" else 2e-2  # the reference rounds scale*x
        torch.testing.assert_close(y.double(), expected, rtol=limit, atol=1e-7 * limit)


# --- masks, limits, dims


@over_devices
@over_pairs
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (40, 136), (136, 40), (64, 64)])
def test_causal_is_a_mask(name: str, causal: str, size: tuple[int, int], device: str) -> None:
    function = PAIRS[name][0]
    x = torch.randn(2, 3, *size, device=device, dtype=torch.bfloat16)
    mask = torch.rand(2, 1, *size, device=device) < 0.7
    limit = seen(*size, causal, device)
    # Without a mask a kernel scales otherwise: a rounding of bf16 may fall to the other side.
    one = 0.0 if device == "cpu" else 2.0**-7
    torch.testing.assert_close(
        function(x, causal=causal), function(x, mask=limit), rtol=one, atol=0.0
    )
    assert torch.equal(
        function(x, causal=causal, mask=mask, scale=0.5),
        function(x, mask=limit & mask, scale=0.5),
    )


@over_devices
@over_pairs
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -2, -4])
def test_any_dim(name: str, dim: int, device: str) -> None:
    function, theirs = PAIRS[name]
    x = torch.randn(3, 4, 5, 6, device=device)
    y = function(x, dim)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, theirs(x, dim))
    for shape in ((3, 4, 5, 6), (5, 6), (4, 1, 1), (6,), (3, 1, 1, 1), ()):
        mask = torch.randn(shape, device=device)
        torch.testing.assert_close(function(x, dim, mask=mask), theirs(x + mask, dim))


@over_pairs
def test_a_dim_named_in_full_is_the_last_one_too(name: str) -> None:
    function = PAIRS[name][0]
    x = torch.randn(3, 5, 5)
    assert torch.equal(function(x, 2, causal="top_left"), function(x, causal="top_left"))


# --- gradients


@over_devices
@over_pairs
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("shape", [(2, 3, 20, 33), (20, 33), (33,), (2, 1, 20, 1), ()])
def test_gradients_of_x_and_of_the_mask(
    name: str, causal: str | None, shape: tuple[int, ...], device: str
) -> None:
    """Against autograd through the formula in fp64."""
    function, theirs = PAIRS[name]
    x = torch.randn(2, 3, 20, 33, device=device, requires_grad=True)
    mask = torch.randn(shape, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    y = function(x, scale=0.7, mask=mask, causal=causal)
    hidden = torch.zeros(20, 33, dtype=torch.bool, device=device)
    if causal is not None:
        hidden = ~seen(20, 33, causal, device)
    if name == "log_softmax":
        dy = dy.masked_fill(hidden, 0.0)
    found = torch.autograd.grad(y, (x, mask), dy)
    precise = [one.detach().double().requires_grad_() for one in (x, mask)]
    values = (0.7 * precise[0] + precise[1]).masked_fill(hidden, NONE)
    expected = torch.autograd.grad(theirs(values, -1), precise, dy.double())
    for one, other, input_ in zip(found, expected, (x, mask), strict=True):
        assert (one.dtype, one.shape) == (input_.dtype, input_.shape)
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)


@over_pairs
def test_only_the_mask_is_trained(name: str) -> None:
    """As a bias of relative positions is: shared by all rows, and of another dtype."""
    function, theirs = PAIRS[name]
    x = torch.randn(4, 2, 10, 24, dtype=torch.bfloat16)
    bias = torch.randn(2, 10, 24, requires_grad=True)
    dy = torch.randn(4, 2, 10, 24, dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(function(x, mask=bias), bias, dy)
    own = bias.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(theirs(x.double() + own, -1), own, dy.double())
    # y is saved in bf16: eight bits of it.
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@over_devices
@over_pairs
def test_gradients_where_nothing_can_happen(name: str, device: str) -> None:
    """What comes back for places of no probability counts nowhere, not even a NaN under causal."""
    function = PAIRS[name][0]
    x = torch.randn(2, 12, 30, device=device)
    limit = seen(12, 30, "top_left", device)
    results = []
    for spoil in (0.0, float("nan")):
        own = x.clone().requires_grad_()
        dy = torch.ones_like(x).mul_(x).masked_fill(~limit, spoil)
        function(own, causal="top_left").backward(dy)
        assert own.grad is not None
        assert (own.grad[:, ~limit] == 0).all()
        results.append(own.grad)
    assert torch.equal(*results)


@over_pairs
@pytest.mark.parametrize("transform", ["compiled", "vmap", "inlined"])
def test_every_way_has_the_same_gradient(name: str, transform: str) -> None:
    function = PAIRS[name][0]
    x, mask = torch.randn(4, 6, 24), torch.rand(6, 24) < 0.6
    mask[2] = False
    x[1, 3] = NONE
    dy = torch.randn_like(x)

    def loss(value: torch.Tensor) -> torch.Tensor:
        y = function(value, scale=0.5, mask=mask, causal="bottom_right")
        return (y * dy).masked_fill(y == NONE, 0.0).sum()

    own = x.clone().requires_grad_()
    loss(own).backward()
    if transform == "vmap":
        found = torch.func.grad(loss)(x)
        each = torch.vmap(lambda row: function(row, mask=mask))(x)
        assert torch.equal(each, function(x, mask=mask))
    elif transform == "compiled":
        (found,) = torch.autograd.grad(
            torch.compile(loss, backend="aot_eager", fullgraph=True)(other := x.requires_grad_()),
            other,
        )
    else:
        with gristmill.inline(name):
            compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
            (found,) = torch.autograd.grad(compiled(other := x.requires_grad_()), other)
    assert own.grad is not None
    torch.testing.assert_close(found, own.grad)


# --- in torch


@over_pairs
@pytest.mark.parametrize("kind", ["bool", "numbers", None])
def test_one_node_in_a_whole_graph(name: str, kind: str | None) -> None:
    function = PAIRS[name][0]
    recorder = Recorder()
    mask = None
    if kind is not None:
        mask = torch.rand(3, 1, 1, 16) < 0.7
        mask = mask if kind == "bool" else torch.where(mask, 0.0, -1.0)

    def model(x: torch.Tensor) -> torch.Tensor:
        return function(x * 2, scale=0.25, mask=mask, causal="bottom_right") + 1

    x = torch.randn(3, 2, 8, 16, requires_grad=True)
    torch.compile(model, backend=recorder, fullgraph=True)(x).sum().backward()
    assert ours(recorder.forward) == [f"gristmill.{name}"]
    assert ours(recorder.backward) == [f"gristmill.{name}_backward"]


@over_pairs
def test_a_growing_sequence_compiles_once(name: str) -> None:
    function = PAIRS[name][0]
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x, mask: function(x, mask=mask, causal="top_left"),
        backend=backend,
        dynamic=True,
        fullgraph=True,
    )
    for length in (5, 8, 13, 21):
        x, mask = torch.randn(2, length, length), torch.rand(length) < 0.9
        torch.testing.assert_close(compiled(x, mask), function(x, mask=mask, causal="top_left"))
    assert len(graphs) == 1


def test_inductor_and_eager_agree() -> None:
    x, mask = torch.randn(4, 5, 37), torch.rand(5, 37) < 0.7
    compiled = torch.compile(lambda x: gristmill.softmax(x, mask=mask).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), gristmill.softmax(x, mask=mask).square())


@pytest.mark.gpu
@over_pairs
def test_autocast_gives_fp32_as_torch_does(name: str) -> None:
    function, theirs = PAIRS[name]
    x = torch.randn(8, 300, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, expected = function(x), theirs(x, -1)
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_autocast_turns_what_is_narrow_into_fp32() -> None:
    for name in PAIRS:
        adapt = OPS[name].autocast
        assert adapt is not None
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            x, *rest = adapt(torch.randn(2, 3).to(dtype), 2, 0.5, None)
            assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert rest == [2, 0.5, None]


def test_a_gradient_that_is_differentiated_says_so() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(gristmill.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(gristmill.errors.DoubleBackwardError, match=r"torch\.softmax"):
        dx.sum().backward()
    y = gristmill.softmax(x.detach())
    assert torch.equal(softmax_backward(torch.ones_like(y), y), softmax_backward(y * 0 + 1, y))


# --- memory


MASKS: dict[str, Callable[[str], torch.Tensor]] = {
    "of keys": lambda device: torch.rand(8, 1, 1, 512, device=device) < 0.9,
    "of queries and keys": lambda device: torch.rand(256, 512, device=device) < 0.9,
    "expanded": lambda device: (torch.rand(512, device=device) < 0.9).expand(8, 4, 256, 512),
    "numbers": lambda device: torch.randn(8, 1, 1, 512, device=device, dtype=torch.bfloat16),
    "one column": lambda device: torch.rand(8, 1, 256, 1, device=device) < 0.9,
    "strided columns": lambda device: torch.randn(512, 256, device=device).t(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_broadcast_mask_is_not_materialised(mask: Callable[[str], torch.Tensor]) -> None:
    x = torch.randn(8, 4, 256, 512, device="cuda", dtype=torch.bfloat16)
    value = mask("cuda")
    gristmill.softmax(x, mask=value)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = gristmill.softmax(x, mask=value)
    used = torch.cuda.max_memory_allocated() - before
    own = 8 * 256 * 512 * 4  # the largest copy of a mask in its own shape
    assert used <= y.numel() * 2 + own
    assert used < y.numel() * 2 + x.numel()


@pytest.mark.parametrize("causal", [None, "top_left"])
@over_pairs
def test_a_scale_is_applied_to_distances(name: str, causal: str | None) -> None:
    """On every route: numbers that would overflow, or lose their digits, do not."""
    function, theirs = PAIRS[name]
    x = torch.tensor([[3e38, 3e38, 0.0], [1e6, 1e6 + 1, 1e6 + 2], [-3e38, -3e38, -3e38]])
    y = function(x, scale=2.0, causal=causal)
    exact = x.double() * 2.0
    if causal is not None:
        exact = exact.masked_fill(~seen(3, 3, causal, "cpu"), float("-inf"))
    torch.testing.assert_close(y, theirs(exact, -1).float(), rtol=1e-6, atol=1e-7)
