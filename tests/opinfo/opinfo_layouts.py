"""Where numbers lie in memory, and which numbers: what calls are tried with."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Layout = Callable[[Tensor], Tensor]


def dense(values: Tensor) -> Tensor:
    return values.clone(memory_format=torch.contiguous_format)


def negative_view(values: Tensor) -> Tensor:
    """With the lazy negative bit: what lies in memory has the other sign."""
    return torch._neg_view(dense(-values))


def conjugate_view(values: Tensor) -> Tensor:
    """The same, as a user comes by it; torch has no complex numbers of bf16 or ints."""
    if values.dtype == torch.bfloat16 or not values.is_floating_point():
        return negative_view(values)
    # Not by arithmetic, in which infinities make NaN.
    return torch.view_as_complex(torch.stack((values, -values), -1)).conj().imag


def zero_tensor(values: Tensor) -> Tensor:
    """All zeros, and no memory: what autograd makes of a gradient that is known to be zero."""
    return torch._efficientzerotensor(values.shape, dtype=values.dtype, device=values.device)


def expanded_rows(values: Tensor) -> Tensor:
    """One row many times; strides of zero."""
    if values.dim() < 2 or not values.numel():
        return dense(values)
    first = dense(values[(0,) * (values.dim() - 1)])
    return first.expand(values.shape)


def expanded_columns(values: Tensor) -> Tensor:
    """Each row one number many times."""
    if not values.dim() or not values.numel():
        return dense(values)
    return dense(values[..., :1]).expand(values.shape)


def overlapping(values: Tensor) -> Tensor:
    """Each row begins one element after the one before it, as `unfold` makes them."""
    if not values.dim() or not values.numel():
        return dense(values)
    rows = values.reshape(-1, values.shape[-1])
    flat = torch.cat((rows[0], rows[1:, -1]))
    strides = [1] * values.dim()
    for dim in range(values.dim() - 3, -1, -1):
        strides[dim] = strides[dim + 1] * values.shape[dim + 1]
    return flat.as_strided(values.shape, strides)


def transposed(values: Tensor) -> Tensor:
    """The last dim is not the one that lies side by side."""
    return dense(values.mT).mT if values.dim() > 1 else dense(values)


def channels_last(values: Tensor) -> Tensor:
    return dense(values.movedim(1, -1)).movedim(-1, 1) if values.dim() > 2 else transposed(values)


def permuted(values: Tensor) -> Tensor:
    """Leading dims that lie the other way round."""
    return dense(values.transpose(0, 1)).transpose(0, 1) if values.dim() > 2 else dense(values)


def sliced(values: Tensor) -> Tensor:
    """Part of wider rows, an odd number of elements apart."""
    if not values.dim():
        return dense(values)
    wide = values.new_zeros((*values.shape[:-1], values.shape[-1] + 3))
    return wide[..., 1 : values.shape[-1] + 1].copy_(values)


def every_other(values: Tensor) -> Tensor:
    if not values.dim():
        return dense(values)
    return values.new_zeros((*values.shape, 2))[..., 1].copy_(values)


def misaligned(values: Tensor) -> Tensor:
    """One element into an allocation."""
    return values.new_zeros(values.numel() + 1)[1:].view(values.shape).copy_(values)


# One tensor at a time, and all at once: what resolves one must not be what resolves all.
LAZY: dict[str, Layout] = {"negative view": negative_view, "conjugate view": conjugate_view}
# Several elements in one place: no op may write to them.
SHARED: dict[str, Layout] = {
    "expanded rows": expanded_rows,
    "expanded columns": expanded_columns,
    "overlapping": overlapping,
}
LAYOUTS: dict[str, Layout] = {
    "dense": dense,
    **LAZY,
    **SHARED,
    "transposed": transposed,
    "channels last": channels_last,
    "permuted": permuted,
    "sliced": sliced,
    "every other": every_other,
    "misaligned": misaligned,
}


# --- extreme values


def _limits(dtype: torch.dtype) -> torch.finfo:
    """Of fp64 those of fp32: what is beyond them has no truth that were more exact."""
    return torch.finfo(torch.float32 if dtype == torch.float64 else dtype)


def _by_row(values: Tensor, factors: list[float]) -> Tensor:
    """Row i times the i-th factor, in fp64; beyond the dtype's limits there are none."""
    most = _limits(values.dtype).max
    rows = values.double().reshape(-1, values.shape[-1]) if values.numel() else values.double()
    if not values.numel():
        return values
    column = torch.tensor(factors, dtype=torch.float64).repeat(len(rows))[: len(rows), None]
    found = (rows * column).clamp(-most, most)
    return found.view(values.shape).to(values.dtype)


