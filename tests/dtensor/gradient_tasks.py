"""What a rank does to show that gradients and options come out right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mesh_pool import device_mesh
from rule_tasks import compare, spread
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import gristmill
from gristmill.errors import DoubleBackwardError
from gristmill.formats.nvfp4 import quantize
from gristmill.nvfp4 import linear as nvfp4_linear
from gristmill.ops.nvfp4_linear.op import linear_of

F64 = torch.float64


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64)


def scenarios() -> dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]]:
    """A function of tensors, whose first one may be sharded along its dims but the last."""
    torch.manual_seed(1)
    target = torch.randint(0, 16, (5, 6))
    target[1, 2] = -100
    ids = torch.randint(0, 4, (6, 2))
    weight = quantize(torch.randn(12, 64))

    def experts(x: Any, t: Any, ids: Any, w13: Any, w2: Any) -> Any:
        return gristmill.moe(x, t, ids, w13, w2)

    return {
        "rms_norm": (gristmill.rms_norm, {"x": normal(5, 6, 16), "weight": normal(16)}),
        "add_rms_norm": (
            gristmill.add_rms_norm,
            {"x": normal(5, 6, 16), "residual": normal(5, 6, 16), "weight": normal(16)},
        ),
        "layer_norm": (
            gristmill.layer_norm,
            {"x": normal(5, 6, 16), "weight": normal(16), "bias": normal(16)},
        ),
        "add_layer_norm": (
            gristmill.add_layer_norm,
            {"x": normal(5, 6, 16), "residual": normal(5, 6, 16), "weight": normal(16)},
        ),
        "softmax": (
            lambda x, mask: gristmill.softmax(x, mask=mask, scale=0.5),
            {"x": normal(5, 6, 7), "mask": normal(6, 7)},
        ),
        "log_softmax": (gristmill.log_softmax, {"x": normal(5, 6, 7)}),
        "linear": (
            gristmill.linear,
            {"x": normal(8, 6, 16), "weight": normal(8, 16), "bias": normal(8)},
        ),
        "linear gelu": (
            lambda x, weight, bias: gristmill.linear(x, weight, bias, activation="gelu"),
            {"x": normal(8, 6, 16), "weight": normal(8, 16), "bias": normal(8)},
        ),
        "linear gelu, uneven": (
            lambda x, weight, bias: gristmill.linear(x, weight, bias, activation="gelu"),
            {"x": normal(5, 6, 7, 16), "weight": normal(8, 16), "bias": normal(8)},
        ),
        "matmul": (gristmill.matmul, {"a": normal(8, 6, 16), "b": normal(16, 8)}),
        "matmul, uneven": (gristmill.matmul, {"a": normal(5, 6, 16), "b": normal(16, 8)}),
        "cross_entropy none": (
            lambda x, target: torch.ops.gristmill.cross_entropy(
                x, target, None, -100, 0.1, 0.1, None, "none", False
            )[0],
            {"x": normal(5, 6, 16), "target": target},
        ),
        "cross_entropy sum": (
            lambda x, target: torch.ops.gristmill.cross_entropy(
                x, target, None, -100, 0.1, 0.1, None, "sum", False
            )[0],
            {"x": normal(5, 6, 16), "target": target},
        ),
        "linear_cross_entropy": (
            lambda x, weight, bias, target: torch.ops.gristmill.linear_cross_entropy(
                x, weight, target, bias, None, -100, 0.0, 0.0, None, "sum", None
            )[0],
            {"x": normal(5, 6, 8), "weight": normal(16, 8), "bias": normal(16), "target": target},
        ),
        "moe": (
            experts,
            {
                "x": normal(6, 8),
                "t": normal(6, 2),
                "ids": ids,
                "w13": normal(4, 8, 8),
                "w2": normal(4, 8, 4),
            },
        ),
        "linear, uneven": (gristmill.linear, {"x": normal(5, 16), "weight": normal(8, 16)}),
        "topk_router": (lambda x: gristmill.topk_router(x, 2)[0], {"x": normal(6, 8)}),
        "nvfp4_linear": (
            lambda x, codes, scales, row_scale, bias: linear_of(x, codes, scales, row_scale, bias),
            {
                "x": normal(8, 6, 64),
                "codes": weight.codes,
                "scales": weight.scales,
                "row_scale": weight.global_scale.expand(12).clone(),
                "bias": normal(12),
            },
        ),
    }


# Tensors that have a row for each of the first one's: sharded as it is.
ALONG = ("x", "residual", "a", "target", "t", "ids")
# These have no gradient.
FROZEN = ("target", "ids", "codes", "scales", "row_scale")


def gradients(name: str, dims: list[int]) -> None:
    """Forward and backward with rows sharded along each of these dims: no rank talks to another."""
    function, tensors = scenarios()[name]
    mesh = device_mesh(4)
    whole = {key: _leaf(key, value.clone()) for key, value in tensors.items()}
    wanted = _outputs(function(*whole.values()))
    torch.manual_seed(2)
    slopes = [torch.randn_like(one) for one in wanted]
    torch.autograd.backward(wanted, slopes)
    for dim in dims:
        held = {
            key: _leaf(key, spread(value, mesh, [Shard(dim) if key in ALONG else Replicate()]))
            for key, value in tensors.items()
        }
        if name == "softmax" and dim == 1:  # along the rows of the mask
            held["mask"] = _leaf("mask", spread(tensors["mask"], mesh, [Shard(0)]))
        told = f"{name} along {dim}"
        with CommDebugMode() as sent:
            found = _outputs(function(*held.values()))
        assert sent.get_total_counts() == 0, f"{told}: {sent.get_comm_counts()}"
        places = [_slope_placement(one) for one in found]
        given = [spread(slope, mesh, place) for slope, place in zip(slopes, places, strict=True)]
        leaves = {key: leaf for key, leaf in held.items() if key not in FROZEN}
        # Not by `backward`, which puts gradients into leaves: where two of them get the same one,
        # torch 2.11 gathers it, if it is sharded unevenly; of torch's own `x + residual` as well.
        with CommDebugMode() as sent:
            slopes_found = torch.autograd.grad(found, list(leaves.values()), given)
        assert sent.get_total_counts() == 0, f"{told}, backward: {sent.get_comm_counts()}"
        for one, want in zip(found, wanted, strict=True):
            compare(one.detach(), want.detach(), told)
        for (key, leaf), slope in zip(leaves.items(), slopes_found, strict=True):
            compare(slope, whole[key].grad, f"{told}: gradient of {key}")
            shared = leaf.placements[0].is_replicate()
            place = slope.placements[0]
            assert place == (Partial() if shared else leaf.placements[0]), f"{told}: {key} {place}"


def _outputs(found: Any) -> list[Any]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _slope_placement(found: DTensor) -> list[Any]:
    """As autograd gives it: what is partial has the whole gradient on every rank."""
    return [Replicate() if one.is_partial() else one for one in found.placements]


def _leaf(key: str, tensor: Any) -> Any:
    tensor = tensor.detach()
    return tensor if key in FROZEN else tensor.requires_grad_()


def products() -> None:
    """Column- and row-parallel, one after the other, as tensor parallelism has them."""
    torch.manual_seed(3)
    mesh = device_mesh(4)
    x, up, bias, down = normal(5, 6, 16), normal(10, 16), normal(10), normal(12, 10)
    whole = [one.clone().requires_grad_() for one in (x, up, bias, down)]
    y = _mlp(gristmill.linear, *whole)
    (y * y).sum().backward()
    places = [Replicate(), Shard(0), Shard(0), Shard(1)]
    pairs = zip((x, up, bias, down), places, strict=True)
    held = [spread(one, mesh, [place]).requires_grad_() for one, place in pairs]
    with CommDebugMode() as sent:
        found = _mlp(gristmill.linear, *held)
    assert sent.get_total_counts() == 0
    assert found.placements == (Partial(),)
    compare(found.detach(), y.detach(), "row-parallel")
    (found * found).sum().backward()
    for leaf, want in zip(held[1:], whole[1:], strict=True):
        assert leaf.grad.placements == leaf.placements
        compare(leaf.grad, want.grad, "gradient of a weight")
    assert held[0].grad.placements == (Partial(),)
    compare(held[0].grad, whole[0].grad, "gradient of x")

    weight = quantize(torch.randn(12, 64))
    parts = weight.codes, weight.scales, weight.global_scale.expand(12).clone()
    x = normal(5, 64)
    want = nvfp4_linear(x, weight)
    rows = [spread(one, mesh, [Shard(0)]) for one in parts]
    leaf = spread(x, mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as sent:
        found = linear_of(leaf, *rows)
        found.sum().backward()
    assert sent.get_total_counts() == 0
    assert found.placements == (Shard(1),)
    compare(found.detach(), want, "NVFP4, column-parallel")
    compare(leaf.grad, _nvfp4_slope(x, weight), "gradient over NVFP4")

    columns = [spread(one, mesh, [Shard(1)]) for one in (x, *parts[:2])]
    with CommDebugMode() as sent:
        found = linear_of(*columns, spread(parts[2], mesh, [Replicate()]))
    assert sent.get_total_counts() == 0
    assert found.placements == (Partial(),)
    compare(found, want, "NVFP4, row-parallel")


def sharded_twice() -> None:
    """Rows of two dims on a mesh of two, unevenly: gradients, and those of gradients."""
    torch.manual_seed(6)
    mesh = device_mesh(2, 2)
    both, first, none = [Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate()] * 2
    x, weight, bias = normal(5, 3, 16), normal(8, 16), normal(8)
    a, stack = normal(7, 16), normal(5, 16, 6)

    def silu(x: Any, weight: Any, bias: Any) -> Any:
        return gristmill.linear(x, weight, bias, activation="silu")

    for function, tensors, places in (
        (gristmill.linear, (x, weight, bias), (both, none, none)),
        (silu, (x, weight, bias), (both, none, none)),
        (gristmill.matmul, (x, weight.t().contiguous()), (both, none)),
        (gristmill.matmul, (a, stack), (none, first)),
        (gristmill.matmul, (a, stack), (first, [Replicate(), Shard(0)])),
    ):
        leaves = [one.clone().requires_grad_() for one in tensors]
        wanted = _twice(function, leaves)
        pairs = zip(tensors, places, strict=True)
        held = [spread(one, mesh, place).requires_grad_() for one, place in pairs]
        for found, want in zip(_twice(function, held), wanted, strict=True):
            most = float(want.abs().max())
            _close(found.detach() / most, want.detach() / most, f"{function} {places}")


def _twice(function: Any, leaves: list[Any]) -> list[Any]:
    """The gradients of a function, and of the sum of their squares."""
    y = function(*leaves)
    slopes = torch.autograd.grad((y * y * y).sum(), leaves, create_graph=True)
    total = sum((slope * slope).sum() for slope in slopes)
    return [y, *slopes, *torch.autograd.grad(total, leaves)]


def _mlp(linear: Any, x: Any, up: Any, bias: Any, down: Any) -> Any:
    return linear(linear(x, up, bias, "relu"), down, None, None)


def _nvfp4_slope(x: torch.Tensor, weight: Any) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    nvfp4_linear(leaf, weight).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def moved() -> None:
    """What no rule allows is moved first: partial sums, hidden dims, few rows, two meshes' dims."""
    torch.manual_seed(4)
    mesh = device_mesh(4)
    x, weight = normal(8, 6, 16), normal(16)
    want = gristmill.rms_norm(x, weight)
    parts = torch.randn(4, *x.shape, dtype=F64)
    parts[3] = x - parts[:3].sum(0)
    held = DTensor.from_local(parts[mesh.get_rank()], mesh, [Partial()])
    _close(gristmill.rms_norm(held, spread(weight, mesh, [Replicate()])), want, "partial")
    for place in (Shard(0), Shard(1), Shard(2)):
        for other in (Replicate(), Shard(0)):
            args = spread(x, mesh, [place]), spread(weight, mesh, [other])
            _close(gristmill.rms_norm(*args), want, f"{place} {other}")
    few = spread(x[:3], mesh, [Shard(0)])
    _close(gristmill.rms_norm(few, spread(weight, mesh, [Replicate()])), want[:3], "few rows")
    scores = normal(4, 8, 8)
    causal = gristmill.softmax(scores, causal="top_left")
    for place in (Shard(0), Shard(1), Shard(2)):
        found = gristmill.softmax(spread(scores, mesh, [place]), causal="top_left")
        assert (found.placements == (place,)) == (place == Shard(0))
        _close(found, causal, f"causal {place}")
    square = device_mesh(2, 2)
    for places in ([Shard(0), Shard(1)], [Shard(1), Shard(2)], [Partial(), Shard(0)]):
        sharded = spread(x, square, [one if one.is_shard() else Replicate() for one in places])
        if places[0].is_partial():
            local = sharded.to_local() * (square.get_local_rank(0) == 1)
            sharded = DTensor.from_local(local, square, places)
        found = gristmill.rms_norm(sharded, spread(weight, square, [Replicate()] * 2))
        _close(found, want, f"{places}")


