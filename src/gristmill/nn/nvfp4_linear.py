"""A linear layer with an NVFP4 weight as a module."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor, quantize
from gristmill.formats.nvfp4.tensor import FRAGMENTS
from gristmill.nn.nvfp4_module import NVFP4Module, layout_by
from gristmill.ops import checks
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_linear.semantics import ACTIVATIONS, check_columns

if TYPE_CHECKING:
    from typing_extensions import Self

    from gristmill.checkpoints import Checkpoint


class NVFP4Linear(NVFP4Module):
    r"""A linear layer over an NVFP4 weight; runs :func:`gristmill.nvfp4.linear`.

    .. math:: y = x W^T + bias

    The weight is frozen, in buffers ``weight``, ``weight_scale`` and ``weight_scale_2``. State
    dicts have them as ModelOpt writes them (uint8 ``(N, K / 2)``, E4M3 ``(N, K / 16)``, fp32
    ``(N,)``), so that a layer of its checkpoints loads as one; the buffers themselves have the
    :attr:`layout` of their device's kernels. The gradient of x passes through, and the bias is a
    parameter: adapters beside the layer train.

    Args:
        in_features: K, a multiple of 16.
        out_features: N.
        bias: whether there is one.
        device: where to put everything.
        dtype: of the bias. The weight has none: `.to(dtype)` leaves it as it is.
        act: what activations may be rounded to, as in :func:`gristmill.nvfp4.linear`.

    A new layer is all zeros; see :meth:`from_linear` and :meth:`from_checkpoint`.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    bias: torch.nn.Parameter | None
    act: str | None = None  # for pickles from before there was one

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            checks.size("NVFP4Linear", name, value)
        checks.float_dtype("NVFP4Linear", "dtype", dtype)
        if act is not None:
            checks.one_of("NVFP4Linear", "act", act, ACTIVATIONS)
        self.in_features, self.out_features, self.act = in_features, out_features, act
        self._hold_zeros("", (out_features, in_features), device)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if zeros is None else torch.nn.Parameter(zeros)

    def _shape(self, prefix: str) -> tuple[int, ...]:
        return self.out_features, self.in_features

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, method: str = "amax", act: str | None = None
    ) -> Self:
        """`linear` with its weight quantised by :func:`gristmill.nvfp4.quantize`.

        The bias is copied; whether it is trained stays the same. `act` is as in the class.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise DtypeError(
                f"NVFP4Linear.from_linear: linear must be a torch.nn.Linear, "
                f"got {type(linear).__name__}"
            )
        layer = cls._of(quantize(linear.weight.detach(), method=method), linear.bias, act)
        return layer.train(linear.training)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint | str | PathLike[str],
        modules: str | Sequence[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        act: str | None = None,
    ) -> Self:
        """A layer of an NVFP4 checkpoint.

        Args:
            checkpoint: a :class:`gristmill.checkpoints.Checkpoint` or its folder.
            modules: the layer's name in it, or several names: their rows one after the other, each
                with its own global scale, as in a fused q, k and v.
            device: where to load it.
            dtype: of the bias; as stored by default.
            act: as in the class.
        """
        from gristmill.checkpoints import Checkpoint

        opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        names = [modules] if isinstance(modules, str) else list(modules)
        if not names:
            raise ArgumentError("NVFP4Linear.from_checkpoint: modules must name at least one layer")
        place = torch.device("cpu" if device is None else device)
        weight = opened.fused(names, place) if len(names) > 1 else opened.linear(names[0], place)
        stored = {name: opened.bias(name, place) for name in names}
        biases = {name: bias for name, bias in stored.items() if bias is not None}
        if biases and len(biases) < len(stored):
            bare = next(name for name in names if name not in biases)
            raise ArgumentError(
                f"NVFP4Linear.from_checkpoint: {next(iter(biases))} has a bias and {bare} has none;"
                f" layers can be fused where all of them have one or none has"
            )
        bias = None
        if biases:
            bias = torch.cat([biases[name] for name in names])
            bias = bias if dtype is None else bias.to(dtype)
        return cls._of(weight, bias, act)

    @classmethod
    def _of(cls, weight: NVFP4Tensor, bias: torch.Tensor | None, act: str | None) -> Self:
        rows, columns = weight.shape
        layer = cls(columns, rows, bias=False, device="meta", act=act)
        layer._hold("", weight)
        if bias is not None:
            trained = bias.requires_grad if isinstance(bias, torch.nn.Parameter) else True
            layer.bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=trained)
        return layer

    @property
    def weight4(self) -> NVFP4Tensor:
        """The weight: the buffers themselves in layout ``"rows"``, else a copy in that layout."""
        return self._held("")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales, row_scale = self.weight, self.weight_scale, self.weight_scale_2
        layout = layout_by(codes, scales, 2)
        if layout == FRAGMENTS:
            # The op cannot tell: the weight is padded to 64 columns.
            check_columns("nvfp4_linear", x, row_scale, self.in_features)
        return linear_of(x, codes, scales, row_scale, self.bias, layout, None, self.act)

    def extra_repr(self) -> str:
        act = "" if self.act is None else f", act={self.act!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{act}"
        )
