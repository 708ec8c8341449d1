"""Copies for timing: they alias as the originals do, and the originals are never written to."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from gristmill.select import copies, rotate, rotation_count
from gristmill.select.copies import sets_for_tuning

Pair = namedtuple("Pair", "left right")


def fill(value: Any) -> None:
    """Write to everything in reach."""
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, dict):
        fill(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            fill(item)


def test_the_same_tensor_twice_stays_the_same() -> None:
    x = torch.arange(4.0)
    ((a, b, c),) = rotate((x, x, torch.arange(4.0)), 1)
    assert a is b
    a.add_(1)
    assert torch.equal(b, torch.arange(4.0) + 1)
    assert torch.equal(c, torch.arange(4.0))


def test_views_that_overlap_still_do_at_the_same_distance() -> None:
    base = torch.arange(12.0)
    left, right = base[:8], base[4:]
    for one, other in rotate((left, right), 2):
        assert other.data_ptr() - one.data_ptr() == 4 * 4
        one[4:].fill_(-1)
        assert torch.equal(other, torch.tensor([-1.0] * 4 + [8, 9, 10, 11]))
    assert torch.equal(base, torch.arange(12.0))


def test_a_chain_of_overlaps_is_one_memory() -> None:
    base = torch.arange(12.0)
    parts = (base[8:], base[:5], base[4:9], base[2:3])
    ((last, first, middle, inner),) = rotate(parts, 1)
    assert middle.data_ptr() - first.data_ptr() == 16
    assert last.data_ptr() - first.data_ptr() == 32
    assert inner.data_ptr() - first.data_ptr() == 8
    middle.zero_()
    assert (first[4], last[0], first[3]) == (0, 0, 3)


def test_neighbours_in_one_buffer_do_not_share_memory() -> None:
    base = torch.arange(8.0)
    ((one, other),) = rotate((base[:4], base[4:]), 1)
    one.fill_(7)
    assert torch.equal(other, torch.arange(4.0) + 4)


def test_views_of_another_dtype_share_memory() -> None:
    base = torch.arange(4, dtype=torch.float32)
    ((words, numbers),) = rotate((base.view(torch.int32), base), 1)
    words.zero_()
    assert torch.equal(numbers, torch.zeros(4))
    assert torch.equal(base, torch.arange(4, dtype=torch.float32))


def test_nested_lists_dicts_and_named_tuples_keep_their_kinds_and_aliases() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    args = ([x, (y, 2)], {"x": x, "deep": {"y": [y]}}, Pair(x, "words"), None)
    (copy,) = rotate(args, 1)
    listed, mapped, pair, nothing = copy
    assert (type(listed), type(listed[1]), type(pair), nothing) == (list, tuple, Pair, None)
    assert listed[0] is mapped["x"] is pair.left
    assert listed[0] is not x
    assert listed[1][0] is mapped["deep"]["y"][0]
    assert (listed[1][1], pair.right) == (2, "words")
    fill(copy)
    assert (x.sum(), y.sum()) == (3, 0)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.bfloat16, torch.uint8],
    ids=str,
)
def test_every_dtype_comes_with_its_values(dtype: torch.dtype) -> None:
    original = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).to(dtype)[1:]
    ((copy,),) = rotate((original,), 1)
    assert copy.dtype == dtype
    assert torch.equal(copy.float() if dtype.itemsize == 1 else copy, as_read(original))
    assert copy.data_ptr() % 64 == original.data_ptr() % 64


def as_read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def test_an_expanded_tensor_stays_small() -> None:
    original = torch.ones(1, 4).expand(1 << 20, 4)
    ((copy,),) = rotate((original,), 1)
    assert (copy.shape, copy.stride()) == (original.shape, (0, 1))
    assert copy.untyped_storage().nbytes() < 200


def test_empty_ones_keep_shape_dtype_and_gradient() -> None:
    original = torch.empty(0, 7, dtype=torch.float16, requires_grad=True)
    ((copy,),) = rotate((original,), 1)
    assert (copy.shape, copy.dtype, copy.requires_grad) == ((0, 7), torch.float16, True)


def test_other_layouts_are_cloned() -> None:
    original = torch.eye(3).to_sparse()
    ((copy,),) = rotate((original,), 1)
    assert copy.layout == torch.sparse_coo
    assert torch.equal(copy.to_dense(), torch.eye(3))
    assert copy is not original


# sets for tuning


def test_without_a_cache_there_is_one_set() -> None:
    assert len(sets_for_tuning((torch.ones(4),), 0)) == 1
    assert len(sets_for_tuning((torch.ones(4),), 0, written=(0,))) == 1


def test_with_a_cache_there_are_as_many_as_leave_it_but_not_too_many() -> None:
    x = torch.ones(1_000_000)
    found = sets_for_tuning((x, x, x.view(1000, 1000)[:, :10]), 1 << 20)
    # Counted by tensors: three of them, two of which are the same.
    size = 4_000_000 + 40_000
    assert len(found) == rotation_count(size, 1 << 20)
    assert len(sets_for_tuning((torch.ones(4),), 1 << 20)) == copies._SETS_FOR_TUNING
    assert len({one[0].data_ptr() for one in found} | {x.data_ptr()}) == len(found) + 1


def test_a_large_set_is_not_copied_where_it_is_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "rotation_count", lambda *args, **options: 1)
    read, written = torch.ones(8), torch.ones(8)
    ((a, b, c),) = sets_for_tuning((read, written, 3), 1 << 20, written=(1,))
    assert a is read
    assert b is not written
    assert c == 3
    ((a, b, c),) = sets_for_tuning((read, written, 3), 1 << 20)
    assert a is not read
    assert b is not written


def test_what_overlaps_with_a_written_argument_is_copied_with_it() -> None:
    base = torch.arange(8.0)
    args = ([base[2:]], base[:4], torch.ones(2), {"same": base[7:]})
    ((listed, output, other, mapped),) = sets_for_tuning(args, 0, written=(1,))
    assert other is args[2]
    assert mapped is args[3]
    assert listed[0].data_ptr() - output.data_ptr() == 8
    output.zero_()
    assert torch.equal(listed[0], torch.tensor([0.0, 0, 4, 5, 6, 7]))
    assert torch.equal(base, torch.arange(8.0))


@pytest.mark.parametrize("output", [None, torch.empty(0), torch.eye(2).to_sparse()], ids=str)
def test_written_arguments_of_every_kind(output: Any) -> None:
    read = torch.ones(2)
    ((found, same),) = sets_for_tuning((output, read), 0, written=(0,))
    assert same is read
    if output is None:
        assert found is None
    else:
        assert found is not output
        assert found.shape == output.shape


def test_short_memory_means_one_set_of_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = copies.rotate

    def rotate_a_few(args: Any, count: int) -> Any:
        asked.append(count)
        if count > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(args, count)

    monkeypatch.setattr(copies, "rotate", rotate_a_few)
    read, written = torch.ones(8), torch.ones(8)
    ((a, b),) = sets_for_tuning((read, written), 1 << 20, written=(1,))
    assert a is read
    assert b is not written
    ((a, b),) = sets_for_tuning((read, written), 1 << 20)
    assert a is not read
    assert asked == [256, 256, 1]
