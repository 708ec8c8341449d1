"""transformers' losses over tokens, on gristmill's cross entropy.

They take what transformers' own take, in the same order, and treat it the same way: which labels
belong to which logits, `ignore_index`, `num_items_in_batch`; arguments they do not know are
swallowed. The logits are read as they are, without a copy in fp32; sums are taken in fp32 all the
same. They are objects of module-level classes, so that a model can be copied and pickled with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.cross_entropy import cross_entropy
from gristmill.ops.linear_cross_entropy import linear_cross_entropy


class Handover:
    """What a model's head leaves for its loss in the place of logits, within one forward pass.

    The model's forward opens it, the head puts its input and its weights there, and the loss takes
    them. Outside of a forward pass it is closed and holds nothing.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_taken = False
        self.hidden: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def open(self) -> None:
        self.is_open = True
        self.is_taken = False

    def put(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert self.hidden is not None
        assert self.weight is not None
        found = self.hidden, self.weight, self.bias
        self.is_taken = True
        self.hidden = self.weight = self.bias = None
        return found

    def close(self) -> None:
        self.is_open = False
        self.hidden = self.weight = self.bias = None


class Loss:
    """A loss of tokens. `previous` is what the model's user had set before it, None for nothing.

    With a `handover` that holds something, the loss is that of `softcap * tanh(scale * x W^T /
    softcap)`, and the logits it is called with are a stand-in that it does not look at.
    """

    # The name of transformers' function that it takes the place of.
    called = ""

    def __init__(
        self,
        previous: Callable[..., Any] | None = None,
        handover: Handover | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ):
        self.previous = previous
        self.handover = handover
        self.scale = scale
        self.softcap = softcap

    def _of(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        classes: int,
        num_items_in_batch: Any,
        ignore_index: int,
    ) -> torch.Tensor:
        """The sum over the batch divided by the number of items, or the mean of this one."""
        reduction = "mean" if num_items_in_batch is None else "sum"
        if self.handover is not None and self.handover.hidden is not None:
            loss = self._without_logits(target, classes, ignore_index, reduction)
        else:
            if logits.shape[-1] != classes:
                logits = logits.view(-1, classes)
            target = _like_rows(target, logits)
            found = cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
            loss = cast(torch.Tensor, found)
        if loss.dtype == torch.float64:
            loss = loss.float()  # what transformers returns for logits of any dtype
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / cast(torch.Tensor, num_items_in_batch)  # or a number

    def _without_logits(
        self, target: torch.Tensor, classes: int, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        assert self.handover is not None
        hidden, weight, bias = self.handover.take()
        if weight.shape[0] != classes:
            raise ArgumentError(
                f"{self.called}: vocab_size must be the number of the head's rows, "
                f"{weight.shape[0]}, got {classes}"
            )
        if self.scale != 1.0:
            # Exact for powers of two, which models prefer; otherwise one rounding of x, where the
            # model itself rounds its logits twice.
            hidden = hidden * self.scale
            bias = None if bias is None else bias * self.scale
        return linear_cross_entropy(
            hidden,
            weight,
            _like_rows(target, hidden),
            bias=bias,
            softcap=self.softcap,
            ignore_index=ignore_index,
            reduction=reduction,
        )


class CausalLMLoss(Loss):
    """transformers' `ForCausalLMLoss`: each token predicts the next one's label."""

    called = "ForCausalLMLoss"

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            if labels is None:
                raise ArgumentError(f"{self.called}: labels or shift_labels must be given")
            padded = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)
            shift_labels = padded[..., 1:].contiguous()
        return self._of(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


class MaskedLMLoss(Loss):
    """transformers' `ForMaskedLMLoss`: a label for each token."""

    called = "ForMaskedLMLoss"

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._of(logits, labels, vocab_size, num_items_in_batch, ignore_index)


class TokenClassificationLoss(Loss):
    """transformers' `ForTokenClassification`: a class of `config.num_labels` for each token."""

    called = "ForTokenClassification"

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        config: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._of(logits, labels, config.num_labels, num_items_in_batch, ignore_index)


def _like_rows(target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One target for each row, on the rows' device: transformers takes them in any shape."""
    target = target.to(rows.device)
    if target.shape == rows.shape[:-1]:
        return target
    if target.numel() != rows.shape[:-1].numel():
        raise ArgumentError(
            f"loss_function: labels must be one for each of the logits' rows, "
            f"{tuple(rows.shape[:-1])}, got {tuple(target.shape)}"
        )
    return target.reshape(rows.shape[:-1])
