"""The variants that leave the products of dense experts to torch.

Many slots are sorted by expert and go through torch's grouped mm, which reads every expert where it
lies; on a GPU it rounds its products to bf16: it has no other result. Where it is missing, few
slots take copies of their own experts. Biases, activation and the sums over experts are taken in
fp32, on a CPU the products as well. What goes into a product has its dtype: on a GPU the gradients
of gate and up, and h times what a token weighs, are rounded to that of the tokens. Which gates and
ups are cut, both passes see by the rounded ones: the gradient is that of what forward computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gristmill.ops import nvfp4_common as common
from gristmill.ops.experts.slots import GROUPS, SlotOrder, few, grouped_mm
from gristmill.ops.moe.semantics import Call, gradient_like
from gristmill.ops.nvfp4_common import arithmetic, pieces, product
from gristmill.select.device import Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

ALIGNMENT = 16  # bytes: of addresses and strides that grouped mm takes


class Library(Variant):
    """Both directions: what is computed is the problem's op."""

    name = "library"
    summary = "torch's grouped mm over sorted tokens, or bmm for few of them"

    def supports(self, problem: Problem) -> str | None:
        device, slots = problem.device, problem.rows * problem.dim("k")
        if device.kind not in ("cuda", "cpu"):
            return f"takes a CUDA device or a CPU, not {device.kind}"
        if problem.dtype("x") == "float64" or problem.dtype("dy") == "float64":
            return "products are taken in fp32 at most"
        if 0 in (slots, *(size for _, size in problem.dims)):
            return "nothing to compute"
        reason = no_groups(problem)
        if reason is None:
            return None
        if "weight_grad" in problem.flags:
            return f"gradients of weights are products of groups, and {reason}"
        return None if few(slots, problem.dim("E")) else reason

    def bind(self, problem: Problem, config: None) -> Callable[..., Any]:
        grouped = no_groups(problem) is None
        if problem.op == "moe":
            return lambda *args: _forward(grouped, *args)
        idle = _leaves_idle_experts(problem.device)
        return lambda dy, *args: _backward(grouped, idle, dy, *args)


def no_groups(problem: Problem) -> str | None:
    """Why torch's grouped mm does not do for this problem, if so."""
    device, dtype = problem.device, problem.dtype("x")
    if device.kind == "cuda":
        # Elsewhere torch asks the host for the sizes of the groups.
        if device.capability != (9, 0) and device.capability[0] != 10:
            return f"torch's grouped mm waits for the host on {device.arch}"
        if dtype != "bfloat16":
            return f"torch's grouped mm waits for the host with {dtype}"
    values = ALIGNMENT // (2 if device.kind == "cuda" else 4)
    if problem.dim("H") % values or problem.dim("I") % values:
        return f"torch's grouped mm takes H and I in multiples of {values}"
    return None


def _leaves_idle_experts(device: Device) -> bool:
    """Whether grouped mm leaves what it finds where a sum has no terms, rather than zeros.

    It does on Blackwell: https://github.com/pytorch/pytorch/issues/172439
    """
    return device.kind == "cuda" and device.capability != (9, 0)


