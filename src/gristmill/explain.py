"""`gristmill.explain`: which kernel a call would run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.errors import GristmillError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.multikernel import MultiKernel, live
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS, known_op
from gristmill.select.explain import Explanation, explain_problem
from gristmill.select.problem import Problem
from gristmill.select.sight import spoken_for

WEIGHTS = (NVFP4Tensor, PackedNVFP4)  # what functions take whole, and ops by its parts
OVER_WEIGHTS = {"moe": "nvfp4_moe"}  # whose function takes these, too: another op's


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What `op(*args, **kwargs)` would run, without running it.

    Args:
        op: an op's name (``"rms_norm"``, ``"nvfp4_linear"``) or function (``gristmill.rms_norm``,
            ``gristmill.nvfp4.linear``), or a :class:`MultiKernel` or its name.
        *args, **kwargs: the arguments of the call; they are checked as the call would.

    Returns:
        An :class:`Explanation`: every variant with its reason or its config (and its measured time
        where a tuning table has one), the one that would run, what decided, the roof and how to
        change the choice. Print it, or take it apart with ``as_dict()``.
    """
    kernels = live(op) if isinstance(op, str) else op
    if isinstance(kernels, MultiKernel):
        return kernels.explain(*args, **kwargs)
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    found = next((one for one in OPS.values() if one.function is op), None)
    if found is None:
        found = known_op(name)
    into_fp8 = OPS.get(f"{found.name}_fp8")
    if into_fp8 is not None and kwargs.get("out_dtype") is torch.float8_e4m3fn:
        # One function, but an op of its own.
        found, op = into_fp8, into_fp8.overload
    whole = any(isinstance(value, WEIGHTS) for value in (*args, *kwargs.values()))
    if whole and found.name in OVER_WEIGHTS:
        found = OPS[OVER_WEIGHTS[found.name]]
    if found.adapt is not None and (whole or not isinstance(op, str)):
        args, kwargs = found.adapt(*args, **kwargs), {}
    arguments = found.bind_arguments(*args, **kwargs)
    return explain_call(found, arguments, found.problem(*arguments))


def explain_call(op: Op, arguments: tuple[Any, ...], problem: Problem) -> Explanation:
    """`explain_problem` for an op, with the roof of these arguments and the command that tunes."""
    return explain_problem(
        op.name,
        op.variants,
        problem,
        cost=op.cost(*arguments),
        tune_command=tune_command(op, problem),
    )


def tune_command(op: Op, problem: Problem) -> str | None:
    """The command line that tunes this very problem; None where a shape does not say all of it."""
    sizes = (problem.rows, *(size for _, size in problem.dims))
    dtype = next((name for _, name in problem.dtypes), "")
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        return None
    try:
        arguments = op.example_for(problem.device, sizes, getattr(torch, dtype))
        same = op.problem(*arguments, device=problem.device)
    except (GristmillError, RuntimeError):
        return None  # a size that the example does not come in, such as a batch of matmuls
    if same.key(same.rows) != problem.key(problem.rows):
        return None
    again = " --again" if spoken_for(problem, op.variants) else ""
    return f"gristmill tune {op.name} --shape {'x'.join(map(str, sizes))} --dtype {dtype}{again}"
