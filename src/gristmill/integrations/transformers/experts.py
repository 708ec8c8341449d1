"""Experts of a mixture, as transformers stacks them, in NVFP4.

A module of experts has `gate_up_proj` and `down_proj`, one matrix for each expert, and
``forward(hidden_states, top_k_index, top_k_weights)``. What it computes differs from model to
model: which rows are the gate's, whether matrices are transposed, the activation, limits, biases.
So it is found by trial: a small copy with other weights runs on a few tokens, and the one
description that gives its results is taken. Where none does, the experts are left alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, quantize
from gristmill.formats.nvfp4.tensor import BLOCK, E4M3
from gristmill.integrations.transformers.linears import reason_to_leave_module
from gristmill.nn import NVFP4MoE
from gristmill.ops.experts.semantics import Activation

if TYPE_CHECKING:
    from typing_extensions import Self

GATE_UP, DOWN = "gate_up_proj", "down_proj"
GATE_UP_BIAS, DOWN_BIAS = "gate_up_proj_bias", "down_proj_bias"
# Sizes of the copy that is tried: all different, so that no two dims can be taken for each other.
_EXPERTS, _HIDDEN, _INNER, _TOKENS, _TOP = 5, 24, 14, 10, 3
_TOLERANCE = 2e-6  # in fp64, where models round to fp32 between


class NVFP4Experts(NVFP4MoE):
    """:class:`gristmill.nn.NVFP4MoE` called as transformers calls experts: ids before weights."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden_states.reshape(-1, self.hidden_size)
        top = top_k_index.shape[-1]
        out = super().forward(rows, top_k_weights.reshape(-1, top), top_k_index.reshape(-1, top))
        return out.reshape(hidden_states.shape)

    @classmethod
    def of_parts(cls, layout: Layout, parts: dict[str, NVFP4Tensor | torch.Tensor]) -> Self:
        """From w13 and w2 in NVFP4, named as the dense ones, and biases, laid out as by `split`."""
        w13, w2 = parts[GATE_UP], parts[DOWN]
        if not isinstance(w13, NVFP4Tensor) or not isinstance(w2, NVFP4Tensor):
            raise TypeError("NVFP4Experts.of_parts: weights must be NVFP4Tensors")
        biases = [parts.get(name) for name in (GATE_UP_BIAS, DOWN_BIAS)]
        w13_bias, w2_bias = (one if isinstance(one, torch.Tensor) else None for one in biases)
        name, limit, alpha = layout.activation
        return cls._of(w13, w2, w13_bias, w2_bias, name, limit, alpha)


@dataclass(frozen=True)
class Layout:
    """How experts lie in their parameters, and what is made of gate and up."""

    transposed: bool  # matrices are (in, out)
    interleaved: bool  # rows of gate and up alternate
    up_first: bool
    activation: Activation

    def split(self, stacked: torch.Tensor, *, bias: bool = False) -> tuple[torch.Tensor, ...]:
        """Gate and up, ``(E, I, H)`` or ``(E, I)`` of biases: views."""
        if self.transposed and not bias:
            stacked = stacked.transpose(1, 2)
        half = stacked.shape[1] // 2
        if self.interleaved:
            first, second = stacked[:, ::2], stacked[:, 1::2]
        else:
            first, second = stacked[:, :half], stacked[:, half:]
        return (second, first) if self.up_first else (first, second)

    def down(self, stacked: torch.Tensor) -> torch.Tensor:
        """``(E, H, I)``: a view."""
        return stacked.transpose(1, 2) if self.transposed else stacked

    def quantized(self, name: str, dense: torch.Tensor, method: str) -> NVFP4Tensor | torch.Tensor:
        """A parameter as `NVFP4Experts` holds it: biases as they are, gate rows first."""
        dense = dense.detach()
        if name == DOWN_BIAS:
            return dense
        if name == GATE_UP_BIAS:
            return torch.cat(self.split(dense, bias=True), 1)
        if name == DOWN:
            return quantize(self.down(dense), method=method)
        return stacked_rows([quantize(part, method=method) for part in self.split(dense)])


def stacked_rows(parts: list[NVFP4Tensor]) -> NVFP4Tensor:
    """Stacks of matrices with one K as one, rows below rows."""
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts], -2)
    return NVFP4Tensor(
        torch.cat([part.codes for part in parts], -2),
        scales.view(E4M3),
        torch.cat([part.row_scale for part in parts], -1),
    )


def are_experts(module: torch.nn.Module) -> bool:
    """Whether a module has stacks of expert matrices, of whatever kind."""
    stacks = [
        name for name, one in module._parameters.items() if one is not None and one.dim() == 3
    ]
    return DOWN in stacks or GATE_UP in stacks


def parameters_of(experts: torch.nn.Module) -> tuple[str, ...]:
    """The names of its parameters: weights, and biases where it has them."""
    return tuple(name for name, one in experts._parameters.items() if one is not None)


def layout_of(experts: torch.nn.Module, *, meta: bool = False) -> Layout | str:
    """How experts lie and what they compute, or why they cannot be in NVFP4."""
    known = {GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS}
    lacking = [name for name in (GATE_UP, DOWN) if name not in parameters_of(experts)]
    if lacking:
        return f"it has no {lacking[0]}"
    reason = reason_to_leave_module(experts, known, meta=meta)
    if reason is not None:
        return reason
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    sizes = _sizes(experts)
    if isinstance(sizes, str):
        return sizes
    transposed, _, hidden, inner = sizes
    for what, size in (("inputs", hidden), ("values between the matrices", inner)):
        if size % BLOCK:
            return f"its {size} {what} are not a multiple of {BLOCK}"
    return _found_by_trial(experts, transposed)


