"""How the functions of the norms reach their FP8 ops."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops import inline
from gristmill.ops.norm_fp8 import semantics
from gristmill.ops.op import Arguments, Op


def call_fp8(
    op: Op,
    function: str,
    tensors: semantics.Tensors,
    args: Arguments,
) -> Any:
    """`function`'s results, by `op`: y, and what else was asked for.

    `tensors` are the tensors among `args`, the last of them the scale; the last of `args` says
    whether amax is wanted.
    """
    semantics.refuse_gradient(function, tensors)
    if not torch.compiler.is_compiling():
        results = op.call(tuple(tensors), args)
    elif op.name in inline.NAMES:
        op.check(*args)
        results = op.reference(*args)
    else:
        results = op.traced(*args)
    return semantics.returned(results, tensors[-1], args[-1])
