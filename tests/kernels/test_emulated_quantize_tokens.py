"""The kernels that round activations to FP8 and NVFP4, run on the CPU, against torch bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import emulator_for

from gristmill.formats.nvfp4 import e2m1, tiles
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.ops.nvfp4_linear import quantizers
from gristmill.ops.nvfp4_linear.quantizers import (
    KINDS,
    TYPES,
    fp8_quantizer,
    fp8_tokens,
    nvfp4_quantizer,
    nvfp4_tokens,
    quantizer_program,
)
from gristmill.select.device import KNOWN, Device

H200 = KNOWN["sm_90a"]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ORDERS = (0, 1, 7)
# Columns: one block, an odd number of them, a row that fills a block of threads, more than is kept.
SHAPES = ((3, 16), (1, 48), (5, 208), (130, 64), (2, 4096), (2, 8240), (1, 16400))
MAKERS: dict[str, Callable[..., Any]] = {"fp8": fp8_quantizer, "nvfp4": nvfp4_quantizer}
TORCH: dict[str, Callable[..., Any]] = {"fp8": fp8_tokens, "nvfp4": nvfp4_tokens}


@pytest.fixture(autouse=True, scope="module")
def _built(pytestconfig: pytest.Config) -> None:
    programs = [quantizer_program(kind, dtype) for kind in KINDS for dtype in TYPES]
    emulator_for(pytestconfig).prepare(programs)


def _quantize(host: EmulatedHost, kind: str, x: torch.Tensor, order: int = 0) -> Run:
    def bind(problem: Any, config: Any) -> Callable[..., Any]:
        return MAKERS[kind](H200, x.dtype, [len(x)])

    return host.run(SimpleNamespace(bind=bind), None, None, (x,), order=order)


def _random(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with outliers."""
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    x = torch.randn(shape, generator=generator)
    rows = torch.randint(-8, 9, (shape[0], 1), generator=generator)
    x[:, ::37] *= 8
    return (x * torch.exp2(rows.float())).to(dtype)


