"""One call of a function of ours beside the one of torch that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from conformance_truth_core import Truth

Tensor = torch.Tensor
Tensors = tuple[Any, ...]
# Of the tensors, the gradients that come back, and torch's results, all but the first in fp64: how
# large the terms of each result, then of each gradient are.
Terms = Callable[[Tensors, list[Tensor], list[Tensor]], list[Truth]]
# Of the same, and as many: how far what a row is made from gets on the way, before it cancels or is
# divided; to broadcast.
Reach = Callable[[Tensors, list[Tensor], list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Call:
    """`ours(*tensors)` and `torchs(*tensors)`, which is asked in fp64, give the same results.

    `names`: of the tensors, for reports. `grads`: positions of those that are differentiated.
    `ops`: the ops behind the call, the one of the forward pass first. `written`: positions of the
    tensors that are overwritten. `wide`: whether results have the accumulator's dtype.
    `sums`: whether sums on the way may overflow where the result fits. `edges`: gradients are exact
    to the largest number; else their sums may overflow, too. `reach`: what else may overflow, row
    by row; `scaled`: not in the reference, which scales such rows.
    """

    sample: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    tensors: Tensors
    names: tuple[str, ...]
    ops: tuple[str, ...]
    terms: Terms
    grads: tuple[int, ...] = (0,)
    written: tuple[int, ...] = ()
    wide: bool = False
    sums: bool = False
    edges: bool = False
    reach: Reach | None = None
    scaled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        own: torch.dtype = self.tensors[0].dtype
        return own


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def words(sample: Any) -> str:
    """A sample of an OpInfo, in a line."""
    args = [sample.input, *sample.args]
    named = [f"{name}={_word(value)}" for name, value in sample.kwargs.items()]
    return ", ".join([*map(_word, args), *named])


def _word(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    kind = "" if value.is_floating_point() else f" {str(value.dtype).removeprefix('torch.')}"
    return f"{list(value.shape)}{kind}"


def without_none(values: Sequence[Any], keep: Sequence[int]) -> tuple[int, ...]:
    """Of the positions in `keep`, those whose tensor is there."""
    return tuple(at for at in keep if values[at] is not None)
