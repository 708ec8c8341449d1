"""The CUDA variants of cross_entropy_one_pass and its in-place twin: rows are kept."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.cross_entropy import configs, cuda, reference, semantics
from gristmill.ops.cross_entropy.cuda import (
    LABELS,
    OPTIONS,
    StreamVariant,
    bind_total,
    class_weights,
    labels_of,
    options_of,
    total_words,
)
from gristmill.ops.cross_entropy.problem import Details
from gristmill.ops.plain import laid_out
from gristmill.ops.rows.config import ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.rows.problem import packed
from gristmill.select.problem import Problem
from gristmill.settings import settings

SOURCE = "cross_entropy_one_pass.cu"
# OnePassParams: logits, no second tensor, rows, gradient, labels, options, loss, lse,
# denominators, columns, share, all_rows.
ONE_PASS_PARAMS = struct.Struct(f"<QqqQqqqqQqq{LABELS}{OPTIONS}QQQIII")


class OnePassVariant(StreamVariant):
    floats, least_threads = 2, 256
    feeds_by_scope: ClassVar = {
        "WARP": (STRAIGHT,),
        "BLOCK": (STRAIGHT, ASYNC, TWICE),
        "CLUSTER": (STRAIGHT, ASYNC, TWICE),
    }
    configs_by_scope: ClassVar = {
        "WARP": configs.warp_one_pass,
        "BLOCK": configs.block_one_pass,
        "CLUSTER": configs.cluster_one_pass,
    }

    def longest(self, problem: Problem) -> int:
        return configs.longest_one_pass(self.scope, problem, problem.layout)

    def declines(self, problem: Problem) -> str | None:
        vectors = problem.layout.layout.vectors
        cluster = self.sibling("cuda_cluster")
        long = self.scope == "BLOCK" and vectors > configs.BLOCK_KEEPS
        if long and cluster.supports(problem) is None:
            return "such long rows are kept better by several blocks"
        return super().declines(problem)

    def program(self, problem: Problem, config: RowConfig) -> Program:
        details: Details = problem.layout
        flags = (details.layout.ragged, details.capped, details.smooth, details.weights)
        launched = [str(details.layout.vector), str(config.items)]
        kernel = "cross_entropy_one_pass_twice"
        if config.feed != TWICE:
            kernel = "cross_entropy_one_pass"
            launched = [str(config.lanes), *launched, str(config.feed), str(config.hold).lower()]
        arguments = (
            details.type(0),
            details.type(2),
            str(details.layout.nested).lower(),
            self.scope,
            *launched,
            *(str(flag).lower() for flag in flags),
            str(self.bound(config)),
        )
        return Program(SOURCE, (f"{kernel}<{','.join(arguments)}>",))

    def total(self, problem: Problem) -> Program:
        """The kernel that counts the rows, and then adds them up."""
        return Program(cuda.SOURCE, (f"cross_entropy_total<{configs.total(problem)[0]}>",))

    def programs(self, problem: Problem, config: RowConfig) -> tuple[Program, ...]:
        own, details = self.program(problem, config), problem.layout
        return (own, self.total(problem)) if details.added else (own,)

    def source_hash(self, problem: Problem, config: RowConfig) -> str:
        """That of losses which are added up, for all: a row speaks for every reduction."""
        added = replace(problem.layout, added=True)
        return super().source_hash(replace(problem, layout=added), config)

    def bind(self, problem: Problem, config: RowConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        in_place = problem.op.endswith("_")
        if details.layout.rows == 0 or details.layout.columns == 0:
            if in_place:
                return laid_out(reference.cross_entropy_one_pass_, semantics.outputs_one_pass_)
            return laid_out(reference.cross_entropy_one_pass, semantics.outputs_one_pass)
        run = self._run(problem, config)
        add_up, words = None, 0
        if details.added:
            add_up, words = bind_total(problem, self.total(problem)), total_words(problem)
        losses = _losses(run, add_up, words)
        return _plan_in_place(losses, details.copied) if in_place else _plan(losses, details.copied)

    def _run(self, problem: Problem, config: RowConfig) -> Callable[..., None]:
        details: Details = problem.layout
        layout = details.layout
        device = problem.device.index
        start, _ = self.prepare(problem, config, self.program(problem, config), ONE_PASS_PARAMS)
        (xo, xi), (go, gi) = layout.strides(0), layout.strides(2)
        rows, inner_rows, columns = layout.rows, layout.inner_rows, layout.columns
        share = self.share(details, config)
        stream = launch.current_stream

        def run(
            logits: torch.Tensor,
            gradient: torch.Tensor,
            labels: tuple[int, ...],
            options: tuple[float, ...],
            losses: torch.Tensor,
            lse: torch.Tensor,
            denominators: torch.Tensor | None,
            all_rows: bool,
        ) -> None:
            start(
                stream(device),
                logits.data_ptr(),
                xo,
                xi,
                0,
                0,
                0,
                rows,
                inner_rows,
                gradient.data_ptr(),
                go,
                gi,
                *labels,
                *options,
                losses.data_ptr(),
                lse.data_ptr(),
                0 if denominators is None else denominators.data_ptr(),
                columns,
                share,
                all_rows,
            )

        return launch.on_device(device, run)


def _losses(
    run: Callable[..., None], add_up: Callable[..., None] | None, words: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`losses(rows, gradient, target, options...)`: loss and lse; the gradient is written."""
    debug = settings().debug

    def losses(
        rows: torch.Tensor,
        gradient: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        reduction: str,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = rows.device
        each = torch.empty(target.shape, dtype=torch.float32, device=device)
        lse = torch.empty(target.shape, dtype=torch.float32, device=device)
        target, weight = target.contiguous(), class_weights(weight)
        labels = labels_of(target, weight, ignore_index, 0, rows.shape[-1], debug)
        denominators = None
        if reduction == "mean" and add_up is not None:
            denominators = torch.empty(2, dtype=torch.float32, device=device)
            add_up(None, None, labels, None, denominators, 0.0, device)
        total = None
        if weight is not None and label_smoothing:
            total = weight.sum()
        options = options_of(label_smoothing, z_loss, softcap, total)
        # All memory is there before the logits are, in place, overwritten: without it they are not.
        loss = torch.empty((), dtype=torch.float32, device=device)
        meeting = launch.zeros(words, device) if words else None
        run(rows, gradient, labels, options, each, lse, denominators, return_lse)
        if add_up is None:
            return each, lse
        # Under "mean" z-loss has a denominator of its own, if targets are weighted.
        apart = denominators is not None and weight is not None and z_loss != 0.0
        counted = labels if apart else None
        add_up(each, lse if apart else None, counted, loss, denominators, z_loss, device, meeting)
        return loss, lse

    return losses


def _plan(losses: Callable[..., Any], copied: bool) -> Callable[..., Any]:
    def plan(
        logits: torch.Tensor, target: torch.Tensor, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(logits)
        if copied:
            dense = launch.dense(gradient)
            loss, lse = losses(packed(logits), dense, target, *options)
            return loss, lse, gradient if dense is gradient else gradient.copy_(dense)
        loss, lse = losses(logits, gradient, target, *options)
        return loss, lse, gradient

    return plan


def _plan_in_place(losses: Callable[..., Any], copied: bool) -> Callable[..., Any]:
    def plan(
        logits: torch.Tensor, target: torch.Tensor, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if copied:
            dense = packed(logits)
            loss, lse = losses(dense, dense, target, *options)
            logits.copy_(dense)
            return loss, lse
        loss, lse = losses(logits, logits, target, *options)
        # Autograd must know that what it may have saved has changed.
        torch.autograd.graph.increment_version((logits,))
        return loss, lse

    return plan


ONE_PASS_VARIANTS = tuple(
    OnePassVariant(name) for name in ("cuda_warp", "cuda_block", "cuda_cluster")
)
