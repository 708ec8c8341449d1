"""The CUDA variants of cross_entropy and cross_entropy_shard, and what all of them share.

One kernel template (kernels/cuda/cross_entropy.cu); a variant is a scope of it: who shares a row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.cross_entropy import configs, reference, semantics
from gristmill.ops.cross_entropy.problem import Details
from gristmill.ops.plain import laid_out
from gristmill.ops.rows.config import RowConfig, few_rows
from gristmill.ops.rows.problem import RowDetails, packed
from gristmill.ops.rows.variant import BOUNDS, RowVariant, team_bytes
from gristmill.select.problem import Problem
from gristmill.settings import settings

SOURCE = "cross_entropy.cu"
# Labels: target, weight, ignore_index, first, classes, wide, debug. Options: four floats, and the
# sum of the weights.
LABELS, OPTIONS = "QQqqqII", "ffffQ"
# ForwardParams: logits, rows, labels, options, loss, lse, stats, shard, columns, share, all_rows.
FORWARD_PARAMS = struct.Struct(f"<Qqqqq{LABELS}{OPTIONS}QQQQIII")
# TotalParams: loss, lse, labels, total, denominators, rows, meeting, z_loss.
TOTAL_PARAMS = struct.Struct(f"<QQ{LABELS}QQqQQI4xf")

Labels = tuple[int, ...]
Options = tuple[float, ...]


def labels_of(
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    first_class: int,
    classes: int,
    debug: bool,
) -> Labels:
    """The fields of a kernel's Labels; the tensors are contiguous."""
    return (
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        ignore_index,
        first_class,
        classes,
        target.dtype == torch.int64,
        debug,
    )


def options_of(
    label_smoothing: float, z_loss: float, softcap: float | None, total: torch.Tensor | None
) -> Options:
    """The fields of a kernel's Options."""
    cap = 1.0 if softcap is None else softcap
    return (label_smoothing, z_loss, cap, 1.0 / cap, 0 if total is None else total.data_ptr())


def class_weights(weight: torch.Tensor | None) -> torch.Tensor | None:
    """As the kernels read them: fp32, side by side, aligned. They are few beside the logits."""
    if weight is None:
        return None
    return packed(weight.to(torch.float32))


