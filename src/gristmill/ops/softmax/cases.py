"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.ops.examples import normal, padded, unaligned
from gristmill.ops.op import Arguments, Case, Cost
from gristmill.ops.softmax import reference
from gristmill.ops.softmax.semantics import CAUSAL, EVERYTHING, causal_offset

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Lay = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[torch.Generator], torch.Tensor]


def forward_cost(x: torch.Tensor, causal: int, scale: float, mask: torch.Tensor | None) -> Cost:
    """x is read where it is seen, y is written everywhere; a mask is read where it has memory."""
    seen = _seen(x, causal)
    own = 0
    if mask is not None:
        sizes = zip(mask.shape, mask.stride(), strict=True)
        own = mask.element_size() * torch.Size(1 if not by else size for size, by in sizes).numel()
    return Cost((seen + x.numel()) * x.element_size() + own, 5 * seen)


def backward_cost(dy: torch.Tensor, y: torch.Tensor, causal: int, scale: float) -> Cost:
    seen = _seen(y, causal)
    read = seen * (dy.element_size() + y.element_size())
    return Cost(read + y.numel() * y.element_size(), 5 * seen)


def _seen(x: torch.Tensor, causal: int) -> int:
    """Elements that a causal limit leaves."""
    if causal == EVERYTHING or x.numel() == 0:
        return x.numel()
    queries, keys = x.shape[-2:]
    offset = causal_offset(causal, queries, keys)
    square = sum(min(max(0, row + 1 + offset), keys) for row in range(queries))
    return x.numel() // (queries * keys) * square


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    return normal(shape, dtype, device), EVERYTHING, 1.0, None


def softmax_backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x = normal(shape, dtype, device)
    y = x if x.is_meta else torch.softmax(x, -1)
    return normal(shape, dtype, device), y, EVERYTHING, 1.0


def log_softmax_backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    x = normal(shape, dtype, device)
    y = x if x.is_meta else torch.log_softmax(x, -1)
    return normal(shape, dtype, device), y, EVERYTHING, 1.0


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    shape: tuple[int, ...] = (37, 256)
    x: torch.dtype = _BF16
    scale: float = 1.0
    mask: Make | None = None
    causal: str | None = None
    lay: Lay | None = None
    fill: Lay | None = None
    dy: torch.dtype | None = None
    dy_lay: Lay | None = None


def softmax_cases() -> Iterator[Case]:
    for name, spread in {**_spreads(), **_masks()}.items():
        yield Case(name, partial(_forward, spread))


def log_softmax_cases() -> Iterator[Case]:
    yield from softmax_cases()


def softmax_backward_cases() -> Iterator[Case]:
    for name, spread in {**_spreads(), **_gradients()}.items():
        yield Case(name, partial(_backward, reference.softmax, spread))


def log_softmax_backward_cases() -> Iterator[Case]:
    for name, spread in {**_spreads(), **_gradients()}.items():
        yield Case(name, partial(_backward, reference.log_softmax, spread))


