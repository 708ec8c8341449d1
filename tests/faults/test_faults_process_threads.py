"""Threads that launch while others compile: nobody waits for somebody else's kernel."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from process_driver import SOURCES, run_with_fake_driver

import gristmill
from gristmill.jit import Program, kernel
from gristmill.ops.registry import OPS

PATIENCE_S = 180


def new_program(number: int) -> Program:
    """One that nobody has compiled yet, of 0.1 s."""
    return Program("probe.cu", (f"fill<{number}>",), root=SOURCES)


# without a GPU

BESIDE_A_COMPILE = """
import ctypes, json, pathlib, struct, sys, threading, time
from gristmill.jit import nvrtc
from gristmill.jit.kernel import kernel
from gristmill.jit.program import Program

def program(number):
    return Program("probe.cu", (f"fill<{number}>",), root=pathlib.Path(sys.argv[1]))

params = struct.Struct("QQqf")
ready = kernel(program(2), "fill<2>", 0)
launch = ready.prepare(grid=1, block=32, params=params)
launch(0, 1, 2, 3, 4.0)
binary = nvrtc.compile_program(program(3), "sm_90a")
begun, over = threading.Event(), threading.Event()

def slow(wanted, arch, **options):
    if wanted.names == ("fill<3>",):
        begun.set()
        assert over.wait(60)
    return binary

nvrtc.compile_program = slow
compiling = [threading.Thread(target=kernel, args=(program(3), "fill<3>", 0)) for _ in range(3)]
for thread in compiling:
    thread.start()
assert begun.wait(60)
longest = {}

def timed(what, action):
    start = time.perf_counter()
    action()
    longest[what] = max(longest.get(what, 0), time.perf_counter() - start)

def work(stream):
    for number in range(300):
        timed("launch", lambda: launch(stream, 1, 2, 3, 4.0))
        timed("look up", lambda: kernel(program(2), "fill<2>", 0))
        timed(
            "new shape",
            lambda: ready.prepare(grid=2 + number, block=32, params=params)(stream, 1, 2, 3, 4.0),
        )
    for number in range(5):
        one = 100 + 10 * stream + number
        binary.lowered[f"fill<{one}>"] = binary.lowered["fill<3>"]
        timed("another kernel", lambda: kernel(program(one), f"fill<{one}>", 0))

binary = type(binary)(binary.cubin, dict(binary.lowered), binary.log, binary.compiler)
threads = [threading.Thread(target=work, args=(stream,)) for stream in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
still = sum(thread.is_alive() for thread in threads), sum(t.is_alive() for t in compiling)
over.set()
for thread in compiling:
    thread.join(60)
done = sum(thread.is_alive() for thread in compiling)
launches = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "launches").value
print(json.dumps([longest, *still, done, launches]))
"""


def test_a_ready_kernel_never_waits_for_one_that_is_compiled(tmp_path: Path) -> None:
    """The compile does not end before all others have: who waited for it would wait for ever."""
    out = run_with_fake_driver(tmp_path, BESIDE_A_COMPILE)
    longest, launching, compiling, left, launches = json.loads(out)
    assert set(longest) == {"launch", "look up", "new shape", "another kernel"}
    assert (launching, compiling, left) == (0, 3, 0)
    assert launches == 1 + 4 * 300 * 2


# with a GPU


def joined(threads: list[threading.Thread], errors: list[BaseException]) -> None:
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert errors == []


def noting(errors: list[BaseException], work: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)

    return run


def calls(
    x: torch.Tensor, weight: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """What ops give, what is right and how near that is, all on the current stream."""
    width, wide = (x.shape[-1],), weight.float()
    yield gristmill.rms_norm(x, weight), F.rms_norm(x.float(), width, wide), 0.05
    yield gristmill.layer_norm(x, weight), F.layer_norm(x.float(), width, wide), 0.05
    yield gristmill.softmax(x), torch.softmax(x.float(), -1), 1e-4
    doubled = F.rms_norm((x + x).float(), width, wide)
    found, total = gristmill.add_rms_norm(x, x, weight)
    yield found, doubled, 0.05
    yield total, (x + x).float(), 0.0
    y = x.clone()
    gristmill.fused_add_rms_norm_(y, x.clone(), weight, 1e-6)
    yield y, doubled, 0.05
    columns = weight.expand(64, *width).contiguous()
    yield gristmill.linear(x, columns), x.float() @ columns.float().T, 0.5


@pytest.mark.gpu
def test_threads_with_streams_of_their_own_while_others_compile() -> None:
    errors: list[BaseException] = []
    over = threading.Event()
    made = [0]
    for op in OPS.values():
        op.forget_plans()

    def launch(number: int) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(12):
                rows, width = 1 + 37 * step + number, 512 * (1 + (number + step) % 6)
                options: dict[str, Any] = {"device": "cuda", "generator": generator}
                x = torch.randn(rows, width, **options).bfloat16()
                weight = torch.randn(width, **options).bfloat16()
                for found, right, near in calls(x, weight):
                    torch.testing.assert_close(found.float(), right, rtol=0.04, atol=near)
            torch.cuda.current_stream().synchronize()

    def compile_new(number: int) -> None:
        count = 0
        while not over.is_set():
            program = new_program(1000 + 1000 * number + count)
            kernel(program, program.names[0], 0)
            count += 1
            made[0] += 1

    compilers = [
        threading.Thread(target=noting(errors, compile_new), args=(at,), daemon=True)
        for at in range(4)
    ]
    for thread in compilers:
        thread.start()
    try:
        joined(
            [
                threading.Thread(target=noting(errors, launch), args=(at,), daemon=True)
                for at in range(8)
            ],
            errors,
        )
    finally:
        over.set()
    for thread in compilers:
        thread.join(PATIENCE_S)
    assert errors == []
    assert made[0] > 4
    torch.cuda.synchronize()


@contextmanager
def compiling_elsewhere(first: int) -> Iterator[list[int]]:
    """Another thread compiles kernels and loads them; how many are done."""
    done: list[int] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        number = first
        while not over.is_set():
            program = new_program(number)
            kernel(program, program.names[0], 0)
            done.append(number)
            number += 1

    thread = threading.Thread(target=noting(errors, work), daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert errors == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_while_another_thread_compiles_and_loads(mode: str) -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        return gristmill.softmax(gristmill.rms_norm(x, weight))

    step()
    torch.cuda.synchronize()
    first = {"global": 10_000, "thread_local": 20_000, "relaxed": 30_000}[mode]
    with compiling_elsewhere(first) as done:
        while not done:
            time.sleep(0.01)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            begun = len(done)
            end = time.monotonic() + PATIENCE_S
            while len(done) < begun + 3 and time.monotonic() < end:
                y = step()
                time.sleep(0.005)
        assert len(done) >= begun + 3
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    right = torch.softmax(F.rms_norm(x.float(), (4096,)), -1)
    torch.testing.assert_close(y.float(), right, rtol=5e-2, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_first_call_in_a_capture_while_another_thread_compiles(mode: str) -> None:
    """Its plan is made, and its kernel loaded, in the capture: with a warning, and rightly."""
    x = torch.randn(48, 3072, device="cuda", dtype=torch.float16)
    for op in OPS.values():
        op.forget_plans()
    with compiling_elsewhere({"thread_local": 40_000, "relaxed": 50_000}[mode]) as done:
        while not done:
            time.sleep(0.01)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = gristmill.layer_norm(x)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, F.layer_norm(x, (3072,)), rtol=1e-2, atol=1e-2)
