"""The order for the tensor cores before Blackwell: every bit in its place, and nothing lost."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import formats_truth as truth
import pytest
import torch
from formats_weights import E4M3, SHAPES, cleaned, packed, same, weight
from sampled import sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize, fragments, packing
from gristmill.formats.nvfp4.tensor import in_rows

STACKS = [(3, 65, 80), (2, 2, 64, 16)]


def rotated(word: int, right: int) -> int:
    return (word >> right | word << (32 - right)) & 0xFFFFFFFF


def pairs_of(first: int, second: int) -> list[int]:
    """What the kernels make of a thread's two words, before they mask it: eight pairs."""
    rest = (first & 0x60306030) | (rotated(second, 30) & ~0x60306030)
    found = [first, rotated(first, 4), first << 6, second, rotated(second, 4), second << 6]
    return [*found, rotated(rest, 8), rest << 2]


def code_in(pair: int, half: int) -> int:
    """The code whose bits a half has at 15 and 8 to 6."""
    bits = pair >> 16 * half
    return (bits >> 15 & 1) << 3 | (bits >> 6 & 7)


def scale_value(code: int) -> Fraction:
    if code == 0:
        return Fraction(0)
    return Fraction(8 + (code & 7), 8) * Fraction(2) ** ((code >> 3) - 20)


def test_every_bit_has_a_place_of_its_own() -> None:
    places = {place for pair in fragments.PLACES for half in pair for place in half}
    assert places == {(word, bit) for word in range(2) for bit in range(32)}


def test_every_value_is_where_its_thread_looks_for_it() -> None:
    q = weight(128, 192)
    codes, scales = fragments.pack(q.codes, q.scales)
    assert (codes.dtype, codes.shape) == (torch.uint8, (2, 3, 2048))
    assert (scales.dtype, scales.shape) == (torch.uint8, (2, 3, 256))
    wanted = cleaned(q)
    raw = q.scales.view(torch.uint8).tolist()
    for slab, chunk in ((0, 0), (1, 2)):
        words = codes[slab, chunk].view(torch.int32).tolist()
        for thread in range(128):
            warp, g, t = thread // 32, thread % 32 // 4, thread % 4
            for r in range(2):
                row = 16 * warp + 8 * r + g
                at = 4 * thread + 2 * r
                pairs = pairs_of(words[at] & 0xFFFFFFFF, words[at + 1] & 0xFFFFFFFF)
                for p, pair in enumerate(pairs):
                    byte = int(wanted[64 * slab + row, 32 * chunk + 4 * p + t])
                    assert (code_in(pair, 0), code_in(pair, 1)) == (byte & 15, byte >> 4)
                for j in range(4):
                    code = int(scales[slab, chunk, 64 * warp + 8 * g + 4 * r + j])
                    byte = raw[64 * slab + row][4 * chunk + j]
                    assert scale_value(code) == truth.e4m3_value(byte)


def test_every_code_beside_every_scale() -> None:
    codes = torch.tensor(
        [low | high << 4 for low, high in zip(*[iter(range(16))] * 2, strict=True)]
    )
    scales = torch.arange(127, dtype=torch.uint8).view(E4M3)[:, None]
    q = NVFP4Tensor(codes.to(torch.uint8).expand(127, 8), scales, torch.ones(127))
    exact = truth.values(q.codes, q.scales, q.row_scale)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        # e * s has at most six significant bits.
        assert torch.equal(dequantize(q.prepare("sm_80"), dtype).double(), exact)


def test_scales_are_the_same_numbers() -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    coded = fragments.encode_scales(every)
    assert coded[127:].tolist() == [255, 0, *[255] * 127]
    assert [scale_value(int(code)) for code in coded[:127]] == list(truth.E4M3)
    assert math.log2(scale_value(int(coded[1]))) == -9
    meaning = {int(code): byte for byte, code in enumerate(coded[:127])}
    back = fragments.decode_scales(every)
    assert back.tolist() == [meaning.get(code, 127) for code in range(256)]


