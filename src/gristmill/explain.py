"""`gristmill.explain`: which kernel a call would run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4
from gristmill.ops.registry import OPS
from gristmill.select.explain import Explanation, explain_problem

WEIGHTS = (NVFP4Tensor, PackedNVFP4)  # what functions take whole, and ops by its parts


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What `op(*args, **kwargs)` would run, without running it.

    Args:
        op: an op's name (``"rms_norm"``, ``"nvfp4_linear"``) or function (``gristmill.rms_norm``,
            ``gristmill.nvfp4.linear``).
        *args, **kwargs: the arguments of the call; they are checked as the call would.

    Returns:
        An :class:`Explanation`: every variant with its reason or its config (and its measured time
        where a tuning table has one), and the one that would run. Print it, or take it apart with
        ``as_dict()``.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    found = next((one for one in OPS.values() if one.function is op), OPS.get(name))
    if found is None:
        raise ArgumentError(f"explain: there is no op {name!r}; there are: {', '.join(OPS)}")
    into_fp8 = OPS.get(f"{found.name}_fp8")
    if into_fp8 is not None and kwargs.get("out_dtype") is torch.float8_e4m3fn:
        # One function, but an op of its own.
        found, op = into_fp8, into_fp8.overload
    whole = any(isinstance(value, WEIGHTS) for value in (*args, *kwargs.values()))
    if found.adapt is not None and (whole or not isinstance(op, str)):
        args, kwargs = found.adapt(*args, **kwargs), {}
    arguments = found.bind_arguments(*args, **kwargs)
    return explain_problem(found.name, found.variants, found.problem(*arguments))
