"""The CUDA variants of the router and of its gradient: a warp for each token, one launch.

Neither writes anything but its results, and neither waits for anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.jit import Program
from gristmill.ops import launch
from gristmill.ops.rows.layout import ELEMENT
from gristmill.ops.topk_router import semantics
from gristmill.ops.topk_router.problem import VECTOR, Details
from gristmill.ops.topk_router.semantics import BackwardCall
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

PARAMS = struct.Struct("<QQQQqqqIIIIIIIIf")  # RouterParams
BACKWARD_PARAMS = struct.Struct("<QQQQqqqqqqIIIf")  # RouterBackwardParams
LANES = 32
ITEMS = (1, 2, 3, 4, 8, 16)  # vectors of VECTOR experts that a lane holds
MOST_EXPERTS = ITEMS[-1] * LANES * VECTOR
MOST_CHOSEN = LANES  # a slot is a lane's
MOST_GROUPS = LANES  # so is a group
MOST_WARPS = 8  # of a block, as the kernels' launch bounds have it
_GROUP_SHIFT = 22  # as in the kernel
_IDS = {torch.int32: "int", torch.int64: "long long"}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (*ELEMENT, *_IDS)}


@dataclass(frozen=True)
class RouterConfig:
    """A block is so many warps, each with a token."""

    warps: int


class _ByWarp(Variant):
    """What both directions have in common."""

    name = "cuda_warp"
    config_type = RouterConfig

    def supports(self, problem: Problem) -> str | None:
        device, experts, topk = problem.device, problem.dim("E"), problem.dim("k")
        if device.kind != "cuda":
            return f"needs a CUDA device, not {device.kind}"
        if device.capability < (8, 0):
            return f"needs compute capability 8.0 or later, not {device.arch}"
        wide = [f"{name} is {dtype}" for name, dtype in problem.dtypes if dtype == "float64"]
        if wide:
            return f"computes in fp32: {', '.join(wide)}"
        if experts > MOST_EXPERTS:
            return f"a warp holds {MOST_EXPERTS} experts, not {experts}"
        if topk > MOST_CHOSEN:
            return f"a warp chooses {MOST_CHOSEN} experts, not {topk}"
        if problem.rows >= 2**31:
            return f"{problem.rows} tokens are more than a grid has"
        return None

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Nothing: which lane has which expert follows from their number alone."""
        return None

    def config(self, problem: Problem) -> RouterConfig:
        """A block for each token while every SM has one to itself, then fewer and larger ones."""
        return RouterConfig(1 if problem.rows <= problem.device.multiprocessors else 4)

    def configs(self, problem: Problem) -> tuple[RouterConfig, ...]:
        found = (self.config(problem), *map(RouterConfig, (1, 2, 4, MOST_WARPS)))
        return tuple(dict.fromkeys(found))

    def programs(self, problem: Problem, config: RouterConfig) -> tuple[Program, ...]:
        return (self.program(problem),)

    def program(self, problem: Problem) -> Program:
        raise NotImplementedError

    def start(
        self, problem: Problem, config: RouterConfig, params: struct.Struct
    ) -> Callable[..., None]:
        details: Details = problem.layout
        program = self.program(problem)
        call = launch.KernelCall(
            program,
            program.names[0],
            grid=-(-details.rows // config.warps),
            block=config.warps * LANES,
            shared=0,
            params=params,
            dependent=problem.device.capability >= (9, 0),
        )
        return launch.prepare(call, problem.device.index)


class Forward(_ByWarp):
    summary = "a warp for each token, its logits in registers"

    def supports(self, problem: Problem) -> str | None:
        if "grouped" in problem.flags and problem.dim("groups") > MOST_GROUPS:
            return f"a warp keeps account of {MOST_GROUPS} groups, not {problem.dim('groups')}"
        return super().supports(problem)

    def program(self, problem: Problem) -> Program:
        details: Details = problem.layout
        bias, ids = problem.dtype("bias"), problem.dtype("ids") or "int32"
        types = (
            _tensor(details.dtype, details.access),
            "Absent" if bias is None else _tensor(_NAMES[bias], details.bias),
            _IDS[_NAMES[ids]],
        )
        words = [word in problem.flags for word in ("sigmoid", "renormalized", "grouped")]
        template = _template(types, problem, *words, details.strided)
        return Program("topk_router.cu", (f"topk_router<{template}>",))

    def bind(self, problem: Problem, config: RouterConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        if details.rows == 0:
            return semantics.outputs_forward
        start, stream = self.start(problem, config, PARAMS), launch.current_stream
        device, empty = problem.device.index, torch.empty

        def plan(
            logits: torch.Tensor,
            topk: int,
            scoring: str,
            renormalize: bool,
            bias: torch.Tensor | None,
            groups: int,
            topk_groups: int,
            scale: float,
            ids_dtype: torch.dtype | None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows, experts = logits.shape
            weights = empty((rows, topk), dtype=torch.float32, device=logits.device)
            ids = empty((rows, topk), dtype=ids_dtype or torch.int32, device=logits.device)
            size = experts // groups
            start(
                stream(device),
                logits.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                weights.data_ptr(),
                ids.data_ptr(),
                *logits.stride(),
                0 if bias is None else bias.stride(0),
                rows,
                experts,
                topk,
                groups,
                topk_groups,
                size,
                -(-(1 << _GROUP_SHIFT) // size),
                1 << (groups - 1).bit_length(),
                scale,
            )
            return weights, ids

        return launch.on_device(device, plan)


class Backward(_ByWarp):
    summary = "a warp for each token, its scores made again in registers"

    def program(self, problem: Problem) -> Program:
        details: Details = problem.layout
        types = (
            _tensor(details.dtype, details.access),
            _tensor(details.dtype, details.written),
            ELEMENT[_NAMES[problem.dtype("dweights") or ""]],
            _IDS[_NAMES[problem.dtype("ids") or ""]],
        )
        words = [word in problem.flags for word in ("sigmoid", "renormalized")]
        template = _template(types, problem, *words, details.strided)
        return Program("topk_router.cu", (f"topk_router_backward<{template}>",))

    def bind(self, problem: Problem, config: RouterConfig) -> Callable[..., Any]:
        details: Details = problem.layout
        if details.rows == 0:
            return semantics.outputs_backward
        start, stream, device = (
            self.start(problem, config, BACKWARD_PARAMS),
            launch.current_stream,
            problem.device.index,
        )

        def plan(*args: Any) -> torch.Tensor:
            call = BackwardCall(*args)
            dlogits = semantics.outputs_backward(*args)
            start(
                stream(device),
                call.logits.data_ptr(),
                call.topk_ids.data_ptr(),
                call.dweights.data_ptr(),
                dlogits.data_ptr(),
                *call.logits.stride(),
                *call.topk_ids.stride(),
                *call.dweights.stride(),
                details.rows,
                call.logits.shape[1],
                call.topk_ids.shape[1],
                call.scale,
            )
            return dlogits

        return launch.on_device(device, plan)


def items_of(experts: int) -> int:
    """Vectors that each lane holds, so that the warp holds all experts."""
    return next(items for items in ITEMS if experts <= items * LANES * VECTOR)


def _template(types: tuple[str, ...], problem: Problem, *words: bool) -> str:
    flags = (str(word).lower() for word in words)
    return ",".join([*types, str(items_of(problem.dim("E"))), *flags])


def _tensor(dtype: torch.dtype, access: int) -> str:
    return f"Tensor<{ELEMENT[dtype]},{access}>"
