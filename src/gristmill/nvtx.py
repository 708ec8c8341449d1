"""NVTX ranges for profilers, where GRISTMILL_NVTX asks for them.

A profiler (Nsight Systems) then shows above the kernels which op ran, by which variant, on which
shape. It is decided when a plan is made, so that calls pay nothing where nobody has asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gristmill.log import one_line, warn_once
from gristmill.settings import settings

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
}


# Whether torch can make ranges, once that was tried.
_works: bool | None = None


def is_on() -> bool:
    """Whether ranges are asked for and torch can make them; if it cannot, one warning."""
    global _works
    if not settings().nvtx:
        return False
    if _works is None:
        push, pop = _functions()
        try:
            push("gristmill")
            pop()
            _works = True
        except RuntimeError as error:  # torch without CUDA
            warn_once("nvtx", f"no ranges, though GRISTMILL_NVTX=1: {one_line(error)}")
            _works = False
    return _works


def range_name(op: str, variant: str, shape: Sequence[int], dtype: str | None) -> str:
    """What a range is called: `gristmill.rms_norm cuda_block 4096x8192 bf16`."""
    words = [f"gristmill.{op}", variant, "x".join(map(str, shape))]
    if dtype is not None:
        words.append(_SHORT.get(dtype, dtype))
    return " ".join(words)


def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a range around each of its calls, or as it is where none is asked for."""
    if not is_on():
        return function
    push, pop = _functions()

    def run(*args: Any, **kwargs: Any) -> Any:
        push(name)
        try:
            return function(*args, **kwargs)
        finally:
            pop()

    return run


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range around a block, where that is asked for."""
    if not is_on():
        yield
        return
    push, pop = _functions()
    push(name)
    try:
        yield
    finally:
        pop()


def _functions() -> tuple[Callable[[str], Any], Callable[[], Any]]:
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
