"""Weights in fragments are the same weights: results, gradients, graphs; how plans see a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, case_of, run_by, same_bits, supporting
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill import nvfp4
from gristmill.formats.nvfp4 import packing
from gristmill.ops import nvfp4_common
from gristmill.ops.nvfp4_common import Weight, pieces
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.problem import Details
from gristmill.ops.nvfp4_moe import moe_of
from gristmill.ops.registry import OPS

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LINEAR, MOE = OPS["nvfp4_linear"], OPS["nvfp4_moe"]
SIZES = [(1, 16), (5, 48), (33, 80), (64, 64), (130, 208), (257, 2048)]
over_sizes = pytest.mark.parametrize("shape", SIZES, ids=lambda shape: "x".join(map(str, shape)))


def both_layouts(
    *shape: int, device: str = "cpu", per_row: bool = True, pairs: bool = False
) -> tuple[Weight, Weight]:
    """One weight in rows and in fragments, or in pairs."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = random_weight(shape, "cpu", generator=generator, per_row=per_row)
    codes, scales = packing.pack(rows.codes, rows.scales, pairs=pairs)
    layout = "pairs" if pairs else "fragments"
    found = Weight(codes, scales, rows.row_scale, layout, shape[-1])
    return moved(rows, device), moved(found, device)


def moved(weight: Weight, device: str) -> Weight:
    return Weight(*(part.to(device) for part in weight[:3]), weight.layout, weight.width)


# --- values


@over_sizes
def test_the_values_are_those_of_rows(shape: tuple[int, int]) -> None:
    rows, found = both_layouts(*shape)
    assert (found.rows, found.columns) == (rows.rows, rows.columns) == shape
    assert same_bits(found.whole(FP64), rows.whole(FP64))
    assert same_bits(found.blocks(BF16), rows.blocks(BF16))


def test_any_part_of_a_weight() -> None:
    """Ranges of rows that begin and end within slabs, and blocks within chunks."""
    rows, found = both_layouts(3, 200, 208)
    everyone = rows.blocks(FP32)
    for some in (range(1), range(63, 65), range(70, 71), range(64, 128), range(129, 200)):
        for columns in (range(16), range(48, 80), range(64, 128), range(112, 208)):
            want = everyone[:, some.start : some.stop, columns.start : columns.stop]
            assert same_bits(found.blocks(FP32, some, columns), want)
            experts = torch.tensor([2, 0, 2])
            assert same_bits(found.blocks(FP32, some, columns, experts), want[experts])
            assert same_bits(found.blocks(FP32, some, columns, slice(1, 3)), want[1:])
    one = found.expert(1)
    assert same_bits(one.whole(FP64), rows.whole(FP64)[1])


