"""More than 2^31 elements: offsets need 64 bits. Sampled rows and whole sums against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance_helpers import run_by, supporting
from conformance_truth import results_of, truth_of

from gristmill.ops.registry import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.long]

SHAPES = [
    ((1 << 24) + 3, 128),
    ((1 << 19) + 3, 4096),
    ((1 << 18) + 3, 8192),
    ((1 << 15) + 3, 65536),
    ((1 << 14) + 3, 131072),
    ((1 << 13) + 3, 262144),
]
ROUNDINGS = 2.5


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


def sampled(shape: tuple[int, int]) -> torch.Tensor:
    """The first and last rows, those around element 2^31, and some between."""
    rows, columns = shape
    middle = (1 << 31) // columns
    near = [0, 1, middle - 1, middle, middle + 1, rows - 2, rows - 1]
    return torch.tensor(sorted({*near, *range(0, rows, rows // 50)}), device="cuda")


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)


def taken(args: tuple[Any, ...], rows: torch.Tensor) -> tuple[Any, ...]:
    return tuple(
        arg[rows] if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg for arg in args
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm", "fused_add_rms_norm_", "layer_norm", "add_layer_norm"]
)
def test_forward(name: str, shape: tuple[int, int]) -> None:
    op, rows = OPS[name], sampled(shape)
    tensors = [random(shape, seed) for seed in range(2 if "add_" in name else 1)]
    affine = [random(shape[-1:], seed) for seed in ((9, 10) if "layer_norm" in name else (9,))]
    casting = () if "layer_norm" in name else ("once",)
    options = (1e-6,) if name == "fused_add_rms_norm_" else (1e-6, 0.0, *casting, None)
    originals = [tensor.clone() for tensor in tensors] if len(options) == 1 else tensors
    args = (*tensors, *affine, *options)
    truths = truth_of(name, taken(args, rows))
    for variant in supporting(op, args):
        if not variant.name.startswith("cuda_"):
            continue
        for tensor, original in zip(tensors, originals, strict=True):
            if tensor is not original:
                tensor.copy_(original)
        results = results_of(name, args, run_by(op, variant.name, args))
        for truth, result in zip(truths, results, strict=True):
            assert truth.roundings(result[rows]) <= ROUNDINGS, variant.name
        del results


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", ["rms_norm_backward", "layer_norm_backward"])
def test_backward(name: str, shape: tuple[int, int]) -> None:
    op, rows = OPS[name], sampled(shape)
    dy, x = random(shape, 0), random(shape, 1)
    weight = random(shape[-1:], 9).float()
    centered = name == "layer_norm_backward"
    args = (dy, x, weight, None, 1e-6, 0.0, True, *([torch.float32] if centered else []))
    dx_truth = truth_of(op.name, taken(args, rows))[0]
    zero = torch.zeros((), device="cuda", dtype=torch.float64)
    totals, terms = [zero, zero], [zero, zero]  # of the weight's gradient, and of the bias's
    step = max(1, (1 << 25) // shape[-1])
    for start in range(0, shape[0], step):
        piece = slice(start, start + step)
        h, d = x[piece].double(), dy[piece].double()
        h = h - h.mean(-1, keepdim=True) if centered else h
        products = d * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        totals = [total + one.sum(0) for total, one in zip(totals, (products, d), strict=True)]
        terms = [term + one.abs().sum(0) for term, one in zip(terms, (products, d), strict=True)]
    unit = torch.finfo(torch.float32).eps / 2
    for variant in supporting(op, args):
        if not variant.name.startswith("cuda_"):
            continue
        dx, *gradients = run_by(op, variant.name, args)
        assert dx_truth.roundings(dx[rows]) <= ROUNDINGS, variant.name
        for gradient, total, term in zip(gradients, totals, terms, strict=False):
            error = (gradient.double() - total).abs() / (unit * (total.abs() + term))
            assert float(error.max()) <= ROUNDINGS, variant.name
        del dx, gradients


def test_strided_rows_far_apart() -> None:
    """Few elements, but offsets beyond 2^31 all the same."""
    op = OPS["rms_norm"]
    wide = torch.zeros((5, (1 << 29) + 64), device="cuda", dtype=torch.bfloat16)
    x = wide[:, -4096:]
    x.copy_(random((5, 4096), 0))
    args = (x, random((4096,), 1), 1e-6, 0.0, "once", None)
    (truth,) = truth_of(op.name, args)
    for variant in supporting(op, args):
        assert truth.roundings(run_by(op, variant.name, args)) <= ROUNDINGS, variant.name