def _spreads() -> dict[str, Spread]:
    """Shapes, dtypes, layouts, values and causal limits: for both directions."""
    shapes = (
        (1, 4096),
        (3, 1),
        (5, 7),
        (64, 64),
        (33, 128),
        (4, 8, 1000),
        (2, 3, 4, 96),
        (7,),
        (0, 64),
        (3, 0),
        (9, 769),
        (8, 1024),
        (5, 2048),
        (3, 5120),
        (200, 4096),
        (300, 4099),
        (9, 8192),
        (2, 16384),
        (140, 16400),
        (2, 50257),
        (3, 65536),
        (2, 131080),
        (1, 262144),
        (2, 262143),
    )
    spreads = {"x".join(map(str, shape)): Spread(shape) for shape in shapes}
    for x in (_FP32, _FP16, _FP64):
        for columns in (520, 521, 4096):
            spreads[f"{str(x)[6:]} {columns}"] = Spread((19, columns), x=x)
    squares: tuple[tuple[int, ...], ...]
    squares = ((3, 64, 64), (2, 40, 136), (2, 136, 40), (4, 1, 72), (2, 5, 77), (70, 1))
    for causal in ("top_left", "bottom_right"):
        for shape in squares:
            size = "x".join(map(str, shape))
            spreads[f"{causal} {size}"] = Spread(shape, causal=causal)
        spreads[f"{causal} float32 long"] = Spread((3, 4100), x=_FP32, causal=causal)
        spreads[f"{causal} square"] = Spread((1300, 1300), causal=causal, scale=0.125)
    spreads |= {
        "scale": Spread(scale=0.125),
        "scale float32": Spread((19, 520), x=_FP32, scale=0.088388),
        "scale large": Spread(scale=50.0),
        "scale negative": Spread(scale=-0.5),
        "scale zero": Spread(scale=0.0),
        "large offset": Spread((9, 4096), x=_FP32, fill=lambda x: x + 1e4),
        "large values": Spread((9, 640), x=_FP32, fill=lambda x: x * 1e4),
        "huge values": Spread((9, 640), x=_FP32, fill=lambda x: x * 1e37),
        "lowest numbers": Spread((9, 640), fill=lambda x: _lowest(x, _BF16)),
        "lowest numbers float32": Spread((3, 4100), x=_FP32, fill=lambda x: _lowest(x, _FP32)),
        "lowest numbers float16": Spread((9, 640), x=_FP16, fill=lambda x: _lowest(x, _FP16)),
        "all the same": Spread(fill=torch.zeros_like),
        "one finite value": Spread((6, 4096), fill=_one_finite),
        "half infinite": Spread((6, 4096), x=_FP32, fill=_half_infinite),
        "row slices": Spread((17, 512), lay=lambda x: padded(x, 64)),
        "row slices, narrow": Spread((17, 512), lay=lambda x: padded(x, 3)),
        "unaligned": Spread((17, 512), lay=unaligned),
        "unaligned odd": Spread((17, 515), lay=unaligned),
        "unaligned long": Spread((3, 16384), lay=unaligned),
        "transposed rows": Spread(
            (6, 5, 256), lay=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        ),
        "transposed odd rows": Spread(
            (6, 5, 257), lay=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
        ),
        "three levels": Spread((2, 3, 4, 64), lay=_three_levels),
        "columns strided": Spread((6, 96), lay=lambda x: x.t().contiguous().t()),
        "expanded rows": Spread((6, 96), lay=lambda x: x[:1].expand(6, 96)),
    }
    return spreads


def _masks() -> dict[str, Spread]:
    """Masks, and rows with nobody in them."""
    heads = (2, 3, 20, 64)
    spreads = {
        "nobody": Spread((6, 96), fill=_nobody),
        "nobody long": Spread((3, 4096), x=_FP32, fill=_nobody),
        "mask of numbers, scaled": Spread(
            heads, x=_FP16, scale=0.125, mask=_numbers((20, 64), _FP16)
        ),
        "mask expanded": Spread(heads, mask=lambda g: _bools((2, 1, 1, 64))(g).expand(heads)),
        "mask of strided columns": Spread(heads, mask=lambda g: _bools((64, 20))(g).t()),
        "mask expanded, one column": Spread(
            heads, mask=lambda g: _bools((2, 1, 20, 1))(g).expand(2, 3, 20, 1)
        ),
        "mask of row slices": Spread(heads, mask=lambda g: _bools((20, 71))(g)[:, 3:67]),
        "mask hides rows": Spread(heads, mask=lambda g: _bools((20, 1))(g)),
        "mask of numbers hides rows": Spread(heads, x=_FP32, mask=_hides_rows),
        "mask of lowest numbers": Spread(heads, mask=_lowest_numbers),
        "mask and causal": Spread(
            (2, 3, 20, 65), mask=_bools((2, 1, 1, 65)), causal="bottom_right"
        ),
        "mask and causal hide rows": Spread(
            (2, 40, 24), mask=_bools((40, 24), keep=0.2), causal="top_left", scale=0.3
        ),
        "mask on rows of three levels": Spread(
            (2, 3, 4, 64), lay=_three_levels, mask=_bools((3, 1, 64))
        ),
        "mask, scale negative": Spread(heads, scale=-2.0, mask=_bools((20, 64))),
        "mask on long rows": Spread((2, 3, 20000), mask=_bools((2, 1, 20000))),
        "mask of numbers on long odd rows": Spread((2, 3, 20001), mask=_numbers((3, 20001))),
        "mask of five dims": Spread((2, 3, 2, 3, 2, 24), mask=_bools((2, 1, 2, 1, 2, 24))),
    }
    for shape in (heads, (20, 64), (64,), (), (2, 1, 1, 64), (1, 3, 20, 1), (3, 1, 64)):
        size = "x".join(map(str, shape)) or "scalar"
        spreads[f"bool mask {size}"] = Spread(heads, mask=_bools(shape))
        spreads[f"mask of numbers {size}"] = Spread(heads, mask=_numbers(shape))
    for x in (_BF16, _FP32, _FP64):
        for dtype in (_FP32, _BF16, _FP16, _FP64):
            name = f"mask {str(dtype)[6:]} x {str(x)[6:]}"
            spreads[name] = Spread((9, 200), x=x, mask=_numbers((9, 200), dtype))
    return spreads


