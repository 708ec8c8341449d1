"""The runners of NVFP4 layers: frozen weights, laid out for the device they are on."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops.nvfp4_common import parts_of
from gristmill.ops.nvfp4_linear import NVFP4_LINEAR, linear
from gristmill.ops.nvfp4_moe import NVFP4_MOE, moe
from gristmill.ops.op import Op


class Nvfp4LinearRunner:
    """A linear layer for `torch.ops.gristmill.nvfp4_linear_gemm`.

    Args:
        weight: ``(N, K)``. An NVFP4Tensor is prepared for the device it is on, and shares what
            keeps its layout.
        bias: ``(N,)`` or None.
        act: what activations may be rounded to, as in :func:`gristmill.nvfp4.linear`.
        in_place: whether an NVFP4Tensor may be overwritten when it is prepared, as in
            :meth:`gristmill.nvfp4.NVFP4Tensor.prepare`: then there is never a second copy of it,
            and it must not be used afterwards.

    `_run_impl(x)` is :func:`gristmill.nvfp4.linear`: ``(..., K)`` to ``(..., N)`` of x's dtype.
    """

    act: str | None = None  # for pickles from before there was one

    def __init__(
        self,
        weight: NVFP4Tensor | PackedNVFP4,
        bias: torch.Tensor | None = None,
        *,
        act: str | None = None,
        in_place: bool = False,
    ) -> None:
        parts_of("Nvfp4LinearRunner", "weight", weight)  # says what it must be
        # All of it before anything is overwritten.
        _check(NVFP4_LINEAR, _no_rows(weight), weight, bias, act=act)
        self.weight = _prepared("Nvfp4LinearRunner", "weight", weight, in_place=in_place)
        self.bias, self.act = bias, act
        self.out_features, self.in_features = self.weight.shape

    def _run_impl(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, act=self.act)

    def __repr__(self) -> str:
        act = "" if self.act is None else f"act={self.act!r}, "
        return (
            f"{type(self).__name__}(in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"{act}{_place(self.weight)})"
        )


class Nvfp4MoeRunner:
    """The experts of a mixture for `torch.ops.gristmill.nvfp4_moe_gemm`.

    Args:
        w13: ``(E, 2 * I, H)``, the rows of the gate before those of up. An NVFP4Tensor is prepared
            for the device it is on, and shares what keeps its layout; a PackedNVFP4 is one of
            ``prepare(pairs=True)``.
        w2: ``(E, H, I)``, likewise, but for `pairs`.
        w13_bias, w2_bias, activation, limit, expert_map, alpha: as in :func:`gristmill.nvfp4.moe`.

    `_run_impl(hidden_states, topk_weights, topk_ids)` is :func:`gristmill.nvfp4.moe`: ``(M, H)`` to
    ``(M, H)`` of the same dtype.
    """

    def __init__(
        self,
        w13: NVFP4Tensor | PackedNVFP4,
        w2: NVFP4Tensor | PackedNVFP4,
        *,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        expert_map: torch.Tensor | None = None,
        alpha: float | None = None,
    ) -> None:
        self.w13 = _prepared("Nvfp4MoeRunner", "w13", w13, pairs=True)
        self.w2 = _prepared("Nvfp4MoeRunner", "w2", w2)
        self.options: dict[str, Any] = {
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
            "activation": activation,
            "limit": limit,
            "expert_map": expert_map,
            "alpha": alpha,
        }
        rows = _no_rows(self.w13)
        routing = rows[:, :0], rows[:, :0].int()
        _check(NVFP4_MOE, rows, *routing, self.w13, self.w2, **self.options)
        self.num_experts, self.hidden_size, self.intermediate_size = self.w2.shape

    def _run_impl(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        return moe(hidden_states, topk_weights, topk_ids, self.w13, self.w2, **self.options)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_experts={self.num_experts}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.options['activation']!r}, {_place(self.w2)})"
        )


def _prepared(
    op: str, name: str, weight: Any, *, in_place: bool = False, pairs: bool = False
) -> PackedNVFP4:
    parts_of(op, name, weight)  # says what it must be
    if isinstance(weight, NVFP4Tensor):
        return weight.prepare(in_place=in_place, pairs=pairs)
    found: PackedNVFP4 = weight
    return found


def _no_rows(weight: NVFP4Tensor | PackedNVFP4) -> torch.Tensor:
    """An input for the weight, of no rows at all."""
    return torch.empty((0, weight.shape[-1]), dtype=torch.float32, device=weight.device)


def _check(op: Op, *args: Any, **options: Any) -> None:
    """What a call would say of its arguments, said before there is one."""
    if op.adapt is not None:
        op.check(*op.adapt(*args, **options))


def _place(weight: PackedNVFP4) -> str:
    return f"layout={weight.layout!r}, device={str(weight.device)!r}"
