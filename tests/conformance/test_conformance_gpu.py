"""What only a GPU can show: capture, streams, threads, order of launches, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_helpers import KERNEL_OPS, copied, run_by, same_bits, supporting
from conformance_truth import results_of

import gristmill
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.variant import Variant

pytestmark = pytest.mark.gpu

# One shape for each way that rows are shared and fed: lanes, blocks, rings, clusters, few and many.
SHAPES = [(513, 128), (37, 1000), (700, 2048), (300, 8192), (3, 16384), (20, 65536), (2, 131072)]
SHAPE_NAMES = ["x".join(map(str, shape)) for shape in SHAPES]
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
over_ops = pytest.mark.parametrize("op", KERNEL_OPS)


def example(op: Op, shape: tuple[int, ...], seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    return op.example(shape, torch.bfloat16, "cuda")


def kernels(op: Op, args: tuple[Any, ...]) -> list[Variant]:
    return [one for one in supporting(op, args) if one.name.startswith("cuda_")]


def answer(op: Op, variant: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The results of one call on copies of `args`."""
    own = copied(args)
    return results_of(op.name, own, run_by(op, variant, own))


def environment(folder: Path) -> dict[str, str]:
    """For a child process that finds this gristmill and an empty cache."""
    source = str(Path(gristmill.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "GRISTMILL_CACHE_DIR": str(folder / "cache")}


def fill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for arg, value in zip(args, values, strict=True):
        if isinstance(arg, torch.Tensor):
            arg.copy_(value)


# --- capture


@over_shapes
@over_ops
def test_capture_and_replay(op: Op, shape: tuple[int, ...]) -> None:
    first, second = example(op, shape, 0), example(op, shape, 1)
    for variant in supporting(op, first):
        static = copied(first)
        run_by(op, variant.name, copied(first))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = run_by(op, variant.name, static)
        captured = results_of(op.name, static, returned)
        for values in (second, first, second):
            fill(static, values)
            graph.replay()
            expected = answer(op, variant.name, values)
            for result, want in zip(captured, expected, strict=True):
                assert same_bits(result, want), variant.name


def test_capture_of_a_training_step() -> None:
    x, residual, weight = example(OPS["add_rms_norm"], (64, 1024))[:3]
    leaves = [value.requires_grad_() for value in (x, residual, weight)]
    dy, dsum = torch.randn_like(x), torch.randn_like(x)

    def step() -> tuple[torch.Tensor, ...]:
        results = gristmill.add_rms_norm(x, residual, weight)
        return torch.autograd.grad(results, leaves, (dy, dsum))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for value in (x, residual, weight, dy, dsum):
            value.normal_()
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert same_bits(one, other)


FIRST_CALL_IN_CAPTURE = """
import sys, torch, gristmill
from gristmill.ops.registry import OPS
name, mode = sys.argv[1:]
op = OPS[name]
args = op.example((6, 4096), torch.bfloat16, "cuda")
torch.cuda.synchronize()
assert gristmill.counters()["compiles"] == 0
for variant in ("cuda_block", "cuda_cluster", "cuda_cooperative"):
    static = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode), gristmill.use(name, variant):
        returned = op.run(*static)
    # What was captured has not run yet: the inputs are still those of the beginning.
    graph.replay()
    fresh = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with gristmill.use(name, variant):
        again = op.run(*fresh)
    torch.cuda.synchronize()
    results = static[:2] if returned is None else returned
    wanted = fresh[:2] if returned is None else again
    if isinstance(results, torch.Tensor):
        results, wanted = (results,), (wanted,)
    for one, other in zip(results, wanted):
        assert torch.equal(one.float(), other.float()), variant  # FP8 knows no equal
assert gristmill.counters()["compiles"] >= 3, gristmill.counters()
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@over_ops
def test_a_first_call_inside_a_capture(op: Op, mode: str, tmp_path: Path) -> None:
    """Kernels are compiled and loaded during the capture, with one warning; the replay is right."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL_IN_CAPTURE, op.name, mode],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "during CUDA graph capture" in line]
    assert len(warnings) == 1, done.stderr
    assert op.name in warnings[0]
    assert "gristmill.warmup" in warnings[0]


def test_after_a_warm_up_a_capture_compiles_nothing() -> None:
    op = OPS["rms_norm"]
    args = example(op, (48, 3072))
    gristmill.warmup("rms_norm", shapes=[(48, 3072)], dtypes=[torch.bfloat16])
    before = gristmill.counters()["compiles"]
    op.forget_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op.run(*args)
    graph.replay()
    assert gristmill.counters()["compiles"] == before
    assert same_bits(result, op.run(*args))


# --- always the same


@over_shapes
@over_ops
def test_twenty_runs_give_the_same_bits(op: Op, shape: tuple[int, ...]) -> None:
    args = example(op, shape)
    for variant in kernels(op, args):
        first = answer(op, variant.name, args)
        noise = torch.empty(1 << 22, device="cuda")
        for turn in range(20):
            noise.fill_(turn)  # memory that the allocator gives out next holds something else
            for one, other in zip(answer(op, variant.name, args), first, strict=True):
                assert same_bits(one, other), variant.name


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "fused_add_rms_norm_"])
def test_a_row_is_the_same_in_every_batch_of_one_launch(name: str) -> None:
    """Outside `batch_invariant` the launch follows the number of rows; under one launch none does.

    Every launch that is chosen for one of these batches runs all of them.
    """
    op = OPS[name]
    args = example(op, (4096, 2048))
    batches = {
        count: tuple(
            arg[:count] if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg for arg in args
        )
        for count in (1, 3, 300, 2048, 4096)
    }
    launches = {
        (choice.variant, choice.config)
        for batch in batches.values()
        for choice in ranked(op.name, op.variants, op.problem(*batch))
        if choice.variant.name.startswith("cuda_")
    }
    assert len({variant for variant, _ in launches}) > 1
    for variant, config in launches:
        found = {}
        for count, batch in batches.items():
            own = copied(batch)
            plan = variant.bind(op.problem(*own), config)
            found[count] = results_of(op.name, own, plan(*own))
        for count, results in found.items():
            for one, whole in zip(results, found[4096], strict=True):
                assert same_bits(one, whole[:count]), (variant.name, config, count)


