"""The variants that dequantise a piece of the experts at a time and leave products to torch.

Elements times block scales are exact in 16 bits, so a piece holds those; the row scales, the
biases, the activation and the sums over experts are taken in fp32. On a GPU torch's grouped mm
rounds its products to bf16 first: it has no other result. There the gradients of gate and up are
rounded to the dtype of the tokens, too, before they are multiplied; and a gate or an up so close to
the limit that this rounding takes it across is cut, or not, by the rounded value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.experts.slots import few
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.nvfp4_moe import semantics
from gristmill.ops.nvfp4_moe.semantics import Call
from gristmill.ops.nvfp4_moe.slots import Slots, some_tokens
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant


class Library(Variant):
    """Both directions: what is computed is the problem's op."""

    name = "library"
    summary = "the experts dequantised in pieces of at most 32 MB, torch's grouped mm for each"

    def supports(self, problem: Problem) -> str | None:
        device, slots = problem.device, problem.rows * problem.dim("k")
        if device.kind not in ("cuda", "cpu"):
            return f"takes a CUDA device or a CPU, not {device.kind}"
        if problem.dtype("x") == "float64" or problem.dtype("dy") == "float64":
            return "products are taken in fp32 at most"
        if 0 in (slots, *(size for _, size in problem.dims)):
            return "nothing to compute"
        if device.kind == "cuda" and not few(slots, problem.dim("E")):
            # Elsewhere torch asks the host for the sizes of the groups.
            if device.capability != (9, 0) and device.capability[0] != 10:
                return f"torch's grouped mm waits for the host on {device.arch}"
            if problem.dtype("x") != "bfloat16":
                return f"torch's grouped mm waits for the host with {problem.dtype('x')}"
        return None

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        return _backward if problem.op == "nvfp4_moe_backward" else _forward


def _forward(*args: Any) -> torch.Tensor:
    call, y = Call(*args), semantics.outputs_forward(*args)
    for part in some_tokens(call, call.w13.columns + call.intermediate):
        _forward_some(call.some(part), y[part])
    return y


def _forward_some(call: Call, y: torch.Tensor) -> None:
    slots = Slots(call)
    x, shares = slots.rows_of(call.hidden_states), slots.column_of(call.topk_weights)
    h = x.new_empty((slots.count, call.intermediate))
    for piece in slots.pieces(call.w13.columns, call.intermediate):
        gate, up = _gate_and_up(call, slots, x, piece)
        activated = call.act.apply(gate, up).to(call.hidden_states.dtype)
        h[:, piece.start : piece.stop] = activated
    del x
    for piece in slots.pieces(call.w2.columns, call.w2.rows):
        out = _scaled(slots, slots.times(h, call.w2, rows=piece), call.w2, call.w2_bias, piece)
        # A sum of few, in the order of the token's experts: the same on every run.
        y[:, piece.start : piece.stop] = slots.in_tokens(out.mul_(shares)).sum(1)


def _backward(dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*args)
    dx, dweights = semantics.outputs_backward(dy, *args)
    for part in some_tokens(call, 2 * (call.w13.columns + call.intermediate)):
        _backward_some(dy[part], call.some(part), dx[part], dweights[part])
    return dx, dweights


def _backward_some(dy: torch.Tensor, call: Call, dx: torch.Tensor, dweights: torch.Tensor) -> None:
    slots = Slots(call)
    x, d = slots.rows_of(call.hidden_states), slots.rows_of(dy)
    shares, inner = slots.column_of(call.topk_weights), call.intermediate
    dshares = torch.zeros_like(shares)
    if call.w2_bias is not None:
        dshares += (d * call.w2_bias.float()[slots.expert]).sum(-1, keepdim=True)
    both = x.new_empty((slots.count, 2 * inner))
    parts, top = call.w2.levelled()
    for piece in slots.pieces(call.w2.rows, inner):
        gate, up = _gate_and_up(call, slots, x, piece)
        h = call.act.apply(gate, up).to(call.hidden_states.dtype)
        dh = slots.times(d, call.w2, columns=piece, parts=parts) * top[slots.expert]
        dshares += (dh * h).sum(-1, keepdim=True)
        dgate, dup = call.act.backward(gate, up, dh.mul_(shares))
        both[:, piece.start : piece.stop] = dgate
        both[:, inner + piece.start : inner + piece.stop] = dup
    del x, d
    parts, top = call.w13.levelled()
    for piece in slots.pieces(call.w13.rows, call.w13.columns):
        back = slots.times(both, call.w13, columns=piece, parts=parts) * top[slots.expert]
        dx[:, piece.start : piece.stop] = slots.in_tokens(back).sum(1)
    dweights.copy_(slots.in_tokens(dshares).squeeze(-1))


def _gate_and_up(
    call: Call, slots: Slots, x: torch.Tensor, piece: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some columns of both, in fp32."""
    upper = range(call.intermediate + piece.start, call.intermediate + piece.stop)
    gate, up = (
        _scaled(slots, slots.times(x, call.w13, rows=rows), call.w13, call.w13_bias, rows)
        for rows in (piece, upper)
    )
    return gate, up


def _scaled(
    slots: Slots, total: torch.Tensor, weight: Weight, bias: torch.Tensor | None, rows: range
) -> torch.Tensor:
    """Products with the row scale and the bias of each slot's expert, in fp32."""
    here = slice(rows.start, rows.stop)
    result = total * weight.row_scale[:, here].index_select(0, slots.expert)
    if bias is not None:
        result += bias[:, here].index_select(0, slots.expert)
    return result
