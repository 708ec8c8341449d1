"""What tools of compute-sanitizer do not see, and what tools/sanitize.py does about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gristmill.jit import Program, program

# Kernels that a tool can say nothing about, and why. They are not run under it.
UNSEEN = {
    ("initcheck", "persistent"): (
        "it writes its results and the descriptors of its copies by TMA, and initcheck does not "
        "know of such writes"
    ),
}
# racecheck fails with an internal error at kernels of cuBLAS, also where it is not to look at them,
# and initcheck takes what they write by TMA for memory that nobody has written.
WITHOUT_CUBLAS = ("racecheck", "initcheck")
# Sources whose warps take slots out of a ring and give each back by one lane. racecheck orders what
# a thread has read before what comes after a barrier only if that thread itself arrives there, so
# it reports the other 31 lanes of each warp (sanitize_accepted.py says why these are in order).
# Their programs have line numbers under racecheck, which change no instruction: accepted reports
# are identified by source line.
RINGS = ("nvfp4_wgmma.cu", "nvfp4_moe.cu")
LINES = "--generate-line-info"
# The same rings with an arrival of every lane and no other change: no report is accepted.
EVERY_LANE = (
    ("barrier_init(empty + i, CONSUMERS / 32);", "barrier_init(empty + i, CONSUMERS);"),
    ("if (lane == 0) barrier_arrive(empty + last);", "barrier_arrive(empty + last);"),
)
# The kernels of sanitize_canary.cu by tool: whether it has to report them. None: it may.
CANARIES: dict[str, dict[str, bool | None]] = {
    "memcheck": {"canary_memcheck": True},
    "racecheck": {
        "canary_racecheck": True,
        "canary_ring_broken": True,
        "canary_ring_every": False,
        "canary_ring_lane": None,
    },
    "initcheck": {"canary_initcheck": True},
    "synccheck": {"canary_synccheck": True},
}


def misjudged(tool: str, reported: set[str]) -> Iterator[str]:
    """What `tool` sees that is not there, or does not see."""
    for kernel, fault in CANARIES[tool].items():
        if fault is True and kernel not in reported:
            yield f"it does not see the fault of {kernel}"
        if fault is False and kernel in reported:
            yield f"it reports {kernel}, which has no fault: what it says of such kernels is void"


def unseen(tool: str) -> set[str]:
    """The kernels that `tool` can say nothing about."""
    return {kernel for one, kernel in UNSEEN if one == tool}


@contextmanager
def products_for(tool: str | None) -> Iterator[None]:
    """Under some tools the products of torch between our kernels are made on the CPU."""
    if tool not in WITHOUT_CUBLAS:
        yield
        return
    with (
        mock.patch("torch.mm", mm),
        mock.patch("torch.addmm", addmm),
        mock.patch("torch._scaled_mm", scaled_mm),
        mock.patch("gristmill.ops.moe.grouped.grouped_mm", grouped_mm),
    ):
        yield


@contextmanager
def rings_for(tool: str | None, *, every_lane: bool = False) -> Iterator[None]:
    """Under racecheck the programs of rings have line numbers, or arrivals of every lane."""
    if tool != "racecheck":
        yield
        return
    options, digest, texts = Program.compiler_options, program._digest, program._texts

    def lined(self: Program, arch: str) -> tuple[str, ...]:
        return (*options(self, arch), *(LINES,) * (self.source in RINGS))

    def told_apart(one: Program) -> str:
        return f"{digest(one)} {LINES}" if one.source in RINGS else digest(one)

    def replaced(root: Path | None, source: str) -> Mapping[str, str]:
        found = dict(texts(root, source))
        if every_lane and source in RINGS:
            for old, new in EVERY_LANE:
                if found[source].count(old) != 1:
                    raise RuntimeError(f"{source} does not have once: {old}")
                found[source] = found[source].replace(old, new)
        return found

    with (
        mock.patch.object(Program, "compiler_options", lined),
        mock.patch.object(program, "_digest", told_apart),
        mock.patch.object(program, "_texts", replaced),
    ):
        _forget(digest)
        try:
            yield
        finally:
            _forget(digest)


def _forget(digest: Any) -> None:
    """What was derived from texts, and is remembered by the names of their files."""
    for remembered in (program._source_digest, digest, program._key):
        remembered.cache_clear()


def mm(a: torch.Tensor, b: torch.Tensor, *, out_dtype: Any = None, out: Any = None) -> Any:
    return _given(_wide(a) @ _wide(b), a, out_dtype or a.dtype, out)


def addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out_dtype: Any = None, out: Any = None
) -> Any:
    return _given(_wide(c) + _wide(a) @ _wide(b), a, out_dtype or a.dtype, out)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    out: torch.Tensor,
) -> Any:
    total = _wide(a) @ _wide(b) * _wide(scale_a) * _wide(scale_b)
    return _given(total if bias is None else total + _wide(bias), a, out_dtype, out)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Rows up to each of `offs` by a matrix of `b`; zeros behind the last, which nobody reads."""
    ends = offs.tolist()
    rows, matrices = _wide(a[: ends[-1]]), _wide(b)
    total = rows.new_zeros((len(a), matrices.shape[-1]))
    start = 0
    for matrix, end in zip(matrices, ends, strict=True):
        total[start:end] = rows[start:end] @ matrix
        start = end
    result: torch.Tensor = _given(total, a, a.dtype, None)
    return result


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().float()


def _given(result: torch.Tensor, like: torch.Tensor, dtype: torch.dtype, out: Any) -> Any:
    result = result.to(dtype)
    return result.to(like.device) if out is None else out.copy_(result)
