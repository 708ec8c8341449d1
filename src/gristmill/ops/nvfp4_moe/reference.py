"""NVFP4 mixture of experts in plain PyTorch: the semantics, and the kernel for anything."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.ops.experts import reference
from gristmill.ops.experts.reference import Matrix
from gristmill.ops.nvfp4_moe.semantics import Call


def nvfp4_moe(*args: Any) -> torch.Tensor:
    call = Call(*args)
    return reference.forward(call, *_matrices(call))


def nvfp4_moe_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    return reference.backward(dy, call, *_matrices(call))


def _matrices(call: Call) -> tuple[Matrix, Matrix]:
    w13, w2 = call.w13, call.w2
    return (
        lambda expert, dtype: w13.expert(expert).whole(dtype),
        lambda expert, dtype: w2.expert(expert).whole(dtype),
    )
