"""Where the parts of DTensors lie, and how the arguments of a loss are brought together.

This imports torch.distributed.tensor, which takes 0.7 s; so it waits until a DTensor has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from gristmill.errors import ArgumentError, DoubleBackwardError, DtypeError

Placements = tuple[Placement, ...]


class Places(NamedTuple):
    """What one rank knows of the others."""

    # Groups over which classes are shared out, the outermost first, and rows.
    vocabulary: tuple[dist.ProcessGroup, ...]
    rows: tuple[dist.ProcessGroup, ...]
    # This rank's classes among all; 0 of 0: it has them all.
    first_class: int
    classes: int


def is_sharded(placement: Placement, dim: int) -> bool:
    """Whether it shares out `dim`, as torch.chunk does."""
    return type(placement) is Shard and placement.dim == dim


def settled(
    placements: Sequence[Placement], last: int, *, rows_instead: bool = False
) -> Placements:
    """Placements that a loss can be computed with: nothing partial, all classes or chunks of them.

    `last` is the dim of classes. With `rows_instead` rows are shared out where classes were.
    """
    found: list[Placement] = []
    for one in placements:
        dim = getattr(one, "dim", None)
        if one.is_partial() or (dim == last and not is_sharded(one, last)):
            found.append(Replicate())
        elif dim == last and rows_instead:
            found.append(Shard(0) if last > 0 else Replicate())
        else:
            found.append(one)
    return tuple(found)


def without(placements: Sequence[Placement], dim: int) -> Placements:
    """`placements` of a tensor that lacks `dim`, its last one."""
    return tuple(Replicate() if is_sharded(one, dim) else one for one in placements)


def places_of(mesh: DeviceMesh, placements: Placements, classes: int, last: int) -> Places:
    """Who has the other parts of a tensor whose classes are in the dim `last`."""
    vocabulary, rows = [], []
    first, width = 0, classes
    for at, one in enumerate(placements):
        ranks = mesh.size(at)
        if one.is_replicate() or ranks == 1:
            continue
        if not is_sharded(one, last):
            rows.append(mesh.get_group(at))
            continue
        vocabulary.append(mesh.get_group(at))
        chunk = -(-width // ranks)
        begin = min(width, mesh.get_local_rank(at) * chunk)
        first, width = first + begin, min(chunk, width - begin)
    if not vocabulary:
        first = classes = 0
    return Places(tuple(vocabulary), tuple(rows), first, classes)


def check_meshes(op: str, first: str, tensors: dict[str, Any]) -> DeviceMesh:
    """That all DTensors are on the mesh of `first`, which must be one; gives the mesh."""
    leader = tensors[first]
    if not isinstance(leader, DTensor):
        others = [name for name, one in tensors.items() if isinstance(one, DTensor)]
        raise DtypeError(
            f"{op}: {first} must be a DTensor where {others[0]} is one, got "
            f"{type(leader).__name__}; make it one by DTensor.from_local, or pass "
            f"{others[0]}.full_tensor()"
        )
    mesh = leader.device_mesh
    for name, one in tensors.items():
        if isinstance(one, DTensor) and one.device_mesh != mesh:
            raise ArgumentError(
                f"{op}: {name} must be on the mesh of {first}, {mesh}, got {one.device_mesh}"
            )
    return mesh


def local_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """This rank's part of a tensor without gradient; a plain one is the same on every rank."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            everywhere = [Replicate()] * mesh.ndim
            tensor = DTensor.from_local(tensor, mesh, everywhere, run_check=False)
        return moved(tensor, placements).to_local()


def moved(tensor: DTensor, placements: Placements) -> DTensor:
    """`tensor` with these placements."""
    if tensor.placements == placements:
        return tensor
    return tensor.redistribute(placements=placements)


def wrapped(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size
) -> DTensor:
    """The DTensor of this shape whose part on this rank is `local`, contiguous."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))
    stride = tuple(strides) if len(shape) else ()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def partial_over(placements: Sequence[Placement], summed: Sequence[bool]) -> Placements:
    """`placements` of a gradient, to which ranks have summands where `summed` says so."""
    return tuple(
        Partial() if partly else one for one, partly in zip(placements, summed, strict=True)
    )


def refuse_second_gradient(op: str, instead: str) -> None:
    """For a backward pass, in which autograd records nothing unless a gradient of it is wanted.

    It is said at once: on the way back to the DTensor torch 2.11 loses what was recorded, so that
    a second gradient would be none, without a word.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise DoubleBackwardError(
            f"{op}: the gradient of DTensors has no gradient of its own; use {instead} where you "
            f"need double backward (create_graph=True)"
        )
