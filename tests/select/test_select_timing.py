from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from gristmill.errors import ArgumentError
from gristmill.select import (
    Timing,
    device_of,
    rotate,
    rotation_count,
    time_copy,
    time_host,
    time_interleaved,
    timing,
)

MB = 1_000_000


def sleeper(seconds: float) -> Any:
    return lambda *args: time.sleep(seconds)


def timed(result: Timing | Exception) -> Timing:
    assert isinstance(result, Timing), result
    return result


def test_slow_and_fast_are_told_apart_and_the_time_is_right() -> None:
    found = time_interleaved({"slow": sleeper(0.002), "fast": sleeper(0.0002)}, [()], samples=5)
    slow, fast = timed(found["slow"]), timed(found["fast"])
    assert slow.us > 3 * fast.us
    # sleep never returns early; how late depends on the machine.
    assert slow.us >= 2000
    assert (slow.method, slow.samples) == ("wall", 5)


def test_median_and_interquartile_range(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    durations = iter([1, 1, *(1, 2, 3, 4, 100)])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += next(durations) * 1e-3

    found = timed(time_interleaved({"one": work}, [()], samples=5)["one"])
    assert found.us == pytest.approx(3000)
    assert found.spread_us == pytest.approx(2000)


def test_candidates_take_turns_and_each_rotates_through_the_sets() -> None:
    calls: list[tuple[str, int]] = []

    def recorder(name: str) -> Any:
        def record(index: int) -> None:
            calls.append((name, index))
            time.sleep(0.0005)

        return record

    argsets = [(0,), (1,), (2,)]
    time_interleaved(
        {"a": recorder("a"), "b": recorder("b")}, argsets, samples=4, min_us_per_sample=1.0
    )
    for name in "ab":
        indices = [index for who, index in calls if who == name]
        assert indices == [i % 3 for i in range(len(indices))]
    assert [name for name, _ in calls[-8:]] == ["a", "b"] * 4


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    count = 0

    def quick() -> None:
        nonlocal count
        count += 1

    time_interleaved({"quick": quick}, [()], samples=1, min_us_per_sample=100.0)
    assert count > 20


def test_one_that_raises_does_not_stop_the_others() -> None:
    calls = 0

    def at_once() -> None:
        raise ValueError("cannot")

    def later() -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise RuntimeError("no more")

    candidates = {"at_once": at_once, "later": later, "good": sleeper(0.0001)}
    found = time_interleaved(candidates, [()], samples=7, min_us_per_sample=0.001)
    assert list(found) == list(candidates)
    assert isinstance(found["at_once"], ValueError)
    assert isinstance(found["later"], RuntimeError)
    assert calls == 5
    assert timed(found["good"]).samples == 7


def test_progress_counts_up_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    time_interleaved(
        {"a": sleeper(0), "b": sleeper(0)},
        [()],
        samples=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(number, 6) for number in range(1, 7)]


def test_the_device_is_found_wherever_a_tensor_is() -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 1)

    there = torch.zeros(2).as_subclass(OnCuda)
    for argsets in ([(there,)], [(1, [there])], [({"deep": {"x": (there,)}},)]):
        assert timing._cuda_device_of(argsets) == torch.device("cuda", 1)
    assert timing._cuda_device_of([(torch.zeros(2), {"x": 3}, None)]) is None


def test_no_arguments_or_samples_is_a_mistake() -> None:
    with pytest.raises(ArgumentError, match="got 0 and 11"):
        time_interleaved({"a": sleeper(0)}, [])
    with pytest.raises(ArgumentError, match="got 1 and 0"):
        time_interleaved({"a": sleeper(0)}, [()], samples=0)


@pytest.mark.parametrize(
    ("bytes_per_set", "l2_bytes", "count"),
    [
        (301 * MB, 60 * MB, 1),
        (300 * MB, 60 * MB, 2),
        (299 * MB, 60 * MB, 2),
        (100 * MB, 60 * MB, 3),
        (100 * MB, 126 * MB, 7),
        (50 * MB, 0, 6),
        (1000, 60 * MB, 1024),
        (0, 60 * MB, 1024),
    ],
)
def test_rotation_count(bytes_per_set: int, l2_bytes: int, count: int) -> None:
    assert rotation_count(bytes_per_set, l2_bytes) == count


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24 * 40, dtype=torch.float32).reshape(24, 40)
    return {
        "contiguous": base,
        "strided rows": base[:, :30],
        "transposed": base.t(),
        "expanded": base[:1].expand(7, 40),
        "unaligned": base.flatten()[3:],
        "gaps": base[::2, ::3],
        "scalar": torch.tensor(3.5),
        "empty": base[:0],
        "half": base.half()[:, 1:],
        "bool": base > 100,
    }


