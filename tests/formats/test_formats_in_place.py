"""Weights packed over their own bytes, and those that cannot be."""

from __future__ import annotations

import pytest
import torch
from formats_weights import clone, packed, same, weight

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, packing


@pytest.mark.parametrize("scratch", [1, 10000, 16 << 20])
def test_in_place(scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    q = weight(320, 128)
    expected = q.prepare("sm_90a")
    kept = clone(q)
    versions = kept.codes._version, kept.scales._version
    p = kept.prepare("sm_90a", in_place=True)
    assert same(p, expected)
    assert p.codes.untyped_storage().data_ptr() == kept.codes.untyped_storage().data_ptr()
    assert p.scales.untyped_storage().data_ptr() == kept.scales.untyped_storage().data_ptr()
    # So that a graph which saved the old bytes says so.
    assert kept.codes._version > versions[0]
    assert kept.scales._version > versions[1]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("scratch", [1, 20000, 16 << 20])
def test_a_stack_in_place(scratch: int, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    q = weight(5, 192, 64)
    expected = packed(q, pairs=pairs)
    p = q.prepare("sm_90a", in_place=True, pairs=pairs)
    assert same(p, expected)
    assert p.layout == expected.layout
    assert p.codes.data_ptr() == q.codes.data_ptr()
    assert p.scales.data_ptr() == q.scales.data_ptr()


@pytest.mark.parametrize("shape", [(5, 192, 64), (192, 64)])
@pytest.mark.parametrize(("scratch", "matrices"), [(1, 1), (2 * 192 * 36, 2)])
def test_no_more_is_copied_than_a_matrix(
    shape: tuple[int, ...], scratch: int, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or than the scratch buffer holds, if that is more."""
    made: list[torch.Tensor] = []

    def empty_like(part: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty(part.shape, dtype=part.dtype))
        return made[-1]

    q = weight(*shape)
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
        q.prepare("sm_90a", in_place=True, pairs=True)
    matrices = min(matrices, q.codes.numel() // (192 * 32))
    assert [part.nbytes for part in made] == [matrices * 192 * 32, matrices * 192 * 4]


@pytest.mark.parametrize("shape", [(64, 80), (65, 64), (0, 64), (1, 16), (3, 48, 64), (0, 64, 64)])
def test_what_must_be_padded_is_left_as_it_is(shape: tuple[int, ...]) -> None:
    for pairs in (False, True) if shape[-2] % 16 == 0 else (False,):
        q, kept = weight(*shape), weight(*shape)
        p = q.prepare("sm_90a", in_place=True, pairs=pairs)
        assert same(p, kept.prepare("sm_90a", pairs=pairs))
        assert same(q, kept)


def test_what_is_not_aligned_is_left_as_it_is() -> None:
    kept = weight(64, 64)
    for name in ("codes", "scales"):
        part = getattr(kept, name).view(torch.uint8)
        moved = torch.empty(part.numel() + 8, dtype=torch.uint8)[8:].view(part.shape).copy_(part)
        parts = {"codes": kept.codes, "scales": kept.scales, "global_scale": kept.global_scale}
        q = NVFP4Tensor(**{**parts, name: moved.view(getattr(kept, name).dtype)})
        p = q.prepare("sm_90a", in_place=True)
        assert same(p, kept.prepare("sm_90a"))
        assert same(q, kept)
        assert p.codes.data_ptr() % 16 == p.scales.data_ptr() % 16 == 0


def test_in_place_where_nothing_changes() -> None:
    q = weight(3, 64, 64)
    for arch in ("cpu", "sm_89"):  # of stacks
        p = q.prepare(arch, in_place=True)
        assert p.layout == "rows"
        assert p.codes.data_ptr() == q.codes.data_ptr()
        assert p.scales.data_ptr() == q.scales.data_ptr()


@pytest.mark.parametrize("scratch", [1, 3000, 16 << 20])
@pytest.mark.parametrize(
    "shape", [(256, 128), (3, 128, 64), (100, 64), (128, 48), (128, 0), (0, 64), (0, 128, 64)]
)
def test_tiles_in_place(
    shape: tuple[int, ...], scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    q, kept = weight(*shape), weight(*shape)
    p = q.prepare("sm_100a", in_place=True)
    assert same(p, kept.prepare("sm_100a"))
    assert p.codes.data_ptr() == q.codes.data_ptr()
    fits = shape[-2] % 128 == 0 and shape[-1] % 64 == 0
    assert (p.scales.data_ptr() == q.scales.data_ptr()) == fits
    assert fits or same(q, kept)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_inference_tensors_in_place(arch: str) -> None:
    expected = weight(128, 64).prepare(arch)
    with torch.inference_mode():
        q = weight(128, 64)
    assert same(q.prepare(arch, in_place=True), expected)
    plain = weight(128, 64)
    with torch.inference_mode():
        assert same(plain.prepare(arch, in_place=True), expected)


def test_what_needs_a_gradient_is_not_overwritten() -> None:
    q = weight(64, 64)
    learnt = NVFP4Tensor(q.codes, q.scales.detach().requires_grad_(), q.row_scale)
    with pytest.raises(ArgumentError, match="prepare: in_place=True would overwrite scales, which"):
        learnt.prepare("sm_90a", in_place=True)
