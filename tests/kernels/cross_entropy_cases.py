"""Calls of the cross entropy ops that together reach every path of the CUDA kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.ops.cross_entropy import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_ONE_PASS,
    CROSS_ENTROPY_ONE_PASS_,
    CROSS_ENTROPY_SHARD,
    SCALE_GRADIENT_,
)
from gristmill.ops.op import Op
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        CROSS_ENTROPY,
        CROSS_ENTROPY_BACKWARD,
        CROSS_ENTROPY_ONE_PASS,
        CROSS_ENTROPY_ONE_PASS_,
        CROSS_ENTROPY_SHARD,
        SCALE_GRADIENT_,
    )
}
SCOPES = ("cuda_warp", "cuda_block", "cuda_cluster")
LAYOUTS = ("dense", "sliced", "odd stride", "nested", "unaligned", "columns first", "expanded")


@dataclass(frozen=True)
class Case:
    op: str
    variant: str
    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    layout: str = "dense"
    target: torch.dtype = torch.int64
    weight: torch.dtype | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    return_lse: bool = False
    ignored: float = 0.3
    shards: int = 1
    dlse: bool = False
    per_row: bool = False
    arch: str = "sm_90a"
    multiprocessors: int = 3
    config: RowConfig | None = None

    def __str__(self) -> str:
        words = [self.op, self.variant, "x".join(map(str, self.shape)), str(self.dtype)[6:]]
        words += [self.layout] if self.layout != "dense" else []
        words += [str(self.target)[6:]] if self.target != torch.int64 else []
        words += [f"weight {str(self.weight)[6:]}"] if self.weight is not None else []
        words += ["smooth"] if self.smoothing else []
        words += ["z"] if self.z_loss else []
        words += ["capped"] if self.softcap else []
        words += [self.reduction] if self.reduction != "mean" else []
        words += ["lse"] if self.return_lse else []
        words += ["dlse"] if self.dlse else []
        words += [f"{self.shards} shards"] if self.shards > 1 else []
        words += ["per row"] if self.per_row else []
        words += [self.arch] if self.arch != "sm_90a" else []
        if self.config is not None:
            c = self.config
            words.append(f"{c.threads}t{c.items}i{c.lanes}l{c.cluster}c{c.feed}f{c.hold:d}h")
        return "_".join(words).replace(" ", "_")

    @property
    def device(self) -> Device:
        return replace(KNOWN[self.arch], multiprocessors=self.multiprocessors)

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The op's positional arguments, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        columns = self.shape[-1]
        logits = _tensor(self.shape, self.dtype, self.layout, generator)
        classes = columns * self.shards
        target = torch.randint(0, classes, self.shape[:-1], generator=generator)
        out = torch.rand(self.shape[:-1], generator=generator) < self.ignored
        target = torch.where(out, -100, target).to(self.target)
        weight = None
        if self.weight is not None:
            weight = (0.2 + torch.rand(columns, generator=generator)).to(self.weight)
        options = (weight, -100, self.smoothing, self.z_loss, self.softcap, self.reduction)
        first = columns if self.shards > 1 else 0
        if self.op == "scale_gradient_":
            rows = self.shape[:-1] if self.per_row else ()
            factor = torch.rand(rows, generator=generator)
            return logits, torch.where(factor < 0.3, 1.0, factor)
        if self.op == "cross_entropy_shard":
            return logits, target, first, classes, -100, self.softcap, bool(self.smoothing)
        if self.op != "cross_entropy_backward":
            return logits, target, *options, self.return_lse
        _, _, denominators, stats = CROSS_ENTROPY.reference(
            logits, torch.where(target < columns, target, 0), *options, True
        )
        rows = self.shape[:-1] if self.reduction == "none" else ()
        dloss = 0.5 + torch.rand(rows, generator=generator)
        dlse = torch.randn(self.shape[:-1], generator=generator) if self.dlse else None
        shard = (first, classes) if self.shards > 1 else (0, 0)
        return dloss, dlse, logits, target, stats, denominators, *options, *shard

    def problem(self, args: tuple[Any, ...]) -> Problem:
        return OPS[self.op].problem(*args, device=self.device)

    def find_variant(self) -> Variant:
        return next(one for one in OPS[self.op].variants if one.name == self.variant)

    def supported(self) -> bool:
        names = [one.name for one in OPS[self.op].variants]
        if self.variant not in names:
            return False
        if self.op.endswith("_") and self.layout == "expanded":
            return False
        return self.find_variant().supports(self.problem(self.arguments())) is None


def _tensor(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator
) -> torch.Tensor:
    """Random numbers, laid out in memory as `layout` says."""

    def random(*sizes: int) -> torch.Tensor:
        return (2.0 * torch.randn(sizes, generator=generator)).to(dtype)

    *leading, columns = shape
    if layout == "dense":
        return random(*shape)
    if layout == "sliced":  # the first columns of wider rows, all of them aligned
        return random(*leading, columns + 32)[..., :columns]
    if layout == "odd stride":
        return random(*leading, columns + 1)[..., :columns]
    if layout == "unaligned":
        return random(torch.Size(shape).numel() + 1)[1:].view(shape)
    if layout == "nested":
        first, second = leading
        return random(second, first, columns).transpose(0, 1)
    if layout == "columns first":
        return random(columns, *leading).movedim(0, -1)
    if layout == "expanded":
        return random(columns).expand(shape)
    raise ValueError(layout)


# Each row: what one call has besides the plain ones.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"smoothing": 0.1, "return_lse": True, "dlse": True},
    {"weight": F32, "reduction": "sum", "target": torch.int32},
    {"weight": BF16, "smoothing": 0.2, "z_loss": 1e-2},
    {"softcap": 3.0, "reduction": "none", "dlse": True, "return_lse": True},
    {"z_loss": 1e-2, "shards": 3, "per_row": True},
    {"softcap": 5.0, "smoothing": 0.05, "z_loss": 1e-3, "target": torch.int32},
    {"weight": F32, "z_loss": 1e-2, "softcap": 9.0},
)
LENGTHS = {
    "cuda_warp": (1, 3, 8, 40, 127, 129, 256, 1000),
    "cuda_block": (1, 36, 129, 1000, 2051, 4096, 8192, 20001),
    "cuda_cluster": (8, 520, 2051, 16384, 33000),
}


def sweep() -> Iterator[Case]:
    """Every op and scope over lengths of a row; dtypes, layouts and options take turns."""
    turn = itertools.count()
    for op, scope in itertools.product(OPS, SCOPES):
        for length in LENGTHS[scope]:
            index = next(turn)
            options = dict(OPTIONS[index % len(OPTIONS)])
            if op not in ("cross_entropy_backward", "cross_entropy_shard"):
                options.pop("shards", None)
            if options.get("weight") is not None and op == "cross_entropy_shard":
                options.pop("weight")
            yield Case(
                op=op,
                variant=scope,
                shape=(3, 5 if length < 10000 else 2, length),
                dtype=(BF16, F32, F16)[index % 3],
                layout=LAYOUTS[(index // 2) % len(LAYOUTS)],
                arch=("sm_90a", "sm_80")[index % 4 == 3 and scope != "cuda_cluster"],
                **options,
            )


def configurations() -> Iterator[Case]:
    """Launches that a table could ask for, whatever the preference is."""
    plain = Case("cross_entropy", "cuda_block", (7, 5000))
    for columns, smoothing, items, hold in itertools.product(
        (5000, 5003), (0.0, 0.1), (1, 3), (True, False)
    ):
        config = RowConfig(64, items, feed=TWICE, hold=hold)
        yield replace(plain, shape=(7, columns), smoothing=smoothing, config=config)
    for columns, cluster in itertools.product((5000, 5003), (2, 3, 16)):
        config = RowConfig(32, 2, cluster=cluster, feed=TWICE, hold=cluster == 3)
        yield replace(plain, shape=(7, columns), variant="cuda_cluster", config=config)
    for columns, members in itertools.product((5000, 5003), (1, 3, 20)):
        config = RowConfig(32, 2, cluster=members, feed=TWICE, hold=False)
        yield replace(plain, op="cross_entropy_backward", shape=(7, columns), config=config)
    for op in ("cross_entropy_one_pass", "cross_entropy_one_pass_"):
        base = Case(op, "cuda_block", (13, 1536), smoothing=0.1 if op.endswith("s") else 0.0)
        for feed, hold in itertools.product((STRAIGHT, AHEAD, ASYNC, 2, 3), (True, False)):
            yield replace(base, config=RowConfig(64, 3, feed=feed, hold=hold))
        for feed, hold in itertools.product((STRAIGHT, ASYNC), (True, False)):
            ragged = replace(base, shape=(13, 1531), softcap=None if hold else 4.0)
            yield replace(ragged, config=RowConfig(64, 4, feed=feed, hold=hold))
            config = RowConfig(32, 2, cluster=4, feed=feed, hold=hold)
            yield replace(ragged, variant="cuda_cluster", config=config)
        for cluster, feed in ((2, STRAIGHT), (3, 2), (4, ASYNC), (8, 3), (16, AHEAD)):
            threads = -(-1536 // (8 * cluster * 32)) * 32
            config = RowConfig(threads, items=1, cluster=cluster, feed=feed, hold=feed != ASYNC)
            yield replace(base, variant="cuda_cluster", config=config)
        for columns, cluster in itertools.product((1536, 1531), (1, 4)):
            scope = "cuda_cluster" if cluster > 1 else "cuda_block"
            config = RowConfig(32, 3, cluster=cluster, feed=TWICE, hold=False)
            yield replace(base, shape=(13, columns), variant=scope, config=config)
        for lanes in (1, 4, 32):
            config = RowConfig(64, items=-(-16 // lanes), lanes=lanes)
            yield replace(base, variant="cuda_warp", shape=(103, 64), dtype=F32, config=config)
    # The kernel that adds up rows: one block, a cluster, blocks of a cooperative grid.
    for rows, arch in ((4097, "sm_90a"), (5000, "sm_80"), (65537, "sm_80")):
        for weight, z_loss in ((None, 0.0), (F32, 1e-2)):
            yield replace(
                plain, variant="cuda_warp", shape=(rows, 3), weight=weight, z_loss=z_loss, arch=arch
            )
