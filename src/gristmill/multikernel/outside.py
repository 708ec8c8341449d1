"""Calls that a compiler must not look into. Imported by what a compiler traces, never before:
importing this imports torch's compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gristmill.multikernel.multikernel import MultiKernel


@torch.compiler.disable(
    reason="a gristmill.MultiKernel chooses when it runs, so a graph can hold it only as a torch "
    "op: give MultiKernel(...) a schema= and a fake="
)
def call(one: MultiKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return one(*args, **kwargs)
