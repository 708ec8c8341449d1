"""Ops that write refuse arguments that overlap in memory, and no others."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, same_bits

import gristmill
from gristmill.errors import ArgumentError
from gristmill.ops.op import Op
from gristmill.ops.overlap import extent_of, overlap, overlaps_itself
from gristmill.ops.registry import OPS

FUSED = OPS["fused_add_rms_norm_"]
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.float64}


def places(tensor: torch.Tensor) -> list[int]:
    """The byte at which each element begins."""
    indices = itertools.product(*map(range, tensor.shape))
    return [
        tensor.element_size() * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in indices
    ]


def test_overlap_is_exact_for_every_layout() -> None:
    """Against all bytes of small tensors of any shapes, strides and dtypes."""
    draw = random.Random(0)
    counts = {True: 0, False: 0}
    for _ in range(2500):
        one, other = (
            torch.empty(1000, dtype=DTYPES[draw.choice(list(DTYPES))]).as_strided(
                [draw.choice((1, 2, 3, 4, 5)) for _ in range(rank)],
                [draw.randrange(25) for _ in range(rank)],
            )
            for rank in (draw.randrange(1, 4), draw.randrange(1, 4))
        )
        at = places(one)
        assert overlaps_itself(extent_of(one)) == (len(set(at)) < len(at)), one.stride()
        distance = draw.randrange(-120, 120)
        bytes_of = [
            {place + byte for place in places(tensor) for byte in range(tensor.element_size())}
            for tensor in (one, other)
        ]
        truth = any(byte + distance in bytes_of[0] for byte in bytes_of[1])
        assert overlap(extent_of(one), extent_of(other), distance) == truth
        counts[truth] += 1
    assert min(counts.values()) > 400


def test_overlap_is_found_at_once_for_large_tensors() -> None:
    """Of what nobody can list the bytes of."""
    whole = extent_of(torch.empty(2**20, 2**15, dtype=torch.bfloat16, device="meta"))
    half = extent_of(torch.empty(2**20, 2**15, dtype=torch.bfloat16, device="meta")[:, : 2**14])
    assert not overlap(half, half, 2**15)
    assert overlap(half, half, 2**15 - 2)
    assert overlap(whole, half, 2**15)
    assert not overlaps_itself(whole)
    windows = torch.empty(2**30, device="meta").unfold(0, 64, 63)
    assert overlaps_itself(extent_of(windows))
    assert not overlaps_itself(extent_of(torch.empty(2**30, device="meta").unfold(0, 64, 64)))


def test_a_layout_that_takes_too_long_counts_as_overlapping() -> None:
    shape, strides = (89, 93, 184, 172, 195), (269324414, 1180059880, 841138000, 398616578, 303000)
    start = time.perf_counter()
    assert overlaps_itself(extent_of(torch.empty_strided(shape, strides, device="meta")))
    assert time.perf_counter() - start < 4.0  # all sums would take 10 to 20 times as long


def _apart(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return buffer[:4, :32], buffer[4:8, :32]


# Two tensors of shape (4, 32) in a buffer of (9, 96).
TOGETHER: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "one as both": lambda b: (b[:4, :32],) * 2,
    "a view": lambda b: (b[:4, :32], b[:4, :32].view(4, 32)),
    "shifted rows": lambda b: (b[:4, :32], b[1:5, :32]),
    "shifted columns": lambda b: (b[:4, :32], b[:4, 31:63]),
    "last element": lambda b: (b[:4, :32], b.view(-1)[3 * 96 + 31 : 3 * 96 + 31 + 128].view(4, 32)),
    "rows of another step": lambda b: (b[:8:2, :32], b.view(-1).as_strided((4, 32), (95, 1), 97)),
}
APART: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "rows": _apart,
    "columns side by side": lambda b: (b[:4, :32], b[:4, 32:64]),
    "columns the other way": lambda b: (b[:4, 40:72], b[:4, :32]),
    "every second row": lambda b: (b[:8:2, :32], b[1:9:2, :32]),
    "every second column": lambda b: (b[:4, :64:2], b[:4, 1:65:2]),
    "one after the other": lambda b: (
        b.view(-1)[:128].view(4, 32),
        b.view(-1)[128:256].view(4, 32),
    ),
}
WAYS: dict[str, Callable[..., Any]] = {
    "function": gristmill.fused_add_rms_norm_,
    "torch.ops": torch.ops.gristmill.fused_add_rms_norm_,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("layout", list(TOGETHER))
def test_overlapping_is_refused_whatever_came_before(layout: str, way: str, device: str) -> None:
    """Whichever of the two begins first in memory."""
    buffer = torch.randn(9, 96, device=device)
    kept = buffer.clone()
    with torch.no_grad():
        for first, second in ((0, 1), (1, 0)):
            pair = TOGETHER[layout](buffer)
            for _ in range(2):
                message = r"^fused_add_rms_norm_: x is overwritten, so"
                with pytest.raises(ArgumentError, match=message):
                    WAYS[way](pair[first], pair[second])
                assert same_bits(buffer, kept)
                # Tensors of the same layout with memory of their own: the plan of the next call.
                own, others = (torch.randn(9, 96, device=device) for _ in range(2))
                WAYS[way](TOGETHER[layout](own)[first], TOGETHER[layout](others)[second])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("layout", list(APART))
def test_what_does_not_overlap_runs(layout: str, way: str, device: str) -> None:
    for _ in range(3):
        buffer = torch.randn(9, 96, device=device)
        own = [one.clone() for one in APART[layout](buffer)]
        with torch.no_grad():
            WAYS[way](*APART[layout](buffer))
            gristmill.fused_add_rms_norm_(*own)
        for one, other in zip(APART[layout](buffer), own, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_overlap_themselves(device: str) -> None:
    long = torch.randn(400, device=device)
    with torch.no_grad():
        for strides in ((8, 1), (0, 1), (31, 1), (1, 1), (1, 3), (32, 0)):
            x = long.as_strided((4, 32), strides)
            for pair in ((x, torch.randn(4, 32, device=device)), (torch.randn_like(x), x)):
                with pytest.raises(ArgumentError, match="elements must not share memory"):
                    gristmill.fused_add_rms_norm_(*pair)
        gristmill.fused_add_rms_norm_(long.as_strided((4, 32), (1, 4)), torch.randn(4, 32).to(long))
        gristmill.fused_add_rms_norm_(long.as_strided((1, 32), (0, 1)), torch.randn(1, 32).to(long))


def test_a_weight_in_what_is_overwritten() -> None:
    buffer = torch.randn(5, 32)
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"residual and weight must share no"):
        gristmill.fused_add_rms_norm_(torch.randn(4, 32), buffer[:4], buffer[3])


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.written], ids=lambda op: op.name)
def test_every_op_that_writes_looks_at_all_its_tensors(op: Op) -> None:
    """What is read may not lie in what is written, of whatever dtype."""
    for warm in (False, True):
        args = op.example((8, 32), torch.float32, "cpu")
        if warm:
            op.run(*args)
        for at, one in enumerate(args):
            for to in op.written:
                if at == to or not isinstance(one, torch.Tensor):
                    continue
                memory = args[to].untyped_storage()
                inside = torch.empty(0, dtype=one.dtype).set_(memory, 0, one.shape, one.stride())
                wrong = (*args[:at], inside, *args[at + 1 :])
                with pytest.raises(ArgumentError, match=r"must share no memory"):
                    op.run(*wrong)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["one as both", "a view", "shifted rows"])
def test_overlapping_is_refused_in_a_graph(layout: str, dynamic: bool) -> None:
    def step(buffer: torch.Tensor) -> torch.Tensor:
        gristmill.fused_add_rms_norm_(*TOGETHER[layout](buffer))
        return buffer + 1

    for arguments in (False, True):
        torch._dynamo.reset()
        function: Any = gristmill.fused_add_rms_norm_ if arguments else step
        compiled = torch.compile(function, backend="aot_eager", dynamic=dynamic, fullgraph=True)
        buffer = torch.randn(9, 96)
        kept = buffer.clone()
        given = TOGETHER[layout](buffer) if arguments else (buffer,)
        with torch.no_grad(), pytest.raises(Exception, match="fused_add_rms_norm_: x is overwrit"):
            compiled(*given)
        assert same_bits(buffer, kept)


@pytest.mark.parametrize("dynamic", [False, True])
def test_columns_side_by_side_in_a_graph(dynamic: bool) -> None:
    def step(buffer: torch.Tensor) -> torch.Tensor:
        gristmill.fused_add_rms_norm_(*APART["columns side by side"](buffer))
        return buffer + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    with torch.no_grad():
        buffer = torch.randn(9, 96)
        own = buffer.clone()
        torch.testing.assert_close(compiled(buffer), step(own))
        torch.testing.assert_close(buffer, own)


def test_meta_tensors_have_storages_for_addresses() -> None:
    buffer = torch.empty(9, 96, device="meta")
    for _ in range(2):
        for layout in TOGETHER:
            with torch.no_grad(), pytest.raises(ArgumentError, match="is overwritten"):
                gristmill.fused_add_rms_norm_(*TOGETHER[layout](buffer))
        for layout in APART:
            with torch.no_grad():
                gristmill.fused_add_rms_norm_(*APART[layout](buffer))


def test_addresses_of_meta_tensors_identify_nothing() -> None:
    """Each storage begins at 0: that two of them do not overlap says nothing of one."""
    x, residual = (torch.empty(4, 32, device="meta") for _ in range(2))
    with torch.no_grad():
        for _ in range(3):
            gristmill.fused_add_rms_norm_(x, residual)
        with pytest.raises(ArgumentError, match=r"x and residual must share no memory"):
            gristmill.fused_add_rms_norm_(x, x.view(4, 32))
