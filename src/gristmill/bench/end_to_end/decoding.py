"""Decoding by one block: a token of each sequence, over a cache of keys and values that is full.

All weights are read in a step, and they are all that counts: so they lie in memory as often as it
takes that no step finds its own in the L2 cache. Steps are CUDA graphs; the host is not in them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gristmill import nvfp4
from gristmill.bench.end_to_end import truth
from gristmill.bench.end_to_end.model import (
    Block,
    Cache,
    Mixture,
    Mlp,
    Pieces,
    Rotary,
    Sizes,
    Weights,
    dense_block,
    linear,
    make_weights,
    random,
    rotary_of,
)
from gristmill.bench.end_to_end.problem import (
    SEED,
    Problem,
    compiled,
    first_call,
    times,
)
from gristmill.bench.results import Row, described
from gristmill.nn import NVFP4Linear, NVFP4MoE
from gristmill.select.copies import rotation_count
from gristmill.select.device import device_of
from gristmill.select.timing import Timing, time_copy, time_interleaved

# Keys are larger than queries, so that some tokens count more than others: the mean over a thousand
# random values would be close to nothing, and what attention does would not be seen.
_KEYS = 3.0
# What a router gives the experts that a token is meant for; the others get about 1. So far apart
# that roundings in 16 bits do not change who is chosen.
_CHOSEN = 7.0
# On a CPU, where times are for ratios only.
_CPU_SETS = 2


class Inputs(NamedTuple):
    """Of a step: what the block before adds, and what to; `experts` of the mixture that are met."""

    x: Tensor
    residual: Tensor
    rotary: Rotary
    cache: Cache
    experts: int


@dataclass(frozen=True)
class Form:
    """Weights in one form, several copies of them.

    `make`: a block of a copy, of somebody's pieces. `exact`: the values they stand for. `bytes`:
    those that a step reads, with its cache.
    """

    make: Callable[[int, Pieces], Block]
    exact: Weights
    copies: int
    bytes: int


Outputs = tuple[Tensor, Tensor]


def measure(problem: Problem, device: torch.device, samples: int) -> list[Row]:
    generator = torch.Generator(device).manual_seed(SEED)
    weights = make_weights(problem.sizes, generator)
    router = weights.get("router")
    first = make_inputs(problem, router, generator)
    kinds = dict.fromkeys(one.nvfp4 for one in problem.implementations)
    forms = {kind: (nvfp4_form if kind else dense_form)(problem, weights, first) for kind in kinds}
    count = max(form.copies for form in forms.values())
    sets = [first, *(make_inputs(problem, router, generator) for _ in range(count - 1))]
    rows = {one.name: problem.row_of(one) for one in problem.implementations}
    runnable: dict[str, Callable[..., Outputs]] = {}
    for kind, form in forms.items():
        expected = expectation(problem, form.exact, first)
        for one in problem.implementations:
            if one.nvfp4 == kind:
                try:
                    step = make_step(form, one.pieces(), is_compiled=one.compiled)
                    rows[one.name].update(_checked(step, sets, expected))
                    runnable[one.name] = step
                except Exception as error:  # anybody may fail in any way: reported, not timed
                    rows[one.name]["error"] = described(error)
        del expected
    _time(problem, rows, runnable, sets, {k: form.bytes for k, form in forms.items()}, samples)
    return list(rows.values())


def _checked(
    step: Callable[..., Outputs], sets: Sequence[Inputs], expected: Mapping[str, Tensor]
) -> Row:
    """What a row says of first calls; WrongResultError if they do not give what is expected."""
    first = sets[0]
    for one in first.cache[:2]:  # nobody is to find what another one wrote
        one.index_fill_(2, first.cache.position, torch.nan)
    seconds, outputs = first_call(step, 0, *first, device=first.x.device)
    error = truth.compare(named(outputs, first.cache), expected, truth.LIMIT)
    for index, inputs in enumerate(sets):  # nothing is to be compiled in a capture
        step(index, *inputs)
    return {"first_call_s": seconds, "fp64_error": error}


def _time(
    problem: Problem,
    rows: Mapping[str, Row],
    runnable: Mapping[str, Callable[..., Outputs]],
    sets: Sequence[Inputs],
    bytes_of: Mapping[bool, int],
    samples: int,
) -> None:
    if not runnable:
        return
    numbered = [(index, *inputs) for index, inputs in enumerate(sets)]
    timings = time_interleaved(runnable, numbered, samples=samples)
    device = sets[0].x.device
    roofs = {
        moved: time_copy(moved, device, samples=samples).us / 1e3
        for moved in set(bytes_of.values())
        if device.type == "cuda"  # a CPU's copy is no roof
    }
    for one in problem.implementations:
        found = timings.get(one.name)
        row = rows[one.name]
        if isinstance(found, Exception):
            row["error"] = f"while timing: {described(found)}"
        if not isinstance(found, Timing):
            continue
        row.update(times(found.us / 1e3, found.spread_us / 1e3, found.samples, found.method))
        row["bytes"] = moved = bytes_of[one.nvfp4]
        if moved in roofs:
            row["roof_ms"] = float(f"{roofs[moved]:.5g}")
            row["roof_share"] = round(roofs[moved] / row["ms"], 4)


def make_inputs(problem: Problem, router: Tensor | None, generator: torch.Generator) -> Inputs:
    """Of one step; with a router the residual is such that tokens go to experts of all kinds."""
    sizes, batch, device = problem.sizes, problem.batch, generator.device
    residual, met = random((batch, 1, sizes.hidden), generator), 0
    if router is not None:
        scores = torch.rand((batch, sizes.experts), generator=generator, device=device)
        ids = scores.topk(sizes.chosen).indices
        met = len(ids.unique())
        straight = router[ids].sum(1, keepdim=True) * (sizes.hidden / sizes.chosen) ** 0.5
        part = min(1.0, _CHOSEN / (sizes.hidden / sizes.chosen) ** 0.5)
        residual = straight * part + residual * (1 - part**2) ** 0.5
    shape = (batch, sizes.groups, problem.length, sizes.head)
    cache = Cache(
        random(shape, generator, _KEYS),
        random(shape, generator),
        torch.tensor([problem.length - 1], device=device),
    )
    x = random((batch, 1, sizes.hidden), generator, 0.3)
    return Inputs(x, residual, rotary_of(sizes, cache.position), cache, met)


def make_step(form: Form, pieces: Pieces, *, is_compiled: bool) -> Callable[..., Outputs]:
    """What is timed: the block of this number, or the next best, on these inputs."""
    blocks = [form.make(index, pieces) for index in range(form.copies)]
    run = compiled(_run) if is_compiled else _run

    def step(index: int, *inputs: Any) -> Outputs:
        return run(blocks[index % len(blocks)], *inputs[:4])

    return step


def _run(block: Block, x: Tensor, residual: Tensor, rotary: Rotary, cache: Cache) -> Outputs:
    made: Outputs = block(x, residual, rotary, cache)
    return made


def named(outputs: Outputs, cache: Cache) -> dict[str, Tensor]:
    """What a step gives, and what it has written to the cache."""
    added, residual = outputs
    keys, values = (one.index_select(2, cache.position) for one in cache[:2])
    return {"output": added, "residual": residual, "key": keys, "value": values}


def expectation(problem: Problem, weights: Weights, inputs: Inputs) -> dict[str, Tensor]:
    x, residual = inputs.x.double(), inputs.residual.double()
    exact = truth.in_fp64(weights)
    made = truth.block(problem.sizes, exact, x, residual, inputs.rotary, inputs.cache)
    return dict(zip(("output", "residual", "key", "value"), made, strict=True))


def dense_form(problem: Problem, weights: Weights, inputs: Inputs) -> Form:
    sizes = problem.sizes
    moved = _moved(sizes, {name: weight.nbytes for name, weight in weights.items()}, inputs)
    count = _copies(moved, inputs.x.device)
    stores = [weights, *({k: v.clone() for k, v in weights.items()} for _ in range(count - 1))]
    return Form(
        lambda index, pieces: dense_block(sizes, pieces, stores[index]), weights, count, moved
    )


def nvfp4_form(problem: Problem, weights: Weights, inputs: Inputs) -> Form:
    """Linear layers and experts in NVFP4; norms and the router stay as they are."""
    sizes = problem.sizes
    layers: dict[str, torch.nn.Module] = {
        name: NVFP4Linear.from_linear(linear(weights[name]))
        for name in ("qkv", "out", "gate_up", "down")
        if name in weights
    }
    if sizes.experts:
        gate, up = weights["w13"].chunk(2, 1)
        layers["experts"] = NVFP4MoE.from_experts(gate, up, weights["w2"])
    sizes_of = {name: sum(one.nbytes for one in layer.buffers()) for name, layer in layers.items()}
    dense = {name: weight.nbytes for name, weight in weights.items() if name not in _QUANTISED}
    moved = _moved(sizes, {**dense, **sizes_of}, inputs)
    count = _copies(moved, inputs.x.device)
    stores = [layers, *(copy.deepcopy(layers) for _ in range(count - 1))]

    def make(index: int, pieces: Pieces) -> Block:
        store = stores[index]
        mlp: torch.nn.Module
        if sizes.experts:
            mlp = Mixture(sizes, pieces, linear(weights["router"]), store["experts"])
        else:
            mlp = Mlp(pieces, store["gate_up"], store["down"])
        return Block(sizes, pieces, weights, {**store, "mlp": mlp})

    return Form(make, {**weights, **_values(layers)}, count, moved)


_QUANTISED = ("qkv", "out", "gate_up", "down", "w13", "w2")
_PER_EXPERT = ("w13", "w2", "experts")


def _values(layers: Mapping[str, torch.nn.Module]) -> dict[str, Tensor]:
    """What the codes and scales stand for."""
    found = {}
    for name, layer in layers.items():
        if isinstance(layer, NVFP4Linear):
            found[name] = nvfp4.dequantize(layer.weight4, torch.float64)
        elif isinstance(layer, NVFP4MoE):
            found["w13"] = nvfp4.dequantize(layer.w13, torch.float64)
            found["w2"] = nvfp4.dequantize(layer.w2, torch.float64)
    return found


def _moved(sizes: Sizes, bytes_of: Mapping[str, int], inputs: Inputs) -> int:
    """The bytes of the weights that a step meets, and of its cache."""
    total = sum(one.nbytes for one in inputs.cache[:2])
    for name, size in bytes_of.items():
        total += size * inputs.experts // sizes.experts if name in _PER_EXPERT else size
    return total


def _copies(moved: int, device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SETS
    return rotation_count(moved, device_of(device).l2_bytes)
