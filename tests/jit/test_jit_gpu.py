"""Launches on a real device, each checked by what the kernel (sources/probe.cu) wrote."""

from __future__ import annotations

import struct
import threading

import pytest
import torch
from jit_helpers import SOURCES

from gristmill.errors import DriverError
from gristmill.jit import counters
from gristmill.jit.driver import architecture
from gristmill.jit.kernel import Kernel, kernel
from gristmill.jit.nvrtc import compile_program
from gristmill.jit.program import Program
from gristmill.jit.resources import resource_usage

pytestmark = pytest.mark.gpu

PROGRAM = Program(
    "probe.cu",
    (
        "fill<2>",
        "fill<3>",
        "reverse_through_shared",
        "cluster_place",
        "meet",
        "early_then_slow",
        "copy_after_previous",
    ),
    root=SOURCES,
)
PARAMS = struct.Struct("QQqf")


def get(name: str) -> Kernel:
    return kernel(PROGRAM, name, torch.cuda.current_device())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, device="cuda")


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("scale", [2, 3])
def test_plain_launch_of_several_kernels_of_a_program(scale: int) -> None:
    out = zeros(1000)
    launch = get(f"fill<{scale}>").prepare(grid=8, block=128, params=PARAMS)
    launch(stream(), out.data_ptr(), 0, 999, 1.5)
    expected = torch.full((1000,), 1.5 * scale)
    expected[999] = 0
    assert torch.equal(out.cpu(), expected)


def test_one_compile_and_one_load_for_all() -> None:
    program = Program("probe.cu", ("fill<11>", "fill<12>"), root=SOURCES)
    device = torch.cuda.current_device()
    before = counters.snapshot()
    first = kernel(program, "fill<11>", device)
    assert kernel(program, "fill<11>", device) is first
    kernel(program, "fill<12>", device)
    after = counters.snapshot()
    assert after["compiles"] - before["compiles"] == 1
    assert after["loads"] - before["loads"] == 1


@pytest.mark.alone
def test_the_stream_given_is_the_stream_used() -> None:
    out, side, other = zeros(64), torch.cuda.Stream(), torch.cuda.Stream()
    early = torch.empty(64, pin_memory=True)
    launch = get("fill<2>").prepare(grid=1, block=64, params=PARAMS)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        launch(side.cuda_stream, out.data_ptr(), 0, 64, 1.0)
    with torch.cuda.stream(other):
        early.copy_(out, non_blocking=True)
    other.synchronize()
    side.synchronize()
    assert torch.equal(early, torch.zeros(64))
    assert torch.equal(out.cpu(), torch.full((64,), 2.0))


@pytest.mark.parametrize("kilobytes", [8, 48, 64, 99])
def test_shared_memory_beyond_48_kb(kilobytes: int) -> None:
    count = kilobytes * 256
    out = zeros(count)
    reverse = get("reverse_through_shared")
    launch = reverse.prepare(grid=1, block=256, shared=4 * count, params=PARAMS)
    launch(stream(), out.data_ptr(), 0, count, 5.0)
    assert torch.equal(out.cpu(), torch.arange(count - 1, -1, -1, dtype=torch.float32) + 5)
    assert reverse.occupancy(256, 4 * count) >= 1


def test_a_smaller_launch_does_not_take_shared_memory_from_a_larger_one() -> None:
    out = zeros(90 * 256)
    reverse = get("reverse_through_shared")
    large = reverse.prepare(grid=1, block=256, shared=90 * 1024, params=PARAMS)
    reverse.prepare(grid=1, block=256, shared=60 * 1024, params=PARAMS)
    large(stream(), out.data_ptr(), 0, out.numel(), 0.0)
    assert out[0].item() == out.numel() - 1


def test_more_shared_memory_than_there_is() -> None:
    with pytest.raises(DriverError, match="reverse_through_shared: allowing 10000000 bytes"):
        get("reverse_through_shared").prepare(grid=1, block=32, shared=10_000_000, params=PARAMS)


@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters(hopper: None, cluster: int) -> None:
    out = zeros(2 * cluster)
    place = get("cluster_place")
    if place.max_active_clusters(32, 0, cluster) == 0:
        pytest.skip(f"no clusters of {cluster} on this device")
    launch = place.prepare(grid=2 * cluster, block=32, cluster=cluster, params=PARAMS)
    launch(stream(), out.data_ptr(), 0, 0, 0.0)
    ranks = torch.arange(cluster, dtype=torch.float32).repeat(2)
    assert torch.equal(out.cpu(), 100.0 * cluster + ranks)


@pytest.mark.alone
def test_cooperative_launch_runs_all_blocks_at_once() -> None:
    meet = get("meet")
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    blocks = multiprocessors * meet.occupancy(1024)
    out, counter = zeros(blocks), torch.zeros(1, dtype=torch.int32, device="cuda")
    launch = meet.prepare(grid=blocks, block=1024, cooperative=True, params=PARAMS)
    launch(stream(), out.data_ptr(), counter.data_ptr(), 0, 0.0)
    assert torch.equal(out.cpu(), torch.full((blocks,), float(blocks)))
    # One block more cannot be there at the same time, and is refused instead of hanging.
    larger = meet.prepare(grid=blocks + 1, block=1024, cooperative=True, params=PARAMS)
    with pytest.raises(DriverError, match="meet") as caught:
        larger(stream(), out.data_ptr(), counter.data_ptr(), 0, 0.0)
    assert caught.value.name == "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"


