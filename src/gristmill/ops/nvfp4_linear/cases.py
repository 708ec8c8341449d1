"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import fragments, packing, tiles
from gristmill.formats.nvfp4.tensor import BLOCK, FRAGMENTS, PAIRS, TILES, arch_of, layout_of
from gristmill.ops.examples import is_meta, normal, padded, unaligned
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
    pairs: bool = False,
) -> Weight:
    """Every code, scales over all of E4M3's exponents, values of the size that layers have.

    Drawn on the device, or where the generator is. `per_row`: rows have scales of their own, a
    factor of up to 4 apart. `pairs`: of gate and up, which fragments hold side by side.
    """
    if is_meta(device):
        return _meta_weight(shape, device, layout, pairs)
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
    if layout == TILES:
        scales = tiles.swizzle(scales)
    elif layout == FRAGMENTS:
        codes, scales = packing.pack(codes, scales, pairs=pairs)
        layout = PAIRS if pairs else FRAGMENTS
    return Weight(codes.to(device), scales.to(device), row_scale.to(device), layout, columns)


def _meta_weight(
    shape: tuple[int, ...], device: torch.device | str, layout: str, pairs: bool
) -> Weight:
    """What `random_weight` gives on the meta device, without a computation."""
    *stack, rows, columns = shape
    codes: tuple[int, ...] = (rows, columns // 2)
    scales: tuple[int, ...] = (rows, columns // BLOCK)
    kind = torch.float8_e4m3fn
    if layout == TILES:
        scales = (math.prod(tiles.padded(rows, columns // BLOCK)),)
    elif layout == FRAGMENTS:
        whole = fragments.padded(rows, columns)
        codes, scales, kind = (*whole, fragments.CODES), (*whole, fragments.SCALES), torch.uint8
        layout = PAIRS if pairs else FRAGMENTS
    return Weight(
        torch.empty((*stack, *codes), dtype=torch.uint8, device=device),
        torch.empty((*stack, *scales), dtype=kind, device=device),
        torch.empty((*stack, rows), device=device),
        layout,
        columns,
    )


def sound_scales(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Of random bytes, where they lie: in fragments not all are scales. From 2^-3 to 448, too."""
    if layout == FRAGMENTS:
        first, last = (-3 + 20) << 3, (8 + 20) << 3 | 6
        scales.remainder_(last - first + 1).add_(first)
    return scales


def sound_forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    *options: Any,
) -> Arguments:
    return x, codes, sound_scales(scales, layout), row_scale, bias, layout, *options


def sound_backward(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    *options: Any,
) -> Arguments:
    return dy, codes, sound_scales(scales, layout), row_scale, layout, *options


def forward_cost(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> Cost:
    rows, columns = len(row_scale), x.shape[-1]
    lines = x.numel() // columns if columns else 0
    moved = x.numel() * x.element_size() + lines * rows * (out_dtype or x.dtype).itemsize
    moved += 0 if bias is None else rows * bias.element_size()
    return Cost(moved + packed_bytes(rows, columns), 2 * lines * rows * columns)


def backward_cost(
    dy: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> Cost:
    rows = len(row_scale)
    lines = dy.numel() // rows if rows else 0
    moved = dy.numel() * dy.element_size() + lines * columns * dtype.itemsize
    return Cost(moved + packed_bytes(rows, columns), 2 * lines * rows * columns)


def packed_bytes(rows: int, columns: int) -> int:
    """What a weight takes in any layout, without its padding."""
    return rows * (columns // 2 + columns // BLOCK + 4)


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """M, N and K of an example: ``(M, K)`` is a square weight, ``(M, N, K)`` any."""
    if len(shape) not in (2, 3) or shape[-1] % BLOCK:
        raise ArgumentError(
            f"nvfp4_linear: an example is (M, K) or (M, N, K) with K a multiple of {BLOCK}, "
            f"got {shape}"
        )
    return shape[0], shape[-2] if len(shape) == 3 else shape[-1], shape[-1]


def forward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    """In the layout of the device, or of an architecture, so that its own kernels are seen."""
    lines, rows, columns = sizes_of(shape)
    x = normal((lines, columns), dtype, device)
    weight = random_weight((rows, columns), device, layout=layout_on(device, arch))
    return x, *weight[:3], None, weight.layout, None, None


def backward_example(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    arch: str | None = None,
) -> Arguments:
    lines, rows, columns = sizes_of(shape)
    dy = normal((lines, rows), dtype, device)
    weight = random_weight((rows, columns), device, layout=layout_on(device, arch))
    return dy, *weight[:3], weight.layout, columns, dtype


def layout_on(device: torch.device | str, arch: str | None = None, *, stacked: bool = False) -> str:
    """The layout into which a weight is prepared on a device, or for an architecture."""
    return layout_of(arch_of(torch.device(device)) if arch is None else arch, stacked)


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
    act: str | None = None
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
        "row slices": Spread((17,), columns=128, lay=lambda x: padded(x, 24)),
        "transposed rows": Spread((6, 5), lay=lambda x: x.transpose(0, 1)),
        "columns strided": Spread((6,), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6,), lay=lambda x: x[:1].expand(x.shape)),
        "unaligned": Spread((6,), lay=unaligned),
        "zeros": Spread(fill=torch.zeros_like, bias=_BF16),
        "large values": Spread(x=_FP32, fill=lambda x: x * 1e15),
        "small values": Spread(x=_FP32, fill=lambda x: x * 1e-15),
        "large fp16": Spread(x=_FP16, fill=lambda x: x * 4000),
        "zero row scales": Spread(weight=lambda w: w._replace(row_scale=w.row_scale * 0)),
        "expanded row scale": Spread(weight=_expanded_scale),
        "rows of a larger weight": Spread(rows=40, weight=_sliced),
        "fp8": Spread((9,), 40, 144, act="fp8", bias=_BF16),
        "nvfp4": Spread((9,), 40, 144, act="nvfp4"),
        "tiles, fp8": Spread((33,), 130, 208, layout="tiles", act="fp8", x=_FP16),
        "tiles, nvfp4": Spread((33,), 130, 208, layout="tiles", act="nvfp4", per_row=True),
        **_in_fragments(),
    }


def _in_fragments() -> dict[str, Spread]:
    """Fragments are 64 by 64: sizes that fill them and sizes that do not, for every option."""
    whole = partial(Spread, layout="fragments")
    spreads = {
        f"fragments, {rows} by {size}x{columns}": whole((rows,), size, columns)
        for rows, size, columns in (
            (1, 1, 16),
            (2, 5, 48),
            (3, 33, 80),
            (8, 64, 64),
            (9, 130, 208),
            (16, 257, 2048),
            (33, 128, 512),
            (70, 192, 128),
            (130, 320, 256),
            (0, 64, 64),
            (4, 0, 32),
            (4, 24, 0),
        )
    }
    for x in (_FP32, _FP16, _BF16, _FP64):
        for bias in (None, _FP32, _BF16, _FP16):
            name = f"fragments, x {_word(x)} bias {_word(bias)}"
            spreads[name] = whole((9,), 40, 144, x=x, bias=bias)
    for out in (_FP32, _BF16, _FP16, _FP64):
        spreads[f"fragments, out {_word(out)}"] = whole((5,), 72, 80, out=out, bias=_FP32)
    return spreads | {
        "fragments, vector": whole((), 96, 80),
        "fragments, batches": whole((2, 1, 4), 130, 96),
        "fragments, fp16 to fp32": whole((20,), 80, 256, x=_FP16, out=_FP32),
        "fragments, per row": whole((17,), 130, 128, per_row=True),
        "fragments, per row fp16": whole((17,), 96, 128, x=_FP16, per_row=True, bias=_FP32),
        "fragments, fp8": whole((40,), 130, 208, act="fp8", bias=_BF16),
        "fragments, fp8, fp16 to fp32": whole((7,), 64, 512, act="fp8", x=_FP16, out=_FP32),
        "fragments, nvfp4": whole((9,), 40, 144, act="nvfp4", bias=_FP32),
        "fragments, row slices": whole((17,), columns=128, lay=lambda x: padded(x, 24)),
        "fragments, odd row slices": whole((17,), columns=128, lay=lambda x: padded(x, 5)),
        "fragments, transposed rows": whole((6, 5), lay=lambda x: x.transpose(0, 1)),
        "fragments, columns strided": whole((6,), lay=lambda x: x.t().contiguous().t()),
        "fragments, expanded rows": whole((6,), lay=lambda x: x[:1].expand(x.shape)),
        "fragments, unaligned": whole((6,), rows=130, columns=80, lay=unaligned),
        "fragments, unaligned row": whole((1,), rows=130, columns=80, lay=unaligned),
        "fragments, large fp16": whole(x=_FP16, fill=lambda x: x * 4000),
        "fragments, zero row scales": whole(weight=lambda w: w._replace(row_scale=w[2] * 0)),
        "fragments, expanded row scale": whole(weight=_expanded_scale),
        "fragments between others": whole(rows=130, columns=80, weight=_sliced),
        "fragments, unaligned weight": whole(rows=130, columns=80, weight=_odd_weight),
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
    weight = _weight(spread, generator, device)
    bias = None
    if spread.bias is not None:
        bias = torch.randn(spread.rows, generator=generator).to(spread.bias).to(device)
    return x, *weight[:3], bias, weight.layout, spread.out, spread.act


def _backward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    dy = _rows(spread, spread.rows, spread.out or spread.x, generator, device)
    weight = _weight(spread, generator, device)
    return dy, *weight[:3], weight.layout, spread.columns, spread.x


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
        return whole[..., part.shape[-1] : 2 * part.shape[-1]].view(part.dtype)

    return weight._replace(codes=between(weight.codes), scales=between(weight.scales))


def _odd_weight(weight: Weight) -> Weight:
    return weight._replace(codes=unaligned(weight.codes), scales=unaligned(weight.scales))


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")
