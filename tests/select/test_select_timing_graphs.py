"""How CUDA samples are put together, on a pretended device whose clock only its kernels move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from gristmill.select import Timing, time_interleaved, timing

LAUNCH_US = 5.0


class PretendedDevice:
    """Eager calls cost a launch and the kernel; a replay costs one launch and all its kernels."""

    def __init__(self) -> None:
        self.us = 0.0
        self.recording: list[float] | None = None
        self.graphs: list[list[float]] = []
        self.replays = 0

    def kernel(self, us: float, *, capturable: bool = True) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self.recording is None:
                self.us += LAUNCH_US + us
            elif capturable:
                self.recording.append(us)
            else:
                raise RuntimeError("operation not permitted when stream is capturing")

        return call

    def install(self, patch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.us = 0.0

            def record(self) -> None:
                self.us = device.us

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return (end.us - self.us) / 1e3

        class Graph:
            def __init__(self) -> None:
                self.kernels: list[float] = []

            def replay(self) -> None:
                device.replays += 1
                device.us += LAUNCH_US + sum(self.kernels)

        @contextmanager
        def graph(target: Graph, stream: object, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local"  # or no other thread could allocate
            device.recording = target.kernels
            try:
                yield
                device.graphs.append(target.kernels)
            finally:
                device.recording = None

        patch.setattr(timing, "_cuda_device_of", lambda argsets: torch.device("cpu"))
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "Stream": object,
            "stream": lambda stream: nullcontext(),
            "device": lambda index: nullcontext(),
            "synchronize": lambda *args: None,
        }.items():
            patch.setattr(torch.cuda, name, value)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedDevice:
    device = PretendedDevice()
    device.install(monkeypatch)
    return device


def only(found: dict[str, Timing | Exception]) -> Timing:
    (result,) = found.values()
    assert isinstance(result, Timing), result
    return result


def test_a_short_kernel_is_captured_often_enough_to_fill_a_sample(gpu: PretendedDevice) -> None:
    found = only(time_interleaved({"short": gpu.kernel(1.0)}, [()] * 3, min_us_per_sample=600))
    # The first graph only finds out how long a call takes.
    probe, final = gpu.graphs
    assert len(probe) == 21
    assert sum(final) >= 600 * 0.8
    assert len(final) % 3 == 0
    assert found.method == "graph"
    assert found.us == pytest.approx(1.0 + LAUNCH_US / len(final))


@pytest.mark.parametrize(("us", "calls"), [(30.0, 20), (500.0, 4)])
def test_a_longer_kernel_is_captured_once(gpu: PretendedDevice, us: float, calls: int) -> None:
    only(time_interleaved({"long": gpu.kernel(us)}, [()] * 4, samples=5))
    assert [len(graph) for graph in gpu.graphs] == [calls]
    assert gpu.replays == 2 + 5


def test_many_sets_are_passed_over_once(gpu: PretendedDevice) -> None:
    only(time_interleaved({"tiny": gpu.kernel(1.0)}, [()] * 1024))
    assert [len(graph) for graph in gpu.graphs] == [1024]


def test_a_graph_never_grows_without_bound(gpu: PretendedDevice) -> None:
    only(time_interleaved({"tiny": gpu.kernel(0.001)}, [()] * 7, min_us_per_sample=1e6))
    assert max(len(graph) for graph in gpu.graphs) <= timing._MOST_CALLS


def test_what_cannot_be_captured_is_timed_call_by_call(gpu: PretendedDevice) -> None:
    candidates = {
        "eager": gpu.kernel(30.0, capturable=False),
        "graph": gpu.kernel(30.0),
    }
    found = time_interleaved(candidates, [()] * 20)
    eager, graph = found["eager"], found["graph"]
    assert isinstance(eager, Timing)
    assert isinstance(graph, Timing)
    assert (eager.method, graph.method) == ("events", "graph")
    assert eager.us == pytest.approx(30.0 + LAUNCH_US)
    assert graph.us < 31


def test_a_capture_that_succeeds_follows_each_that_fails(gpu: PretendedDevice) -> None:
    """It is what frees torch's random generator from the failed one."""
    only(time_interleaved({"eager": gpu.kernel(300.0, capturable=False)}, [()]))
    assert len(gpu.graphs) == 1
    assert gpu.recording is None
