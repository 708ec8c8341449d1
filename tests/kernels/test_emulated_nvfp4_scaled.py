"""The variants that round activations, with their kernels and torch's scaled products emulated.

The emulated products check what the real ones ask for (dtypes, strides, the sizes and the order of
scales) and compute from the bytes what those would, in fp64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run

from gristmill.formats.nvfp4 import e2m1, fragments, swizzle, tiles
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.fp8 import ScaledMMFp8
from gristmill.ops.nvfp4_linear.quantizers import fp8_tokens, nvfp4_tokens
from gristmill.ops.nvfp4_linear.scaled_mm import ScaledMM
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H200, L40S, B200 = KNOWN["sm_90a"], KNOWN["sm_89"], KNOWN["sm_100a"]
OP = OPS["nvfp4_linear"]


def _arguments(
    act: str | None,
    layout: str = "fragments",
    shape: tuple[int, int, int] = (80, 192, 208),
    x: torch.dtype = BF16,
    bias: torch.dtype | None = None,
    out: torch.dtype | None = None,
) -> tuple[Any, ...]:
    lines, rows, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    tokens = torch.randn(lines, columns, generator=generator).to(x)
    weight = random_weight((rows, columns), "cpu", generator=generator, per_row=True)
    codes, scales = weight.codes, weight.scales
    if layout == "fragments":
        codes, scales = fragments.pack(codes, scales)
    if layout == "tiles":
        scales = swizzle(scales)
    shift = None if bias is None else torch.randn(rows, generator=generator).to(bias)
    return tokens, codes, scales, weight.row_scale, shift, layout, out, act


def _values(args: tuple[Any, ...]) -> torch.Tensor:
    """Those of the weight without its row scale, in fp64."""
    x, codes, scales, row_scale, _, layout, *_ = args
    weight = common.Weight(codes, scales, row_scale, layout, x.shape[-1])
    return weight.blocks(F64)


def _run(host: EmulatedHost, variant: Variant, args: tuple[Any, ...], device: Device) -> Run:
    problem = OP.problem(*args, device=device)
    assert variant.supports(problem) is None
    return host.run(variant, problem, None, args)


def _check(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, size: float) -> None:
    """Rounded once to `dtype`; `size` is that of the sums."""
    assert found.dtype == dtype
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + size * 2.0**-18).all()


def _fp8_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    assert a.dtype == b.dtype == E4M3
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert scale_a.dtype == scale_b.dtype == F32
    assert scale_a.shape == (len(a), 1)
    assert scale_b.shape == (1, b.shape[1])
    assert scale_b.t().is_contiguous()
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert out.dtype == out_dtype
    assert out.stride(1) == 1
    assert use_fast_accum
    assert bias is None or (bias.dtype == out_dtype and out_dtype in (BF16, F16))
    assert bias is None or bias.is_contiguous()
    total = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
    return out.copy_(total if bias is None else total + bias.double())


def _fp4_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: list[torch.Tensor],
    scale_recipe_a: list[Any],
    scale_b: list[torch.Tensor],
    scale_recipe_b: list[Any],
    swizzle_a: list[Any],
    swizzle_b: list[Any],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    functional = torch.nn.functional
    assert scale_recipe_a == scale_recipe_b == [functional.ScalingType.BlockWise1x16]
    assert swizzle_a == swizzle_b == [functional.SwizzleType.SWIZZLE_32_4_4]
    operands = []
    for matrix, (scales,) in ((a, scale_a), (b.t(), scale_b)):
        assert matrix.dtype == torch.float4_e2m1fn_x2
        assert matrix.is_contiguous()
        assert matrix.stride(0) % 16 == 0
        rows, blocks = len(matrix), matrix.shape[1] // 8
        tall, wide = -(-rows // 128) * 128, -(-blocks // 4) * 4
        assert scales.dtype == E4M3
        assert scales.is_contiguous()
        assert scales.numel() == tall * wide
        # As documented: byte ((r / 128) * (C / 4) + c / 4) * 512 + (r % 32) * 16 + ...
        r, c = torch.arange(rows)[:, None], torch.arange(blocks)
        at = (r // 128 * (wide // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        found = scales.view(torch.uint8)[at].view(E4M3).double()
        values = e2m1.decode(e2m1.unpack(matrix.view(torch.uint8)), F64)
        operands.append(values * found.repeat_interleave(16, -1))
    assert b.shape[1] % 16 == 0
    return (operands[0] @ operands[1].t()).to(output_dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", _fp8_product)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", _fp4_product)


def _expected_fp8(args: tuple[Any, ...]) -> torch.Tensor:
    x, _, _, row_scale, bias, *_ = args
    tokens = fp8_tokens(x)
    rounded = (_values(args).float() / 8).to(E4M3).double()
    total = (tokens.values.double() * tokens.scale.double()) @ rounded.t()
    total = total * (8 * row_scale.double())
    return total if bias is None else total + bias.double()


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("piece_bytes", [32 << 20, 14_000])
@pytest.mark.parametrize("layout", ["fragments", "rows", "tiles"])
@pytest.mark.parametrize(
    ("x", "bias", "out"),
    [
        (BF16, None, None),
        (BF16, BF16, None),
        (BF16, F32, None),
        (F16, F16, None),
        (F32, F32, None),
        (F32, BF16, BF16),
        (F16, None, F32),
    ],
    ids=str,
)
def test_fp8(
    host: EmulatedHost,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    layout: str,
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    args = _arguments("fp8", layout, x=x, bias=bias, out=out)
    run = _run(host, ScaledMMFp8(), args, H200)
    _check(run.outputs, _expected_fp8(args), out or x, 2.0)
    # Tokens once for each piece of them, the weight for each piece of either.
    tokens = [call for call in run.calls if call.program.source == "quantize_tokens.cu"]
    assert sum(call.grid for call in tokens) == 80
    assert (len(tokens) > 1) == (piece_bytes == 14_000)
    if layout == "fragments":
        assert len(run.calls) == len(tokens) * (1 + (3 if piece_bytes == 14_000 else 1))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("device", [L40S, B200], ids=str)
@pytest.mark.parametrize("bias", [None, BF16])
def test_fp8_elsewhere_than_on_hopper(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, device: Device, bias: Any
) -> None:
    """The product is not written in place there, because what computes it ignores strides."""

    def dense_only(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        assert out.is_contiguous()
        return _fp8_product(*args, out=out, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", dense_only)
    monkeypatch.setattr(common, "PIECE_BYTES", 14_000)
    args = _arguments("fp8", bias=bias)
    run = _run(host, ScaledMMFp8(), args, device)
    _check(run.outputs, _expected_fp8(args), BF16, 2.0)


@pytest.mark.usefixtures("products")
def test_the_error_of_fp8_is_as_stated(host: EmulatedHost) -> None:
    args = _arguments("fp8", shape=(16, 64, 2048), x=F32)
    found = _run(host, ScaledMMFp8(), args, H200).outputs.double()
    exact = args[0].double() @ (_values(args) * args[3].double().unsqueeze(-1)).t()
    # For a weight that is drawn from all codes and scales.
    assert float((found - exact).norm() / exact.norm()) == pytest.approx(0.036, rel=0.05)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("piece_bytes", [32 << 20, 140_000])
@pytest.mark.parametrize(
    ("x", "bias", "out"),
    [(BF16, None, None), (BF16, BF16, None), (F16, F32, None), (F32, None, BF16), (F32, F16, F32)],
    ids=str,
)
def test_nvfp4(
    host: EmulatedHost,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("gristmill.ops.nvfp4_linear.scaled_mm.LEAST", 256)
    args = _arguments("nvfp4", "tiles", (130, 592, 96), x, bias, out)
    run = _run(host, ScaledMM(), args, B200)
    tokens = nvfp4_tokens(args[0])
    levels = tiles.unswizzle(tokens.scales, 130, 6).double().repeat_interleave(16, -1)
    rounded = e2m1.decode(e2m1.unpack(tokens.codes), F64) * levels * tokens.scale.double()
    exact = rounded @ (_values(args) * args[3].double().unsqueeze(-1)).t()
    exact = exact if bias is None else exact + args[4].double()
    _check(run.outputs, exact, out or x, 2.0)
    sources = [call.program.source for call in run.calls]
    assert sources.count("quantize_tokens.cu") == (2 if piece_bytes == 140_000 else 1)
    assert sources.count("nvfp4_finish.cu") == (6 if piece_bytes == 140_000 else 1)


@pytest.mark.usefixtures("products")
def test_the_error_of_nvfp4_is_as_stated(host: EmulatedHost) -> None:
    args = _arguments("nvfp4", "tiles", (16, 64, 2048), x=F32)
    found = _run(host, ScaledMM(), args, B200).outputs.double()
    exact = args[0].double() @ (_values(args) * args[3].double().unsqueeze(-1)).t()
    assert 0.085 < float((found - exact).norm() / exact.norm()) < 0.105


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("layout", ["fragments", "tiles"])
def test_tokens_anywhere(host: EmulatedHost, layout: str) -> None:
    """Of several dims, with strides that do not collapse, unaligned."""
    act = "fp8" if layout == "fragments" else "nvfp4"
    variant: Variant = ScaledMMFp8() if layout == "fragments" else ScaledMM()
    device = H200 if layout == "fragments" else B200
    args = _arguments(act, layout, (12, 32, 64))
    expected = _run(host, variant, args, device).outputs
    for tokens in (
        args[0].view(3, 4, 64).transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([args[0], args[0]], 1)[:, :64],
        torch.cat([args[0].new_zeros(3), args[0].flatten()])[3:].view(12, 64),
        args[0].t().contiguous().t(),
    ):
        found = _run(host, variant, (tokens, *args[1:]), device).outputs
        assert found.shape == (*tokens.shape[:-1], 32)
        assert torch.equal(found.view(12, 32), expected)


def _problem(device: Device, **kwargs: Any) -> Problem:
    return OP.problem(*_arguments(**kwargs), device=device)


def test_what_fp8_cannot_do() -> None:
    variant = ScaledMMFp8()
    assert variant.supports(_problem(H200, act="fp8")) is None
    assert variant.supports(_problem(L40S, act="fp8")) is None
    for word, device, kwargs in (
        ("act='fp8'", H200, {"act": None}),
        ("act='fp8'", H200, {"act": "nvfp4"}),
        ("8.9", KNOWN["sm_80"], {"act": "fp8"}),
        ("multiple of 16", H200, {"act": "fp8", "shape": (5, 24, 64)}),
        ("float64", H200, {"act": "fp8", "x": F64}),
        ("float64", H200, {"act": "fp8", "out": F64}),
        ("nothing", H200, {"act": "fp8", "shape": (0, 32, 64)}),
        ("bfloat16", L40S, {"act": "fp8", "x": F16}),
        ("bfloat16", B200, {"act": "fp8", "bias": F32}),
    ):
        assert word in str(variant.supports(_problem(device, **kwargs))), (word, kwargs)
    assert "CUDA" in str(variant.supports(OP.problem(*_arguments("fp8"))))


def test_when_fp8_is_not_worth_it() -> None:
    variant = ScaledMMFp8()
    large = (4096, 4096)
    assert variant.declines(_problem(H200, act="fp8", shape=(1024, *large))) is None
    assert "512 rows" in str(variant.declines(_problem(H200, act="fp8", shape=(511, *large))))
    # Launches alone take longer than an exact product as small as this.
    assert "cuda_wgmma" in str(variant.declines(_problem(H200, act="fp8", shape=(1024, 32, 64))))
    assert variant.declines(_problem(L40S, act="fp8", shape=(1024, 32, 64))) is None
    assert "1024 rows" in str(variant.declines(_problem(L40S, act="fp8", shape=(1023, 32, 64))))
    assert "fragments" in str(
        variant.declines(_problem(H200, act="fp8", shape=(1024, 32, 64), layout="rows"))
    )
    assert variant.varies_with_batch(_problem(H200, act="fp8")) is not None
    names = {program.source for program in variant.programs(_problem(H200, act="fp8"), None)}
    assert names == {"quantize_tokens.cu", "nvfp4_dequantize.cu"}


def test_what_nvfp4_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = ScaledMM()
    usual: dict[str, Any] = {"act": "nvfp4", "layout": "tiles", "shape": (5, 48, 96)}
    assert variant.supports(_problem(B200, **usual)) is None
    assert variant.supports(_problem(KNOWN["sm_120a"], **usual)) is None
    for word, device, change in (
        ("act='nvfp4'", B200, {"act": None}),
        ("act='nvfp4'", B200, {"act": "fp8"}),
        ("tiles", B200, {"layout": "rows"}),
        ("10.0", H200, {}),
        ("multiples of 16", B200, {"shape": (5, 24, 64)}),
        ("multiples of 32", B200, {"shape": (5, 32, 80)}),
        ("float64", B200, {"x": F64}),
        ("float64", B200, {"out": F64}),
        ("nothing", B200, {"shape": (0, 32, 64)}),
    ):
        assert word in str(variant.supports(_problem(device, **usual | change))), (word, change)
    assert "CUDA" in str(variant.supports(OP.problem(*_arguments("nvfp4", "tiles"))))
    assert variant.varies_with_batch(_problem(B200, **usual)) is not None
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "this torch" in str(variant.supports(_problem(B200, **usual)))


def test_when_nvfp4_is_not_worth_it() -> None:
    variant = ScaledMM()
    for lines, word in ((1, "64 rows"), (63, "64 rows"), (64, "None"), (4096, "None")):
        usual: dict[str, Any] = {"act": "nvfp4", "layout": "tiles", "shape": (lines, 32, 64)}
        assert word in str(variant.declines(_problem(B200, **usual)))


@pytest.mark.parametrize(
    ("device", "act", "lines", "name"),
    [
        (H200, "fp8", 256, "cuda_wgmma"),
        (H200, "fp8", 1024, "scaled_mm_fp8"),
        (B200, "nvfp4", 1, "triton"),
        (B200, "nvfp4", 1024, "scaled_mm"),
    ],
    ids=str,
)
def test_few_rows_are_rounded_for_nobody(device: Device, act: str, lines: int, name: str) -> None:
    """As the order of preference has it, without tables."""
    args = OP.example_for(device, (lines, 4096, 4096), BF16)
    problem = OP.problem(*args[:-1], act, device=device)
    supporting = [variant for variant in OP.variants if variant.supports(problem) is None]
    willing = [variant.name for variant in supporting if variant.declines(problem) is None]
    assert willing[0] == name


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("bias", [BF16, F32])
def test_a_bias_with_strides(host: EmulatedHost, bias: torch.dtype) -> None:
    """The product would read it as if it were dense."""
    args = _arguments("fp8", "rows", bias=bias)
    expected = _run(host, ScaledMMFp8(), args, H200).outputs
    strided = torch.stack([args[4], -args[4]], 1)[:, 0]
    found = _run(host, ScaledMMFp8(), (*args[:4], strided, *args[5:]), H200).outputs
    assert torch.equal(found, expected)


def test_launches_go_to_the_device_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    second = replace(H200, index=1)

    def prepare(call: Any, device_index: int) -> Any:
        seen.append(device_index)
        return lambda *args: None

    monkeypatch.setattr("gristmill.ops.launch.prepare", prepare)
    ScaledMMFp8().bind(OP.problem(*_arguments("fp8"), device=second), None)
    assert set(seen) == {1}
