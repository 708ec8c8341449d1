"""Arguments for a task: made once, copied often enough that no call finds them in the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.bench.suites import Task
from gristmill.ops.cross_entropy import reference
from gristmill.ops.registry import OPS
from gristmill.select.copies import rotate, rotation_count
from gristmill.select.device import device_of

Arguments = tuple[Any, ...]


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def arguments(task: Task, device: torch.device) -> Arguments:
    """The op's positional arguments for this task; the same numbers on every run."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(20)
        op, options = OPS[task.op], task.kind.options
        example = op.example_with(options, task.shape, dtype_of(task.dtype), device)
        named = dict(zip(_names(task), example, strict=True))
        if task.name == "softmax_causal_bwd":
            named["y"] = OPS["softmax"].reference(named["y"].log(), named["causal"], 1.0, None)
        if task.name == "cross_entropy_bwd":
            named.update(_row_losses(named["logits"], named["target"]))
        if task.name == "topk_router_grouped":
            named["bias"] = 0.1 * torch.randn(named["logits"].shape[-1], device=device)
        return tuple(named.values())


def saved(task: Task, args: Arguments) -> Arguments:
    """What a peer's backward expects its forward to have saved, in fp32; appended to the arguments.

    For `rms_norm_bwd` 1/rms of each row, for `layer_norm_bwd` its mean and 1/std. Gristmill
    recomputes them from x, which it must read anyway.
    """
    if task.name not in ("rms_norm_bwd", "layer_norm_bwd"):
        return ()
    named = dict(zip(_names(task), args, strict=True))
    x, eps = named["x"], named["eps"]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if task.name == "rms_norm_bwd":
        return (_by_rows(x, lambda rows: torch.rsqrt(rows.square().mean(-1) + eps)),)
    variance = _by_rows(x, lambda rows: rows.var(-1, correction=0))
    return _by_rows(x, lambda rows: rows.mean(-1)), torch.rsqrt(variance + eps)


def compared(task: Task, outputs: Any) -> Any:
    """Those of the op's outputs that every implementation of the task gives."""
    if task.kind.outputs is None:
        return outputs
    return tuple(outputs[index] for index in task.kind.outputs)


def terms_of(task: Task, args: Arguments) -> torch.Tensor | None:
    """Magnitudes of the terms that may cancel in a result, or None.

    Of ``y * dy - y * sum(dy * y)`` torch's kernel for CUDA rounds the products dy * y to the dtype,
    those in the sum too. Each is off by u = eps / 2 of its size, so dx is off by no more than u of
    ``|y| * (|dy| + sum(|dy * y|))``, and as much again by its own rounding. In a row with two
    visible columns and similar dy this exceeds dx many times over.
    """
    if task.op != "softmax_backward":
        return None
    dy, y, *_ = args
    step = max(1, (1 << 26) // max(1, y.shape[-1]))
    rows = (one.reshape(-1, one.shape[-1]).split(step) for one in (dy, y))
    sums = [(d.float() * p.float()).abs().sum(-1, keepdim=True) for d, p in zip(*rows, strict=True)]
    both = torch.cat(sums).view(*y.shape[:-1], 1)
    sizes: torch.Tensor = dy.abs().add_(both.to(dy.dtype)).mul_(y.abs())
    return sizes


def _names(task: Task) -> list[str]:
    return [argument.name for argument in OPS[task.op].overload._schema.arguments]


def _by_rows(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """fp32 values of each row; by chunks, as a whole fp32 copy of x would be twice x."""
    rows = x.reshape(-1, x.shape[-1])
    step = max(1, (1 << 26) // x.shape[-1])
    found = torch.cat([function(part.float()) for part in rows.split(step)])
    return found.view(*x.shape[:-1], *found.shape[1:])


def _row_losses(logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a backward of losses of single rows gets: each has a gradient of its own."""
    return {
        "dloss": torch.randn(target.shape, device=target.device),
        "stats": _by_rows(logits, lambda rows: reference.stats_of(rows, None)),
        "denominators": torch.empty(0, device=target.device),
    }


def argument_sets(args: Arguments, device: torch.device) -> list[Arguments]:
    """Copies of `args`, enough to keep the L2 cold; on a CPU two, as its times are for ratios only.

    Only what is read counts: outputs are allocated by each call and may well land in one place.
    """
    if device.type != "cuda":
        return rotate(args, 2)
    read = sum(value.nbytes for value in args if isinstance(value, torch.Tensor))
    return rotate(args, rotation_count(read, device_of(device).l2_bytes))
