"""Tensor parallelism for NVFP4 linear layers, as styles for `parallelize_module`.

torch's own styles take `torch.nn.Linear` and make its weight a DTensor. An NVFP4 weight is three
tensors in the layout of a GPU's kernels, which no slice along rows or columns keeps: so it is cut
in the layout of checkpoints, and each rank packs and keeps its own piece, as ordinary buffers. The
bias is a DTensor, so that optimisers and gradient clipping see the same kind as in torch's layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from gristmill.distributed import places
from gristmill.distributed.places import Placements
from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4.tensor import BLOCK, E4M3, NVFP4Tensor
from gristmill.nn.nvfp4_linear import NVFP4Linear
from gristmill.nn.nvfp4_module import layout_by
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_linear.semantics import check_columns


class _Share(NamedTuple):
    """A rank's part of a layer, and what goes in and out of it."""

    mesh: DeviceMesh
    inputs: Placements
    outputs: Placements
    use_local_output: bool
    dim: int  # of the weight, which is shared out
    whole: tuple[int, int]  # the shape of the whole weight
    first: int  # row or column


class ParallelNVFP4Linear(NVFP4Linear):
    """What a style makes of an :class:`gristmill.nn.NVFP4Linear`: its rows or columns on this rank.

    ``in_features`` and ``out_features`` are those of this rank, and so are the tensors of its state
    dict, but the bias, which is a DTensor. It loads such a state dict, and that of the whole layer,
    of which it takes its part.
    """

    share: _Share

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Of this rank's part of the weight, as :class:`NVFP4Linear` has it."""
        codes, scales, row_scale = self.weight, self.weight_scale, self.weight_scale_2
        check_columns("nvfp4_linear", x, row_scale, self.in_features)
        layout = layout_by(codes, scales, 2)
        return linear_of(x, codes, scales, row_scale, bias, layout, None, self.act)

    def _given(self, x: torch.Tensor) -> DTensor:
        """x as it comes, as the DTensor that it is."""
        share = self.share
        if isinstance(x, DTensor):
            return x
        return DTensor.from_local(x, share.mesh, share.inputs, run_check=False)

    def _as_asked(self, y: DTensor) -> torch.Tensor:
        found = places.moved(y, _counted(self.share.outputs, y.dim()))
        return found.to_local() if self.share.use_local_output else found

    def _adapt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Also takes a state dict of the whole layer: this rank's part of each tensor."""
        units = {"weight": 2, "weight_scale": BLOCK} if self.share.dim else {}
        names = (
            ("weight", "weight_scale") if units else ("weight", "weight_scale", "weight_scale_2")
        )
        for name in names:
            found = state_dict.get(prefix + name)
            if isinstance(found, torch.Tensor):
                state_dict[prefix + name] = self._part(found, units.get(name, 1))
        found, bias = state_dict.get(f"{prefix}bias"), _dtensor(self.bias)
        if isinstance(found, torch.Tensor) and bias is not None:
            state_dict[f"{prefix}bias"] = self._part_of_bias(found, bias)
        super()._adapt(state_dict, prefix)

    def _part(self, found: torch.Tensor, unit: int) -> torch.Tensor:
        """Of a tensor that has one entry for so many rows or columns; one that is a part stays."""
        dim, whole = self.share.dim, self.share.whole[self.share.dim]
        local = (self.out_features, self.in_features)[dim]
        if found.dim() <= dim or found.shape[dim] != whole // unit:
            return found
        return found.narrow(dim, self.share.first // unit, local // unit)

    @staticmethod
    def _part_of_bias(found: torch.Tensor, bias: DTensor) -> torch.Tensor:
        if isinstance(found, DTensor):
            return found
        mesh, placements = bias.device_mesh, bias.placements
        if found.shape == bias.shape:
            found = found.to(bias.device)
            return distribute_tensor(found, mesh, placements, src_data_rank=None)
        if found.shape == bias.to_local().shape:
            return places.wrapped(found, mesh, placements, bias.shape)
        return found  # `_problem` says what is wrong


class _ColumnParallel(ParallelNVFP4Linear):
    """Some of the outputs, from all of the inputs; the gradient of x is a sum over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.share
        whole = places.moved(self._given(x), (Replicate(),))
        own = whole.to_local(grad_placements=(Partial(),))
        bias = _dtensor(self.bias)
        y = self._product(own, self.bias if bias is None else bias.to_local())
        shape = torch.Size((*y.shape[:-1], share.whole[0]))
        return self._as_asked(places.wrapped(y, share.mesh, (Shard(y.dim() - 1),), shape))


class _RowParallel(ParallelNVFP4Linear):
    """Summands of all outputs, from some of the inputs; the bias is added to their sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.share
        own = places.moved(self._given(x), (Shard(x.dim() - 1),)).to_local()
        y = self._product(own, None)
        partly = DTensor.from_local(y, share.mesh, (Partial(),), run_check=False)
        if self.bias is None:
            return self._as_asked(partly)
        summed: Any = places.moved(partly, _counted(share.outputs, y.dim()))
        return self._as_asked((summed + self.bias).to(y.dtype))


class _Style(ParallelStyle):
    """What both styles share."""

    kind: type[ParallelNVFP4Linear]
    dim: int

    def __init__(
        self,
        input_layouts: Placement,
        output_layouts: Placement,
        use_local_output: bool,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = (input_layouts,), (output_layouts,)
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        name = type(self).__name__
        if not isinstance(module, NVFP4Linear):
            hint = ""
            if isinstance(module, torch.nn.Linear):
                hint = f"; use {name.removeprefix('NVFP4')} of torch.distributed.tensor.parallel"
            raise DtypeError(
                f"{name}: the module must be a gristmill.nn.NVFP4Linear, got "
                f"{type(module).__name__}{hint}"
            )
        if isinstance(module, ParallelNVFP4Linear):
            raise ArgumentError(f"{name}: the module is parallel already; a style is applied once")
        if type(module) is not NVFP4Linear:  # its own forward would be gone
            raise DtypeError(
                f"{name}: the module must be a gristmill.nn.NVFP4Linear and no subclass of it, got "
                f"{type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise ArgumentError(
                f"{name}: the mesh must have one dim, got {device_mesh.ndim}; of a larger one pass "
                f"the part for tensor parallelism, such as mesh['tp']"
            )
        whole = (module.out_features, module.in_features)
        size = whole[self.dim]
        chunk = -(-size // device_mesh.size())
        if self.dim == 1 and (chunk % BLOCK or chunk * (device_mesh.size() - 1) >= size):
            raise ArgumentError(
                f"{name}: in_features must leave each of {device_mesh.size()} ranks a multiple of "
                f"{BLOCK} columns, which share a scale; got {size}, {chunk} for each"
            )
        first = min(size, device_mesh.get_local_rank() * chunk)
        self._cut(module, device_mesh)
        module.__class__ = self.kind
        module.share = _Share(  # type: ignore[assignment]
            device_mesh,
            self.input_layouts,
            self.output_layouts,
            self.use_local_output,
            self.dim,
            whole,
            first,
        )
        return module

    def _cut(self, module: NVFP4Linear, mesh: DeviceMesh) -> None:
        """Leave this rank's part in `module`, in memory of its own."""
        weight, source = module.weight4, self.src_data_rank
        cut = [Shard(self.dim)]
        # fp8 is not sent by all backends, bytes are.
        parts = (weight.codes, weight.scales.view(torch.uint8), weight.row_scale)
        places_of_parts = (cut, cut, cut if self.dim == 0 else [Replicate()])
        codes, scales, row_scale = (
            distribute_tensor(part.contiguous(), mesh, where, src_data_rank=source)
            .to_local()
            .clone()
            for part, where in zip(parts, places_of_parts, strict=True)
        )
        module.out_features, module.in_features = codes.shape[0], codes.shape[1] * 2
        module._hold("", NVFP4Tensor(codes, scales.view(E4M3), row_scale))
        bias = module.bias
        if bias is not None:
            where = cut if self.dim == 0 else [Replicate()]
            spread = distribute_tensor(bias.detach(), mesh, where, src_data_rank=source)
            module.bias = torch.nn.Parameter(spread, requires_grad=bias.requires_grad)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class NVFP4ColwiseParallel(_Style):
    """Column parallelism for :class:`gristmill.nn.NVFP4Linear`: each rank has some of the outputs.

    For `torch.distributed.tensor.parallel.parallelize_module`, like torch's ``ColwiseParallel``. A
    rank keeps the rows of its outputs, by chunks as `torch.chunk` makes them, and no others.

    Args:
        input_layouts: where the input lies if it is a plain tensor; replicated by default.
        output_layouts: where the output is to lie; sharded on its last dim by default.
        use_local_output: give a plain tensor, the default, or a DTensor.
    """

    kind, dim = _ColumnParallel, 0

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output
        )


class NVFP4RowwiseParallel(_Style):
    """Row parallelism for :class:`gristmill.nn.NVFP4Linear`: each rank has some of the inputs.

    For `torch.distributed.tensor.parallel.parallelize_module`, like torch's ``RowwiseParallel``. A
    rank keeps the columns of its inputs, of which there must be a multiple of 16. What ranks find
    is added up in the dtype of the input; the bias is added once, to the sum.

    Args:
        input_layouts: where the input lies if it is a plain tensor; sharded on its last dim by
            default.
        output_layouts: where the output is to lie; replicated by default.
        use_local_output: give a plain tensor, the default, or a DTensor.
    """

    kind, dim = _RowParallel, 1

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output
        )


def _dtensor(parameter: Any) -> DTensor | None:
    """A layer's bias, which is one unless somebody has put another tensor in its place."""
    return parameter if isinstance(parameter, DTensor) else None


def _counted(layouts: Placements, dims: int) -> Placements:
    """`layouts` with dims that count from the end counted from the start, as DTensors have them."""
    return tuple(
        Shard(one.dim + dims) if isinstance(one, Shard) and one.dim < 0 else one for one in layouts
    )
