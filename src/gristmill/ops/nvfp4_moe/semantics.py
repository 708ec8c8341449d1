"""What the NVFP4 mixture-of-experts ops take and give: checks, outputs, experts, activations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks
from gristmill.ops.nvfp4_common import Weight, check_weight

ACTIVATIONS = ("silu", "swiglu_oai", "gelu")
OAI_SLOPE = 1.702


class Call(NamedTuple):
    """The arguments of a forward call, in the schema's order."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13_codes: torch.Tensor
    w13_scales: torch.Tensor
    w13_row_scale: torch.Tensor
    w2_codes: torch.Tensor
    w2_scales: torch.Tensor
    w2_row_scale: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: str
    limit: float | None
    expert_map: torch.Tensor | None
    layout: str

    @property
    def w13(self) -> Weight:
        parts = (self.w13_codes, self.w13_scales, self.w13_row_scale)
        return Weight(*parts, self.layout, self.hidden_states.shape[-1])

    @property
    def w2(self) -> Weight:
        parts = (self.w2_codes, self.w2_scales, self.w2_row_scale)
        return Weight(*parts, self.layout, self.intermediate)

    @property
    def experts(self) -> int:
        return self.w13_codes.shape[0]

    @property
    def intermediate(self) -> int:
        return self.w13.rows // 2

    def some(self, tokens: slice) -> Call:
        """The call for some of its tokens."""
        return self._replace(
            hidden_states=self.hidden_states[tokens],
            topk_weights=self.topk_weights[tokens],
            topk_ids=self.topk_ids[tokens],
        )

    def local_ids(self) -> torch.Tensor:
        """``(M, k)`` int64: the expert among those here, -1 where none takes part."""
        ids = self.topk_ids.long()
        if self.expert_map is not None:
            known = (ids >= 0) & (ids < self.expert_map.shape[0])
            # Padded by one, so that a map of no experts has something to look up.
            table = F.pad(self.expert_map.long(), (0, 1), value=-1)
            ids = torch.where(known, table[torch.where(known, ids, 0)], -1)
        return torch.where((ids >= 0) & (ids < self.experts), ids, -1)

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The product that goes into the second matrix, in the dtype of its arguments."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == "silu":
            return F.silu(gate) * up
        if self.activation == "gelu":
            return F.gelu(gate) * up
        return gate * torch.sigmoid(OAI_SLOPE * gate) * (up + 1)

    def activate_backward(
        self, gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up, given that of the product."""
        passes_gate: Any = 1.0
        passes_up: Any = 1.0
        if self.limit is not None:
            passes_gate, passes_up = gate <= self.limit, up.abs() <= self.limit
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.activation == "gelu":
            part = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
            slope = part + gate * torch.exp(-gate.square() / 2) / math.sqrt(2 * math.pi)
        else:
            steep = OAI_SLOPE if self.activation == "swiglu_oai" else 1.0
            part = torch.sigmoid(steep * gate)
            slope = part * (1 + steep * gate * (1 - part))
        factor = up + 1 if self.activation == "swiglu_oai" else up
        return gradient * factor * slope * passes_gate, gradient * gate * part * passes_up


def check_forward(*args: Any) -> None:
    _check("nvfp4_moe", Call(*args))


def check_backward(dy: Any, *args: Any) -> None:
    op, call = "nvfp4_moe_backward", Call(*args)
    _check(op, call)
    checks.float_tensor(op, "dy", dy)
    checks.same_device(op, "dy", dy, "hidden_states", call.hidden_states.device)
    checks.same_shape(op, "dy", dy, "hidden_states", call.hidden_states.shape)


def outputs_forward(*args: Any) -> torch.Tensor:
    x = Call(*args).hidden_states
    return x.new_empty(x.shape)


def outputs_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    x, weights = call.hidden_states, call.topk_weights
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _check(op: str, call: Call) -> None:
    x = call.hidden_states
    checks.float_tensor(op, "hidden_states", x)
    if x.dim() != 2:
        raise ArgumentError(
            f"{op}: hidden_states must have shape (M, H), got {tuple(x.shape)}; flatten the dims "
            f"before the last"
        )
    check_weight(op, "w13_", call.w13, 3, x.device)
    check_weight(op, "w2_", call.w2, 3, x.device)
    _check_experts(op, call)
    _check_routing(op, call)
    checks.one_of(op, "activation", call.activation, ACTIVATIONS)
    if call.limit is not None:
        checks.number(op, "limit", call.limit, minimum=0.0)


def _check_experts(op: str, call: Call) -> None:
    hidden, inner = call.hidden_states.shape[1], call.intermediate
    w13 = (call.experts, call.w13.rows, call.w13.columns)
    if w13[1:] != (2 * inner, hidden):
        raise ArgumentError(
            f"{op}: w13 must have shape (E, 2 * I, H) with H = {hidden}, the last dim of "
            f"hidden_states, got {w13}"
        )
    w2 = (call.w2_codes.shape[0], call.w2.rows, call.w2.columns)
    if w2 != (call.experts, hidden, inner):
        raise ArgumentError(
            f"{op}: w2 must have shape (E, H, I) = {(call.experts, hidden, inner)} beside w13 "
            f"{w13}, got {w2}"
        )
    for name, bias, width in (
        ("w13_bias", call.w13_bias, 2 * inner),
        ("w2_bias", call.w2_bias, hidden),
    ):
        if bias is None:
            continue
        checks.float_tensor(op, name, bias)
        checks.same_device(op, name, bias, "hidden_states", call.hidden_states.device)
        if tuple(bias.shape) != (call.experts, width):
            raise ArgumentError(
                f"{op}: {name} must have shape {(call.experts, width)}, got {tuple(bias.shape)}"
            )


def _check_routing(op: str, call: Call) -> None:
    x, weights, ids, mapped = (
        call.hidden_states,
        call.topk_weights,
        call.topk_ids,
        call.expert_map,
    )
    checks.float_tensor(op, "topk_weights", weights)
    _check_integers(op, "topk_ids", ids)
    for name, value in (("topk_weights", weights), ("topk_ids", ids)):
        checks.same_device(op, name, value, "hidden_states", x.device)
        if value.dim() != 2 or value.shape[0] != x.shape[0]:
            raise ArgumentError(
                f"{op}: {name} must have shape (M, k), a row for each of the {x.shape[0]} rows of "
                f"hidden_states, got {tuple(value.shape)}"
            )
    checks.same_shape(op, "topk_ids", ids, "topk_weights", weights.shape)
    if mapped is not None:
        _check_integers(op, "expert_map", mapped)
        checks.same_device(op, "expert_map", mapped, "hidden_states", x.device)
        if mapped.dim() != 1:
            raise ArgumentError(
                f"{op}: expert_map must have shape (experts of the model,), "
                f"got {tuple(mapped.shape)}"
            )


def _check_integers(op: str, name: str, value: Any) -> None:
    got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    if got not in (torch.int32, torch.int64):
        raise DtypeError(f"{op}: {name} must be a tensor of int32 or int64, got {got}")
