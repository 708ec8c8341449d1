"""Calls of the softmax ops that together reach every path of the CUDA kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.ops.op import Op
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD
from gristmill.ops.softmax.semantics import CAUSAL
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS = {op.name: op for op in (SOFTMAX, LOG_SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX_BACKWARD)}
FORWARD = ("softmax", "log_softmax")
BACKWARD = ("softmax_backward", "log_softmax_backward")
SCOPES = ("cuda_warp", "cuda_block", "cuda_cluster", "cuda_cooperative")
NONE = float("-inf")

# Of x, or of y and dy. The layouts: see `laid_out`.
DTYPES = ((BF16, BF16), (F32, F32), (F16, F16), (BF16, F32), (F32, BF16))
LAYOUTS = (
    ("dense", "dense"),
    ("sliced", "dense"),
    ("dense", "odd stride"),
    ("nested", "nested"),
    ("unaligned", "unaligned"),
    ("dense", "nested"),
    ("heads", "dense"),
    ("dense", "expanded"),
    ("columns first", "dense"),
)
# Of x of three dims: what a mask's shape is made of, and its dtype.
MASKS: tuple[tuple[str, torch.dtype] | None, ...] = (
    None,
    ("whole", torch.bool),
    None,
    ("columns", torch.bool),
    ("rows", BF16),
    None,
    ("outer", F32),
    ("one column", torch.bool),
    ("whole", F16),
    ("inner", torch.bool),
)


@dataclass(frozen=True)
class Case:
    op: str
    variant: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES[0]
    layouts: tuple[str, str] = LAYOUTS[0]
    scale: float = 1.0
    mask: tuple[str, torch.dtype] | None = None
    causal: str | None = None
    arch: str = "sm_90a"
    multiprocessors: int = 3
    config: RowConfig | None = None

    def __str__(self) -> str:
        words = [self.op, self.variant, "x".join(map(str, self.shape))]
        words += ["-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)]
        words += [name for name in self.layouts if name != "dense"]
        words += [f"scale={self.scale}"] if self.scale != 1.0 else []
        words += [f"{self.mask[0]}-{str(self.mask[1])[6:]}"] if self.mask else []
        words += [self.causal] if self.causal else []
        words += [self.arch] if self.arch != "sm_90a" else []
        if self.config is not None:
            c = self.config
            words.append(f"{c.threads}t{c.items}i{c.lanes}l{c.cluster}c{c.feed}f{c.hold:d}h")
        return " ".join(words).replace(" ", "_")

    @property
    def code(self) -> int:
        """The op's argument for `causal`."""
        return CAUSAL[self.causal]

    @property
    def own(self) -> Op:
        return OPS[self.op]

    @property
    def device(self) -> Device:
        return replace(KNOWN[self.arch], multiprocessors=self.multiprocessors)

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The op's positional arguments, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        values = 3 * torch.randn(self.shape, generator=generator)
        if self.op in FORWARD:
            x = laid_out(values.to(self.dtypes[0]), self.layouts[0])
            return x, self.code, self.scale, self.mask_of(generator)
        forward = OPS[self.op.removesuffix("_backward")]
        y = forward.reference(values, self.code, self.scale, self.mask_of(generator))
        dy = torch.randn(self.shape, generator=generator).to(self.dtypes[1])
        return (
            laid_out(dy, self.layouts[1]),
            laid_out(y.to(self.dtypes[0]), self.layouts[0]),
            self.code,
            self.scale,
        )

    def mask_of(self, generator: torch.Generator) -> torch.Tensor | None:
        if self.mask is None:
            return None
        kind, dtype = self.mask
        *leading, columns = self.shape
        outer = (leading[0], *(1 for _ in leading[1:]), columns) if leading else (columns,)
        inner = (*leading[1:], columns)
        shape = {
            "whole": self.shape,
            "columns": (columns,),
            "outer": outer,
            "inner": inner,
            "rows": (*leading[-1:], columns),
            "one column": (*leading, 1),
        }[kind]
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.7
        mask = torch.randn(shape, generator=generator).to(dtype)
        mask[torch.rand(shape, generator=generator) < 0.1] = NONE
        return mask

    def problem(self, args: tuple[Any, ...]) -> Problem:
        return self.own.problem(*args, device=self.device)

    def find_variant(self) -> Variant:
        return next(one for one in self.own.variants if one.name == self.variant)

    def supported(self) -> bool:
        return self.find_variant().supports(self.problem(self.arguments())) is None


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers, somewhere else in memory; expanded ones are those of the first row."""
    *leading, columns = values.shape
    if layout == "dense":
        return values
    if layout in ("sliced", "odd stride"):
        wide = values.new_zeros(*leading, columns + (32 if layout == "sliced" else 1))
        wide[..., :columns] = values
        return wide[..., :columns]
    if layout == "unaligned":
        flat = values.new_zeros(values.numel() + 1)
        flat[1:] = values.reshape(-1)
        return flat[1:].view(values.shape)
    if layout == "nested":  # two leading dims, the other way round in memory
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "heads":  # the keys of a fused qkv
        wide = values.new_zeros(leading[0], 3, *leading[1:], columns)
        wide[:, 1] = values
        return wide[:, 1]
    if layout == "expanded":
        return values[(0,) * len(leading)].clone().expand(values.shape)
    if layout == "columns first":
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    raise ValueError(layout)


def sweep() -> Iterator[Case]:
    """Every op and scope over lengths of a row; dtypes, layouts and options take turns."""
    lengths = {
        "cuda_warp": (1, 3, 8, 40, 127, 256, 320, 1017, 1024),
        "cuda_block": (1, 36, 129, 1000, 4096, 4101, 8192, 8200, 16384, 20000),
        "cuda_cluster": (8, 2048, 8200, 16387, 33000),
        "cuda_cooperative": (24, 4096, 10000, 16384),
    }
    turn = itertools.count()
    for scope, op in itertools.product(SCOPES, OPS):
        for length in lengths[scope]:
            index = next(turn)
            yield Case(
                op=op,
                variant=scope,
                shape=(3, 5 if length < 8000 else 2, length),
                dtypes=DTYPES[(index // 2) % len(DTYPES)],
                layouts=LAYOUTS[index % len(LAYOUTS)],
                scale=(1.0, 0.125, 1.0, -0.7)[index % 4],
                mask=MASKS[index % len(MASKS)],
                causal=(None, None, "top_left", None, "bottom_right")[index % 5],
                arch=("sm_90a", "sm_80")[index % 4 == 3 and scope != "cuda_cluster"],
                multiprocessors=24 if scope == "cuda_cooperative" else 3,
            )


def configurations() -> Iterator[Case]:
    """Launches that a table could ask for, whatever the preference is: feeds, holds, scopes."""
    for op in ("softmax", "log_softmax", "softmax_backward"):
        base = Case(op, "cuda_block", (13, 1536))
        for feed, hold in itertools.product((STRAIGHT, AHEAD, ASYNC, 2, 3), (True, False)):
            config = RowConfig(threads=64, items=3, feed=feed, hold=hold)
            yield replace(base, config=config)
        for feed, hold in itertools.product((STRAIGHT, ASYNC), (True, False)):
            config = RowConfig(threads=64, items=4, feed=feed, hold=hold)
            yield replace(base, shape=(13, 1531), config=config)
            yield replace(base, shape=(700, 1536), config=config, causal="bottom_right")
            yield replace(base, shape=(40, 1531), config=config, causal="top_left")
        yield replace(base, shape=(40, 1536), config=RowConfig(64, 3, feed=2), causal="top_left")
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
        for lanes in (1, 2, 4, 8, 16, 32):
            for feed, columns in ((STRAIGHT, 64), (AHEAD, 64), (STRAIGHT, 61)):
                config = RowConfig(threads=64, items=-(-17 // lanes), lanes=lanes, feed=feed)
                yield replace(
                    base,
                    variant="cuda_warp",
                    shape=(203, columns),
                    dtypes=(F32, F32),
                    config=config,
                    causal="bottom_right" if lanes == 4 else None,
                )
        for cluster, items, columns in itertools.product((1, 4), (1, 3), (4104, 4099)):
            config = RowConfig(64, items=items, cluster=cluster, feed=TWICE, hold=False)
            variant = "cuda_cluster" if cluster > 1 else "cuda_block"
            causal = "top_left" if items == 3 else None
            yield Case(op, variant, (5, columns), config=config, causal=causal)
