"""The kernels of an op, all of them: what a warm-up of everything compiles into a bundle.

A kernel serves ranges of lengths and any number of rows, so an op has a finite number of them. An
op's `space` gives calls among which every kernel of the op comes up; what a call runs first is what
is taken, as in any call: under no mode, under `torch.use_deterministic_algorithms` and under
`gristmill.batch_invariant`.

Which calls are meant:

Rows are of the dtype asked for and, beside one another, of it or of fp32, as are weights, biases,
masks of numbers and results; in training, gradients are of the dtype of what they belong to.
Norms differ from the usual call in one option at a time, or as mixed precision makes them: fp32
weights with an fp32 result, an fp32 residual. Rows have up to 2 MiB, and there may be any number of
them (fewer than 2**31). They lie at any stride and address that are multiples of 16 bytes. With an
op's usual options their length need not be such a multiple, they may lie in two levels of strides
(of other lengths, alike in all tensors), and begin 2 or 8 bytes beyond 16: in the first tensor
alone, or in all alike. Weights and masks are dense and aligned. A norm into FP8 has rows of a
multiple of 16 bytes.
Products are of dense matrices, of a layer as layers have them, of `matmul` with one side transposed
or none, alone or several side by side. Their kernels are those of common layers and of tuned sizes,
and one that fits any N and K beyond 1: where nothing may be compiled the most promising that is
there runs. Under batch invariance only the common layers are meant.
A variant or a config that is asked for by name is not meant, nor is what a table says that is not
in force where the warm-up runs.

Others still find a kernel where they share one; where they do not, and nothing may be compiled,
`KernelNotCached` names the command that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gristmill.errors import VariantUnavailable
from gristmill.jit.compilers import Compilable
from gristmill.ops.op import Op
from gristmill.select.chooser import Choice, choices
from gristmill.select.device import Device
from gristmill.select.overrides import batch_invariant
from gristmill.select.problem import Problem, Span
from gristmill.select.tables import tables_for


class Needed(NamedTuple):
    """A problem, and what runs it."""

    problem: Problem
    choice: Choice


def programs_of(
    ops: Iterable[Op], device: Device, dtypes: Sequence[torch.dtype]
) -> dict[Compilable, Needed]:
    """Every program of `ops` on a device, with the first problem that needs it."""
    found: dict[Compilable, Needed] = {}
    for op in ops:
        if op.space is None:
            continue
        for dtype in dtypes:
            for needed in op.space(op, device, dtype):
                variant, config = needed.choice.variant, needed.choice.config
                for program in variant.programs(needed.problem, config):
                    found.setdefault(program, needed)
    return found


def chosen(op: Op, problem: Problem) -> Iterator[Needed]:
    """What a call runs; nothing if a variant that cannot is asked for by name."""
    try:
        yield Needed(problem, next(choices(op.name, op.variants, problem)))
    except VariantUnavailable:
        return


class Tabled(NamedTuple):
    """Sizes, by name, and words of the key of a row in a table, and what the row covers."""

    sizes: dict[str, int]
    words: tuple[str, ...]
    covers: Span


def tabled(op: Op, device: Device) -> Iterator[Tabled]:
    """The problems for which a table in force has a row."""
    for source in tables_for(device):
        for row in list(source.table.rows.values()):  # other threads may add some
            name, *words = row.key.split()
            if name == op.name:
                pairs = [word.partition("=") for word in words]
                sizes = {name: int(value) for name, _, value in pairs if value.isdigit()}
                named = tuple(word for word, equals, _ in pairs if not equals)
                yield Tabled(sizes, named, row.covers)


def in_every_mode(op: Op, device: Device, args: tuple[Any, ...]) -> Iterator[Problem]:
    """The problem of a call: as it is, and where rows must not depend on their batch.

    Under deterministic algorithms the same kernels run: no variant of ours is indeterminate.
    """
    yield op.problem(*args, device=device)
    with batch_invariant():
        yield op.problem(*args, device=device)
