"""Every code, every scale, every middle between them, against exact fractions."""

from __future__ import annotations

import itertools
import math

import formats_truth as truth
import pytest
import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, dequantize, e2m1, quantize
from gristmill.formats.nvfp4.tensor import decode_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def around(points: list[float], dtype: torch.dtype) -> torch.Tensor:
    """The points and their neighbours in a dtype, with both signs."""
    exact = torch.tensor(points, dtype=dtype)
    up = exact.nextafter(torch.tensor(math.inf, dtype=dtype))
    down = exact.nextafter(torch.tensor(-math.inf, dtype=dtype))
    every = torch.cat((exact, up, down))
    return torch.cat((every, -every))


def middles(table: tuple[truth.Fraction, ...]) -> list[float]:
    return [float(low + high) / 2 for low, high in itertools.pairwise(table)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_e2m1_at_every_code_and_every_middle(dtype: torch.dtype) -> None:
    points = [float(value) for value in truth.E2M1] + middles(truth.E2M1)
    values = around([*points, 7.0, 100.0, 1e-4], dtype)
    expected = [truth.e2m1_code(value) for value in values.double().tolist()]
    assert e2m1.encode(values).tolist() == expected


def test_rounding_to_e2m1_over_the_whole_range() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 3
    assert e2m1.encode(values).tolist() == [truth.e2m1_code(value) for value in values.tolist()]


def test_what_has_no_code() -> None:
    values = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    assert e2m1.encode(values).tolist() == [7, 15, 0, 8]
    assert int(e2m1.encode(torch.tensor([math.nan]))[0]) & 7 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_every_code_and_every_byte(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    exact = [float(truth.e2m1_value(code)) for code in range(16)]
    assert e2m1.decode(codes, dtype).tolist() == exact
    assert e2m1.decode(codes, dtype).signbit().tolist() == [code >= 8 for code in range(16)]
    every = torch.arange(256).to(torch.uint8)
    pairs = e2m1.decode_packed(every[:, None], dtype)
    assert pairs.dtype == dtype
    assert pairs.tolist() == [[exact[byte & 15], exact[byte >> 4]] for byte in range(256)]


def test_the_even_column_lies_in_the_low_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [0, 15, 7, 8]], dtype=torch.uint8)
    packed = e2m1.pack(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0xF0, 0x87]]
    assert e2m1.unpack(packed).tolist() == codes.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_times_every_code_is_exact(dtype: torch.dtype) -> None:
    codes = e2m1.pack(torch.arange(16, dtype=torch.uint8).expand(127, 16))
    scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    exact = [[float(truth.e2m1_value(code) * scale) for code in range(16)] for scale in truth.E4M3]
    assert decode_blocks(codes, scales, dtype).tolist() == exact
    weight = NVFP4Tensor(codes, scales, torch.tensor(1.0))
    assert dequantize(weight, dtype).tolist() == exact


def test_rounding_of_scales_at_every_code_and_every_middle() -> None:
    """A global scale of one, set by an element of 2688; one block for every point."""
    points = [float(value) for value in truth.E4M3] + middles(truth.E4M3)
    largest = torch.cat((around(points, torch.float32).abs(), torch.tensor([2688 / 6.0])))
    weight = torch.zeros(len(largest), 16)
    weight[:, 3] = largest * 6  # exact for codes and middles, and rounded as any input would be
    weight.clamp_(max=2688.0)
    quantized = quantize(weight)
    assert quantized.global_scale == 1
    ratios = [truth.fp32(value / 6.0) for value in weight[:, 3].tolist()]
    expected = [truth.nearest(truth.Fraction(ratio), truth.E4M3) for ratio in ratios]
    assert quantized.scales.view(torch.uint8).flatten().tolist() == expected
    assert set(expected) == set(range(127))


def test_the_largest_scale_is_used_and_never_passed() -> None:
    """6 * (amax / 2688) rounds up for some and down for others."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5000, 1, 16, generator=generator)
    top = quantize(weights).scales.float().flatten()
    assert top.eq(448).all()
    top = quantize(weights, method="four_over_six").scales.float().flatten()
    assert set(top.tolist()) == {256.0, 384.0}
    top = quantize(weights, method="scale_sweep").scales.float().flatten()
    assert top.isfinite().all()
    assert top.min() >= 208


@pytest.mark.parametrize("seed", range(3))
def test_by_amax_against_a_slow_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 96, generator=generator)
    weight[1] *= 1e-2
    weight[2] *= 3e-4  # scales below the normal ones, and some that become zero
    weight[3, 16:32] = 0
    weight[4] = weight[4].sign() * 0.5
    codes, scales, scale = truth.quantized_by_amax(weight.tolist())
    quantized = quantize(weight)
    assert float(quantized.global_scale) == scale
    assert quantized.scales.view(torch.uint8).tolist() == scales
    assert e2m1.unpack(quantized.codes).tolist() == codes
    assert {0} < {code for row in scales for code in row}


def test_dequantize_against_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (5, 24), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 127, (5, 3), generator=generator).to(torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    per_row = torch.rand(5, generator=generator)
    exact = truth.values(codes, scales, per_row)
    assert torch.equal(dequantize(NVFP4Tensor(codes, scales, per_row), torch.float64), exact)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = dequantize(NVFP4Tensor(codes, scales, per_row), dtype)
        # Exact times the global scale: rounded to fp32, then to the dtype.
        assert torch.equal(got, exact.float().to(dtype))
    whole = torch.tensor(0.37)
    exact = truth.values(codes, scales, whole.expand(5))
    assert torch.equal(dequantize(NVFP4Tensor(codes, scales, whole), torch.float64), exact)


def test_dequantize_refuses_what_it_cannot_give() -> None:
    weight = quantize(torch.randn(2, 16))
    with pytest.raises(TypeError, match="dequantize: dtype must be fp32"):
        dequantize(weight, torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="dequantize: dtype must be fp32"):
        dequantize(weight, torch.int32)
    with pytest.raises(TypeError, match="dequantize: q must be an NVFP4Tensor"):
        dequantize(weight.codes)  # type: ignore[arg-type]
