"""What a rank does to show that a rule is right."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from mesh_pool import device_mesh
from rule_cases import RUNNERS, calls, runner_calls
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import gristmill  # noqa: F401
from gristmill.integrations.dtensor import RULES


def spread(tensor: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """The part of this rank; every rank has the whole, so that nothing is sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def every_way(name: str) -> list[tuple[int, int]]:
    """Runs every call of an op in every way that its rule allows; how many there were, by mesh."""
    overload = getattr(torch.ops.gristmill, name).default
    found = runner_calls(name) if name in RUNNERS else calls(name)
    counts = []
    for number, args in enumerate(found):
        meshes = [device_mesh(4)] if number else [device_mesh(4), device_mesh(2, 2)]
        counts.append((number, sum(each_way(overload, args, mesh) for mesh in meshes)))
    return counts


def each_way(overload: Any, args: tuple[Any, ...], mesh: Any) -> int:
    """Runs a call in every way over a mesh, and compares with the call of one process."""
    schema = overload._schema
    names = [argument.name for argument in schema.arguments]
    written = [at for at, one in enumerate(schema.arguments) if one.alias_info]
    whole = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    wanted = results_of(overload(*whole), whole, written)
    specs = [_spec(arg, mesh) for arg in args]
    call = dict(zip(names, specs, strict=True))
    ways = RULES[schema.name.split("::")[1]](call).ways(call)
    combinations = list(itertools.product(ways, repeat=mesh.ndim))
    for combination in combinations:
        placements = list(zip(*(way[1] for way in combination), strict=True))
        held = [
            spread(arg.clone(), mesh, list(where)) if isinstance(arg, torch.Tensor) else arg
            for arg, where in zip(args, placements, strict=True)
        ]
        with CommDebugMode() as sent:
            raw = overload(*held)
        told = f"{overload} {combination}"
        assert sent.get_total_counts() == 0, f"{told}: {sent.get_comm_counts()}"
        results = results_of(raw, held, written)
        promised = list(zip(*(way[0] for way in combination), strict=True))
        promised += [placements[at] for at in written]
        assert len(results) == len(wanted) == len(promised), told
        for one, want, where in zip(results, wanted, promised, strict=True):
            assert tuple(one.placements) == tuple(where), f"{told}: {one.placements} for {where}"
            compare(one, want, told)
    return len(combinations)


def results_of(raw: Any, args: list[Any], written: list[int]) -> list[Any]:
    """What a call has returned, and what it has written to."""
    found = [] if raw is None else [raw] if isinstance(raw, torch.Tensor) else list(raw)
    return found + [args[at] for at in written]


def compare(found: DTensor, wanted: torch.Tensor, told: str) -> None:
    """That the ranks hold `wanted`: each its own part, or parts that add up to it."""
    assert found.dtype == found.to_local().dtype == wanted.dtype, told
    assert found.shape == wanted.shape, told
    assert found.stride() == wanted.stride() or not wanted.numel(), told
    if any(placement.is_partial() for placement in found.placements):
        same(found.full_tensor(), wanted, told)
    else:
        own = spread(wanted, found.device_mesh, list(found.placements)).to_local()
        same(found.to_local(), own, told)


def same(found: torch.Tensor, wanted: torch.Tensor, told: str) -> None:
    """Equal but for the order of sums, which only matters to the last bits."""
    assert found.shape == wanted.shape, told
    if wanted.dtype.itemsize == 1 or not wanted.is_floating_point():
        assert torch.equal(found.float(), wanted.float()), told
        return
    close = 1e-12 if wanted.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        found, wanted, rtol=close, atol=close, equal_nan=True, msg=lambda text: f"{told}\n{text}"
    )


def _spec(arg: Any, mesh: Any) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    return spread(arg, mesh, [Replicate()] * mesh.ndim)._spec
