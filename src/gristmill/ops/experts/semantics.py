"""What the ops over the experts of a mixture share: activations, local ids, checks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks

ACTIVATIONS = ("silu", "swiglu_oai", "gelu")
# The slope of swiglu_oai's sigmoid where no alpha is given.
OAI_SLOPE = 1.702


class Activation(NamedTuple):
    """What is made of gate and up: the arguments `activation`, `limit` and `alpha` of a call."""

    name: str
    limit: float | None
    alpha: float | None

    @property
    def slope(self) -> float:
        """The factor of gate in the sigmoid of ``"silu"`` and ``"swiglu_oai"``."""
        if self.name != "swiglu_oai":
            return 1.0
        return OAI_SLOPE if self.alpha is None else self.alpha

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The product that goes into the second matrix, in the dtype of its arguments."""
        gate, up = self._cut(gate, up)
        if self.name == "silu":
            return F.silu(gate) * up
        if self.name == "gelu":
            return F.gelu(gate) * up
        return gate * torch.sigmoid(self.slope * gate) * (up + 1)

    def backward(
        self, gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up, given that of the product; zeros for what is cut.

        At the limit nothing is cut yet. The gradient jumps there: whoever has rounded gate and up
        may find one on the other side.
        """
        passes_gate: Any = 1.0
        passes_up: Any = 1.0
        if self.limit is not None:
            passes_gate, passes_up = gate <= self.limit, up.abs() <= self.limit
        gate, up = self._cut(gate, up)
        if self.name == "gelu":
            part = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
            slope = part + gate * torch.exp(-gate.square() / 2) / math.sqrt(2 * math.pi)
        else:
            part = torch.sigmoid(self.slope * gate)
            slope = part * (1 + self.slope * gate * (1 - part))
        factor = up + 1 if self.name == "swiglu_oai" else up
        return gradient * factor * slope * passes_gate, gradient * gate * part * passes_up

    def _cut(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)


def local_ids(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None, experts: int
) -> torch.Tensor:
    """``(M, k)`` int64: the expert among those here, -1 where none takes part."""
    ids = topk_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        # Padded by one, so that a map of no experts has something to look up.
        table = F.pad(expert_map.long(), (0, 1), value=-1)
        ids = torch.where(known, table[torch.where(known, ids, 0)], -1)
    return torch.where((ids >= 0) & (ids < experts), ids, -1)


def check_tokens(op: str, hidden_states: Any) -> None:
    checks.float_tensor(op, "hidden_states", hidden_states)
    if hidden_states.dim() != 2:
        raise ArgumentError(
            f"{op}: hidden_states must have shape (M, H), got {tuple(hidden_states.shape)}; "
            f"flatten the dims before the last"
        )


def check_gradient(op: str, dy: Any, hidden_states: torch.Tensor) -> None:
    """dy of a backward op, beside hidden states that have been checked."""
    checks.float_tensor(op, "dy", dy)
    checks.same_device(op, "dy", dy, "hidden_states", hidden_states.device)
    checks.same_shape(op, "dy", dy, "hidden_states", hidden_states.shape)


def check_stacks(op: str, hidden: int, w13: tuple[int, int, int], w2: tuple[int, int, int]) -> None:
    """That the shapes of the weights fit tokens of H values, and each other."""
    experts, inner = w13[0], w13[1] // 2
    if w13[1:] != (2 * inner, hidden):
        raise ArgumentError(
            f"{op}: w13 must have shape (E, 2 * I, H) with H = {hidden}, the last dim of "
            f"hidden_states, got {w13}"
        )
    if w2 != (experts, hidden, inner):
        raise ArgumentError(
            f"{op}: w2 must have shape (E, H, I) = {(experts, hidden, inner)} beside w13 "
            f"{w13}, got {w2}"
        )


def check_biases(
    op: str,
    device: torch.device,
    biases: Iterable[tuple[str, torch.Tensor | None, tuple[int, int]]],
) -> None:
    """Names, values and the shapes they must have; any float dtype will do."""
    for name, bias, shape in biases:
        if bias is None:
            continue
        checks.float_tensor(op, name, bias)
        checks.same_device(op, name, bias, "hidden_states", device)
        if tuple(bias.shape) != shape:
            raise ArgumentError(f"{op}: {name} must have shape {shape}, got {tuple(bias.shape)}")


def check_routing(
    op: str, hidden_states: torch.Tensor, topk_weights: Any, topk_ids: Any, expert_map: Any
) -> None:
    checks.float_tensor(op, "topk_weights", topk_weights)
    _check_integers(op, "topk_ids", topk_ids)
    rows = hidden_states.shape[0]
    for name, value in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        checks.same_device(op, name, value, "hidden_states", hidden_states.device)
        if value.dim() != 2 or value.shape[0] != rows:
            raise ArgumentError(
                f"{op}: {name} must have shape (M, k), a row for each of the {rows} rows of "
                f"hidden_states, got {tuple(value.shape)}"
            )
    checks.same_shape(op, "topk_ids", topk_ids, "topk_weights", topk_weights.shape)
    if expert_map is None:
        return
    _check_integers(op, "expert_map", expert_map)
    checks.same_device(op, "expert_map", expert_map, "hidden_states", hidden_states.device)
    if expert_map.dim() != 1:
        raise ArgumentError(
            f"{op}: expert_map must have shape (experts of the model,), "
            f"got {tuple(expert_map.shape)}"
        )


def check_activation(op: str, activation: Any, limit: Any, alpha: Any) -> None:
    checks.one_of(op, "activation", activation, ACTIVATIONS)
    if limit is not None:
        checks.number(op, "limit", limit, minimum=0.0)
    if alpha is None:
        return
    checks.number(op, "alpha", alpha)
    if activation != "swiglu_oai":
        raise ArgumentError(
            f"{op}: alpha is the slope in 'swiglu_oai' and has no meaning for {activation!r}, "
            f"got {alpha!r}; leave it None"
        )


def _check_integers(op: str, name: str, value: Any) -> None:
    got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    if got not in (torch.int32, torch.int64):
        raise DtypeError(f"{op}: {name} must be a tensor of int32 or int64, got {got}")
    checks.dense(op, name, value)
