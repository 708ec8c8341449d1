"""Matrix products into given memory, summed in fp32 (fp64 for fp64) and rounded once.

On a GPU that is cuBLAS. A CPU's own matmul of 16-bit numbers may round its sums on the way, so
there they are converted to fp32, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from gristmill.ops.linear_cross_entropy.chunks import ranges

# What a converted piece of a matrix may take.
PIECE_BYTES = 16 << 20


def linear_into(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """``out = x @ weight.T + bias``, as torch's linear: one rounding, after the bias."""
    if not _native(x):
        wide = x.float()
        for columns in _pieces(weight.t()):
            part = wide @ weight[columns].float().t()
            out[:, columns] = part if bias is None else part + bias[columns].float()
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, add: bool) -> None:
    """``out = a @ b``, or with `add` ``out += a @ b``, which wants an out that sums are taken in.

    `out` has the dtype of `a` and `b`, or fp32 where these have 16 bits.
    """
    if not _native(a):
        wide = a.float()
        for columns in _pieces(b):
            part = wide @ b[:, columns].float()
            if add:
                out[:, columns] += part
            else:
                out[:, columns] = part
    elif out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif not add:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif _adds_wide(a.device, a.dtype):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        for columns in _pieces(b):
            out[:, columns] += torch.mm(a, b[:, columns], out_dtype=out.dtype)


def _native(matrix: torch.Tensor) -> bool:
    """Whether torch's own matmul of such matrices sums in fp32 (or fp64)."""
    return matrix.is_cuda or matrix.dtype.itemsize >= 4


def _pieces(matrix: torch.Tensor) -> Iterator[slice]:
    """The columns of a matrix in pieces that are small in fp32."""
    rows, columns = matrix.shape
    return ranges(columns, max(1, PIECE_BYTES // (4 * max(1, rows))))


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds 16-bit products to an fp32 matrix in one kernel: not all versions."""
    one = torch.ones((16, 16), dtype=dtype, device=device)
    total = torch.zeros((16, 16), dtype=torch.float32, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise  # says nothing of this torch, and is not remembered
    except (RuntimeError, TypeError):
        return False
    return True