def _sizes(experts: torch.nn.Module) -> tuple[bool, int, int, int] | str:
    """Whether matrices are transposed; E, H and I."""
    gate_up, down = (tuple(experts.get_parameter(name).shape) for name in (GATE_UP, DOWN))
    told = f"gate_up_proj {gate_up} and down_proj {down} do not fit together"
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0] or not gate_up[0]:
        return told
    count, rows, columns = gate_up
    if down[1:] == (columns, rows // 2) and rows % 2 == 0:
        found = False, count, columns, rows // 2
    elif down[1:] == (columns // 2, rows) and columns % 2 == 0:
        found = True, count, rows, columns // 2
    else:
        return told
    shapes = {GATE_UP_BIAS: (count, 2 * found[3]), DOWN_BIAS: (count, found[2])}
    for name, shape in shapes.items():
        bias = experts._parameters.get(name)
        if bias is not None and tuple(bias.shape) != shape:
            return f"{name} has shape {tuple(bias.shape)}, not {shape}"
    return found


def _found_by_trial(experts: torch.nn.Module, transposed: bool) -> Layout | str:
    forward = inspect.unwrap(type(experts).forward)
    taken = [
        one
        for one in inspect.signature(forward).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(taken) != 4:
        names = ", ".join(one.name for one in taken[1:])
        return f"it is called with ({names}), not with hidden states, expert ids and weights"
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(0)
        small = _small_copy(experts, transposed)
        hidden = torch.randn(_TOKENS, _HIDDEN, dtype=torch.float64)
        # From where an activation bends to where every limit has cut.
        hidden *= torch.logspace(-1, 5, _TOKENS, dtype=torch.float64)[:, None]
        ids = torch.rand(_TOKENS, _EXPERTS).argsort(1)[:, :_TOP].contiguous()
        weights = torch.rand(_TOKENS, _TOP, dtype=torch.float64) + 0.1
        try:
            result = forward(small, hidden.clone(), ids.clone(), weights.clone())
        except Exception as problem:  # whatever a model's code may say of a copy
            return f"a small copy of it does not run: {type(problem).__name__}: {problem}"
        if not isinstance(result, torch.Tensor) or result.shape != hidden.shape:
            return "its result is not one tensor of the shape of its input"
        for layout in _layouts(experts, transposed):
            wanted = _by_hand(small, layout, hidden, ids, weights)
            error = (result.double() - wanted).abs().amax(1)
            if bool((error <= _TOLERANCE * wanted.abs().amax(1)).all()):
                return layout
    return "what it computes is none of the activations that gristmill has for experts"


def _small_copy(experts: torch.nn.Module, transposed: bool) -> torch.nn.Module:
    """Experts like these, few and small, with random values in fp64."""
    small = copy.copy(experts)
    small.__dict__ = dict(experts.__dict__)
    shapes = {
        GATE_UP: (2 * _INNER, _HIDDEN),
        DOWN: (_HIDDEN, _INNER),
        GATE_UP_BIAS: (2 * _INNER,),
        DOWN_BIAS: (_HIDDEN,),
    }
    small._parameters = {}
    for name, given in experts._parameters.items():
        shape = shapes.get(name, ())
        shape = shape[::-1] if transposed else shape
        values = torch.randn(_EXPERTS, *shape, dtype=torch.float64) * 0.2
        small._parameters[name] = None if given is None else torch.nn.Parameter(values)
    known = _sizes(experts)
    if isinstance(known, str):
        raise TypeError(known)
    # Sizes that the forward may look up.
    for word, old, new in (
        ("expert", known[1], _EXPERTS),
        ("hidden", known[2], _HIDDEN),
        ("inter", known[3], _INNER),
        ("expert_dim", known[3], _INNER),
    ):
        for name, value in experts.__dict__.items():
            if word in name and type(value) is int and value == old:
                small.__dict__[name] = new
    return small


def _layouts(experts: torch.nn.Module, transposed: bool) -> Iterator[Layout]:
    """All that might be, the usual ones first."""
    numbers = [
        float(value)
        for name, value in experts.__dict__.items()
        if type(value) in (int, float)
        and value > 0
        and any(word in name for word in ("limit", "alpha", "clamp", "beta"))
    ]
    limits: list[float | None] = [None, *dict.fromkeys(numbers)]
    activations = [Activation(name, limit, None) for limit in limits for name in ("silu", "gelu")]
    activations += [
        Activation("swiglu_oai", limit, alpha) for limit in limits for alpha in (None, *numbers)
    ]
    for activation in activations:
        for interleaved in (False, True):
            for up_first in (False, True):
                yield Layout(transposed, interleaved, up_first, activation)


def _by_hand(
    experts: Any,
    layout: Layout,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    gate_up, down = (experts.get_parameter(name) for name in (GATE_UP, DOWN))
    gate, up = layout.split(gate_up)
    gate, up = (torch.einsum("th,tkih->tki", hidden, part[ids]) for part in (gate, up))
    bias = experts._parameters.get(GATE_UP_BIAS)
    if bias is not None:
        first, second = layout.split(bias, bias=True)
        gate, up = gate + first[ids], up + second[ids]
    inner = layout.activation.apply(gate, up)
    out = torch.einsum("tki,tkhi->tkh", inner, layout.down(down)[ids])
    bias = experts._parameters.get(DOWN_BIAS)
    if bias is not None:
        out = out + bias[ids]
    return (out * weights[..., None]).sum(1)
