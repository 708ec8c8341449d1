"""Run the Triton variant of `nvfp4_linear` on the CPU, in Triton's interpreter: the child of
test_triton_nvfp4.py, which sets TRITON_INTERPRET=1.

As in triton_interpreted.py, everything but the launch is what runs on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton_interpreted
from triton_interpreted import BF16, F16, F32

from gristmill.formats.nvfp4.tensor import BLOCK, decode_blocks, scales_in_rows
from gristmill.formats.nvfp4.tiles import swizzle
from gristmill.ops.nvfp4_linear import cases
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.ops.nvfp4_linear.triton import TritonLinear
from gristmill.ops.nvfp4_linear.triton_configs import RowsConfig
from gristmill.select.device import KNOWN

triton_interpreted.TYPES.update(u8=torch.uint8, i8=torch.int8)
DEVICE = KNOWN["sm_90a"]
VARIANT = TritonLinear()
SMALL = RowsConfig(8, 32, 64, stages=3, warps=4)


@dataclass(frozen=True)
class Shape:
    """A call: sizes, dtypes, layout, and where the parts of the weight lie."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype = BF16
    layout: str = "rows"
    bias: torch.dtype | None = None
    out: torch.dtype | None = None
    act: str | None = None


def _weight(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every code and every scale that is a number, subnormal and negative ones too."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.int32)

    codes = drawn(shape.columns, shape.depth // 2).to(torch.uint8)
    scales = drawn(shape.columns, shape.depth // BLOCK)
    scales = torch.where((scales & 127) == 127, 5, scales).to(torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    row_scale = torch.rand(shape.columns, generator=generator) * 1e-3
    return codes, swizzle(scales) if shape.layout == "tiles" else scales, row_scale


def _arguments(shape: Shape) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape.rows, shape.depth, generator=generator).to(shape.dtype)
    bias = None
    if shape.bias is not None:
        bias = torch.randn(shape.columns, generator=generator).to(shape.bias)
    return (x, *_weight(shape), bias, shape.layout, shape.out, shape.act)


def _run(config: RowsConfig | None, arguments: tuple[Any, ...]) -> torch.Tensor:
    problem = forward_problem(DEVICE, *arguments)
    reason = VARIANT.supports(problem)
    assert reason is None, reason
    config = VARIANT.config(problem) if config is None else config
    result: torch.Tensor = VARIANT.bind(problem, config)(*arguments)
    return result


def _check(config: RowsConfig | None, arguments: tuple[Any, ...], what: object) -> None:
    """Against fp64 products of exact values."""
    x, codes, scales, row_scale, bias, layout, out, _ = arguments
    got = _run(config, arguments)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    ordered = scales_in_rows(scales, rows, columns, layout)
    values = decode_blocks(codes, ordered, torch.float64) * row_scale.double().unsqueeze(-1)
    wanted, terms = x.double() @ values.t(), x.double().abs() @ values.t().abs()
    if bias is not None:
        wanted, terms = wanted + bias.double(), terms + bias.double().abs()
    assert got.shape == wanted.shape, what
    assert got.dtype == (out or x.dtype), what
    triton_interpreted._compare(got, wanted, terms, f"{what} {config}")


def shapes() -> None:
    for layout in ("rows", "tiles"):
        for shape in (
            Shape(8, 64, 128, layout=layout),
            Shape(1, 1, 16, layout=layout),
            Shape(11, 37, 80, layout=layout),
            Shape(3, 200, 208, F16, layout),
            Shape(9, 130, 336, layout=layout),
        ):
            _check(SMALL, _arguments(shape), shape)
    wide = RowsConfig(16, 128, 128, stages=3, warps=4)
    for layout in ("rows", "tiles"):
        _check(wide, _arguments(Shape(17, 150, 272, F16, layout)), layout)
        # One tile of scales beyond the last whole step.
        _check(wide, _arguments(Shape(2, 129, 192, BF16, layout)), layout)


def dtypes() -> None:
    for dtype in (BF16, F16):
        for bias, out in ((None, None), (BF16, F16), (F16, F32), (F32, BF16)):
            _check(SMALL, _arguments(Shape(5, 40, 64, dtype, bias=bias, out=out)), (bias, out))
    _check(SMALL, _arguments(Shape(5, 40, 64, act="fp8")), "a permission that is not used")


def split_k() -> None:
    for split, shape in (
        (2, Shape(8, 64, 256)),
        (2, Shape(5, 33, 208, F16, bias=F32)),
        (4, Shape(3, 130, 208, layout="tiles", bias=BF16, out=F32)),
        (8, Shape(3, 40, 144, out=F16)),  # some shares are empty
    ):
        config = RowsConfig(8, 32, 64, stages=3, warps=4, split_k=split)
        _check(config, _arguments(shape), shape)


def values() -> None:
    """One row of x picks one column: all products of a code and a scale, bit by bit."""
    for dtype in (BF16, F16):
        for layout in ("rows", "tiles"):
            scales = torch.tensor([byte for byte in range(256) if byte & 127 != 127])
            rows = len(scales)
            codes = torch.tensor([low | (15 - low) << 4 for low in range(16)], dtype=torch.uint8)
            codes = codes.expand(rows, 16).contiguous()
            spread = scales.to(torch.uint8)[:, None].expand(rows, 2).contiguous()
            spread = spread.view(torch.float8_e4m3fn)
            x = torch.eye(32, dtype=dtype)
            ordered = swizzle(spread) if layout == "tiles" else spread
            got = _run(None, (x, codes, ordered, torch.ones(rows), None, layout, F32, None))
            wanted = decode_blocks(codes, spread, torch.float64).t()
            assert torch.equal(got.double(), wanted), (dtype, layout)


def every_case() -> None:
    """The op's own cases, those that the variant takes."""
    taken = 0
    for case in cases.forward_cases():
        arguments = case.make("cpu", 1)
        if VARIANT.supports(forward_problem(DEVICE, *arguments)) is None:
            _check(None, arguments, case.name)
            taken += 1
    assert taken >= 25, taken


def bounds() -> None:
    """Nothing is read beyond the end of any tensor: the page after each may not be touched."""
    for layout in ("rows", "tiles"):
        for shape in (Shape(3, 34, 48, layout=layout), Shape(8, 128, 272, F16, layout, bias=F32)):
            x, *weight, bias, _, out, act = _arguments(shape)
            guarded = [_guarded(part) for part in (x, *weight)]
            shift = None if bias is None else _guarded(bias)
            for config in (SMALL, replace(SMALL, split_k=4), RowsConfig(16, 128, 256, 3, 4)):
                _check(config, (*guarded, shift, layout, out, act), shape)


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where a page does, before one that may not be read."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    last = -(-size // page) * page
    memory = mmap.mmap(-1, last + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + last), page, 0) == 0
    raw = torch.frombuffer(memory, dtype=torch.uint8, offset=last - size, count=size)
    return raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def rows_alone() -> None:
    """The bits of a row do not depend on how many there are, nor on which they are."""
    whole = _arguments(Shape(37, 48, 512, bias=F32))
    for config in (_invariant(whole), RowsConfig(16, 32, 64, 3, 4, split_k=2)):

        def run(start: int, stop: int, config: RowsConfig = config) -> torch.Tensor:
            return _run(config, (whole[0][start:stop], *whole[1:]))

        together = run(0, 37)
        for row in (0, 17, 36):
            assert torch.equal(run(row, row + 1)[0], together[row]), config
        assert torch.equal(run(5, 30), together[5:30]), config


def _invariant(arguments: tuple[Any, ...]) -> RowsConfig:
    """The config as it is asked for where rows must not depend on the batch."""
    problem = replace(forward_problem(DEVICE, *arguments), batch_invariant=True)
    return VARIANT.config(problem.asked())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        globals()[name]()
        sys.stdout.write(f"{name} {time.perf_counter() - begin:.1f} s\n")