# --- the order of launches


@over_shapes
def test_dependent_launches_wait_for_what_they_read(shape: tuple[int, ...]) -> None:
    """Kernels begin before the one before them ends: a chain must not notice."""
    torch.manual_seed(0)
    weight = torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16)
    start = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    options = (weight, 1e-6, 0.0, "once", None)
    plain = {one.name for one in kernels(OPS["rms_norm"], (start, *options))}
    added = {one.name for one in kernels(OPS["add_rms_norm"], (start, start, *options))}
    names = sorted(plain & added)

    def chain(wait: bool) -> list[torch.Tensor]:
        x, residual, seen = start.clone(), torch.zeros_like(start), []
        for turn in range(24):
            name = names[turn % len(names)]
            with gristmill.use("rms_norm", name), gristmill.use("add_rms_norm", name):
                y, residual = gristmill.add_rms_norm(x, residual, weight)
                x = gristmill.rms_norm(y, weight)
            if turn % 3 == 2:
                x = x * 0.5 + y  # torch's kernels in between
            if wait:
                torch.cuda.synchronize()
            seen.append(x.clone())
        return seen

    for one, other in zip(chain(wait=False), chain(wait=True), strict=True):
        assert same_bits(one, other)


@over_shapes
def test_memory_given_back_is_not_written_too_early(shape: tuple[int, ...]) -> None:
    """A result that is dropped is the next one's memory, while its last reader still runs."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    weight = torch.randn(shape[-1], device="cuda", dtype=torch.bfloat16)
    expected = []
    for x in inputs:
        y = gristmill.rms_norm(x, weight)
        torch.cuda.synchronize()
        dx, dweight = OPS["rms_norm_backward"].run(y, x, weight, None, 1e-6, 0.0, True)
        torch.cuda.synchronize()
        expected.append((dx, dweight))
    found = []
    for turn in range(32):
        x = inputs[turn % 4]
        y = gristmill.rms_norm(x, weight)
        found.append(OPS["rms_norm_backward"].run(y, x, weight, None, 1e-6, 0.0, True))
        if len(found) > 4:
            found.pop(0)
    for (dx, dweight), (want, want_weight) in zip(found, expected, strict=True):
        assert same_bits(dx, want)
        assert same_bits(dweight, want_weight)


@over_shapes
def test_in_place_chain(shape: tuple[int, ...]) -> None:
    op = OPS["fused_add_rms_norm_"]
    args = example(op, shape)

    def chain(name: str, wait: bool) -> list[torch.Tensor]:
        x, residual, weight, eps = copied(args)
        for _ in range(20):
            run_by(op, name, (x, residual, weight, eps))
            if wait:
                torch.cuda.synchronize()
        return [x, residual]

    for variant in kernels(op, args):
        pairs = zip(chain(variant.name, False), chain(variant.name, True), strict=True)
        assert all(same_bits(one, other) for one, other in pairs), variant.name


# --- streams, threads, devices


@over_ops
def test_launches_go_to_the_current_stream(op: Op) -> None:
    """The inputs are written late on a side stream; only a launch behind that write sees them."""
    old, new = example(op, (64, 2048), 0), example(op, (64, 2048), 1)
    for variant in kernels(op, old):
        static = copied(old)
        run_by(op, variant.name, copied(old))
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            fill(static, new)
            returned = run_by(op, variant.name, static)
        side.synchronize()
        results = results_of(op.name, static, returned)
        for result, want in zip(results, answer(op, variant.name, new), strict=True):
            assert same_bits(result, want), variant.name


@over_ops
def test_two_streams_at_once(op: Op) -> None:
    """Workspaces of concurrent calls must not meet."""
    for shape in ((300, 2048), (24, 65536)):
        inputs = [example(op, shape, seed) for seed in (0, 1)]
        for variant in kernels(op, inputs[0]):
            expected = [answer(op, variant.name, args) for args in inputs]
            copies = [[copied(args) for _ in range(10)] for args in inputs]
            torch.cuda.synchronize()
            streams = [torch.cuda.Stream(), torch.cuda.Stream()]
            found: list[list[Any]] = [[], []]
            for turn in range(10):
                for which, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        own = copies[which][turn]
                        returned = run_by(op, variant.name, own)
                        found[which].append(results_of(op.name, own, returned))
            torch.cuda.synchronize()
            for which in (0, 1):
                for results in found[which]:
                    for result, want in zip(results, expected[which], strict=True):
                        assert same_bits(result, want), f"{variant.name} {shape}"


@over_ops
def test_a_fresh_thread(op: Op) -> None:
    """A thread that has never touched CUDA has no current context."""
    args = example(op, (16, 1024))
    failures: list[str] = []

    def work() -> None:
        try:
            for variant in kernels(op, args):
                for one, other in zip(
                    answer(op, variant.name, args), expected[variant.name], strict=True
                ):
                    if not same_bits(one, other):
                        failures.append(variant.name)
        except Exception as error:
            failures.append(repr(error))

    expected = {one.name: answer(op, one.name, args) for one in kernels(op, args)}
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_fresh_thread_that_compiles_first(tmp_path: Path) -> None:
    script = """
