"""The kernel that dequantises weights in fragments, run on the CPU, alone and by its variant."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import emulator_for, readable, writable

from gristmill.formats.nvfp4 import fragments
from gristmill.formats.nvfp4.tensor import E4M3, decode_blocks
from gristmill.ops import nvfp4_common as common
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.dequantized import (
    PARAMS,
    TYPES,
    Cut,
    Decoder,
    Dequantized,
    Piece,
    cut,
    dequantize_program,
    ranges,
)
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN, Device

H200 = KNOWN["sm_90a"]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, F16, F32)
ORDERS = (0, 1, 7)
# Rows and columns: one piece, padding of both kinds, several groups of chunks in a slab.
SHAPES = ((64, 64), (1, 16), (70, 80), (128, 256), (65, 592), (200, 1040))


@pytest.fixture(autouse=True, scope="module")
def _built(pytestconfig: pytest.Config) -> None:
    programs = [dequantize_program(dtype) for dtype in TYPES]
    programs += [dequantize_program(dtype, factor=True) for dtype in FLOATS]
    emulator_for(pytestconfig).prepare(programs)


@functools.cache
def _weight(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Codes and scales in fragments, and the exact values in fp32; all scales but NaN occur."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    packed = fragments.pack(codes, scales.view(E4M3))
    values = decode_blocks(*fragments.unpack(*packed, rows, columns), F32)
    assert torch.equal(values, decode_blocks(codes, scales.view(E4M3), F32))
    return *packed, values


def _rounded(values: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None) -> torch.Tensor:
    if dtype == E4M3:
        return (values / 8).to(E4M3)
    return (values if factor is None else values * factor.unsqueeze(-1)).to(dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.contiguous().view(sizes[values.element_size()])


def _decode(
    host: EmulatedHost,
    weight: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    piece: Piece,
    factor: torch.Tensor | None = None,
    order: int = 0,
) -> Run:
    codes, scales, _ = weight

    def bind(problem: Any, config: Any) -> Callable[..., torch.Tensor]:
        decoder = Decoder(H200, codes.shape[1], dtype, [piece], factor=factor is not None)

        def plan(codes: torch.Tensor, scales: torch.Tensor, factor: Any) -> torch.Tensor:
            out = torch.empty(piece.shape, dtype=dtype)
            decoder(out, codes, scales, piece, factor)
            return out

        return plan

    args = (codes, scales, factor)
    return host.run(SimpleNamespace(bind=bind), None, None, args, order=order)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_value_is_exact(host: EmulatedHost, dtype: torch.dtype, shape: Any) -> None:
    rows, columns = shape
    weight = _weight(rows, columns)
    piece = Piece(range(rows), range(columns))
    expected = _rounded(weight[2], dtype, None)
    for order in ORDERS:
        run = _decode(host, weight, dtype, piece, order=order)
        assert torch.equal(_bits(run.outputs), _bits(expected))
    (traffic,) = run.traffic
    slabs, chunks = fragments.padded(rows, columns)
    # Each quad of lanes reads the same scales.
    assert traffic.loaded == slabs * chunks * (fragments.CODES + 4 * fragments.SCALES)
    assert traffic.stored == rows * columns * dtype.itemsize


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_factor_for_each_row_is_rounded_once_more(host: EmulatedHost, dtype: torch.dtype) -> None:
    weight = _weight(200, 1040)
    generator = torch.Generator().manual_seed(1)
    factor = torch.rand(200, generator=generator)
    factor[:3] = torch.tensor([1.0, 0.0, 0.5])
    run = _decode(host, weight, dtype, Piece(range(200), range(1040)), factor)
    expected = _rounded(weight[2], dtype, factor)
    assert torch.equal(_bits(run.outputs), _bits(expected))
    assert not torch.equal(run.outputs.float(), weight[2] * factor.unsqueeze(-1)) or dtype == F32


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "piece",
    [
        Piece(range(64, 128), range(64, 128)),
        Piece(range(128, 200), range(256)),
        Piece(range(64, 200), range(704, 1040)),
        Piece(range(64), range(320, 1040)),
        Piece(range(192, 200), range(1024, 1040)),
    ],
    ids=str,
)
def test_a_range_of_slabs_and_chunks(host: EmulatedHost, dtype: torch.dtype, piece: Piece) -> None:
    weight = _weight(200, 1040)
    factor = None if dtype == E4M3 else torch.linspace(0.25, 1, 200)
    run = _decode(host, weight, dtype, piece, factor)
    expected = _rounded(weight[2], dtype, factor)
    there = expected.float()[piece.rows.start : piece.rows.stop]
    there = there[:, piece.columns.start : piece.columns.stop]
    assert torch.equal(run.outputs.float(), there)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_may_lie_apart(host: EmulatedHost, dtype: torch.dtype) -> None:
    codes, scales, values = _weight(70, 80)
    out = torch.full((70, 96), 7.0, dtype=F32).to(dtype)
    program = dequantize_program(dtype)
    piece = Piece(range(70), range(80))
    pointers = codes.data_ptr(), scales.data_ptr(), 0, out.data_ptr()
    host.emulator.launch(
        program,
        program.names[0],
        PARAMS.pack(*pointers, 96, codes.shape[1], 70, 80, piece.groups),
        grid=piece.grid,
        block=128,
        buffers=[readable(codes), readable(scales), writable(out)],
    )
    expected = _rounded(values, dtype, None)
    assert torch.equal(_bits(out[:, :80]), _bits(expected))
    assert (out[:, 80:].float() == 7).all()


def _forward_args(
    shape: tuple[int, int, int],
    x_dtype: torch.dtype,
    bias: torch.dtype | None = None,
    out: torch.dtype | None = None,
) -> tuple[Any, ...]:
    lines, rows, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(lines, columns, generator=generator).to(x_dtype)
    weight = random_weight((rows, columns), "cpu", generator=generator, per_row=True)
    codes, scales = fragments.pack(weight.codes, weight.scales)
    shift = None if bias is None else torch.randn(rows, generator=generator).to(bias)
    return x, codes, scales, weight.row_scale, shift, "fragments", out, None


def _run(host: EmulatedHost, op: str, args: tuple[Any, ...], device: Device = H200) -> Run:
    problem = OPS[op].problem(*args, device=device)
    variant = Dequantized()
    assert variant.supports(problem) is None
    return host.run(variant, problem, None, args)


def _calls(run: Run) -> tuple[int, int]:
    """How often something was decoded, and how often something finished, by kernels."""
    sources = [call.program.source for call in run.calls]
    counts = sources.count("nvfp4_dequantize.cu"), sources.count("nvfp4_finish.cu")
    assert sum(counts) == len(sources)
    return counts


def _check(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, dtype: Any) -> None:
    """Within what fp32 sums and one rounding to `dtype` lose."""
    error = (found.double() - exact).abs()
    allowed = exact.abs() * torch.finfo(dtype).eps / 2 + size * 2.0**-20
    assert found.dtype == dtype
    assert (error <= allowed + torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize(("piece_bytes", "wide"), [(32 << 20, 2048), (40_000, 2048), (40_000, 64)])
@pytest.mark.parametrize("rows", [150, 200])
@pytest.mark.parametrize(
    ("x", "bias", "out"),
    [(BF16, None, None), (F16, F32, None), (F32, BF16, F16), (BF16, BF16, F32), (F32, None, None)],
    ids=str,
)
def test_forward(
    host: EmulatedHost,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    wide: int,
    rows: int,
    x: torch.dtype,
    bias: torch.dtype | None,
    out: torch.dtype | None,
) -> None:
    """In one piece; with sums cut; with the columns of the result cut, too."""
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("gristmill.ops.nvfp4_linear.dequantized.WIDE", wide)
    args = _forward_args((300, rows, 400), x, bias, out)
    run = _run(host, "nvfp4_linear", args)
    weight = common.Weight(*args[1:4], "fragments", 400).whole(torch.float64)
    exact = args[0].double() @ weight.t()
    size = args[0].double().abs() @ weight.abs().t()
    if bias is not None:
        exact = exact + args[4].double()
        size = size + args[4].double().abs()
    _check(run.outputs, exact, size, out or x)
    decoding, finishing = _calls(run)
    assert (decoding > 1) == (piece_bytes == 40_000)
    # Rows that are not aligned are left to torch.
    assert (finishing == 0) == (rows == 150)


@pytest.mark.parametrize("piece_bytes", [32 << 20, 40_000])
@pytest.mark.parametrize("dy", FLOATS, ids=str)
def test_backward(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, dy: torch.dtype
) -> None:
    monkeypatch.setattr(common, "PIECE_BYTES", piece_bytes)
    _, codes, scales, row_scale, *_ = _forward_args((300, 150, 400), F32)
    gradient = torch.randn(300, 150, generator=torch.Generator().manual_seed(5)).to(dy)
    args = (gradient, codes, scales, row_scale, "fragments", 400, F32)
    run = _run(host, "nvfp4_linear_backward", args)
    weight = common.Weight(codes, scales, row_scale, "fragments", 400).whole(torch.float64)
    exact = gradient.double() @ weight
    size = gradient.double().abs() @ weight.abs()
    # Rows of different scales are rounded to the dtype of the products.
    error = (run.outputs.double() - exact).abs()
    assert (error <= size * (torch.finfo(dy).eps / 2 + 2.0**-20)).all()
    assert run.outputs.dtype == F32


def test_a_single_global_scale_is_exact_backward(host: EmulatedHost) -> None:
    _, codes, scales, row_scale, *_ = _forward_args((9, 150, 400), F32)
    row_scale = torch.full_like(row_scale, 0.37)
    gradient = torch.randn(9, 150, generator=torch.Generator().manual_seed(5)).to(BF16)
    args = (gradient, codes, scales, row_scale, "fragments", 400, F32)
    run = _run(host, "nvfp4_linear_backward", args)
    weight = common.Weight(codes, scales, row_scale, "fragments", 400).whole(torch.float64)
    exact = gradient.double() @ weight
    size = gradient.double().abs() @ weight.abs()
    assert ((run.outputs.double() - exact).abs() <= size * 2.0**-20).all()


def test_a_weight_is_decoded_once_for_all_lines(
    host: EmulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums are whole: there are several pieces of lines, and of the weight."""
    args = _forward_args((300, 640, 64), BF16)
    monkeypatch.setattr(common, "PIECE_BYTES", 256 * 128 * 4)
    small = replace(H200, multiprocessors=4)
    assert cut(300, 640, 64, 2, 4) == Cut(256, 128, 64)
    run = _run(host, "nvfp4_linear", args, small)
    assert _calls(run) == (5, 10)
    whole = _run(host, "nvfp4_linear", args, replace(H200, multiprocessors=100))
    assert _calls(whole) == (1, 5)
    torch.testing.assert_close(run.outputs, whole.outputs)


