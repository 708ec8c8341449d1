"""The kernels of NVFP4 weights on calls that nobody thought of, run on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import test_emulated_nvfp4_dequantize as decoding
import test_emulated_nvfp4_mma as mma
import torch
from emulated_host import EmulatedHost
from fuzz_emulated import (
    DENSE,
    ORDERS,
    Guards,
    Numbers,
    Place,
    examples,
    given,
    numbers,
    placed,
    st,
)
from test_emulated_nvfp4_pack import (
    Device,
    device,  # noqa: F401 - a fixture
    emulator,  # noqa: F401 - a fixture
    equal,
)

from gristmill.formats.nvfp4 import fragments, packing
from gristmill.formats.nvfp4.tensor import E4M3, decode_blocks
from gristmill.ops.nvfp4_linear import finish
from gristmill.ops.nvfp4_linear.dequantized import TYPES, Piece, dequantize_program
from gristmill.select.device import KNOWN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
H200 = KNOWN["sm_90a"]
# A factor is multiplied by a power of two first: the largest would overflow.
FACTORS = ("zero", "-zero", "normal")


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=generator).to(torch.uint8)


# ---- codes and scales into fragments and back ----


@st.composite
def weights(draw: Any) -> tuple[torch.Tensor, torch.Tensor, bool, int]:
    """Any bytes, as aligned as they come; `pairs` of rows are of gate and up."""
    pairs = draw(st.booleans())
    rows = 16 * draw(st.integers(1, 12)) if pairs else draw(st.integers(1, 200))
    blocks = draw(st.one_of(st.integers(1, 12), st.integers(1, 70)))
    leading = [draw(st.integers(1, 3))] if draw(st.booleans()) else []
    seed = draw(st.integers(0, 1 << 20))
    unit = draw(st.sampled_from([16, 8, 1]))
    some = st.integers(0, 3)
    place = Place(unit * draw(some), unit * draw(some), unit * draw(some))
    codes = placed(_bytes(seed, *leading, rows, blocks * 8), place)
    unit = draw(st.sampled_from([4, 1]))
    place = Place(unit * draw(some), unit * draw(some), unit * draw(some))
    scales = placed(_bytes(seed + 1, *leading, rows, blocks), place)
    return codes, scales, pairs, draw(ORDERS)


def check_packing(
    there: Device, codes: torch.Tensor, scales: torch.Tensor, pairs: bool, order: int
) -> None:
    there.order, there.names = order, []
    guards = Guards((codes, scales))
    packed = packing.pack(codes, scales.view(E4M3), pairs=pairs)
    guards.check()
    assert equal(packed, fragments.pack(codes, scales, pairs=pairs))
    sizes = codes.shape[-2], codes.shape[-1] * 2
    back = packing.unpack(*packed, *sizes, pairs=pairs)
    assert equal(back, fragments.unpack(*packed, *sizes, pairs=pairs))
    assert [name.partition("<")[0] for name in there.names] == ["pack", "unpack"]


# ---- and into numbers ----


@st.composite
def pieces(draw: Any) -> dict[str, Any]:
    rows, blocks = draw(st.integers(1, 200)), draw(st.integers(1, 40))
    top = 64 * draw(st.integers(0, (rows - 1) // 64))
    left = 64 * draw(st.integers(0, (blocks * 16 - 1) // 64))
    # A piece ends with a slab and with a chunk, or with the weight.
    bottom = min(rows, top + 64 * draw(st.integers(1, 4)))
    right = min(blocks * 16, left + 64 * draw(st.integers(1, 10)))
    dtype = draw(st.sampled_from(list(TYPES)))
    factor = None
    if dtype != E4M3 and draw(st.booleans()):
        factor = placed(draw(numbers(FACTORS, sizes=(0,))).tensor((rows,), F32), DENSE)
    return {
        "seed": draw(st.integers(0, 1 << 20)),
        "shape": (rows, blocks * 16),
        "piece": Piece(range(top, bottom), range(left, right)),
        "dtype": dtype,
        "factor": factor,
        "order": draw(ORDERS),
    }


def check_decoding(
    host: EmulatedHost,
    seed: int,
    shape: tuple[int, int],
    piece: Piece,
    dtype: torch.dtype,
    factor: torch.Tensor | None,
    order: int,
) -> None:
    """Bit by bit, of all scales but NaN."""
    rows, columns = shape
    codes = _bytes(seed, rows, columns // 2)
    scales = (_bytes(seed + 1, rows, columns // 16) % 127).view(E4M3)
    packed = fragments.pack(codes, scales)
    there = tuple(placed(one.reshape(1, -1), DENSE).view(one.shape) for one in packed)
    guards = Guards((*there, factor))
    whole = (*there, None)
    run = decoding._decode(host, whole, dtype, piece, factor, order)  # type: ignore[arg-type]
    guards.check()
    expected = decoding._rounded(decode_blocks(codes, scales, F32), dtype, factor)
    part = expected.float()[piece.rows.start : piece.rows.stop]
    part = part[:, piece.columns.start : piece.columns.stop]
    torch.testing.assert_close(run.outputs.float(), part, rtol=0, atol=0, equal_nan=True)


# ---- from sums to results ----


@st.composite
def results(draw: Any) -> dict[str, Any]:
    height, width = draw(st.integers(1, 40)), 8 * draw(st.integers(1, 60))
    top, left = draw(st.integers(0, height - 1)), 8 * draw(st.integers(0, width // 8 - 1))
    rows = draw(st.integers(1, height - top))
    columns = 8 * draw(st.integers(1, (width - left) // 8))
    return {
        "shape": (height, width),
        "at": (top, left),
        "total": placed(draw(numbers(sizes=(0, 6))).tensor((rows, columns), F32), DENSE),
        "scale": draw(numbers(sizes=(0, -6))),
        "token": draw(st.one_of(st.none(), numbers(sizes=(0,)))),
        "shift": draw(st.one_of(st.none(), numbers(sizes=(0,)))),
        "dtype": draw(st.sampled_from(list(finish.TYPES))),
        "order": draw(ORDERS),
    }


def check_finish(
    host: EmulatedHost,
    shape: tuple[int, int],
    at: tuple[int, int],
    total: torch.Tensor,
    scale: Numbers,
    token: Numbers | None,
    shift: Numbers | None,
    dtype: torch.dtype,
    order: int,
) -> None:
    (top, left), (rows, columns) = at, total.shape
    out = placed(torch.full(shape, 77.0).to(dtype), DENSE)
    by_column = placed(scale.tensor(shape[1:], F32), DENSE)
    by_row = None if token is None else placed(token.tensor((rows, 1), F32), DENSE)
    added = None if shift is None else placed(shift.tensor(shape[1:], F32), DENSE)

    def bind(problem: Any, config: Any) -> Any:
        given = {"token": by_row is not None, "shift": added is not None}
        one = finish.Finish(H200, dtype, shape[1], [(rows, columns)], **given)
        return lambda total, scale, out, token, shift: one(
            total, scale, out, at=at, token=token, shift=shift
        )

    args = (total, by_column, out, by_row, added)
    guards = Guards(args, written=(2,))
    run = host.run(SimpleNamespace(bind=bind), None, None, args, written=(2,), order=order)  # type: ignore[arg-type]
    guards.check()
    assert len(run.calls) == 1
    part = out[top : top + rows, left : left + columns]
    around = torch.ones(shape, dtype=torch.bool)
    around[top : top + rows, left : left + columns] = False
    assert (out[around] == 77).all()
    factor = total.double() * (1.0 if by_row is None else by_row.double())
    exact = factor * by_column[left : left + columns].double()
    size, largest = exact.abs(), torch.maximum(factor.abs(), exact.abs())
    if added is not None:
        exact = exact + added[left : left + columns].double()
        size = size + added[left : left + columns].double().abs()
    # What fp32 does not hold on the way is infinite, or too small to tell.
    doubtful = (largest > 2.0**125) & largest.isfinite()
    tiny = (factor.abs() < 2.0**-125) & (factor != 0) & (exact.abs() > 2.0**-125)
    error = (part.double() - exact).abs()
    allowed = size * 3 * 2.0**-24 + exact.abs() * torch.finfo(dtype).eps * 0.51
    close = error <= allowed + max(
        torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 2.0**-125
    )
    same = (part.double() == exact) | (part == exact.to(dtype)) | (part.isnan() & exact.isnan())
    assert (close | same | doubtful | tiny).all()


# ---- products ----


@st.composite
def products(draw: Any) -> dict[str, Any]:
    config = draw(st.sampled_from(mma.CONFIGS))
    tokens = draw(st.integers(1, 3 * config.tokens if config.tokens < 32 else config.tokens + 3))
    unit = 8
    dtype = draw(st.sampled_from([BF16, F16]))
    call = mma.Call(tokens, draw(st.integers(1, 140)), 16 * draw(st.integers(1, 40)), dtype)
    place = Place(unit * draw(st.integers(0, 3)), unit * draw(st.integers(0, 3)))
    kinds = ("nan", "inf", "-inf", "zero", "-zero", "least", "normal")
    return {
        "config": config,
        "call": call,
        "x": draw(numbers(kinds, sizes=(0, -6))),
        "place": place,
        "order": draw(st.integers(0, 1)),
    }


def check_product(
    host: EmulatedHost, config: Any, call: mma.Call, x: Numbers, place: Place, order: int
) -> None:
    """As exact as fp32 sums are; a token that is not finite spoils its own results."""
    values = x.tensor((call.tokens, call.columns), call.dtype)
    args = call.arguments(placed(values, place))
    guards = Guards(args)
    y = mma._run(host, args, config, order=order).outputs
    guards.check()
    weight = call.weight().whole(torch.float64)
    finite = values.isfinite().all(-1)
    wide = values[finite].double()
    error = (y[finite].double() - wide @ weight.t()).abs()
    assert (error <= 2.0**-20 * (wide.abs() @ weight.t().abs()) + 2.0**-120).all()
    used = (weight != 0).double() @ (~values.isfinite()).double().t() > 0
    assert not y.isfinite()[used.t()].any()


# ---- the tests ----


@pytest.fixture(autouse=True)
def _built(host: EmulatedHost) -> None:
    programs = [dequantize_program(dtype) for dtype in TYPES]
    programs += [dequantize_program(dtype, factor=True) for dtype in decoding.FLOATS]
    for dtype in finish.TYPES:
        for token in (False, True):
            for shift in (False, True):
                programs.append(finish.finish_program(dtype, token=token, shift=shift))
    for config in mma.CONFIGS:
        for dtype in (BF16, F16):
            problem = mma._problem(mma.Call(1, 64, 64, dtype).arguments())
            programs.append(mma.Mma().program(problem, config))
    host.build(programs)


@examples(40)
@given(call=weights())
def test_any_packing(device: Device, call: Any) -> None:  # noqa: F811 - the fixture
    check_packing(device, *call)


@examples(40)
@given(call=pieces())
def test_any_piece(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_decoding(host, **call)


@examples(40)
@given(call=results())
def test_any_result(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_finish(host, **call)


@examples(25)
@given(call=products())
def test_any_product(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_product(host, **call)


@pytest.mark.long
@examples(1500)
@given(call=weights())
def test_many_packings(device: Device, call: Any) -> None:  # noqa: F811 - the fixture
    check_packing(device, *call)


@pytest.mark.long
@examples(1500)
@given(call=pieces())
def test_many_pieces(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_decoding(host, **call)


@pytest.mark.long
@examples(1500)
@given(call=results())
def test_many_results(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_finish(host, **call)


@pytest.mark.long
@examples(500)
@given(call=products())
def test_many_products(host: EmulatedHost, call: dict[str, Any]) -> None:
    check_product(host, **call)
