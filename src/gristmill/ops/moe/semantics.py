"""What the ops over dense experts take and give: checks, outputs, and a call by its names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks
from gristmill.ops.experts import semantics as experts_of
from gristmill.ops.experts.semantics import Activation


class Call(NamedTuple):
    """The arguments of a forward call, in the schema's order."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: str
    limit: float | None
    expert_map: torch.Tensor | None
    alpha: float | None

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def intermediate(self) -> int:
        return self.w13.shape[1] // 2

    @property
    def act(self) -> Activation:
        return Activation(self.activation, self.limit, self.alpha)

    def local_ids(self) -> torch.Tensor:
        """``(M, k)`` int64: the expert among those here, -1 where none takes part."""
        return experts_of.local_ids(self.topk_ids, self.expert_map, self.experts)


def check_forward(*args: Any) -> None:
    _check("moe", Call(*args))


def check_backward(dy: Any, *args: Any) -> None:
    *given, weight_grad = args
    op, call = "moe_backward", Call(*given)
    _check(op, call)
    experts_of.check_gradient(op, dy, call.hidden_states)
    checks.boolean(op, "weight_grad", weight_grad)


def outputs_forward(*args: Any) -> torch.Tensor:
    x = Call(*args).hidden_states
    return x.new_empty(x.shape)


def outputs_backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *given, weight_grad = args
    call = Call(*given)
    x, weights = call.hidden_states, call.topk_weights
    trained = (call.w13, call.w2, call.w13_bias, call.w2_bias)
    return (
        x.new_empty(x.shape),
        weights.new_empty(weights.shape),
        *(gradient_like(x, one if weight_grad else None) for one in trained),
    )


def gradient_like(x: torch.Tensor, trained: torch.Tensor | None) -> torch.Tensor:
    """Room for a gradient of what is trained; nothing where there is no such thing."""
    return x.new_empty(0) if trained is None else trained.new_empty(trained.shape)


def _check(op: str, call: Call) -> None:
    x = call.hidden_states
    experts_of.check_tokens(op, x)
    for name, weight in (("w13", call.w13), ("w2", call.w2)):
        checks.float_tensor(op, name, weight)
        checks.same_device(op, name, weight, "hidden_states", x.device)
        if weight.dtype != x.dtype and not _converts(x.device.type):
            raise DtypeError(
                f"{op}: {name} is {checks.listed((weight.dtype,))}, hidden_states are "
                f"{checks.listed((x.dtype,))}; both must have one dtype"
            )
        if weight.dim() != 3:
            shape = "(E, 2 * I, H)" if name == "w13" else "(E, H, I)"
            raise ArgumentError(f"{op}: {name} must have shape {shape}, got {tuple(weight.shape)}")
    hidden, inner = x.shape[1], call.intermediate
    experts_of.check_stacks(op, hidden, _triple(call.w13), _triple(call.w2))
    biases = (
        ("w13_bias", call.w13_bias, (call.experts, 2 * inner)),
        ("w2_bias", call.w2_bias, (call.experts, hidden)),
    )
    experts_of.check_biases(op, x.device, biases)
    experts_of.check_routing(op, x, call.topk_weights, call.topk_ids, call.expert_map)
    experts_of.check_activation(op, call.activation, call.limit, call.alpha)


def _triple(weight: torch.Tensor) -> tuple[int, int, int]:
    experts, rows, columns = weight.shape
    return experts, rows, columns


def _converts(device: str) -> bool:
    """Whether autocast is still to give the tensors one dtype; inside the op it has done so."""
    return device in ("cuda", "cpu") and torch.is_autocast_enabled(device)