class Slots(SlotOrder):
    """The slots of a call, and products with their experts' matrices."""

    def __init__(self, call: Call, *, grouped: bool) -> None:
        dtype = arithmetic(call.hidden_states)
        super().__init__(call.local_ids(), call.experts, dtype, in_order=grouped)

    def times(self, values: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Each slot's row of `values` ``(slots, n)`` times its expert's matrix of ``(E, n, m)``.

        Undefined where a slot has no expert.
        """
        values = values.to(self.dtype)
        each = stack[0].numel() * self.dtype.itemsize
        most = max(1, common.PIECE_BYTES // max(each, 1))
        if self.ends is None:
            found = [
                product(
                    values[part.start : part.stop].unsqueeze(1),
                    stack.index_select(0, self.expert[part.start : part.stop]).to(self.dtype),
                ).squeeze(1)
                for part in pieces(self.count, most)
            ]
            return found[0] if len(found) == 1 else torch.cat(found)
        if stack.dtype == self.dtype:
            most = GROUPS  # no copies are made
        return self.grouped(values, lambda own: operand(stack[own].to(self.dtype)), most)

    def summed(self, left: torch.Tensor, right: torch.Tensor, idle: bool) -> torch.Tensor:
        """``(E, n, m)``: of each expert the sum over its slots of left row times right row."""
        assert self.ends is not None
        left, right = left.to(self.dtype).t(), right.to(self.dtype)
        found = []
        for piece in pieces(self.experts_there, GROUPS - 1):
            # Behind the first piece a group before it takes what belongs to earlier experts.
            before = 1 if piece.start else 0
            own = self.ends[piece.start - before : piece.stop]
            found.append(grouped_mm(left, right, offs=own)[before:])
        result = found[0] if len(found) == 1 else torch.cat(found)
        if idle:
            starts = F.pad(self.ends[:-1], (1, 0))
            result.masked_fill_((self.ends == starts).view(-1, 1, 1), 0.0)
        return result

    def totals(self, values: torch.Tensor) -> torch.Tensor:
        """``(E, n)``: of each expert the sum of its slots' rows, in fp32 and in their order."""
        assert self.ends is not None
        offsets = F.pad(self.ends, (1, 0))
        return torch.segment_reduce(values.float(), "sum", offsets=offsets, axis=0, unsafe=True)


def operand(stack: torch.Tensor) -> torch.Tensor:
    """`stack` ``(E, n, m)`` as grouped mm takes it: as it is, where rows or columns are dense."""
    first, tall, wide = stack.stride()
    step = tall if wide == 1 else wide
    aligned = not any(one * stack.element_size() % ALIGNMENT for one in (first, step))
    if 1 in (tall, wide) and step and aligned and stack.data_ptr() % ALIGNMENT == 0:
        return stack
    return stack.clone(memory_format=torch.contiguous_format)


def _forward(grouped: bool, *args: Any) -> torch.Tensor:
    call = Call(*args)
    slots = Slots(call, grouped=grouped)
    gate, up = _gate_and_up(call, slots, slots.rows_of(call.hidden_states))
    h = call.act.apply(gate, up).to(call.hidden_states.dtype)
    out = slots.times(h, call.w2.transpose(-2, -1)).float()
    if call.w2_bias is not None:
        out += call.w2_bias.index_select(0, slots.expert)
    out *= slots.column_of(call.topk_weights)
    # A sum of few, in the order of the token's experts: the same on every run.
    return slots.in_tokens(out).sum(1).to(call.hidden_states.dtype)


def _backward(grouped: bool, idle: bool, dy: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    *given, weight_grad = args
    call = Call(*given)
    slots, dtype = Slots(call, grouped=grouped), call.hidden_states.dtype
    x, d = slots.rows_of(call.hidden_states), slots.rows_of(dy)
    shares = slots.column_of(call.topk_weights)
    gate, up = _gate_and_up(call, slots, x)
    h = call.act.apply(gate, up).to(dtype)
    dh = slots.times(d, call.w2).float()
    dshares = (dh * h).sum(-1, keepdim=True)
    if call.w2_bias is not None:
        dshares += (d * call.w2_bias.float()[slots.expert]).sum(-1, keepdim=True)
    both = torch.cat(call.act.backward(gate, up, dh.mul_(shares)), -1)
    del gate, up, dh
    back = slots.times(both, call.w13).float()
    dx = slots.in_tokens(back).sum(1).to(dtype)
    dweights = slots.in_tokens(dshares).squeeze(-1).to(call.topk_weights.dtype)
    dw13, dw2, dw13_bias, dw2_bias = (gradient_like(dx, None) for _ in range(4))
    if weight_grad:
        dw13 = slots.summed(both, x, idle).to(dtype)
        dw2 = slots.summed(d, h * shares, idle).to(dtype)
        if call.w13_bias is not None:
            dw13_bias = slots.totals(both).to(call.w13_bias.dtype)
        if call.w2_bias is not None:
            dw2_bias = slots.totals(d * shares).to(call.w2_bias.dtype)
    return dx, dweights, dw13, dw2, dw13_bias, dw2_bias


def _gate_and_up(call: Call, slots: Slots, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every slot, in fp32."""
    both = slots.times(x, call.w13.transpose(-2, -1)).float()
    if call.w13_bias is not None:
        both += call.w13_bias.index_select(0, slots.expert)
    gate, up = both.chunk(2, -1)
    return gate, up
