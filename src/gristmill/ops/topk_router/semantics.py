"""What the router ops take and give: checks, outputs, and what all variants must agree on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks

SCORINGS = ("softmax", "sigmoid")
IDS = (torch.int32, torch.int64)
# Added to the sum of sigmoids that weights are divided by, as models have it.
SMALLEST_TOTAL = 1e-20


class Call(NamedTuple):
    """The arguments of a forward call, in the schema's order."""

    logits: torch.Tensor
    topk: int
    scoring: str
    renormalize: bool
    bias: torch.Tensor | None
    groups: int
    topk_groups: int
    scale: float
    ids_dtype: torch.dtype | None

    @property
    def ids(self) -> torch.dtype:
        """The dtype of the ids."""
        return torch.int32 if self.ids_dtype is None else self.ids_dtype

    @property
    def experts(self) -> int:
        return self.logits.shape[1]

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.groups

    @property
    def group_size(self) -> int:
        return self.experts // self.groups


class BackwardCall(NamedTuple):
    """The arguments of a backward call, in the schema's order."""

    dweights: torch.Tensor
    logits: torch.Tensor
    topk_ids: torch.Tensor
    scoring: str
    renormalize: bool
    scale: float


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums, and of the weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_forward(*args: Any) -> None:
    op, call = "topk_router", Call(*args)
    _check_logits(op, call.logits)
    experts = call.experts
    _integer(op, "topk", call.topk)
    if not 1 <= call.topk <= experts:
        raise ArgumentError(
            f"{op}: topk must be from 1 to the {experts} experts that logits have, got {call.topk}"
        )
    _check_scores(op, call)
    bias = call.bias
    if bias is not None:
        checks.float_tensor(op, "bias", bias)
        checks.same_device(op, "bias", bias, "logits", call.logits.device)
        if bias.dim() != 1 or bias.shape[0] != experts:
            raise ArgumentError(
                f"{op}: bias must have shape ({experts},), one value for each expert, got "
                f"{tuple(bias.shape)}"
            )
    _check_groups(op, call)
    if call.ids not in IDS:
        raise DtypeError(
            f"{op}: ids_dtype must be torch.int32 or torch.int64, got {call.ids_dtype!r}"
        )


def check_backward(*args: Any) -> None:
    op, call = "topk_router_backward", BackwardCall(*args)
    _check_logits(op, call.logits)
    rows, experts = call.logits.shape
    checks.float_tensor(op, "dweights", call.dweights)
    ids: Any = call.topk_ids
    got = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
    if got not in IDS:
        raise DtypeError(f"{op}: topk_ids must be a tensor of int32 or int64, got {got}")
    checks.dense(op, "topk_ids", ids)
    for name, value in (("dweights", call.dweights), ("topk_ids", ids)):
        checks.same_device(op, name, value, "logits", call.logits.device)
        if value.dim() != 2 or value.shape[0] != rows or not 1 <= value.shape[1] <= experts:
            raise ArgumentError(
                f"{op}: {name} must have shape (M, topk), a row for each of the {rows} rows of "
                f"logits, and topk from 1 to {experts}, got {tuple(value.shape)}"
            )
    checks.same_shape(op, "topk_ids", ids, "dweights", call.dweights.shape)
    _check_scores(op, call)


def outputs_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    shape = (call.logits.shape[0], call.topk)
    weights = call.logits.new_empty(shape, dtype=accumulator(call.logits.dtype))
    return weights, call.logits.new_empty(shape, dtype=call.ids)


def outputs_backward(*args: Any) -> torch.Tensor:
    logits = BackwardCall(*args).logits
    return logits.new_empty(logits.shape)


def _check_logits(op: str, logits: Any) -> None:
    checks.float_tensor(op, "logits", logits)
    if logits.dim() != 2:
        raise ArgumentError(
            f"{op}: logits must have shape (M, experts), got {tuple(logits.shape)}; flatten the "
            f"dims before the last"
        )
    if logits.shape[1] == 0:
        raise ArgumentError(f"{op}: logits must have at least one expert, got {(*logits.shape,)}")


def _check_scores(op: str, call: Call | BackwardCall) -> None:
    checks.one_of(op, "scoring", call.scoring, SCORINGS)
    checks.boolean(op, "renormalize", call.renormalize)
    checks.number(op, "scale", call.scale)


def _check_groups(op: str, call: Call) -> None:
    _integer(op, "groups", call.groups)
    _integer(op, "topk_groups", call.topk_groups)
    if call.groups < 1 or call.experts % call.groups:
        raise ArgumentError(
            f"{op}: groups must be at least 1 and divide the {call.experts} experts that logits "
            f"have, got {call.groups}"
        )
    if not 1 <= call.topk_groups <= call.groups:
        raise ArgumentError(
            f"{op}: topk_groups must be from 1 to groups, {call.groups}, got {call.topk_groups}"
        )
    most = call.topk_groups * call.group_size
    if call.topk > most:
        raise ArgumentError(
            f"{op}: topk must be at most {most}, the experts in {call.topk_groups} of "
            f"{call.groups} groups of {call.experts}, got {call.topk}"
        )


def _integer(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise DtypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
