"""Calls of the LayerNorm ops that together reach every path of the CUDA kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rms_norm_cases import BF16, DTYPES, F16, F32, LAYOUTS, SCOPES
from rms_norm_cases import Case as RmsNormCase

from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig

OPS_OF_ROWS = ("layer_norm", "add_layer_norm", "layer_norm_backward")
BIASES = (BF16, None, F32, F16)


@dataclass(frozen=True)
class Case(RmsNormCase):
    """`mean` is added to x; `bias` is the dtype of the bias, or of its gradient."""

    bias: torch.dtype | None = BF16
    eps: float = 1e-5
    mean: float = 0.0

    def __str__(self) -> str:
        words = [super().__str__(), f"bias_{str(self.bias).removeprefix('torch.')}"]
        return "_".join([*words, *([f"mean{self.mean:g}"] if self.mean else [])])

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The op's positional arguments, on the CPU."""
        # Made as those of RMSNorm's backward pass: two row tensors, a weight, and dsum.
        other, x, weight, dsum, *_ = replace(
            RmsNormCase("rms_norm_backward", self.variant, self.shape),
            dtypes=self.dtypes,
            layouts=self.layouts,
            dsum=True,
        ).arguments(seed)
        x.add_(self.mean)
        generator = torch.Generator().manual_seed(seed + 1)
        bias = None
        if self.bias is not None:
            bias = torch.randn(self.shape[-1], generator=generator).to(self.bias)
        options = (self.eps, self.weight_offset)
        if self.op == "layer_norm":
            return (x, weight, bias, *options, self.dtypes[3])
        if self.op == "add_layer_norm":
            return (x, other, weight, bias, *options, self.dtypes[3])
        return (
            other,
            x,
            weight,
            dsum if self.dsum else None,
            *options,
            self.weight_grad,
            self.bias,
        )


def sweep() -> Iterator[Case]:
    """Every op and scope over lengths of a row; dtypes, layouts and options take turns."""
    lengths = {
        "cuda_warp": (1, 3, 8, 40, 127, 256, 257, 320, 1022, 1024),
        "cuda_block": (1, 36, 129, 1000, 4096, 4104, 8192, 12288, 20480, 32768),
        "cuda_cluster": (8, 2048, 8200, 16384, 33000, 65536),
        "cuda_cooperative": (24, 4096, 10001, 32768, 65536),
    }
    turn = itertools.count()
    for scope, op in itertools.product(SCOPES, OPS_OF_ROWS):
        for length in lengths[scope]:
            index = next(turn)
            yield Case(
                op=op,
                variant=scope,
                shape=(3, 5 if length < 10000 else 2, length),
                dtypes=DTYPES[(index // 2) % len(DTYPES)],
                layouts=LAYOUTS[index % len(LAYOUTS)],
                eps=(1e-5, 1e-6, 0.1)[index % 3],
                weight_offset=(0.0, 1.0)[index % 2],
                dsum=index % 2 == 1,
                weight_grad=index % 5 != 4,
                bias=BIASES[(index // 3) % len(BIASES)],
                mean=(0.0, 1e4, -30.0)[index % 3],
                arch=("sm_90a", "sm_80")[index % 4 == 3 and scope != "cuda_cluster"],
                multiprocessors=24 if scope == "cuda_cooperative" else 3,
            )


def configurations() -> Iterator[Case]:
    """Launches that a table could ask for, whatever the preference is: feeds, holds, scopes."""
    for op in ("add_layer_norm", "layer_norm_backward"):
        base = Case(op, "cuda_block", (13, 1536), dtypes=(BF16, BF16, F32, None), dsum=True)
        for feed, hold in itertools.product((STRAIGHT, AHEAD, ASYNC, 2, 3), (True, False)):
            config = RowConfig(threads=64, items=3, feed=feed, hold=hold)
            yield replace(base, config=config, mean=100.0)
        for cluster, feed in ((2, STRAIGHT), (3, 2), (4, ASYNC), (8, 3), (16, AHEAD)):
            threads = -(-1536 // (8 * cluster * 32)) * 32
            for hold in (True, False):
                config = RowConfig(threads, items=1, cluster=cluster, feed=feed, hold=hold)
                yield replace(base, variant="cuda_cluster", config=config)
        for members in (1, 2, 6):
            threads = -(-1536 // (8 * members * 32)) * 32
            config = RowConfig(threads, items=1, cluster=members, feed=AHEAD)
            yield replace(
                base, variant="cuda_cooperative", config=config, multiprocessors=12, arch="sm_80"
            )
        for lanes, feed in itertools.product((1, 2, 4, 8, 16, 32), (STRAIGHT, AHEAD)):
            config = RowConfig(threads=64, items=-(-16 // lanes), lanes=lanes, feed=feed)
            dtypes = (F32, F32, BF16, None)
            case = replace(base, variant="cuda_warp", shape=(203, 64), dtypes=dtypes, config=config)
            yield replace(case, mean=1e4)
    for op, cluster, items in itertools.product(OPS_OF_ROWS[:2], (1, 4), (1, 3)):
        config = RowConfig(64, items=items, cluster=cluster, feed=TWICE, hold=False)
        variant = "cuda_cluster" if cluster > 1 else "cuda_block"
        case = Case(op, variant, (5, 4104), dtypes=(BF16, BF16, F32, None), config=config)
        yield replace(case, mean=1e3)
        yield replace(case, dtypes=(F32, F32, None, None), bias=None, mean=1e4)