def _gradients() -> dict[str, Spread]:
    return {
        "nobody": Spread((6, 96), fill=_nobody),
        "dy float32": Spread((19, 520), dy=_FP32),
        "dy float32 odd": Spread((19, 521), dy=_FP32),
        "dy bfloat16": Spread((19, 520), x=_FP32, dy=_BF16),
        "dy long float32": Spread((3, 20000), dy=_FP32),
        "expanded dy": Spread(dy_lay=lambda dy: dy[:1].expand(dy.shape)),
        "expanded dy, all dims": Spread(dy_lay=lambda dy: dy.reshape(-1)[0].expand(dy.shape)),
        "unaligned dy": Spread((17, 512), dy_lay=unaligned),
        "unaligned beside strided columns": Spread(
            (17, 512), lay=lambda y: y.t().contiguous().t(), dy_lay=unaligned
        ),
    }


def _bools(shape: tuple[int, ...], keep: float = 0.6) -> Make:
    return lambda generator: torch.rand(shape, generator=generator) < keep


def _numbers(shape: tuple[int, ...], dtype: torch.dtype = _BF16) -> Make:
    return lambda generator: (2 * torch.randn(shape, generator=generator)).to(dtype)


def _hides_rows(generator: torch.Generator) -> torch.Tensor:
    mask = torch.zeros(20, 64)
    mask[torch.rand(20, 64, generator=generator) < 0.3] = float("-inf")
    mask[::4] = float("-inf")
    return mask


def _lowest_numbers(generator: torch.Generator) -> torch.Tensor:
    """What stands for -inf in many models. Where it hides a whole row, that counts as it is."""
    mask = torch.zeros(20, 64, dtype=_BF16)
    mask[torch.rand(20, 64, generator=generator) < 0.3] = torch.finfo(_BF16).min
    mask[::4] = torch.finfo(_BF16).min
    return mask


def _lowest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As above, in x: some of a row, and all of some rows."""
    out = x.to(dtype)
    out[:, ::3] = torch.finfo(dtype).min
    out[::2] = torch.finfo(dtype).min
    return out


def _one_finite(x: torch.Tensor) -> torch.Tensor:
    """Of whole slices of a row that threads, warps and blocks share nothing is left."""
    out = torch.full_like(x, float("-inf"))
    for row in range(len(x)):
        out[row, (row * 977) % x.shape[-1]] = x[row, 0]
    return out


def _half_infinite(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, : x.shape[-1] // 2] = float("-inf")
    return out


def _nobody(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[::2] = float("-inf")
    return out


def _three_levels(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


def _forward(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    x = _values(spread, generator).to(device)
    mask = None
    if spread.mask is not None:
        mask = _moved(spread.mask(generator), device)
    if spread.lay is not None:
        x = spread.lay(x)
    return x, CAUSAL[spread.causal], spread.scale, mask


def _backward(
    forward: Callable[..., torch.Tensor], spread: Spread, device: torch.device | str, seed: int
) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    y = forward(_values(spread, generator), CAUSAL[spread.causal], spread.scale, None).to(device)
    dy = torch.randn(spread.shape, generator=generator).to(spread.dy or spread.x).to(device)
    if spread.lay is not None:
        y = spread.lay(y)
    if spread.dy_lay is not None:
        dy = spread.dy_lay(dy)
    return dy, y, CAUSAL[spread.causal], spread.scale


def _values(spread: Spread, generator: torch.Generator) -> torch.Tensor:
    values = 3 * torch.randn(spread.shape, generator=generator)
    if spread.fill is not None:
        values = spread.fill(values)
    return values.to(spread.x)


def _moved(mask: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """To the device with its strides, which `.to` would not keep where it was expanded."""
    if torch.device(device).type == "cpu":
        return mask
    storage = torch.empty(mask.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    storage.copy_(torch.empty(0, dtype=torch.uint8).set_(mask.untyped_storage()))
    there: Any = torch.empty(0, dtype=mask.dtype, device=device)
    moved: torch.Tensor = there.set_(
        storage.untyped_storage(), mask.storage_offset(), mask.size(), mask.stride()
    )
    return moved