class StreamVariant(RowVariant):
    """What the variants whose rows pass by have in common."""

    least_threads = 64
    feeds_by_scope: ClassVar = dict.fromkeys(("WARP", "BLOCK", "CLUSTER"), (configs.STREAM,))

    def longest(self, problem: Problem) -> int:
        return configs.longest(self.scope)

    def supports(self, problem: Problem) -> str | None:
        reason = super().supports(problem)
        if reason is None and problem.rows >= 2**31:
            return f"{problem.rows} rows are more than a grid has teams"
        return reason

    def declines(self, problem: Problem) -> str | None:
        long = problem.layout.layout.vectors > configs.LONG
        if self.scope != "BLOCK" or not long or not few_rows(problem):
            return None
        if self.sibling("cuda_cluster").supports(problem) is not None:
            return None
        return "few long rows leave most SMs idle; several blocks can share each"

    def lanes(self, problem: Problem) -> Sequence[int]:
        """A lane for each element at a ragged end."""
        layout = problem.layout.layout
        least = layout.vector if layout.ragged else 1
        return [lanes for lanes in super().lanes(problem) if lanes >= least]

    def bound(self, config: RowConfig) -> int:
        return next(size for size in BOUNDS if config.threads <= size)

    def vector_share(self, details: RowDetails, config: RowConfig) -> int:
        """Vectors of a row per block."""
        return -(-details.layout.vectors // config.cluster)


class ForwardVariant(StreamVariant):
    floats = 2

    def longest(self, problem: Problem) -> int:
        return configs.WARP_LONGEST_FORWARD if self.scope == "WARP" else super().longest(problem)

    def declines(self, problem: Problem) -> str | None:
        long = problem.layout.layout.vectors > configs.WARP_LONGEST
        if self.scope == "WARP" and long and problem.rows < 32 * problem.device.multiprocessors:
            return "so few rows of this length leave most lanes idle"
        return super().declines(problem)

    configs_by_scope: ClassVar = {
        "WARP": configs.warp_forward,
        "BLOCK": configs.block_forward,
        "CLUSTER": configs.cluster_forward,
    }

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        shard = problem.op == "cross_entropy_shard"
        flags = (
            config.hold,
            details.layout.ragged,
            details.capped,
            details.smooth,
            details.weights,
            shard,
        )
        arguments = (
            details.type(0),
            str(details.layout.nested).lower(),
            self.scope,
            str(config.lanes),
            str(details.layout.vector),
            str(config.items),
            *(str(flag).lower() for flag in flags),
            str(self.bound(config)),
        )
        names = [f"cross_entropy_forward<{','.join(arguments)}>"]
        if details.added:
            names.append(f"cross_entropy_total<{configs.total(problem)[0]}>")
        return Program(SOURCE, tuple(names))

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        shard = problem.op == "cross_entropy_shard"
        if details.layout.rows == 0 or details.layout.columns == 0:
            if shard:
                return laid_out(reference.cross_entropy_shard, semantics.outputs_shard)
            return laid_out(reference.cross_entropy, semantics.outputs_forward)
        run = self._run(problem, config)
        if shard:
            return _plan_shard(run, details.copied)
        total = None
        if details.added:
            total = bind_total(problem, self.program(problem, config))
        return _plan_forward(run, total, details.copied)

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        device = problem.device.index
        start, _ = self.prepare(problem, config, self.program(problem, config), FORWARD_PARAMS)
        outer, inner = layout.strides(0)
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share = self.vector_share(details, config)
        stream = launch.current_stream

        def run(
            logits: torch.Tensor,
            labels: Labels,
            options: Options,
            outputs: tuple[int, int, int, int],
            all_rows: bool,
        ) -> None:
            start(
                stream(device),
                logits.data_ptr(),
                outer,
                inner,
                rows,
                inner_rows,
                *labels,
                *options,
                *outputs,
                columns,
                share,
                all_rows,
            )

        return launch.on_device(device, run)


def total_words(problem: Problem) -> int:
    """Zeroed words in which the blocks of the kernel below meet; 0 where none do."""
    scope, members, _ = configs.total(problem)
    return 1 + 2 * members * 4 if scope == "GRID" else 0


def bind_total(problem: Problem, program: Program) -> Callable[..., None]:
    """The kernel that adds up the rows' losses, or counts them, as a function of its tensors."""
    scope, members, threads = configs.total(problem)
    device, rows = problem.device.index, problem.rows
    name = next(name for name in program.names if name.startswith("cross_entropy_total"))
    start = launch.prepare(
        launch.KernelCall(
            program,
            name,
            grid=members,
            block=threads,
            shared=team_bytes(scope, 4),
            params=TOTAL_PARAMS,
            cluster=members if scope == "CLUSTER" else 1,
            cooperative=scope == "GRID",
            dependent=problem.device.capability >= (9, 0),
        ),
        device,
    )
    stream, words = launch.current_stream, total_words(problem)
    nobody: Labels = (0, 0, 0, 0, 0, 0, 0)

    def run(
        losses: torch.Tensor | None,
        lse: torch.Tensor | None,
        labels: Labels | None,
        total: torch.Tensor | None,
        denominators: torch.Tensor | None,
        z_loss: float,
        place: torch.device,
        meeting: torch.Tensor | None = None,
    ) -> None:
        arrivals = partials = 0
        if words:
            meeting = launch.zeros(words, place) if meeting is None else meeting
            arrivals = meeting.data_ptr()
            partials = arrivals + 4
        start(
            stream(device),
            0 if losses is None else losses.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            *(labels or nobody),
            0 if total is None else total.data_ptr(),
            0 if denominators is None else denominators.data_ptr(),
            rows,
            arrivals,
            partials,
            members if words else 0,
            z_loss,
        )

    return launch.on_device(device, run)


def _plan_forward(
    run: Callable[..., None], add_up: Callable[..., None] | None, copied: bool
) -> Callable[..., Any]:
    debug = settings().debug

    def plan(
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        reduction: str,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        device = logits.device
        losses = torch.empty(target.shape, dtype=torch.float32, device=device)
        lse = torch.empty(target.shape, dtype=torch.float32, device=device)
        stats = torch.empty((*target.shape, 2), dtype=torch.float32, device=device)
        mean = reduction == "mean"
        denominators = torch.empty(2 if mean else 0, dtype=torch.float32, device=device)
        rows = packed(logits) if copied else logits
        target, weight = target.contiguous(), class_weights(weight)
        labels = labels_of(target, weight, ignore_index, 0, logits.shape[-1], debug)
        # Under "mean" z-loss has a denominator of its own, if targets are weighted.
        apart = mean and weight is not None and z_loss != 0.0
        options = options_of(label_smoothing, 0.0 if apart else z_loss, softcap, None)
        outputs = (losses.data_ptr(), lse.data_ptr(), stats.data_ptr(), 0)
        run(rows, labels, options, outputs, return_lse)
        if add_up is None:
            return losses, lse, denominators, stats
        total = torch.empty((), dtype=torch.float32, device=device)
        add_up(
            losses,
            lse if apart else None,
            labels if mean else None,
            total,
            denominators if mean else None,
            z_loss,
            device,
        )
        return total, lse, denominators, stats

    return plan


def _plan_shard(run: Callable[..., None], copied: bool) -> Callable[..., torch.Tensor]:
    debug = settings().debug

    def plan(
        logits: torch.Tensor,
        target: torch.Tensor,
        first_class: int,
        classes: int,
        ignore_index: int,
        softcap: float | None,
        sums: bool,
    ) -> torch.Tensor:
        shape = (*target.shape, 4 if sums else 3)
        out = torch.empty(shape, dtype=torch.float32, device=logits.device)
        rows = packed(logits) if copied else logits
        target = target.contiguous()
        labels = labels_of(target, None, ignore_index, first_class, classes, debug)
        run(rows, labels, options_of(0.0, 0.0, softcap, None), (0, 0, 0, out.data_ptr()), True)
        return out

    return plan


FORWARD_SCOPES = ("cuda_warp", "cuda_block", "cuda_cluster")
FORWARD_VARIANTS = tuple(ForwardVariant(name) for name in FORWARD_SCOPES)