import threading, torch, gristmill
x, w = torch.randn(8, 1536, device="cuda"), torch.randn(1536, device="cuda")
found = []
thread = threading.Thread(target=lambda: found.append(gristmill.rms_norm(x, w)))
thread.start(); thread.join()
torch.testing.assert_close(found[0], torch.nn.functional.rms_norm(x, (1536,), w, 1e-6))
assert gristmill.counters()["compiles"] == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@over_ops
def test_a_device_that_is_not_the_current_one(op: Op) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    args = example(op, (16, 1024))
    there = tuple(arg.to("cuda:1") if isinstance(arg, torch.Tensor) else arg for arg in args)
    with torch.cuda.device(0):
        for variant in kernels(op, there):
            expected = answer(op, variant.name, args)
            for one, other in zip(answer(op, variant.name, there), expected, strict=True):
                assert one.device.index == 1
                assert same_bits(one.cpu(), other.cpu()), variant.name
            assert torch.cuda.current_device() == 0


# --- what a call may not do


@over_shapes
@over_ops
def test_a_call_waits_for_nothing_and_leaves_nothing(op: Op, shape: tuple[int, ...]) -> None:
    args = example(op, shape)
    for variant in kernels(op, args):
        run_by(op, variant.name, copied(args))
        own = copied(args)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_by(op, variant.name, own)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before, variant.name


def test_growing_rows_compile_few_kernels() -> None:
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    before = gristmill.counters()["compiles"]
    for rows in (*range(1, 40), *range(100, 5000, 97)):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        expected = torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)
        torch.testing.assert_close(gristmill.rms_norm(x, weight), expected, rtol=2e-2, atol=2e-2)
    assert gristmill.counters()["compiles"] - before <= 4


def test_millions_of_short_rows() -> None:
    x = torch.randn(3_000_001, 8, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8, device="cuda", dtype=torch.bfloat16)
    op = OPS["rms_norm"]
    args = (x, weight, 1e-6, 0.0, "once", None)
    expected = torch.nn.functional.rms_norm(x.double(), (8,), weight.double(), 1e-6)
    for variant in kernels(op, args):
        error = (run_by(op, variant.name, args).double() - expected).abs()
        allowed = expected.abs() * torch.finfo(torch.bfloat16).eps + 1e-6
        assert bool((error <= allowed).all()), variant.name
