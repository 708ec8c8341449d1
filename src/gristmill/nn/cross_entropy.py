"""Cross entropy as a module."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.cross_entropy import cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    r"""A drop-in for :class:`torch.nn.CrossEntropyLoss` that runs :func:`gristmill.cross_entropy`.

    Takes torch's arguments, and those of the function besides. As in torch classes are in dim 1:
    ``input`` is ``(C,)``, ``(N, C)`` or ``(N, C, d1, ...)``, ``target`` is ``()``, ``(N,)`` or
    ``(N, d1, ...)``, class indices of int64 or int32. Rows whose classes do not lie side by side
    (``d1, ...``) are copied first. Targets that are class probabilities are not supported.

    The loss is fp32 for inputs of 16 bits, where torch's is not. With ``return_lse`` it returns
    ``(loss, lse)``; ``one_pass`` and ``inplace`` as in the function.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        return_lse: bool = False,
        one_pass: bool = False,
        inplace: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss
        self.softcap = softcap
        self.return_lse = return_lse
        self.one_pass = one_pass
        self.inplace = inplace

    def forward(  # type: ignore[override]
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name for it
        target: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        given: tuple[Any, ...] = (input, target)
        if not all(isinstance(one, torch.Tensor) for one in given):
            kinds = " and ".join(type(one).__name__ for one in given)
            raise DtypeError(f"CrossEntropyLoss: input and target must be tensors, got {kinds}")
        if target.is_floating_point():
            raise DtypeError(
                "CrossEntropyLoss: target must hold class indices, int64 or int32; got "
                f"{str(target.dtype).removeprefix('torch.')}: class probabilities are not "
                "supported, use torch.nn.CrossEntropyLoss for them"
            )
        if input.dim() == 0:
            raise ArgumentError("CrossEntropyLoss: input must have a dim of classes, got a scalar")
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        if target.shape != logits.shape[:-1]:
            raise ArgumentError(
                f"CrossEntropyLoss: target must have the shape of input without its classes, "
                f"{tuple(logits.shape[:-1])}, got {tuple(target.shape)} for input "
                f"{tuple(input.shape)}"
            )
        return cross_entropy(
            logits,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            return_lse=self.return_lse,
            one_pass=self.one_pass,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        named = {
            "ignore_index": (self.ignore_index, -100),
            "reduction": (self.reduction, "mean"),
            "label_smoothing": (self.label_smoothing, 0.0),
            "z_loss": (self.z_loss, 0.0),
            "softcap": (self.softcap, None),
            "return_lse": (self.return_lse, False),
            "one_pass": (self.one_pass, False),
            "inplace": (self.inplace, False),
        }
        return ", ".join(f"{k}={v!r}" for k, (v, usual) in named.items() if v != usual)