def _close(found: DTensor, wanted: torch.Tensor, told: str) -> None:
    torch.testing.assert_close(
        found.full_tensor(), wanted, rtol=1e-12, atol=1e-12, msg=lambda text: f"{told}\n{text}"
    )


def options() -> None:
    """Calls that differ in one option alone, twice: nothing is remembered of the other one."""
    torch.manual_seed(5)
    mesh = device_mesh(4)
    x = spread(normal(8, 16), mesh, [Shard(0)])
    weight = spread(normal(16), mesh, [Replicate()])
    ops = torch.ops.gristmill
    for _ in range(2):
        for wanted in (True, False):
            found = ops.rms_norm_backward(x, x, weight, None, 1e-6, 0.0, wanted)[1]
            assert found.shape == ((16,) if wanted else (0,))
            assert found.placements == ((Partial() if wanted else Replicate()),)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert ops.layer_norm(x, weight, None, 1e-5, 0.0, dtype).to_local().dtype == dtype
            assert ops.layer_norm(x, weight, None, 1e-5, 0.0, dtype).dtype == dtype
            assert ops.layer_norm(x, None, weight, 1e-5, 0.0, dtype).dtype == dtype
        square = spread(normal(8, 8), mesh, [Shard(0)])
        for causal in (0, 1, 2):
            place = ops.softmax(square, causal, 0.5).placements
            assert place == ((Shard(0) if causal == 0 else Replicate()),)
        columns = spread(normal(8, 16), mesh, [Shard(1)])
        for activation in (None, "relu", "silu"):
            product = spread(normal(4, 16), mesh, [Shard(1)])
            place = ops.linear(columns, product, None, activation).placements[0]
            assert place.is_partial() == (activation is None)
        target = spread(torch.randint(0, 16, (8,)), mesh, [Shard(0)])
        for reduction, place in (("none", Shard(0)), ("sum", Partial()), ("mean", Replicate())):
            loss = ops.cross_entropy(x, target, None, -100, 0.0, 0.0, None, reduction)[0]
            assert loss.placements == (place,)
            assert loss.shape == ((8,) if reduction == "none" else ())
        for largest in (True, False):
            found = ops.rms_norm_fp8(x, weight, None, 1e-6, 0.0, "once", largest)[2]
            assert found.placements == ((Partial("max") if largest else Replicate()),)