@pytest.mark.alone
@pytest.mark.parametrize("dependent", [True, False])
def test_dependent_launch_begins_early_and_still_sees_the_result(
    hopper: None, dependent: bool
) -> None:
    out = zeros(8)
    slow = get("early_then_slow").prepare(grid=1, block=1, params=PARAMS)
    copy = get("copy_after_previous").prepare(grid=1, block=1, dependent=dependent, params=PARAMS)
    for _ in range(3):
        slow(stream(), out.data_ptr(), 0, 2_000_000, 7.0)
        copy(stream(), out.data_ptr(), 0, 0, 1.0)
        torch.cuda.synchronize()
        assert out[1].item() == 8.0
        times = out.view(torch.int64)
        ended, began = times[1].item(), times[2].item()
        assert (began < ended) == dependent


def test_occupancy_and_resources_agree_with_the_cubin() -> None:
    device = torch.cuda.current_device()
    binary = compile_program(PROGRAM, architecture(device))
    usage = resource_usage(binary)
    for name in PROGRAM.names:
        loaded, read = get(name), usage[binary.lowered[name]]
        assert loaded.registers == read.registers
        assert loaded.local_bytes == read.stack_bytes
        assert loaded.max_threads == 1024
    fill = get("fill<2>")
    threads = torch.cuda.get_device_properties().max_threads_per_multi_processor
    assert fill.occupancy(1024) == threads // 1024
    assert fill.occupancy(32, 90 * 1024) < fill.occupancy(32)


def test_launch_from_a_fresh_thread() -> None:
    out = zeros(64)
    launch = get("fill<2>").prepare(grid=1, block=64, params=PARAMS)
    handle, address = stream(), out.data_ptr()
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            launch(handle, address, 0, 64, 4.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert torch.equal(out.cpu(), torch.full((64,), 8.0))


def test_load_from_a_fresh_thread() -> None:
    out = zeros(64)
    program = Program("probe.cu", ("fill<21>",), root=SOURCES)
    handle, address, device = stream(), out.data_ptr(), torch.cuda.current_device()

    def work() -> None:
        fill = kernel(program, "fill<21>", device)
        fill.prepare(grid=1, block=64, params=PARAMS)(handle, address, 0, 64, 1.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(out.cpu(), torch.full((64,), 21.0))


def test_threads_with_streams_of_their_own() -> None:
    launch = get("fill<2>").prepare(grid=1, block=64, params=PARAMS)
    outs = [zeros(64) for _ in range(8)]
    streams = [torch.cuda.Stream() for _ in outs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        for value in range(200):
            launch(
                streams[index].cuda_stream, outs[index].data_ptr(), 0, 64, 1000.0 * index + value
            )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for index, out in enumerate(outs):
        assert torch.equal(out.cpu(), torch.full((64,), 2.0 * (1000 * index + 199)))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("fresh", [False, True])
def test_launch_inside_a_capture(mode: str, fresh: bool) -> None:
    """`fresh`: the kernel is compiled and loaded inside the capture, too."""
    scale = 31 + ["global", "thread_local", "relaxed"].index(mode)
    program = Program("probe.cu", (f"fill<{scale}>",), root=SOURCES) if fresh else PROGRAM
    name = program.names[0]
    if not fresh:
        get(name)
    out, graph = zeros(64), torch.cuda.CUDAGraph()
    before = counters.snapshot()["loads"]
    with torch.cuda.graph(graph, capture_error_mode=mode):
        captured = kernel(program, name, torch.cuda.current_device())
        launch = captured.prepare(grid=1, block=64, params=PARAMS)
        launch(stream(), out.data_ptr(), 0, 64, 1.0)
    assert counters.snapshot()["loads"] - before == fresh
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), torch.zeros(64))
    graph.replay()
    assert torch.equal(out.cpu(), torch.full((64,), float(scale if fresh else 2)))


def test_a_device_that_is_not_there_and_a_block_that_is_too_large() -> None:
    with pytest.raises(DriverError, match="CUDA device 99") as caught:
        kernel(PROGRAM, "fill<2>", 99)
    assert caught.value.name == "CUDA_ERROR_INVALID_DEVICE"
    fill = get("fill<2>")
    with pytest.raises(DriverError, match=r"launching fill<2> as .*block=4096"):
        fill.prepare(grid=1, block=4096, params=PARAMS)(stream(), 0, 0, 0, 0.0)
    # Neither error stays behind.
    out = zeros(64)
    fill.prepare(grid=1, block=64, params=PARAMS)(stream(), out.data_ptr(), 0, 64, 3.0)
    assert torch.equal(out.cpu(), torch.full((64,), 6.0))


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two devices")
def test_two_devices() -> None:
    for index in (1, 0):
        with torch.cuda.device(index):
            out = zeros(64)
            launch = kernel(PROGRAM, "fill<2>", index).prepare(grid=1, block=64, params=PARAMS)
            launch(stream(), out.data_ptr(), 0, 64, 1.0 + index)
            assert torch.equal(out.cpu(), torch.full((64,), 2.0 + 2 * index))
