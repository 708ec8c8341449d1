"""The variants around library products, on a GPU: values, sums, errors, capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.formats.nvfp4 import fragments, swizzle
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.dequantized import TYPES, Decoder, Dequantized, Piece
from gristmill.ops.nvfp4_linear.fp8 import ScaledMMFp8
from gristmill.ops.nvfp4_linear.quantizers import (
    fp8_quantizer,
    fp8_tokens,
    nvfp4_quantizer,
    nvfp4_tokens,
)
from gristmill.ops.nvfp4_linear.scaled_mm import ScaledMM
from gristmill.ops.registry import OPS
from gristmill.select.device import device_of
from gristmill.select.variant import Variant

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, F16, F32)


def _bits(values: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.contiguous().cpu().view(sizes[values.element_size()])


@pytest.mark.parametrize(
    ("dtype", "factor"),
    # Rows of E4M3 take no factor.
    [
        (dtype, factor)
        for dtype in TYPES
        for factor in (False, True)
        if not (factor and dtype == E4M3)
    ],
    ids=str,
)
def test_every_value(dtype: torch.dtype, factor: bool) -> None:
    rows, columns = 1000, 4112
    weight = random_weight((rows, columns), "cuda", generator=torch.Generator().manual_seed(0))
    raw = torch.arange(rows * (columns // 16), device="cuda") % 127
    scales = raw.to(torch.uint8).view(rows, -1).view(E4M3)
    packed = fragments.pack(weight.codes, scales)
    values = common.Weight(weight.codes, scales, weight.row_scale, "rows").blocks(F32)
    numbers = torch.rand(rows, device="cuda") if factor else None
    decoder = Decoder(
        device_of("cuda"),
        packed[0].shape[1],
        dtype,
        pieces := [Piece(range(rows), range(columns)), Piece(range(64, 1000), range(320, 2112))],
        factor=factor,
    )
    for piece in pieces:
        found = torch.empty(piece.shape, dtype=dtype, device="cuda")
        decoder(found, *packed, piece, numbers)
        expected = values if numbers is None else values * numbers.unsqueeze(-1)
        expected = (expected / 8 if dtype == E4M3 else expected).to(dtype)
        expected = expected[piece.rows.start : piece.rows.stop]
        expected = expected[:, piece.columns.start : piece.columns.stop]
        # As numbers: a minus zero beside a scale of zero is a zero in fragments.
        assert torch.equal(found.float(), expected.float())


def _arguments(
    shape: tuple[int, int, int],
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
    act: str | None,
    layout: str = "fragments",
) -> tuple[Any, ...]:
    lines, rows, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    tokens = torch.randn(lines, columns, generator=generator).to("cuda", x)
    weight = random_weight((rows, columns), "cuda", generator=generator, per_row=True)
    if layout == "fragments":
        codes, scales = fragments.pack(weight.codes, weight.scales)
        weight = weight._replace(codes=codes, scales=scales)
    if layout == "tiles":
        weight = weight._replace(scales=swizzle(weight.scales))
    shift = None if bias is None else torch.randn(rows, generator=generator).to("cuda", bias)
    return tokens, *weight[:3], shift, layout, out, act


def _exact(args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in fp64, and the sums of the sizes of its terms."""
    x, codes, scales, row_scale, bias, layout, *_ = args
    weight = common.Weight(codes, scales, row_scale, layout, x.shape[-1]).whole(torch.float64)
    exact, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return exact, size


def _run(variant: Variant, op: str, args: tuple[Any, ...]) -> torch.Tensor:
    problem = OPS[op].problem(*args)
    assert variant.supports(problem) is None
    plan = variant.bind(problem, variant.config(problem))
    result: torch.Tensor = plan(*args)
    return result


@pytest.mark.parametrize("piece_bytes", [32 << 20, 1 << 20])
@pytest.mark.parametrize(
    ("x", "bias", "out"),
    [(BF16, None, None), (F16, F32, None), (F32, BF16, F16), (BF16, BF16, F32)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 72, 80), (1000, 520, 2064), (300, 77, 4096)], ids=str)