def refused() -> list[str]:
    """What is raised where something cannot be."""
    mesh = device_mesh(4)
    x = spread(torch.ones(8, 16), mesh, [Shard(0)])
    columns = spread(torch.ones(8, 16), mesh, [Shard(1)])
    whole = spread(torch.ones(8, 16), mesh, [Replicate()])
    target = spread(torch.zeros(8, dtype=torch.int64), mesh, [Shard(0)])
    ops = torch.ops.gristmill
    told = [
        _message(lambda: gristmill.fused_add_rms_norm_(x, whole)),
        _message(lambda: gristmill.fused_add_rms_norm_(columns, columns.clone())),
        _message(lambda: ops.cross_entropy_one_pass_(x, target)),
        _message(lambda: gristmill.rms_norm(x, torch.ones(16))),
        _message(lambda: gristmill.rms_norm(x, eps=-1.0)),
    ]
    assert torch.equal(whole.to_local(), torch.ones(8, 16))
    leaf = spread(torch.rand(8, 16), mesh, [Shard(0)]).requires_grad_()
    (slope,) = torch.autograd.grad(gristmill.rms_norm(leaf).sum(), leaf, create_graph=True)
    try:
        slope.sum().backward()
    except DoubleBackwardError as error:
        told.append(str(error))
    return told


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
