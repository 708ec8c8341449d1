"""What the NVFP4 mixture-of-experts ops take and give: checks, outputs, experts, activations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gristmill.formats.nvfp4.tensor import FRAGMENTS, PAIRS
from gristmill.ops import checks
from gristmill.ops.experts import semantics as experts_of
from gristmill.ops.experts.semantics import Activation
from gristmill.ops.nvfp4_common import OP_LAYOUTS, Weight, check_weight


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
    alpha: float | None

    @property
    def w13(self) -> Weight:
        # Its rows lie in pairs of gate and up, where the weights are in fragments.
        layout = PAIRS if self.layout == FRAGMENTS else self.layout
        parts = (self.w13_codes, self.w13_scales, self.w13_row_scale)
        return Weight(*parts, layout, self.hidden_states.shape[-1])

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
        return experts_of.local_ids(self.topk_ids, self.expert_map, self.experts)

    @property
    def act(self) -> Activation:
        return Activation(self.activation, self.limit, self.alpha)

    @property
    def slope(self) -> float:
        """The factor of gate in the sigmoid of the activation, if that has one."""
        return self.act.slope


def check_forward(*args: Any) -> None:
    _check("nvfp4_moe", Call(*args))


def check_backward(dy: Any, *args: Any) -> None:
    op, call = "nvfp4_moe_backward", Call(*args)
    _check(op, call)
    experts_of.check_gradient(op, dy, call.hidden_states)


def outputs_forward(*args: Any) -> torch.Tensor:
    x = Call(*args).hidden_states
    return x.new_empty(x.shape)


def outputs_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    x, weights = call.hidden_states, call.topk_weights
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _check(op: str, call: Call) -> None:
    x = call.hidden_states
    experts_of.check_tokens(op, x)
    checks.one_of(op, "layout", call.layout, OP_LAYOUTS)
    check_weight(op, "w13_", call.w13, 3, x.device)
    check_weight(op, "w2_", call.w2, 3, x.device)
    hidden, inner = x.shape[1], call.intermediate
    w13 = (call.experts, call.w13.rows, call.w13.columns)
    w2 = (call.w2_codes.shape[0], call.w2.rows, call.w2.columns)
    experts_of.check_stacks(op, hidden, w13, w2)
    biases = (
        ("w13_bias", call.w13_bias, (call.experts, 2 * inner)),
        ("w2_bias", call.w2_bias, (call.experts, hidden)),
    )
    experts_of.check_biases(op, x.device, biases)
    experts_of.check_routing(op, x, call.topk_weights, call.topk_ids, call.expert_map)
    experts_of.check_activation(op, call.activation, call.limit, call.alpha)
