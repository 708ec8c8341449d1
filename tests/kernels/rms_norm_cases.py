"""Calls of the RMSNorm ops that together reach every path of the CUDA kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORWARD_OPS = ("rms_norm", "add_rms_norm", "fused_add_rms_norm_")
SCOPES = ("cuda_warp", "cuda_block", "cuda_cluster", "cuda_cooperative")

# x, its companion (residual or dy), weight, and the dtype of y where it is not x's.
DTYPES = (
    (BF16, BF16, BF16, None),
    (F32, F32, F32, None),
    (BF16, BF16, F32, None),
    (F16, F16, F16, None),
    (BF16, F32, BF16, F32),
    (F32, BF16, F16, BF16),
    (F16, BF16, None, None),
    (BF16, BF16, None, F16),
)
# How x and its companion lie in memory; see `_tensor`.
LAYOUTS = (
    ("dense", "dense"),
    ("sliced", "dense"),
    ("dense", "odd stride"),
    ("nested", "nested"),
    ("unaligned", "dense"),
    ("dense", "nested"),
    ("heads", "dense"),
    ("dense", "expanded"),
    ("columns first", "dense"),
)


@dataclass(frozen=True)
class Case:
    op: str
    variant: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...] = DTYPES[0]
    layouts: tuple[str, str] = LAYOUTS[0]
    casting: str = "once"
    eps: float = 1e-6
    weight_offset: float = 0.0
    dsum: bool = False
    weight_grad: bool = True
    arch: str = "sm_90a"
    multiprocessors: int = 3
    config: RowConfig | None = None

    def __str__(self) -> str:
        words = [self.op, self.variant, "x".join(map(str, self.shape))]
        words += ["-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)]
        words += [name for name in self.layouts if name != "dense"]
        words += [self.casting] if self.casting != "once" else []
        words += ["dsum"] if self.dsum else []
        words += [self.arch] if self.arch != "sm_90a" else []
        if self.config is not None:
            c = self.config
            words.append(f"{c.threads}t{c.items}i{c.lanes}l{c.cluster}c{c.feed}f{c.hold:d}h")
        return " ".join(words).replace(" ", "_")

    @property
    def device(self) -> Device:
        return replace(KNOWN[self.arch], multiprocessors=self.multiprocessors)

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The op's positional arguments, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        x_dtype, other_dtype, weight_dtype, out_dtype = self.dtypes
        if self.op == "fused_add_rms_norm_" and self.layouts[1] == "expanded":
            raise ValueError("an expanded residual cannot be written")
        x = _tensor(self.shape, x_dtype, self.layouts[0], generator)
        other = _tensor(self.shape, other_dtype, self.layouts[1], generator)
        weight = None
        if weight_dtype is not None:
            weight = torch.randn(self.shape[-1], generator=generator).to(weight_dtype)
        options = (self.eps, self.weight_offset)
        if self.op == "rms_norm":
            return (x, weight, *options, self.casting, out_dtype)
        if self.op == "add_rms_norm":
            return (x, other, weight, *options, self.casting, out_dtype)
        if self.op == "fused_add_rms_norm_":
            return (x, other, weight, self.eps)
        dsum = _tensor(self.shape, x_dtype, "dense", generator) if self.dsum else None
        return (other, x, weight, dsum, *options, self.weight_grad)

    def problem(self, args: tuple[Any, ...]) -> Problem:
        return OPS[self.op].problem(*args, device=self.device)

    def find_variant(self) -> Variant:
        return next(one for one in OPS[self.op].variants if one.name == self.variant)

    def supported(self) -> bool:
        return self.find_variant().supports(self.problem(self.arguments())) is None


def _tensor(
    shape: tuple[int, ...], dtype: torch.dtype | None, layout: str, generator: torch.Generator
) -> torch.Tensor:
    """Random numbers, laid out in memory as `layout` says."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    *leading, columns = shape
    if layout == "dense":
        return random(*shape)
    if layout == "sliced":  # the first columns of wider rows, all of them aligned
        return random(*leading, columns + 32)[..., :columns]
    if layout == "odd stride":
        return random(*leading, columns + 1)[..., :columns]
    if layout == "unaligned":
        return random(torch.Size(shape).numel() + 1)[1:].view(shape)
    if layout == "nested":  # two leading dims, the other way round in memory
        first, second = leading
        return random(second, first, columns).transpose(0, 1)
    if layout == "heads":  # the keys of a fused qkv
        tokens, heads = leading
        return random(tokens, 3, heads, columns)[:, 1]
    if layout == "expanded":
        return random(columns).expand(shape)
    if layout == "columns first":
        return random(columns, *leading).movedim(0, -1)
    raise ValueError(layout)


def sweep() -> Iterator[Case]:
    """Every op and scope over lengths of a row; dtypes, layouts and options take turns."""
    lengths = {
        "cuda_warp": (1, 3, 8, 40, 127, 256, 257, 320, 1022, 1024),
        "cuda_block": (1, 36, 129, 1000, 4096, 4104, 8192, 12288, 20480, 32768),
        "cuda_cluster": (8, 2048, 8200, 16384, 33000, 65536),
        "cuda_cooperative": (24, 4096, 10001, 32768, 65536),
    }
    turn = itertools.count()
    for scope, ops in itertools.product(SCOPES, (*FORWARD_OPS, "rms_norm_backward")):
        for length in lengths[scope]:
            index = next(turn)
            layouts = LAYOUTS[index % len(LAYOUTS)]
            if ops == "fused_add_rms_norm_" and "expanded" in layouts:
                layouts = ("nested", "odd stride")
            yield Case(
                op=ops,
                variant=scope,
                shape=(3, 5 if length < 10000 else 2, length),
                dtypes=DTYPES[(index // 2) % len(DTYPES)],
                layouts=layouts,
                casting="llama" if index % 3 == 1 else "once",
                eps=(1e-6, 1e-5, 0.1)[index % 3],
                weight_offset=(0.0, 1.0)[index % 2],
                dsum=index % 2 == 1,
                weight_grad=index % 5 != 4,
                arch=("sm_90a", "sm_80")[index % 4 == 3 and scope != "cuda_cluster"],
                multiprocessors=24 if scope == "cuda_cooperative" else 3,
            )


def configurations() -> Iterator[Case]:
    """Launches that a table could ask for, whatever the preference is: feeds, holds, scopes."""
    for op in ("add_rms_norm", "rms_norm_backward"):
        base = Case(op, "cuda_block", (13, 1536), dtypes=(BF16, BF16, F32, None), dsum=True)
        for feed, hold in itertools.product((STRAIGHT, AHEAD, ASYNC, 2, 3), (True, False)):
            config = RowConfig(threads=64, items=3, feed=feed, hold=hold)
            yield replace(base, config=config)
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
            for feed in (STRAIGHT, AHEAD):
                config = RowConfig(threads=64, items=-(-16 // lanes), lanes=lanes, feed=feed)
                dtypes = (F32, F32, BF16, None)
                yield replace(
                    base, variant="cuda_warp", shape=(203, 64), dtypes=dtypes, config=config
                )
    for op, cluster, items in itertools.product(("rms_norm", "add_rms_norm"), (1, 4), (1, 3)):
        config = RowConfig(64, items=items, cluster=cluster, feed=TWICE, hold=False)
        variant = "cuda_cluster" if cluster > 1 else "cuda_block"
        yield Case(op, variant, (5, 4104), dtypes=(BF16, BF16, F32, None), config=config)
