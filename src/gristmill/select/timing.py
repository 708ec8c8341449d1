"""The one timing core, for benchmarks and for tuning.

Kernel time is measured cold, without host cost, and fairly:

- cold: each call gets the next of several copies of its arguments (`rotate`, `rotation_count`), and
  all of L2 is read over before each sample;
- without host cost: the calls of a sample are one CUDA graph, timed by events around its replay;
- fairly: the candidates take turns sample by sample, so that a clock or a neighbour that changes
  meanwhile changes for all of them.

On a CPU the same loop runs against the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gristmill.errors import ArgumentError
from gristmill.select.copies import Arguments, rotation_count, tensors_in
from gristmill.select.device import device_of

Function = Callable[..., Any]
Progress = Callable[[int, int], None]

# Below this many calls a graph's launch (a few us) would show in the time per call, unless a pass
# over the argument sets lasts several samples' time by itself.
_LEAST_CALLS = 20
_LONG_PASS = 5
_WARM_UP_CALLS = 3
# After so many rounds of samples the hopeless ones are known.
_TRIAL_ROUNDS = 2
# A graph node costs host time to capture and device memory to hold; no sample needs more.
_MOST_CALLS = 4096


@dataclass(frozen=True)
class Timing:
    """Time per call: the median of the samples and their interquartile range.

    `method` is "graph", "events" (CUDA, where the candidate could not be captured, so that gaps
    between launches count) or "wall".
    """

    us: float
    spread_us: float
    samples: int
    method: str


def time_interleaved(
    candidates: Mapping[str, Function],
    argsets: Sequence[Arguments],
    *,
    samples: int = 11,
    min_us_per_sample: float = 200.0,
    hopeless: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Timing | Exception]:
    """Time each candidate as `function(*args)` over `argsets`, taking turns sample by sample.

    A candidate that raises gets its exception for a result and the others go on. With `hopeless`,
    one whose best sample is that many times the best of all after two rounds gets no more of them.
    `progress` is called with the number of samples taken so far and their total.
    """
    if not argsets or samples < 1:
        raise ArgumentError(
            f"time_interleaved needs at least one argument set and one sample, "
            f"got {len(argsets)} and {samples}"
        )
    device = _cuda_device_of(argsets)
    with _sampling(device) as make:
        samplers: dict[str, _Sampler] = {}
        failures: dict[str, Exception] = {}
        for name, function in candidates.items():
            try:
                samplers[name] = make(function, argsets, min_us_per_sample)
            except Exception as error:
                failures[name] = error
        times: dict[str, list[float]] = {name: [] for name in samplers}
        methods = {name: sampler.method for name, sampler in samplers.items()}
        for number in range(samples):
            for position, name in enumerate(methods, start=1):
                if name in samplers:
                    try:
                        times[name].append(samplers[name].sample())
                    except Exception as error:
                        failures[name] = error
                        del samplers[name]
                if progress is not None:
                    progress(number * len(methods) + position, samples * len(methods))
            if hopeless is not None and number + 1 == _TRIAL_ROUNDS and samplers:
                limit = hopeless * min(min(times[name]) for name in samplers)
                samplers = {one: it for one, it in samplers.items() if min(times[one]) <= limit}
    return {
        name: failures[name] if name in failures else _timing(times[name], methods[name])
        for name in candidates
    }


def time_copy(nbytes: int, device: torch.device | str, **options: Any) -> Timing:
    """The roof: a copy that reads `nbytes / 2` and writes as many, in the same rotation.

    The faster of torch's copy and of an elementwise kernel: inside a CUDA graph a copy becomes a
    memcpy node, which is slow above 512 MB (H200: 1 GB moves in 398 us, by a kernel in 255).
    `options` are those of `time_interleaved`.
    """
    words = max(1, nbytes // 8)
    count = rotation_count(8 * words, device_of(device).l2_bytes)
    argsets = [
        (
            torch.empty(words, dtype=torch.int32, device=device),
            torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device),
        )
        for _ in range(count)
    ]
    results = time_interleaved({"copy": _copy, "kernel": _copy_kernel}, argsets, **options)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    timings = [result for result in results.values() if isinstance(result, Timing)]
    return min(timings, key=lambda timing: timing.us)


def time_host(function: Function, args: Arguments, *, blocks: int = 5, calls: int = 200) -> float:
    """Host time of one eager call in us: the best of `blocks` loops, the device idle before each.

    Nothing waits inside a loop, so `args` must be small enough that the device keeps up.
    """
    device = _cuda_device_of([args])
    for _ in range(_WARM_UP_CALLS):
        function(*args)
    best = math.inf
    for _ in range(blocks):
        if device is not None:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function(*args)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


class _Sampler(Protocol):
    @property
    def method(self) -> str: ...

    def sample(self) -> float:
        """Take one sample: us per call."""


_MakeSampler = Callable[[Function, Sequence[Arguments], float], _Sampler]


@contextmanager
def _sampling(device: torch.device | None) -> Iterator[_MakeSampler]:
    """What makes samplers on `device`; all CUDA work of a measurement is on one side stream."""
    if device is None:
        yield _WallSampler
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        sweep = torch.zeros(max(1, 2 * device_of(device).l2_bytes // 4), device=device)
        with torch.cuda.stream(stream):
            yield lambda function, argsets, least_us: _CudaSampler(
                function, argsets, least_us, stream, sweep
            )
            torch.cuda.synchronize()


class _WallSampler:
    """Calls in a row against the clock, as many as fill a sample."""

    method = "wall"

    def __init__(self, function: Function, argsets: Sequence[Arguments], least_us: float) -> None:
        self._function, self._argsets = function, argsets
        self._next, self._calls = 0, 1
        self.sample()
        us = max(self.sample(), 1e-3)
        self._calls = max(1, min(_MOST_CALLS, math.ceil(least_us / us)))

    def sample(self) -> float:
        count = len(self._argsets)
        batch = [self._argsets[(self._next + i) % count] for i in range(self._calls)]
        self._next = (self._next + self._calls) % count
        function = self._function
        start = time.perf_counter()
        for args in batch:
            function(*args)
        return (time.perf_counter() - start) / self._calls * 1e6


class _CudaSampler:
    """Whole passes over the argument sets as one graph, or call by call where capture fails.

    Outputs are dropped at once, so the graph's pool holds one call's worth of them; all candidates
    thus write to memory that their own last call wrote to.
    """

    def __init__(
        self,
        function: Function,
        argsets: Sequence[Arguments],
        least_us: float,
        stream: torch.cuda.Stream,
        sweep: torch.Tensor,
    ) -> None:
        self._function, self._argsets = function, argsets
        self._stream, self._sweep = stream, sweep
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        for i in range(_WARM_UP_CALLS):
            self._begin.record()
            function(*argsets[i % len(argsets)])
            self._end.record()
        self._end.synchronize()
        long = self._elapsed_us() * len(argsets) >= _LONG_PASS * least_us
        self._passes = 1 if long else math.ceil(_LEAST_CALLS / len(argsets))
        self._graph = self._captured()
        self.sample()
        per_pass = self.sample() * len(argsets)
        most = max(1, _MOST_CALLS // len(argsets))
        passes = min(most, math.ceil(least_us / max(per_pass, 1e-3)))
        if passes > self._passes:
            self._passes = passes
            if self._graph is not None:
                self._graph = self._captured()
            self.sample()

    @property
    def method(self) -> str:
        return "events" if self._graph is None else "graph"

    def sample(self) -> float:
        # Reading over L2 also keeps the device busy while the host enqueues what is timed.
        self._sweep.sum()
        self._begin.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()
        self._end.record()
        self._end.synchronize()
        return self._elapsed_us() / (self._passes * len(self._argsets))

    def _elapsed_us(self) -> float:
        return float(self._begin.elapsed_time(self._end)) * 1e3

    def _run(self) -> None:
        for _ in range(self._passes):
            for args in self._argsets:
                self._function(*args)

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._capturing(graph):
                self._run()
        except Exception:
            # Whatever cannot be captured in it, the candidate has run: it is timed by events. A
            # capture that fails can leave torch's random generator believing that one is under
            # way; one that succeeds sets it right.
            torch.cuda.synchronize()
            with self._capturing(torch.cuda.CUDAGraph()):
                self._sweep[:1].zero_()
            return None
        return graph

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Of this thread's work alone: others may allocate meanwhile, which a global capture forbids
        # them.
        return torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")


def _timing(times: Sequence[float], method: str) -> Timing:
    import statistics  # brings fractions and decimals along, which few processes need

    spread = 0.0
    if len(times) > 1:
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        spread = high - low
    return Timing(statistics.median(times), spread, len(times), method)


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


def _copy_kernel(destination: torch.Tensor, source: torch.Tensor) -> None:
    torch.add(source, 0, out=destination)


def _cuda_device_of(argsets: Sequence[Any]) -> torch.device | None:
    """The device of the first CUDA tensor among the arguments, None if there is none."""
    return next((one.device for one in tensors_in(argsets) if one.is_cuda), None)