def test_pieces_of_fragments_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slab or chunk is decoded twice for one call."""
    seen: list[tuple[range, range]] = []
    unpacked = Weight._unpacked

    def spy(self: Weight, rows: range, columns: range, experts: Any) -> Any:
        seen.append((rows, columns))
        return unpacked(self, rows, columns, experts)

    monkeypatch.setattr(Weight, "_unpacked", spy)
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", 200 << 10)
    _, weight = both_layouts(300, 272)
    x, dy = torch.randn(3, 272), torch.randn(3, 300)
    run_by(LINEAR, "library", (x, *weight[:3], None, "fragments", None, None))
    assert len(seen) > 2
    assert [one.start % 64 for one, _ in seen] == [0] * len(seen)
    assert sum(len(one) for one, _ in seen) == 300
    seen.clear()
    args = (dy, *weight[:3], "fragments", 272, FP32)
    run_by(OPS["nvfp4_linear_backward"], "library", args)
    assert len(seen) > 2
    assert [one.start % 64 for _, one in seen] == [0] * len(seen)
    assert sum(len(one) for _, one in seen) == 272


def test_pieces_of_many() -> None:
    assert list(pieces(200, 150, 64)) == [range(128), range(128, 200)]
    assert [part.start for part in pieces(200, 10, 64)] == [0, 64, 128, 192]
    assert list(pieces(50, 20)) == [range(16), range(16, 32), range(32, 48), range(48, 50)]
    assert list(pieces(50, 7)) == [range(at, min(at + 7, 50)) for at in range(0, 50, 7)]
    assert list(pieces(40, 64, 64)) == [range(40)]


# --- results and gradients


@pytest.mark.parametrize("device", DEVICES)
@over_sizes
def test_every_variant_gives_what_it_gives_for_rows(shape: tuple[int, int], device: str) -> None:
    """Of those that take both: the same values in the same order of sums."""
    rows, found = both_layouts(*shape, device=device)
    x = torch.randn(5, shape[1], device=device, dtype=BF16)
    dy = torch.randn(5, shape[0], device=device, dtype=BF16)
    for op, one, other in (
        (
            LINEAR,
            (x, *rows[:3], None, "rows", FP32, None),
            (x, *found[:3], None, "fragments", FP32, None),
        ),
        (
            OPS["nvfp4_linear_backward"],
            (dy, *rows[:3], "rows", shape[1], FP32),
            (dy, *found[:3], "fragments", shape[1], FP32),
        ),
    ):
        names = [{variant.name for variant in supporting(op, args)} for args in (one, other)]
        assert {"library", "reference"} <= names[0] & names[1]
        for name in names[0] & names[1]:
            found_one, found_other = run_by(op, name, one), run_by(op, name, other)
            torch.testing.assert_close(found_other, found_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["direct", "registered", "public"])
def test_gradients_are_those_of_rows(how: str, device: str) -> None:
    rows, found = both_layouts(130, 80, device=device)
    made = []
    for weight in (rows, found):
        x = torch.linspace(-2, 2, 480, device=device, dtype=FP64).view(2, 3, 80).requires_grad_()
        bias = torch.linspace(-1, 1, 130, device=device).requires_grad_()
        if how == "public":
            width = 80 if weight.layout == "fragments" else None
            packed = nvfp4.PackedNVFP4(*weight[:4], width)
            y = nvfp4.linear(x, packed, bias)
        else:
            function = linear_of if how == "direct" else LINEAR.overload
            y = function(x, *weight[:3], bias, weight.layout)
        y.square().sum().backward()
        made.append((y.detach(), x.grad, bias.grad))
    for one, other in zip(*made, strict=True):
        assert other.abs().sum() > 0
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_a_mixture_of_fragments_is_one_of_rows() -> None:
    w13, w2 = both_layouts(5, 96, 80, pairs=True), both_layouts(5, 80, 48)
    torch.manual_seed(0)
    results = []
    for rows in (2, 40):
        x = torch.randn(rows, 80, dtype=FP64)
        weights, ids = torch.rand(rows, 5).topk(2)
        for one, other, layout in ((w13[0], w2[0], "rows"), (w13[1], w2[1], "fragments")):
            leaf = x.clone().requires_grad_()
            routed = weights.clone().requires_grad_()
            y = moe_of(leaf, routed, ids, *one[:3], *other[:3], layout=layout)
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad, routed.grad))
        for first, second in zip(*results[-2:], strict=True):
            torch.testing.assert_close(second, first, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("act", [None, "fp8", "nvfp4"])
def test_batch_invariance_on_a_cpu(act: str | None) -> None:
    _, weight = both_layouts(130, 80)
    x = torch.randn(7, 80, dtype=BF16)
    backward = OPS["nvfp4_linear_backward"]
    dy = torch.randn(7, 130, dtype=BF16)
    with gristmill.batch_invariant():
        whole = linear_of(x, *weight[:3], None, "fragments", act=act)
        back = backward.run(dy, *weight[:3], "fragments", 80, BF16)
        for row in range(7):
            one = slice(row, row + 1)
            alone = linear_of(x[one].clone(), *weight[:3], None, "fragments", act=act)
            assert same_bits(alone, whole[one])
            alone = backward.run(dy[one].clone(), *weight[:3], "fragments", 80, BF16)
            assert same_bits(alone, back[one])
    torch.testing.assert_close(whole, linear_of(x, *weight[:3], None, "fragments"))


# --- graphs

CHECKED = (
    "fragments, 9 by 130x208",
    "fragments, 1 by 1x16",
    "fragments, x float16 bias bfloat16",
    "fragments, out float32",
    "fragments, fp8",
    "fragments, nvfp4",
    "fragments, unaligned",
    "tiles, nvfp4",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tiles" in name:
        _let_fp8_be_compared(monkeypatch)
    args = list(case_of(LINEAR, name).make(device, 0))
    torch.library.opcheck(LINEAR.overload, tuple(args))
    args[0] = args[0].detach().requires_grad_()
    torch.library.opcheck(LINEAR.overload, tuple(args))
    backward = OPS["nvfp4_linear_backward"]
    torch.library.opcheck(backward.overload, case_of(backward, name).make(device, 0))


def _let_fp8_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    allclose = torch.allclose

    def by_bytes(one: torch.Tensor, other: torch.Tensor, **options: Any) -> bool:
        if one.dtype == torch.float8_e4m3fn:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return allclose(one, other, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    y.square().mean().backward()
    return [y.detach(), leaf.grad]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", [None, "fp8"])
def test_rows_are_symbolic(act: str | None, device: str) -> None:
    """Forward and backward, in one graph for any number of rows; K is padded within."""
    packed = nvfp4.PackedNVFP4(*both_layouts(130, 80, device=device)[1])
    counter = CompileCounterWithBackend("aot_eager")

    def function(x: torch.Tensor) -> torch.Tensor:
        return nvfp4.linear(torch.relu(x), packed, act=act)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for rows in (8, 2, 3, 17, 300):
        x = torch.randn(rows, 80, device=device)
        torch.testing.assert_close(gradients(compiled, x), gradients(function, x))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_packed_weight_is_an_argument_of_a_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(nvfp4.linear, backend=counter, fullgraph=True)
    x = torch.randn(3, 80)
    for seed in range(3):
        torch.manual_seed(seed)
        packed = nvfp4.quantize(torch.randn(130, 80)).prepare("sm_90a")
        assert same_bits(compiled(x, packed), nvfp4.linear(x, packed))
    assert counter.frame_count == 1
    with pytest.raises(Exception, match=r"nvfp4_linear: x must end in K = 80"):
        compiled(torch.randn(3, 96), packed)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = both_layouts(130, 80)[1]
            for name, part in zip(("codes", "scales", "row_scale"), weight, strict=False):
                self.register_buffer(name, part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear_of(x, self.codes, self.scales, self.row_scale, layout="fragments")

    layer = Layer()
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},)
    program = torch.export.export(layer, (torch.randn(6, 80),), dynamic_shapes=shapes)
    x = torch.randn(90, 80)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_transforms_see_through_fragments() -> None:
    rows, found = both_layouts(33, 80)
    x = torch.randn(4, 80, dtype=FP64)

    def loss(weight: Weight) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: linear_of(x, *weight[:3], None, weight.layout).square().sum()

    one, other = (torch.func.grad(loss(weight))(x) for weight in (rows, found))
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    each = torch.vmap(lambda x: linear_of(x, *found[:3], None, "fragments"))(x)
    torch.testing.assert_close(each, linear_of(x, *found[:3], None, "fragments"))


# --- what a plan knows of a call


def details_of(x: torch.Tensor, **options: Any) -> Details:
    weight = options.pop("weight", both_layouts(130, 80)[1])
    bias = options.pop("bias", None)
    found: Details = LINEAR.problem(x, *weight[:3], bias, weight.layout, None, None).layout
    copy = found.x_of(x)
    # What it promises: rows of contiguous elements, so many apart, that do not overlap.
    lines, rows = copy.reshape(-1, copy.shape[-1]), x.reshape(-1, x.shape[-1])
    assert torch.equal(lines, rows)
    strided = copy.as_strided(rows.shape, (found.x_stride, 1))
    assert torch.equal(strided, rows)
    assert found.x_stride >= x.shape[-1]
    assert (copy is x) == (not found.copied)
    if found.aligned:
        assert copy.data_ptr() % 16 == 0
        assert found.x_stride * x.element_size() % 16 == 0
    return found


def wide(rows: int, columns: int, extra: int) -> torch.Tensor:
    return torch.randn(rows, columns + extra).to(BF16)[:, :columns]


def test_details_of_x() -> None:
    dense = torch.randn(6, 80).to(BF16)
    assert details_of(dense).x_aligned
    assert details_of(dense).x_stride == 80
    sliced = details_of(wide(6, 80, 16))
    assert (sliced.x_aligned, sliced.x_stride, sliced.copied) == (True, 96, False)
    for x in (
        wide(6, 80, 3),
        dense.t().contiguous().t(),
        dense[:1].expand(6, 80),
        torch.randn(481).to(BF16)[1:].view(6, 80),
        torch.randn(81).to(BF16)[1:].view(1, 80),
        torch.randn(2, 3, 80).to(BF16).transpose(0, 1),
    ):
        found = details_of(x)
        assert (found.x_aligned, found.x_stride, found.copied) == (False, 80, True)
        assert found.aligned
    assert details_of(torch.randn(80).to(BF16)).x_aligned
    assert details_of(torch.randn(2, 3, 80).to(BF16)[:, :1]).x_stride == 240
    one = details_of(wide(6, 80, 16)[2:3])
    assert (one.x_aligned, one.x_stride) == (True, 80)


def test_details_where_rows_must_not_depend_on_the_batch() -> None:
    """Backward, rows of 130 are aligned alone or padded, and are not where there are several."""
    weight = both_layouts(130, 80)[1]

    def aligned(dy: torch.Tensor) -> bool:
        problem = OPS["nvfp4_linear_backward"].problem(dy, *weight[:3], "fragments", 80, BF16)
        return bool(problem.layout.aligned)

    dy = torch.randn(3, 130).to(BF16)
    assert [aligned(dy), aligned(dy[:1]), aligned(wide(3, 130, 6))] == [False, True, True]
    with gristmill.batch_invariant():
        assert [aligned(dy), aligned(dy[:1]), aligned(wide(3, 130, 6))] == [False, False, False]


def test_details_of_the_weight() -> None:
    rows, weight = both_layouts(130, 80)
    x = torch.randn(2, 80).to(BF16)
    found = details_of(x, weight=weight, bias=torch.randn(130))
    assert (found.layout, found.bias, found.weight_packed) == ("fragments", FP32, True)
    assert (found.codes_stride, found.scales_stride) == (None, None)
    assert not details_of(x, weight=weight, bias=torch.randn(260)[::2]).weight_packed
    expanded = weight._replace(row_scale=weight.row_scale[:1].expand(130))
    found = details_of(x, weight=expanded)
    assert (found.weight_packed, found.weight_aligned) == (False, True)
    odd = torch.empty(weight.codes.numel() + 1, dtype=torch.uint8)[1:].view(weight.codes.shape)
    found = details_of(x, weight=weight._replace(codes=odd.copy_(weight.codes)))
    assert (found.weight_packed, found.weight_aligned) == (False, False)
    found = details_of(x, weight=rows)
    assert (found.layout, found.codes_stride, found.scales_stride) == ("rows", 40, 5)
    part = torch.cat([rows.codes] * 2, 1)[:, :40]
    found = details_of(x, weight=rows._replace(codes=part))
    assert (found.weight_packed, found.codes_stride, found.scales_stride) == (False, 80, 5)