def largest(values: Tensor) -> Tensor:
    """The largest number and its negative, and halves of them."""
    most = _limits(values.dtype).max
    return _by_row(values.sign() + (values == 0), [most, most / 2])


def near_largest(values: Tensor) -> Tensor:
    """As large as may be doubled in no sum, and with little left to be added."""
    most = _limits(values.dtype).max
    return _by_row(values.sign() + (values == 0), [most / 1.5, most / 2])


def least(values: Tensor) -> Tensor:
    """Rows of nothing but the lowest number: what masks are made of."""
    return torch.full_like(values, _limits(values.dtype).min)


def large(values: Tensor) -> Tensor:
    return _by_row(values, [1e4, 1e8, 1e12, 1e19, 1e30, 1e36, 3e38])


def tiny(values: Tensor) -> Tensor:
    return _by_row(values, [_limits(values.dtype).tiny])


def denormal(values: Tensor) -> Tensor:
    limits = _limits(values.dtype)
    return _by_row(values, [limits.tiny * limits.eps * 4, limits.tiny / 8])


def equal(values: Tensor) -> Tensor:
    """Each row one number many times, from one to the largest: sums of them are exact in fp64."""
    sizes = torch.tensor([1.0, 1e19, 1e36, 1e38, 3e38]).tolist()
    return _by_row(torch.ones_like(values), sizes)


def offset(values: Tensor) -> Tensor:
    return _by_row(values.sign() * 1e-3 + 1.0, [1e4, 3e4, -1e4])


def _placed(values: Tensor, specials: list[tuple[float, ...]]) -> Tensor:
    """The i-th specials into row i, one after the other from its middle on."""
    found = dense(values)
    if not found.numel():
        return found
    rows, columns = found.view(-1, found.shape[-1]), found.shape[-1]
    for row, some in zip(rows, specials, strict=False):
        for place, special in enumerate(some):
            row[(columns // 2 + place) % columns] = special
    return found


def nan(values: Tensor) -> Tensor:
    return _placed(values, [(torch.nan,)])


def infinite(values: Tensor) -> Tensor:
    inf = torch.inf
    return _placed(values, [(inf,), (-inf,), (inf, -inf), (inf, inf)])


def minus_infinity(values: Tensor) -> Tensor:
    """A masked column; a row of nothing else."""
    found = _placed(values, [(-torch.inf,)] * 3)
    if found.dim() > 1 and found.numel():
        found.view(-1, found.shape[-1])[-1] = -torch.inf
    return found


VALUES: dict[str, Layout] = {
    "largest": largest,
    "least": least,
    "large": large,
    "tiny": tiny,
    "denormal": denormal,
    "equal": equal,
    "offset": offset,
    "nan": nan,
    "infinite": infinite,
    "minus infinity": minus_infinity,
}
# The same of the gradient that comes back; and one that is known to be zero.
GRADIENTS: dict[str, Layout] = {
    "largest gradient": near_largest,
    "denormal gradient": denormal,
    "nan in the gradient": nan,
    "infinite gradient": infinite,
    "zero tensor": zero_tensor,
}
ALL = (*LAYOUTS, *VALUES, *GRADIENTS)