def test_forward(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    args = _arguments(shape, x, bias, out, None)
    found = _run(Dequantized(), "nvfp4_linear", args)
    exact, size = _exact(args)
    dtype = out or x
    assert found.dtype == dtype
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + size * 2.0**-18
    assert ((found.double() - exact).abs() <= allowed + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("piece_bytes", [32 << 20, 1 << 20])
@pytest.mark.parametrize("dy", FLOATS, ids=str)
def test_backward(monkeypatch: pytest.MonkeyPatch, dy: torch.dtype, piece_bytes: int) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    _, codes, scales, row_scale, *_ = _arguments((1, 2050, 1040), F32, None, None, None)
    gradient = torch.randn(1000, 2050, device="cuda", dtype=dy)
    args = (gradient, codes, scales, row_scale, "fragments", 1040, F32)
    found = _run(Dequantized(), "nvfp4_linear_backward", args)
    weight = common.Weight(codes, scales, row_scale, "fragments", 1040).whole(torch.float64)
    exact, size = gradient.double() @ weight, gradient.double().abs() @ weight.abs()
    # Rows of different scales are rounded to the dtype of the products.
    allowed = size * (torch.finfo(dy).eps / 2 + 2.0**-18)
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (300, 4112), (7, 28672)], ids=str)
def test_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The bits of torch on a CPU: on a GPU torch divides by numbers with their reciprocals."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x[0] = 0
    x[-1] *= torch.exp2(torch.arange(shape[1]) % 12 - 6.0)
    x = x.to(dtype)
    device = device_of("cuda")
    for make, by_torch in ((fp8_quantizer, fp8_tokens), (nvfp4_quantizer, nvfp4_tokens)):
        found: Any = make(device, dtype, [shape[0]])(x.cuda())
        expected: Any = by_torch(x)
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert torch.equal(_bits(one), _bits(other)), name


@pytest.mark.parametrize("piece_bytes", [32 << 20, 1 << 20])
@pytest.mark.parametrize(
    ("x", "bias", "out"),
    [
        (BF16, None, None),
        (BF16, BF16, None),
        (BF16, F32, None),
        (F16, F16, None),
        (F32, F32, None),
        (F16, None, F32),
    ],
    ids=str,
)
def test_fp8(
    monkeypatch: pytest.MonkeyPatch,
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    args = _arguments((520, 1040, 4096), x, bias, out, "fp8")
    variant = ScaledMMFp8()
    reason = variant.supports(OPS["nvfp4_linear"].problem(*args))
    if reason is not None:
        pytest.skip(reason)
    found = _run(variant, "nvfp4_linear", args).double()
    assert found.isfinite().all()
    exact, _ = _exact(args)
    # What the call is allowed, and what it should have computed of its rounded operands. A bias
    # is rounded by nobody, and makes the error a smaller part.
    assert (0.034 if bias is None else 0.01) < float((found - exact).norm() / exact.norm()) < 0.038
    tokens = fp8_tokens(args[0])
    weight = common.Weight(*args[1:4], "fragments", 4096)
    rounded = (weight.blocks(F32) / 8).to(E4M3).double() * (8 * args[3].double()).unsqueeze(-1)
    expected = (tokens.values.double() * tokens.scale.double()) @ rounded.t()
    expected = expected if bias is None else expected + args[4].double()
    assert float((found - expected).norm() / expected.norm()) < 0.006


def test_nvfp4() -> None:
    args = _arguments((300, 1040, 4096), BF16, BF16, None, "nvfp4", "tiles")
    variant = ScaledMM()
    reason = variant.supports(OPS["nvfp4_linear"].problem(*args))
    if reason is not None:
        pytest.skip(reason)
    found = _run(variant, "nvfp4_linear", args).double()
    exact, _ = _exact(args)
    assert 0.05 < float((found - exact).norm() / exact.norm()) < 0.105


@pytest.mark.parametrize("act", [None, "fp8"])
def test_captured(act: str | None) -> None:
    args = _arguments((300, 1040, 2048), BF16, BF16, None, act)
    variant: Variant = Dequantized() if act is None else ScaledMMFp8()
    problem = OPS["nvfp4_linear"].problem(*args)
    if (reason := variant.supports(problem)) is not None:
        pytest.skip(reason)
    plan = variant.bind(problem, None)
    plan(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = plan(*args)
    expected = plan(args[0].roll(1, 0), *args[1:])
    args[0].copy_(args[0].roll(1, 0))
    graph.replay()
    assert torch.equal(found, expected)
