"""In which dtype a norm gives its results, and what it rounds on the way: for every pair of dtypes.

A table and no rule, since modules follow many: Llama's promotes x and weight, T5's gives the
weight's dtype where that has 16 bits, torch's own wants one dtype. Each entry was seen; a pair
without one is left to the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gristmill.integrations.transformers.probe import Probe, Unlike, near, same_roundings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What autocast may be asked for: some modules give their result in it.
AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)

Reference = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Route:
    """How gristmill gives a norm's result: arguments of the op, and whether an offset is rounded.

    `adds_first`: the offset is added to the weight in the weight's own dtype, as
    `F.layer_norm(x, shape, weight + 1)` does, and not in fp32.
    """

    casting: str
    out_dtype: torch.dtype
    adds_first: bool = False


Routes = dict[tuple[torch.dtype, "torch.dtype | None"], Route]
AutocastRoutes = dict[torch.dtype, Routes]


def find_routes(
    probe: Probe, reference: Reference, eps: float | None, *, offset: float
) -> tuple[Routes, AutocastRoutes]:
    """The routes as they are, and under CUDA's autocast to each of its dtypes."""
    weight_dtypes: tuple[torch.dtype | None, ...] = DTYPES if probe.tensors else (None,)
    routes: Routes = {}
    autocast_routes: AutocastRoutes = {dtype: {} for dtype in AUTOCAST_DTYPES}
    ways: list[tuple[Routes, Callable[..., torch.Tensor]]] = [(routes, probe.run)]
    ways += [(autocast_routes[to], partial(_run_autocast, probe, to)) for to in AUTOCAST_DTYPES]
    for x_dtype, weight_dtype in product(DTYPES, weight_dtypes):
        tensors = probe.tensors_in(weight_dtype or torch.float32)
        # Ordinary numbers, such as show eps, and such as fp16 does not have: a module may round its
        # input to it.
        scales = [1.0, 0.3 * (eps or 1e-6) ** 0.5, *([2.0**20] if x_dtype != torch.float16 else [])]
        inputs = [probe.input(x_dtype, scale=scale) for scale in scales]
        for found, run in ways:
            try:
                results = [run(x, tensors) for x in inputs]
            except Unlike:
                continue
            for route in _possible(results[0].dtype, offset):
                arguments = (eps, route.casting, route.out_dtype, route.adds_first)
                ours = [reference(x, tensors, *arguments) for x in inputs]
                if all(_same(*both) for both in zip(results, ours, strict=True)):
                    found[x_dtype, weight_dtype] = route
                    break
    return routes, autocast_routes


def _possible(out_dtype: torch.dtype, offset: float) -> Iterator[Route]:
    if out_dtype not in DTYPES:
        return
    for casting, adds_first in product(("once", "llama"), (False, True) if offset else (False,)):
        yield Route(casting, out_dtype, adds_first)


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if wanted.dtype == torch.float32:
        # Against the largest of a column: what was rounded to 16 bits on the way is far off.
        columns = wanted.nan_to_num().abs().flatten(0, -2).amax(0) + 2.0**-20
        return near(got, wanted, scale=columns)
    return same_roundings(got, wanted)


class _OnCuda(torch.Tensor):
    """A tensor that claims to be on a GPU and computes on the CPU.

    Autocast goes by where tensors say that they are: so what it does to a module on a GPU, which
    of torch's ops it runs in fp32, is seen on a machine without one, and no GPU is woken up.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _OnCuda:
        made: _OnCuda = torch.Tensor._make_subclass(
            cls,
            held.to("meta"),
            dispatch_device=True,
            device_for_backend_keys=torch.device("cuda"),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def inside(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value.held if isinstance(value, cls) else value

        if function is torch.ops.prim.device.default:
            return torch.device("cuda", 0)
        args, kwargs = tree_map(inside, args), tree_map(inside, kwargs or {})
        results = function(*args, **kwargs)
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, results)


def _run_autocast(
    probe: Probe, to: torch.dtype, x: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    there: dict[str, torch.Tensor] = {name: _OnCuda(tensor) for name, tensor in tensors.items()}
    with torch.no_grad(), _cuda_autocast(to):
        y = probe.forward(_OnCuda(x), there)
    if not isinstance(y, _OnCuda):
        raise Unlike("its result is on another device than its input")
    return y.held


@contextmanager
def _cuda_autocast(to: torch.dtype) -> Iterator[None]:
    """As torch.autocast("cuda", to), which refuses where there is no GPU."""
    before: Any = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", to)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
