"""Kernels for the model that vLLM is about to run, compiled together before its first call.

vLLM runs a model at its largest number of tokens, and then once before each CUDA graph that it
captures. Kernels that are compiled on first use would be compiled there, one after another. So
layers say when they are loaded what they will call; the first call on a GPU finds all layers
loaded, and nothing captured yet. It compiles what all of them will run, at every number of tokens
that a graph is captured for and at the others that make a difference, each kernel once, in
processes side by side.

It is an errand for speed alone: whatever goes wrong is logged, and met again, and told, by the call
that needs the kernel.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import compile_all, worker_count
from gristmill.locks import Lock
from gristmill.log import logger, one_line
from gristmill.ops.nvfp4_linear import NVFP4_LINEAR
from gristmill.ops.nvfp4_linear.problem import SIZES
from gristmill.ops.nvfp4_moe import NVFP4_MOE
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.space import Needed, chosen
from gristmill.runners import Nvfp4LinearRunner, Nvfp4MoeRunner
from gristmill.select.device import Device, device_of
from gristmill.select.overrides import batch_invariant

Arguments = tuple[Any, ...]
# An op, and its arguments for a number of tokens of a dtype; None once the layer is gone.
Call = tuple[Op, Callable[[int, torch.dtype], Arguments | None]]


@dataclass(frozen=True)
class Serving:
    """What vLLM's config says of the calls to come.

    Args:
        captured: the numbers of tokens that CUDA graphs will be captured for.
        most: the largest number of tokens that a layer will see at once.
        hidden: the columns of the model's norms, if those are gristmill's; else None.
        heads: likewise, the heads of queries and of keys on a rank, and the columns of each.
        ranks: processes of this model, which warm up at the same time.
    """

    captured: tuple[int, ...] = ()
    most: int = 8192
    hidden: int | None = None
    heads: tuple[int, int, int] | None = None
    ranks: int = 1


class Expected(NamedTuple):
    """Calls that will come, and the numbers of tokens to look at for their kernels."""

    calls: tuple[Call, ...]
    tokens: tuple[int, ...]
    invariant: bool
    ranks: int


class Done(NamedTuple):
    """How many kernels are ready, how many of those were compiled just now, and what was not."""

    ready: int
    compiled: int
    failed: tuple[str, ...]


# What no call has been seen of yet, once for layers that are alike. Runners look at it at every
# call: it is empty from the first one on.
WAITING: dict[Hashable, Expected] = {}
# The keys of what was waited for before, and the runners that asked. Another layer of the kind
# brings nothing new, nor do weights that are loaded again: vLLM may hide its config then.
_SETTLED: set[Hashable] = set()
_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCK = Lock()


def expect_linear(runner: Nvfp4LinearRunner, serving: Serving, *, invariant: bool) -> None:
    """There will be calls of a linear layer."""
    weak = weakref.ref(runner)

    def arguments(tokens: int, dtype: torch.dtype) -> Arguments | None:
        layer = weak()
        if layer is None or NVFP4_LINEAR.adapt is None:
            return None
        x = _rows((tokens, layer.in_features), dtype)
        return NVFP4_LINEAR.adapt(x, layer.weight, layer.bias, act=layer.act)

    key = ("linear", runner.out_features, runner.in_features, runner.weight.layout)
    _expect(runner, key, (NVFP4_LINEAR, arguments), serving, invariant)


def expect_experts(
    runner: Nvfp4MoeRunner, top_k: int, serving: Serving, *, invariant: bool
) -> None:
    """There will be calls of a mixture, with `top_k` experts for each token.

    vLLM routes with weights of fp32 and ids of int32, which the method asks for.
    """
    weak = weakref.ref(runner)

    def arguments(tokens: int, dtype: torch.dtype) -> Arguments | None:
        layer = weak()
        if layer is None or NVFP4_MOE.adapt is None:
            return None
        x = _rows((tokens, layer.hidden_size), dtype)
        weights = _rows((tokens, top_k), torch.float32)
        ids = _rows((tokens, top_k), torch.int32)
        return NVFP4_MOE.adapt(x, weights, ids, layer.w13, layer.w2, **layer.options)

    options = runner.options
    key = (
        *("experts", tuple(runner.w13.shape), top_k, runner.w2.layout),
        *(options["activation"], options["limit"], options["alpha"]),
        options["expert_map"] is not None,
    )
    _expect(runner, key, (NVFP4_MOE, arguments), serving, invariant)


def _expect(runner: Any, key: Hashable, call: Call, serving: Serving, invariant: bool) -> None:
    if runner in _TOLD:
        return
    _TOLD.add(runner)
    found: dict[Hashable, Expected] = {
        (key, invariant, serving): Expected(
            (call,), token_counts(serving), invariant, serving.ranks
        )
    }
    if serving.hidden is not None:
        calls, tokens = tuple(_norms(serving)), row_counts(serving)
        norms = Expected(calls, tokens, invariant, serving.ranks)
        found["norms", invariant, serving] = norms
    with _LOCK:
        WAITING.update({name: found[name] for name in found.keys() - _SETTLED})


def _norms(serving: Serving) -> Iterator[Call]:
    """Norms of the model's rows, and of heads within a fused projection, as vLLM asks for them."""

    def weighed(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        casting = "once" if x.dtype == torch.float32 else "llama"
        return _rows(x.shape[-1:], x.dtype), casting

    def of_rows(tokens: int, dtype: torch.dtype) -> Arguments:
        x = _rows((tokens, serving.hidden or 0), dtype)
        weight, casting = weighed(x)
        return OPS["rms_norm"].bind_arguments(x, weight, casting=casting)

    def of_sums(tokens: int, dtype: torch.dtype) -> Arguments:
        x = _rows((tokens, serving.hidden or 0), dtype)
        residual = _rows((tokens, serving.hidden or 0), dtype)
        return OPS["fused_add_rms_norm_"].bind_arguments(x, residual, weighed(x)[0])

    yield OPS["rms_norm"], of_rows
    yield OPS["fused_add_rms_norm_"], of_sums
    if serving.heads is None:
        return
    queries, keys, columns = serving.heads
    for heads in {queries, keys}:

        def of_heads(tokens: int, dtype: torch.dtype, heads: int = heads) -> Arguments:
            fused = _rows((tokens, queries + 2 * keys, columns), dtype)
            x = fused[:, :heads]
            weight, casting = weighed(x)
            return OPS["rms_norm"].bind_arguments(x, weight, casting=casting)

        yield OPS["rms_norm"], of_heads


def settle(x: torch.Tensor) -> None:
    """Compile and load what is waited for, now that there is a call, with `x`; once."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    with _LOCK:
        expected = tuple(WAITING.values())
        _SETTLED.update(WAITING)
        WAITING.clear()
    if not expected or not x.is_cuda:
        return
    start = time.perf_counter()
    try:
        done = warm(expected, device_of(x.device), x.dtype, load=True)
    except Exception as error:  # vLLM would stop
        logger.debug("vLLM: kernels were not made ready", exc_info=True)
        reason = one_line(f"{type(error).__name__}: {error}")
        logger.warning("vLLM: kernels are compiled on first use, not before: %s", reason)
        return
    seconds = time.perf_counter() - start
    logger.info("vLLM: %d kernels ready in %.1f s, %d compiled", done.ready, seconds, done.compiled)
    if done.failed:
        some = one_line(done.failed[0])
        logger.warning("vLLM: %d kernels could not be made ready: %s", len(done.failed), some)


def warm(expected: tuple[Expected, ...], target: Device, dtype: torch.dtype, *, load: bool) -> Done:
    """Compile for `target` what calls with activations of `dtype` will run; `load` it there, too.

    Without `load` the target need not be here. A layer for which no kernel can be chosen, or a
    kernel that cannot be had, is among those that failed, and keeps no other from being ready.
    """
    jobs: dict[Compilable, tuple[Needed, bool]] = {}
    unplanned: list[str] = []
    for one in expected:
        try:
            _plan(one, target, dtype, jobs)
        except Exception as error:
            logger.debug("vLLM: a layer's kernels were not chosen", exc_info=True)
            unplanned.append(f"{type(error).__name__}: {error}")
    # All ranks want the same kernels, of which each is compiled by one of them.
    ranks = max((one.ranks for one in expected), default=1)
    workers = max(1, worker_count(len(jobs)) // ranks)
    results = compile_all(jobs, target.arch, workers=workers)
    failed = {one.program: one.error for one in results if one.how == "failed"}
    if load:
        _load(jobs, failed)
    compiled = sum(one.how == "compiled" for one in results)
    return Done(len(jobs) - len(failed), compiled, (*unplanned, *failed.values()))


def _plan(
    expected: Expected,
    target: Device,
    dtype: torch.dtype,
    jobs: dict[Compilable, tuple[Needed, bool]],
) -> None:
    """Add to `jobs` the programs of what is expected."""
    with _mode(expected.invariant):
        for needed in _needed(expected, target, dtype):
            variant, config = needed.choice.variant, needed.choice.config
            for program in variant.programs(needed.problem, config):
                jobs.setdefault(program, (needed, expected.invariant))


def _load(jobs: dict[Compilable, tuple[Needed, bool]], failed: dict[Compilable, str]) -> None:
    """Bring kernels onto the GPU: each once, with whatever runs beside it; adds to `failed`."""
    loaded: set[Compilable] = set()
    for program, (needed, invariant) in jobs.items():
        if program in loaded:
            continue
        variant, config = needed.choice.variant, needed.choice.config
        together = variant.programs(needed.problem, config)
        if not any(one in failed for one in together):
            try:
                with _mode(invariant):
                    variant.bind(needed.problem, config)
            except Exception as error:
                logger.debug("vLLM: a kernel was not loaded", exc_info=True)
                failed[program] = f"{type(error).__name__}: {error}"
        loaded.update(together)


def _needed(expected: Expected, target: Device, dtype: torch.dtype) -> Iterator[Needed]:
    for op, arguments in expected.calls:
        for tokens in expected.tokens:
            found = arguments(tokens, dtype)
            if found is not None:
                yield from chosen(op, op.problem(*found, device=target))


def token_counts(serving: Serving) -> tuple[int, ...]:
    """The numbers of tokens at which GEMMs are looked at: all that make a difference.

    Those of captured graphs, the largest, and so many between that no kernel is left out: how
    a GEMM is cut follows from the tiles that hold its tokens, and changes where one token more
    needs another tile. Planned for an H200 at every number up to 1024 and every seventh up to 8192,
    eleven layers of common models need no other kernels than at these.
    """
    most = serving.most
    counts = _given(serving) | set(range(1, min(most, 64) + 1))
    counts |= {tokens for stop in SIZES.stops for tokens in (stop, stop + 1) if tokens <= most}
    return tuple(sorted(counts))


def row_counts(serving: Serving) -> tuple[int, ...]:
    """The same for norms, whose kernels follow from the nearest hint: fewer will do."""
    powers = {1 << bits for bits in range(serving.most.bit_length())}
    return tuple(sorted(_given(serving) | powers))


def _given(serving: Serving) -> set[int]:
    return {serving.most, *(size for size in serving.captured if 0 < size <= serving.most)}


def _mode(invariant: bool) -> AbstractContextManager[None]:
    return batch_invariant() if invariant else nullcontext()


def _rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
