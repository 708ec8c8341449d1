"""The kernels of the router ops: by how many experts a lane holds, and by all options together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from gristmill.ops.op import Arguments, Op
from gristmill.ops.space import Needed, chosen, in_every_mode
from gristmill.ops.topk_router.cuda import ITEMS, LANES
from gristmill.ops.topk_router.problem import VECTOR
from gristmill.select.device import Device

_FLAGS = (False, True)
_INTEGERS = (torch.int32, torch.int64)


def _logits(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, bool]]:
    """Of every number of vectors that a lane holds and every access; whether they are as usual."""
    for items in ITEMS:
        for beyond in (0, 2, 3):  # whole vectors, halves, elements
            experts = items * LANES * VECTOR - beyond
            yield torch.empty((4, experts), dtype=dtype, device="meta"), beyond == 0
        experts = items * LANES * VECTOR
        yield torch.empty((experts, 4), dtype=dtype, device="meta").t(), False


def forward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    for logits, usual in _logits(dtype):
        biases = dict.fromkeys((None, torch.float32, dtype) if usual else (None, torch.float32))
        for bias, ids, sigmoid, renormalize, grouped in itertools.product(
            biases, _INTEGERS if usual else _INTEGERS[:1], _FLAGS, _FLAGS, _FLAGS
        ):
            experts = logits.shape[1]
            groups = next(size for size in (4, 2, 3, 5, 7, experts) if experts % size == 0)
            if grouped and not 1 < groups <= LANES:
                continue
            scoring = "sigmoid" if sigmoid else "softmax"
            beside = None if bias is None else torch.empty(experts, dtype=bias, device="meta")
            kept = (groups, 1) if grouped else (1, 1)
            yield from _all(op, device, (logits, 1, scoring, renormalize, beside, *kept, 1.0, ids))


def backward(op: Op, device: Device, dtype: torch.dtype) -> Iterator[Needed]:
    for logits, usual in _logits(dtype):
        for gradient, ids, sigmoid, renormalize in itertools.product(
            dict.fromkeys((torch.float32, dtype) if usual else (torch.float32,)),
            _INTEGERS if usual else _INTEGERS[:1],
            _FLAGS,
            _FLAGS,
        ):
            scoring = "sigmoid" if sigmoid else "softmax"
            dweights = torch.empty((4, 1), dtype=gradient, device="meta")
            chosen_ids = torch.empty((4, 1), dtype=ids, device="meta")
            args = (dweights, logits, chosen_ids, scoring, renormalize, 1.0)
            yield from _all(op, device, args)


def _all(op: Op, device: Device, args: Arguments) -> Iterator[Needed]:
    for problem in in_every_mode(op, device, args):
        yield from chosen(op, problem)
