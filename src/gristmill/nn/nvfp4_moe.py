"""The experts of a mixture, with NVFP4 weights, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, quantize
from gristmill.nn.nvfp4_module import NVFP4Module, layout_by
from gristmill.ops import checks
from gristmill.ops.nvfp4_moe import NVFP4_MOE, moe_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from gristmill.checkpoints import Checkpoint

Experts = torch.Tensor | Sequence[torch.Tensor]


class NVFP4MoE(NVFP4Module):
    """The experts of a mixture; runs :func:`gristmill.nvfp4.moe`. The router is the caller's.

    Everything is frozen and held in buffers: ``w13_weight``, ``w13_weight_scale``,
    ``w13_weight_scale_2`` (rows of the gate before those of up) and the same for ``w2``; with
    `bias`, ``w13_bias`` ``(E, 2 * I)`` and ``w2_bias`` ``(E, H)``. State dicts have them in the
    layout of checkpoints, whatever :attr:`layout` the device wants. The gradients of hidden states
    and of the router's weights pass through.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of 16.
        intermediate_size: I, a multiple of 16.
        bias: whether experts have biases.
        activation, limit, alpha: as in :func:`gristmill.nvfp4.moe`.
        device: where to put everything.
        dtype: of the biases.

    New experts are all zeros; see :meth:`from_experts` and :meth:`from_checkpoint`.
    """

    _prefixes = ("w13_", "w2_")
    _paired = ("w13_",)

    alpha: float | None = None  # for pickles from before there was one

    w13_weight: torch.Tensor
    w13_weight_scale: torch.Tensor
    w13_weight_scale_2: torch.Tensor
    w2_weight: torch.Tensor
    w2_weight_scale: torch.Tensor
    w2_weight_scale_2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size}
        for name, value in (sizes | {"intermediate_size": intermediate_size}).items():
            checks.size("NVFP4MoE", name, value)
        checks.float_dtype("NVFP4MoE", "dtype", dtype)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        self.activation, self.limit, self.alpha = activation, limit, alpha
        for name in self._prefixes:
            shape = self._shape(name)
            self._hold_zeros(name, shape, device)
            zeros = torch.zeros(shape[:2], device=device, dtype=dtype) if bias else None
            self.register_buffer(f"{name}bias", zeros)
        self._check()

    def _shape(self, prefix: str) -> tuple[int, ...]:
        experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        return (experts, 2 * inner, hidden) if prefix == "w13_" else (experts, hidden, inner)

    def _check(self) -> None:
        """What a call would say of the experts, said before there is one."""
        rows = torch.empty((0, self.hidden_size), device=self.w13_weight.device)
        NVFP4_MOE.check(rows, rows[:, :0], rows[:, :0].int(), *self._arguments())

    @classmethod
    def from_experts(
        cls,
        gate: Experts,
        up: Experts,
        down: Experts,
        *,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        method: str = "amax",
    ) -> Self:
        """Dense experts, quantised by :func:`gristmill.nvfp4.quantize`, each matrix for itself.

        Args:
            gate, up: ``(E, I, H)``, or E matrices ``(I, H)``.
            down: ``(E, H, I)``, or E matrices ``(H, I)``.
            w13_bias, w2_bias: ``(E, 2 * I)`` and ``(E, H)``, or None.
            activation, limit, alpha: as in :func:`gristmill.nvfp4.moe`.
            method: how scales are chosen.
        """
        first, second, w2 = (_quantized(experts, method) for experts in (gate, up, down))
        if first.shape != second.shape:
            raise ArgumentError(
                f"NVFP4MoE.from_experts: gate and up must have one shape (E, I, H), "
                f"got {tuple(first.shape)} and {tuple(second.shape)}"
            )
        w13 = NVFP4Tensor(
            torch.cat((first.codes, second.codes), 1),
            # By bytes: not every torch joins fp8.
            torch.cat([one.scales.view(torch.uint8) for one in (first, second)], 1).view(
                first.scales.dtype
            ),
            torch.cat((first.row_scale, second.row_scale), 1),
        )
        return cls._of(w13, w2, w13_bias, w2_bias, activation, limit, alpha)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | str | PathLike[str],
        prefix: str,
        *,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """The experts of one layer of an NVFP4 checkpoint.

        Args:
            checkpoint: a :class:`gristmill.checkpoints.Checkpoint` or its folder.
            prefix: the name of the experts in it, such as ``"model.layers.0.mlp.experts"``.
            activation, limit, alpha: as in :func:`gristmill.nvfp4.moe`.
            device: where to load them.
        """
        from gristmill.checkpoints import Checkpoint

        opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        place = torch.device("cpu" if device is None else device)
        w13, w2 = opened.experts(prefix, place)
        biases = _biases(opened, prefix, len(w13.codes), place)
        return cls._of(w13, w2, *biases, activation, limit, alpha)

    @classmethod
    def _of(
        cls,
        w13: NVFP4Tensor,
        w2: NVFP4Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        activation: str,
        limit: float | None,
        alpha: float | None,
    ) -> Self:
        experts, rows, hidden = w13.shape
        if tuple(w2.shape) != (experts, hidden, rows // 2):
            raise ArgumentError(
                f"NVFP4MoE: down must have shape (E, H, I) = {(experts, hidden, rows // 2)} beside "
                f"gate and up, got {tuple(w2.shape)}"
            )
        layer = cls(
            experts,
            hidden,
            rows // 2,
            activation=activation,
            limit=limit,
            alpha=alpha,
            device="meta",
        )
        for name, weight, bias in (("w13_", w13, w13_bias), ("w2_", w2, w2_bias)):
            layer._hold(name, weight)
            layer.register_buffer(f"{name}bias", None if bias is None else bias.detach().clone())
        layer._check()
        return layer

    @property
    def w13(self) -> NVFP4Tensor:
        """The weights of gate and up, ``(E, 2 * I, H)``.

        The buffers themselves in layout ``"rows"``, else a copy in that layout.
        """
        return self._held("w13_")

    @property
    def w2(self) -> NVFP4Tensor:
        """The weights back, ``(E, H, I)``, likewise."""
        return self._held("w2_")

    def forward(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        return moe_of(hidden_states, topk_weights, topk_ids, *self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        """The experts as the op takes them."""
        return (
            self.w13_weight,
            self.w13_weight_scale,
            self.w13_weight_scale_2,
            self.w2_weight,
            self.w2_weight_scale,
            self.w2_weight_scale_2,
            self.w13_bias,
            self.w2_bias,
            self.activation,
            self.limit,
            None,
            layout_by(self.w13_weight, self.w13_weight_scale, 3),
            self.alpha,
        )

    def extra_repr(self) -> str:
        alpha = "" if self.alpha is None else f", alpha={self.alpha}"
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, "
            f"bias={self.w13_bias is not None or self.w2_bias is not None}, "
            f"activation={self.activation!r}, limit={self.limit}{alpha}"
        )


def _biases(
    opened: Checkpoint, prefix: str, experts: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of gate and up together and those of down, where a checkpoint has them."""
    from gristmill.checkpoints.names import EXPERTS

    def one(module: str) -> torch.Tensor:
        bias = opened.bias(module)
        return opened.tensor(f"{module}.bias") if bias is None else bias  # says that it is missing

    def stacked(*parts: str) -> torch.Tensor:
        each = ([one(f"{prefix}.{number}.{part}") for part in parts] for number in range(experts))
        return torch.stack([torch.cat(some) for some in each]).to(device)

    for gate, up, down in EXPERTS:
        if f"{prefix}.0.{gate}.bias" in opened:
            return stacked(gate, up), stacked(down)
    return None, None


def _quantized(experts: Experts, method: str) -> NVFP4Tensor:
    """A stack of experts, one after the other where they come as a list: no dense copy of all."""
    if isinstance(experts, torch.Tensor):
        if experts.dim() != 3:
            raise ArgumentError(
                f"NVFP4MoE.from_experts: experts must be a stack of three dims or a list of "
                f"matrices, got shape {tuple(experts.shape)}"
            )
        return quantize(experts, method=method)
    made = [quantize(expert, method=method) for expert in experts]
    if not made or len({one.shape for one in made}) > 1 or made[0].codes.dim() != 2:
        shapes = ", ".join(sorted({str(tuple(one.shape)) for one in made})) or "nothing"
        raise ArgumentError(
            f"NVFP4MoE.from_experts: experts must be matrices of one shape, got {shapes}"
        )
    scales = torch.stack([one.scales.view(torch.uint8) for one in made])
    return NVFP4Tensor(
        torch.stack([one.codes for one in made]),
        scales.view(torch.float8_e4m3fn),
        torch.stack([one.global_scale for one in made]),
    )