@pytest.mark.parametrize("shape", [*SHAPES, *STACKS, (0, 16), (16, 0), (0, 5, 32)])
def test_nothing_is_lost(shape: tuple[int, ...]) -> None:
    q = weight(*shape)
    p = packed(q)
    assert p.shape == q.shape == shape
    assert p.columns == shape[-1]
    whole = (*shape[:-2], -(-shape[-2] // 64), -(-shape[-1] // 64))
    assert (p.codes.shape, p.scales.shape) == ((*whole, 2048), (*whole, 256))
    assert p.nbytes == math.prod(whole) * 2304 + math.prod(shape[:-1]) * 4
    assert torch.equal(dequantize(p), dequantize(q))
    assert same(p.unpack(), NVFP4Tensor(cleaned(q), q.scales, q.row_scale))
    rows = in_rows(p.codes, p.scales, *shape[-2:], "fragments")
    assert same(NVFP4Tensor(*rows, q.row_scale), p.unpack())


def test_what_is_padded_is_zero() -> None:
    q = weight(65, 80, zeros=False)
    codes, scales = fragments.pack(q.codes, q.scales)
    back, back_scales = fragments.unpack(codes, scales, 128, 128)
    for part, (rows, columns) in ((back, (65, 40)), (back_scales.view(torch.uint8), (65, 5))):
        assert part[:rows, :columns].any()
        assert not part[rows:].any()
        assert not part[:, columns:].any()


@pytest.mark.parametrize("zero", [0, 128])
def test_beside_a_scale_of_zero_all_is_zero(zero: int) -> None:
    scales = torch.full((64, 4), 56, dtype=torch.uint8)
    scales[:, 1] = zero
    q = NVFP4Tensor(
        torch.full((64, 32), 0x7F, dtype=torch.uint8), scales.view(E4M3), torch.ones(64)
    )
    codes, coded = packing.unpack(*packing.pack(q.codes, q.scales), 64, 64)
    assert not codes[:, 8:16].any()
    assert (codes[:, :8] == 0x7F).all()
    assert (codes[:, 16:] == 0x7F).all()
    assert coded.view(torch.uint8)[0].tolist() == [56, 0, 56, 56]


@pytest.mark.parametrize("piece", [1, 7000, 20000])
def test_a_large_weight_goes_piece_by_piece(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for q in (weight(300, 208), weight(2, 130, 64)):
        whole, back = packed(q), packed(q).unpack()
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_PIECE", piece)
            assert same(packed(q), whole)
            assert same(whole.unpack(), back)


def test_any_strides() -> None:
    q = weight(130, 208)
    codes = torch.zeros(130, 301, dtype=torch.uint8)[:, 3:107].copy_(q.codes)
    scales = (
        torch.zeros(13, 130, dtype=torch.uint8).t().copy_(q.scales.view(torch.uint8)).view(E4M3)
    )
    strided = NVFP4Tensor(codes, scales, q.row_scale)
    assert not strided.codes.is_contiguous()
    assert not strided.scales.is_contiguous()
    for in_place in (False, True):
        assert same(strided.prepare("sm_90a", in_place=in_place), q.prepare("sm_90a"))
    assert same(strided, q)
    p = q.prepare("sm_90a")
    wide = torch.zeros(*p.codes.shape[:-1], 4096, dtype=torch.uint8)[..., ::2].copy_(p.codes)
    assert same(PackedNVFP4(wide, p.scales, p.row_scale, "fragments", 208).unpack(), p.unpack())


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_packed_bytes_may_begin_anywhere(offset: int) -> None:
    p = packed(weight(2, 65, 80))
    moved = [
        torch.empty(part.numel() + offset, dtype=torch.uint8)[offset:].view(part.shape).copy_(part)
        for part in (p.codes, p.scales)
    ]
    q = PackedNVFP4(*moved, p.row_scale, "fragments", 80)
    assert torch.equal(dequantize(q), dequantize(p))
    assert same(q.unpack(), p.unpack())
    rows = fragments.unpack(*moved, 65, 80)  # as where torch traces
    assert same(NVFP4Tensor(*rows, q.row_scale), p.unpack())


def test_kernels_are_given_aligned_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def by_kernel(function: str, *parts: Any) -> bool:
        seen.extend(part.data_ptr() % 16 for part in parts[2:4])
        return False

    monkeypatch.setattr(packing, "_by_kernel", by_kernel)
    p = weight(64, 64).prepare("sm_90a")
    odd = [
        torch.empty(part.numel() + 8, dtype=torch.uint8)[8:].view(part.shape).copy_(part)
        for part in (p.codes, p.scales)
    ]
    packing.unpack(*odd, 64, 64)
    assert seen == [0] * 4


def test_under_vmap() -> None:
    q = weight(3, 65, 80)
    one_by_one = packed(q)
    packs = torch.vmap(fragments.pack)(q.codes, q.scales)
    assert torch.equal(packs[0], one_by_one.codes)
    assert torch.equal(packs[1], one_by_one.scales)
    back = torch.vmap(lambda codes, scales: packing.unpack(codes, scales, 65, 80))(*packs)
    assert same(NVFP4Tensor(*back, q.row_scale), one_by_one.unpack())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"columns": None}, ArgumentError, "columns must be K in layout 'fragments'.* got None"),
        ({"columns": 80.0}, ArgumentError, "columns must be K in layout 'fragments'.* got 80.0"),
        ({"columns": 72}, ArgumentError, "columns must be a multiple of 16"),
        (
            {
                "columns": -16,
                "codes": torch.zeros(2, 0, 2048).byte(),
                "scales": torch.zeros(2, 0, 256).byte(),
            },
            ArgumentError,
            "columns must be a multiple of 16 .* got -16",
        ),
        (
            {"columns": 64},
            ArgumentError,
            r"codes must have shape \(2, 1, 2048\).* got \(2, 2,",
        ),
        ({"codes": torch.zeros(2, 2, 2048)}, DtypeError, "codes must be a tensor of torch.uint8"),
        ({"scales": torch.zeros(2, 2, 256).to(E4M3)}, DtypeError, "scales must be .* got .*e4m3fn"),
        ({"scales": torch.zeros(2, 256).byte()}, ArgumentError, r"scales must .* got \(2, 256\)"),
        ({"row_scale": torch.ones(129)}, ArgumentError, r"codes must have shape \(3, 2, 2048\)"),
        ({"row_scale": torch.ones(())}, ArgumentError, r"row_scale \(\.\.\., N\), got 80 and \(\)"),
        ({"row_scale": None}, DtypeError, "row_scale must be a tensor of .* got NoneType"),
    ],
)
def test_wrong_fragments_are_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    p = weight(65, 80).prepare("sm_80")
    right = {"codes": p.codes, "scales": p.scales, "row_scale": p.row_scale, "columns": 80}
    PackedNVFP4(**right, layout="fragments")
    with pytest.raises(error, match=f"PackedNVFP4: .*{message}"):
        PackedNVFP4(**{**right, **changed}, layout="fragments")


def test_on_another_device() -> None:
    p = weight(65, 80).prepare("sm_80")
    moved = p.to("meta")
    assert (moved.device.type, moved.layout, moved.shape) == ("meta", "fragments", (65, 80))
    assert same(p.to("cpu"), p)
    assert weight(65, 80).to("meta").prepare("sm_80").codes.shape == (2, 2, 2048)
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, p)
        assert dequantize(fake).shape == (65, 80)
        again = pytree.tree_map(mode.from_tensor, weight(64, 64)).prepare("sm_80", in_place=True)
        assert again.codes.shape == (1, 1, 2048)


@pytest.mark.parametrize("in_place", sampled([True, False], 2))
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_prepared_in_a_compiled_function(arch: str, in_place: bool) -> None:
    def run(q: NVFP4Tensor) -> torch.Tensor:
        return dequantize(q.prepare(arch, in_place=in_place))

    q, kept = weight(128, 64), weight(128, 64)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), dequantize(kept))
    assert same(q, kept)
