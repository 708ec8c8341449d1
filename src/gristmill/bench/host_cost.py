"""The suite `host_cost`: what a call costs before any kernel runs.

It decides small problems: at a decoding batch of one a kernel takes 2 µs and its call 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import gristmill
from gristmill import nvfp4
from gristmill.bench.inputs import dtype_of
from gristmill.bench.results import OURS, Results, Row, described
from gristmill.bench.suites import KINDS, known, written
from gristmill.select.timing import time_host

SUITE = "host_cost"
SHAPES = ((1, 4096), (256, 4096))
MODES = ("forward", "forward with grad", "backward")
IMPLEMENTATIONS = (OURS, "eager")

Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
Shapes = Sequence[tuple[int, ...]]


def problems(ops: Sequence[str] = (), shapes: Shapes = ()) -> list[tuple[str, tuple[int, int]]]:
    """Ops, each at every shape of M rows and N columns; an empty filter means everything.

    Of `shapes` those of three numbers are MxNxK of a square weight, N = K.
    """
    chosen = [known("op", op, CALLS) for op in ops] or list(CALLS)
    sizes = [(shape[0], shape[1]) for shape in shapes or SHAPES]
    return [(op, size) for op in chosen for size in sizes]


def steps(ops: Sequence[str] = (), shapes: Shapes = ()) -> int:
    return len(problems(ops, shapes)) * len(MODES)


def run(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    *,
    dtype: str = "bfloat16",
    rounds: int = 3,
    ops: Sequence[str] = (),
    shapes: Shapes = (),
) -> None:
    """Host µs of eager calls of gristmill and of torch; the best of `rounds`, taken in turns."""
    for op, shape in problems(ops, shapes):
        for mode in MODES:
            advance(f"{SUITE} {op} {mode} {written(shape)}")
            about = {"op": op, "dtype": dtype, **_sizes(op, shape), "mode": mode}
            if results.has(**about):
                continue
            try:
                best = _best(host_calls(op, mode, shape, dtype_of(dtype), device), rounds)
                found: dict[str, Row] = {
                    impl: {"host_us": round(us, 2)} for impl, us in best.items()
                }
            except Exception as error:  # one call must not take the rest of a run along
                found = {impl: {"error": described(error)} for impl in IMPLEMENTATIONS}
            results.add(
                [{"suite": SUITE, **about, "impl": impl, **one} for impl, one in found.items()]
            )


def _best(calls: Calls, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for impl, (function, args) in calls.items():
            best[impl] = min(best[impl], time_host(function, args))
    return best


def _sizes(op: str, shape: tuple[int, int]) -> dict[str, Any]:
    rows, columns = shape
    if KINDS[op].product:  # of a square weight
        shape_of = written((*shape, columns))
        return {"M": rows, "N": columns, "K": columns, "shape": shape_of}
    return {"M": rows, "N": columns, "shape": written(shape)}


def host_calls(
    op: str, mode: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Calls:
    """Gristmill's function and torch's, with the same arguments; or the backward of both."""
    ours, torchs, leaves, others = CALLS[op](shape, dtype, device)
    for leaf in leaves:
        leaf.requires_grad_(mode != "forward")
    args = (*leaves, *others)
    if mode != "backward":
        return {"gristmill": (ours, args), "eager": (torchs, args)}
    outputs = {"gristmill": ours(*args), "eager": torchs(*args)}
    # Torch's loss may be of a narrower dtype than ours; both get the same numbers.
    numbers = torch.randn_like(outputs["eager"])
    grads = {impl: numbers.to(output.dtype) for impl, output in outputs.items()}

    def backward(output: torch.Tensor, grad: torch.Tensor) -> Any:
        # The graph is kept, so that the same backward can be called again and again.
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    return {impl: (backward, (outputs[impl], grads[impl])) for impl in outputs}


# What a family is called by: gristmill's function, torch's, what has a gradient, what has not.
Family = tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor], list[Any]]


def _rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    x, weight = _randn(dtype, device, shape, shape[1:])
    return (
        gristmill.rms_norm,
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6),
        [x, weight],
        [],
    )


def _layer_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    leaves = _randn(dtype, device, shape, shape[1:], shape[1:])
    return (
        gristmill.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        leaves,
        [],
    )


def _softmax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    return gristmill.softmax, lambda x: torch.softmax(x, -1), _randn(dtype, device, shape), []


def _cross_entropy(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    target = torch.randint(shape[1], shape[:1], device=device)
    return gristmill.cross_entropy, F.cross_entropy, _randn(dtype, device, shape), [target]


def _linear(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    """A square weight."""
    columns = shape[1]
    x, weight = _randn(dtype, device, shape, (columns, columns))
    return gristmill.linear, F.linear, [x, weight.div_(columns**0.5)], []


def _nvfp4_linear(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Family:
    """A square weight; torch's layer has it in the open."""
    columns = shape[1]
    weight = nvfp4.quantize(torch.randn(columns, columns, device=device) / columns**0.5)
    dense = nvfp4.dequantize(weight, dtype)
    # Each gets the other's weight as well: the arguments are the same for both.
    return (
        lambda x, w4, dense: nvfp4.linear(x, w4),
        lambda x, w4, dense: F.linear(x, dense),
        _randn(dtype, device, shape),
        [weight.prepare(), dense],
    )


def _randn(
    dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


CALLS = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "linear": _linear,
    "nvfp4_linear": _nvfp4_linear,
}