def _assert_same(found: Any, expected: Any) -> None:
    for name, one, other in zip(found._fields, found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape, name
        bits = torch.int32 if one.dtype == F32 else torch.uint8
        assert torch.equal(one.view(bits), other.contiguous().view(bits)), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_in_torch(
    host: EmulatedHost, kind: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = _random(shape, dtype)
    expected = TORCH[kind](x)
    for order in ORDERS if shape[1] < 1000 else (0,):
        _assert_same(_quantize(host, kind, x, order).outputs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_lie_apart(host: EmulatedHost, kind: str) -> None:
    x = _random((7, 256), BF16)[:, 64:192]
    assert not x.is_contiguous()
    _assert_same(_quantize(host, kind, x).outputs, TORCH[kind](x))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_rows(host: EmulatedHost, kind: str, dtype: torch.dtype) -> None:
    """Zeros of both signs, the largest and the smallest numbers, one number alone, equal ones."""
    limits = torch.finfo(dtype)
    x = torch.zeros(8, 80, dtype=dtype)
    x[1] = -x[1]
    x[2, 5], x[2, 70] = limits.max, -limits.max / 3
    x[3, 0], x[3, 79] = limits.smallest_normal, -limits.smallest_normal / 2
    x[4, 33] = -3.0
    x[5] = 1.0
    x[6, ::2] = limits.max
    x[7, 7] = torch.finfo(dtype).tiny * limits.eps  # the least number of all
    _assert_same(_quantize(host, kind, x).outputs, TORCH[kind](x))


def test_a_row_of_zeros_has_a_scale(host: EmulatedHost) -> None:
    x = torch.zeros(2, 32, dtype=BF16)
    values, scale = _quantize(host, "fp8", x).outputs
    assert (values.float() == 0).all()
    assert (scale == 2.0**-126).all()
    codes, levels, scale = _quantize(host, "nvfp4", x).outputs
    assert not codes.any()
    assert not levels.view(torch.uint8).any()
    assert (scale == 1).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(host: EmulatedHost, wrong: float) -> None:
    x = _random((4, 272), BF16)
    clean = _quantize(host, "fp8", x).outputs, _quantize(host, "nvfp4", x).outputs
    x[2, 100] = wrong
    values, scale = _quantize(host, "fp8", x).outputs
    product = values.float() * scale
    assert product[2, 100].isnan()
    keep = torch.tensor([0, 1, 3])
    assert torch.equal(product[keep], (clean[0].values.float() * clean[0].scale)[keep])
    found = _quantize(host, "nvfp4", x).outputs
    assert not found.scale[2].isfinite()
    levels = tiles.unswizzle(found.scales, 4, 17)
    assert levels[2, 100 // 16].isnan()
    assert torch.equal(found.scale[keep], clean[1].scale[keep])
    assert torch.equal(found.codes[keep], clean[1].codes[keep])


def test_ties_go_to_the_even_code(host: EmulatedHost) -> None:
    """Blocks whose scales are exact, with every middle between two codes and its neighbours."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    points = torch.cat([middles, middles * (1 + 2.0**-22), middles * (1 - 2.0**-22)])
    points = torch.cat([points, -points, torch.tensor([0.0, -0.0, 6.0, -6.0, 5.99, 0.1])])
    points = torch.nn.functional.pad(points, (0, -len(points) % 15))
    # One 2688 makes the token's scale 1; each block has a 6, which makes its own scale 1.
    x = torch.cat([points.view(-1, 15), torch.full((len(points) // 15, 1), 6.0)], 1).flatten()
    x = torch.cat([torch.full((16,), 2688.0), x]).view(1, -1)
    found = _quantize(host, "nvfp4", x).outputs
    assert float(found.scale) == 1.0
    _assert_same(found, nvfp4_tokens(x))
    codes = e2m1.unpack(found.codes)[0, 16:].view(-1, 16)[:, :15].flatten()
    assert torch.equal(e2m1.decode(codes[:7]), torch.tensor([0, 1, 1, 2, 2, 4, 4.0]))
    assert torch.equal(codes, e2m1.encode(points))


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_row_is_read_once_as_far_as_it_is_kept(host: EmulatedHost, kind: str) -> None:
    x = _random((2, 8192), BF16)
    (traffic,) = _quantize(host, kind, x).traffic
    if kind == "fp8":
        assert traffic.loaded == x.nbytes
        assert traffic.stored == x.numel() + 2 * 4
    else:
        assert traffic.loaded == 2 * x.nbytes
        assert traffic.stored == x.numel() // 2 + 128 * 512 + 2 * 4


def test_the_padding_of_tiles_is_zeros(host: EmulatedHost) -> None:
    x = _random((130, 80), F32)
    found = _quantize(host, "nvfp4", x).outputs
    assert found.scales.numel() == 256 * 8
    whole = tiles.unswizzle(found.scales, 256, 8).view(torch.uint8)
    assert whole[:130, :5].all()
    assert not whole[130:].any()
    assert not whole[:, 5:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_uses_torch(kind: str) -> None:
    x = _random((3, 64), BF16)
    _assert_same(MAKERS[kind](Device("cpu", "cpu"), BF16, [3])(x), TORCH[kind](x))


def test_errors_of_the_rounding() -> None:
    """As large as the formats': FP8 2.6 %, NVFP4 9.5 % of normal numbers."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    size = x.norm()
    values, scale = fp8_tokens(x)
    error = float((values.float() * scale - x).norm() / size)
    assert 0.024 < error < 0.029
    codes, levels, scale = nvfp4_tokens(x)
    rows = tiles.unswizzle(levels, 64, 256).float().repeat_interleave(16, -1)
    error = float((e2m1.decode(e2m1.unpack(codes)) * rows * scale - x).norm() / size)
    assert 0.09 < error < 0.1
    assert values.dtype == E4M3
    assert quantizers.SHARED == 2 * 32 * 4