@pytest.mark.parametrize("name", list(tensors()))
def test_copies_keep_values_strides_and_alignment_in_memory_of_their_own(name: str) -> None:
    original = tensors()[name]
    copies = [copy for (copy,) in rotate((original,), 3)]
    starts = {tensor.untyped_storage().data_ptr() for tensor in (original, *copies)}
    assert name == "empty" or len(starts) == 4
    for copy in copies:
        assert torch.equal(copy, original)
        assert (copy.stride(), copy.dtype) == (original.stride(), original.dtype)
        if original.numel():
            assert copy.data_ptr() % 64 == original.data_ptr() % 64


def test_writing_to_a_copy_leaves_the_others() -> None:
    original = torch.zeros(3, 4)[:, :2]
    (one,), (two,) = rotate((original,), 2)
    one.fill_(1)
    assert two.sum() == 0
    assert original.sum() == 0


def test_rotate_keeps_other_values_nesting_and_aliases() -> None:
    x = torch.ones(2, requires_grad=True)
    ((a, b, listed, eps, nothing),) = rotate((x, x, [x, 3], 1e-6, None), 1)
    assert a is b is listed[0]
    assert a is not x
    assert a.requires_grad
    assert a.is_leaf
    assert (listed[1], eps, nothing) == (3, 1e-6, None)


def test_time_copy_grows_with_the_bytes() -> None:
    small = time_copy(2_000, "cpu", samples=3, min_us_per_sample=50)
    large = time_copy(64 * MB, "cpu", samples=3, min_us_per_sample=50)
    assert large.us > 5 * small.us


def test_time_host_takes_the_best_block() -> None:
    calls = 0

    def call(argument: str) -> None:
        nonlocal calls
        calls += 1
        # All blocks but the last are slow.
        time.sleep(0.002 if calls <= 3 + 20 else 0.0)

    assert time_host(call, ("x",), blocks=3, calls=10) < 1000
    assert calls == 3 + 30


def cuda_sets(elements: int, count: int) -> list[tuple[torch.Tensor]]:
    return [(torch.rand(elements, device="cuda"),) for _ in range(count)]


@pytest.mark.alone
@pytest.mark.gpu
def test_graph_timing_leaves_out_the_host_and_orders_kernels() -> None:
    sets = cuda_sets(1 << 20, 80)
    candidates = {"one": lambda x: x + 1, "three": lambda x: ((x + 1) * 2).sqrt()}
    found = time_interleaved(candidates, sets)
    one, three = timed(found["one"]), timed(found["three"])
    assert (one.method, three.method) == ("graph", "graph")
    assert three.us > 1.5 * one.us
    tiny = cuda_sets(32, 64)
    graph = timed(time_interleaved({"add": lambda x: x.add_(1)}, tiny)["add"])
    assert graph.us < time_host(lambda x: x.add_(1), tiny[0])


@pytest.mark.alone
@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_by_events_and_harms_nobody() -> None:
    sets = cuda_sets(1 << 16, 4)
    candidates = {
        "before": lambda x: x + 1,
        "reads": lambda x: x.sum().item(),
        "raises": lambda x: x.view(-1, 7),
        "after": lambda x: x + 1,
    }
    found = time_interleaved(candidates, sets, samples=3)
    assert timed(found["before"]).method == "graph"
    assert timed(found["reads"]).method == "events"
    assert isinstance(found["raises"], RuntimeError)
    assert timed(found["after"]).method == "graph"
    assert torch.rand(10, device="cuda").sum().item() > 0
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.alone
@pytest.mark.gpu
def test_memory_is_given_back_and_the_callers_stream_is_left_alone() -> None:
    sets = cuda_sets(1 << 20, 8)
    torch.cuda.synchronize()
    stream, before = torch.cuda.current_stream(), torch.cuda.memory_allocated()
    time_interleaved({"add": lambda x: x + 1}, sets, samples=3)
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.memory_allocated() <= before + MB


@pytest.mark.alone
@pytest.mark.gpu
def test_cold_copies_are_slower_than_cached_ones() -> None:
    """A rotation over several times L2 must reach memory; two small sets must not."""
    nbytes = device_of("cuda").l2_bytes // 8
    half = nbytes // 2
    pair = tuple(torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    hot = timed(time_interleaved({"copy": lambda d, s: d.copy_(s)}, rotate(pair, 2))["copy"])
    cold = time_copy(nbytes, "cuda")
    assert cold.us > 1.1 * hot.us
