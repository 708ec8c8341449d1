"""What the NVFP4 ops must answer, in fp64. The format is decoded here a second time, too."""

from __future__ import annotations

from typing import Any

import torch
from conformance_truth_core import Truth, accumulator_of
from conformance_truth_experts import Mixture, backward, forward

Tensor = torch.Tensor

# Every partial sum of a chain of additions is rounded: of a few thousand fp32 products by torch's
# own matmul the worst is off by 5.3 roundings of its terms (K from 16 to 8192), where tests allow
# 2.5. What a wrong element or scale makes of it is larger by four orders of magnitude.
CHAIN = 4

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# Bits of the first of two words of a fragment that belong to its last pairs of values.
SHARED = 0x60306030
WORD = 0xFFFFFFFF


def weight_of(
    codes: Tensor,
    scales: Tensor,
    row_scale: Tensor,
    layout: str,
    columns: int,
    *,
    pairs: bool = False,
) -> Tensor:
    """The values of a weight or a stack: element times block scale times row scale.

    `pairs`: in fragments, eight rows of the first half and eight of the second take turns.
    """
    values = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)], dtype=torch.float64)
    values = values.to(codes.device)
    rows = row_scale.shape[-1]
    if layout == "fragments":
        elements, factors = _from_fragments(codes, scales, rows, columns)
        if pairs:
            row = torch.arange(rows, device=codes.device)
            inner = row % (rows // 2)
            at = inner // 8 * 16 + row // (rows // 2) * 8 + inner % 8
            elements, factors = elements[..., at, :], factors[..., at, :]
    else:
        elements = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        if layout == "tiles":
            r = torch.arange(rows, device=codes.device).view(-1, 1)
            c = torch.arange(columns // 16, device=codes.device).view(1, -1)
            across = -(-(columns // 16) // 4)
            at = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            scales = scales.view(torch.uint8)[..., at].view(torch.float8_e4m3fn)
        factors = scales.double()
    assert elements.shape == (*row_scale.shape, columns)
    blocks = values[elements].view(*row_scale.shape, columns // 16, 16)
    return (blocks * factors.unsqueeze(-1)).flatten(-2) * row_scale.double().unsqueeze(-1)


def _from_fragments(
    codes: Tensor, scales: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """Codes and block scales by shifts of whole words, as a kernel would go about it."""
    *stack, slabs, chunks, _ = codes.shape
    # slab, chunk, warp, g, t, half of the rows, word: four bytes each, the lowest first
    raw = codes.view(*stack, slabs, chunks, 4, 8, 4, 2, 2, 4).long()
    one, two = sum(raw[..., byte] << 8 * byte for byte in range(4)).unbind(-1)
    rest = one & SHARED | _right(two, 30) & ~SHARED
    words = (one, _right(one, 4), one << 6, two, _right(two, 4), two << 6)
    pairs = torch.stack((*words, _right(rest, 8), rest << 2), -1)
    sides = [pairs >> 12 + half & 8 | pairs >> 6 + half & 7 for half in (0, 16)]
    # slab, chunk, warp, g, t, half, pair, side -> slab, warp, half, g, chunk, pair, t, side
    found = torch.stack(sides, -1)
    order = (-8, -6, -3, -5, -7, -2, -4, -1)
    first = range(len(stack))
    found = found.permute(*first, *(found.dim() + at for at in order))
    elements = found.reshape(*stack, slabs * 64, chunks * 64)[..., :rows, :columns]
    # slab, chunk, warp, g, half, block -> slab, warp, half, g, chunk, block
    raw = scales.view(*stack, slabs, chunks, 4, 8, 2, 4).long()
    raw = raw.permute(*first, *(raw.dim() + at for at in (-6, -4, -2, -3, -5, -1)))
    raw = raw.reshape(*stack, slabs * 64, chunks * 4)[..., :rows, : columns // 16]
    numbers = (1 + (raw & 7).double() / 8) * 2.0 ** ((raw >> 3) - 20).double()
    return elements, torch.where(raw == 0, 0.0, numbers)


def _right(words: Tensor, by: int) -> Tensor:
    """32-bit words, rotated."""
    return words >> by | words << (32 - by) & WORD


def rounded_off(x: Tensor, act: str | None) -> Tensor:
    """How far each activation may be from itself where `act` permits that it is rounded.

    ``"fp8"``: a row is divided by a scale that makes its largest value 448, the largest of E4M3.
    Three bits of mantissa round to within 1 / 16 of the value, and below 2^-6, where E4M3 has no
    more exponents, to within 2^-10.

    ``"nvfp4"``: 16 values are divided by a scale of their own that makes the largest 6, which is
    itself an E4M3 number s off by at most ds. E2M1 rounds to within a fifth of the value (5 is 4 or
    6), and below 1 to within 1 / 4. What s is too small for is cut at 6, and off by 6 ds.
    """
    h = x.double().abs()
    if act is None or h.numel() == 0:
        return torch.zeros_like(h)
    largest = h.amax(-1, keepdim=True)
    slack = 1 + 2.0**-20  # scales and quotients are fp32
    if act == "fp8":
        return slack * torch.maximum(h / 16, largest / 448 * 2**-10)
    assert act == "nvfp4"
    exact = h.unflatten(-1, (-1, 16)).amax(-1, keepdim=True) / 6
    off = torch.maximum(exact / 16, (largest / (6 * 448)).unsqueeze(-1) * 2**-10)
    off = torch.maximum((exact + off) / 4, 6 * off).expand(*exact.shape[:-1], 16).flatten(-2)
    return slack * torch.maximum(h / 5, off)


def weight_off(weight: Tensor, row_scale: Tensor, act: str | None) -> Tensor:
    """How far each of a weight's values may be from itself beside such activations.

    FP8 products take both sides in FP8: values without their row scale, at most 6 * 448, are made
    an eighth of themselves and rounded as activations are.
    """
    if act != "fp8":
        return torch.zeros_like(weight)
    return torch.maximum(weight.abs() / 16, row_scale.double().abs().unsqueeze(-1) * 8 * 2**-10)


def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    layout: str,
    out_dtype: torch.dtype | None,
    act: str | None,
) -> list[Truth]:
    weight, h = weight_of(codes, scales, row_scale, layout, x.shape[-1]), x.double()
    value, terms = h @ weight.t(), h.abs() @ weight.abs().t()
    off = torch.zeros_like(value)
    if act is not None:
        x_off, w_off = rounded_off(x, act), weight_off(weight, row_scale, act)
        off = x_off @ weight.abs().t() + (h.abs() + x_off) @ w_off.t()
    if act == "fp8":
        # Hopper's FP8 tensor cores keep 13 bits behind the point, 32 products at a time.
        off = off + terms * 2**-13 * (x.shape[-1] / 32 + 1)
    if bias is not None:
        value, terms = value + bias.double(), terms + bias.double().abs()
    return [Truth(value - off, value + off, CHAIN * terms, accumulator_of(x.dtype))]


def linear_backward(
    dy: Tensor,
    codes: Tensor,
    scales: Tensor,
    row_scale: Tensor,
    layout: str,
    columns: int,
    dtype: torch.dtype,
) -> list[Truth]:
    weight, d = weight_of(codes, scales, row_scale, layout, columns), dy.double()
    value, terms = d @ weight, d.abs() @ weight.abs()
    return [Truth(value, value, CHAIN * terms, accumulator_of(dtype))]


def moe(*args: Any) -> list[Truth]:
    return forward(_mixture(args))


def moe_backward(dy: Tensor, *args: Any) -> list[Truth]:
    return backward(_mixture(args), dy)[:2]


def _mixture(args: tuple[Any, ...]) -> Mixture:
    x, weights, ids, *parts, w13_bias, w2_bias, activation, limit, expert_map, layout, alpha = args
    hidden, inner = x.shape[-1], parts[2].shape[-1] // 2

    def w13(number: int) -> Tensor:
        return weight_of(*(part[number] for part in parts[:3]), layout, hidden, pairs=True)

    return Mixture(
        x=x,
        weights=weights,
        ids=ids,
        experts=parts[0].shape[0],
        w13=w13,
        w2=lambda number: weight_of(*(part[number] for part in parts[3:]), layout, inner),
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        limit=limit,
        expert_map=expert_map,
        alpha=alpha,
        # Elements times block scales are exact; with scales of their own rows are not.
        inexact=any(bool((one != one[:, :1]).any()) for one in (parts[2], parts[5])),
    )