@pytest.mark.parametrize("lines", [1, 128, 1000, 1024, 4096, 16384, 100_000])
@pytest.mark.parametrize(
    ("outer", "inner"), [(57344, 8192), (8192, 57344), (4096, 4096), (8192, 28672), (48, 16)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_stay_within_their_limit(lines: int, outer: int, inner: int, size: int) -> None:
    found = cut(lines, outer, inner, size, H200.multiprocessors)
    assert found.outer * found.inner * size <= common.PIECE_BYTES
    assert found.outer * found.lines * 4 <= common.PIECE_BYTES
    for total, step in ((outer, found.outer), (inner, found.inner)):
        assert step == total or step % 64 == 0
        assert 0 < step <= total
    # No piece is a small rest: the last one is not much smaller than the others.
    assert len(ranges(outer, found.outer)[-1]) * 2 > found.outer - 512
    tiles = -(-found.outer // 128) * -(-found.lines // 128)
    if min(outer, lines) >= 1024:
        assert tiles >= 128


def test_products_of_usual_layers() -> None:
    assert cut(4096, 57344, 8192, 2, 132) == Cut(4096, 2048, 8192)
    assert cut(1024, 57344, 8192, 2, 132) == Cut(1024, 2048, 8192)
    assert cut(1024, 8192, 28672, 2, 132) == Cut(1024, 2048, 7168)
    assert cut(16384, 8192, 28672, 2, 132) == Cut(16384, 512, 28672)


def test_what_it_cannot_do() -> None:
    args = _forward_args((5, 64, 64), BF16)
    op, variant = OPS["nvfp4_linear"], Dequantized()
    assert variant.supports(op.problem(*args, device=H200)) is None
    assert variant.supports(op.problem(*args, device=KNOWN["sm_80"])) is None
    assert "CUDA" in str(variant.supports(op.problem(*args)))
    rows = random_weight((64, 64), "cpu")
    in_rows = (args[0], *rows[:3], None, "rows", None, None)
    assert "fragments" in str(variant.supports(op.problem(*in_rows, device=H200)))
    double = (args[0].double(), *args[1:])
    assert "float64" in str(variant.supports(op.problem(*double, device=H200)))
    empty = (args[0][:0], *args[1:])
    assert "nothing" in str(variant.supports(op.problem(*empty, device=H200)))
    assert variant.varies_with_batch(op.problem(*args, device=H200)) is not None
    apart = torch.empty(1, 2, 2, fragments.CODES, dtype=torch.uint8)[:, :, 0]
    (lines, *rest) = _forward_args((5, 64, 128), BF16)
    spread = (lines, apart.copy_(rest[0]), *rest[1:])
    assert "contiguous" in str(variant.supports(op.problem(*spread, device=H200)))
