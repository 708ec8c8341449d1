"""Matrices of tensor_cores.cuh in the emulation against torch, and mistakes with them."""

from __future__ import annotations

import pytest
import torch

from emulation.harness import EmulationError, tensor_map
from emulation.tensor_lab import ORDERS, TOKENS, TYPES, Lab, unset, whole, words

# ---- words ----


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_pairs_multiply_as_in_torch(tensor_lab: Lab, name: str, high: bool) -> None:
    """All codes, by factors that bring ties, subnormals, overflow and everything at random."""
    dtype = TYPES[name]
    generator = torch.Generator().manual_seed(3)
    pairs = torch.arange(-32768, 32768).to(torch.int16)
    factors = torch.randint(-32768, 32768, (9, 65536), generator=generator).to(torch.int16)
    exact = torch.tensor([1.0, 0.5, -3.0, 1.5 * 2.0**-7, 2.0**-8], dtype=dtype).view(torch.int16)
    factors[:5] = exact[:, None]
    tiny = torch.finfo(dtype).tiny
    factors[5] = torch.tensor(tiny * 1.5, dtype=dtype).view(torch.int16)
    left = pairs.view(torch.int32).expand(9, -1).contiguous()  # two numbers to a word
    right = factors.view(torch.int32).contiguous()
    out = unset(9, 32768)
    kernel = f"multiply_pairs<{name},{str(high).lower()}>"
    tensor_lab.run(kernel, left, out, right, count=out.numel(), grid=288, block=1024)
    factor = right.view(dtype).view(9, 32768, 2)[..., int(high)]
    product = left.view(dtype).view(9, 32768, 2).double() * factor.double()[..., None]
    expected = nearest(product, dtype)
    result = out.view(dtype).view(9, 32768, 2)
    assert torch.equal(result.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(result.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def nearest(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 to the nearest of `dtype`, ties to even, in one rounding: torch's own takes two."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values)
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    lowest = torch.frexp(torch.tensor(info.tiny, dtype=torch.float64))[1]
    unit = torch.ldexp(torch.ones_like(values), exponent.clamp(min=int(lowest)) - bits)
    rounded = torch.where(values.isfinite(), torch.round(values / unit) * unit, values)
    return rounded.to(dtype)  # exact, or beyond the largest number


def test_words_are_changed_as_told(tensor_lab: Lab) -> None:
    source, out = words(64) * 200, unset(64, 4)
    tensor_lab.run("change_words", source, out, block=64)
    for i, word in enumerate(source.tolist()):
        word &= 0xFFFFFFFF
        other = (~word * 3) & 0xFFFFFFFF
        turned = (word >> i % 32 | word << (32 - i % 32)) & 0xFFFFFFFF
        mask = 0x0F0F00FF
        expected = [turned, word >> 8, (word & mask) | (other & ~mask), i // 32 + 5]
        assert [value & 0xFFFFFFFF for value in out[i].tolist()] == expected


# ---- matrices ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 4])
def test_matrices_are_loaded_by_rows(tensor_lab: Lab, count: int, order: int) -> None:
    source, out = words(32, 4), unset(count, 32)
    rows = torch.randperm(32, generator=torch.Generator().manual_seed(1)).int()
    tensor_lab.run(f"load_rows<{count}>", source, out, rows, shared=512, order=order)
    for matrix in range(count):
        given = rows[8 * matrix : 8 * matrix + 8].long()
        assert torch.equal(out[matrix], source[given].flatten())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 4])
def test_matrices_are_stored_by_columns(tensor_lab: Lab, count: int, order: int) -> None:
    generator = torch.Generator().manual_seed(2)
    matrices = torch.randint(0, 1000, (count, 8, 8), generator=generator).to(torch.int16)
    rows = torch.randperm(32, generator=generator).int()
    out = unset(32, 4)
    source = matrices.view(torch.int32).contiguous()
    tensor_lab.run(f"store_turned<{count}>", source, out, rows, shared=512, order=order)
    expected = torch.full((32, 8), -1, dtype=torch.int16)
    expected[rows[: 8 * count].long()] = matrices.transpose(1, 2).reshape(-1, 8)
    assert torch.equal(out.view(torch.int16).view(32, 8), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TYPES)
def test_a_warp_multiplies(tensor_lab: Lab, name: str, order: int) -> None:
    left, right = whole(16, 48, dtype=TYPES[name]), whole(8, 48, dtype=TYPES[name], seed=1)
    out = unset(16, 8)
    tensor_lab.run(f"multiply_by_warp<{name}>", left, out, right, count=3, order=order)
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).repeat_interleave(8, 0).repeat(1, 4)
    assert torch.equal(out.view(torch.float32), left.float() @ right.float().T + start)


def multiply(
    tensor_lab: Lab,
    name: str = "bf16",
    tokens: int = 16,
    *,
    chunks: int = 3,
    value: int = 0,
    order: int = 0,
    block: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a warpgroup gives, and what is right."""
    left = whole(64, 64 * chunks, dtype=TYPES[name])
    right = whole(tokens, 64 * chunks, dtype=TYPES[name], seed=1)
    out = unset(64, tokens)
    tensor_lab.run(
        f"multiply_by_group<{name},{tokens}>",
        left,
        out,
        right,
        map_bytes=tensor_map(right, tokens, 64),
        count=chunks,
        value=value,
        block=block,
        shared=1024 + 2 * tokens * 128,
        order=order,
    )
    return out.view(torch.float32), left.float() @ right.float().T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_warpgroup_multiplies(tensor_lab: Lab, tokens: int, order: int) -> None:
    out, expected = multiply(tensor_lab, tokens=tokens, order=order)
    assert torch.equal(out, expected)


def test_a_warpgroup_multiplies_fp16(tensor_lab: Lab) -> None:
    out, expected = multiply(tensor_lab, "f16")
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1, "changed in shared memory between its issue and the wait"),  # it had not come yet
        (2, "operand of a multiply_group.. was changed in its registers"),
        (3, "without begin_matrices"),
        (4, "different matrices|did not take part"),
        (5, "multiple of 1024 bytes"),
        (6, "warps of one group multiply by different matrices"),
        (7, "lanes of one warp disagree"),
        (8, "sums of a multiply_group.. were changed"),
        (9, "changed in shared memory between its issue and the wait"),
        (10, "the thread ends while a multiply_group.. of it is in flight"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_mistakes_with_warpgroups_are_told(
    tensor_lab: Lab, value: int, reason: str, order: int
) -> None:
    with pytest.raises(EmulationError, match=reason):
        multiply(tensor_lab, value=value, order=order)


def test_sums_that_are_not_waited_for_are_nan(tensor_lab: Lab) -> None:
    out, _ = multiply(tensor_lab, value=11)
    assert out.isnan().all()


def multiply_columns(
    tensor_lab: Lab, most: int, columns: int, *, order: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    left = whole(64, 64, dtype=torch.bfloat16)
    right = whole(columns, 64, dtype=torch.bfloat16, seed=1)
    out = unset(64, columns)
    tensor_lab.run(
        f"multiply_by_columns<{most}>",
        left,
        out,
        right,
        map_bytes=tensor_map(right, columns, 64),
        count=columns,
        block=128,
        shared=1024 + most * 128,
        order=order,
    )
    return out.view(torch.float32), left.float() @ right.float().T


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("most", "columns"), [(16, 8), (16, 16), (64, 40), (192, 112), (192, 192)])
def test_columns_that_are_known_at_run_time(
    tensor_lab: Lab, most: int, columns: int, order: int
) -> None:
    out, expected = multiply_columns(tensor_lab, most, columns, order=order)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("most", "columns"), [(16, 12), (64, 56), (192, 176), (192, 80), (192, 16)], ids=str
)
def test_columns_of_which_there_are_none(tensor_lab: Lab, most: int, columns: int) -> None:
    with pytest.raises(EmulationError, match=f"of at most {most} there are no {columns}"):
        multiply_columns(tensor_lab, most, columns)


def test_a_warpgroup_is_four_warps(tensor_lab: Lab) -> None:
    with pytest.raises(EmulationError, match="four warps of this group are not all there"):
        multiply(tensor_lab, block=96)


@pytest.mark.parametrize(
    ("name", "launch", "reason"),
    [
        ("change_words", {"value": 1}, "the selector 0x8000 has a digit above 7"),
        ("change_words", {"value": 2}, r"uniform: \d+ here, 0 in lane 0"),
        ("load_rows<4>", {"value": 1, "shared": 512}, "a lane of the warp has returned"),
        ("load_rows<4>", {"value": 2, "shared": 512}, "not a multiple of 16"),
        ("load_rows<4>", {"value": 3, "shared": 512}, "not in this block's shared memory"),
        ("store_turned<4>", {"value": 1, "shared": 512}, "a lane of the warp has returned"),
        ("store_turned<4>", {"value": 2, "shared": 512}, "not a multiple of 16"),
        ("store_turned<2>", {"value": 3, "shared": 512}, "not in this block's shared memory"),
        ("multiply_by_warp<bf16>", {"value": 1, "count": 1}, "a lane of the warp has returned"),
        ("multiply_by_warp<bf16>", {"value": 2, "count": 1}, r"deadlock(.|\n)*multiply_warp"),
    ],
)
def test_mistakes_are_told(tensor_lab: Lab, name: str, launch: dict[str, int], reason: str) -> None:
    source, other, out = words(2048), torch.arange(2048).int() % 32, unset(8192)
    with pytest.raises(EmulationError, match=reason):
        tensor_lab.run(name, source, out, other, **launch)
