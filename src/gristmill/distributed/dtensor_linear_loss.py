"""Linear cross entropy of DTensors: rows, classes or both shared out over the ranks of a mesh.

Where the weight's classes are sharded, each rank makes the logits of its own classes, some rows at
a time, and sends three or four numbers for each row; in the backward pass it makes them again. The
gradient of x is then a sum over those ranks, as with any column-parallel layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gristmill.distributed import local_linear_loss, places
from gristmill.distributed.dtensor_loss import counts_of, reduced
from gristmill.distributed.modes import keep_modes, modes_of
from gristmill.distributed.places import Placements
from gristmill.distributed.vocab_parallel import Options, rounded
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_BACKWARD

NAME = "linear_cross_entropy"


class _Plan(NamedTuple):
    """Where everything has to lie, for each dim of the mesh."""

    x: Placements
    weight: Placements
    vocabulary: tuple[bool, ...]  # the classes are shared out
    rows: tuple[bool, ...]  # the rows are


def linear_cross_entropy_of(
    x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, *options: Any
) -> tuple[torch.Tensor, None, None, None]:
    """:func:`gristmill.linear_cross_entropy` where one of the tensors is a DTensor."""
    if isinstance(x, torch.Tensor) and torch.is_autocast_enabled(x.device.type):
        autocast = LINEAR_CROSS_ENTROPY.autocast
        assert autocast is not None
        x, weight, target, bias, class_weight, *_ = autocast(
            x, weight, target, bias, class_weight, *options
        )
    LINEAR_CROSS_ENTROPY.check(x, weight, target, bias, class_weight, *options)
    mesh = _check(x, weight, target, bias, class_weight)
    plan = _plan(mesh, x, weight, class_weight)
    everywhere = tuple(Replicate() for _ in plan.x)
    own_x = places.moved(x, plan.x).to_local(
        grad_placements=places.partial_over(plan.x, plan.vocabulary)
    )
    of_weight = places.partial_over(plan.weight, plan.rows)
    own_weight = places.moved(weight, plan.weight).to_local(grad_placements=of_weight)
    own_bias = None
    if bias is not None:
        own_bias = places.moved(bias, plan.weight).to_local(grad_placements=of_weight)
    targets = places.local_of(target, mesh, plan.x)
    weights = None if class_weight is None else places.local_of(class_weight, mesh, everywhere)
    here = places.places_of(mesh, plan.weight, weight.shape[0], 0)
    groups = tuple(
        mesh.get_group(at) for at, shared in enumerate(plan.rows) if shared and mesh.size(at) > 1
    )
    *most, chunk_rows = options
    loss = _Function.apply(  # type: ignore[no-untyped-call]
        own_x,
        own_weight,
        own_bias,
        targets,
        weights,
        here.vocabulary,
        groups,
        Options._make((here.first_class, here.classes, *most, False)),
        chunk_rows,
    )
    if options[4] == "none":
        return places.wrapped(loss, mesh, plan.x, target.shape), None, None, None
    return places.wrapped(loss, mesh, everywhere, torch.Size()), None, None, None


def _check(x: Any, weight: Any, target: Any, bias: Any, class_weight: Any) -> DeviceMesh:
    tensors = {"x": x, "weight": weight, "target": target, "bias": bias}
    mesh = places.check_meshes(NAME, "x", {**tensors, "class_weight": class_weight})
    for name, value in (("weight", weight), ("bias", bias)):
        # Of a plain tensor nobody knows whether its gradient is to be summed up over the ranks.
        if value is not None and not isinstance(value, DTensor):
            raise DtypeError(
                f"{NAME}: {name} must be a DTensor where x is one, got {type(value).__name__}; "
                f"make it one by torch.distributed.tensor.distribute_tensor"
            )
    if class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{NAME}: class_weight requires grad, and this op has no gradient for it; pass "
            f"class_weight.detach()"
        )
    return mesh


def _plan(mesh: DeviceMesh, x: DTensor, weight: DTensor, class_weight: Any) -> _Plan:
    """As things lie, as far as that can be; class weights belong to whole rows."""
    last = x.dim() - 1
    settled = places.settled(x.placements, last)
    of_x: list[Placement] = []
    of_weight: list[Placement] = []
    for one, other in zip(settled, weight.placements, strict=True):
        is_row = not one.is_replicate() and not places.is_sharded(one, last)
        has_classes = places.is_sharded(other, 0)
        if has_classes and class_weight is None:
            of_x.append(Replicate())
            of_weight.append(other)
            continue
        of_weight.append(Replicate())
        if is_row:
            of_x.append(one)
        else:
            of_x.append(Shard(0) if has_classes and last else Replicate())
    vocabulary = tuple(not one.is_replicate() for one in of_weight)
    rows = tuple(not one.is_replicate() for one in of_x)
    return _Plan(tuple(of_x), tuple(of_weight), vocabulary, rows)


class _Function(torch.autograd.Function):
    """Of this rank's part of x and of the weight, the loss over all."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        class_weight: torch.Tensor | None,
        vocabulary: tuple[dist.ProcessGroup, ...],
        rows: tuple[dist.ProcessGroup, ...],
        options: Options,
        chunk_rows: int | None,
    ) -> torch.Tensor:
        tensors = (x, weight, target, bias, class_weight)
        if vocabulary:
            each, lse, stats = local_linear_loss.forward(
                *tensors[:4], vocabulary, options, chunk_rows
            )
        else:
            # Each row without its z_loss, which has a denominator of its own.
            own = options._replace(z_loss=0.0, reduction="none")
            args = (*tensors, *own[2:7], chunk_rows)
            if torch.compiler.is_compiling():
                each, lse, _, stats = LINEAR_CROSS_ENTROPY.overload(*args)
            else:
                each, lse, _, stats = LINEAR_CROSS_ENTROPY.call(tensors, args)
        # lse of ignored rows is 0, and so is their part of this.
        squares = (
            options.z_loss * rounded(lse, torch.float64).square() if options.z_loss > 0 else None
        )
        denominators = lse.new_empty(0)
        if options.reduction == "none":
            loss = rounded(each if squares is None else each + squares, lse.dtype)
        else:
            classes = options.classes or weight.shape[0]
            counts = counts_of(target, class_weight, classes, options)
            penalty = None if squares is None else squares.sum()
            total = each.sum(dtype=torch.float64)
            loss, denominators = reduced(total, penalty, counts, rows, lse.dtype)
        ctx.save_for_backward(*tensors, stats, denominators)
        ctx.options, ctx.chunk_rows = options, chunk_rows
        keep_modes(ctx)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        places.refuse_second_gradient(
            NAME, "torch.nn.functional.linear and torch.nn.functional.cross_entropy"
        )
        x, weight, target, bias, class_weight, stats, denominators = ctx.saved_tensors
        options: Options = ctx.options
        x_grad, weight_grad, bias_grad = ctx.needs_input_grad[:3]
        bias_grad = bias is not None and bias_grad
        wanted = (x_grad, weight_grad, bias_grad)
        with modes_of(ctx):
            if options.classes:
                parts, numbers = (x, weight, target, bias), (dloss, stats, denominators)
                dx, dweight, dbias = local_linear_loss.backward(
                    parts, numbers, options, ctx.chunk_rows, wanted
                )
            else:
                tensors = (x, weight, target, bias, class_weight, dloss, None, stats, denominators)
                args = (*tensors, *options[2:7], ctx.chunk_rows, *wanted)
                dx, dweight, dbias = LINEAR_CROSS_ENTROPY_BACKWARD.call_in_backward(tensors, args)
        found = (
            one if needed else None
            for one, needed in zip((dx, dweight, dbias), wanted, strict=True)
        )
        return *found, *[None] * 6
