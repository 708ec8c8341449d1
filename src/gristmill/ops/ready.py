"""Which of several configs can run where nothing may be compiled.

Products of matrices cut every N and K as a model of the time says, and no bundle has a kernel for
every cut. Under GRISTMILL_JIT=off the most promising config whose kernels are there is taken; where
none are, the call raises KernelNotCached. Triton's kernels over NVFP4 weights also depend on what
N and K are multiples of, too much for a bundle: without one they leave the problem, with one
warning, to the variant behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gristmill.jit import cache
from gristmill.jit.compilers import Compilable
from gristmill.log import warn_once
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant
from gristmill.settings import settings

C = TypeVar("C")

# What was looked for is not looked for again: layers are only read.
_FOUND: dict[tuple[Compilable, str, object], bool] = {}


def at_hand(variant: Variant, problem: Problem, configs: Sequence[C]) -> C:
    """The first of `configs`; where nothing may be compiled, the first that is compiled, if any."""
    if settings().jit or problem.device.kind != "cuda":
        return configs[0]
    return next((one for one in configs if is_there(variant, problem, one)), configs[0])


def out_of_reach(variant: Variant, problem: Problem) -> str | None:
    """Why a variant had better not be taken with the config that `at_hand` gives it, if so."""
    if settings().jit or problem.device.kind != "cuda":
        return None
    if is_there(variant, problem, variant.config(problem)):
        return None
    reason = "its kernels are in no cache, and GRISTMILL_JIT=off forbids compiling them"
    warn_once(
        f"out of reach {problem.op} {variant.name} {problem.device.arch}",
        f"fallback {problem.op}: {variant.name} is passed over for {problem.key(problem.rows)}: "
        f"{reason}",
    )
    return reason


def is_there(variant: Variant, problem: Problem, config: object) -> bool:
    """Whether a cache has what `variant` runs with this config."""
    arch, places = problem.device.arch, (settings().cache_dir, settings().cache_layers)
    for program in variant.programs(problem, config):
        key = (program, arch, places)
        if key not in _FOUND:
            _FOUND[key] = cache.is_cached(program, arch)
        if not _FOUND[key]:
            return False
    return True
