"""Training one block: forward and backward, with the head and the loss or without.

A step runs as a user runs it, launched by the host, kernel by kernel: a sample is several steps in
a row, so that the host may run ahead as it does in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gristmill.bench.end_to_end import truth
from gristmill.bench.end_to_end.model import (
    Pieces,
    Rotary,
    Trained,
    TrainedBlock,
    Weights,
    dense_block,
    make_weights,
    random,
    rotary_of,
)
from gristmill.bench.end_to_end.problem import (
    SEED,
    Problem,
    compiled,
    first_call,
    synchronize,
    times,
)
from gristmill.bench.results import Row, described

HEAD = "training"  # the op with head and loss; the other is the block alone
Step = Callable[[], dict[str, Tensor]]
# In a row on a GPU, where they queue up.
_STEPS = {"cuda": 4}


class Data(NamedTuple):
    """What all implementations train on. `incoming`: the gradient of the block's output."""

    weights: Weights
    x: Tensor
    rotary: Rotary
    targets: Tensor
    incoming: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"x": self.x, **self.weights}


def measure(problem: Problem, device: torch.device, samples: int) -> list[Row]:
    data = make_data(problem, device)
    rows = {one.name: problem.row_of(one) for one in problem.implementations}
    steps: dict[str, Step] = {}
    expected = expectation(problem, data)
    for one in problem.implementations:
        row = rows[one.name]
        try:
            step = make_step(problem, data, one.pieces(), is_compiled=one.compiled)
            row["first_call_s"], outputs = first_call(step, device=device)
            row["fp64_error"] = truth.compare(outputs, expected, truth.LIMIT)
            steps[one.name] = step
        except Exception as error:  # anybody may fail in any way: it is reported, not timed
            row["error"] = described(error)
        outputs = {}  # before the next one needs the memory
    del expected
    for name, found in time_steps(steps, device, samples).items():
        if isinstance(found, Exception):
            rows[name]["error"] = f"while timing: {described(found)}"
            continue
        rows[name].update(found)
        rows[name]["tokens_per_s"] = round(problem.tokens / found["ms"] * 1e3)
        rows[name].update(peak(steps[name], device))
    return list(rows.values())


def make_data(problem: Problem, device: torch.device) -> Data:
    sizes = problem.sizes
    generator = torch.Generator(device).manual_seed(SEED)
    weights = make_weights(sizes, generator)
    if problem.op == HEAD:
        weights["norm3"] = random((sizes.hidden,), generator, 0.1) + 1
        weights["head"] = random((sizes.vocabulary, sizes.hidden), generator, sizes.hidden**-0.5)
    shape = (problem.batch, problem.length)
    targets = torch.randint(sizes.vocabulary, shape, generator=generator, device=device)
    return Data(
        {name: torch.nn.Parameter(weight) for name, weight in weights.items()},
        random((*shape, sizes.hidden), generator).requires_grad_(),
        rotary_of(sizes, torch.arange(problem.length, device=device)),
        targets,
        random((*shape, sizes.hidden), generator),
    )


def make_step(problem: Problem, data: Data, pieces: Pieces, *, is_compiled: bool) -> Step:
    """What is timed: all gradients of one batch, and the loss or the output."""
    block = dense_block(problem.sizes, pieces, data.weights)
    leaves = data.leaves
    model: torch.nn.Module = TrainedBlock(block)
    args: tuple[Any, ...] = (data.x, data.rotary)
    incoming: Tensor | None = data.incoming
    result = "output"
    if problem.op == HEAD:
        model = Trained(block, data.weights["norm3"], data.weights["head"])
        args = (*args, data.targets)
        incoming, result = None, truth.LOSS
    run: Callable[..., Tensor] = compiled(model) if is_compiled else model

    def step() -> dict[str, Tensor]:
        value = run(*args)
        gradients = torch.autograd.grad(value, list(leaves.values()), incoming)
        return {result: value.detach(), **_named(dict(zip(leaves, gradients, strict=True)))}

    return step


def expectation(problem: Problem, data: Data) -> dict[str, Tensor]:
    """The outputs of a step, computed in fp64; kept in fp32, which is exact enough for 16 bits."""
    weights, x = truth.in_fp64(data.weights, grad=True), data.x.detach().double().requires_grad_()
    added, total, _, _ = truth.block(problem.sizes, weights, x, None, data.rotary, None)
    if problem.op == HEAD:
        value = truth.head_loss(weights, added + total, data.targets)
        value.backward()
        made = {truth.LOSS: value}
    else:
        made = {"output": added + total}
        made["output"].backward(data.incoming.double())
    gradients = {name: leaf.grad for name, leaf in {"x": x, **weights}.items()}
    found = {**made, **_named({name: one for name, one in gradients.items() if one is not None})}
    return {name: one.detach().float() for name, one in found.items()}


def _named(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"the gradient of {name}": gradient for name, gradient in gradients.items()}


def peak(step: Step, device: torch.device) -> Row:
    """The most memory that a step holds beyond weights and inputs; of a GPU alone."""
    if device.type != "cuda":
        return {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    most = torch.cuda.max_memory_allocated(device)
    return {"peak_gib": round((most - before) / 2**30, 3)}


def time_steps(
    steps: Mapping[str, Step], device: torch.device, samples: int
) -> dict[str, Row | Exception]:
    """The milliseconds of a step of each, taken in turns; one that raises has its exception."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    failures: dict[str, Exception] = {}
    for number in range(samples + 1):  # the first of all is not counted
        for name, step in steps.items():
            if name in failures:
                continue
            try:
                ms = _sample(step, device)
            except Exception as error:
                failures[name] = error
                continue
            if number:
                seen[name].append(ms)
    method = "events" if device.type == "cuda" else "wall"
    found: dict[str, Row | Exception] = {}
    for name, ms_of in seen.items():
        if name in failures:
            found[name] = failures[name]
            continue
        low, _, high = quantiles(ms_of, n=4, method="inclusive") if len(ms_of) > 1 else (0, 0, 0)
        found[name] = times(median(ms_of), high - low, len(ms_of), method)
    return found


def _sample(step: Step, device: torch.device) -> float:
    count = _STEPS.get(device.type, 1)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) / count * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    begin.record(stream)
    for _ in range(count):
        step()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / count
