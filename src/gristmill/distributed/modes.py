"""The backward pass of a loss over ranks under the modes of its forward pass, as those of ops."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gristmill.select.overrides import restored, token


def keep_modes(ctx: Any) -> None:
    """In a forward pass: remember `gristmill.use` and `gristmill.batch_invariant`.

    Not while a compiler traces it: as with ops, what it makes follows the process.
    """
    ctx.overrides = None if torch.compiler.is_compiling() else token()


def modes_of(ctx: Any) -> AbstractContextManager[Any]:
    """In its backward pass: those that were kept."""
    return nullcontext() if ctx.overrides is None else restored(ctx.overrides)
