"""Weights of gate and up in pairs: every row in its place, and nothing lost on the way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from formats_weights import cleaned, packed, same, weight
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize, fragments, packing
from gristmill.formats.nvfp4.tensor import in_rows, layout_of
from gristmill.ops.nvfp4_common import Weight, check_weight, parts_of

# Whole slabs, halves that end within one, less than one; columns in whole chunks and in parts.
SHAPES = [
    (16, 16),
    (48, 80),
    (64, 64),
    (96, 48),
    (128, 192),
    (160, 80),
    (3, 96, 64),
    (2, 2, 80, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_and_up_lie_side_by_side(shape: tuple[int, ...]) -> None:
    """By the definition: row by row."""
    q = weight(*shape)
    half = shape[-2] // 2
    order = []
    for row in range(shape[-2]):
        block, number = divmod(row, 16)
        order.append(8 * block + number if number < 8 else half + 8 * block + number - 8)
    assert sorted(order) == list(range(shape[-2]))
    moved = NVFP4Tensor(
        q.codes[..., order, :],
        q.scales.view(torch.uint8)[..., order, :].view(q.scales.dtype),
        q.row_scale,
    )
    expected, p = packed(moved), packed(q, pairs=True)
    assert torch.equal(p.codes, expected.codes)
    assert torch.equal(p.scales, expected.scales)
    assert torch.equal(p.row_scale, q.row_scale)  # in the order of the checkpoint


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (16, 0), (0, 32, 32)], ids=str)
def test_nothing_is_lost(shape: tuple[int, ...]) -> None:
    q = weight(*shape)
    p = packed(q, pairs=True)
    assert (p.layout, p.shape, p.columns) == ("pairs", q.shape, shape[-1])
    assert p.nbytes == packed(q).nbytes
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(dequantize(p, dtype), dequantize(q, dtype))
    assert same(p.unpack(), NVFP4Tensor(cleaned(q), q.scales, q.row_scale))
    rows = in_rows(p.codes, p.scales, *shape[-2:], "pairs")
    assert same(NVFP4Tensor(*rows, q.row_scale), p.unpack())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "cpu"])
@pytest.mark.parametrize("shape", [(128, 64), (3, 128, 64), (2, 48, 80)], ids=str)
def test_prepared_for_any_gpu_the_values_are_the_same(
    shape: tuple[int, ...], arch: str, in_place: bool
) -> None:
    kept = weight(*shape)
    p = weight(*shape).prepare(arch, in_place=in_place, pairs=True)
    assert p.layout == layout_of(arch, len(shape) > 2, pairs=True)
    plain = layout_of(arch, len(shape) > 2)
    assert p.layout == ("pairs" if plain == "fragments" else plain)
    assert torch.equal(dequantize(p), dequantize(kept))


@pytest.mark.parametrize("piece", [1, 3000, 9000])
def test_a_large_weight_goes_piece_by_piece(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for q in (weight(304, 208), weight(2, 160, 64)):
        whole = packed(q, pairs=True)
        back = whole.unpack()
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_PIECE", piece)
            assert same(packed(q, pairs=True), whole)
            assert same(whole.unpack(), back)


def test_other_orders_of_memory() -> None:
    q = weight(3, 48, 80)
    expected = packed(q, pairs=True)
    codes = torch.zeros(48, 3, 77, dtype=torch.uint8)[..., 7:47].transpose(0, 1).copy_(q.codes)
    strided = NVFP4Tensor(codes, q.scales, q.row_scale)
    assert same(packed(strided, pairs=True), expected)
    many = weight(6, 48, 80)
    shuffled = NVFP4Tensor(
        *(part.unflatten(0, (2, 3)).transpose(0, 1) for part in (many.codes, many.scales)),
        many.row_scale.unflatten(0, (2, 3)).transpose(0, 1),
    )
    assert torch.equal(dequantize(packed(shuffled, pairs=True)), dequantize(shuffled))


@pytest.mark.parametrize("rows", [1, 8, 15, 24, 40])
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_halves_that_cannot_be_paired_are_refused(rows: int, arch: str) -> None:
    """On every device, so that nobody learns of it on the last."""
    with pytest.raises(
        ArgumentError, match=f"prepare: pairs are .* must be a multiple of 16, got {rows}"
    ):
        weight(2, rows, 32).prepare(arch, pairs=True)
    p = packed(weight(rows, 32))
    with pytest.raises(ArgumentError, match=f"PackedNVFP4: pairs .*16, got {rows}"):
        PackedNVFP4(p.codes, p.scales, p.row_scale, "pairs", 32)


def test_wrong_parts_are_refused() -> None:
    p = packed(weight(96, 80), pairs=True)
    with pytest.raises(ArgumentError, match=r"columns must be K in layout 'pairs'.* got None"):
        PackedNVFP4(p.codes, p.scales, p.row_scale, "pairs")
    with pytest.raises(ArgumentError, match=r"codes must have shape \(2, 1, 2048\) .*'pairs'"):
        PackedNVFP4(p.codes, p.scales, p.row_scale, "pairs", 64)


def test_pairs_travel_as_pairs() -> None:
    p = packed(weight(2, 48, 80), pairs=True)
    copies = [
        copy.deepcopy(p),
        pickle.loads(pickle.dumps(p)),
        p.to("cpu"),
        pytree.tree_map(torch.clone, p),
    ]
    for other in copies:
        assert (other.layout, other.columns, other.scales.dtype) == ("pairs", 80, torch.uint8)
        assert same(other, p)
    fragmented = PackedNVFP4(p.codes, p.scales, p.row_scale, "fragments", 80)
    assert pytree.tree_structure(fragmented) != pytree.tree_structure(p)
    assert "layout='pairs'" in repr(p)
    moved = p.to("meta")
    assert (moved.layout, moved.shape) == ("pairs", (2, 48, 80))
    with FakeTensorMode() as mode:
        assert dequantize(pytree.tree_map(mode.from_tensor, p)).shape == (2, 48, 80)


def test_under_vmap_and_in_a_compiled_function() -> None:
    q = weight(3, 48, 80)
    one_by_one = packed(q, pairs=True)
    packs = torch.vmap(lambda *parts: fragments.pack(*parts, pairs=True))(q.codes, q.scales)
    assert torch.equal(packs[0], one_by_one.codes)
    assert torch.equal(packs[1], one_by_one.scales)

    def run(q: NVFP4Tensor) -> torch.Tensor:
        return dequantize(q.prepare("sm_90a", pairs=True))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), dequantize(q))


# --- as the ops read them


def ranges(rows: int) -> Iterator[range]:
    """Of gate, of up, of both; from within a run of eight rows, and at its ends."""
    ends = sorted({0, 3, 8, 16, rows // 2 - 5, rows // 2, rows // 2 + 8, rows - 32, rows - 1, rows})
    inside = [end for end in ends if 0 <= end <= rows]
    yield from (range(a, b) for a in inside for b in inside if a <= b)


@pytest.mark.parametrize("shape", [(2, 80, 96), (128, 64), (16, 16), (3, 208, 80)], ids=str)
def test_any_rows_come_in_the_order_of_the_checkpoint(shape: tuple[int, ...]) -> None:
    q = weight(*shape)
    given, held = parts_of("op", "w", q), parts_of("op", "w", packed(q, pairs=True))
    assert (held.layout, held.rows, held.columns) == ("pairs", *shape[-2:])
    assert torch.equal(held.whole(torch.float64), given.whole(torch.float64))
    exact = given.blocks(torch.float32)
    for rows in ranges(shape[-2]):
        for columns in (range(shape[-1]), range(16, shape[-1]), range(16)):
            wanted = exact[..., rows.start : rows.stop, columns.start : columns.stop]
            assert torch.equal(held.blocks(torch.float32, rows, columns), wanted), rows


def test_some_experts() -> None:
    q = weight(4, 96, 64)
    given, held = parts_of("op", "w", q), parts_of("op", "w", packed(q, pairs=True))
    for experts in (slice(1, 3), torch.tensor([3, 0, 3])):
        for rows in (None, range(8, 40), range(56, 96)):
            found = held.blocks(torch.bfloat16, rows, range(16, 48), experts)
            assert torch.equal(found, given.blocks(torch.bfloat16, rows, range(16, 48), experts))
    one = held.expert(2)
    assert torch.equal(one.blocks(torch.float32), given.expert(2).blocks(torch.float32))


def test_only_the_slabs_that_are_asked_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    unpack = packing.unpack

    def watched(codes: torch.Tensor, *others: object, **options: bool) -> object:
        seen.append(codes.shape[-3])
        return unpack(codes, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "unpack", watched)
    held = parts_of("op", "w", packed(weight(512, 64), pairs=True))
    assert held.least == (32, 64)
    for rows, slabs in (
        (range(32, 64), [1]),
        (range(256 + 32, 256 + 64), [1]),
        (range(31, 65), [3]),
        (range(256, 512), [8]),
        (range(248, 264), [1, 1]),
        (range(512), [8]),
    ):
        seen.clear()
        held.blocks(torch.float32, rows)
        assert seen == slabs, rows


def test_pairs_are_for_experts() -> None:
    device = torch.device("cpu")
    held = parts_of("op", "w", packed(weight(2, 96, 64), pairs=True))
    check_weight("op", "w13_", held, 3, device)
    with pytest.raises(ArgumentError, match=r"op: layout must be .* got 'pairs', which is for w13"):
        check_weight("op", "", held.expert(0), 2, device)
    odd = Weight(held.codes, held.scales, held.row_scale[:, :88], "pairs", 64)
    with pytest.raises(ArgumentError, match=r"op: w13_codes: pairs are .*, got 88"):
        check_weight("op", "w13_", odd, 3, device)
    short = Weight(held.codes[:, :1], held.scales, held.row_scale, "pairs", 64)
    with pytest.raises(ArgumentError, match=r"w13_codes must have shape \(2, 2, 1, 2048\)"):
        check_weight("op", "w13_", short, 3, device)
