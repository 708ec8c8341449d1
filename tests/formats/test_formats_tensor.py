"""The two kinds of weight: what they refuse, their views, and their way through torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampled import sampled
from torch.utils import _pytree as pytree

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize, e2m1, quantize
from gristmill.formats.nvfp4.tensor import arch_of

E4M3 = torch.float8_e4m3fn


def weight(*shape: int, per_row: bool = False) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    made = quantize(torch.randn(shape, generator=generator))
    if not per_row:
        return made
    scales = torch.rand(shape[:-1], generator=generator) + 0.5
    return NVFP4Tensor(made.codes, made.scales, scales)


def same(one: NVFP4Tensor | PackedNVFP4, other: NVFP4Tensor | PackedNVFP4) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return type(one) is type(other) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in pairs
    )


def parts(*, stack: tuple[int, ...] = (2,), rows: int = 6, columns: int = 64) -> dict[str, Any]:
    return {
        "codes": torch.zeros((*stack, rows, columns // 2), dtype=torch.uint8),
        "scales": torch.zeros((*stack, rows, columns // 16), dtype=E4M3),
        "global_scale": torch.ones(stack),
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("codes", None, TypeError, "codes must be a tensor of torch.uint8, got NoneType"),
        ("codes", torch.zeros(2, 6, 32), TypeError, "codes must be .* got torch.float32"),
        ("codes", torch.zeros(32, dtype=torch.uint8), ValueError, r"codes must have shape .*\(32,"),
        ("codes", torch.zeros(2, 6, 30, dtype=torch.uint8), ValueError, "K a multiple of 16"),
        ("scales", torch.zeros(2, 6, 4), TypeError, "scales must be .*e4m3fn, got torch.float32"),
        ("scales", torch.zeros(2, 6, 4, dtype=torch.uint8), TypeError, "scales must be"),
        ("scales", torch.zeros(2, 6, 5, dtype=E4M3), ValueError, r"scales must have shape \(2, 6"),
        ("scales", torch.zeros(2, 5, 4, dtype=E4M3), ValueError, r"got \(2, 5, 4\)"),
        ("scales", torch.zeros(1024, dtype=E4M3), ValueError, r"scales must .* got \(1024,\)"),
        ("global_scale", 1.0, TypeError, "global_scale must be .*float32, got float"),
        ("global_scale", torch.ones(2).double(), TypeError, "global_scale must be"),
        ("global_scale", torch.ones(()), ValueError, r"global_scale must have shape \(2,\)"),
        ("global_scale", torch.ones(2, 5), ValueError, r"or \(2, 6\), one per row, got \(2, 5\)"),
        ("global_scale", torch.ones(2, 1), ValueError, "global_scale must have shape"),
        ("global_scale", torch.ones(2, device="meta"), ValueError, "on one device, got cpu, meta"),
    ],
)
def test_wrong_parts_are_refused(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    NVFP4Tensor(**parts())
    with pytest.raises(error, match=f"NVFP4Tensor: .*{message}"):
        NVFP4Tensor(**{**parts(), name: value})


def test_shape_size_and_device() -> None:
    stack = weight(2, 6, 64)
    assert stack.shape == (2, 6, 64)
    assert stack.prepare().shape == (2, 6, 64)
    assert stack.device == stack.prepare().device == torch.device("cpu")
    assert stack.nbytes == 2 * 6 * 32 + 2 * 6 * 4 + 2 * 4
    assert stack.prepare().nbytes == 2 * 6 * 32 + 2 * 6 * 4 + 2 * 6 * 4
    assert stack.to("meta").device.type == "meta"
    assert stack.to("meta").shape == (2, 6, 64)


def test_the_scale_of_rows() -> None:
    one = weight(2, 6, 64)
    assert one.row_scale.shape == (2, 6)
    assert torch.equal(one.row_scale, one.global_scale[:, None].expand(2, 6))
    assert one.row_scale.data_ptr() == one.global_scale.data_ptr()
    rows = weight(2, 6, 64, per_row=True)
    assert rows.row_scale.data_ptr() == rows.global_scale.data_ptr()
    assert weight(6, 64).row_scale.shape == (6,)


@pytest.mark.parametrize("per_row", [False, True])
def test_rows_are_views(per_row: bool) -> None:
    whole = weight(2, 6, 64, per_row=per_row)
    some = whole.rows(1, 4)
    assert some.shape == (2, 3, 64)
    assert torch.equal(dequantize(some), dequantize(whole)[:, 1:4])
    assert some.codes.data_ptr() == whole.codes[:, 1:].data_ptr()
    assert some.scales.data_ptr() == whole.scales[:, 1:].data_ptr()


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        *((arch, (3, 48, 96)) for arch in ("sm_80", "sm_89", "sm_75", "cpu", None)),
        *((arch, (40, 96)) for arch in ("sm_70", "sm_75", "cpu", None)),
    ],
)
def test_rows_stay_as_they_are(arch: str | None, shape: tuple[int, ...]) -> None:
    """Those of stacks before Hopper, and of any weight where no tensor core is to read it."""
    source = weight(*shape)
    packed = source.prepare(arch, pairs=shape[-2] == 48)
    assert packed.layout == "rows"
    assert packed.codes.data_ptr() == source.codes.data_ptr()
    assert packed.scales.data_ptr() == source.scales.data_ptr()
    assert packed.row_scale.is_contiguous()
    assert packed.row_scale.shape == shape[:-1]
    assert torch.equal(dequantize(packed), dequantize(source))


@pytest.mark.parametrize(
    ("arch", "stack"),
    [
        *((arch, ()) for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")),
        *((arch, (3,)) for arch in ("sm_90", "sm_90a")),
    ],
)
@pytest.mark.parametrize("pairs", [False, True])
def test_from_ampere_to_hopper_a_weight_lies_in_fragments(
    arch: str, stack: tuple[int, ...], pairs: bool
) -> None:
    """Stacks on Hopper alone."""
    shape = (*stack, 48, 96)
    source = weight(*shape, per_row=True)
    packed = source.prepare(arch, pairs=pairs)
    layout = "pairs" if pairs else "fragments"
    assert (packed.layout, packed.columns, packed.shape) == (layout, 96, shape)
    assert (packed.codes.shape, packed.scales.shape) == ((*stack, 1, 2, 2048), (*stack, 1, 2, 256))
    assert packed.row_scale.data_ptr() == source.global_scale.data_ptr()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(dequantize(packed, dtype), dequantize(source, dtype))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_120"])
@pytest.mark.parametrize("shape", [(40, 96), (3, 129, 16), (2, 2, 128, 64)])
def test_on_blackwell_scales_lie_in_tiles(arch: str, shape: tuple[int, ...]) -> None:
    source = weight(*shape, per_row=True)
    packed = source.prepare(arch)
    assert packed.layout == "tiles"
    assert packed.scales.shape[-1] % 512 == 0
    assert same(packed.unpack(), source)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(dequantize(packed, dtype), dequantize(source, dtype))


@pytest.mark.parametrize("arch", ["", "sm_", "hopper", "sm_90x", "cuda:0"])
def test_an_unknown_architecture_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match="is no architecture; write one such as 'sm_90a'"):
        weight(2, 16).prepare(arch)


@pytest.mark.parametrize("arch", [90, ("sm_90a",), torch.device("cpu")])
def test_an_architecture_is_a_string(arch: Any) -> None:
    with pytest.raises(DtypeError, match=f"prepare: arch must be .* got {type(arch).__name__}"):
        weight(2, 16).prepare(arch)


@pytest.mark.parametrize("layout", ["blocks", "", None])
def test_an_unknown_layout_is_refused(layout: Any) -> None:
    parts = weight(2, 16).prepare()
    packed = PackedNVFP4(parts.codes, parts.scales, parts.row_scale, layout)
    told = (
        f"layout of a PackedNVFP4 must be 'rows', 'tiles', 'fragments' or 'pairs', got {layout!r}"
    )
    with pytest.raises(ArgumentError, match=f"unpack: the {told}"):
        packed.unpack()
    with pytest.raises(ArgumentError, match=f"dequantize: the {told}"):
        dequantize(packed)


@pytest.mark.parametrize("name", ["scales", "row_scale"])
@pytest.mark.parametrize("arch", ["cpu", "sm_100a"])
def test_parts_that_do_not_fit_together_have_no_values(arch: str, name: str) -> None:
    """Those of one row would be spread over all, and nobody the wiser."""
    parts = vars(weight(128, 64, per_row=True).prepare(arch))
    wrong = PackedNVFP4(**{**parts, name: parts[name][:1]})
    for values in (dequantize, PackedNVFP4.unpack):
        with pytest.raises(ArgumentError, match=r"must have shape|bytes in tiles"):
            values(wrong)


def test_rocm_is_no_architecture_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices are called "cuda" as well, and gfx942 has the capability 9.4."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert arch_of(torch.device("cuda", 0)) == "cpu"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_unpack_gives_back_what_was_packed(arch: str) -> None:
    source = weight(5, 48, per_row=True)
    assert same(source.prepare(arch).unpack(), source)
    back = weight(5, 48).prepare(arch).unpack()
    assert torch.equal(dequantize(back), dequantize(weight(5, 48)))


def test_a_map_reaches_through() -> None:
    source = weight(3, 32)
    moved = pytree.tree_map(lambda part: part.to("meta"), source)
    assert isinstance(moved, NVFP4Tensor)
    assert {part.device.type for part in pytree.tree_leaves(moved)} == {"meta"}
    # Anything may stand in the places of the leaves.
    assert pytree.tree_map(lambda part: part.dtype, source).scales == E4M3
    packed = pytree.tree_map(torch.clone, source.prepare("sm_100a"))
    assert isinstance(packed, PackedNVFP4)
    assert packed.layout == "tiles"
    assert same(packed, source.prepare("sm_100a"))
    keyed = pytree.tree_leaves_with_path(source)
    assert [pytree.keystr(path) for path, _ in keyed] == [".codes", ".scales", ".global_scale"]


def test_the_layout_is_part_of_the_structure() -> None:
    source = weight(3, 32)
    archs = ("cpu", "sm_90a", "sm_100a")
    specs = {pytree.tree_structure(source.prepare(arch)) for arch in archs}
    # So are the columns of fragments, which nothing else tells.
    specs.add(pytree.tree_structure(weight(3, 48).prepare("sm_90a")))
    assert len(specs) == 4
    for spec in specs:
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved_and_loaded, pickled])
def test_copies(copied: Callable[[Any], Any]) -> None:
    plain = (weight(3, 32), weight(2, 6, 32).rows(1, 4))
    for source in (*plain, *(weight(3, 48).prepare(arch) for arch in ("sm_90a", "sm_120a"))):
        again = copied(source)
        assert same(again, source)
        assert torch.equal(dequantize(again), dequantize(source))
        for name in ("layout", "columns"):
            assert getattr(again, name, None) == getattr(source, name, None)


def test_a_pickle_from_before_there_were_fragments() -> None:
    packed = weight(3, 32).prepare("sm_100a")
    state = packed.__getstate__()
    del state["columns"]
    again = object.__new__(PackedNVFP4)
    again.__setstate__(state)
    assert same(again, packed)
    assert (again.columns, again.shape) == (None, (3, 32))


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, q: NVFP4Tensor | PackedNVFP4) -> torch.Tensor:
        return x @ dequantize(q, x.dtype).t()


@pytest.mark.parametrize("arch", sampled(["sm_90a", None, "sm_100a"], 3))
def test_as_an_argument_of_a_compiled_function(arch: str | None) -> None:
    compiled = torch.compile(Scaled(), fullgraph=True, backend="aot_eager")
    for seed in range(2):
        e2m1._tables.clear()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        source = weight(6 + seed, 64, per_row=True)
        argument = source if arch is None else source.prepare(arch)
        torch.testing.assert_close(compiled(x, argument), x @ dequantize(source).t())


def test_as_an_argument_of_an_inductor_graph() -> None:
    x, source = torch.randn(4, 64), weight(6, 64)
    compiled = torch.compile(Scaled(), fullgraph=True)
    torch.testing.assert_close(compiled(x, source), x @ dequantize(source).t())


@pytest.mark.parametrize("arch", [None, "sm_90a", "sm_100a"])
def test_as_an_argument_of_an_exported_program(arch: str | None) -> None:
    e2m1._tables.clear()
    x, source, other = torch.randn(4, 64), weight(6, 64, per_row=True), weight(6, 64, per_row=True)
    made = [q if arch is None else q.prepare(arch) for q in (source, other)]
    program = torch.export.export(Scaled(), (x, made[0]))
    torch.testing.assert_close(program.module()(x, made[1]), x @ dequantize(other).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 7, 100, 1000])
def test_large_weights_are_dequantised_piece_by_piece(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = quantize(torch.randn(3, 10, 64))
    per_row = NVFP4Tensor(stack.codes, stack.scales, torch.rand(3, 10))
    single = NVFP4Tensor(stack.codes[0], stack.scales[0], per_row.global_scale[0])
    packed = (per_row.prepare("sm_100a"), single.prepare("sm_90a"))
    for weight in (stack, per_row, per_row.rows(2, 7), *packed):
        whole = dequantize(weight, dtype)
        with monkeypatch.context() as patch:
            patch.setattr("gristmill.formats.nvfp4.tensor._PIECE", piece)
            assert torch.equal(dequantize(weight, dtype), whole)
