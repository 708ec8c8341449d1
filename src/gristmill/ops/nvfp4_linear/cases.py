"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4.tensor import BLOCK, TILES
from gristmill.formats.nvfp4.tiles import swizzle
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.op import Arguments, Case, Cost

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def random_weight(
    shape: tuple[int, ...],
    device: torch.device | str,
    *,
    layout: str = "rows",
    generator: torch.Generator | None = None,
    per_row: bool = False,
) -> Weight:
    """Every code, scales over all of E4M3's exponents, values of the size that layers have.

    Drawn on the device, or where the generator is. `per_row`: rows have scales of their own, a
    factor of up to 4 apart.
    """
    place = device if generator is None else generator.device
    *stack, rows, columns = shape

    def drawn(low: int, high: int, *sizes: int) -> torch.Tensor:
        return torch.randint(
            low, high, (*stack, *sizes), generator=generator, device=place, dtype=torch.uint8
        )

    codes = drawn(0, 256, rows, columns // 2)
    # From 2^-3 to 448: the few below that would not be seen beside them.
    scales = drawn(0x20, 0x7F, rows, columns // BLOCK).view(torch.float8_e4m3fn)
    size = 1 / (400 * max(columns, 1) ** 0.5)
    if per_row:
        factors = drawn(4, 17, rows).float() / 16
        row_scale = factors * size
    else:
        row_scale = torch.full((*stack, rows), size, device=place)
    scales = swizzle(scales) if layout == TILES else scales
    return Weight(codes.to(device), scales.to(device), row_scale.to(device), layout)


def forward_cost(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
) -> Cost:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    lines = x.numel() // columns if columns else 0
    moved = x.numel() * x.element_size() + lines * rows * (out_dtype or x.dtype).itemsize
    packed = codes.numel() + scales.numel() + rows * 4
    packed += 0 if bias is None else rows * bias.element_size()
    return Cost(moved + packed, 2 * lines * rows * columns)


def backward_cost(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    dtype: torch.dtype,
) -> Cost:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    lines = dy.numel() // rows if rows else 0
    moved = dy.numel() * dy.element_size() + lines * columns * dtype.itemsize
    return Cost(moved + codes.numel() + scales.numel() + rows * 4, 2 * lines * rows * columns)


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """M, N and K of an example: ``(M, K)`` is a square weight, ``(M, N, K)`` any."""
    if len(shape) not in (2, 3) or shape[-1] % BLOCK:
        raise ArgumentError(
            f"nvfp4_linear: an example is (M, K) or (M, N, K) with K a multiple of {BLOCK}, "
            f"got {shape}"
        )
    return shape[0], shape[-2] if len(shape) == 3 else shape[-1], shape[-1]


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    lines, rows, columns = sizes_of(shape)
    x = torch.randn((lines, columns), dtype=dtype, device=device)
    codes, scales, row_scale, layout = random_weight((rows, columns), device)
    return x, codes, scales, row_scale, None, layout, None


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    lines, rows, columns = sizes_of(shape)
    dy = torch.randn((lines, rows), dtype=dtype, device=device)
    codes, scales, row_scale, layout = random_weight((rows, columns), device)
    return dy, codes, scales, row_scale, layout, dtype


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    leading: tuple[int, ...] = (5,)
    rows: int = 48
    columns: int = 64
    x: torch.dtype = _BF16
    bias: torch.dtype | None = None
    out: torch.dtype | None = None
    layout: str = "rows"
    per_row: bool = False
    lay: Callable[[torch.Tensor], torch.Tensor] | None = None
    fill: Callable[[torch.Tensor], torch.Tensor] | None = None
    weight: Callable[[Weight], Weight] | None = None


def _spreads() -> dict[str, Spread]:
    shapes = (
        ((1,), 64, 64),
        ((), 48, 32),
        ((3,), 1, 16),
        ((7,), 5, 16),
        ((2, 3), 33, 80),
        ((2, 1, 4), 130, 96),
        ((0,), 16, 32),
        ((2, 0), 16, 32),
        ((4,), 0, 32),
        ((4,), 24, 0),
        ((33,), 257, 512),
        ((64,), 96, 2048),
    )
    spreads = {
        f"{'x'.join(map(str, leading)) or 'vector'} by {rows}x{columns}": Spread(
            leading, rows, columns
        )
        for leading, rows, columns in shapes
    }
    for x in (_FP32, _FP16, _BF16, _FP64):
        for bias in (None, _FP32, _BF16):
            spreads[f"x {_word(x)} bias {_word(bias)}"] = Spread((9,), 40, 144, x=x, bias=bias)
    for out in (_FP32, _BF16, _FP16, _FP64):
        spreads[f"out {_word(out)}"] = Spread(out=out)
        spreads[f"out {_word(out)} from fp32"] = Spread(x=_FP32, out=out, bias=_FP16)
    return spreads | {
        "tiles": Spread(rows=200, columns=208, layout="tiles"),
        "tiles, whole": Spread(rows=256, columns=128, layout="tiles", bias=_BF16),
        "tiles per row": Spread((17,), 130, 64, layout="tiles", per_row=True),
        "per row": Spread((17,), 96, 128, per_row=True),
        "per row fp16": Spread((17,), 96, 128, x=_FP16, per_row=True, bias=_FP32),
        "row slices": Spread((17,), columns=128, lay=lambda x: _padded(x, 24)),
        "transposed rows": Spread((6, 5), lay=lambda x: x.transpose(0, 1)),
        "columns strided": Spread((6,), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6,), lay=lambda x: x[:1].expand(x.shape)),
        "unaligned": Spread((6,), lay=_unaligned),
        "zeros": Spread(fill=torch.zeros_like, bias=_BF16),
        "large values": Spread(x=_FP32, fill=lambda x: x * 1e15),
        "small values": Spread(x=_FP32, fill=lambda x: x * 1e-15),
        "large fp16": Spread(x=_FP16, fill=lambda x: x * 4000),
        "zero row scales": Spread(weight=lambda w: w._replace(row_scale=w.row_scale * 0)),
        "expanded row scale": Spread(weight=_expanded_scale),
        "rows of a larger weight": Spread(rows=40, weight=_sliced),
    }


def forward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_forward, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in _spreads().items():
        yield Case(name, partial(_backward, spread))


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    x = _rows(spread, spread.columns, spread.x, generator, device)
    codes, scales, row_scale, layout = _weight(spread, generator, device)
    bias = None
    if spread.bias is not None:
        bias = torch.randn(spread.rows, generator=generator).to(spread.bias).to(device)
    return x, codes, scales, row_scale, bias, layout, spread.out


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    dy = _rows(spread, spread.rows, spread.out or spread.x, generator, device)
    codes, scales, row_scale, layout = _weight(spread, generator, device)
    return dy, codes, scales, row_scale, layout, spread.x


def _rows(
    spread: Spread,
    columns: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str,
) -> torch.Tensor:
    values = torch.randn((*spread.leading, columns), generator=generator)
    values = (values if spread.fill is None else spread.fill(values)).to(dtype).to(device)
    return values if spread.lay is None else spread.lay(values)


def _weight(spread: Spread, generator: torch.Generator, device: torch.device | str) -> Weight:
    made = random_weight(
        (spread.rows, spread.columns),
        device,
        layout=spread.layout,
        generator=generator,
        per_row=spread.per_row,
    )
    return made if spread.weight is None else spread.weight(made)


def _expanded_scale(weight: Weight) -> Weight:
    return weight._replace(row_scale=weight.row_scale[0].expand(weight.row_scale.shape))


def _sliced(weight: Weight) -> Weight:
    """The same values between others, as rows of a fused weight lie."""

    def between(part: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([part.view(torch.uint8)] * 3, dim=-1)
        return whole[:, part.shape[-1] : 2 * part.shape[-1]].view(part.dtype)

    return weight._replace(codes=between(weight.codes), scales=between(weight.scales))


def _padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + extra))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")
